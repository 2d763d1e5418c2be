"""The worker's loop by itself, with a real runner: what happens between two of its steps."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from engine.config import EngineConfig
from engine.loading import load_preparer, load_runner, model_card, read_configs
from engine.messages import Abort, Command, Event, ImageReady, Stop, Submit, WorkDone
from engine.request import GenerationParams
from engine.scheduler import Limits
from engine.work import DenoiseStep, request_ids
from engine.worker import WorkerLoop

LONG = GenerationParams("a red circle", seed=1, size_px=(64, 64), num_steps=100)


def test_an_aborted_request_takes_no_further_step_and_leaves_nothing(checkpoint: Path) -> None:
    """Its neighbour goes on, and whom the loop works for is known at every moment."""
    config = EngineConfig(model=str(checkpoint), device="cpu", dtype="float32")
    configs = read_configs(config)
    preparer, runner = load_preparer(configs, model_card(config, configs)), load_runner(config)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    events: list[Event] = []
    active: list[tuple[str, ...]] = []

    def emit(event: Event) -> None:
        events.append(event)
        match event:
            case WorkDone(DenoiseStep(_, samples)) if any((s.request_id, s.step) == ("gone", 3) for s in samples):
                commands.put(Abort("gone"))
            case ImageReady():
                commands.put(Stop())

    for name, num_steps in (("gone", 100), ("stays", 9)):
        params = replace(LONG, num_steps=num_steps)
        commands.put(Submit(preparer.prepare(params, name, time.monotonic()).request))
    WorkerLoop(runner, Limits(), commands, emit, active.append).run()

    steps = [
        sample
        for e in events
        if isinstance(e, WorkDone) and isinstance(e.work, DenoiseStep)
        for sample in e.work.samples
    ]
    assert [s.step for s in steps if s.request_id == "gone"] == [0, 1, 2, 3]
    assert [s.step for s in steps if s.request_id == "stays"] == list(range(9))
    assert [event.request_id for event in events if isinstance(event, ImageReady)] == ["stays"]
    assert repr(runner) == "<Runner: 0 requests, 0 bytes of prefix>"
    assert [ids for ids in active if ids] == [request_ids(e.work) for e in events if isinstance(e, WorkDone)]
    assert not any(this and following for this, following in pairwise(active)) and active[-1] == ()
