"""Settings of exports: flags of the command and arguments of the function, each declared once."""

import numpy as np
import pytest

import ls_edge
from ls_edge.cli.commands.export import command
from ls_edge.core.errors import UsageError
from ls_edge.export.settings import ExportSettings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "onxx"}, "engine is 'onxx'; it has to be one of onnx, tensorrt"),
        ({"precision": "fp8"}, "precision is 'fp8'; it has to be one of fp16, fp32, int8"),
        ({"max_batch": 0}, "max_batch is 0; it has to be a whole number from 1 to 65536"),
        ({"max_batch": "8"}, "max_batch is '8'; it has to be a whole number"),
        ({"whole": "no"}, "whole is 'no'; it has to be true or false"),
        ({"maxbatch": 4}, "unknown key 'maxbatch'; did you mean 'max_batch'?"),
        ({"precision": "int8", "engine": "tensorrt"}, "give images with --calibrate DATA"),
    ],
    ids=lambda value: ", ".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_the_function_refuses_a_setting_before_it_reads_the_run(settings, said, tmp_path):
    with pytest.raises(UsageError) as caught:
        ls_edge.export(tmp_path / "missing", tmp_path / "bundle", **settings)
    assert said in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    assert ExportSettings.of({"max_batch": np.int64(4)}).max_batch == 4


def test_the_command_without_options_and_the_function_without_arguments_have_the_same_settings():
    given = command.make_context("export", ["run", "--out", "bundle"]).params
    names = ExportSettings.__struct_fields__
    assert ExportSettings.of({name: given[name] for name in names}) == ExportSettings()
