"""``--provider``: the execution provider of ONNX Runtime for engines in this process."""

import json

import pytest

from ls_edge.device.profile import load_profile


@pytest.fixture
def calls(bundle, tmp_path):
    """Arguments of the commands that open engines here, without ``--provider``."""
    timing = ("--threads", 1, "--duration", 0.02)
    return {
        "bench": (bundle, *timing, "--json"),
        "profile": (bundle, *timing, "--out", tmp_path / "profile.json", "--name", "here"),
        "run": ("--local", 1, "--bundle", bundle, "--data", "digits", "--limit", 2, "--json"),
    }


def test_engines_use_the_chosen_provider(command, calls, tmp_path):
    code, printed, errors = command("bench", *calls["bench"], "--provider", "cpu")
    assert code == 0, errors
    assert json.loads(printed)["provider"] == "CPUExecutionProvider"
    code, _, errors = command("profile", *calls["profile"], "--provider", "CPUExecutionProvider")
    assert code in (0, 3), errors  # 3 if this machine throttles
    assert load_profile(tmp_path / "profile.json").provider == "CPUExecutionProvider"


@pytest.mark.parametrize("name", ["bench", "profile", "run"])
def test_a_provider_that_onnxruntime_lacks_is_one_line(command, calls, name):
    code, printed, errors = command(name, *calls[name], "--provider", "NoSuchExecutionProvider")
    assert (code, printed) == (1, "")
    assert errors.splitlines()[-1].startswith("ls-edge: NoSuchExecutionProvider is not in this build of onnxruntime")
