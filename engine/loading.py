"""From a model name to what the API process needs of it, and, in the worker, to a runner.

Importing the network's code takes seconds, so it is done where and when it is needed: the service answers its probes
at once, and the worker imports while the API process does its own share.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from engine.config import EngineConfig
from engine.request import ModelCard
from models.config import CheckpointConfigs
from models.layout import Grid, cover

if TYPE_CHECKING:
    from engine.prepare import Preparer
    from engine.runner import Runner

T = TypeVar("T")

MAX_CONDITION_IMAGES = 4
MAX_PROMPT_TOKENS = 8192


def read_configs(config: EngineConfig, weights: bool = True) -> CheckpointConfigs:
    """Find (or fetch, with or without weights) the checkpoint and read its configs."""
    from models.folder import find_checkpoint

    return CheckpointConfigs.read(find_checkpoint(config.model, weights))


def model_card(config: EngineConfig, configs: CheckpointConfigs) -> ModelCard:
    index = configs.index
    fixed = index.sample_sigmas is not None
    default_num_steps = None if fixed else config.default_num_steps
    return ModelCard(
        name=config.model,
        max_condition_images=MAX_CONDITION_IMAGES,
        default_resolution_px=config.default_resolution_px or index.output_resolution,
        default_num_steps=default_num_steps or index.default_num_steps,
        fixed_num_steps=fixed,
        size_multiple_px=configs.size_multiple_px,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
    )


def load_preparer(configs: CheckpointConfigs, card: ModelCard) -> Preparer:
    """Load the tokenizer and the sigma schedule. Runs in the API process."""
    from engine.prepare import Preparer

    return Preparer(configs, card)


def load_runner(config: EngineConfig) -> Runner:
    """Load the weights onto the device. Runs in the worker."""
    from engine.planner import Machine, Planner
    from engine.runner import Runner
    from models.image_model import ImageModel

    configs, machine = read_configs(config), Machine.look(config)
    Planner(config, configs, machine).check()
    model = ImageModel.load(configs, machine.device, machine.dtype, machine.fused, config.precision, config.offload)
    max_target_tokens = config.max_output_pixels // configs.px_per_token**2
    covered = [cover(size_px, configs.size_multiple_px) for size_px in config.warm_sizes_px]
    warm_grids = [Grid.of_pixels(*size_px, configs.px_per_token) for size_px in covered]
    return Runner(model, max_target_tokens, config.decode_graphs, warm_grids, config.vae_tiling)


async def in_detached_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that nobody waits for at exit: a download must not hold up a service that is told to
    stop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="easel-load", daemon=True).start()
    return await done
