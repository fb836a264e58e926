"""A limit on the processor time of processes, by control groups: a board that is emulated cannot take another's cores.

Needs Linux, root and a control group of processor time that may be divided, version 1 or 2; :func:`reason_to_skip`
says what is missing. Version 2 follows the kernel's documentation (admin-guide/cgroup-v2) and was not run. Groups are
named ``lsedge-``, the process id and a name, and are removed at the end; what a killed run left, the next one removes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ls_edge.core.errors import LinkError

if TYPE_CHECKING:
    from typing_extensions import Self

PERIOD_US = 20_000
"""Time in which a group has its share: a shorter one makes shorter pauses, a longer one fewer."""
NICENESS = -15
"""Of emulated boards where root starts them: lower goes before more of what else runs."""
_LEAST_US = 1000
"""Least quota that Linux takes."""


class QuotaError(LinkError):
    """A control group cannot be made."""


@contextlib.contextmanager
def raised_priority() -> Iterator[bool]:
    """Let this process and those that it starts meanwhile go before others; yields whether that is allowed.

    A board has its cores to itself: what else runs here is not to be in what is measured on one that is emulated.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(before, NICENESS))
    except OSError:  # only root may
        yield False
        return
    try:
        yield True
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def reason_to_skip() -> str:
    """Why the processor time of processes cannot be limited here, or nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "limits on processor time need Linux and root"
    try:
        with CpuQuota(1.0, "try"):
            return ""
    except QuotaError as error:
        return str(error)


class CpuQuota:
    """A control group for each name, whose processes have at most ``cores`` cores together; a context manager."""

    def __init__(self, cores: float, *names: str) -> None:
        self.cores = cores
        self._names = names
        self._groups: dict[str, Path] = {}

    def __enter__(self) -> Self:
        parent, version = _parent()
        quota = max(_LEAST_US, round(self.cores * PERIOD_US))
        try:
            _clear_left_over(parent)
            for name in self._names:
                group = parent / f"lsedge-{os.getpid()}-{name}"
                group.mkdir(exist_ok=True)
                self._groups[name] = group
                if version == 1:
                    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (group / "cpu.cfs_quota_us").write_text(str(quota))
                else:
                    (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError as error:
            self.close()
            raise QuotaError(f"this kernel does not limit processor time for us: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The control groups."""
        return tuple(self._groups.values())

    def add(self, name: str, pid: int) -> None:
        """Put a process, with all its threads and what it starts, into the group of ``name``."""
        (self._groups[name] / "cgroup.procs").write_text(str(pid))

    def seconds_throttled(self, name: str) -> float:
        """How long processes of ``name`` have waited for their share."""
        text = (self._groups[name] / "cpu.stat").read_text()
        found = dict(line.split() for line in text.splitlines())
        return int(found["throttled_time"]) / 1e9 if "throttled_time" in found else int(found["throttled_usec"]) / 1e6

    def close(self) -> None:
        """Remove the groups; their processes have to be gone."""
        for group in self._groups.values():
            with contextlib.suppress(OSError):
                group.rmdir()
        self._groups.clear()


def _parent(proc: Path = Path("/proc")) -> tuple[Path, int]:
    """The control group below which processor time can be divided, and its version.

    In version 2 a group with processes of its own gives none to groups below it, so it is the nearest one above this
    process that does: with systemd a slice, or the root.
    """
    mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
    own = dict(line.split(":", 2)[1:] for line in (proc / "self/cgroup").read_text().splitlines())
    for _, folder, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            named = next((path for names, path in own.items() if "cpu" in names.split(",")), "/")
            return Path(folder + named.rstrip("/")), 1
    for _, folder, kind, *_ in mounts:
        if kind == "cgroup2":
            group = Path(folder + own.get("", "/").rstrip("/"))
            for parent in (group, *group.parents):
                control = parent / "cgroup.subtree_control"
                if parent.is_relative_to(folder) and control.exists() and "cpu" in control.read_text().split():
                    return parent, 2
    raise QuotaError("no control group of this process divides processor time among groups below it")


def _clear_left_over(parent: Path) -> None:
    """Groups of a process that is gone, which was killed before it could remove them."""
    for group in parent.glob("lsedge-*-*"):
        owner = group.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
