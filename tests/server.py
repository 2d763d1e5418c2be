"""A real server in its own process, on a free port of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import httpx

START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 60


class Server:
    """A running `easel serve`; `url` is its root."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log_file = log
        self.url = ""

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_for_port(self, deadline: float) -> None:
        while not (match := re.search(r"listening on (http://[\w.:\[\]]+)", self.log)):
            self.check_alive(deadline)
        self.url = match[1]

    def wait_until_ready(self, deadline: float) -> None:
        while True:
            self.check_alive(deadline)
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass

    def check_alive(self, deadline: float) -> None:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
        assert time.monotonic() < deadline, f"the server is not up in time:\n{self.log}"
        time.sleep(0.05)

    def children(self) -> list[int]:
        """The processes that the server has started."""
        return list(self._commands())

    def workers(self) -> list[int]:
        return [pid for pid, command in self._commands().items() if "spawn_main" in command]

    def _commands(self) -> dict[int, str]:
        """Of its children, what they run."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    found[int(process.name)] = (process / "cmdline").read_text()
            except (OSError, ValueError):
                continue  # it ended meanwhile
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def assert_gone(pids: list[int], timeout_s: float = 10) -> None:
    """The processes end in a moment, without help."""
    deadline = time.monotonic() + timeout_s
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.02)


@contextmanager
def serving(
    model: Path | str | None,
    folder: Path,
    *flags: str,
    ready: bool = True,
    module: str = "app",
    prefix: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a server (without a model: on the embedded checkpoint), wait until it is ready, and stop it at the end.
    `prefix` is a command that becomes the one behind it."""
    log = folder / "server.log"
    command = [*prefix, sys.executable, "-m", module, "serve", *([str(model)] if model else []), "--port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EASEL_")}
    with log.open("wb") as output, TemporaryFile() as empty:
        process = subprocess.Popen(
            command,
            stdin=empty,
            stdout=output,
            stderr=output,
            env={**environment, "OMP_NUM_THREADS": "2"},
            process_group=0,  # a test may press Ctrl-C in it
        )
    server = Server(process, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        server.wait_for_port(deadline)
        if ready:
            server.wait_until_ready(deadline)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
