"""``ls-edge publish``: model cards, timm's plain model, and the way back, in folders and on a local Hub."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import timm
import torch
import yaml

import ls_edge
from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError, RunError, UsageError
from ls_edge.evaluation.evaluate import aggregate
from ls_edge.report.card import model_card
from ls_edge.training.runs.checkpoint import load_run
from tests.hub import Hub

PLAIN = """
import json, sys, timm, torch
assert not any(name.startswith("ls_edge") for name in sys.modules)
model = timm.create_model(sys.argv[1], pretrained=True).eval()
images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
with torch.inference_mode():
    print(json.dumps(model(images).tolist()))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one epoch in bands, with its evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    ls_edge.train("digits", folder, epochs=1, depth=4, bands="0/1-3")
    result = ls_edge.evaluate(folder, "digits", orders=2, keep=[2], limit=100)
    (folder / "eval.json").write_bytes(msgspec.json.encode(result))
    (folder / "config.yaml").write_text(
        (folder / "config.yaml").read_text().replace("class_order: null", f"class_order: {folder}/classes.txt")
    )
    return folder


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "digits-any-order"
    return ls_edge.publish(run, folder), folder


def logits_of(run, images):
    with torch.inference_mode():
        return load_run(run).view(images).numpy()


def plain_logits(name, **env):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, name],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout))


@pytest.mark.release
def test_timm_alone_has_the_logits_of_the_run(run, published):
    result, folder = published
    assert (result.timm, result.why_not) == (True, "")
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(plain_logits(f"local-dir:{folder}"), logits_of(run, images), atol=1e-5)


def test_the_card_describes_the_model(run, published):
    _, folder = published
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["license"], front["library_name"]) == ("unknown", "timm")
    accuracy = json.loads((run / "eval.json").read_text())
    assert f"| all | {accuracy['sequential']['top1']:.3f} | {accuracy['arbitrary']['top1_mean']:.3f} |" in card
    assert "| 2 of 4 |" in card
    assert "`0/1-3`, 6 orders" in card
    for text in ("million", "GFLOPs per image", "per image", "ls-edge serve", "timm.create_model"):
        assert text in card
    assert "class_order: classes.txt" in (folder / "config.yaml").read_text()
    assert set(os.listdir(folder)) == {"README.md", "config.json", "config.yaml", "eval.json", "model.safetensors"}


def test_a_class_with_a_line_break_stays_in_its_line_of_the_card():
    about = {"model": "x", "method": "y"}
    card = model_card("m", about, Bands.ladder(2)[0], ("a\n# b", "c_<d>"), None, {}, timm_problem=None)
    assert "**Classes** (2): a # b, c\\_\\<d\\>\n" in card


def test_commands_of_the_card_take_a_name_with_spaces_as_one_word():
    about = {"model": "x", "method": "y"}
    card = model_card("my dogs", about, Bands.ladder(2)[0], ("a", "c"), None, {}, timm_problem="")
    (command,) = (line for line in card.splitlines() if line.startswith("ls-edge export"))
    assert shlex.split(command)[2] == "my dogs"
    assert 'create_model("local-dir:my dogs", ' in card


def test_changed_weights_are_refused(published, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "changed"
    shutil.copytree(published[1], folder)
    weights = load_file(folder / "model.safetensors")
    weights["head.bias"] += 1
    with __import__("safetensors").safe_open(folder / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert set(about) == {"format", "model", "method", "bands", "digest"}
    save_file(weights, folder / "model.safetensors", about)
    with pytest.raises(RunError, match="is not the published file"):
        load_run(folder)


def test_a_method_with_parameters_is_read_back_but_not_by_timm_alone(tmp_path):
    ls_edge.train("digits", tmp_path / "run", epochs=0, depth=2, method="position")
    result = ls_edge.publish(tmp_path / "run", tmp_path / "out")
    assert not result.timm
    assert "adds parameters" in result.why_not
    card = (tmp_path / "out" / "README.md").read_text()
    assert "timm alone cannot load it" in card
    assert '"timm"' not in card
    with pytest.raises(Exception, match=r"config\.json"):
        timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert load_run(tmp_path / "out").weights_sha256 == load_run(tmp_path / "run").weights_sha256


def test_foreign_folders_and_broken_evaluations_are_refused(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        ls_edge.publish(run, tmp_path / "full")
    with pytest.raises(UsageError, match="is not a name on the Hub"):
        ls_edge.publish(run, "hf-hub:nobody")
    with pytest.raises(RunError, match="is not a run"):
        ls_edge.publish(tmp_path / "full", tmp_path / "new")
    shutil.copytree(run, tmp_path / "other")
    (tmp_path / "other" / "eval.json").write_text("{}")
    with pytest.raises(DataError, match=r"eval\.json is not a document"):
        ls_edge.publish(tmp_path / "other", tmp_path / "new")


@pytest.mark.release
def test_results_of_other_weights_are_not_published(run, tmp_path):
    ls_edge.train("digits", tmp_path / "run", epochs=0, depth=4, bands="0/1-3")
    shutil.copyfile(run / "eval.json", tmp_path / "run" / "eval.json")
    ls_edge.export(tmp_path / "run", tmp_path / "bundle")
    shutil.copyfile(run / "eval.json", tmp_path / "bundle" / "eval.json")
    for name in ("run", "bundle"):
        with pytest.raises(DataError, match=r"eval\.json has the results of another model or of several"):
            ls_edge.publish(tmp_path / name, tmp_path / "published")
    result = ls_edge.evaluate(tmp_path / "bundle", "digits", orders=2, keep=[2], limit=100, bands="0/1/2-3")
    mean = aggregate([result, result])
    (tmp_path / "bundle" / "eval.json").write_bytes(msgspec.json.encode(mean))
    with pytest.raises(DataError, match=r"eval\.json has the results of another model or of several"):
        ls_edge.publish(tmp_path / "bundle", tmp_path / "published")
    (tmp_path / "bundle" / "eval.json").write_bytes(msgspec.json.encode(result))
    ls_edge.publish(tmp_path / "bundle", tmp_path / "published")
    assert "2 random orders within `0/1/2-3`" in (tmp_path / "published" / "README.md").read_text()


@pytest.fixture(scope="module")
def hub():
    served = Hub()
    yield served
    served.close()


@pytest.mark.release
def test_a_run_survives_a_round_trip_through_a_hub(run, hub, tmp_path, process, published):
    env = hub.environment(tmp_path / "cache")
    done = process("publish", run, "--to", "hf-hub:someone/digits", "--json", timeout=150, **env)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    commit = hub.newest("someone/digits")
    assert found["to"] == f"hf-hub:someone/digits@{commit}"
    assert set(hub.commits["someone/digits"][commit]) == set(found["files"])

    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    kept = tmp_path / "cache" / "ls-edge" / "hub" / "someone--digits"
    (kept / ".half").mkdir(parents=True)  # a download that a power cut ended
    np.testing.assert_allclose(plain_logits("hf-hub:someone/digits", **env), logits_of(run, images), atol=1e-5)

    done = process("export", "hf-hub:someone/digits", "--out", tmp_path / "bundle", "--json", timeout=150, **env)
    assert done.returncode == 0, done.stderr.decode()
    assert [path.name for path in kept.iterdir()] == [commit]
    first = ls_edge.export(published[1], tmp_path / "first")
    assert json.loads(done.stdout)["model_id"] == first.bundle.manifest.model_id

    done = process("publish", tmp_path / "bundle", "--to", "hf-hub:someone/bundle", **env)
    assert done.returncode == 0, done.stderr.decode()
    done = process(
        "run", "--local", 2, "--bundle", "hf-hub:someone/bundle", "--data", "digits", "--limit", 4, "--json", **env
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["bundle_id"] == first.bundle.manifest.bundle_id

    done = process("train", "--data", "digits", "--out", tmp_path / "tuned", "--model", "hf-hub:someone/digits",
                   "--pretrained", "--epochs", 0, **env)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    config = yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())
    assert config["model"]["name"] == f"hf-hub:someone/digits@{commit}"
    assert config["run"]["model"] == "vit_tiny_patch16_224"
    np.testing.assert_allclose(logits_of(tmp_path / "tuned", images), logits_of(run, images), atol=1e-5)

    again = tmp_path / "again"
    done = process("train", "--data", "digits", "--out", again, "--init", "hf-hub:someone/digits", "--epochs", 0, **env)
    assert done.returncode == 0, done.stderr.decode()
    config = yaml.safe_load((again / "config.yaml").read_text())
    assert config["model"]["init"] == f"hf-hub:someone/digits@{commit}"
    np.testing.assert_allclose(logits_of(again, images), logits_of(run, images), atol=1e-6)


def test_a_hub_that_does_not_have_it_is_one_line(hub, tmp_path, process):
    done = process("predict", "--bundle", "hf-hub:someone/missing", "x.png", **hub.environment(tmp_path / "cache"))
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert re.match("ls-edge: cannot reach hf-hub:someone/missing on the Hub: ", line)
    done = process("eval", "hf-hub:someone", "--data", "digits", **hub.environment(tmp_path / "cache"))
    assert done.returncode == 2
    assert b"write hf-hub:OWNER/NAME" in done.stderr
