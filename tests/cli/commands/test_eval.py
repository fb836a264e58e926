"""``ls-edge eval`` of several bundles: each table, document and chart names its bundle."""

import json
import shutil

import msgspec
import pytest

from ls_edge.api.evaluation import check_alike
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.text import distinct_names
from ls_edge.evaluation.evaluate import Arbitrary, Evaluation, SequentialAccuracy
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings
from ls_edge.report.charts import accuracy_figure, spec_of

EVAL = ("--data", "digits", "--limit", 20, "--orders", 2, "--keep", "2", "--threads", 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory, make_bundle):
    """Two bundles whose folders have the same name."""
    top = tmp_path_factory.mktemp("two")
    return [make_bundle(top / name / "bundle", seed=seed) for seed, name in enumerate(("first", "second"))]


def test_every_table_has_a_name_and_one_table_has_all(command, two):
    code, out, err = command("eval", *two, *EVAL)
    assert (code, err.count("evaluate: 13 orders (20/20)")) == (0, 2), err
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines if "images of digits" in line] == ["first/bundle", "second/bundle"]
    rows = [line.split()[0] for line in lines[-4:] if line.strip()]
    assert "first/bundle" in " ".join(rows + lines[-6:])
    for name in ("first/bundle", "second/bundle"):
        assert sum(name in line for line in lines) == 2, out


@pytest.mark.release
def test_blocks_that_share_their_weights_are_named(command, shared_bundle, two):
    code, out, err = command("eval", shared_bundle, *EVAL)
    assert code == 0, err
    assert "blocks 0, 1, 2, 3 are steps of one block" in out
    _, out, _ = command("eval", shared_bundle, *EVAL, "--json")
    document = json.loads(out)
    assert document["settings"]["shared"] == [[0, 1, 2, 3]]
    assert document["arbitrary"]["top1_std"] == 0
    assert document["arbitrary"]["top1_mean"] == document["sequential"]["top1"]
    assert "steps of one block" not in command("eval", two[0], *EVAL)[1]


def test_the_json_names_each_evaluation(command, two):
    code, out, _ = command("eval", *two, two[0], *EVAL, "--json")
    assert code == 0
    document = json.loads(out)
    assert [item["name"] for item in document["evaluations"]] == ["first/bundle", "second/bundle", "first/bundle (2)"]
    assert document["evaluations"][0]["settings"]["of"] == str(two[0])
    code, out, _ = command("eval", two[0], *EVAL, "--device", "cuda", "--precision", "bf16", "--json")
    alone = json.loads(out)
    assert alone["name"] == "bundle"
    assert (alone["settings"]["device"], alone["settings"]["precision"]) == ("auto", "fp32")  # a bundle's own


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_the_figure_names_each_evaluation(command, two, tmp_path):
    code, _, err = command("eval", *two, *EVAL, "--figure", tmp_path / "accuracy.svg")
    assert code == 0, err
    text = (tmp_path / "accuracy.svg").read_text(encoding="utf-8")
    assert ">first/bundle<" in text
    assert ">second/bundle<" in text


def evaluation(name):
    nothing = Arbitrary(top1_mean=0.5, top1_std=0.0, top1_p5=0.5, top1_worst=0.5, orders=1)
    return Evaluation(
        SequentialAccuracy(0.5), nothing, {}, None, 1, settings={"method": "shuffle", "blocks": 4}, name=name
    )


def test_names_that_are_alike_when_shortened_are_numbered():
    long = [evaluation(f"a-very-long-name-{letter}-of-a-bundle") for letter in "xyz"]
    spec = spec_of(accuracy_figure(long))
    assert len({row["name"] for rows in spec["datasets"].values() for row in rows}) == 3


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a", "b"], ["a", "b"]),
        (["x/a/bundle", "x/b/bundle", "c"], ["a/bundle", "b/bundle", "c"]),
        (["a", "./a", "a/"], ["a", "a (2)", "a (3)"]),
        (["p/b", "p/b", "q/b", "q/b"], ["p/b", "p/b (2)", "q/b", "q/b (2)"]),
        (["/x/a/b", "/y/a/b"], ["x/a/b", "y/a/b"]),
        (["/"], ["/"]),
    ],
)
def test_names_are_the_parts_of_paths_that_differ(paths, names):
    assert distinct_names(paths) == names


@pytest.mark.parametrize("extra", [["--figure", "."], ["--keep", "9"]])
def test_a_mistake_is_found_before_the_work(command, two, extra):
    code, out, err = command("eval", two[0], *EVAL, *extra)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_a_fault_of_the_last_bundle_is_found_before_the_first_is_evaluated(command, two, tmp_path):
    shutil.copytree(two[1], tmp_path / "broken")
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    code, _, err = command("eval", two[0], tmp_path / "broken", *EVAL)
    assert code == 1
    assert str(tmp_path / "broken") in err
    assert "evaluate:" not in err


def test_runs_of_different_depth_are_not_averaged(two):
    like = msgspec.structs.replace(
        evaluation(""), settings={"blocks": 6, "bands": [[0, 1, 2, 3, 4, 5]], "of": "runs/deeper"}
    )
    with pytest.raises(
        UsageError, match=r"bundle has 4 blocks in the bands 0-3, and runs/deeper has 6 in the bands 0-5"
    ):
        check_alike(like, two[0], EvaluationOrders(EvaluationSettings(), Bundle.open(two[0]).bands))


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_the_figure_of_freedom_has_a_curve_for_each_evaluation(command, two, tmp_path):
    code, out, err = command("eval", *two, *EVAL, "--freedom", "--figure", tmp_path / "freedom.svg", "--json")
    assert code == 0, err
    first, _ = json.loads(out)["evaluations"]
    assert [step["bands"] for step in first["freedom"]] == [
        [[0], [1], [2], [3]], [[0], [1, 2], [3]], [[0], [1, 2, 3]], [[0, 1, 2, 3]],
    ]  # fmt: skip
    assert [step["allowed"] for step in first["freedom"]] == [1, 2, 6, 24]
    assert first["freedom"][0]["top1_mean"] == first["sequential"]["top1"]
    assert first["freedom"][-1]["top1_mean"] == first["arbitrary"]["top1_mean"]
    drawn = (tmp_path / "freedom.svg").read_text(encoding="utf-8")
    assert all(f">{text}<" in drawn for text in ("first/bundle", "second/bundle", "full", "fixed", "0/1-2/3", "24"))
    code, out, err = command("eval", two[0], *EVAL, "--freedom")
    assert code == 0, err
    assert "24 allowed, its own bands" in out
