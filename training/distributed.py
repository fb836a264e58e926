"""Processes started by ``torchrun``: rank, world size, process group, and collectives.

``torch.nn.parallel.DistributedDataParallel`` averages the gradients; this module is for data, validation, and
checkpoints. The backend is ``nccl`` for CUDA tensors (not run on several GPUs yet) and ``gloo`` for others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ls_edge.core.errors import LsEdgeError, TrainingStopped, UsageError

TIMEOUT = timedelta(minutes=10)
"""Timeout of collectives: enough to decode a data set in one process, but short enough to detect a dead process."""


@dataclass(frozen=True)
class DistributedContext:
    """Rank of this process among the processes that train a model, as in ``torch.distributed``."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes on this machine, and index of its CUDA device."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def local_batch_size(self, batch_size: int) -> int:
        """Return each process's share of a batch; raise :class:`UsageError` if shares would be unequal."""
        if batch_size % self.world_size:
            raise UsageError(
                f"batch size {batch_size} does not divide among {self.world_size} processes; use a multiple of "
                f"{self.world_size}"
            )
        return batch_size // self.world_size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes, in place, and return it; all processes must call this method."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    @contextlib.contextmanager
    def one_first(self) -> Iterator[None]:
        """Let one process per machine go first, so that the others find its downloads; all processes must enter."""
        first = self.local_rank == 0
        if not first:
            self.barrier()
        try:
            yield
        finally:
            if first:
                self.barrier()

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        if self.world_size > 1:
            dist.barrier()


def from_environment(device: torch.device) -> DistributedContext:
    """Return the context that ``torchrun`` set, and select this process's GPU.

    Call it before CUDA is used: otherwise, random states or a tensor would open the first GPU in every process, which
    takes several hundred MiB. Raise :class:`UsageError` if the CUDA device does not exist.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        return DistributedContext()
    rank, world_size, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"process {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start fewer processes"
            )
        torch.cuda.set_device(local_rank)
    return DistributedContext(rank, world_size, local_rank)


@contextlib.contextmanager
def process_group(context: DistributedContext, device: torch.device) -> Iterator[None]:
    """Join the process group; raise :class:`TrainingStopped` if another process ends."""
    if context.world_size == 1:
        yield
        return
    try:
        if not dist.is_initialized():  # a second group would read the addresses of the first one from torchrun's store
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        yield
    except LsEdgeError:
        raise
    except (RuntimeError, ValueError) as error:  # a DistError, or from the reducer of DistributedDataParallel
        first = f"{error}\n".splitlines()[0]
        if not isinstance(error, dist.DistError) and not re.search(
            "gloo|nccl|torch.distributed|rendezvous", first, re.I
        ):
            raise
        raise TrainingStopped(f"the processes cannot work together ({first[:200]}); start all of them again") from None
