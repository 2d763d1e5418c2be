"""The scheduler alone: no network, no thread, no clock."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost_model import CostModel
from engine.memory import UNLIMITED, MemoryModel
from engine.request import PreparedRequest
from engine.scheduler import Limits, Policy, Scheduler
from engine.work import (
    DecodeImage,
    DecodePreview,
    DenoiseStep,
    DropPrefix,
    EncodePrompt,
    Prefill,
    Sample,
    Work,
    request_ids,
)
from models.inputs import TokenizedPrompt
from models.layout import Grid, prefix_layout

SQUARE, WIDE = Grid(4, 4), Grid(4, 8)


def request(
    request_id: str,
    *,
    steps: int = 2,
    images: int = 1,
    branches: int = 1,
    grid: Grid = SQUARE,
    prompt_len: int = 3,
    **changes: Any,
) -> PreparedRequest:
    prompt = TokenizedPrompt((1,) * prompt_len, 0, prefix_layout([False] * prompt_len, []))
    prepared = PreparedRequest(
        request_id=request_id,
        prompts=(prompt,) * branches,
        condition_images=(),
        target_grid=grid,
        crop=(slice(None), slice(None)),
        sigmas=tuple(1 - step / steps for step in range(steps + 1)),
        seeds=tuple(range(images)),
        true_cfg_scale=1.0,
    )
    return replace(prepared, **changes)


def scheduler_of(*requests: PreparedRequest, memory: MemoryModel = UNLIMITED, **limits: Any) -> Scheduler:
    scheduler = Scheduler(Limits(**limits), CostModel(), memory)
    for prepared in requests:
        scheduler.add(prepared)
    return scheduler


def drain(scheduler: Scheduler, now_s: float = 0.0) -> list[Work]:
    """Everything the scheduler hands out until it has nothing more."""
    done: list[Work] = []
    while (work := scheduler.next_work(now_s)) is not None:
        scheduler.complete(work)
        done.append(work)
        assert len(done) < 10_000
    return done


def steps_of(work: list[Work]) -> list[tuple[Sample, ...]]:
    return [item.samples for item in work if isinstance(item, DenoiseStep)]


def test_one_request_passes_every_phase_once() -> None:
    scheduler = scheduler_of(request("a", steps=2))
    key = request("a").batch_key
    assert drain(scheduler) == [
        EncodePrompt("a"),
        Prefill("a"),
        DenoiseStep(key, (Sample("a", 0, 0),)),
        DenoiseStep(key, (Sample("a", 0, 1),)),
        DecodeImage("a", 0),
    ]
    assert len(scheduler) == 0


def test_a_late_request_joins_at_a_step_boundary() -> None:
    scheduler = scheduler_of(request("a", steps=4))
    for _ in range(4):  # encode, prefill, two steps
        scheduler.complete(scheduler.next_work(0.0))  # type: ignore[arg-type]
    scheduler.add(request("b", steps=4, prompt_len=50))
    work = drain(scheduler)
    assert work[0] == EncodePrompt("b")
    joined = next(samples for samples in steps_of(work) if len(samples) == 2)
    assert joined == (Sample("a", 0, 2), Sample("b", 0, 0))


def test_no_step_waits_for_more_than_one_item_of_another_request() -> None:
    """Between two steps of the leader at most one encode, prefill or decode of somebody else runs."""
    scheduler = scheduler_of(
        *(request(f"r{index}", steps=5 + index, images=2, preview_steps=(1, 3)) for index in range(4))
    )
    others = 0
    leading = False
    for item in drain(scheduler):
        if isinstance(item, DenoiseStep):
            leading, others = True, 0
        elif leading and len(scheduler):
            others += 1
            assert others <= 2  # the second is the leader's own


def test_the_shortest_remaining_work_leads() -> None:
    long, short = request("long", steps=200, grid=WIDE), request("short", steps=3)
    scheduler = scheduler_of(long)
    for _ in range(5):
        scheduler.complete(scheduler.next_work(0.0))  # type: ignore[arg-type]
    scheduler.add(short)
    order = [item.request_id for item in drain(scheduler) if isinstance(item, DecodeImage)]
    assert order == ["short", "long"]


def test_fcfs_keeps_the_order_of_arrival() -> None:
    requests = [request("long", steps=20, grid=WIDE), request("short", steps=3, arrived_s=1.0)]
    order = [
        item.request_id for item in drain(scheduler_of(*requests, policy=Policy.FCFS)) if isinstance(item, DecodeImage)
    ]
    assert order == ["long", "short"]


def test_priority_goes_before_length_and_starvation_before_both() -> None:
    first = request("first", steps=30, priority=1, arrived_s=100.0)
    old = request("old", steps=90, grid=WIDE, arrived_s=0.0)
    short = request("short", steps=1, grid=Grid(6, 6), arrived_s=100.0)

    def order(now_s: float) -> list[str]:
        work = drain(scheduler_of(first, old, short, max_stretch=10.0), now_s)
        return [item.request_id for item in work if isinstance(item, DecodeImage)]

    assert order(100.0)[0] == "old"  # has been here for far more than ten times its isolated time
    assert order(0.0) == ["first", "short", "old"]


def test_rows_and_tokens_are_bounded_and_a_larger_request_runs_alone() -> None:
    guided, plain = request("guided", branches=2, images=2), request("plain", images=3)
    for samples in steps_of(drain(scheduler_of(guided, plain, max_batch_rows=2))):
        assert sum(2 if sample.request_id == "guided" else 1 for sample in samples) <= 2
    tight = steps_of(drain(scheduler_of(guided, max_batch_rows=1)))
    assert all(len(samples) == 1 for samples in tight) and len(tight) == 4
    by_tokens = steps_of(
        drain(scheduler_of(*(request(f"r{i}", steps=6) for i in range(5)), token_budget=3 * SQUARE.num_tokens))
    )
    assert max(len(samples) for samples in by_tokens) == 3


def test_a_reduced_budget_halves_the_next_batches() -> None:
    scheduler = scheduler_of(*(request(f"r{i}", steps=6) for i in range(4)))
    while not isinstance(work := scheduler.next_work(0.0), DenoiseStep) or len(work.samples) < 4:
        assert work is not None
        scheduler.complete(work)
    scheduler.reduce_budget(work)
    assert max(len(samples) for samples in steps_of(drain(scheduler))) == 2


def test_a_request_that_runs_alone_shares_no_step() -> None:
    scheduler = scheduler_of(request("a", steps=3), request("b", steps=3, alone=True), request("c", steps=3))
    for samples in steps_of(drain(scheduler)):
        assert len({sample.request_id for sample in samples}) == 1 or all(s.request_id != "b" for s in samples)


def test_finished_pictures_leave_before_more_steps() -> None:
    work = drain(scheduler_of(request("long", steps=5), request("short", steps=1)))
    finished = work.index(DecodeImage("short", 0))
    assert isinstance(work[finished - 1], DenoiseStep)
    assert len(steps_of(work[finished:])) >= 3


def test_previews_are_decoded_at_their_steps() -> None:
    key = request("a").batch_key
    assert drain(scheduler_of(request("a", steps=4, preview_steps=(1, 3))))[2:] == [
        DenoiseStep(key, (Sample("a", 0, 0),)),
        DecodePreview("a", 0, 1),
        DenoiseStep(key, (Sample("a", 0, 1),)),
        DenoiseStep(key, (Sample("a", 0, 2),)),
        DecodePreview("a", 0, 3),
        DenoiseStep(key, (Sample("a", 0, 3),)),
        DecodeImage("a", 0),
    ]


def test_a_late_preview_gives_way_to_the_next_and_to_the_picture() -> None:
    """Pictures of one batch reach their previews together, and only one decode fits between two steps."""
    work = drain(scheduler_of(request("a", images=6, steps=4, preview_steps=(1, 2))))
    previews = [item for item in work if isinstance(item, DecodePreview)]
    assert len(previews) == 3  # after steps 1, 2 and 3
    assert [preview.step for preview in previews] == [1, 2, 2]
    assert len({preview.image_index for preview in previews}) == 3
    last = max(index for index, item in enumerate(work) if isinstance(item, DenoiseStep))
    assert all(isinstance(item, DecodeImage) for item in work[last + 1 :]) and len(work[last + 1 :]) == 6


def test_deadlines_end_what_can_not_be_in_time() -> None:
    costs = CostModel()
    hopeless = request("hopeless", steps=100, deadline_s=10.0)
    fine = request("fine", steps=2, deadline_s=10.0)
    scheduler = scheduler_of(hopeless, fine, request("patient", steps=100))
    assert scheduler.expired(10.0 - costs.isolated_s(hopeless) - 0.01) == ()
    assert scheduler.expired(10.0 - costs.isolated_s(hopeless) + 0.01) == ("hopeless",)
    scheduler.remove("hopeless")
    while not isinstance(work := scheduler.next_work(0.0), DenoiseStep):
        assert work is not None
        scheduler.complete(work)
    assert scheduler.expired(9.999) == ()  # it has been started: only the deadline itself ends it
    assert scheduler.expired(10.001) == ("fine",)


def test_memory_pressure_drops_a_waiting_prefix_and_loses_nothing() -> None:
    big, small = request("big", steps=200, prompt_len=60), request("small", steps=2, prompt_len=50, grid=WIDE)
    memory = MemoryModel(100, 1, 0, 1, 0)  # both states, but only one of the prefixes
    scheduler = scheduler_of(big, memory=replace(memory, budget_bytes=60 + 16 + 32))
    for _ in range(10):
        scheduler.complete(scheduler.next_work(0.0))  # type: ignore[arg-type]
    scheduler.add(small)
    work = drain(scheduler)
    dropped = work.index(DropPrefix("big"))
    assert work.index(EncodePrompt("small")) < dropped < work.index(Prefill("small"))
    assert work.index(DecodeImage("small", 0)) < work.index(Prefill("big"))
    assert [item for item in work if isinstance(item, DecodeImage)] == [DecodeImage("small", 0), DecodeImage("big", 0)]
    steps = [sample.step for samples in steps_of(work) for sample in samples if sample.request_id == "big"]
    assert steps == list(range(8, 200))  # it goes on where it was


def test_what_can_never_fit_is_refused() -> None:
    scheduler = scheduler_of(memory=MemoryModel(10, 1, 1, 1, 1))
    assert not scheduler.fits(request("a"))
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.add(request("a"))


def test_a_removed_request_never_comes_back() -> None:
    scheduler = scheduler_of(request("a", steps=1), request("b", steps=3))
    while not isinstance(work := scheduler.next_work(0.0), DecodeImage):
        assert work is not None
        scheduler.complete(work)
    assert scheduler.remove("a")
    assert not scheduler.remove("a")
    scheduler.complete(work)
    assert all("a" not in request_ids(item) for item in drain(scheduler))


def test_the_same_id_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="already"):
        scheduler_of(request("a"), request("a"))


REQUESTS = st.builds(
    dict,
    steps=st.integers(1, 4),
    images=st.integers(1, 3),
    branches=st.integers(1, 2),
    grid=st.sampled_from([SQUARE, WIDE]),
    prompt_len=st.integers(1, 30),
    priority=st.integers(-1, 1),
    alone=st.booleans(),
    preview_steps=st.sampled_from([(), (1,), (1, 2), (1, 2, 3)]),
)


@given(
    max_rows=st.integers(1, 6),
    token_budget=st.integers(1, 200),
    budget_bytes=st.integers(150, 600),
    policy=st.sampled_from(Policy),
    max_stretch=st.floats(0.5, 20),
    events=st.lists(st.one_of(REQUESTS, st.just("step"), st.integers(0, 5)), max_size=40),
)
def test_nothing_is_lost_duplicated_or_over_a_bound(
    max_rows: int,
    token_budget: int,
    budget_bytes: int,
    policy: Policy,
    max_stretch: float,
    events: list[dict[str, Any] | str | int],
) -> None:
    """Random arrivals, removals and steps: what stays gets each of its steps once and in order, and is decoded; rows,
    tokens and bytes stay within their bounds; and whoever is overdue leads."""
    memory = MemoryModel(budget_bytes, 1, 1, 1, 1)
    limits = Limits(max_batch_rows=max_rows, token_budget=token_budget, policy=policy, max_stretch=max_stretch)
    scheduler = Scheduler(limits, CostModel(), memory)
    alive: dict[str, PreparedRequest] = {}
    steps: Counter[tuple[str, int]] = Counter()
    decoded: Counter[tuple[str, int]] = Counter()
    previewed: dict[tuple[str, int], int] = {}
    prefilled: set[str] = set()
    now_s = 0.0

    def overdue(name: str) -> bool:
        unfinished = any(steps[name, image] < alive[name].num_steps for image in range(alive[name].num_images))
        isolated_s = CostModel().isolated_s(alive[name])
        return unfinished and now_s - alive[name].arrived_s >= max_stretch * isolated_s

    def step() -> bool:
        nonlocal now_s
        work = scheduler.next_work(now_s)
        if work is None:
            return False
        names = request_ids(work)
        assert all(name in alive for name in names)
        if isinstance(work, Prefill):
            prefilled.add(work.request_id)
        if isinstance(work, DropPrefix):
            prefilled.remove(work.request_id)
        if isinstance(work, DecodeImage):
            decoded[work.request_id, work.image_index] += 1
        if isinstance(work, DecodePreview):
            picture = work.request_id, work.image_index
            assert work.step in alive[work.request_id].preview_steps
            assert previewed.get(picture, 0) < work.step <= steps[picture] < alive[work.request_id].num_steps
            previewed[picture] = work.step
        if isinstance(work, DenoiseStep):
            rows = sum(alive[sample.request_id].num_branches for sample in work.samples)
            tokens = rows * work.key.target_grid.num_tokens
            assert len(work.samples) == 1 or (rows <= max_rows and tokens <= token_budget)
            late = [name for name in alive if overdue(name)]
            oldest = min(late, key=lambda name: (alive[name].arrived_s, list(alive).index(name)), default=None)
            if oldest is not None and oldest in prefilled:
                assert oldest in names
            for sample in work.samples:
                name = sample.request_id
                assert name in prefilled
                assert alive[name].batch_key == work.key
                assert len(names) == 1 or not alive[name].alone
                assert sample.step == steps[name, sample.image_index]
                steps[name, sample.image_index] += 1
        scheduler.complete(work)
        assert scheduler.held_bytes <= budget_bytes
        now_s += 0.01
        return True

    for index, event in enumerate(events):
        if isinstance(event, dict):
            new = request(f"r{index}", arrived_s=now_s, **event)
            if scheduler.fits(new):
                alive[new.request_id] = new
                scheduler.add(new)
        elif event == "step":
            step()
        elif alive:
            victim = sorted(alive)[event % len(alive)]
            scheduler.remove(victim)
            del alive[victim]
    while step():
        pass
    assert len(scheduler) == 0
    assert scheduler.held_bytes == 0
    for name, prepared in alive.items():
        for image in range(prepared.num_images):
            assert steps[name, image] == prepared.num_steps
            assert decoded[name, image] == 1


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
