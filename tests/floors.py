"""Print the lowest version of each package that an installation needs, as requirements, for ``make test-floors``.

All that ``pyproject.toml`` asks for to train, export, analyze, report, publish, run and serve on a CPU, with ``==`` in
the place of ``>=``. Left out are torch and torchvision: they are several GB, and ``make test-floors`` takes those of
``.venv``.
"""

import re
from pathlib import Path

import tomllib

EXTRAS = ("train", "export", "cpu", "metrics", "serve", "report", "analyze", "hub", "camera")
BORROWED = ("torch", "torchvision", "ls-edge")


def floors():
    """Return ``name==version`` for each; what has no lowest version is left out."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]
    found = [re.fullmatch(r"([\w.-]+)(?:\[.*\])?(?:>=([\w.]+))?(?:<.*)?", item) for item in wanted]
    return [f"{match[1]}=={match[2]}" for match in found if match[1] not in BORROWED and match[2]]


if __name__ == "__main__":
    print(*floors(), sep="\n")  # noqa: T201
