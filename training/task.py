"""Training step with everything that it needs: loss, DDP, optimizer, compiled blocks, and averaged weights.

With several processes, the loss runs inside ``DistributedDataParallel``, whose hooks average the gradients during the
backward pass. Training waits for a CUDA device only to check the loss every :data:`CHECK_EVERY` steps: orders and
rates are Python numbers, and losses stay on the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import timm.layers
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ls_edge.core.bands import Bands
from ls_edge.core.errors import TrainingStopped, UsageError
from ls_edge.core.text import counted
from ls_edge.training.config import RunRecord, TrainConfig
from ls_edge.training.data import Batch, Batches, normalizer
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.methods.base import Method
from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import make_averaged_model, make_optimizer, make_schedule
from ls_edge.training.precision import autocast, choose_precision
from ls_edge.training.runs.teacher import Teacher, TeacherCriterion
from ls_edge.training.validation import Validation, validate

_layers: Any = timm.layers  # it re-exports its classes without declaring them
_RANDOM = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, _layers.DropPath, _layers.PatchDropout)
_SHARES = ("p", "dropout", "drop_prob", "prob")
"""Attributes of these modules that are the share to drop."""
CHECK_EVERY = 16
"""Steps between checks of the loss, which wait for the device; a larger number detects NaN later."""


class PlanLoss(nn.Module):
    """A method's loss as a module, so that ``DistributedDataParallel`` sees one forward pass per step."""

    def __init__(self, view: BlockView, method: Method, criterion: nn.Module) -> None:
        super().__init__()
        self.view = view
        self.method = method
        self.criterion = criterion

    def forward(self, images: Tensor, targets: Tensor, plan: StepPlan) -> Tensor:
        """Return the loss of images ``[B, 3, H, W]`` with targets ``[B, ...]`` for the criterion."""
        return self.method.loss(self.view, images, targets, plan, self.criterion)


class TrainingTask:
    """A view in training: :meth:`epoch` trains it, :meth:`validate` measures it, :meth:`state` returns its state.

    All processes start with the weights of rank 0.
    """

    def __init__(
        self,
        view: BlockView,
        method: Method,
        config: TrainConfig,
        record: RunRecord,
        bands: Bands,
        context: DistributedContext,
        teacher: Teacher | None,
    ) -> None:
        """Prepare to train ``view`` on its device; raise :class:`UsageError` if parts would change the result."""
        self.view, self.method, self.config, self.bands, self.context = view, method, config, bands, context
        device = view.device
        self.dtype = choose_precision(config.precision, device)
        self.normalize = normalizer(record.image, device)
        self._optimizer = make_optimizer(view, config.optim)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self._teacher = teacher
        why = whole_batch_only(view)
        if why and max(config.accumulate, context.world_size) > 1:
            raise UsageError(
                f"{record.model}: {why}, so {counted(config.accumulate, 'part')} in "
                f"{counted(context.world_size, 'process', 'processes')} would not give the result of one; to save "
                "memory, recompute activations (--set checkpointing=true)"
            )
        criterion: nn.Module = nn.CrossEntropyLoss(label_smoothing=config.optim.smoothing)
        if teacher is not None:
            criterion = TeacherCriterion(criterion, config.teacher)
        self._loss: PlanLoss | DistributedDataParallel = PlanLoss(view, method, criterion)
        if context.world_size > 1:
            self._loss = DistributedDataParallel(
                self._loss,
                device_ids=[context.local_rank] if device.type == "cuda" else None,
                find_unused_parameters=True,  # plans may leave out different blocks in each step
            )
        self._averaged = make_averaged_model(view, config.optim) if config.epochs else None
        if config.compile is True:
            view.compile_blocks()

    @property
    def evaluated(self) -> BlockView:
        """View to validate and to save: the average once there is one, otherwise the view in training."""
        if self._averaged is None or not int(self._averaged.n_averaged):
            return self.view
        return cast(BlockView, self._averaged.module)

    def epoch(self, epoch: int, batches: Batches, on_step: Callable[[float | None], None]) -> tuple[float, float, int]:
        """Train an epoch; return mean loss, last learning rate, and number of images over all processes.

        ``on_step`` is called after each step, with the mean loss so far if it was checked. Raise
        :class:`TrainingStopped` if the loss is not finite.
        """
        config = self.config
        steps = batches.steps()
        schedule = make_schedule(self._optimizer, config.optim, config.epochs * steps)
        unchecked: list[tuple[int, StepPlan, float, Tensor]] = []
        losses: list[float] = []
        seen, rate = 0, 0.0
        self.view.train()
        for step, batch in enumerate(batches.epoch(epoch), (epoch - 1) * steps):
            total = int(self.context.sum(torch.tensor(len(batch.labels))))
            if not total:  # no image of the batch can be decoded
                on_step(None)
                continue
            schedule.step_update(step)
            rate = float(self._optimizer.param_groups[0]["lr"])
            plan = self.method.draw(self.bands, config.seed, step, step / (config.epochs * steps))
            loss = self._step(batch, plan, total)
            if self._averaged is not None:
                self._averaged.update_parameters(self.view)
            seen += total
            unchecked.append((step, plan, rate, loss))
            if len(unchecked) == CHECK_EVERY or step == epoch * steps - 1:
                losses += self._check(unchecked)
                unchecked.clear()
                on_step(sum(losses) / len(losses))
            else:
                on_step(None)
        if unchecked:
            losses += self._check(unchecked)
        if not seen:
            raise batches.all_unreadable()
        return sum(losses) / len(losses), rate, seen

    def _step(self, batch: Batch, plan: StepPlan, total: int) -> Tensor:
        """Return this process's part of the mean loss of ``total`` images, times the number of processes."""
        pixels, labels, places = batch
        if not places:  # a black image without a weight takes part in what all processes do together
            pixels, labels, places = pixels.new_zeros(1, *pixels.shape[1:]), labels.new_zeros(1), (0,)
        losses: list[Tensor] = []
        self._optimizer.zero_grad(set_to_none=True)
        chunks = torch.arange(len(places)).chunk(min(self.config.accumulate, len(places)))
        for index, rows in enumerate(chunks):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            targets = labels[part].to(self.view.device, non_blocking=True)
            if self._teacher is not None:
                targets = self._teacher.targets(pixels[part], targets)
            with contextlib.ExitStack() as stack:
                if isinstance(self._loss, DistributedDataParallel) and index < len(chunks) - 1:
                    stack.enter_context(self._loss.no_sync())  # the last part averages the gradients of all parts
                with autocast(self.view.device, self.dtype):
                    loss = self._loss(self.normalize(pixels[part]), targets, replace(plan, places=places[part]))
                loss = loss * (min(len(rows), len(batch.places)) * self.context.world_size / total)
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        if self.config.optim.clip is not None:
            self.scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.view.parameters(), self.config.optim.clip)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _check(self, unchecked: list[tuple[int, StepPlan, float, Tensor]]) -> list[float]:
        """Return the losses averaged over the processes, so that all processes stop at the same step."""
        losses = self.context.sum(torch.stack([loss.float() for *_, loss in unchecked])) / self.context.world_size
        values: list[float] = losses.tolist()
        for (step, plan, rate, _), loss in zip(unchecked, values, strict=True):
            if not math.isfinite(loss):
                raise TrainingStopped(
                    f"the loss is {loss} at step {step}, order {plan.to_json()}, learning rate {rate:.3g}; lower --lr"
                )
        return values

    def validate(self, batches: Batches) -> Validation:
        """Return the results of the method's arrangements."""
        arrangements = self.method.validation(self.bands, self.config.validation_orders, self.config.seed)
        return validate(self.evaluated, arrangements, batches, self.normalize, self.dtype, self.context)

    def imitated(self) -> str:
        """Return a digest of the weights that training imitates."""
        digest = hashlib.sha256()
        for model in (self.method.teacher, None if self._teacher is None else self._teacher.model):
            for value in () if model is None else model.state_dict().values():
                digest.update(value.cpu().contiguous().numpy())
        return digest.hexdigest()

    def state(self) -> dict[str, Tensor]:
        """Return weights, the optimizer's moments, and averaged weights by name."""
        moments = {
            f"{index}.{key}": value
            for index, state in self._optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }
        average = {} if self._averaged is None else self._averaged.state_dict()
        parts = {"model": self.view.weights(), "optimizer": moments, "average": average}
        return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load a result of :meth:`state`; raise :class:`ModelError` or RuntimeError if it does not fit."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}}
        for name, value in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        self.view.load_weights(parts["model"])
        if self._averaged is not None:
            self._averaged.load_state_dict(parts["average"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in parts["optimizer"].items():
            index, _, key = name.partition(".")
            moments.setdefault(int(index), {})[key] = value
        if moments:
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


def whole_batch_only(view: nn.Module) -> str:
    """Return why a model needs all images of a batch at once, or an empty string."""
    for module in view.modules():
        name = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name} normalizes by the images of a batch"
        if isinstance(module, _RANDOM) and any(getattr(module, key, 0.0) for key in _SHARES):
            return f"{name} draws random numbers for a batch (rates in model.args, or method_args.dropout)"
    return ""
