"""The scheduler alone: no network, no thread, no clock."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import PreparedRequest
from engine.cost_model import CostModel
from engine.memory import MemoryModel
from engine.scheduler import Limits, Policy, Scheduler
from engine.work import DecodeImage, DenoiseStep, DropPrefix, EncodePrompt, Prefill, Sample, Work, request_ids
from models.inputs import TokenizedPrompt
from models.layout import Grid, prefix_layout

SQUARE, WIDE = Grid(4, 4), Grid(4, 8)


def request(
    request_id: str, *, steps: int = 2, images: int = 1, branches: int = 1, grid: Grid = SQUARE, prompt_len: int = 3
) -> PreparedRequest:
    prompt = TokenizedPrompt((1,) * prompt_len, 0, prefix_layout([False] * prompt_len, []))
    return PreparedRequest(
        request_id=request_id,
        prompts=(prompt,) * branches,
        condition_images=(),
        target_grid=grid,
        crop=(slice(None), slice(None)),
        sigmas=tuple(1 - step / steps for step in range(steps + 1)),
        seeds=tuple(range(images)),
        true_cfg_scale=1.0,
    )


def drain(scheduler: Scheduler) -> list[Work]:
    """Everything the scheduler hands out until it has nothing more."""
    done: list[Work] = []
    while (work := scheduler.next_work()) is not None:
        scheduler.complete(work)
        done.append(work)
        assert len(done) < 10_000
    return done


def test_one_request_passes_every_phase_once() -> None:
    scheduler = Scheduler(max_batch_rows=8)
    scheduler.add(request("a", steps=2))
    key = request("a").batch_key
    assert drain(scheduler) == [
        EncodePrompt("a"),
        Prefill("a"),
        DenoiseStep(key, (Sample("a", 0, 0),)),
        DenoiseStep(key, (Sample("a", 0, 1),)),
        DecodeImage("a", 0),
    ]
    assert len(scheduler) == 0


def test_a_late_request_joins_at_the_next_step() -> None:
    scheduler = Scheduler(max_batch_rows=8)
    scheduler.add(request("a", steps=4))
    for _ in range(4):  # encode, prefill, two steps
        scheduler.complete(scheduler.next_work())  # type: ignore[arg-type]
    scheduler.add(request("b", steps=4, prompt_len=50))
    steps = [work for work in drain(scheduler) if isinstance(work, DenoiseStep)]
    assert steps[0].samples == (Sample("a", 0, 2), Sample("b", 0, 0))
    assert steps[-1].samples == (Sample("b", 0, 3),)


def test_other_keys_wait_for_the_oldest() -> None:
    scheduler = Scheduler(max_batch_rows=8)
    for name, grid in (("a", SQUARE), ("b", WIDE), ("c", SQUARE)):
        scheduler.add(request(name, grid=grid))
    order = [request_ids(work) for work in drain(scheduler) if isinstance(work, DenoiseStep)]
    assert order == [("a", "c"), ("a", "c"), ("b",), ("b",)]


def test_rows_are_bounded_and_a_larger_request_runs_alone() -> None:
    scheduler = Scheduler(max_batch_rows=2)
    scheduler.add(request("guided", branches=2, images=2))
    scheduler.add(request("plain"))
    steps = [work.samples for work in drain(scheduler) if isinstance(work, DenoiseStep)]
    assert steps[0] == (Sample("guided", 0, 0),)
    tight = Scheduler(max_batch_rows=1)
    tight.add(request("guided", branches=2))
    first = next(work for work in drain(tight) if isinstance(work, DenoiseStep))
    assert first.samples == (Sample("guided", 0, 0),)


def test_finished_pictures_leave_before_more_steps() -> None:
    scheduler = Scheduler(max_batch_rows=8)
    scheduler.add(request("long", steps=5))
    scheduler.add(request("short", steps=1))
    work = drain(scheduler)
    first_step = next(index for index, item in enumerate(work) if isinstance(item, DenoiseStep))
    assert work[first_step + 1] == DecodeImage("short", 0)


def test_a_removed_request_never_comes_back() -> None:
    scheduler = Scheduler(max_batch_rows=8)
    scheduler.add(request("a", steps=1))
    scheduler.add(request("b", steps=3))
    while not isinstance(work := scheduler.next_work(), DecodeImage):
        assert work is not None
        scheduler.complete(work)
    assert scheduler.remove("a") and not scheduler.remove("a")
    scheduler.complete(work)
    assert all("a" not in request_ids(item) for item in drain(scheduler))


def test_the_same_id_twice_is_refused() -> None:
    scheduler = Scheduler(max_batch_rows=8)
    scheduler.add(request("a"))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(request("a"))


REQUESTS = st.builds(
    dict,
    steps=st.integers(1, 4),
    images=st.integers(1, 3),
    branches=st.integers(1, 2),
    grid=st.sampled_from([SQUARE, WIDE]),
)


@given(st.integers(1, 6), st.lists(st.one_of(REQUESTS, st.just("step"), st.integers(0, 5)), max_size=40))
def test_nothing_is_lost_duplicated_or_over_the_bound(max_rows: int, events: list[dict[str, Any] | str | int]) -> None:
    """Random arrivals, removals and steps: what stays gets each of its steps once and in order, and is decoded."""
    scheduler = Scheduler(max_rows)
    alive: dict[str, PreparedRequest] = {}
    steps: Counter[tuple[str, int]] = Counter()
    decoded: Counter[tuple[str, int]] = Counter()

    def step() -> bool:
        work = scheduler.next_work()
        if work is None:
            return False
        if isinstance(work, DenoiseStep):
            rows = sum(alive[sample.request_id].num_branches for sample in work.samples)
            assert rows <= max_rows or len(work.samples) == 1
            for sample in work.samples:
                assert alive[sample.request_id].batch_key == work.key
                assert sample.step == steps[sample.request_id, sample.image_index]
                steps[sample.request_id, sample.image_index] += 1
        assert all(name in alive for name in request_ids(work))
        if isinstance(work, DecodeImage):
            decoded[work.request_id, work.image_index] += 1
        scheduler.complete(work)
        return True

    for index, event in enumerate(events):
        if isinstance(event, dict):
            alive[f"r{index}"] = request(f"r{index}", **event)
            scheduler.add(alive[f"r{index}"])
        elif event == "step":
            step()
        elif alive:
            victim = sorted(alive)[event % len(alive)]
            scheduler.remove(victim)
            del alive[victim]
    while step():
        pass
    assert len(scheduler) == 0
    for name, prepared in alive.items():
        for image in range(prepared.num_images):
            assert steps[name, image] == prepared.num_steps
            assert decoded[name, image] == 1


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
