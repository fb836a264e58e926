"""Build sdist and wheel, check them, and use the wheel in fresh environments: ``make release-check``.

The environment *training* trains and exports; the environment *edge* has what a board installs, and serves the result.
Training takes torch and the other packages from ``.venv``, because they are several GB; with ``--full`` it installs
them. Artifacts are left in ``build/release``.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from ls_edge.version import __version__

ROOT = Path(__file__).parents[1]
DIST = ROOT / "build" / "release"


def run(*words: str | Path, **named: object) -> str:
    """Run a command that has to succeed; return what it printed."""
    print("$", *words, flush=True)  # noqa: T201
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LS_EDGE"))}
    done = subprocess.run([*map(str, words)], text=True, stdout=subprocess.PIPE, env=environment, **named)
    if done.returncode:
        sys.exit(f"{done.stdout}failed with exit code {done.returncode}")
    return done.stdout


def check_version(tag: str | None) -> None:
    """Compare the places that repeat the version with ``ls_edge/version.py``."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.search(r"^## (\S+) \((.*)\)$", changes, re.M)
    if latest is None or latest[1] != __version__:
        sys.exit(f"CHANGELOG.md does not begin with version {__version__}")
    if tag is not None and (tag != f"v{__version__}" or latest[2] == "unreleased"):
        sys.exit(f"tag {tag}: version.py says {__version__}, CHANGELOG.md says {latest[2]}")


def build() -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel; check metadata and contents."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run("env", f"RELEASE_FOLDER={DIST}", sys.executable, "-m", "pytest", "-q", "tests/test_packaging.py", cwd=ROOT)
    return wheel, sdist


def environment(folder: Path, python: str, *wanted: str | Path, borrow: bool = False) -> Path:
    """Create an environment with the wanted packages; return its folder of programs."""
    run(python, "-m", "venv", folder)
    programs = folder / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
    if borrow:
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return programs


def main() -> None:
    """Check the release of this tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="install torch and the rest for training, too")
    parser.add_argument("--tag", help="tag of the release, such as v0.1.0")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the edge environment")
    options = parser.parse_args()
    check_version(options.tag)
    wheel, _ = build()
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        if options.full:
            training = environment(there / "training", sys.executable, f"{wheel}[train,export,cpu]")
        else:
            training = environment(there / "training", sys.executable, "--no-deps", wheel, borrow=True)
        run(training / "ls-edge", "train", "--data", "digits", "--epochs", "1", "--out", "run", cwd=there)
        run(training / "ls-edge", "export", "run", "--out", "bundle", "--per-block", cwd=there)
        edge = environment(there / "edge", options.python, f"{wheel}[cpu]")
        if __version__ not in run(edge / "ls-edge", "--version"):
            sys.exit("the wheel has another version")
        images = ("--data", "digits", "--limit", "50")
        found = run(edge / "ls-edge", "run", "--local", "2", "--bundle", "bundle", *images, "--json", cwd=there)
        if json.loads(found)["answered"] != 50:
            sys.exit(found)
    print(*sorted(path.relative_to(ROOT) for path in DIST.iterdir()), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
