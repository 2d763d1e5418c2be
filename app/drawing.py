"""A request while the engine draws it: admitted first, then its events as they come, at the end its result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from engine.engine import Engine
from engine.request import Admitted, GenerationParams, GenerationResult, RequestEvent


class Drawing:
    """An admitted request. Read its `events` to their end, or wait for the `result` alone, and close it: closing one
    that is not done aborts the request."""

    admission: Admitted

    def __init__(
        self,
        engine: Engine,
        params: GenerationParams | Callable[[], GenerationParams],
        request_id: str,
        prefetch: Callable[[], Awaitable[None]],
    ) -> None:
        self._queue: asyncio.Queue[RequestEvent | None] = asyncio.Queue()  # None is the end
        generating = engine.generate(params, request_id=request_id, prefetch=prefetch, on_event=self._queue.put_nowait)
        self._task = asyncio.create_task(generating, name=f"draw {request_id}")
        self._task.add_done_callback(lambda task: self._queue.put_nowait(None))

    @classmethod
    async def admit(
        cls,
        engine: Engine,
        params: GenerationParams | Callable[[], GenerationParams],
        request_id: str,
        prefetch: Callable[[], Awaitable[None]],
    ) -> Self:
        """Return once the request has its place. Raises what the engine raises instead."""
        drawing = cls(engine, params, request_id, prefetch)
        try:
            drawing.admission = await drawing._admission()
        except BaseException:
            await drawing.close()
            raise
        return drawing

    async def _admission(self) -> Admitted:
        event = await self._queue.get()
        if not isinstance(event, Admitted):
            await self._task  # raises: it ended without having been admitted
            raise RuntimeError("a request was drawn before it was admitted")
        return event

    async def events(self, pause_s: float) -> AsyncIterator[RequestEvent | None]:
        """What happens from now on; None whenever nothing has happened for `pause_s`. Raises what the engine raises."""
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    event = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if event is None:
                await self._task
                return
            yield event

    async def result(self) -> GenerationResult:
        """All of it, once it is done. Raises what the engine raises."""
        return await self._task

    async def close(self) -> None:
        """Return when the request is over, one way or the other."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
