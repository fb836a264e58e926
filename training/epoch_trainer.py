"""An epoch of training steps: plan, loss, gradients, update.

Nothing here waits for a CUDA device but the look at the loss every :data:`CHECK_EVERY` steps: orders are Python
ints, rates are numbers, losses stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ls_edge.errors import TrainingStopped
from ls_edge.training.averaged_weights import Average
from ls_edge.training.config import TrainConfig
from ls_edge.training.data import Batch, Batches
from ls_edge.training.distributed import World
from ls_edge.training.methods.base import Method
from ls_edge.training.methods.step_plan import Plan
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import learning_rate
from ls_edge.training.precision import autocast

CHECK_EVERY = 16
"""Steps between looks at the loss, each of which waits for the device."""
Pending = list[tuple[int, Plan, float, Tensor]]


class Stepper:
    """Trains a view for an epoch at a time; its parts are the caller's to save."""

    def __init__(
        self,
        view: BlockView,
        method: Method,
        optimiser: torch.optim.Optimizer,
        config: TrainConfig,
        out: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        normalise: Callable[[Tensor], Tensor],
        world: World,
        average: Average | None,
    ) -> None:
        self.view, self.method, self.optimiser, self.config, self.out = view, method, optimiser, config, out
        self.device, self.dtype, self.normalise, self.world, self.average = device, dtype, normalise, world, average
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=config.optim.smoothing)
        self.kept = "the model as it started"
        """What the run folder holds if training stops now."""
        self.cost = 0.0
        """So far, in forward passes of the whole model for one image (:meth:`Plan.cost`)."""

    def epoch(self, epoch: int, batches: Batches, on_step: Callable[[float | None], None]) -> tuple[float, float, int]:
        """Train; mean loss, last learning rate and images seen by all processes.

        Raises :class:`TrainingStopped` for a loss that is no number.
        """
        config, view = self.config, self.view
        steps = batches.steps()
        pending: Pending = []
        total, seen, count, rate = 0.0, 0, 0, 0.0
        view.train()
        for index, batch in enumerate(batches.epoch(epoch)):
            step = (epoch - 1) * steps + index
            rate = learning_rate(config.optim, step, config.epochs * steps)
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            plan = self.method.draw(view.num_blocks, config.seed, step)
            loss = self._step(batch, plan)
            if self.average is not None:
                self.average.update(step, config.epochs * steps)
            images = len(batch[1]) * self.world.size
            self.cost += images * plan.cost(view.num_blocks, teacher=self.method.has_teacher)
            seen += images
            pending.append((step, plan, rate, loss))
            if len(pending) == CHECK_EVERY or index == steps - 1:
                total += self._look(pending)
                count += len(pending)
                pending.clear()
                on_step(total / count)
            else:
                on_step(None)
        if pending:  # fewer batches came than there should be: some had no image that could be read
            total += self._look(pending)
            count += len(pending)
        return total / max(1, count), rate, seen

    def _step(self, batch: Batch, plan: Plan) -> Tensor:
        pixels, labels = batch
        parts = min(self.config.accumulate, len(labels))
        losses: list[Tensor] = []
        self.optimiser.zero_grad(set_to_none=True)
        for some, wanted in zip(pixels.chunk(parts), labels.chunk(parts), strict=True):
            targets = wanted.to(self.device, non_blocking=True)
            with autocast(self.device, self.dtype):
                loss = self.method.loss(self.view, self.normalise(some), targets, plan, self.criterion)
            loss = loss * (len(wanted) / len(labels)) if parts > 1 else loss
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.world.average(p.grad for p in self.view.parameters() if p.grad is not None)
        if self.config.optim.clip is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.view.parameters(), self.config.optim.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _look(self, pending: Pending) -> float:
        """Sum of the losses since the last look, meant over the processes, so that all of them stop together."""
        losses = torch.stack([loss.float() for *_, loss in pending])
        self.world.average([losses])
        found = losses.tolist()
        for (step, plan, rate, _), loss in zip(pending, found, strict=True):
            if not math.isfinite(loss):
                raise TrainingStopped(
                    f"the loss is {loss} at step {step}, order {plan.to_json()}, learning rate {rate:.3g}; lower --lr; "
                    f"{self.out} keeps {self.kept}"
                )
        return float(sum(found))
