"""A small TCP proxy for links with faults: delay, stalls, a limited rate, half-open connections.

It is for machines whose kernel has no ``netem``, and forwards bytes without reading them. TCP turns lost packets into
stalls, so loss is emulated by stalls: a fraction ``stall_part`` of the chunks waits for ``stall_ms``, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from dataclasses import dataclass


@dataclass
class LinkConditions:
    """Conditions of a link; the fields may be set at any time."""

    delay_ms: float = 0.0
    """Delay of each direction."""
    rate_mbit: float = 0.0
    """Megabits per second for each direction and connection; 0 for no limit."""
    stall_ms: float = 0.0
    stall_part: float = 0.0
    blackhole: bool = False
    """Whether connections stay open but no byte passes, as after pulling a cable."""


class Proxy:
    """Listens on ``port`` of the loopback and connects to ``target``; runs on a thread until :meth:`close`."""

    def __init__(self, port: int, target: tuple[str, int], *, seed: int = 0) -> None:
        self.conditions = LinkConditions()
        self.delayed_bytes = 0
        self._port = port
        self._target = target
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"proxy to {target[1]}", daemon=True)
        self._thread.start()
        if not self._ready.wait(5):
            raise OSError(f"the proxy on port {port} did not start")

    def close(self) -> None:
        """Close all connections and stop."""
        if self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pumps: list[asyncio.Task[None]] = []
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            self._writers |= {writer, there_writer}
            pumps = [
                asyncio.create_task(self._pump(reader, there_writer)),
                asyncio.create_task(self._pump(there_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            there_writer.close()
            self._writers.discard(there_writer)
        except OSError:
            pass
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction; keep reading while chunks are delayed, so that a delay does not limit the rate."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)
        sender = asyncio.create_task(self._send(chunks, writer))
        free_at = time.monotonic()
        try:
            while data := await reader.read(65536):
                conditions = self.conditions
                now = time.monotonic()
                if conditions.rate_mbit:
                    free_at = max(free_at, now) + len(data) * 8e-6 / conditions.rate_mbit
                stalled = conditions.stall_part and self._random.random() < conditions.stall_part
                due = max(free_at if conditions.rate_mbit else now, now)
                delay_ms = conditions.delay_ms + (conditions.stall_ms if stalled else 0.0)
                due += delay_ms / 1e3
                self.delayed_bytes += len(data) if delay_ms else 0
                await chunks.put((due, data))
                if conditions.rate_mbit and free_at > now:
                    await asyncio.sleep(free_at - now)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await chunks.get()
                wait = due - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                while self.conditions.blackhole:
                    await asyncio.sleep(0.005)
                writer.write(data)
                await writer.drain()
