"""The table of methods: draws within the bands, settings, weights, and whole trainings."""

import functools

import msgspec
import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.config import TeacherConfig
from ls_edge.training.loop import train
from ls_edge.training.methods.registry import METHODS, make_method
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.trainings import Silent

settings = functools.partial(trainings.settings, epochs=1, lr=1e-3)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A run in trained order."""
    folder = tmp_path_factory.mktemp("start") / "run"
    train(settings(method="sequential"), folder, reporter=Silent())
    return folder


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("bands", ["0/1-4/5-6/7", "0-7"])
def test_every_method_draws_within_the_bands(name, bands):
    bands, method = Bands.from_json(bands), make_method(name, {})
    free = make_method(name, {})
    for step in range(60):
        for item in method.draw(bands, 3, step).groups:
            assert not bands.fault(item)
        blocks = [sorted(item.order) for item in method.draw(bands, 3, step).groups]
        assert blocks == [sorted(item.order) for item in free.draw(Bands(8), 3, step).groups] or name == "anyorder"
    for item in method.validation(bands, 4, 0):
        assert not bands.fault(item)
        assert sorted(item.order) == list(range(8))


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(UsageError, match="unknown method 'shufle'; did you mean 'shuffle'"):
        make_method("shufle", {})
    with pytest.raises(UsageError, match="method shuffle with settings"):
        make_method("shuffle", {"p": 1})
    with pytest.raises(UsageError, match=r"p is 1\.0; it has to be a number from 0 below 1"):
        make_method("layerdrop", {"p": 1.0})
    with pytest.raises(UsageError, match="its settings are groups, tracks"):
        make_method("anyorder", {"group": 3})


@pytest.mark.parametrize("method", ["position", "predict", "layerdrop+shuffle", "anyorder"])
def test_every_method_trains_and_loads_again(start, tmp_path, method):
    teacher = TeacherConfig(model=str(start), kind="soft") if method == "anyorder" else TeacherConfig()
    model = msgspec.structs.replace(settings().model, args={}, init=str(start))
    config = msgspec.structs.replace(settings(method=method), teacher=teacher, model=model)
    train(config, tmp_path / "run", reporter=Silent(), model_named=False)
    run = load_run(tmp_path / "run")
    assert run.record.method == method
    assert run.config.method_args.keys() == set(make_method(method, {}).settings.__struct_fields__)
    assert run.view.needs_slot == (method == "position")
    again = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, init=str(tmp_path / "run")),
                                    epochs=0)  # fmt: skip
    train(again, tmp_path / "again", reporter=Silent(), model_named=False)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert files[0] == files[1]
