import pytest

from ls_edge.engines.measuring import LEAST_RUNS, time_calls


@pytest.mark.parametrize(("duration", "most_runs", "runs"), [(0.05, 1, 1), (0.05, 6, 6), (1e-9, 6, 1)])
def test_calls_run_in_turns_that_change_direction_and_their_first_run_is_not_counted(duration, most_runs, runs):
    called = []
    first, second = time_calls([lambda: called.append("a"), lambda: called.append("b")], duration, most_runs=most_runs)
    rounds = len(first) // runs
    assert rounds * runs == len(first) == len(second) >= LEAST_RUNS
    turn = [letter * (runs + (most_runs > 1)) for letter in "ab"]
    assert "".join(called) == "ab" + "".join("".join(turn[:: -1 if n % 2 else 1]) for n in range(rounds))
