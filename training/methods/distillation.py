"""Losses that compare a student with a teacher.

``hard`` is the recipe of DeiT (arXiv 2012.12877), which CaiT (arXiv 2103.17239) adopts: the cross-entropy with the
class that the teacher predicts. ``soft`` is Hinton's (arXiv 1503.02531). If a model has a second classifier for
distillation, as DeiT does, the mean of its two classifiers learns both.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from ls_edge.training.config import TeacherConfig


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the Kullback-Leibler divergence from the teacher, times the squared temperature."""
    scaled = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(teacher_logits.float() / temperature, dim=-1)
    return functional.kl_div(scaled, target, log_target=True, reduction="batchmean") * temperature**2


class TeacherCriterion(nn.Module):
    """Weighted loss of labels and teacher, for targets from :meth:`.teacher.Teacher.targets`."""

    def __init__(self, labels: nn.Module, config: TeacherConfig) -> None:
        super().__init__()
        self.labels = labels
        self.config = config

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return ``(1 - weight) * labels + weight * teacher`` for logits ``[B, C]``."""
        answers = targets[:, 1:]
        if self.config.kind == "hard":
            taught = functional.cross_entropy(logits, answers.argmax(dim=1))
        else:
            taught = soft_cross_entropy(logits, answers, self.config.temperature)
        own: Tensor = self.labels(logits, targets[:, 0].long())
        return (1 - self.config.weight) * own + self.config.weight * taught
