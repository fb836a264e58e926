"""``python -m ls_edge``."""

from ls_edge.cli import main

if __name__ == "__main__":
    main()
