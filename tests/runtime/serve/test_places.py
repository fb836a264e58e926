"""Places for requests that are worked on, and the queue: who is next, and who waits in vain."""

import asyncio
import time

import pytest

from ls_edge.runtime.serve.places import Places
from ls_edge.runtime.serve.replies import Refusal


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 30))


def later(seconds):
    return time.monotonic() + seconds


async def waiting(places, count):
    while places.waiting != count:
        await asyncio.sleep(0)


def test_request_beyond_places_and_queue_is_refused():
    async def scenario():
        places = Places(2, 1)
        await places.take(later(30))
        await places.take(later(30))
        third = asyncio.ensure_future(places.take(later(30)))
        await waiting(places, 1)
        with pytest.raises(Refusal, match=r"the limit of images is reached \(2 being answered, 1 waiting\)") as caught:
            await places.take(later(30))
        assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
        places.give_back()
        await third
        assert places.waiting == 0

    run(scenario())


def test_refused_clients_return_one_after_the_other():
    async def scenario():
        places = Places(2, 3)
        for used_s in (10.0,) * 50:
            await places.take(later(1))
            places.give_back(used_s, is_answered=True)

        tasks = [asyncio.ensure_future(places.take(later(100))) for _ in range(5)]
        await waiting(places, 3)
        told = []
        for _ in range(5):
            with pytest.raises(Refusal) as caught:
                await places.take(later(100))
            told.append(caught.value.headers["Retry-After"])
        assert told == ["15", "20", "25", "15", "20"]  # a place is free every 5 s
        for task in tasks:
            task.cancel()

    run(scenario())


def test_earliest_deadline_is_next():
    async def scenario():
        places, order = Places(1, 10), []

        async def work(name, deadline):
            await places.take(deadline)
            order.append(name)
            places.give_back(0.0)

        await places.take(later(30))
        now = time.monotonic()
        tasks = []
        for name, seconds in (("c", 20), ("a", 10), ("b", 15), ("a too", 10)):
            tasks.append(asyncio.ensure_future(work(name, now + seconds)))
            await waiting(places, len(tasks))
        places.give_back(0.0)
        await asyncio.gather(*tasks)
        assert order == ["a", "a too", "b", "c"]

    run(scenario())


async def with_usual_time(seconds):
    """Return a place that 30 requests had for this time each."""
    places = Places(1, 10)
    for _ in range(30):
        await places.take(later(30))
        places.give_back(seconds, is_answered=True)
    return places


def test_request_whose_deadline_comes_first_gets_no_place():
    async def scenario():
        places = Places(1, 10)
        await places.take(later(30))
        with pytest.raises(Refusal, match="the budget ended while the image waited") as caught:
            await places.take(later(0.01))
        assert caught.value.status == 504
        assert places.waiting == 0
        places.give_back()
        await places.take(later(30))  # the place is free

    run(scenario())


def test_request_that_could_not_be_answered_in_time_gets_no_place():
    async def scenario():
        places = await with_usual_time(20.0)
        await places.take(later(100))
        hopeless = asyncio.ensure_future(places.take(later(10)))
        fine = asyncio.ensure_future(places.take(later(100)))
        await waiting(places, 2)
        places.give_back()
        await fine
        with pytest.raises(Refusal):
            await hopeless

    run(scenario())


def test_requests_without_an_answer_and_refused_ones_do_not_shorten_the_usual_time():
    async def scenario():
        places = await with_usual_time(5.0)
        for _ in range(10):  # too little time was left for them
            await places.take(later(30))
            places.give_back(8.0)
        await places.take(later(30))
        hopeless = [asyncio.ensure_future(places.take(later(7.5))) for _ in range(9)]
        fine = asyncio.ensure_future(places.take(later(100)))
        await waiting(places, 10)
        places.give_back()
        await fine
        for one in hopeless:
            with pytest.raises(Refusal):
                await one

    run(scenario())


def test_an_outage_that_has_ended_refuses_nobody_who_waited_for_half_of_the_budget():
    async def scenario():
        places = await with_usual_time(0.01)
        for _ in range(4):
            await places.take(later(30))
            places.give_back(5.0, is_answered=True)
        await places.take(later(30))
        tasks = [asyncio.ensure_future(places.take(later(5))) for _ in range(9)]
        await waiting(places, 9)
        for task in tasks:
            places.give_back(0.01, is_answered=True)
            await task

    run(scenario())


@pytest.mark.parametrize("is_given", [False, True])
def test_place_of_a_client_that_goes_away_is_free_again(is_given):
    async def scenario():
        places = Places(1, 10)
        await places.take(later(30))
        gone = asyncio.ensure_future(places.take(later(30)))
        await waiting(places, 1)
        if is_given:
            places.give_back()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        if not is_given:
            places.give_back()
        assert places.waiting == 0
        await places.take(later(30))
        with pytest.raises(Refusal):
            await places.take(later(0.01))

    run(scenario())
