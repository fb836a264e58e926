"""Print what simulated machines do, an instruction a line: ``python trace.py SEED``; run by ``test_compiled.py``.

Peers are killed, stopped, hung, cut off and drained while requests of all policies run. With the same seed and
``PYTHONHASHSEED`` two runs differ only where the machines do.
"""

import random
import sys

from ls_edge.runtime.fleet.simulation.simulator import SOURCE, Simulation
from ls_edge.runtime.routing import custody
from ls_edge.runtime.routing.neighbours import Limits

BLOCKS = 8
PLACEMENT = {"a": (0, 1, 2, 3), "b": (4, 5, 6, 7), "c": tuple(range(8)), "d": (2, 3, 4, 5)}
POLICIES = ("nearest", "fastest", "random", "sequential", "parallel")


class Written:
    """A machine whose instructions are printed."""

    def __init__(self, name, machine):
        self._name, self._machine = name, machine

    def __getattr__(self, name):
        return getattr(self._machine, name)

    @property
    def __class__(self):
        return type(self._machine)

    def handle_all(self, events, now):
        said = self._machine.handle_all(events, now)
        for instruction in said:
            sys.stdout.write(f"{now:.6f} {self._name} {instruction!r}\n")
        return said


def course(seed):
    rng = random.Random(seed)
    simulation = Simulation(
        PLACEMENT, blocks=BLOCKS, seed=seed, validate=True, turn=0.002 * (seed % 2), max_batch=1 + seed % 3,
        limits=Limits(credits=4),
    )  # fmt: skip
    for process in simulation.processes.values():
        process.machine = Written(process.name, process.machine)
    simulation.run(0.3)
    for _ in range(80):
        for _ in range(rng.randrange(4)):
            simulation.submit(policy=rng.choice(POLICIES), max_skips=rng.randrange(3), budget=rng.choice((0.2, 2.0)))
        simulation.run(rng.random() * 0.05)
        name = rng.choice(list(PLACEMENT))
        process = simulation.processes[name]
        match rng.randrange(8):
            case 0 if process.alive and rng.random() < 0.5:
                simulation.kill(name)
            case 1 if process.alive:
                simulation.stop(name)
                simulation.run(rng.random())
                simulation.cont(name)
            case 2:
                simulation.hang_engine(name, hangs=rng.random() < 0.5)
            case 3 if rng.random() < 0.4:
                simulation.cut(name, SOURCE)
            case 4:
                simulation.restore(name, SOURCE)
            case 5 if not process.alive:
                simulation.restart(name)
                process = simulation.processes[name]
                process.machine = Written(name, process.machine)
            case 6 if rng.random() < 0.1:
                simulation.drain(name)
    simulation.settle()
    for number, found in simulation.outcomes.items():
        sys.stdout.write(f"{number} {found!r}\n")


if __name__ == "__main__":
    sys.stderr.write(f"{custody.__file__}\n")
    course(int(sys.argv[1]))
