"""Progress and results of a training, as lines for people."""

from ls_edge.training.progress import Epoch, Reporter

EPOCH = Epoch(
    epoch=1, train_loss=0.5, val_loss=0.25, val_top1=0.75, lr=1e-3, seconds=2.0, images_per_second=1000.4, best=True
)


def test_a_reporter_counts_images_then_steps_of_all_epochs():
    told = []
    reporter = Reporter(print, lambda *step: told.append(step), on_warning=print)
    reporter.begin("reading images", 100)
    reporter.advance()
    reporter.begin("epoch 1/2", 10)
    reporter.advance()
    reporter.advance(0.5)
    reporter.begin("epoch 2/2", 10, done=5)
    assert told == [
        (0, 100, "reading images"),
        (1, 100, "reading images"),
        (0, 10, "epoch 1/2"),
        (1, 10, "epoch 1/2"),
        (2, 10, "epoch 1/2  loss 0.500"),
        (5, 10, "epoch 2/2"),
    ]


def test_an_epoch_is_one_line():
    assert EPOCH.line(20) == "epoch   1/20  train 0.500  validation 0.250  top-1 0.750  1000 images/s  best"
