"""Training for an epoch: plan, loss, gradients, update. Owns the loss module, DDP, the optimiser and the average.

With several processes the loss runs inside ``DistributedDataParallel``, whose hooks average the gradients during the
backward pass. The only waits for a CUDA device are the checks of the loss every :data:`CHECK_EVERY` steps: orders
are Python ints, rates are numbers, losses stay on the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ls_edge.core.bands import Bands
from ls_edge.core.errors import TrainingStopped
from ls_edge.training.config import TrainConfig
from ls_edge.training.data import Batch, Batches
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.methods.base import Method
from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import averages_step, make_averaged_model, make_optimiser, make_schedule
from ls_edge.training.precision import autocast
from ls_edge.training.teacher import Teacher, TeacherCriterion

CHECK_EVERY = 16
"""Steps between checks of the loss, each of which waits for the device; more notice a loss that is NaN later."""


class PlanLoss(nn.Module):
    """The loss of a batch as a module, so that ``DistributedDataParallel`` sees one forward pass a step."""

    def __init__(self, view: BlockView, method: Method, criterion: nn.Module) -> None:
        super().__init__()
        self.view = view
        self.method = method
        self.criterion = criterion

    def forward(self, images: Tensor, targets: Tensor, plan: StepPlan) -> Tensor:
        """The method's loss of images ``[B, 3, H, W]`` with the targets ``[B, ...]`` that the criterion takes."""
        return self.method.loss(self.view, images, targets, plan, self.criterion)


class EpochTrainer:
    """Trains a view for an epoch at a time; the parts that a checkpoint needs are attributes.

    ``normalise`` makes the model's input from pixels (``ls_edge.training.data.normaliser``). The initial weights of all
    processes become those of rank 0. ``bands``: within which the order changes; None is one band. ``teacher``: whose
    answers are imitated (``ls_edge.training.teacher``).
    """

    def __init__(
        self,
        view: BlockView,
        method: Method,
        config: TrainConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        normalise: Callable[[Tensor], Tensor],
        context: DistributedContext,
        bands: Bands | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.view, self.method, self.config = view, method, config
        self.bands = bands or Bands(view.num_blocks)
        self.device, self.dtype, self.normalise, self.context = device, dtype, normalise, context
        self.optimiser = make_optimiser(view, config.optim)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.cost = 0.0
        """Cost so far, in forward passes of the whole model for one image (:meth:`StepPlan.cost`)."""
        self._schedule: Any = None
        self.teacher = teacher
        self._teacher_cost = 0.0 if teacher is None else teacher.flops() / view.work.forward
        self._loss: PlanLoss | DistributedDataParallel = PlanLoss(view, method, self._criterion())
        if context.world_size > 1:
            self._loss = DistributedDataParallel(
                self._loss,
                device_ids=[context.local_rank] if device.type == "cuda" else None,
                find_unused_parameters=True,  # plans may leave blocks out, other ones in each step
            )
        self.averaged = make_averaged_model(view, config.optim)
        if config.compile == "on" or (config.compile == "auto" and device.type == "cuda"):
            view.compile_blocks()

    def _criterion(self) -> nn.Module:
        labels = nn.CrossEntropyLoss(label_smoothing=self.config.optim.smoothing)
        return labels if self.teacher is None else TeacherCriterion(labels, self.config.teacher)

    @property
    def evaluated(self) -> BlockView:
        """The view to validate and to save: the average once there is one, else the view that is trained."""
        if self.averaged is None or not int(self.averaged.n_averaged):
            return self.view
        return cast(BlockView, self.averaged.module)

    def epoch(self, epoch: int, batches: Batches, on_step: Callable[[float | None], None]) -> tuple[float, float, int]:
        """Train; return the mean loss, the last learning rate and the images seen by all processes.

        ``on_step`` is called after each step, with the mean loss so far if it was checked. Raises
        :class:`TrainingStopped` for a loss that is not finite.
        """
        config, view = self.config, self.view
        steps = batches.steps()
        all_steps = config.epochs * steps
        if self._schedule is None:
            self._schedule = make_schedule(self.optimiser, config.optim, all_steps)
        unchecked: list[tuple[int, StepPlan, float, Tensor]] = []
        total, seen, count, rate = 0.0, 0, 0, 0.0
        view.train()
        for index, batch in enumerate(batches.epoch(epoch)):
            step = (epoch - 1) * steps + index
            self._schedule.step_update(step)
            rate = float(self.optimiser.param_groups[0]["lr"])
            plan = self.method.draw(self.bands, config.seed, step)
            loss = self._step(batch, plan)
            if self.averaged is not None and averages_step(config.optim, step, all_steps):
                self.averaged.update_parameters(view)
            images = len(batch[1]) * self.context.world_size
            self.cost += images * (plan.cost(view.work, teacher=self.method.has_teacher) + self._teacher_cost)
            seen += images
            unchecked.append((step, plan, rate, loss))
            if len(unchecked) == CHECK_EVERY or index == steps - 1:
                total += self._check(unchecked)
                count += len(unchecked)
                unchecked.clear()
                on_step(total / count)
            else:
                on_step(None)
        if unchecked:  # fewer batches than steps: some had no image that could be decoded
            total += self._check(unchecked)
            count += len(unchecked)
        return total / max(1, count), rate, seen

    def _step(self, batch: Batch, plan: StepPlan) -> Tensor:
        pixels, labels = batch
        parts = min(self.config.accumulate, len(labels))
        losses: list[Tensor] = []
        self.optimiser.zero_grad(set_to_none=True)
        chunks = list(zip(pixels.chunk(parts), labels.chunk(parts), strict=True))
        for index, (some, some_labels) in enumerate(chunks):
            targets = some_labels.to(self.device, non_blocking=True)
            if self.teacher is not None:
                targets = self.teacher.targets(some, targets)
            with self._no_sync() if index < len(chunks) - 1 else contextlib.nullcontext():
                with autocast(self.device, self.dtype):
                    loss = self._loss(self.normalise(some), targets, plan)
                loss = loss * (len(some_labels) / len(labels)) if parts > 1 else loss
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        if self.config.optim.clip is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.view.parameters(), self.config.optim.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Leave the gradients of this part of a batch to be averaged with those of the last part."""
        return self._loss.no_sync() if isinstance(self._loss, DistributedDataParallel) else contextlib.nullcontext()

    def _check(self, unchecked: list[tuple[int, StepPlan, float, Tensor]]) -> float:
        """Sum of the losses, averaged over the processes, so that all of them stop together."""
        losses = self.context.sum(torch.stack([loss.float() for *_, loss in unchecked])) / self.context.world_size
        values = losses.tolist()
        for (step, plan, rate, _), loss in zip(unchecked, values, strict=True):
            if not math.isfinite(loss):
                raise TrainingStopped(
                    f"the loss is {loss} at step {step}, order {plan.to_json()}, learning rate {rate:.3g}; lower --lr"
                )
        return float(sum(values))
