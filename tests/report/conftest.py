"""A seeded run that never happened: three peers, eight blocks, one peer lost and back."""

import random
from dataclasses import dataclass

import pytest

from ls_edge.core.records import PeerContext, PeerEvent, PeerState, RequestRecord, RunContext, TrackSpan, Visit
from ls_edge.evaluation.run_summary import summarize

HOLDINGS = {"board-a": (0, 1, 2, 3), "board-b": (3, 4, 5), "laptop": (5, 6, 7, 0)}
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


def simulate(
    requests=400, *, seed=0, policy="nearest", lost=(0.3, 0.55), concurrency=4, holdings=None, quality=0.9, gap_ms=2.0
):
    """A queueing simulation, request by request: similar enough to a run to draw it."""
    rng = random.Random(seed)
    holdings = HOLDINGS if holdings is None else holdings
    blocks = sorted({block for held in holdings.values() for block in held})
    victim = list(holdings)[1] if len(holdings) > 1 else None
    mean_ms = 9.0
    length = requests * mean_ms / concurrency * 1.6
    down = (lost[0] * length, lost[1] * length) if lost and victim else (float("inf"), float("inf"))
    free = dict.fromkeys(holdings, 0.0)
    slots = [0.0] * concurrency
    records = []
    for number in range(requests):
        worker = min(range(concurrency), key=slots.__getitem__)
        submitted = slots[worker] + rng.uniform(0, gap_ms)
        stem = rng.gauss(0.5, 0.03)
        clock = submitted + stem
        remaining = list(blocks)
        if policy == "random":
            rng.shuffle(remaining)
        order, visits, attempts, late = [], [], 1, 0.0
        while remaining:
            alive = {n: h for n, h in holdings.items() if n != victim or not down[0] <= clock < down[1]}
            block = next((b for b in remaining if any(b in held for held in alive.values())), None)
            if block is None:
                break
            holder = rng.choice([name for name, held in alive.items() if block in held])
            run = []
            while block in holdings[holder]:
                run.append(block)
                remaining.remove(block)
                block = remaining[0] if remaining else None
            wire = rng.lognormvariate(-1.0, 0.3)
            engine = len(run) * SPEED.get(holder, 0.5) * rng.uniform(0.95, 1.2)
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
                duplicates=int(attempts > 1 and rng.random() < 0.3),
            )
        )
    events = [PeerEvent(0, name, PeerState.ALIVE) for name in holdings]
    if lost and victim:
        events += [
            PeerEvent(us(down[0] + 1.3), victim, PeerState.LOST, "the connection was closed"),
            PeerEvent(us(down[1]), victim, PeerState.ALIVE, "warm again"),
        ]
    context = RunContext(
        bundle_id="6f1c8a52" * 8,
        model="vit_digits",
        method="shuffle",
        policy=policy,
        seed=seed,
        classes=10,
        peers={
            name: PeerContext(held, PeerState.ALIVE, "onnx CPUExecutionProvider") for name, held in holdings.items()
        },
        settings={"concurrency": concurrency, "budget_ms": 2000, "max_skips": len(blocks) // 4, "data": "digits"},
        preprocess_ms=[rng.uniform(0.3, 0.5) for _ in range(min(requests, 1000))],
        wall_s=length / 1000 + 1.2,
    )
    return Run(records, events, context)


def wave_of(number, joiner, shares, begin, rng, blocks, trouble):
    """Tracks of a wave that begins at ``begin``: each holder runs its share of ``blocks``; ``trouble`` befalls one."""
    left = list(blocks)
    tracks, joined = [], []
    for holder, count in shares.items():
        mine, left = tuple(left[:count]), left[count:]
        engine = len(mine) * SPEED[holder] * rng.uniform(0.97, 1.15)
        queue, codec, way = rng.uniform(0, 0.1), 0.05, 0.0 if holder == joiner else rng.uniform(0.3, 0.6)
        end = begin + engine + queue + codec + way
        why = trouble.get(holder, "")
        if why == "no gain" or not mine:
            tracks.append(TrackSpan(number, holder, (), us(begin), us(begin), 2400, why="no gain"))
            left = [*mine, *left]
        elif why:
            tracks.append(TrackSpan(number, holder, (), us(begin), us(begin) + 5000, 2000, why=why))
            left = [*left, *mine]
        else:
            expected = len(mine) * SPEED[holder] + (0.4 if holder != joiner else 0.0)
            tracks.append(TrackSpan(number, holder, mine, *map(us, (begin, end, expected, queue, engine, codec))))
            joined.append(tuple((block, holder) for block in mine))
    return tracks, tuple(joined), left


def simulate_waves(requests=120, *, seed=0, wave_blocks=4, gain=True):
    """Requests one at a time, each joined by board-a in waves of at most ``wave_blocks`` blocks."""
    rng = random.Random(seed)
    records, clock = [], 0.0
    for request in range(requests):
        stem, head, wire = 0.5, 0.15, rng.uniform(0.6, 0.9)
        now, number, left = 0.1, 0, list(range(8))
        tracks, waves = [], []
        while left:
            trouble = {} if gain else {"board-b": "no gain", "laptop": "no gain"}
            if number == 0 and request % 40 == 7:
                trouble["laptop"] = "lost"
            if number == 1 and request % 40 == 9:
                trouble["board-b"] = "late"
            if request % 6 == 3:
                trouble["board-b"] = "no gain"
            shares = {"board-a": wave_blocks if not gain else 1, "board-b": 1, "laptop": 2}
            made, joined, rest = wave_of(number, "board-a", shares, now, rng, left[:wave_blocks], trouble)
            left = rest + left[wave_blocks:]
            tracks += made
            waves.append(joined)
            now = max(track.end_us for track in made) / 1000 + 0.05
            number += 1
        own = [track for track in tracks if track.holder == "board-a"]
        engine, queue = sum(track.engine_us for track in own), sum(track.queue_us for track in own) + 50
        codec = sum(track.codec_us for track in own) + 50 * (number + 1)
        visit = Visit(
            "board-a", tuple(block for track in own for block in track.blocks), queue, engine, codec,
            max(0, us(now) - engine - queue - codec), tuple(tracks),
        )  # fmt: skip
        latency = us(stem + head + wire) + visit.total_us
        label = rng.randrange(10)
        records.append(
            RequestRecord(
                id=request,
                image=f"{label}/{request:04d}.png",
                label=label,
                prediction=label,
                latency_us=latency,
                degraded=False,
                error=None,
                skipped=(),
                attempts=1,
                logits=None,
                submitted_us=us(clock),
                stem_us=us(stem),
                waves=tuple(waves),
                head_us=us(head),
                visits=(visit,),
            )
        )
        clock += latency / 1000 + 0.3
    held = tuple(range(8))
    peers = {name: PeerContext(held, PeerState.ALIVE, "onnx CPUExecutionProvider") for name in SPEED}
    context = RunContext(model="vit_digits", policy="parallel", classes=10, peers=peers, settings={"concurrency": 1})
    return Run(records, [PeerEvent(0, name, PeerState.ALIVE) for name in SPEED], context)


@pytest.fixture(scope="session")
def simulated_waves():
    """The simulation of waves of tracks; call it."""
    return simulate_waves


@pytest.fixture(scope="session")
def run_in_waves():
    """Waves of up to three tracks, some of them lost, late or not given."""
    return simulate_waves()


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
