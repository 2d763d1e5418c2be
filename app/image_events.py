"""OpenAI's events for a picture that is being made, from what the engine tells."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from app.answers import CompletedEvent, PartialImageEvent, ProgressEvent
from app.dependencies import Services
from app.drawing import Drawing
from app.metrics import Counting
from app.render import Renderer, usage_of
from app.streaming import KEEPALIVE, event
from engine.request import Finished, Preview, Progress, TokenUsage


@dataclass(frozen=True, slots=True)
class EventTypes:
    """What one endpoint calls its events."""

    partial: Literal["image_generation.partial_image", "image_edit.partial_image"]
    completed: Literal["image_generation.completed", "image_edit.completed"]
    progress: Literal["image_generation.progress", "image_edit.progress"]


GENERATION = EventTypes("image_generation.partial_image", "image_generation.completed", "image_generation.progress")
EDIT = EventTypes("image_edit.partial_image", "image_edit.completed", "image_edit.progress")


@dataclass(slots=True)
class ImageEvents:
    """The events of one request. Pictures are written in threads, in the order in which they come."""

    types: EventTypes
    request_id: str
    num_images: int
    renderer: Renderer
    warnings: Sequence[str]
    include_progress: bool
    services: Services
    counting: Counting
    _partials: Counter[int] = field(default_factory=Counter)  # shown so far, per image
    _completed: int = 0
    _file_s: float = 0.0

    async def of(self, drawing: Drawing) -> AsyncGenerator[bytes]:
        """All of them, to the end. Raises what the engine raises."""
        usage = drawing.admission.usage
        self.warnings = [*self.warnings, *drawing.admission.warnings]
        if self.include_progress:
            yield self._progress()  # its place in the queue, which may be all there is to tell for a while
        async for happening in drawing.events(self.services.settings.heartbeat_seconds):
            match happening:
                case Preview(index, pixels):
                    yield await asyncio.to_thread(self._partial, index, pixels)
                    if sum(self._partials.values()) == 1:
                        self.services.metrics.first_partial(self.counting.elapsed_s)
                case Finished(index, image):
                    yield await asyncio.to_thread(self._complete, index, image.pixels, image.seed, usage)
                case Progress() if self.include_progress:
                    yield self._progress()
                case None:
                    yield self._progress() if self.include_progress else KEEPALIVE
        self.services.metrics.delivered(await drawing.result(), self._file_s)

    def _partial(self, index: int, pixels: np.ndarray) -> bytes:
        picture = self.renderer.picture(pixels)
        number = self._partials[index]
        self._partials[index] += 1
        data = PartialImageEvent(
            type=self.types.partial,
            b64_json=picture.b64_json,
            url=picture.url,
            background=picture.background,
            created_at=int(time.time()),
            output_format=self.renderer.options.format,
            partial_image_index=number,
            quality=self.renderer.options.quality,
            size=picture.size,
            image_index=index if self.num_images > 1 else None,
        )
        return event(data.type, data)

    def _complete(self, index: int, pixels: np.ndarray, seed: int, usage: TokenUsage) -> bytes:
        started_s = time.perf_counter()
        picture = self.renderer.picture(pixels)
        self._file_s += time.perf_counter() - started_s
        data = CompletedEvent(
            type=self.types.completed,
            b64_json=picture.b64_json,
            url=picture.url,
            background=picture.background,
            created_at=int(time.time()),
            output_format=self.renderer.options.format,
            quality=self.renderer.options.quality,
            size=picture.size,
            usage=usage_of(self._share_of(usage)),
            seed=seed,
            model=self.renderer.options.model,
            warnings=list(self.warnings),
            image_index=index if self.num_images > 1 else None,
        )
        self._completed += 1
        return event(data.type, data)

    def _share_of(self, usage: TokenUsage) -> TokenUsage:
        """Of the whole request's tokens: the input with the first picture, the output with each."""
        output = usage.output_image_tokens // self.num_images
        if self._completed:
            return TokenUsage(0, 0, output)
        return TokenUsage(usage.text_tokens, usage.condition_image_tokens, output)

    def _progress(self) -> bytes:
        status = self.services.engine.status(self.request_id)
        if status is None:
            return KEEPALIVE
        data = ProgressEvent(
            type=self.types.progress,
            status="running" if status.running else "queued",
            position=status.position,
            step=status.step,
            num_steps=status.num_steps,
            eta_seconds=round(status.eta_s, 3),
        )
        return event(data.type, data)
