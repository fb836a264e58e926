"""Progress and results of a training, as lines for people."""

import re

from ls_edge.training.progress import Reporter


def test_a_reporter_counts_images_then_steps_of_all_epochs():
    told = []
    reporter = Reporter(print, lambda *step: told.append(step), on_warning=print)
    reporter.begin("reading images", 100)
    reporter.advance()
    reporter.begin("epoch 1/2", 10)
    reporter.advance()
    reporter.advance(0.5)
    reporter.begin("epoch 2/2", 10, done=5, images=64)
    reporter.advance()
    done, total, text = told.pop()
    assert (done, total, bool(re.fullmatch(r"epoch 2/2  \d+ images/s", text))) == (6, 10, True)
    assert told == [
        (0, 100, "reading images"),
        (1, 100, "reading images"),
        (0, 10, "epoch 1/2"),
        (1, 10, "epoch 1/2"),
        (2, 10, "epoch 1/2  loss 0.500"),
        (5, 10, "epoch 2/2"),
    ]
