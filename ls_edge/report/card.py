"""Model card of a run or a bundle on the Hub."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ls_edge.core.bands import Bands
from ls_edge.core.errors import printable
from ls_edge.core.text import counted, format_bands
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.spread import plus_minus
from ls_edge.version import __version__


def model_card(
    name: str,
    about: Mapping[str, Any],
    bands: Bands,
    classes: Sequence[str],
    evaluation: Evaluation | None,
    cost: Mapping[str, str],
    timm_problem: str | None,
) -> str:
    """Return the card as Markdown.

    ``about`` contains the model and the method, ``cost`` descriptions of the cost of an image. ``timm_problem`` is the
    reason why timm cannot load the plain model; it is empty if timm can, and None for a bundle.
    """
    front = {
        "license": "unknown",
        "library_name": "timm" if timm_problem == "" else "ls-edge",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "ls-edge", "layershuffle", *(["timm"] if timm_problem == "" else [])],
    }
    num_blocks = counted(bands.num_blocks, "block")
    listed = re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", ", ".join(map(printable, classes[:20])))
    more = f" and {len(classes) - 20} more" if len(classes) > 20 else ""
    parts = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()) + "---",
        f"# {name}",
        f"A `{about['model']}` with {num_blocks}, trained by the method `{about['method']}` of ls-edge {__version__}. "
        "Its blocks can run on several devices, in other orders, and with some left out, at the accuracy below.",
        f"**Classes** ({len(classes)}): {listed}{more}",
        "## Accuracy\n\n" + _accuracy(evaluation, bands.num_blocks),
        "## Orders and bands\n\n"
        + (
            "All blocks may run in any order; how accurate that is depends on the method."
            if bands.is_one
            else f"Blocks may be reordered within these bands: `{bands}`, {bands.num_orders:,} orders."
        ),
        "## Cost\n\n" + "".join(f"- {key}: {value}\n" for key, value in cost.items()).rstrip(),
        "## Use\n\n" + _use(name, timm_problem),
        "## License\n\nNot stated by the author; ask before you use it.",
    ]
    return "\n\n".join(parts) + "\n"


def _accuracy(evaluation: Evaluation | None, num_blocks: int) -> str:
    if evaluation is None:
        return "Not measured. `ls-edge eval` measures it in trained order, in random orders, and with blocks missing."
    a = evaluation.arbitrary
    spread = ", ".join(filter(None, (plus_minus(a.top1_std), f"worst {a.top1_worst:.3f}")))
    rows = [("all", evaluation.sequential.top1, a.top1_mean, spread)]
    rows += [(f"{keep} of {num_blocks}", kept.sequential, kept.arbitrary, "") for keep, kept in evaluation.kept.items()]
    table = "".join(f"| {kept} | {one:.3f} | {other:.3f} | {more} |\n" for kept, one, other, more in rows)
    s = evaluation.settings
    different, known = int(s.get("different", evaluation.images)), int(s.get("trained_on", 0))
    warning = f" The model was trained on {known:,} of these images, so this says little." if known else ""
    return (
        f"Top-1 on {counted(different, 'different image')} of `{s.get('data', 'unknown data')}`, with "
        f"{counted(a.orders, 'random order')} within `{format_bands(s['bands'])}`.{warning}\n\n"
        "| blocks | trained order | random order | between orders (± sample deviation) |\n| --- | --- | --- | --- |\n"
        + table.rstrip()
    )


def _use(name: str, timm_problem: str | None) -> str:
    source = f"hf-hub:{name}" if name.count("/") == 1 else name
    where = shlex.quote(source)
    if timm_problem is None:
        return (
            f"```bash\nls-edge run --local 3 --bundle {where} --data photos\n"
            f"ls-edge peer --peers peers.yaml --name orin-0 --bundle {where}\n"
            f"ls-edge serve --peers peers.yaml --bundle {where}\n```"
        )
    text = (
        f"```bash\nls-edge export {where} --out bundle --per-block\n"
        "ls-edge run --local 3 --bundle bundle --data photos\n"
        "ls-edge peer --peers peers.yaml --name orin-0 --bundle bundle\n"
        "ls-edge serve --peers peers.yaml --bundle bundle\n```\n\n"
    )
    if timm_problem:
        return f"{text}timm alone cannot load it: {timm_problem}."
    address = json.dumps(source if source.startswith("hf-hub:") else f"local-dir:{source}")
    return (
        f"{text}The plain model, in trained order, with timm alone:\n\n"
        f"```python\nimport timm\n\nmodel = timm.create_model({address}, pretrained=True).eval()\n```"
    )
