"""What is fixed at start. Every object gets the values it uses, not this whole record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Start-up choices of the engine.

    `model` is a checkpoint folder or a hub id. `device` is "auto", "cpu", "cuda" or "cuda:N"; `dtype` is "auto"
    (float32 on the CPU, bfloat16 on CUDA), "float32" or "bfloat16". `max_queue` bounds the requests that are admitted
    and unfinished. None leaves a default to the checkpoint.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    max_queue: int = 64
    max_batch_rows: int = 8
    default_num_steps: int | None = None
    default_resolution_px: int | None = None
