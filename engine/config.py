"""What is fixed at start. Every object gets the values it uses, not this whole record."""

from __future__ import annotations

from dataclasses import dataclass

from models.precision import AS_STORED, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Start-up choices of the engine.

    `model` is a checkpoint folder or a hub id. `device` is "auto", "cpu", "cuda" or "cuda:N"; `dtype` is "auto"
    (float32 on the CPU, bfloat16 on CUDA), "float32" or "bfloat16". `worker` runs the device's loop in a "process" of
    its own, which is replaced when it dies, or "inline" in a thread. `max_queue` bounds the requests that are admitted
    and unfinished. `policy` says who leads a batch: the "shortest" or the first ("fcfs"); a request that has been here
    for `max_stretch` times its isolated time leads in any case. A worker that does not finish an item of work within
    `hang_timeout_s`, or 20 times what items usually take, counts as dead. On CUDA denoise steps and short prefills
    replay captured graphs unless `decode_graphs` is off; `eager` does without fused kernels and graphs. Pictures of
    `warm_sizes_px` (width, height) are prepared for at start. `precision` says what is kept in FP8. The VAE works in
    tiles when `vae_tiling` is "on", or "auto" and the whole does not fit. Weights wait in host memory by `offload`, see
    `models.offload`. None leaves a default to the checkpoint.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    worker: str = "process"
    max_queue: int = 64
    max_batch_rows: int = 8
    policy: str = "shortest"
    max_stretch: float = 10.0
    hang_timeout_s: float = 60.0
    decode_graphs: bool = True
    eager: bool = False
    vae_tiling: str = "auto"
    offload: str = "none"
    warm_sizes_px: tuple[tuple[int, int], ...] = ()
    precision: Precision = AS_STORED
    max_output_pixels: int = 2048 * 2048
    default_num_steps: int | None = None
    default_resolution_px: int | None = None
