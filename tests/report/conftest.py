"""A seeded run that never happened: three peers, eight blocks, one peer lost and back."""

import random
from dataclasses import dataclass

import pytest

from ls_edge.core.peer_reports import PeerState, Visit
from ls_edge.core.records import PeerContext, PeerEvent, RequestRecord, RunContext
from ls_edge.evaluation.run_summary import summarize

HOLDINGS = {"board-a": (0, 1, 2, 3), "board-b": (3, 4, 5), "laptop": (5, 6, 7, 0)}
CONCURRENCY = 4
SPEED = {"board-a": 0.62, "board-b": 0.75, "laptop": 0.4}


@dataclass
class Run:
    records: list
    events: list
    context: RunContext

    @property
    def summary(self):
        return summarize(self.records, self.events, self.context)


def us(ms):
    return round(1000 * ms)


def simulate(requests=400, *, seed=0, lost=(0.3, 0.55), quality=0.9):
    """A queueing simulation, request by request: similar enough to a run to draw it."""
    rng = random.Random(seed)
    victim, mean_ms = "board-b", 9.0
    length = requests * mean_ms / CONCURRENCY * 1.6
    down = (lost[0] * length, lost[1] * length) if lost else (float("inf"), float("inf"))
    free = dict.fromkeys(HOLDINGS, 0.0)
    slots = [0.0] * CONCURRENCY
    records = []
    for number in range(requests):
        worker = min(range(CONCURRENCY), key=slots.__getitem__)
        submitted = slots[worker] + rng.uniform(0, 2.0)
        stem = rng.gauss(0.5, 0.03)
        clock = submitted + stem
        remaining = list(range(8))
        order, visits, attempts, late = [], [], 1, 0.0
        while remaining:
            alive = {n: h for n, h in HOLDINGS.items() if n != victim or not down[0] <= clock < down[1]}
            block = next((b for b in remaining if any(b in held for held in alive.values())), None)
            if block is None:
                break
            holder = rng.choice([name for name, held in alive.items() if block in held])
            run = []
            while block in HOLDINGS[holder]:
                run.append(block)
                remaining.remove(block)
                block = remaining[0] if remaining else None
            wire = rng.lognormvariate(-1.0, 0.3)
            engine = len(run) * SPEED[holder] * rng.uniform(0.95, 1.2)
            start = max(clock + wire, free[holder])
            queue = start - clock - wire
            if holder == victim and clock < down[0] <= start + engine:
                attempts, late = 2, 70.0
                remaining = list(run) + remaining
                clock = down[0] + late
                continue
            free[holder] = start + engine
            visits.append(Visit(holder, tuple(run), us(queue), us(engine), us(0.06)))
            clock = start + engine + 0.06
            order += [(b, holder) for b in run]
        skipped = tuple(sorted(remaining))
        back = rng.lognormvariate(-1.0, 0.3)
        head = rng.gauss(0.15, 0.01)
        clock += back + head
        slots[worker] = clock
        label = rng.randrange(10)
        right = rng.random() < quality * (1 - 0.12 * len(skipped))
        failed = len(skipped) > 3
        records.append(
            RequestRecord(
                id=number,
                image=f"{label}/{number:04d}.png",
                label=label,
                prediction=None if failed else label if right else (label + 1) % 10,
                latency_us=us(clock - submitted),
                degraded=bool(skipped) and not failed,
                error="BudgetExceeded: no holder of blocks" if failed else None,
                waves=((tuple(order),),) if order else (),
                skipped=skipped,
                attempts=attempts,
                logits=None,
                submitted_us=us(submitted),
                stem_us=us(stem),
                head_us=us(head),
                visits=tuple(visits),
            )
        )
    events = [PeerEvent(0, name, PeerState.ALIVE) for name in HOLDINGS]
    if lost:
        events += [
            PeerEvent(us(down[0] + 1.3), victim, PeerState.LOST, "the connection was closed"),
            PeerEvent(us(down[1]), victim, PeerState.ALIVE, "warm again"),
        ]
    context = RunContext(
        bundle_id="6f1c8a52" * 8,
        model="vit_digits",
        method="shuffle",
        policy="nearest",
        seed=seed,
        classes=tuple("0123456789"),
        peers={
            name: PeerContext(held, PeerState.ALIVE, "onnx CPUExecutionProvider") for name, held in HOLDINGS.items()
        },
        settings={"concurrency": CONCURRENCY, "budget_ms": 2000, "max_skips": 2, "data": "digits"},
        preprocess_ms=[rng.uniform(0.3, 0.5) for _ in range(min(requests, 1000))],
        wall_s=length / 1000 + 1.2,
    )
    return Run(records, events, context)


@pytest.fixture(scope="session")
def simulated():
    """The simulation itself; call it."""
    return simulate


@pytest.fixture(scope="session")
def run_with_loss():
    """One peer lost and back, some answers degraded."""
    return simulate()


@pytest.fixture(scope="session", autouse=True)
def libraries():
    """Load the JavaScript of reports once; its library keeps threads and descriptors for the process."""
    from ls_edge.report.html import library

    return library()
