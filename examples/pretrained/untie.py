"""Untie a trained ``shared`` model, so that its blocks may become different: ``untie.py SHARED OUT``.

Each block of OUT, a run, begins as a copy of the shared block, and the conditioning by slot stays in common, so any
order gives the answers of SHARED. ``train --init OUT --method untie:Untied`` continues with shuffled orders; Python
has to find this file: ``export PYTHONPATH=examples/pretrained``.
"""

import sys

import msgspec
from torch import nn

from ls_edge.training.methods.paper import Shuffle
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.slots import SlotNorms
from ls_edge.training.models.small_models import build
from ls_edge.training.runs.checkpoint import load_run, save_run


class CommonNorms(SlotNorms):
    """Different blocks with one table of vectors and adapters by slot for all of them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tables = nn.ParameterList([self.tables[0]])
        self.adapters = nn.ModuleList([self.adapters[0]])

    def forward(self, index, tokens, slot, run_block):
        vectors, *matrices = (table[slot] for table in [self.tables[0], *self.adapters[0].tables()])
        return run_block(tokens, vectors.unsqueeze(-2), *matrices)


class Untied(Shuffle):
    """``shuffle`` with the conditioning, learning rate and average of ``shared``."""

    average = "ema"
    timm_rate = 4e-5

    def attach(self, view):
        dim = view.token_spec.dim
        slots = CommonNorms(list(view.blocks), view.branches, dim, 1.0, None, dim // 4)
        view.slots = slots.to(view.device).train(view.training)


def main(source, out):
    run = load_run(source)
    shared = run.view
    (number,) = set(shared.owners)
    record = msgspec.structs.replace(run.record, kept=tuple(range(shared.num_blocks)), method="untie:Untied")
    view = build(record.model, record.model_args, record.kept)
    make_method(record.method, {}).attach(view)
    found, weights = shared.weights(), {}
    for name in view.weights():
        block, _, rest = name.removeprefix("blocks.").partition(".")
        weights[name] = found[f"blocks.{number}.{rest}" if block.isdecimal() else name].clone()
    view.load_weights(weights)
    view.take_method(weights)
    save_run(out, view, msgspec.structs.replace(run.config, method=record.method, method_args={}), record)


if __name__ == "__main__":
    sys.path.insert(0, __file__.rpartition("/")[0])
    main(*sys.argv[1:])
