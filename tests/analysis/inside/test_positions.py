import torch

from ls_edge.analysis.inside.positions import POSITIONS
from tests.analysis.runs import VIT, measured, opened


def test_embeddings_that_change_with_the_position_are_similar_nearby():
    run = opened("vit_digits", VIT)
    assert abs(measured(run, "positions").correlation) < 0.4
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    waves = torch.cat([torch.cos(places * 0.5), torch.sin(places * 0.5)], dim=1)
    with torch.no_grad():
        run.model.view.model.pos_embed.copy_(torch.nn.functional.pad(waves, (0, 28)))
    result = measured(run, "positions")
    assert result.correlation < -0.9
    distances, cosines = zip(*result.by_distance, strict=True)
    assert distances == (1, 2, 3, 4)
    assert list(cosines) == sorted(cosines, reverse=True)
    assert "close patches have similar embeddings" in POSITIONS.finding(result)
