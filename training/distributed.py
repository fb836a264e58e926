"""Several processes that train one model: what ``torchrun`` started, or this process alone.

Gradients are summed by hand after the backward pass, in a few large pieces, and not by
``DistributedDataParallel``: a step runs stem, blocks and head in an order of its own and may leave blocks out, which
its hooks on one forward do not fit. All processes draw the same plan, so the same gradients are missing in all
of them. What that costs is the overlap of communication and computation.

``nccl`` on CUDA, ``gloo`` on the CPU. A process that is gone ends the others after :data:`TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_edge.errors import TrainingStopped, UsageError

TIMEOUT = timedelta(minutes=10)
PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class World:
    """Which of how many processes this one is."""

    rank: int = 0
    size: int = 1
    local: int = 0
    """Which of those on this machine; its CUDA device."""

    @property
    def leads(self) -> bool:
        """Whether it writes the run."""
        return self.rank == 0

    def share(self, batch: int) -> int:
        """Images of a batch for each process; raises :class:`UsageError` where they do not divide."""
        if batch % self.size:
            raise UsageError(
                f"batch size {batch} does not divide among {self.size} processes; use a multiple of {self.size}"
            )
        return batch // self.size

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their mean over the processes."""
        if self.size == 1:
            return
        piece: list[Tensor] = []
        held = 0
        for tensor in tensors:
            piece.append(tensor)
            held += tensor.numel() * tensor.element_size()
            if held >= PIECE_BYTES:
                self._mean(piece)
                piece, held = [], 0
        if piece:
            self._mean(piece)

    def _mean(self, piece: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in piece])
        dist.all_reduce(flat)
        flat /= self.size
        at = 0
        for tensor in piece:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def total(self, values: list[float], device: torch.device) -> list[float]:
        """Sum numbers over the processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=device if device.type == "cuda" else "cpu")
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def same_weights(self, module: nn.Module) -> None:
        """Give all processes those of the first."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in module.state_dict().values():
                    dist.broadcast(tensor, 0)

    def wait(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def joined(wanted: str) -> Iterator[World]:
    """The processes that ``torchrun`` started, joined while the context is open; otherwise this one alone.

    ``wanted`` is the configuration's device. Raises :class:`UsageError` for a CUDA device that is not there and
    :class:`TrainingStopped` where another process is gone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield World()
        return
    world = World(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))
    cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    if cuda:
        if world.local >= torch.cuda.device_count():
            raise UsageError(
                f"process {world.local} has no GPU: {torch.cuda.device_count()} are there; start fewer processes"
            )
        torch.cuda.set_device(world.local)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield world
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise TrainingStopped(f"another process is gone ({first[:200]}); start all of them again") from None
    finally:
        dist.destroy_process_group()
