"""What the API process knows of an admitted request until it is answered: its pictures, progress and time spent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.cost_model import CostModel
from engine.messages import ImageReady, PreviewReady, WorkDone
from engine.pace import Share
from engine.request import (
    Finished,
    GeneratedImage,
    GenerationResult,
    PreparedRequest,
    Preview,
    Progress,
    RequestEvent,
    Timings,
)
from engine.work import DecodeImage, DecodePreview, DenoiseStep, EncodePrompt, Prefill

if TYPE_CHECKING:
    from engine.prepare import Admission


@dataclass(slots=True)
class Pending:
    """An admitted request. `label` is the id its client knows it by; `request` is what a new worker would replay."""

    label: str
    request: PreparedRequest
    admission: Admission
    done: asyncio.Future[None]
    on_event: Callable[[RequestEvent], None]
    deaths: int = 0  # of workers, while an item of this request was running
    started: bool = False
    pictures: dict[int, np.ndarray] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # done, per image
    previewed: dict[int, int] = field(default_factory=dict)  # the step of the last preview, per image
    encode_s: float = 0.0
    prefill_s: float = 0.0
    steps_s: float = 0.0
    decode_s: float = 0.0
    step_items: int = 0
    step_pictures: int = 0

    def restart(self, alone: bool) -> None:
        """Take the request back to its start, because its worker died; `alone` keeps it out of batches from now on.
        What its client has been told stays told: pictures and previews that come again are dropped."""
        if alone:
            self.request = replace(self.request, alone=True)
        self.started = False
        self.steps.clear()

    def record(self, done: WorkDone) -> None:
        """Account for an item of work that was (also) for this request."""
        self.started = True
        match done.work:
            case EncodePrompt():
                self.encode_s += done.seconds
            case Prefill():
                self.prefill_s += done.seconds
            case DecodeImage() | DecodePreview():
                self.decode_s += done.seconds
            case DenoiseStep(_, samples):
                self.steps_s += done.seconds
                self.step_items += 1
                self.step_pictures += len(samples)
                for sample in samples:
                    if sample.request_id == self.request.request_id:
                        self.steps[sample.image_index] = sample.step + 1
                        self.on_event(Progress(sample.image_index, sample.step + 1, self.request.num_steps))

    def receive(self, image: ImageReady) -> None:
        """Keep a picture; with the last one the request is done."""
        index = image.image_index
        if index in self.pictures:
            return
        self.pictures[index] = image.pixels
        self.on_event(Finished(index, GeneratedImage(image.pixels, self.request.seeds[index])))
        if len(self.pictures) == self.request.num_images and not self.done.done():
            self.done.set_result(None)

    def show(self, preview: PreviewReady) -> None:
        """Hand on a preview, unless the client has already seen as much of that picture."""
        index = preview.image_index
        if index not in self.pictures and preview.step > self.previewed.get(index, 0):
            self.previewed[index] = preview.step
            self.on_event(Preview(index, preview.pixels))

    def share(self, costs: CostModel) -> Share:
        """What is left of the request."""
        request = self.request
        steps_left = request.num_images * request.num_steps - sum(self.steps.values())
        decodes = sum(request.decodes_after(self.steps.get(index, 0)) for index in range(request.num_images))
        decodes_left = decodes - len(self.pictures)
        entry_s = 0.0 if self.steps else costs.encode_s(request) + costs.prefill_s(request)
        work_s = entry_s + steps_left * costs.step_s(request) + decodes_left * costs.decode_s(request)
        return Share(work_s, entry_s, request.num_images)

    def result(self) -> GenerationResult:
        request = self.request
        images = tuple(GeneratedImage(self.pictures[index], seed) for index, seed in enumerate(request.seeds))
        worked_s = self.encode_s + self.prefill_s + self.steps_s + self.decode_s
        timings = Timings(
            queue_s=max(0.0, time.monotonic() - request.arrived_s - worked_s),
            encode_s=self.encode_s,
            prefill_s=self.prefill_s,
            steps_s=self.steps_s,
            decode_s=self.decode_s,
            batch_size=self.step_pictures / max(1, self.step_items),
        )
        return GenerationResult(images, self.admission.usage, request.num_steps, self.admission.warnings, timings)
