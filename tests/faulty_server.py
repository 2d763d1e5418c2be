"""`easel serve` with a worker that misbehaves for requests with certain seeds; see `tests/engine/faults.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.cli import main
from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.runner import Runner


def load(config: EngineConfig) -> Runner:
    from tests.engine.faults import load_faulty_runner  # in the worker alone: it takes torch

    return load_faulty_runner(config)


if __name__ == "__main__":
    import app.launch

    app.launch.load_runner = load
    main()
