"""The processes that ``torchrun`` started: rank, world size, process group and collectives.

Gradients are averaged by ``torch.nn.parallel.DistributedDataParallel`` (``ls_edge.training.epoch_trainer``); here is
what data, validation and checkpoints need besides. The backend is ``nccl`` on CUDA (not run on several GPUs yet) and
``gloo`` on the CPU. If a process is gone the others fail after :data:`TIMEOUT` at the latest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ls_edge.core.errors import LsEdgeError, TrainingStopped, UsageError

TIMEOUT = timedelta(minutes=10)
"""Longest wait in a collective: long enough for one process to decode a data set, short enough to notice a dead one."""


@dataclass(frozen=True)
class DistributedContext:
    """The process among those that train one model, in the terms of ``torch.distributed``."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes on this machine; the index of its CUDA device."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def local_batch_size(self, batch_size: int) -> int:
        """Images of a batch for each process; raises :class:`UsageError` if they do not divide evenly."""
        if batch_size % self.world_size:
            raise UsageError(
                f"batch size {batch_size} does not divide among {self.world_size} processes; use a multiple of "
                f"{self.world_size}"
            )
        return batch_size // self.world_size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, here: bool) -> bool:
        """Whether it is so in one of the processes; every process has to ask."""
        if self.world_size == 1:
            return here
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return bool(self.sum(torch.tensor(float(here), device=device)))

    @contextlib.contextmanager
    def one_first(self) -> Iterator[None]:
        """Let one process of this machine go first, such as to download what the others find; all have to enter."""
        first = self.local_rank == 0
        if not first:
            self.barrier()
        try:
            yield
        finally:
            if first:
                self.barrier()

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world_size > 1:
            dist.barrier()


def select_device(device: str) -> None:
    """Make the GPU of this process of ``torchrun`` its current one, before anything else touches CUDA.

    Whatever comes first (random states, a tensor) would else open the first GPU in every process, at some hundred MiB.
    ``device`` is the configuration's. Raises :class:`UsageError` for a CUDA device that does not exist.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or not _uses_cuda(device):
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start fewer processes"
        )
    torch.cuda.set_device(local_rank)


def _uses_cuda(device: str) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


@contextlib.contextmanager
def process_group(device: str) -> Iterator[DistributedContext]:
    """Join the process group of ``torchrun`` while the context is open; without ``torchrun`` there is no group.

    ``device`` is the configuration's. Raises :class:`UsageError` for a CUDA device that does not exist and
    :class:`TrainingStopped` if another process is gone.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or "RANK" not in os.environ:
        yield DistributedContext()
        return
    context = DistributedContext(int(os.environ["RANK"]), world_size, int(os.environ.get("LOCAL_RANK", "0")))
    cuda = _uses_cuda(device)
    select_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield context
    except LsEdgeError:
        raise
    except RuntimeError as error:  # DistError, and what the reducer of DistributedDataParallel raises
        first = str(error).splitlines()[0]
        if not isinstance(error, dist.DistError) and "gloo" not in first and "nccl" not in first.lower():
            raise
        raise TrainingStopped(f"another process is gone ({first[:200]}); start all of them again") from None
    finally:
        dist.destroy_process_group()
