"""Accuracy by class, as scikit-learn computes it, and models that only guess."""

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, recall_score

from ls_edge.evaluation.classes import ClassCounts

RNG = np.random.default_rng(0)
LABELS = np.array([0] * 210 + [1] * 12 + [2] * 30)
NAMES = ("good", "defect", "rest", "unseen")


def test_accuracies_are_those_of_scikit_learn():
    answers = np.where(RNG.random(len(LABELS)) < 0.7, LABELS, RNG.integers(0, 3, len(LABELS)))
    counts = ClassCounts.of(LABELS, answers, 4)
    assert counts.top1 == pytest.approx(accuracy_score(LABELS, answers))
    assert counts.balanced == pytest.approx(balanced_accuracy_score(LABELS, answers))
    assert list(counts.by_class(NAMES).values()) == pytest.approx(recall_score(LABELS, answers, average=None).tolist())
    constant = DummyClassifier(strategy="prior").fit(LABELS[:, None], LABELS)
    assert counts.chance == pytest.approx(constant.score(LABELS[:, None], LABELS))
    assert counts.chance_loss == pytest.approx(log_loss(LABELS, constant.predict_proba(LABELS[:, None])))


@pytest.mark.parametrize(
    ("answers", "loss", "guesses", "missed"),
    [
        (np.zeros_like(LABELS), 0.1, True, "no correct answer for 2 classes ('defect', 'rest') in 252 images"),
        (LABELS, 0.1, False, ""),
        (np.where(LABELS == 1, 0, LABELS), 0.1, False, "no correct answer for 1 class ('defect') in 252 images"),
        (RNG.permutation(LABELS), 2.0, True, None),
        (RNG.permutation(LABELS), 0.1, False, None),  # its probabilities tell the classes apart
    ],
)
def test_a_model_of_one_answer_or_at_chance_only_guesses(answers, loss, guesses, missed):
    counts = ClassCounts.of(LABELS, answers, 4)
    assert (counts.is_guess(loss), ClassCounts.of(0 * LABELS, 0 * LABELS, 4).is_guess(loss)) == (guesses, False)
    assert missed is None or counts.missed(NAMES) == missed
