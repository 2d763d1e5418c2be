"""The simulation behind the scheduling figures: it loses nobody, repeats itself, and its policies are what they claim.

All times are virtual, so nothing here depends on the machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulated_gpu as gpu
from benchmarks.outcomes import Outcome, summarize
from benchmarks.scheduling import WARM_UP, check, main, run_cell
from benchmarks.simulation import (
    Drain,
    RunToCompletion,
    SchedulingPolicy,
    isolated_s,
    make_request,
    make_scheduler,
    simulate,
)
from benchmarks.starvation import StarvationWatch
from benchmarks.traffic import EDITS, SIZES, UNIFORM, Arrival, Kind, Mix, poisson_arrivals
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Work

SMALL, LARGE = Kind(512), Kind(1024)
POLICIES = {"ours": lambda: make_scheduler(0)[0], "run to completion": RunToCompletion, "drain": Drain}
each_policy = pytest.mark.parametrize("name", POLICIES)


def arrivals_of(mix: Mix, load: float, count: int, seed: int = 0) -> list[Arrival]:
    return poisson_arrivals(mix, load / mix.mean_s(isolated_s), count, seed)


class Recorder:
    """A policy whose work is written down."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.work: list[Work] = []
        self.add = policy.add
        self.next_work = policy.next_work

    def __len__(self) -> int:
        return len(self.policy)

    def complete(self, work: Work) -> tuple[str, ...]:
        self.work.append(work)
        return self.policy.complete(work)

    @property
    def batches(self) -> list[tuple[str, ...]]:
        """Who shared a step, without repetition."""
        steps = [tuple(s.request_id for s in work.samples) for work in self.work if isinstance(work, DenoiseStep)]
        return [ids for ids, before in zip(steps, [(), *steps], strict=False) if ids != before]


@pytest.mark.parametrize(
    ("kind", "rows", "milliseconds"),
    [(Kind(256), 1, 7), (Kind(512), 1, 25.5), (Kind(512), 4, 100), (Kind(1024), 1, 112), (Kind(2048), 1, 640)],
)
def test_the_gpu_takes_the_measured_times(kind: Kind, rows: int, milliseconds: float) -> None:
    request = make_request("a", kind, 0.0)
    assert 1000 * gpu.step_s([request] * rows) == pytest.approx(milliseconds, rel=0.05)


def test_guidance_doubles_the_rows_and_a_condition_image_adds_fifteen_percent() -> None:
    plain, guided, edit = (make_request("", kind, 0.0) for kind in (LARGE, Kind(1024, guided=True), Kind(1024, 1)))
    assert gpu.step_s([guided]) == pytest.approx(2 * gpu.step_s([plain]), rel=0.01)
    assert gpu.step_s([edit]) == pytest.approx(1.15 * gpu.step_s([plain]), rel=0.01)
    assert gpu.prefill_s(edit) == pytest.approx(0.2, rel=0.05)


def test_the_profile_predicts_what_the_gpu_takes() -> None:
    _, costs = make_scheduler(0)
    for kind in (SMALL, LARGE, Kind(1024, guided=True)):
        request = make_request("", kind, 0.0)
        assert costs.isolated_s(request) == pytest.approx(gpu.isolated_s(request), rel=0.1)


def test_arrivals_follow_rate_shares_and_seed() -> None:
    arrivals = poisson_arrivals(EDITS, 2.0, 4000, seed=3)
    assert arrivals == poisson_arrivals(EDITS, 2.0, 4000, seed=3) != poisson_arrivals(EDITS, 2.0, 4000, seed=4)
    assert len(arrivals) / arrivals[-1].at_s == pytest.approx(2.0, rel=0.05)
    kinds = [arrival.kind for arrival in arrivals]
    assert sum(kind.side_px == 512 for kind in kinds) / len(kinds) == pytest.approx(0.6, abs=0.03)
    assert sum(kind.num_condition_images for kind in kinds) / len(kinds) == pytest.approx(0.25, abs=0.03)
    assert sum(kind.guided for kind in kinds) / len(kinds) == pytest.approx(0.15, abs=0.03)
    assert sum(EDITS.kinds().values()) == pytest.approx(1)


@each_policy
def test_every_request_gets_all_its_work_once(name: str) -> None:
    arrivals = arrivals_of(EDITS, 0.85, 80)
    recorder = Recorder(POLICIES[name]())
    outcomes = simulate(recorder, arrivals)
    assert [outcome.status for outcome in outcomes] == [200] * len(arrivals)
    assert all(outcome.stretch > 0.999 for outcome in outcomes)
    for index in range(len(arrivals)):
        own = [work for work in recorder.work if not isinstance(work, DenoiseStep) and work.request_id == str(index)]
        assert own == [EncodePrompt(str(index)), Prefill(str(index)), DecodeImage(str(index), 0)]
    samples = [sample for work in recorder.work if isinstance(work, DenoiseStep) for sample in work.samples]
    assert len(samples) == len(set(samples)) == 40 * len(arrivals)


@each_policy
def test_the_same_seed_gives_the_same_figures(name: str) -> None:
    first, second, other = (run_cell(SIZES, 0.7, name, 40, [seed]) for seed in (5, 5, 6))
    assert first == second != other


@each_policy
def test_a_full_queue_refuses(name: str) -> None:
    outcomes = simulate(POLICIES[name](), [Arrival(0.0, LARGE)] * 5, max_queue=3)
    assert [outcome.status for outcome in outcomes] == [200, 200, 200, 429, 429]


def test_run_to_completion_serves_one_after_the_other() -> None:
    recorder = Recorder(RunToCompletion())
    simulate(recorder, [Arrival(0.0, LARGE), Arrival(0.1, SMALL), Arrival(0.2, SMALL)])
    assert recorder.batches == [("0",), ("1",), ("2",)]


def test_drain_batches_one_shape_and_makes_late_requests_wait() -> None:
    recorder = Recorder(Drain())
    kinds = [SMALL, LARGE, *[SMALL] * 9, LARGE]
    simulate(recorder, [Arrival(0.01 * index, kind) for index, kind in enumerate(kinds)])
    assert recorder.batches == [("0",), ("1", "11"), tuple("23456789"), ("10",)]


def test_ours_lets_the_short_request_by_and_shares_steps_within_the_budget() -> None:
    recorder = Recorder(make_scheduler(0)[0])
    simulate(recorder, [Arrival(0.0, LARGE), Arrival(1.0, SMALL)])
    assert recorder.batches == [("0",), ("1",), ("0",)]
    sharing = Recorder(make_scheduler(0, token_budget=2 * 1024)[0])
    simulate(sharing, [Arrival(0.0, SMALL), Arrival(0.5, SMALL)])
    assert sharing.batches == [("0",), ("0", "1"), ("1",)]


def test_ours_beats_the_drain_on_mixed_sizes_and_is_no_worse_on_one() -> None:
    cells = [run_cell(SIZES, 0.7, policy, 300, [0]) for policy in ("ours", "drain")]
    cells += [run_cell(UNIFORM, 0.7, policy, 200, [0]) for policy in ("ours", "run to completion")]
    checks = check(cells)
    assert len(checks) == 4
    assert not [item for item in checks if not item.passed]


def test_the_watch_sees_a_request_that_is_kept_waiting() -> None:
    _, costs = make_scheduler(0)
    arrivals = [Arrival(0.0, LARGE), *(Arrival(0.02 * index, SMALL) for index in range(1, 60))]
    bounded, never = (make_scheduler(0, max_stretch=stretch)[0] for stretch in (3.0, 1e9))
    promised, broken = StarvationWatch(costs, 3.0), StarvationWatch(costs, 3.0)
    simulate(bounded, arrivals, watch=promised)
    simulate(never, arrivals, watch=broken)
    assert promised.num_starved and promised.holds
    assert broken.num_starved and not broken.holds


def test_a_summary_counts_refused_requests_as_not_served_well() -> None:
    outcomes = [Outcome(0, 1, 1), Outcome(0, 3, 1), Outcome(0, 5, 1), Outcome(0, 0, 1, status=429)]
    summary = summarize(outcomes, duration_s=2.0)
    assert (summary.count, summary.refused, summary.mean_s, summary.p50_s) == (4, 1, 3.0, 3.0)
    assert (summary.share_within, summary.goodput_per_s, summary.max_stretch) == (0.5, 1.0, 5.0)


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    main(["--requests", "5", "--seeds", "0", "--loads", "0.5", "--json", str(file)])
    report = json.loads(file.read_text())
    assert len(report["cells"]) == 9 and report["cells"][0]["summary"]["count"] == 5
    assert "uniform" in capsys.readouterr().out
    assert WARM_UP > 0
