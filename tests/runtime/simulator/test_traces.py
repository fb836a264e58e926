"""Recorded losses: read from files, and replayed in simulated time."""

import random
from pathlib import Path

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.runtime.simulator.churn import Churn, ChurnProcess, read_losses
from ls_edge.runtime.simulator.simulation import Simulation
from ls_edge.runtime.simulator.traces import Trace

CSV = """# three losses
device,time,state
b,1000,up
a,1004,down
a,1007,up
b,1008,stop
b,1009,down
b,1010,up
a,1020,up
"""


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def run(text, name="trace.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return run


def test_a_csv_is_read_in_the_order_of_time(write):
    trace = Trace.read(write(CSV))
    assert trace.devices == (
        ((0.0, "up"), (8.0, "stop"), (9.0, "kill"), (10.0, "up")),
        ((0.0, "up"), (4.0, "kill"), (7.0, "up")),
    )
    assert (trace.seconds, trace.down) == (20.0, pytest.approx((1 + 1 + 3) / 3))
    assert read_losses([str(write(CSV)), "up=1m,down=1s"]) == (trace, Churn(60.0, 1.0))


def test_a_csv_of_a_spreadsheet_may_have_quotes_and_capitals(write):
    quoted = "".join(",".join(f'"{one}"' for one in line.split(",")) + "\r\n" for line in CSV.upper().splitlines()[1:])
    assert Trace.read(write(quoted)).devices == Trace.read(write(CSV)).devices
    assert len(Trace.read(write('"a, left",1,down\n"a, left",9,up\n')).devices) == 1


def test_an_event_trace_of_the_failure_trace_archive_is_read(write):
    lines = ["# event_id component_id node_id platform_id node_name event_type event_start_time event_stop_time"]
    for node, available, start, end in (("n1", 1, 50, 80), ("n1", 0, 80, 90), ("n2", 1, 60, 150), ("n1", 1, 90, 150)):
        lines.append(f"1\t2\t3\t4\t{node}\t{available}\t{start}\t{end}\tNULL")
    trace = Trace.read(write("\n".join(lines), "event_trace.tab"))
    assert trace.devices == (
        ((0.0, "up"), (30.0, "kill"), (40.0, "up")),
        ((0.0, "kill"), (10.0, "up")),
    )
    assert trace.down == 10.0, "the end of the trace is no loss"


def test_events_that_follow_each_other_may_have_the_same_state_in_any_order_of_lines(write):
    rows = [f"1\t2\t3\t4\tn1\t{up}\t{at}\t{at + 10}" for at, up in ((0, 1), (10, 0), (20, 0), (30, 1), (40, 1))]
    for lines in (rows, rows[::-1]):
        (changes,) = Trace.read(write("\n".join(lines), "event_trace.tab")).devices
        assert changes == ((0.0, "up"), (10.0, "kill"), (30.0, "up"))


@pytest.mark.parametrize(
    ("events", "changes"),
    [
        ([(0, 0, 60), (0, 30, 90), (1, 90, 100)], ((0.0, "kill"), (90.0, "up"))),
        ([(1, 0, 60), (1, 10, 20), (0, 60, 80)], ((0.0, "up"), (60.0, "kill"), (80.0, "up"))),
        ([(1, 0, 100), (0, 60, 80)], ((0.0, "up"), (60.0, "kill"), (80.0, "up"))),
        ([(0, 0, 10), (0, 30, 40)], ((0.0, "kill"), (10.0, "up"), (30.0, "kill"), (40.0, "up"))),
    ],
    ids=["down", "up", "down while up", "apart"],
)
def test_events_of_the_same_state_that_overlap_are_one(write, events, changes):
    lines = [f"1\t2\t3\t4\tn1\t{up}\t{start}\t{end}" for up, start, end in [*events, (1, 100, 100)]]
    assert Trace.read(write("\n".join(lines), "event_trace.tab")).devices[0] == changes


def test_of_several_lines_with_the_same_time_the_last_one_counts(write):
    assert Trace.read(write("a,0,up\na,5,up\na,5,down\na,9,up\n")).devices[0][1] == (5.0, "kill")
    assert Trace.read(write("a,0,up\na,5,down\na,5,up\na,9,up\n")).devices == (((0.0, "up"),),)


def test_only_a_header_is_left_out(write):
    assert len(Trace.read(write("Device; time; state\ndevice,1,up\ndevice-2,4,down\n")).devices) == 2


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("a,0,up\na,100,up\n", 0),
        ("a,0,up\na,90,down\na,95,up\na,100,down\n", 2),
        ("1\t2\t3\t4\ta\t1\t0\t90\n1\t2\t3\t4\ta\t1\t95\t100\n", 2),
        ("a,0,up\na,90,down\na,95,up\na,100,up\n", 2),
        ("a,0,down\na,10,up\na,90,down\na,100,down\n", 3),
    ],
    ids=["always up", "down from the end on", "events up to the end", "up at both ends", "down at both ends"],
)
def test_the_beginning_after_the_end_is_no_loss(write, text, losses):
    sim = Simulation({"x": (0,)}, blocks=1)
    churn = ChurnProcess(sim, [Trace.read(write(text))], ["x"], random.Random(0))
    sim.run(205.0)
    assert sum(churn.losses.values()) == losses


def test_devices_are_lost_when_they_were(write):
    sim = Simulation({"x": (0,), "y": (0,), "idle": ()}, blocks=1)
    churn = ChurnProcess(sim, [Trace.read(write(CSV))], list("xy"), random.Random(0))
    seen = {}
    for _ in range(270):
        seen[round(sim.now + 0.05, 2)] = dict(churn.down)
        sim.run(0.1)
    assert not seen[3.95]
    assert seen[4.15] == {"y": "kill"}
    assert not seen[7.15]
    assert seen[8.55] == {"x": "stop"}
    assert seen[9.55] == {"x": "kill"}
    assert not seen[10.55]
    assert not seen[23.95]
    assert seen[24.15] == {"y": "kill"}, "after the end comes the beginning"


def test_further_sites_begin_at_other_times_and_devices(write):
    trace = Trace.read(write(CSV))

    def begins(site):
        lines = trace.timelines(3, site, random.Random(site))
        return [[next(line) for _ in range(3)] for line in lines]

    first, other = begins(0), begins(1)
    assert first[0] == [(0.0, "up"), (8.0, "stop"), (9.0, "kill")]
    assert first[2] != first[0], "a device of the trace twice at a site is lost at different times"
    assert other[:2] != first[:2]
    assert all(at >= 0 for line in other for at, _ in line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,1,up\na,2,broken\n", ":2: 'a,2,broken' is not device,time,state; times are seconds, states up"),
        ("a,1\n", ":1: 'a,1' is not"),
        ("a,soon,up\n", ":1: 'a,soon,up' is not"),
        ("a,nan,up\n", "is not device,time,state"),
        ("1\t2\t3\t4\ta\t1\t600\t0\n", "is not device,time,state"),
        (",1,up\n", ":1: ',1,up' is not device,time,state"),
        ("a\tb\n", "is not device,time,state"),
        ("a,1,up\nb,1,down\n", "has no two times a millisecond apart"),
        ("a,1,up\na,1.0005,down\n", "has no two times a millisecond apart"),
        ("", "has no two times a millisecond apart"),
    ],
)
def test_unusable_traces_are_one_line(write, text, message):
    with pytest.raises(UsageError) as caught:
        Trace.read(write(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_trace_is_one_line():
    with pytest.raises(UsageError, match=r"--churn none\.csv: cannot be read"):
        read_losses(["none.csv"])


def test_the_shipped_example_is_a_week_of_four_boards():
    trace = Trace.read(Path(__file__).parents[3] / "examples" / "traces" / "home.csv")
    assert (len(trace.devices), trace.seconds) == (4, 7 * 86400.0)
    assert {state for device in trace.devices for _, state in device} == {"up", "kill", "stop"}
