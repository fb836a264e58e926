"""Requests of a source, from submission to answer or error.

A request waits for its turn, runs through the stem, is handed to the routing machine, runs through the head, and ends
exactly once. Threads that submit or cancel put it into queues; everything else happens on the source thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from ls_edge.core.errors import BudgetExceeded, DeviceLost, Overloaded, RequestError, SourceClosed
from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.peer.threads import LoopThreads
from ls_edge.runtime.routing.source.source_rules import SourceMachine
from ls_edge.runtime.routing.state.events import Abandon, Complete, Fail, Submit
from ls_edge.runtime.routing.state.timers import Timer, Timers
from ls_edge.runtime.source.audit import Audit, Auditor
from ls_edge.runtime.source.results import Answer, InFlightRequest, PartResult, RequestCounts, RequestState
from ls_edge.runtime.source.settings import Itineraries
from ls_edge.runtime.source.stem_and_head import StemAndHead
from ls_edge.runtime.transport.node import Node

SHORT_US = 2000
"""Limit on the usual time of a part that the source thread runs itself, since messages wait meanwhile."""


class Requests:
    """Requests that have not ended, and the steps that each of them takes."""

    def __init__(
        self,
        engines: StemAndHead | None,
        machine: SourceMachine,
        node: Node,
        threads: LoopThreads[PartResult],
        auditor: Auditor | None,
        itineraries: Itineraries,
        max_inflight: int,
        classes: tuple[str, ...],
    ) -> None:
        """Without ``engines``, leave stem and head to the peers."""
        self.counts = RequestCounts()
        """Counts of requests and of their ends; any thread may read them."""
        self.line = WaitingLine(max_inflight, self._start)
        self._engines, self._machine = engines, machine
        self._node, self._threads = node, threads
        self._auditor, self._itineraries, self._classes = auditor, itineraries, classes
        self._canceled: deque[int] = deque()
        self._open: dict[int, InFlightRequest] = {}
        self._deadlines: Timers[Timer] = Timers()
        """Deadlines of open requests, except for those in the routing machine, which ends them itself."""

    def cancel(self, request: int) -> None:
        """Stop the work on a request; any thread may call it."""
        self._canceled.append(request)
        self._node.wake()

    def join(self, inflight: InFlightRequest) -> None:
        """Append a request; any thread may call it. Raise :class:`SourceClosed` after the end."""
        self.line.join(inflight)
        # The callback must not refer to the request: answers are freed when their users drop them.
        inflight.future.add_done_callback(partial(_cancel, self, inflight.request))

    # On the source thread.

    def move_to(self, other: Requests) -> None:
        """Let another loop answer the open requests of a thin source, from their beginning."""
        for inflight in [*self._open.values()]:
            try:
                other.join(inflight.again())
            except SourceClosed:
                return
            if inflight.state is RequestState.ROUTED:
                self._node.feed(Abandon(inflight.request))
            self._forget(inflight)
        other._node.wake()

    def next_wait(self, at_most: float) -> float:
        """Return the seconds until the next deadline of a request in this process, at most ``at_most``."""
        return max(0.0, min(at_most, self._deadlines.next - time.monotonic()))

    def take_over(self) -> None:
        """Handle the work of other threads since the last turn, and end overdue requests."""
        self.take_results()
        now = time.monotonic()
        for timer in self._deadlines.due(now):
            inflight = self._open[timer.number]
            self._end(inflight, self._overdue(inflight), inflight.answered)

    def take_results(self) -> None:
        """Handle submissions, cancellations, and the results of stem and head."""
        results = self._threads.results()
        canceled = [self._canceled.popleft() for _ in range(len(self._canceled))]
        while self.line.submitted:  # first, because results and cancellations may belong to these requests
            inflight = self.line.submitted.popleft()
            self.counts.submitted += 1
            self._open[inflight.request] = inflight
            self._deadlines.set(inflight.timer, inflight.deadline)
        for request in canceled:
            self._cancel(request)
        for result in results:
            self._on_result(result)

    def execute(self, instruction: Complete | Fail) -> None:
        """Run the head on the returned tokens of a request, or end it with its error."""
        inflight = self._open.get(instruction.request)
        if inflight is None:
            return
        if isinstance(instruction, Fail):
            self._end(inflight, instruction.error, instruction)
            return
        inflight.state, inflight.answered = RequestState.HEAD, instruction
        if self._engines is None:
            self._answer(inflight, instruction.tokens[0], 0)
        else:
            inflight.at_worker = True
            self._deadlines.set(inflight.timer, inflight.deadline)
            is_short = self._engines.usual_us[HEAD] <= SHORT_US
            submit = self._threads.submit_short if is_short else self._threads.submit
            submit(partial(self._engines.run_head, inflight, instruction), urgent=True)

    def end_all(self) -> None:
        """End every open request, because the source is closed."""
        for inflight in [*self._open.values(), *self.line.submitted]:
            self._end(inflight, SourceClosed(f"request {inflight.request}: the source was closed before its answer"))

    def _start(self, inflight: InFlightRequest, alone: bool) -> None:
        """Run the stem, or pass the image on unchanged; on any thread."""
        if self._engines is None:
            self._threads.add_result(PartResult(inflight, STEM, inflight.image))
            return
        inflight.at_worker = True
        is_short = alone and self._engines.usual_us[STEM] <= SHORT_US
        submit = self._threads.submit_short if is_short else self._threads.submit
        submit(partial(self._engines.run_stem, inflight))

    def _cancel(self, request: int) -> None:
        inflight = self._open.get(request)
        if inflight is None:  # it has ended
            return
        if inflight.state is RequestState.ROUTED:
            self._node.feed(Abandon(inflight.request))
        self._forget(inflight)
        self.counts.canceled += 1
        inflight.future.set_running_or_notify_cancel()  # wakes callers of concurrent.futures.wait

    def _overdue(self, inflight: InFlightRequest) -> RequestError:
        if inflight.state is RequestState.WAITING:
            return Overloaded(
                f"request {inflight.request} waited for its turn until its budget was over; send more slowly, "
                f"or raise the budget or max_inflight ({self.line.max_inflight})"
            )
        if inflight.state is RequestState.STEM and not inflight.begun:
            return Overloaded(
                f"request {inflight.request} waited for the stem until its budget was over; send more slowly, "
                "or raise the budget"
            )
        return BudgetExceeded(
            f"request {inflight.request} was {inflight.state.value} of this process when its budget was over; "
            "raise the budget, or check what else runs on this machine"
        )

    def _on_result(self, result: PartResult) -> None:
        inflight = result.inflight
        inflight.at_worker = False
        if inflight.state is RequestState.ENDED:
            self.line.leave(inflight)
        elif result.error is not None:
            self._end(inflight, result.error, inflight.answered)
            if isinstance(result.error.__cause__, DeviceLost):
                raise result.error.__cause__  # only another process can use the GPU
        elif result.output is None:
            pass  # its deadline ends it
        elif self._engines is not None and result.part == HEAD and isinstance(result.output, np.ndarray):
            self._machine.custody.own_us = self._engines.usual_us[HEAD]
            self._answer(inflight, result.output[0], result.us)
        else:
            inflight.state = RequestState.ROUTED
            if self._engines is not None:
                inflight.image = None
            self._deadlines.end(inflight.timer, len(self._open))
            if self._auditor is not None:
                inflight.sent = result.output
            itinerary = self._itineraries.of(inflight.request)
            self._node.feed(Submit(inflight.request, itinerary, result.output, inflight.deadline))

    def _answer(self, inflight: InFlightRequest, logits: np.ndarray, head_us: int) -> None:
        answered, sent = inflight.answered, inflight.sent
        record = inflight.record(answered, logits=logits, head_us=head_us)
        self._forget(inflight)
        if not inflight.future.set_running_or_notify_cancel():
            self.counts.canceled += 1
            return
        self.counts.add_answer(record)
        if self._auditor is not None and answered is not None and isinstance(sent, np.ndarray):
            self._auditor.offer(Audit(inflight.request, sent, answered.itinerary, logits))
        assert record.prediction is not None
        inflight.future.set_result(Answer(inflight.request, logits, record.prediction, self._classes, record))

    def _end(self, inflight: InFlightRequest, error: RequestError, end: Complete | Fail | None = None) -> None:
        if inflight.state is RequestState.ENDED:
            return
        self._forget(inflight)
        error.record = inflight.record(end, error=error)
        if inflight.future.set_running_or_notify_cancel():
            self.counts.add_error(error, error.record)
            inflight.future.set_exception(error)
        else:
            self.counts.canceled += 1

    def _forget(self, inflight: InFlightRequest) -> None:
        self._open.pop(inflight.request, None)
        self._deadlines.end(inflight.timer, len(self._open))
        self.line.leave(inflight)
        inflight.image = inflight.sent = inflight.answered = None  # callers may keep its future


def _cancel(requests: Requests, request: int, future: Future[Answer]) -> None:
    if future.cancelled():
        requests.cancel(request)


class WaitingLine:
    """Requests in order of submission, the first of them in flight; any thread may use it."""

    def __init__(self, max_inflight: int, start: Callable[[InFlightRequest, bool], None]) -> None:
        """Call ``start(request, is_alone)`` to begin a request; ``is_alone`` is true if no other one is in flight."""
        self.max_inflight = max_inflight
        self.is_closed = False
        self.submitted: deque[InFlightRequest] = deque()
        """Requests that the source thread has not yet seen."""
        self._start = start
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, InFlightRequest] = OrderedDict()
        self._inflight: set[int] = set()
        """Started requests that have not ended, or that still occupy an engine."""

    @property
    def is_empty(self) -> bool:
        """Whether no request waits or is in flight."""
        with self._lock:
            return not self._waiting and not self._inflight

    def join(self, inflight: InFlightRequest) -> None:
        """Append a request; raise :class:`SourceClosed` after :meth:`close`."""
        with self._lock:
            if self.is_closed:
                raise SourceClosed("the source was closed; open a new one")
            self.submitted.append(inflight)
            self._waiting[inflight.request] = inflight
        self._advance()

    def _advance(self) -> None:
        with self._lock:
            while self._waiting and not self.is_closed and len(self._inflight) < self.max_inflight:
                _, inflight = self._waiting.popitem(last=False)
                self._inflight.add(inflight.request)
                inflight.state = RequestState.STEM
                self._start(inflight, len(self._inflight) == 1)

    def leave(self, inflight: InFlightRequest) -> None:
        """Mark a request as ended, and start the next one; it stays in flight as long as its engine call lasts."""
        with self._lock:  # another thread may be starting this request
            inflight.state = RequestState.ENDED
            self._waiting.pop(inflight.request, None)
            if not inflight.at_worker:
                self._inflight.discard(inflight.request)
        self._advance()

    def close(self) -> None:
        """Accept no more requests."""
        with self._lock:
            self.is_closed = True
