"""The benchmarks that start an engine, on little work: they run, and their figures make sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import determinism, load, overhead
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
