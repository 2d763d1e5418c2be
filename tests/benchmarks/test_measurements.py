"""The benchmarks that start an engine, on little work: they run, and their figures make sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import determinism, idle, load, overhead, quality
from tests.server import serving


def test_overhead(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    overhead.main(["--seconds", "0.3", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert 0 < figures["request_ms_p50"] <= figures["request_ms_p95"]
    for live in ("1", "64"):
        assert figures["scheduler_ms"][live] > 0 and 0 < figures["step_ms"][live] < 100


def test_determinism(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert determinism.main(["--model", str(checkpoint), "--dtypes", "float32", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [row["composition"] for row in rows] == list(determinism.COMPOSITIONS)


def test_quality(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(
        quality, "SETTINGS", {name: quality.SETTINGS[name] for name in ("transformer fp8", "prefix KV fp8")}
    )
    quality.main(
        ["--model", str(checkpoint), "--dtype", "bfloat16", "--side", "64", "--prompts", "1", "--json", str(file)]
    )
    figures = json.loads(file.read_text())
    swept = {row["name"]: row for row in figures["predictions"]}
    assert swept["all"]["fp8_part"] == 1
    parts = [row["fp8_part"] for name, row in swept.items() if name.startswith("only")]
    assert sum(parts) == pytest.approx(1)
    for name, row in swept.items():
        undisturbed = [error == 0 for error in row["errors"]]
        if name in quality.PROTECTIONS:
            exact_steps = quality.PROTECTIONS[name].first_steps > 0
            assert undisturbed[0] == exact_steps and undisturbed[-1] and not all(undisturbed)
        elif name.startswith("prefix KV"):
            assert not any(undisturbed)
        else:
            assert all(undisturbed) if row["fp8_part"] == 0 else not any(undisturbed)
        assert len(row["errors"]) == 5 and max(row["errors"]) < 0.2
    assert [row["name"] for row in figures["pictures"]] == ["transformer fp8", "prefix KV fp8"]
    assert all(row["worst_psnr_db"] > 10 for row in figures["pictures"])


def test_load_on_a_live_server(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, edits, guidance and refusals, and every picture that is looked at is the same alone."""
    file = tmp_path / "report.json"
    options = ["--clients", "6", "--duration", "3", "--sizes", "64:2,96:1", "--edits", "0.3", "--guided", "0.3"]
    with serving(checkpoint, tmp_path, "--max-queue", "4") as server:
        assert load.main(["--url", server.url, *options, "--steps", "2", "--verify", "3", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["problems"] == [] and report["verified"] == 3
    assert report["statuses"]["200"] > 5 and report["served_per_s"] > 0
    assert "pictures/s" in capsys.readouterr().out


def test_loads_on_a_live_server(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it finds depends on the machine; that it finds nothing lost or mixed up does not."""
    file = tmp_path / "sweep.json"
    options = ["--loads", "0.5,3", "--duration", "3", "--sizes", "64", "--steps", "4", "--json", str(file)]
    with serving(checkpoint, tmp_path, "--max-queue", "2") as server:
        load.main(["--url", server.url, *options])
    found = json.loads(file.read_text())
    assert found["capacity_per_s"] > 0
    assert [report["problems"] for report in found["reports"].values()] == [[], []]
    low, high = found["reports"]["0.5"], found["reports"]["3.0"]
    assert low["statuses"]["200"] > 0 and high["statuses"].keys() == {"200", "429"}
    assert high["waits"]["count"] > 0 and high["waits"]["asked_again"] > 0
    assert "waits true" in capsys.readouterr().out


def test_idle(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "idle.json"
    monkeypatch.setattr(idle, "SETTLING_S", 0)
    idle.main(["--seconds", "1", "--model", str(checkpoint), "--json", str(file)])
    figures = json.loads(file.read_text())
    assert 0 <= figures["service_cpu_s"] <= 4 and 0 <= figures["worker_cpu_s"] <= 4
