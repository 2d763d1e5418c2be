"""`easel doctor` as a user runs it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import main
from engine.planner import Machine


def test_it_tells_versions_device_and_choices(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(checkpoints["first"]), "--device", "cpu", "--offload", "block"])
    told = capsys.readouterr().out
    for part in ("easel ", "torch ", "no GPU is used", str(checkpoints["first"]), "float32", "4194304 pixels"):
        assert part in told
    lines = [line for line in told.splitlines() if re.match(r" +\d+\.\d +\d+\.\d  (yes|no) ", line)]
    assert len(lines) == 6
    assert "recommended" in lines[0]
    (asked,) = (line for line in lines if "as asked" in line)
    assert asked.partition("<-")[0].rstrip().endswith("yes   --offload block")


def test_a_model_that_fits_nowhere_is_an_error(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = Machine.look
    monkeypatch.setattr(
        Machine, "look", lambda config: replace(look(config), free_bytes=0, host_free_bytes=0), raising=True
    )
    with pytest.raises(SystemExit, match="nothing that can be chosen"):
        main(["doctor", str(checkpoints["first"]), "--device", "cpu"])
    assert "recommended" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "why"), [(["/nowhere/to/be/found"], "neither a folder"), (["--device", "cuda:77"], "no such GPU")]
)
def test_what_cannot_be_looked_at_is_one_line(flags: list[str], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        main(["doctor", *flags])
