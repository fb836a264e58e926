"""Estimates of a placement by simulation, with the real routing machines and the times of the problem.

The formulas of ``estimates.py`` ignore queues, credits, and that a holder knows only what others report. Here, requests
run in simulated time: one after the other for latency, many at the same time for throughput and energy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ls_edge.core.bands import Bands
from ls_edge.runtime.fleet.planning.estimates import Estimates, battery_h, throughput_of
from ls_edge.runtime.fleet.planning.problem import Objective, Placement, PlanningProblem, holders_of
from ls_edge.runtime.simulator.simulation import SOURCE, Simulation

MOST_DEVICES = 16
"""Largest simulated fleet: all peers exchange their states, so the time grows with the square."""
NO_WORSE = 0.01
"""Relative difference up to which simulated results count as equal: the error of a short simulation."""
_WARM_UP = 5
_ALONE = 16
"""Sequential requests for the latency, after the warm-up; the median of more differs little."""
_TOGETHER = 120
"""Minimum number of requests for the throughput, with at least four per concurrent request. The first and last fifth do
not count, since some devices are idle then."""
_AT_ONCE, _MOST_AT_ONCE = 4, 64
"""Concurrent requests for the source and for each image of each device's batches, and their maximum, which is the
default of a source."""
_CONTROL_S = 0.0002
"""Transfer time of messages without tokens."""
_BUDGET_S = 600.0
_SEED = 0


def simulate_placement(problem: PlanningProblem, placement: Placement, policy: str) -> Estimates:
    """Run requests through a placement; the same problem and placement give the same results."""
    latency = _latency(simulation_of(problem, placement, _SEED), policy)
    sim = simulation_of(problem, placement, _SEED, on_average=True)
    at_once = requests_at_once(problem, placement)
    throughput, answers = _throughput(sim, throughput_of(problem, placement), policy, at_once)
    parts = holders_of(problem, placement)
    used = (device for device in problem.devices if placement.get(device.name))
    times = (one.weight(parts) * one.taken_ms(one.blocks_a_call) / one.blocks_a_call for one in used)
    # A short simulation can exceed the throughput of engines that never wait.
    throughput = min(throughput, sum(1e3 / ms for ms in times if ms > 0) or float("inf"))
    source_ms = problem.source_ms(placement)
    throughput = round(min(throughput, 1e3 / source_ms if source_ms else throughput), 4)
    busy_ms = {SOURCE: source_ms, **{name: 1e3 * seconds / answers for name, seconds in sim.busy.items()}}
    watts = {name: process.watts for name, process in problem.processes.items() if busy_ms.get(name)}
    energy = sum(busy_ms[name] * power for name, power in watts.items() if power is not None)
    return Estimates(
        policy=policy,
        latency_ms=round(latency * 1e3 + source_ms, 4),
        throughput=throughput,
        energy_mj=None if None in watts.values() else round(energy, 4),
        battery_h=battery_h(problem, busy_ms, throughput),
    )


def simulation_of(
    problem: PlanningProblem,
    placement: Placement,
    seed: int,
    *,
    on_average: bool = False,
) -> Simulation:
    """Return the simulation of a placement after all processes have exchanged their states.

    With ``on_average``, engine calls have their mean overhead instead of their median overhead.
    """
    held = {name: blocks for name, blocks in placement.items() if blocks}
    devices = problem.processes
    visits = {name: max(0.0, device.visit_ms - device.runtime_ms) for name, device in devices.items()}

    def transfer(sender: str, to: str) -> float:
        measured = problem.links_ms.get((sender, to))
        if measured is None:
            return (visits[sender] + visits[to]) / 2e3
        return max(0.0, measured / 1e3 - _CONTROL_S)  # measured transfers include the receiver's confirmation

    seconds = {name: devices[name].block_ms / 1e3 for name in held}
    sim = Simulation(
        held,
        blocks=problem.num_blocks,
        seed=seed,
        latency=_CONTROL_S,
        block_seconds=seconds,
        transfers=transfer,
        wire={name: device.wire_ms / 1e3 for name, device in devices.items()},
        max_batch={name: devices[name].max_batch for name in held},
        image_share=problem.image_share,
        logits_share=problem.logits_share,
        engine_seconds=lambda name, parts, images: devices[name].weight(parts) * devices[name].call_ms(images) / 1e3,
        call_seconds={
            name: (device.runtime_mean_ms if on_average else device.runtime_ms) / 1e3
            for name, device in devices.items()
        },
        bands=Bands(problem.num_blocks, tuple(band[0] for band in problem.bands[1:])),
    )
    sim.run(0.4)
    return sim


def _latency(sim: Simulation, policy: str) -> float:
    took: list[float] = []
    for number in range(_WARM_UP + _ALONE):
        began = sim.now
        request = sim.submit(policy=policy, budget=_BUDGET_S)
        sim.settle(_BUDGET_S)
        if number >= _WARM_UP:
            took.append(sim.ended[request] - began)
    return statistics.median(took)


def requests_at_once(problem: PlanningProblem, placement: Placement) -> int:
    """Return the number of concurrent requests that keep all devices of a placement busy."""
    batches = sum(device.max_batch for device in problem.devices if placement.get(device.name))
    return min(_MOST_AT_ONCE, _AT_ONCE * (1 + batches))


def _throughput(sim: Simulation, expected: float, policy: str, at_once: int) -> tuple[float, int]:
    """Return the answers per second with ``at_once`` concurrent requests, and the number of requests.

    New requests are submitted twice in the expected time between two answers.
    """
    most = max(_TOGETHER, 4 * at_once)
    requests: list[int] = []
    for _ in range(_WARM_UP):
        sim.submit(policy=policy, budget=_BUDGET_S)
        sim.settle(_BUDGET_S)
    for name in sim.busy:
        sim.busy[name] = 0.0
    while len(requests) < most or sim.source.rules.requests:
        while len(requests) < most and len(sim.source.rules.requests) < at_once:
            requests.append(sim.submit(policy=policy, budget=_BUDGET_S))
        sim.run(max(0.5 / expected, 1e-5))
    ends = sorted(sim.ended[request] for request in requests)
    low, high = len(ends) // 5, len(ends) - len(ends) // 5 - 1
    return (high - low) / max(ends[high] - ends[low], 1e-9), len(requests)


def best_policy(estimates: Sequence[Estimates], objective: Objective) -> Estimates:
    """Return the results of the best policy for an objective.

    Policies that differ by less than :data:`NO_WORSE` count as equal: the one with the least latency wins, then the one
    with the most throughput.
    """
    best = min(one.value(objective) for one in estimates)
    equal = [one for one in estimates if one.value(objective) <= best + NO_WORSE * abs(best)]
    return min(equal, key=lambda one: (one.value("latency"), one.value("throughput")))
