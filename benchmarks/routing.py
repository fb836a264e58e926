"""CPU time of the routing machines, by requests in flight and policy, without sockets, codecs and engines.

A source and three peers run in simulated time (``ls_edge.runtime.simulator``). The CPU time of the thread is measured
around every call of a machine: for events, for a STATE, and for the time of the next check. The least time of several
rounds counts, since other load only adds to it. The counts show how routing scales; they should not grow with the
requests in flight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from benchmarks.common import median, new_table
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.peer_rules import PeerRules
from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.simulator.simulation import SOURCE, Process, Simulation

if TYPE_CHECKING:
    from rich.console import Console

IN_FLIGHT = (1, 8, 64)
PEERS = ("p0", "p1", "p2")
BLOCKS = 6
LATENCY_S, BLOCK_S = 0.0002, 0.0005
"""Measured with the digits model on the loopback."""
PLACEMENTS = {
    "parts": {name: (2 * at, 2 * at + 1) for at, name in enumerate(PEERS)},
    "all": {name: tuple(range(BLOCKS)) for name in PEERS},
}
CASES = (
    ("parts", "nearest"),
    ("parts", "fastest"),
    ("all", "fastest"),
    ("all", "parallel"),
)
_STEP_S = 0.0001
"""Simulated seconds between two looks at the answers."""
_MOST_S = 600.0
"""Simulated seconds after which a run fails."""


def run(quick: bool) -> dict[str, Any]:
    """Measure every case with 1, 8 and 64 requests in flight."""
    answers, rounds = (128, 1) if quick else (500, 5)
    rows = []
    for placement, policy in CASES:
        for count in IN_FLIGHT:
            found = [_measure(placement, policy, count, answers) for _ in range(rounds)]
            rows.append({
                "placement": placement, "policy": policy, "in_flight": count,
                **{key: round((min if "us" in key else median)([one[key] for one in found]), 3) for key in found[0]},
            })  # fmt: skip
    return {"blocks": BLOCKS, "peers": len(PEERS), "answers": answers, "rounds": rounds, "rows": rows}


class _Meter:
    """CPU time, calls and events of machines."""

    def __init__(self) -> None:
        self.cpu_ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.events = 0

    def attach(self, process: Process, who: str) -> None:
        """Measure the machine of a process from now on."""
        process.machine = cast("Machine[Any]", _MeteredMachine(process.machine, self, who))

    def measured(self, call: Callable[..., Any], who: str, name: str) -> Callable[..., Any]:
        key = f"{who} {name}"

        def measured(*arguments: Any) -> Any:
            started = time.thread_time_ns()
            result = call(*arguments)
            self.cpu_ns[key] += time.thread_time_ns() - started
            self.calls[key] += 1
            self.events += len(arguments[0]) if name == "handle_all" else 0
            return result

        return measured


class _MeteredMachine:
    """A machine whose calls are measured."""

    def __init__(self, machine: Machine[Any], meter: _Meter, who: str) -> None:
        self._machine = machine
        for name in ("handle_all", "next_check"):
            setattr(self, name, meter.measured(getattr(machine, name), who, name))
        if isinstance(machine.rules, PeerRules):
            vars(machine.rules)["state"] = meter.measured(machine.rules.state, who, "state")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def _measure(placement: str, policy: str, in_flight: int, answers: int) -> dict[str, float]:
    """Keep ``in_flight`` requests in flight until ``answers`` were answered."""
    simulation = Simulation(PLACEMENTS[placement], blocks=BLOCKS, latency=LATENCY_S, block_seconds=BLOCK_S)
    simulation.run(0.5)
    _submit(simulation, policy, in_flight, max(8, in_flight))  # warm-up: values that are computed once are not measured
    meter = _Meter()
    machines = {name: process.machine for name, process in simulation.processes.items()}
    for name, process in simulation.processes.items():
        meter.attach(process, "source" if name == SOURCE else "peer")
    before = sum(machine.decisions.count for machine in machines.values())
    began = simulation.now
    _submit(simulation, policy, in_flight, answers)
    decisions = sum(machine.decisions.count for machine in machines.values()) - before
    us = {key: value / 1e3 for key, value in meter.cpu_ns.items()}
    return {
        "cpu_us_an_event": (us["source handle_all"] + us["peer handle_all"]) / meter.events,
        "events_an_answer": meter.events / answers,
        "decisions_an_answer": decisions / answers,
        "source_us_an_answer": sum(value for key, value in us.items() if key.startswith("source")) / answers,
        "peers_us_an_answer": sum(value for key, value in us.items() if key.startswith("peer")) / answers,
        "states_an_answer": meter.calls["peer state"] / answers,
        "simulated_answers_a_second": answers / (simulation.now - began),
    }


def _submit(simulation: Simulation, policy: str, in_flight: int, answers: int) -> None:
    numbers: list[int] = []
    until = simulation.now + _MOST_S
    while len(numbers) < answers or simulation.source.rules.requests:
        while len(numbers) < answers and len(simulation.source.rules.requests) < in_flight:
            numbers.append(simulation.submit(policy=policy, budget=60.0))
        simulation.run(_STEP_S)
        assert simulation.now < until, "requests do not end"
    _require_answers(simulation, numbers)


def _require_answers(simulation: Simulation, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert all(isinstance(outcome, Complete) for outcome in simulation.outcomes[number]), simulation.outcomes[
            number
        ]


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    title = (
        f"routing alone: {document['peers']} peers with a part of {document['blocks']} blocks each, or all of them; "
        "results per answer"
    )
    table = new_table(title, ("", "in flight", "us per event", "events", "decisions", "STATE", "us source", "us peers"))
    for row in document["rows"]:
        table.add_row(
            f"{row['placement']}, {row['policy']}", str(row["in_flight"]), f"{row['cpu_us_an_event']:.1f}",
            f"{row['events_an_answer']:.1f}", f"{row['decisions_an_answer']:.1f}", f"{row['states_an_answer']:.2f}",
            f"{row['source_us_an_answer']:.0f}", f"{row['peers_us_an_answer']:.0f}",
        )  # fmt: skip
    console.print(table)
