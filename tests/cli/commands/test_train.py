"""Curves of a training in TensorBoard, as the library itself reads them."""

import ls_edge

CURVES = {"order/trained", "order/random_mean", "order/random_worst", "kept_1/trained", "kept_1/random"}


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: {event.step: event.value for event in found.Scalars(name)} for name in found.Tags()["scalars"]}


def test_tensorboard_gets_curves_by_order_and_blocks_kept(tmp_path):
    plain = ls_edge.train("digits", tmp_path / "plain", epochs=1, depth=2, method="predict")
    logged = ls_edge.train("digits", tmp_path / "logged", epochs=1, depth=2, method="predict", log="tensorboard")
    assert logged.val_loss == plain.val_loss  # the curves do not change the training
    assert CURVES.isdisjoint(events(tmp_path / "plain"))
    found = events(tmp_path / "logged")
    assert set(found) >= CURVES | {"train_loss", "val_loss", "val_top1"}
    assert found["order/trained"].keys() == {1}
    assert 0 <= found["order/own_slot"][1] <= 1
    assert logged.log == f"tensorboard --logdir {tmp_path / 'logged'}"
    assert str(logged).splitlines()[-1] == f"curves: {logged.log}"
