"""Requests of a source, from their submission to their answer or error.

A request waits for its turn, runs through the stem, is handed to the routing machine, runs through the head, and ends
once. Threads that submit or cancel put it into queues; everything else happens on the source thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded, Overloaded, RequestError, SourceClosed
from ls_edge.runtime.execution.counts import RequestCounts
from ls_edge.runtime.execution.loop_threads import LoopThreads
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.events import Abandon, Complete, Fail, Submit
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.routing.source_rules import SourceMachine
from ls_edge.runtime.source.audit import Audit, Auditor
from ls_edge.runtime.source.deadlines import Deadlines
from ls_edge.runtime.source.results import Answer, InFlightRequest, RequestState, record_of
from ls_edge.runtime.source.settings import Settings
from ls_edge.runtime.source.stem_and_head import SHORT_US, HeadResult, StemAndHead, StemResult
from ls_edge.runtime.transport.node import Node

Job = Callable[[], StemResult | HeadResult]


class Requests:
    """Requests that have not ended, in the stage that each has reached."""

    def __init__(
        self,
        bundle: Bundle,
        settings: Settings,
        engines: StemAndHead,
        machine: SourceMachine,
        itinerary: Callable[[tuple[int, ...]], Itinerary],
        opened: float,
    ) -> None:
        """``itinerary`` makes the itinerary of a request of an order; ``opened`` is the origin of recorded times."""
        self._bundle, self._settings = bundle, settings
        self._engines, self._machine = engines, machine
        self._itinerary = itinerary
        self._opened = opened
        self.counts = RequestCounts()
        """Requests so far, and how they ended; for any thread to read."""
        self.short_jobs: deque[tuple[Job, bool]] = deque()
        """Stems and heads that the source thread may run itself after a turn, and whether they are urgent."""
        self.is_closing = False
        """Whether nothing is accepted any more."""
        self._node: Node
        self._threads: LoopThreads[StemResult | HeadResult]
        self._auditor: Auditor | None = None
        self._lock = threading.Lock()
        """Guards ``is_closing``, ``_waiting`` and ``_inflight``."""
        self._waiting: OrderedDict[int, InFlightRequest] = OrderedDict()
        self._inflight: set[int] = set()
        """Requests that were started and have not ended, or whose job the engines still have."""
        self._submitted: deque[InFlightRequest] = deque()
        self._cancelled: deque[int] = deque()
        self._open: dict[int, InFlightRequest] = {}
        self._deadlines = Deadlines()
        """Deadlines of the open requests except those that the routing machine has, which ends them itself."""

    def connect(self, node: Node, threads: LoopThreads[StemResult | HeadResult], auditor: Auditor | None) -> None:
        """Set where requests are sent, jobs run and answers audited."""
        self._node, self._threads, self._auditor = node, threads, auditor

    # On any thread.

    def submit(self, inflight: InFlightRequest) -> None:
        """Take a request in; raise :class:`SourceClosed` after the end."""
        with self._lock:
            if self.is_closing:
                raise SourceClosed("the source was closed; open a new one")
            self.counts.submitted += 1
            self._submitted.append(inflight)
            self._waiting[inflight.request] = inflight
            self._start_waiting()

    def cancel(self, request: int) -> None:
        """Stop the work on a request."""
        self._cancelled.append(request)
        self._node.wake()

    def close(self) -> None:
        """Accept no further requests."""
        with self._lock:
            self.is_closing = True

    # On the source thread.

    def next_wait(self, at_most: float) -> float:
        """Return the seconds until a request reaches its deadline in this process."""
        return max(0.0, min(at_most, self._deadlines.next - time.monotonic()))

    def take_over(self) -> None:
        """Act on what other threads have done since the last turn."""
        results = self._threads.results()
        self.accept_submitted()  # some of them may have a result already
        for result in results:
            self.on_result(result)
        self._end_overdue(time.monotonic())
        with self._lock:
            self._start_waiting()

    def end_all(self) -> None:
        """End every open request, because the source has closed."""
        for inflight in [*self._open.values(), *self._submitted]:
            self._end(inflight, SourceClosed(f"request {inflight.request}: the source was closed before its answer"))

    def accept_submitted(self) -> None:
        """Take over submissions and cancellations."""
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]  # each was submitted before
        while self._submitted:
            inflight = self._submitted.popleft()
            self._open[inflight.request] = inflight
            self._deadlines.add(inflight.request, inflight.deadline)
        for request in cancelled:
            self._cancel(request)

    def _start_waiting(self) -> None:
        """Start the next requests; the caller has the lock."""
        while self._waiting and len(self._inflight) < self._settings.max_inflight:
            _, inflight = self._waiting.popitem(last=False)
            self._inflight.add(inflight.request)
            inflight.state, inflight.at_worker = RequestState.STEM, True
            stem = partial(self._engines.run_stem, inflight)
            if len(self._inflight) == 1 and self._engines.stem_us <= SHORT_US:
                self.short_jobs.append((stem, False))
            else:
                self._threads.submit(stem)

    def _cancel(self, request: int) -> None:
        inflight = self._open.get(request)
        if inflight is None:  # it has ended
            return
        if inflight.state is RequestState.ROUTED:
            self._node.feed(Abandon(inflight.request))
        self._forget(inflight)
        self.counts.cancelled += 1
        inflight.future.set_running_or_notify_cancel()  # for those who wait with concurrent.futures.wait

    def _end_overdue(self, now: float) -> None:
        for request in self._deadlines.pop_due(now):
            inflight = self._open[request]
            self._end(inflight, self._overdue(inflight), inflight.answered)

    def _overdue(self, inflight: InFlightRequest) -> RequestError:
        """Return the error of a request that reached its deadline in this process."""
        if inflight.state is RequestState.WAITING:
            return Overloaded(
                f"request {inflight.request} waited for its turn until its budget was over; send more slowly, "
                f"or raise the budget or max_inflight ({self._settings.max_inflight})"
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

    def on_result(self, result: StemResult | HeadResult) -> None:
        """Act on the end of a stem or head."""
        inflight = result.inflight
        inflight.at_worker = False
        if inflight.state is RequestState.ENDED:
            with self._lock:
                self._inflight.discard(inflight.request)
        elif result.error is not None:
            self._end(inflight, result.error, inflight.answered)
        elif isinstance(result, HeadResult):
            if result.logits is not None:
                self._machine.rules.head_us = max(result.head_us, self._machine.rules.head_us * 9 // 10)
                self._answer(inflight, result)
        elif result.tokens is not None:
            inflight.state = RequestState.ROUTED
            self._engines.stem_us = max(inflight.stem_us, self._engines.stem_us * 9 // 10)
            self._deadlines.remove(inflight.request)
            if self._auditor is not None:
                inflight.stem_tokens = result.tokens
            order = POLICIES[self._settings.policy].wanted_order(
                self._bundle.bands, self._settings.seed, inflight.request
            )
            self._node.feed(Submit(inflight.request, self._itinerary(order), result.tokens, inflight.deadline))

    def execute(self, instruction: Complete | Fail) -> None:
        """Run the head on the last tokens of a request, or end it with its error."""
        inflight = self._open.get(instruction.request)
        if inflight is None:
            return
        if isinstance(instruction, Complete):
            inflight.state, inflight.at_worker, inflight.answered = RequestState.HEAD, True, instruction
            self._deadlines.add(inflight.request, inflight.deadline)
            head = partial(self._engines.run_head, inflight, instruction)
            if self._machine.rules.head_us <= SHORT_US:
                self.short_jobs.append((head, True))
            else:
                self._threads.submit(head, urgent=True)
        else:
            self._end(inflight, instruction.error, instruction)

    def _answer(self, inflight: InFlightRequest, headed: HeadResult) -> None:
        assert headed.logits is not None
        logits = headed.logits[0]
        record = record_of(inflight, inflight.answered, time.monotonic(), logits, headed.head_us, self._opened)
        answered, stem_tokens = inflight.answered, inflight.stem_tokens
        self._forget(inflight)
        assert record.prediction is not None
        if not inflight.future.set_running_or_notify_cancel():
            self.counts.cancelled += 1
            return
        self.counts.add_answer(record)
        if self._auditor is not None and answered is not None and stem_tokens is not None:
            self._auditor.offer(Audit(inflight.request, stem_tokens, answered.itinerary, logits, answered.seen_holders))
        inflight.future.set_result(
            Answer(
                request=inflight.request,
                logits=logits,
                prediction=record.prediction,
                label=self._bundle.manifest.classes[record.prediction],
                degraded=record.degraded,
                record=record,
            )
        )

    def _end(self, inflight: InFlightRequest, error: RequestError, end: Complete | Fail | None = None) -> None:
        if inflight.state is RequestState.ENDED:
            return
        self._forget(inflight)
        error.record = record_of(inflight, end, time.monotonic(), None, 0, self._opened, error)
        if inflight.future.set_running_or_notify_cancel():
            self.counts.add_error(error, error.record)
            inflight.future.set_exception(error)
        else:
            self.counts.cancelled += 1

    def _forget(self, inflight: InFlightRequest) -> None:
        """Mark a request as ended; it stays in flight while an engine of this process has its job."""
        self._open.pop(inflight.request, None)
        self._deadlines.remove(inflight.request)
        with self._lock:  # it may be starting
            inflight.state = RequestState.ENDED
            self._waiting.pop(inflight.request, None)
            if not inflight.at_worker:
                self._inflight.discard(inflight.request)
        inflight.image = inflight.stem_tokens = inflight.answered = None  # users may keep its future
