"""Requests that nobody waits for: their answers are kept for a while, for whoever comes with their id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from app.errors import NO_RETRY, ApiError, from_engine, internal_error
from app.metrics import Counting
from app.shelf import Shelf
from engine.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was admitted and is to be answered later; `num_steps` counts over all its images."""

    request_id: str
    num_steps: int


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that is over: the answer that its client would have got, and the error, if it is one."""

    job: Job
    answer: Response
    error: ApiError | None

    @property
    def num_steps(self) -> int:
        return self.job.num_steps


class Jobs:
    """All jobs of this service: running ones, which the engine's queue bounds, and the newest finished ones."""

    def __init__(self, *, max_jobs: int, max_bytes: int, max_age_s: float) -> None:
        self._running: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._finished: Shelf[FinishedJob] = Shelf(max_items=max_jobs, max_bytes=max_bytes, max_age_s=max_age_s)

    def check_new(self, request_id: str) -> None:
        """Raise `ApiError` if there is a job of this id: a client that sends one again learns that it has arrived."""
        if self.find(request_id) is not None:
            message = "There is a background job of this id already."
            raise ApiError(409, message, param="x-request-id", code="duplicate_request", headers=NO_RETRY)

    def start(self, job: Job, answering: Callable[[], Coroutine[Any, Any, Response]], counting: Counting) -> None:
        """Make the answer in a task of its own, where `counting` is postponed to. Raises like `check_new`."""
        self.check_new(job.request_id)
        task = asyncio.create_task(self._run(job, answering(), counting), name=f"job {job.request_id}")
        self._running[job.request_id] = job, task

    def find(self, request_id: str) -> Job | FinishedJob | None:
        if request_id in self._running:
            return self._running[request_id][0]
        return self._finished.get(request_id)

    def forget(self, request_id: str) -> bool:
        """Abort a job, or drop its answer; False when there is neither."""
        running = self._running.pop(request_id, None)
        if running is not None:
            running[1].cancel()
        return running is not None or self._finished.drop(request_id)

    async def close(self) -> None:
        """End what is still running."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, answering: Coroutine[Any, Any, Response], counting: Counting) -> None:
        error = None
        try:
            with counting:
                answer = await answering
        except EngineError as raised:
            error = from_engine(raised)
        except ApiError as raised:
            error = raised
        except Exception:  # a bug of ours: the job must end all the same
            logger.exception("unhandled error in a job", extra={"request_id": job.request_id})
            error = internal_error()
        if error is not None:
            answer = error.response()
        if self._running.get(job.request_id, (None,))[0] is job:
            del self._running[job.request_id]
            self._finished.put(job.request_id, FinishedJob(job, answer, error), len(answer.body))
