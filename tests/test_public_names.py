"""Public names at the top of the package, and a fast ``import ls_edge``."""

import subprocess
import sys

import pytest

import ls_edge
from ls_edge.core import errors

RESULTS = {
    "AnalysisResult", "Answer", "EvaluationResult", "ExportResult", "Published", "SimulationResult",
    "TrainingResult",
}  # fmt: skip
NAMES = {"Arrangement", "Bundle", "Cluster", "Peer", "Source", *RESULTS}
FUNCTIONS = {"analyze", "evaluate", "export", "frames", "publish", "simulate", "train"}
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def test_the_public_names():
    assert set(ls_edge.__all__) == NAMES | FUNCTIONS | ERRORS | {"__version__"}
    assert set(ls_edge.__all__) <= set(dir(ls_edge))


def test_a_name_is_the_class_of_that_name_and_functions_can_be_called():
    for name in NAMES | ERRORS:
        value = getattr(ls_edge, name)
        assert isinstance(value, type)
        assert value is getattr(sys.modules[value.__module__], name)
    assert all(callable(getattr(ls_edge, name)) for name in FUNCTIONS)
    assert ls_edge.export.canonical.OPSET  # a function and a package


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Sink'"):
        _ = ls_edge.Sink


@pytest.mark.processes
def test_the_import_loads_nothing_until_a_name_is_used():
    code = (
        "import sys, ls_edge\n"
        "heavy = {'numpy', 'zmq', 'msgspec', 'yaml', 'click', 'rich', 'PIL', 'onnxruntime', 'torch'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        "ls_edge.UsageError\n"
        "assert not heavy & sys.modules.keys()\n"
        "assert ls_edge.Source.__name__ == 'Source' and 'zmq' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
