"""Where a worker loop lives: in a process of its own, or in a thread of this one.

Both take commands by `send`, which never blocks, and hand events and the end to callbacks, from a thread of theirs.
The process is spawned, never forked. It ends when this process does, however that comes about: the pipe breaks. Whom it
was working for when it ended stands in memory that both share, which costs a step next to nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from engine.messages import Command, Event, Stop, WorkerFailed
from engine.scheduler import Limits
from engine.worker import WorkerLoop
from models.errors import CheckpointError

if TYPE_CHECKING:
    from engine.runner import Runner

log = logging.getLogger(__name__)

LoadRunner = Callable[[], "Runner"]  # called in the worker; for a process it must pickle
OnEvent = Callable[[Event], None]
OnExit = Callable[[int | None], None]  # the exit code; negative for a signal; None for a thread

SERVICE_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ACTIVE_BYTES = 2**14  # for the ids of the requests in one step; what does not fit is not blamed for a death
STUCK = 70  # exit status of a worker that lost its device or met a bug


class Host(Protocol):
    """One worker, from its start to its end."""

    def launch(self) -> None:
        """Begin to load, ahead of `start` and of whoever listens to it. A thread begins only then."""
        ...

    def start(self, on_event: OnEvent, on_exit: OnExit) -> None: ...

    def send(self, command: Command) -> None: ...

    def kill(self) -> None: ...

    def join(self, timeout_s: float) -> bool: ...

    def active(self) -> tuple[str, ...]:
        """The requests that the item of work is for that is running, or was when the worker ended."""
        ...


class ProcessHost:
    """A worker in a spawned process."""

    def __init__(self, load: LoadRunner, limits: Limits) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._worker_end = context.Pipe()
        self._active = context.RawArray(ctypes.c_char, ACTIVE_BYTES)
        self._process = context.Process(
            target=worker_main, args=(self._worker_end, self._active, load, limits), name="easel-worker", daemon=True
        )
        self._outbox: queue.SimpleQueue[Command] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def launch(self) -> None:
        # The worker inherits the mask: a signal for the whole group must not hit it before it can ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVICE_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._worker_end.close()
        atexit.register(self._process.kill)  # the worker ignores the signals that end this process

    def start(self, on_event: OnEvent, on_exit: OnExit) -> None:
        if self._process.pid is None:
            self.launch()
        receive = partial(self._receive_events, on_event, on_exit)
        for name, target in (("send_commands", self._send_commands), ("receive_events", receive)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()

    def join(self, timeout_s: float) -> bool:
        if self._process.pid is None:  # it could not be started
            return True
        self._process.join(timeout_s)
        return self._process.exitcode is not None

    def active(self) -> tuple[str, ...]:
        text = self._active.value.decode(errors="replace")
        return tuple(text.split("\n")) if text else ()

    def _send_commands(self) -> None:
        try:
            while True:
                command = self._outbox.get()
                self._pipe.send(command)
                if isinstance(command, Stop):
                    return
        except OSError:
            return  # the worker is gone; whoever listens to its end replays what it had

    def _receive_events(self, on_event: OnEvent, on_exit: OnExit) -> None:
        try:
            while True:
                on_event(self._pipe.recv())
        except (EOFError, OSError, pickle.UnpicklingError):
            pass  # the worker ended, maybe in the middle of a message
        self._process.join()
        self._outbox.put(Stop())  # lets the sending thread go
        atexit.unregister(self._process.kill)
        on_exit(self._process.exitcode)


class ThreadHost:
    """A worker in a thread, for tests, debugging and one-off use. It can't be killed and takes this process along
    where a process of its own would only end itself."""

    def __init__(self, load: LoadRunner, limits: Limits) -> None:
        self._load, self._limits = load, limits
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._active: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def launch(self) -> None:
        pass

    def start(self, on_event: OnEvent, on_exit: OnExit) -> None:
        self._thread = threading.Thread(target=self._run, args=(on_event, on_exit), name="easel-worker", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def kill(self) -> None:
        self._commands.put(Stop())

    def join(self, timeout_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def active(self) -> tuple[str, ...]:
        return self._active

    def _note_active(self, request_ids: tuple[str, ...]) -> None:
        self._active = request_ids

    def _run(self, on_event: OnEvent, on_exit: OnExit) -> None:
        code = run_loop(self._load, self._limits, self._commands, on_event, self._note_active)
        on_exit(code or None)


def run_loop(
    load: LoadRunner,
    limits: Limits,
    commands: queue.SimpleQueue[Command],
    emit: Callable[[Event], None],
    note_active: Callable[[tuple[str, ...]], None],
) -> int:
    """Load and serve until `Stop`; the exit status. What can't be loaded is told, what goes wrong later is logged."""
    try:
        loop = WorkerLoop(load(), limits, commands, emit, note_active)
    except CheckpointError as error:
        emit(WorkerFailed(str(error)))
        return STUCK
    except Exception as error:
        log.exception("the worker could not load the model")
        emit(WorkerFailed(f"{type(error).__name__}: {error}"))
        return STUCK
    try:
        loop.run()
    except Exception:
        log.exception("the worker can't go on")
        return STUCK
    return 0


def worker_main(pipe: Connection, active: ctypes.Array[ctypes.c_char], load: LoadRunner, limits: Limits) -> None:
    """The whole life of a worker process."""
    for number in SERVICE_SIGNALS:  # the service decides when its worker ends
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SERVICE_SIGNALS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    outbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def note_active(request_ids: tuple[str, ...]) -> None:
        active.value = "\n".join(request_ids).encode()[: ACTIVE_BYTES - 1]

    def send_events() -> None:
        try:
            while (event := outbox.get()) is not None:
                pipe.send(event)
        except OSError:
            os._exit(STUCK)

    def load_for_good() -> Runner:
        runner = load()
        gc.freeze()  # what is loaded stays: no collection between two steps need look at it again
        return runner

    def receive_commands() -> None:
        try:
            while True:
                commands.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(STUCK)  # the service is gone: nobody waits for any of this

    threading.Thread(target=receive_commands, name="receive_commands", daemon=True).start()
    sender = threading.Thread(target=send_events, name="send_events", daemon=True)
    sender.start()
    code = run_loop(load_for_good, limits, commands, outbox.put, note_active)
    outbox.put(None)
    sender.join()
    logging.shutdown()
    os._exit(code)  # at once: no cleanup of a device that may not answer
