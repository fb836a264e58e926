"""Train and evaluate every row of a plan with every seed; write a table, and a figure for each data set.

    python examples/paper/reproduce.py examples/paper/digits.yaml --out reproduced

Finished runs in --out are kept, so the same command continues after a kill. It needs the extras train, report and
analyze.
"""

import argparse
import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import yaml
from scipy import stats

import ls_edge
from ls_edge.evaluation.evaluate import Evaluation, aggregate
from ls_edge.evaluation.spread import deviation, holm, plus_minus
from ls_edge.report.charts import accuracy_figure, write_svg


def train(run, source, row, asked, **settings):
    """Train a run, or continue one that was killed."""
    if not (run / "config.yaml").exists():
        changes = [*changes_of(row.get("config", {})), *asked.set]
        ls_edge.train(source, run, config=row.get("recipe"), changes=changes, **settings)
    elif (run / "resume.safetensors").exists():
        ls_edge.train(out=run, resume=True)


def changes_of(config, prefix=""):
    """Yield the settings of a row as values of ``--set``."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from changes_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def evaluate(run, source, keep, asked):
    """Evaluate a run, or read its evaluation."""
    file = run / "eval.json"
    if not file.exists():
        blocks = len(yaml.safe_load((run / "config.yaml").read_text())["run"]["kept"])
        kept = [count for count in keep if count <= blocks]
        result = ls_edge.evaluate(run, source, orders=asked.orders, keep=kept, limit=asked.limit)
        file.write_bytes(msgspec.json.encode(result))
    return msgspec.json.decode(file.read_bytes(), type=Evaluation)


def quantities_of(evaluation):
    """Return the columns of the table for one seed."""
    a, kept = evaluation.arbitrary, evaluation.kept.items()
    found = {
        "trained order": evaluation.sequential.top1,
        "random order": a.top1_mean,
        "deviation over orders": a.top1_std,
        "worst order": a.top1_worst,
        **{f"{count} kept": one.arbitrary for count, one in kept},
        **{f"{count} kept, trained order": one.sequential for count, one in kept},
        "slot predicted": evaluation.position_accuracy,
    }
    return {name: value for name, value in found.items() if value is not None}


def table_of(rows):
    """Return headings and cells: mean ± sample deviation over the seeds of each row."""
    quantities = {name: [quantities_of(seed) for seed in seeds] for name, seeds in rows.items()}
    headings = list(dict.fromkeys(heading for seeds in quantities.values() for heading in seeds[0]))
    lines = []
    for name, seeds in quantities.items():
        cells = [name, str(rows[name][0].settings["blocks"])]
        for heading in headings:
            values = [seed[heading] for seed in seeds if heading in seed]
            cells.append(f"{np.mean(values):.3f} {plus_minus(deviation(values))}".strip() if values else "")
        lines.append(cells)
    return ["row", "blocks", *headings], lines


def comparisons_of(rows):
    """Return headings and cells: paired t-tests over the seeds of all pairs of rows, with Holm's correction."""
    lines = []
    for name in ("trained order", "random order"):
        values = {row: np.array([quantities_of(seed)[name] for seed in seeds]) for row, seeds in rows.items()}
        pairs = [(a, b) for a, b in itertools.combinations(values, 2) if np.ptp(values[a] - values[b])]
        tests = [stats.ttest_rel(values[a], values[b]) for a, b in pairs]
        for (a, b), test, p in zip(pairs, tests, holm([test.pvalue for test in tests]), strict=True):
            low, high = test.confidence_interval()
            difference = float(np.mean(values[a] - values[b]))
            cells = f"{difference:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{test.pvalue:.3f}", f"{p:.3f}"
            lines.append([name, a, b, *cells])
    return ["quantity", "row", "minus", "difference", "95 % CI", "p", "p (Holm)"], lines


def markdown(headings, lines):
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, ["---"] * len(headings), *lines))


def latex(headings, lines):
    """Return a table in LaTeX, for the package booktabs."""
    top, *rest = (" & ".join(cells).replace("_", r"\_").replace("±", r"$\pm$") for cells in (headings, *lines))
    begin = rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}"
    return "\n".join([begin, r"\toprule", rf"{top} \\ \midrule", *(rf"{line} \\" for line in rest),
                      r"\bottomrule", r"\end{tabular}", ""])  # fmt: skip


def main(words=None):
    """Train, evaluate, and write the tables and the figures."""
    parser = argparse.ArgumentParser(description="Train and evaluate every row of a plan with every seed.")
    parser.add_argument("plan", type=Path, help="digits.yaml, cifar10.yaml, paper.yaml, or one like them")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, tables and figures")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=DATA", help="data set of the plan")
    parser.add_argument("--only", action="append", default=[], help="row or data set to select")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--orders", type=int, default=64, help="random orders of all blocks")
    parser.add_argument("--limit", type=int, help="images to evaluate on")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of 'ls-edge train'"
    )
    asked = parser.parse_args(words)
    plan = yaml.safe_load(asked.plan.read_text())
    sources = {**plan["data"], **dict(text.split("=", 1) for text in asked.data)}
    chosen = {
        name: row for name, row in plan["rows"].items() if not asked.only or {name, row["data"]} & set(asked.only)
    }
    for data in dict.fromkeys(row["data"] for row in chosen.values()):
        if not sources.get(data):
            parser.error(f"the plan needs the data set {data}: give --data {data}=DATA")
        source, start = sources[data], plan.get("start", {}).get(data)
        rows = {name: [] for name, row in chosen.items() if row["data"] == data}
        for seed, name in itertools.product(range(asked.seeds), rows):
            first, run = (asked.out / folder / f"seed-{seed}" for folder in (f"start-{data}", name))
            print(f"{name}, seed {seed} of 0 to {asked.seeds - 1}", flush=True)
            if start is not None:
                train(first, source, start, asked, seed=seed)
            train(run, source, chosen[name], asked, seed=seed, init=None if start is None else str(first))
            rows[name].append(evaluate(run, source, plan["keep"], asked))
        tables = [table_of(rows), *([comparisons_of(rows)] if asked.seeds > 1 else [])]
        about = (
            f"{plan['title']}: {data}, mean ± sample deviation over {asked.seeds} seeds, ls-edge {ls_edge.__version__}"
        )
        text = "\n".join([about, *(f"\n{markdown(*table)}" for table in tables)])
        (asked.out / f"table-{data}.md").write_text(text)
        (asked.out / f"table-{data}.tex").write_text(latex(*tables[0]))
        drawn = [
            msgspec.structs.replace(aggregate(seeds), name=name)
            for name, seeds in rows.items()
            if chosen[name].get("figure", True)
        ]
        write_svg(asked.out / f"figure-{data}.svg", accuracy_figure(drawn))
        print(text)


if __name__ == "__main__":
    main()
