"""What can go wrong between a submitted request and its pictures.

    EngineError
    ├── InvalidRequest      the client's fault: `message`, `param`, `code`
    ├── QueueFull           try again after `retry_after_s`
    ├── NotReady            loading, draining or restarting; try again after `retry_after_s`
    ├── DeadlineExceeded    the request can't be, or was not, finished in the time its client gives it
    ├── RequestCancelled    somebody cancelled the request by its id
    ├── GenerationFailed    the request was accepted and could not be finished
    └── EngineStopped       the service stopped before the request was finished
    DeviceOutOfMemory       the runner's word for an allocation that failed; the worker tries again smaller
    DeviceLost              the runner's word for a device that no longer answers; the worker is replaced

`app.errors` maps each `EngineError` to HTTP in one place. Messages are written for the client: no paths, no reprs.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(EngineError):
    """The request can never be served as it stands; `param` names the offending field."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(EngineError):
    """Every place in the queue is taken."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(EngineError):
    """The engine takes no work at the moment (loading, draining, restarting)."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailed(EngineError):
    """An accepted request failed; `code` is a short machine-readable word, such as `generation_failed`."""

    def __init__(self, message: str, *, code: str = "generation_failed") -> None:
        super().__init__(message)
        self.code = code


class DeadlineExceeded(EngineError):
    """The request can't be finished, or was not finished, in the time that its client gives it."""


class RequestCancelled(EngineError):
    """The request was cancelled by its id."""


class EngineStopped(EngineError):
    """The engine stopped while the request was still waiting or running."""


class DeviceOutOfMemory(Exception):
    """An allocation on the device failed; nothing of the item of work has happened."""


class DeviceLost(Exception):
    """The device no longer answers this process."""
