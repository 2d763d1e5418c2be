"""From a model name to what the API process needs of it, and, in the worker, to a runner."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.prepare import MAX_CONDITION_IMAGES, MAX_PROMPT_TOKENS
from engine.request import ModelCard
from engine.runner import Runner
from models.checkpoint import find_checkpoint
from models.image_model import CheckpointConfigs, ImageModel, resolve_device, resolve_dtype


def read_checkpoint(config: EngineConfig) -> tuple[CheckpointConfigs, ModelCard]:
    """Find (or fetch) the checkpoint and read its configs, without weights."""
    configs = CheckpointConfigs.read(find_checkpoint(config.model))
    index = configs.index
    fixed = index.sample_sigmas is not None
    default_num_steps = None if fixed else config.default_num_steps
    card = ModelCard(
        name=config.model,
        max_condition_images=MAX_CONDITION_IMAGES,
        default_resolution_px=config.default_resolution_px or index.output_resolution,
        default_num_steps=default_num_steps or index.default_num_steps,
        fixed_num_steps=fixed,
        size_multiple_px=configs.size_multiple_px,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
    )
    return configs, card


def load_runner(config: EngineConfig) -> Runner:
    """Load the weights onto the device. Runs in the worker."""
    configs = CheckpointConfigs.read(find_checkpoint(config.model))
    device = resolve_device(config.device)
    model = ImageModel.load(configs, device, resolve_dtype(config.dtype, device))
    return Runner(model, max_target_tokens=config.max_output_pixels // configs.px_per_token**2)
