"""Checks of a command's arguments that need no heavy package, made before torch is loaded or an hour is spent.

Inputs are checked again where they are used, with the same messages.
"""

from __future__ import annotations

import os
from pathlib import Path

from ls_edge.core.errors import DataError, RunError, UsageError

_CONFIG, _WEIGHTS = "config.yaml", "model.safetensors"
_EXAMPLES = {"--trace": "trace.jsonl", "--report": "report.html", "--trace-events": "events.json"}
_IN_ONE_STEP = ("--report", "--trace-events")
"""Files that are written beside their place and then moved there, so that they are never half of one."""


def check_data(source: str) -> None:
    """Raise :class:`DataError` where ``source`` names neither data that this package has, nor a path that is there."""
    from ls_edge.data.datasets import is_timm_name

    if source != "digits" and not is_timm_name(source) and not Path(source).exists():
        raise DataError(f"{source}: no such folder or tar; check the path, or write 'digits' for the embedded images")


def check_run(folder: Path) -> None:
    """Raise :class:`RunError` where ``folder`` is no finished run."""
    if (folder / "manifest.json").is_file() and not (folder / _CONFIG).is_file():
        raise RunError(f"{folder} is a bundle, no run; give the folder that 'ls-edge train' wrote")
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the folder of a run, which holds {_CONFIG}")
    if not (folder / _CONFIG).is_file():
        raise RunError(
            f"{folder} is no run: it has no {_CONFIG}; make one with 'ls-edge train --data DATA --out {folder}'"
        )
    if not (folder / _WEIGHTS).is_file():
        raise RunError(f"{folder / _WEIGHTS} is missing; copy it from where the run was made, or train again")


def check_training(out: Path, init: str | None, *, pretrained: bool, resume: bool, overwrite: bool) -> None:
    """Raise an error where a training cannot write its run to ``out`` or has nothing to start from."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    if resume:
        if not (out / _CONFIG).is_file():
            raise RunError(f"{out} is no run, so there is nothing to resume; leave --resume out, or check --out")
        return
    if not overwrite and ((out / _CONFIG).exists() or (out / _WEIGHTS).exists()):
        raise RunError(f"{out} holds a run already; go on with --resume, replace it with --overwrite, or name another")
    if init is None:
        return
    if pretrained:
        raise UsageError("--init and --pretrained exclude each other; leave one out")
    if not Path(init).exists():
        raise RunError(f"{init} is neither a run folder nor a file; check --init")
    if Path(init).is_dir() and not (Path(init) / _CONFIG).is_file():
        raise RunError(f"{init} is no run: it has no {_CONFIG}; give a run folder or a checkpoint file")


def check_output(flag: str, path: Path) -> None:
    """Raise :class:`UsageError` where ``path``, given with ``flag``, cannot be written; leaves what is there as it is.

    A device or a pipe is left to the writing itself, since opening a pipe waits for its reader.
    """
    if path.is_dir() or not path.name:
        raise UsageError(f"{flag} {path} is a folder; name a file, for example {path / _EXAMPLES.get(flag, 'out')}")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        return
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            if flag not in _IN_ONE_STEP:
                return
        trial = path.with_name(f".{path.name}.{os.getpid()}.part")
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        trial.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}; give another path") from None
