"""The start-up profile: what work costs on this device, in seconds and bytes.

Made-up requests go through the runner's own items of work, so that the figures hold for the code that will run. It
also serves as a warm-up. On a machine where even one step takes long, the profile stops early and the built-in
figures stand in, corrected as real work is timed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.cost_model import (
    CostModel,
    Measurement,
    Size,
    WorkKind,
    decode_size,
    encode_size,
    prefill_size,
    step_size,
    token_budget,
)
from engine.memory import MemoryModel
from engine.request import PreparedRequest
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample, Work
from models.inputs import TokenizedPrompt
from models.layout import Grid, prefix_layout
from models.prefix_kv import kv_bytes_per_token
from models.tensor_cache import CACHE_BYTES
from models.tiling import TILE_PX, free_bytes

if TYPE_CHECKING:
    from engine.runner import Runner

log = logging.getLogger(__name__)

PROFILE_LIMIT_S = 20.0
PROMPT_TOKENS = 48
HOST_MEMORY_SHARE = 0.5  # of the free memory, when the device is the CPU
DEVICE_RESERVE_BYTES = 2**30  # for the allocator's fragments and the driver
DECODE_SHARE = 0.25  # of the free memory: a decode that takes more is done in tiles
NUM_CACHES = 3  # of tensors, which fill up as requests come


@dataclass(frozen=True, slots=True)
class Profile:
    """What the scheduler needs to know about the device."""

    cost_model: CostModel
    memory: MemoryModel
    token_budget: int


def measure(runner: Runner, max_rows: int) -> Profile:
    """Profile a runner that holds no request."""
    started_s = time.monotonic()
    measurements: list[Measurement] = []
    side = max(2, runner.model.configs.index.output_resolution // runner.model.configs.px_per_token // 2 * 2)
    step_per_token = decode_per_token = 0.0
    on_cpu = runner.model.device.type == "cpu"
    for grid_side in sorted({max(2, side // 4 // 2 * 2), max(2, side // 2 // 2 * 2), side}):
        grid = Grid(grid_side, grid_side)
        if not measurements or not on_cpu:  # a CPU is slow only the first time of all
            step_bytes, decode_bytes = _warm_up(runner, grid)
            step_per_token = max(step_per_token, step_bytes / grid.num_tokens)
            decode_per_token = max(decode_per_token, decode_bytes / grid.num_tokens)
        if time.monotonic() - started_s > PROFILE_LIMIT_S:
            break
        decodes = not on_cpu or grid_side < side or not measurements  # a CPU takes as long for a pixel of any picture
        measurements += _time_round(runner, grid, max_rows, side * side, decodes)
    for grid in runner.warm_grids:
        _warm_up(runner, grid)
    costs = CostModel()
    costs.fit(measurements)
    budget = token_budget(measurements)
    memory = _memory_model(runner, step_per_token, decode_per_token)
    step_ms = 1000 * costs.predict_s(WorkKind.STEP, Size(side * side, side * side))
    log.info(
        "profiled in %.1f s: %.1f ms a step at %d tokens, batches up to %d tokens, %.1f GiB for requests",
        *(time.monotonic() - started_s, step_ms, side * side, budget, memory.budget_bytes / 2**30),
    )
    return Profile(costs, memory, budget)


def _time_round(runner: Runner, grid: Grid, max_rows: int, max_tokens: int, decodes: bool) -> Iterator[Measurement]:
    """One request's encode and prefill, steps of 1, 2, 4 … rows, and with `decodes` a decode, each timed."""
    rows = [
        count for count in (1, 2, 4, 8) if count <= max_rows and (count == 1 or count * grid.num_tokens <= max_tokens)
    ]
    request = _made_up_request(grid, num_images=rows[-1])
    runner.add(request)
    try:
        yield Measurement(WorkKind.ENCODE, encode_size(request), _timed(runner, EncodePrompt(request.request_id)))
        yield Measurement(WorkKind.PREFILL, prefill_size(request), _timed(runner, Prefill(request.request_id)))
        for count in rows:
            samples = tuple(Sample(request.request_id, image, 0) for image in range(count))
            seconds = _timed(runner, DenoiseStep(request.batch_key, samples))
            yield Measurement(WorkKind.STEP, step_size(request, count), seconds)
        if decodes:
            seconds = _timed(runner, DecodeImage(request.request_id, 0))
            yield Measurement(WorkKind.DECODE, decode_size(request), seconds)
    finally:
        runner.remove(request.request_id)


def _timed(runner: Runner, work: Work) -> float:
    started_s = time.perf_counter()
    runner.run(work)
    return time.perf_counter() - started_s


def _made_up_request(grid: Grid, num_images: int) -> PreparedRequest:
    layout = prefix_layout([False] * PROMPT_TOKENS, [])
    return PreparedRequest(
        request_id="profile",
        prompts=(TokenizedPrompt((0,) * PROMPT_TOKENS, 0, layout),),
        condition_images=(),
        target_grid=grid,
        crop=(slice(None), slice(None)),
        sigmas=(1.0, 0.5, 0.0),
        seeds=tuple(range(num_images)),
        true_cfg_scale=1.0,
    )


def _warm_up(runner: Runner, grid: Grid) -> tuple[int, int]:
    """Do everything once for a picture of `grid`. Returns the bytes that its step and its decode took at their peak
    beyond what was held anyway."""
    request = _made_up_request(grid, num_images=1)
    step = DenoiseStep(request.batch_key, (Sample(request.request_id, 0, 0),))
    runner.add(request)
    try:
        runner.run(EncodePrompt(request.request_id))
        runner.run(Prefill(request.request_id))
        return _peak_bytes(runner, step), _peak_bytes(runner, DecodeImage(request.request_id, 0))
    finally:
        runner.remove(request.request_id)


def _peak_bytes(runner: Runner, work: Work) -> int:
    device = runner.model.device
    if device.type != "cuda":
        runner.run(work)
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(work)
    return torch.cuda.max_memory_allocated(device) - before


def _memory_model(runner: Runner, step_per_token: float, decode_per_token: float) -> MemoryModel:
    """The budget leaves room for the largest picture's step and decode: together, since captured steps keep theirs."""
    model, tokens = runner.model, runner.max_target_tokens
    config, element = model.transformer.config, model.dtype.itemsize
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        free = free_bytes(model.device) - DEVICE_RESERVE_BYTES - NUM_CACHES * CACHE_BYTES
        decode = decode_per_token * tokens
        if runner.tiles_vae:
            tile = decode_per_token * (TILE_PX // model.configs.px_per_token) ** 2
            decode = min(decode, max(tile, DECODE_SHARE * free))
        budget = max(0, free - int(step_per_token * tokens + decode))
    else:
        budget = int(HOST_MEMORY_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return MemoryModel(
        budget_bytes=budget,
        kv_bytes_per_token=kv_bytes_per_token(config, model.dtype, model.kv_fp8),
        embed_bytes_per_token=config.context_in_dim * element,
        latent_bytes_per_token=config.in_channels * element,
        rotary_bytes_per_token=4 * config.attention_head_dim,
    )
