"""Colours and style sheets, in light and dark.

Blocks take their colours from one ramp that grows lighter from the first block to the last, so a trained order
reads as a gradient and a shuffled one as a patchwork, with any kind of colour vision; their numbers stand beside
the colours. Stages of a request follow Okabe and Ito's palette for colour-blind readers, muted a little.
"""

from __future__ import annotations

from typing import NamedTuple

_RAMP = ((0x3B, 0x4A, 0x94), (0x2F, 0x78, 0xAE), (0x2B, 0x9C, 0x98), (0x68, 0xB8, 0x6E), (0xD8, 0xC2, 0x4A))


class Stage(NamedTuple):
    """One kind of work that a request's time goes to."""

    name: str
    css: str
    meaning: str


STAGES = (
    Stage("stem", "s-stem", "patch embedding, on the source"),
    Stage("wire", "s-wire", "between two processes"),
    Stage("queue", "s-queue", "waiting for the engine"),
    Stage("codec", "s-codec", "encoding and decoding tokens"),
    Stage("engine", "s-engine", "running blocks"),
    Stage("wait", "s-wait", "waiting for tracks of others"),
    Stage("head", "s-head", "classifier, on the source"),
    Stage("other", "s-other", "waiting for a lost branch, or unexplained"),
)


def block_colour(block: int, blocks: int) -> str:
    """The colour of a block of a model of ``blocks`` blocks, as ``#rrggbb``."""
    place = (len(_RAMP) - 1) * (block / (blocks - 1) if blocks > 1 else 0.4)
    index = min(int(place), len(_RAMP) - 2)
    share = min(place - index, 1.0)
    mixed = (round(a + share * (b - a)) for a, b in zip(_RAMP[index], _RAMP[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ink_on(colour: str) -> str:
    """The class of a text that reads well on ``#rrggbb``: white or near black."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "on white" if luminance < 0.26 else "on black"


_VARIABLES = {
    "bg": ("#fcfcfa", "#14161a"),
    "panel": ("#f4f4f0", "#1c1f25"),
    "ink": ("#1b1f26", "#e8e9ec"),
    "soft": ("#5a626f", "#a3abb8"),
    "rule": ("#e2e2dc", "#2d323b"),
    "axis": ("#b9bcc2", "#4a515d"),
    "accent": ("#2b6ca3", "#6aa9dd"),
    "good": ("#1f7f60", "#56c09a"),
    "warn": ("#9a6200", "#e8b04d"),
    "bad": ("#b8401c", "#f08a66"),
    "shade": ("#f3ddd3", "#37251d"),
    "faint": ("0.5", "0.85"),
    "stem": ("#83bce0", "#83bce0"),
    "wire": ("#e3a13a", "#e3a13a"),
    "queue": ("#c3c7ce", "#656d79"),
    "codec": ("#c47da3", "#c47da3"),
    "engine": ("#2b6ca3", "#4b8fc9"),
    "wait": ("#e4def0", "#3d3850"),
    "head": ("#3a9b7a", "#45ab88"),
    "other": ("#8d6e63", "#a1887f"),
}

FONT = 'Inter,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","Liberation Sans",Arial,sans-serif'


def _variables(column: int) -> str:
    return "".join(f"--{name}:{pair[column]};" for name, pair in _VARIABLES.items())


VARIABLES = (
    f":root{{color-scheme:light dark;{_variables(0)}}}@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
)

CHART = f"""
svg text{{font-family:{FONT};font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}}
svg .tb{{fill:var(--ink);font-weight:600}}svg .ti{{fill:var(--ink)}}svg .ts{{font-size:11px}}
svg .tg{{fill:var(--good)}}svg .tx{{fill:var(--bad)}}svg .on{{font-size:10.5px;font-weight:600}}
.paper{{fill:var(--bg)}}.halo{{stroke:var(--bg);stroke-width:3px;paint-order:stroke;stroke-linejoin:round}}
.ax{{stroke:var(--axis);stroke-width:1}}.gr{{stroke:var(--rule);stroke-width:1}}
.bar{{fill:var(--accent)}}.bar2{{fill:var(--accent);opacity:.28}}.lane{{fill:var(--panel)}}
.mark{{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 3}}.cum{{fill:none;stroke:var(--bad);stroke-width:1.6}}
.p50{{fill:none;stroke:var(--accent);stroke-width:2;stroke-linejoin:round}}.env{{fill:var(--accent);opacity:.16}}
.p95{{fill:none;stroke:var(--accent);stroke-width:1.2;stroke-dasharray:4 3}}
.dot{{fill:var(--accent);opacity:var(--faint)}}.dotw{{fill:var(--wire)}}.dotx{{fill:none;stroke:var(--bad);stroke-width:1.6}}
.evl{{stroke:var(--bad);stroke-width:1.2}}.evb{{stroke:var(--good);stroke-width:1.2}}
.evo{{stroke:var(--axis);stroke-width:1.2;stroke-dasharray:2 3}}
.gone{{fill:var(--shade)}}.win{{fill:none;stroke:var(--ink);stroke-width:1.2}}.ci{{stroke:var(--ink);stroke-width:1.6}}
.pt{{fill:var(--accent);stroke:var(--bg);stroke-width:1.5}}.pt2{{fill:var(--wire);stroke:var(--bg);stroke-width:1.5}}
.cell{{fill:var(--accent)}}.cellx{{fill:var(--wire)}}
.edge{{stroke:var(--bg);stroke-width:.7}}.thin{{stroke:var(--wire);stroke-width:2}}
.s-wait{{stroke:var(--soft);stroke-width:.8;stroke-dasharray:2 2}}
.crit{{fill:none;stroke:var(--ink);stroke-width:2.4;stroke-linejoin:round;stroke-linecap:round}}
.beside{{opacity:.7}}.hollow{{fill:none;stroke:var(--bad);stroke-width:1.2;stroke-dasharray:4 3}}

svg .lit{{fill:var(--bg)}}svg .white{{fill:#fff}}svg .black{{fill:#14181f}}
{"".join(f".o{n}{{opacity:{n / 10:.1f}}}" for n in range(1, 10))}
{"".join(f".{stage.css}{{fill:var(--{stage.name})}}" for stage in STAGES)}
"""

PAGE = f"""
*{{box-sizing:border-box}}html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 {FONT};font-variant-numeric:tabular-nums;
-webkit-font-smoothing:antialiased}}
main{{max-width:928px;margin:0 auto;padding:56px 24px 96px}}
h1{{font-size:34px;line-height:1.15;letter-spacing:-.022em;font-weight:650;margin:0 0 10px;overflow-wrap:anywhere}}
.sec{{font-size:21px;line-height:1.25;letter-spacing:-.012em;font-weight:620;margin:72px 0 4px}}
.sub{{font-size:15px;font-weight:600;margin:28px 0 4px}}
p{{margin:0 0 12px;max-width:68ch}}.lede{{font-size:18px;line-height:1.5;color:var(--soft);overflow-wrap:anywhere}}
.why{{color:var(--soft)}}
.eyebrow{{color:var(--soft);font-size:13px;margin:0 0 14px;letter-spacing:.01em;overflow-wrap:anywhere}}
.cards{{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));margin:36px 0 0;border-top:1px solid var(--rule)}}
.card{{padding:18px 16px 20px 0;border-bottom:1px solid var(--rule)}}
.card dt{{font-size:13px;color:var(--soft)}}.card dd{{margin:0}}
.card .big{{font-size:29px;line-height:1.25;letter-spacing:-.02em;font-weight:620}}
.card .big small{{font-size:16px;font-weight:500;color:var(--soft);letter-spacing:0;margin-left:3px}}
.card .below{{font-size:13px;color:var(--soft)}}
.good{{color:var(--good)}}.warn{{color:var(--warn)}}.bad{{color:var(--bad)}}
figure{{margin:20px 0 0}}svg{{display:block;width:100%;height:auto;max-width:880px;overflow:visible}}
.narrow{{display:none}}
.key{{display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;margin:14px 0 0;list-style:none;font-size:13px;
color:var(--soft)}}.key li{{display:flex;align-items:center;gap:7px}}.key svg{{width:12px;height:12px;flex:none}}
.key b{{color:var(--ink);font-weight:600}}
.scroll{{overflow-x:auto;margin-top:16px}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
th,td{{text-align:left;padding:8px 20px 8px 0;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:break-word}}.long td:last-child{{overflow-wrap:anywhere}}
th{{font-weight:500;color:var(--soft);white-space:nowrap}}td.n,th.n{{text-align:right;white-space:nowrap}}
td:last-child,th:last-child{{padding-right:0}}td:first-child{{min-width:6.5em}}
details{{margin-top:14px;font-size:14px}}summary{{cursor:pointer;color:var(--soft)}}
summary:focus-visible,a:focus-visible{{outline:2px solid var(--accent);outline-offset:3px}}
code{{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;overflow-wrap:anywhere}}
nav{{margin-top:28px;font-size:14px;display:flex;flex-wrap:wrap;gap:4px 20px}}
a{{color:var(--accent);text-decoration:none}}a:hover{{text-decoration:underline}}
.part{{border-top:2px solid var(--ink);margin-top:96px;padding-top:20px}}.part>h2{{margin:0 0 8px;font-size:27px;
line-height:1.2;letter-spacing:-.018em;font-weight:640;overflow-wrap:anywhere}}footer{{margin-top:80px;color:var(--soft);font-size:13px}}
@media (max-width:720px){{main{{padding:32px 16px 64px}}h1{{font-size:26px}}
.lede{{font-size:16.5px}}.sec{{margin-top:56px}}.cards{{grid-template-columns:repeat(2,minmax(0,1fr))}}
.card .big{{font-size:24px}}
.wide{{display:none}}.narrow{{display:block}}th,td{{padding-right:14px}}}}
@media print{{main{{padding:0}}h2{{break-after:avoid}}figure,.card{{break-inside:avoid}}}}
"""
