"""Disks that are full or read-only: the service does without, or says at its start what it lacks; commands leave no
half file behind. Mounts are made for real, in a namespace of their own, and need root."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.e2e.endurance import SMALL, URL
from tests.e2e.hub import hub
from tests.server import START_TIMEOUT_S, Server, assert_gone, serving

MAY_MOUNT = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
needs_mounts = pytest.mark.skipif(not MAY_MOUNT, reason="mounts need root")

EASEL = [sys.executable, "-m", "app"]
READ_ONLY = (
    "for place in /tmp /var/tmp {places}; do mount --bind $place $place; mount -o remount,bind,ro $place; done; "
    "mount -o remount,bind,ro /"
)
FULL = "mount -t tmpfs -o size={room} none {folder}; dd if=/dev/zero of={folder}/filler bs=4k 2>/dev/null"


def under(*mounts: str) -> list[str]:
    """A command that makes `mounts` for itself alone and becomes what stands behind it."""
    return ["unshare", "-m", "sh", "-c", "; ".join([*mounts, 'exec "$0" "$@"'])]


def read_only(*places: Path | str) -> str:
    """Leaves nowhere to write: not the root, the folders for temporary files, this one, nor `places`."""
    return READ_ONLY.format(places=shlex.join([str(Path.cwd()), *map(str, places)]))


def full(folder: Path, room: str = "64k") -> str:
    folder.mkdir(exist_ok=True)
    return FULL.format(room=room, folder=shlex.quote(str(folder)))


def in_namespace(server: Server, command: str) -> None:
    """Change what the server's mounts are."""
    subprocess.run(["nsenter", "-m", "-t", str(server.process.pid), "sh", "-c", command], check=True)


def draw(url: str) -> None:
    """A picture, and another from an upload of three megabytes."""
    answer = httpx.post(url + URL, json=SMALL, timeout=60)
    assert answer.status_code == 200, answer.text
    picture = io.BytesIO()
    Image.frombytes("RGB", (1000, 1000), os.urandom(3_000_000)).save(picture, "PNG")
    fields = {name: str(value) for name, value in SMALL.items()} | {"resolution": "64"}
    answer = httpx.post(f"{url}/v1/images/edits", data=fields, files={"image": picture.getvalue()}, timeout=60)
    assert answer.status_code == 200, answer.text


def kill_worker(server: Server) -> None:
    workers = server.workers()
    os.kill(workers[0], signal.SIGKILL)
    assert_gone(workers)


def replace_worker(server: Server) -> None:
    """Kill it, and wait until another one is ready; what the service says before it has noticed is of the old one."""
    deadline, killed = time.monotonic() + START_TIMEOUT_S, server.workers()
    kill_worker(server)
    while not set(server.workers()) - set(killed):
        server.check_alive(deadline)
    server.wait_until_ready(deadline)


def last_line_of_failure(server: Server) -> str:
    """Why the server, which ends by itself, ended."""
    assert server.process.wait(START_TIMEOUT_S) == 1
    return server.log.splitlines()[-1]


@needs_mounts
def test_a_service_with_nowhere_to_write_draws_and_replaces_its_worker(checkpoint: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    prefix = under(read_only(), full(temporary), f"export TMPDIR={temporary} HOME={temporary}")
    with serving(checkpoint, tmp_path, prefix=prefix) as server:
        draw(server.url)
        replace_worker(server)
        draw(server.url)
        assert server.stop() == 0
    assert "Traceback" not in server.log


@needs_mounts
def test_a_service_without_room_for_shared_memory_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path, ready=False, prefix=under(read_only("/dev/shm"))) as server:
        line = last_line_of_failure(server)
    assert line.startswith("easel: the worker can't be started: ") and "Read-only file system: '/dev/shm" in line


@needs_mounts
@pytest.mark.parametrize("passes", [True, False], ids=["for a moment", "for good"])
def test_a_worker_that_can_not_be_started_is_tried_again_or_given_up(
    checkpoint: Path, tmp_path: Path, passes: bool
) -> None:
    with serving(checkpoint, tmp_path, prefix=under("true")) as server:
        in_namespace(server, read_only("/dev/shm"))
        kill_worker(server)
        if passes:
            deadline = time.monotonic() + START_TIMEOUT_S
            while "could not be started" not in server.log:
                server.check_alive(deadline)
            assert httpx.get(f"{server.url}/health/ready").status_code == 503
            in_namespace(server, "umount /dev/shm")
            server.wait_until_ready(deadline)
            draw(server.url)
        else:
            line = last_line_of_failure(server)
            assert line.startswith("easel: the worker can't be started again: ") and "Read-only file system" in line


@needs_mounts
def test_a_download_that_does_not_fit_ends_with_the_reason(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with hub(checkpoint) as address:
        settings = f"export HF_ENDPOINT={address} HF_HOME={cache}"
        with serving("owner/name", tmp_path, ready=False, prefix=under(full(cache, "100k"), settings)) as server:
            line = last_line_of_failure(server)
        assert line.startswith("easel: the model could not be loaded: owner/name could not be fetched from the hub")
        assert "No space left on device" in line
        assert "it/s" not in server.log, "a progress bar among the log's lines"

        with serving("owner/name", tmp_path, ready=False, prefix=under(read_only(), settings)) as server:
            line = last_line_of_failure(server)
        assert "could not be fetched" in line and "Read-only file system" in line

        with serving("owner/name", tmp_path, prefix=["env", f"HF_ENDPOINT={address}", f"HF_HOME={cache}"]):
            pass
    for settings in (f"export HF_ENDPOINT={address} HF_HOME={cache}", f"export HF_HUB_OFFLINE=1 HF_HOME={cache}"):
        with serving("owner/name", tmp_path, prefix=under(read_only(), settings)) as server:  # from the cache alone
            draw(server.url)


@pytest.mark.parametrize("streams", ["full", "closed", "a pipe that nobody reads"])
def test_a_service_that_can_not_log_draws(checkpoint: Path, streams: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reader, writer = os.pipe()
    redirections = {"full": ">/dev/full 2>/dev/full", "closed": "<&- >&- 2>&-"}.get(streams, "")
    command = shlex.join([*EASEL, "serve", str(checkpoint), "--port", str(port)])
    process = subprocess.Popen(["sh", "-c", f"exec {command} {redirections}"], stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    server = Server(process, Path(os.devnull))
    server.url = f"http://127.0.0.1:{port}"
    try:
        server.wait_until_ready(time.monotonic() + START_TIMEOUT_S)
        draw(server.url)
        for pid in (process.pid, *server.workers()):
            held = {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in range(3)}
            assert all(one.startswith(("/dev/", "pipe:")) and "shm" not in one for one in held), held
        replace_worker(server)
        draw(server.url)
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()


def easel(*arguments: Path | str, before: str = "true", streams: str = "", after: str = "true") -> list[str]:
    """What one command, and `after` it another, print line by line; `before` them, mounts can be made."""
    command = shlex.join([*EASEL, *map(str, arguments)])
    script = f"{before}; {command} {streams}; echo status $?; {after}"
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script] if MAY_MOUNT else ["sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=START_TIMEOUT_S,
    )
    assert "Traceback" not in run.stdout
    return run.stdout.splitlines()


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A folder to mount something on."""
    folder = tmp_path / "small"
    folder.mkdir()
    return folder


DRAW = ("--prompt", "a", "--size", "128x128", "--steps", "2", "--seed", "1", "--log-level", "warning")


@needs_mounts
def test_a_picture_that_does_not_fit_leaves_what_was_there(checkpoint: Path, small_disk: Path) -> None:
    old = small_disk / "old.png"
    room = f"mount -t tmpfs -o size=16k none {small_disk}; echo an old picture > {old}"
    lines = easel("generate", checkpoint, *DRAW, "-o", old, before=room, after=f"ls -A {small_disk}; cat {old}")
    assert lines[-4:] == [
        f"easel: can't write {old}: No space left on device",
        "status 1",
        "old.png",
        "an old picture",
    ]


@needs_mounts
def test_a_checkpoint_that_does_not_fit_leaves_nothing(checkpoint: Path, small_disk: Path) -> None:
    room = f"mount -t tmpfs -o size=1m none {small_disk}"
    lines = easel("quantize", checkpoint, "-o", small_disk / "fp8", before=room, after=f"ls -A {small_disk}")
    assert lines[-2].startswith(f"easel: {small_disk}/fp8 can't be written: ") and "No space left" in lines[-2]
    assert lines[-1] == "status 1"


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-"])
def test_a_progress_bar_that_can_not_be_seen_costs_no_picture(checkpoint: Path, tmp_path: Path, streams: str) -> None:
    lines = easel("generate", checkpoint, *DRAW, "-o", tmp_path / "a.png", streams=streams)
    assert lines == [f"{tmp_path}/a.png seed 1", "status 0"]
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("streams", "reason"), [(">/dev/full", "No space left on device"), ("| true", "Broken pipe")], ids=["full", "pipe"]
)
def test_what_can_not_be_printed_ends_with_the_reason(streams: str, reason: str) -> None:
    lines = easel("doctor", "--log-level", "warning", streams=streams)
    assert f"easel: can't write to standard output: {reason}" in lines
