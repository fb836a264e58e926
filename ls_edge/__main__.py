"""Entry point of ``ls-edge`` and ``python -m ls_edge``: handles signals before all imports."""

from __future__ import annotations

from typing import NoReturn

from ls_edge.cli import interrupts


def main() -> NoReturn:
    """Run the command line of this process."""
    interrupts.install()
    from ls_edge.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
