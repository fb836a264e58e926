"""Invalid settings and arguments of a source are errors that name the value and what is allowed."""

import contextlib

import numpy as np
import pytest

from ls_edge.cli.main import main
from ls_edge.core.errors import UsageError
from ls_edge.core.validation import show_value
from ls_edge.runtime.source.source import Source


@pytest.fixture
def alone(tiny_bundle, write_peers):
    """Open a source whose peers do not exist."""
    file = write_peers({"a": range(6)})
    with contextlib.ExitStack() as opened:
        yield lambda **settings: opened.enter_context(Source.open(file, tiny_bundle, **settings))


NONSENSE = [
    ("budget_ms", [float("nan"), float("inf"), 0, -1, 600_001, 10**400, "500", None, True], "above 0 to 600000"),
    ("max_skips", [-1, 7, 1.5, float("nan"), "2", True], "0 to"),
    ("max_inflight", [0, -1, 1.5, float("inf"), "64", None], "from 1 to"),
    ("threads", [0, -2, 2.0, float("nan"), 10**9], "from 1 to"),
    ("waves", [0, -1, 1.5, float("nan"), "2"], "from 1 to"),
    ("seed", [1.5, float("nan"), "0", 2**63, None], "whole number"),
    ("audit", [-0.1, 1.1, float("nan"), "0.5", True], "from 0 to 1"),
    ("policy", ["newest"], "did you mean 'nearest'"),
    ("policy", [3, None, ["nearest"]], "policy"),
    ("concurrency", [4], "known here: policy, budget_ms, max_skips"),
    ("name", [3, "a b", ""], "name"),
]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [(key, value, allowed) for key, values, allowed in NONSENSE for value in values],
    ids=lambda value: str(value)[:20],
)
def test_invalid_settings_are_a_usage_error(tiny_bundle, write_peers, key, value, allowed):
    with pytest.raises(UsageError) as raised:
        Source.open(write_peers({"a": range(6)}), tiny_bundle, **{key: value})
    message = str(raised.value)
    assert key in message
    assert allowed in message
    assert show_value(value) in message or repr(value) in message or key == "concurrency"
    assert "\n" not in message


@pytest.mark.parametrize(
    ("what", "value"), [("peers", None), ("peers", 5), ("peers", b"x"), ("bundle", 5), ("bundle", b"x")]
)
def test_objects_that_are_not_paths_are_a_usage_error(tiny_bundle, write_peers, what, value):
    given = {"peers": write_peers({"a": range(6)}), "bundle": tiny_bundle, what: value}
    with pytest.raises(UsageError, match=f"{what} must be a path"):
        Source.open(given["peers"], given["bundle"])


def test_numpy_scalars_are_accepted_as_numbers(alone):
    settings = alone(
        budget_ms=np.float32(250),
        max_skips=np.int64(2),
        seed=np.int32(-5),
        audit=np.float32(0.5),
    ).settings
    assert [type(v) for v in (settings.budget_ms, settings.max_skips, settings.seed, settings.audit)] == [
        float, int, int, float,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [{"budget_ms": value} for value in (float("nan"), float("inf"), 0, -5, 700_000, "1", True)]
    + [{"label": value} for value in ("cat", 1.5, True, 2**64)]
    + [{"name": value} for value in (None, 5, b"a.jpg")],
    ids=str,
)
def test_invalid_arguments_of_submit_are_a_usage_error(alone, images, arguments):
    source = alone()
    ((key, value),) = arguments.items()
    with pytest.raises(UsageError) as raised:
        source.submit(images(1)[0], **arguments)
    assert key in str(raised.value)
    assert repr(value) in str(raised.value)
    assert source.submit(images(1)[0], budget_ms=20).exception(20).record.id == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--budget-ms", "nan"), ("--budget-ms", "600001"), ("--audit", "nan"),
     ("--max-skips", "7"), ("--seed", str(2**63))],
)  # fmt: skip
def test_invalid_flags_of_run_are_one_line(tiny_bundle, write_peers, capsys, flag, value):
    peers = str(write_peers({"a": range(6)}))
    arguments = ["--peers", peers, "--bundle", str(tiny_bundle), "--data", "digits", "--wait", "0", flag, value]
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ls-edge: ")
    assert flag in line or flag.strip("-").replace("-", "_") in line
    assert value in line


def test_steps_of_a_shared_block_do_not_run_in_parallel(shared_bundle, write_peers):
    with pytest.raises(UsageError, match=r"steps of one shared block .* policy parallel cannot run them in parallel"):
        Source.open(write_peers({"a": [0, 1, 2, 3]}), shared_bundle, policy="parallel")
