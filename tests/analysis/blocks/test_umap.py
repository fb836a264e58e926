import pytest

from tests.analysis.models import Layers, analyzed


@pytest.mark.release  # numba compiles for half a minute, on a loaded machine for minutes
@pytest.mark.timeout(900)
@pytest.mark.leaks_ok  # tqdm's monitor lives on
def test_a_map_separates_slots_that_leave_a_mark():
    pytest.importorskip("umap", exc_type=ImportError)

    def maps(mark):
        return analyzed(Layers(mark=mark), "umap", count=120).umap

    own, logits, every = maps(12.0)
    assert (own.of, logits.of) == ("tokens after block 2", "logits after block 2")
    assert set(own.blocks) == {2}
    assert set(every.blocks) == set(range(4))
    assert own.neighbors > 0.9
    assert len(own.points) == 120
    assert maps(12.0) == [own, logits, every]
    assert maps(0.0)[0].neighbors < 0.6
