"""Keeps one worker alive: starts it, watches it, and replaces it when it dies or hangs.

A death concerns the requests whose item of work was running. Whether they are to blame depends on its cause: a
SIGKILL that neither the kernel's out-of-memory killer nor this supervisor sent came from outside, and blames nobody.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.host import Host, LoadRunner, ProcessHost, ThreadHost
from engine.messages import Command, Event, Stop, WorkDone, WorkerFailed, WorkerReady
from engine.scheduler import Limits
from models.errors import CheckpointError

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # in a row, after which the service gives up
HANG_FACTOR = 20.0  # over the 99th percentile of an item's time
START_PAUSE_S = 1.0  # after a process could not even be made
STOP_TIMEOUT_S = 10.0
OOM_KILLS = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker that nobody asked for. `blamed` may have caused it."""

    blamed: tuple[str, ...]
    reason: str


class Supervisor:
    """Owns the worker. Callbacks are called on the event loop that `start` ran on."""

    def __init__(
        self,
        load: LoadRunner,
        limits: Limits,
        *,
        in_process: bool,
        hang_timeout_s: float,
        on_event: Callable[[Event], None],
        on_death: Callable[[Death], None],
        on_give_up: Callable[[str], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._new_host = partial(ProcessHost if in_process else ThreadHost, load, limits)
        self._hang_timeout_s = hang_timeout_s
        self._on_event, self._on_death, self._on_give_up = on_event, on_death, on_give_up
        self._is_busy = is_busy
        self._host: Host | None = None
        self._serial = 0  # of the worker
        self._ready = False
        self._stopping = False
        self._hung = False
        self._failure: str | None = None
        self._failed_starts = 0
        self._last_event_s = 0.0
        self._item_seconds: deque[float] = deque(maxlen=500)
        self._oom_kills = 0
        self._watchdog: asyncio.Task[None] | None = None
        self._restart: asyncio.Future[None] | None = None
        self._first_start: asyncio.Future[None] | None = None

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, where it is a process."""
        return self._host.pid if isinstance(self._host, ProcessHost) else None

    def launch(self) -> None:
        """Let the first worker begin to load, ahead of `start` and without an event loop."""
        self._host = self._new_host()
        self._host.launch()

    async def start(self) -> None:
        """Start the first worker and return when it is ready. `CheckpointError` says why it can't be."""
        loop = asyncio.get_running_loop()
        self._first_start = loop.create_future()
        await self._start_worker(self._host or self._new_host())
        self._watchdog = loop.create_task(self._watch(), name="watch the worker")
        await self._first_start

    def send(self, command: Command) -> None:
        """Hand a command to the worker; it is lost if the worker is dead, and replayed by whoever sent it."""
        if self._host is not None and self._ready:
            self._host.send(command)

    async def stop(self) -> None:
        """End the worker, politely first."""
        self._stopping = True
        for waiting in (self._watchdog, self._first_start, self._restart):
            if waiting is not None and not waiting.done():
                waiting.cancel()
        host = self._host
        if host is None:
            return
        host.send(Stop())
        if not self._ready or not await asyncio.to_thread(host.join, STOP_TIMEOUT_S):
            host.kill()
            await asyncio.to_thread(host.join, STOP_TIMEOUT_S)

    async def _start_worker(self, host: Host) -> None:
        loop = asyncio.get_running_loop()
        self._ready = self._hung = False
        self._failure = None
        self._oom_kills = oom_kills()

        self._serial += 1
        serial = self._serial  # what is told by number makes no cycle: an ended host and its descriptors go at once

        def on_event(event: Event) -> None:
            loop.call_soon_threadsafe(self._receive, serial, event)

        def on_exit(code: int | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._exited, serial, code)

        self._host = host
        await asyncio.to_thread(host.start, on_event, on_exit)

    def _receive(self, serial: int, event: Event) -> None:
        if serial != self._serial:
            return
        self._last_event_s = time.monotonic()
        match event:
            case WorkerReady():
                self._ready, self._failed_starts = True, 0
                if self._first_start is not None and not self._first_start.done():
                    self._first_start.set_result(None)
            case WorkerFailed(message):
                self._failure = message
                return
            case WorkDone(_, seconds):
                self._item_seconds.append(seconds)
        self._on_event(event)

    def _exited(self, serial: int, code: int | None) -> None:
        if serial != self._serial or self._host is None or self._stopping:
            return
        reason = self._failure or self._describe(code)
        was_ready, self._ready = self._ready, False
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_exception(CheckpointError(reason))
            return
        log.error("the worker died: %s", reason)
        if not was_ready and self._gives_up(reason):
            return
        self._on_death(Death(self._host.active() if self._is_blamable(code) else (), reason))
        self._restart = asyncio.ensure_future(self._replace_worker())

    async def _replace_worker(self) -> None:
        """Start the next worker; what keeps it from being started may pass: no memory, no room for what is shared."""
        while True:
            try:
                await self._start_worker(self._new_host())
                return
            except OSError as error:
                log.error("the worker could not be started: %s", error)
                if self._gives_up(str(error)):
                    return
                await asyncio.sleep(START_PAUSE_S)

    def _gives_up(self, reason: str) -> bool:
        """Whether the start that failed for `reason` was one too many."""
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._on_give_up(f"the worker can't be started again: {reason}")
            return True
        return False

    def _describe(self, code: int | None) -> str:
        if self._hung:
            return "it hung"
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit status {code}"

    def _is_blamable(self, code: int | None) -> bool:
        killed_from_outside = code == -signal.SIGKILL and not self._hung and oom_kills() == self._oom_kills
        return not killed_from_outside

    async def _watch(self) -> None:
        """Kill a worker that has work and tells of no progress."""
        pause_s = min(1.0, self._hang_timeout_s / 4)
        idle_since_s = time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            if not self._ready or not self._is_busy():
                idle_since_s = now_s
                continue
            usual_s = sorted(self._item_seconds)[int(0.99 * len(self._item_seconds))] if self._item_seconds else 0.0
            limit_s = max(self._hang_timeout_s, HANG_FACTOR * usual_s)
            if now_s - max(self._last_event_s, idle_since_s) > limit_s and self._host is not None:
                log.error("the worker has told nothing for %.0f s and is killed", limit_s)
                self._hung = True
                self._host.kill()
                idle_since_s = now_s


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended since boot; 0 where that can't be read."""
    try:
        lines = OOM_KILLS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
