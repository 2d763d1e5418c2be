"""The command as a user meets it: flags, messages, exit statuses, and pictures that equal the service's."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.cli import build_parser, flag_of, main
from app.settings import Settings

CHOICES = {
    "chat_content": "markdown",
    "dtype": "auto",
    "log_format": "json",
    "offload": "block",
    "worker": "inline",
    "policy": "fcfs",
    "prefix_kv_dtype": "fp8_v",
    "text_encoder_dtype": "fp8",
    "transformer_dtype": "fp8",
    "vae_tiling": "on",
}  # a word that the flag takes
START_SECONDS = 120  # torch alone takes ten on a busy machine


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("EASEL_")]:
        monkeypatch.delenv(name)


def easel(command_line: str) -> None:
    main(shlex.split(command_line))


def fails(*arguments: str) -> str:
    """Why the command line `arguments` ends in status 1."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, str), "a message is status 1"
    return caught.value.code


def test_every_setting_is_a_flag() -> None:
    for name in Settings.model_fields:
        args = build_parser().parse_args(["serve", flag_of(name), CHOICES.get(name, "error")])
        assert name in vars(args)


def test_absent_flags_leave_room_for_variables() -> None:
    assert vars(build_parser().parse_args(["serve"])) == {"command": "serve"}


def test_model_is_positional_or_a_flag_but_not_both() -> None:
    assert build_parser().parse_args(["serve", "org/name"]).model == "org/name"
    assert build_parser().parse_args(["serve", "--model", "org/name"]).model == "org/name"
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "org/name", "--model", "org/name"])


def test_lists_repeat_and_split() -> None:
    args = build_parser().parse_args(["serve", "--api-key", "a", "--api-key", "b,c"])
    assert args.api_key == ["a", "b", "c"]


@pytest.mark.parametrize("arguments", [[], ["serve", "--help"], ["generate", "--help"], ["--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    printed = capsys.readouterr()
    assert (caught.value.code, bool(printed.err)) == ((0, False) if arguments else (2, True))
    assert "usage: easel" in printed.out + printed.err


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serve", "--max-queu", "1"], ["paint"]])
def test_misspelled_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[min(1, len(arguments) - 1)] in capsys.readouterr().err


def test_bad_setting() -> None:
    assert fails("serve", "--port", "70000") == "easel: port: Input should be less than or equal to 65535"
    assert "can't read" in fails("serve", "--config", "absent.yaml")


def test_generate_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    easel(f"generate --prompt cat --size 96x64 --steps 2 --seed 7 -n 2 -o {tmp_path}/cat.png")
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"{tmp_path}/cat-1.png seed 7", f"{tmp_path}/cat-2.png seed 8"]
    assert "4/4" in printed.err
    for number in (1, 2):
        with Image.open(tmp_path / f"cat-{number}.png") as picture:
            assert (picture.format, picture.size) == ("PNG", (96, 64))


def test_generate_edits_files(tmp_path: Path) -> None:
    source = tmp_path / "in.png"
    Image.new("RGB", (64, 64), "red").save(source)
    output = tmp_path / "out.jpg"
    easel(
        f"generate --prompt blue --image {source} --image {source} --size 64x64 --steps 1"
        f" --negative-prompt red --true-cfg-scale 2 -o {output}"
    )
    with Image.open(output) as picture:
        assert (picture.format, picture.size) == ("JPEG", (64, 64))


def test_a_quantized_checkpoint_draws_what_the_flags_draw(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    easel(f"quantize {checkpoint} -o {tmp_path}/fp8 --fp8-first-blocks 1 --fp8-ignored-layers img_mlp.out")
    assert capsys.readouterr().out == f"{tmp_path}/fp8\n"
    drawing = "--prompt cat --size 64x64 --steps 2 --seed 7 --prefix-kv-dtype fp8"
    flags = "--transformer-dtype fp8 --text-encoder-dtype fp8 --fp8-first-blocks 1 --fp8-ignored-layers img_mlp.out"
    easel(f"generate {tmp_path}/fp8 {drawing} -o {tmp_path}/written.png")
    easel(f"generate {checkpoint} {drawing} {flags} -o {tmp_path}/flags.png")
    easel(f"generate {checkpoint} --prompt cat --size 64x64 --steps 2 --seed 7 -o {tmp_path}/exact.png")
    written, at_start, exact = (
        np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("written", "flags", "exact")
    )
    assert np.array_equal(written, at_start)
    assert not np.array_equal(written, exact)
    assert "exists already" in fails("quantize", str(checkpoint), "-o", f"{tmp_path}/fp8")
    reason = fails(
        "generate", str(checkpoint), *shlex.split(f"{drawing} -o {tmp_path}/x.png"), "--fp8-ignored-layers=typo"
    )
    assert reason == "easel: fp8_ignored_layers: no layer that would be FP8 is called typo"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-o", "out.gif"], "the name must end in"),
        (["-o", "absent/out.png"], "absent is not a folder"),
        (["-o", "out.png", "--image", "absent.png"], "can't read absent.png"),
        (["-o", "out.png", "--image", "text.png"], "text.png: An image could not be read"),
        (["-o", "out.png", *["--image", "text.png"] * 5], "at most 4 images"),
        (["-o", "out.png", "--size", "64"], "size"),
        (["-o", "out.png", "--steps", "0"], "num_inference_steps"),
        (["empty", "-o", "out.png"], ".json is missing"),
    ],
)
def test_generate_refuses(arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty").mkdir()
    assert reason in fails("generate", "--prompt", "a cat", *arguments)
    assert not (tmp_path / "out.png").exists()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `easel serve` with the flags given; whatever still runs at the end is stopped."""
    processes: list[subprocess.Popen[str]] = []

    def run(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "app", "serve", *flags]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=START_SECONDS).close()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        else:
            return
        time.sleep(0.2)
    raise TimeoutError("the service did not turn ready")


def post(port: int, fields: dict[str, object]) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/images/generations",
        json.dumps(fields).encode(),
        {"content-type": "application/json", "authorization": "Bearer key"},
    )
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_serve_says_that_the_port_is_taken(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, log = (process := start("--port", str(port))).communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    assert log.startswith(f"easel: can't listen on 127.0.0.1 port {port}: Address already in use")


def test_serve_says_what_is_wrong_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    _, log = (process := start(str(tmp_path), "--port", "0")).communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    last_line = log.splitlines()[-1]
    assert last_line.startswith("easel: the model could not be loaded: ")
    assert str(tmp_path) in last_line and last_line.endswith(".json is missing")


def test_serve_draws_what_generate_draws_and_drains(start: Start, tmp_path: Path) -> None:
    port = free_port()
    process = start("--port", str(port), "--api-key", "key", "--drain-seconds", "0.1")
    output = tmp_path / "out.png"
    easel(f"generate --prompt cat --size 64x64 --steps 2 --seed 7 -o {output}")
    wait_until_ready(port)

    fields = {"prompt": "cat", "size": "64x64", "num_inference_steps": 2, "seed": 7}
    status, answer = post(port, fields)
    assert status == 200
    assert isinstance(answer["data"], list)
    served, drawn = (
        np.asarray(Image.open(file).convert("RGBA")).astype(int)
        for file in (io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])), output)
    )
    assert np.abs(served - drawn).max() <= 1  # on a busy machine two processes may round differently

    with ThreadPoolExecutor() as pool:  # a request that outlives the drain gets an answer all the same
        long = pool.submit(post, port, {"prompt": "cat", "size": "256x256", "num_inference_steps": 200, "n": 10})
        time.sleep(4)
        process.send_signal(signal.SIGTERM)
        status, answer = long.result()
    assert status == 503, answer
    process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0
