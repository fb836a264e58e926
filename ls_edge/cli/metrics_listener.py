"""Metrics endpoint for ``--metrics HOST:PORT``, bound before the peer or source is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ls_edge.device.requirements import require

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ls_edge.runtime.peer.cores import EngineCores


@contextlib.contextmanager
def metrics_port(address: str) -> Iterator[Callable[[Collector, EngineCores], str]]:
    """Bind ``HOST:PORT``, and yield a function that serves a collector there and returns the URL.

    Errors name the flag.
    """
    require("--metrics", "metrics")
    from ls_edge.runtime.serve.http.listener import open_listener
    from ls_edge.runtime.serve.metrics import registry_of
    from ls_edge.runtime.serve.scrape_server import ScrapeServer

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(address, "--metrics"))
        yield lambda collector, cores: stack.enter_context(ScrapeServer(listener, registry_of(collector), cores)).url
