"""``ls-edge`` with faults of engines: ``python -m tests.faults.peer FILE peer --peers PEERS ...``."""

import sys
from pathlib import Path

from ls_edge.__main__ import main
from ls_edge.runtime.fleet.local_peer import end_with_input
from ls_edge.runtime.peer.peer import Peer
from tests.faults.engines import wrap

if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    open_engines = Peer.open_engines
    Peer.open_engines = lambda *words: wrap(open_engines(*words), path)
    end_with_input()
    main()
