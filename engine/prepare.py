"""CPU preprocessing of a request: what the client meant becomes what the worker runs.

Everything that needs the checkpoint's configs or tokenizer but no weights happens here, outside the GPU's loop:
tokenizing, resizing condition images, choosing the target grid and computing the sigma schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from engine.errors import InvalidRequest
from engine.request import GenerationParams, ModelCard, PreparedRequest, TokenUsage
from models.config import CheckpointConfigs
from models.inputs import TokenizedPrompt
from models.layout import Grid, centre_crop, cover, fit_area
from models.preprocess import PromptTokenizer, prepare_condition_image
from models.sigmas import sigma_schedule

SEEDS = 2**32
SCHEDULES = 256


@dataclass(frozen=True, slots=True)
class Admission:
    """A prepared request and what its client is told besides the pictures."""

    request: PreparedRequest
    usage: TokenUsage
    warnings: tuple[str, ...]


class Preparer:
    """Prepares requests for one checkpoint. Safe to call from several threads."""

    def __init__(self, configs: CheckpointConfigs, card: ModelCard) -> None:
        self._configs = configs
        self._card = card
        self._tokenizer = PromptTokenizer(configs.folder / "processor")
        schedule = partial(sigma_schedule, configs.scheduler, sample_sigmas=configs.index.sample_sigmas)
        self._schedule = lru_cache(SCHEDULES)(schedule)  # most requests have one of a few sizes and step counts

    def prepare(
        self, params: GenerationParams | Callable[[], GenerationParams], request_id: str, arrived_s: float
    ) -> Admission:
        """Raises `InvalidRequest` for what the checkpoint cannot serve. `params` may be a function that makes them."""
        if not isinstance(params, GenerationParams):
            params = params()
        if len(params.condition_images) > self._card.max_condition_images:
            raise InvalidRequest(f"At most {self._card.max_condition_images} images are taken.", param="image")
        warnings: list[str] = []
        px_per_token = self._configs.px_per_token
        resolution_px = params.resolution_px or self._card.default_resolution_px
        images = tuple(
            prepare_condition_image(image, resolution_px**2, px_per_token) for image in params.condition_images
        )
        grids = [image.grid for image in images]
        prompts = [self._tokenize(params.prompt, grids, "prompt")]
        if self._guided(params, warnings):
            prompts.append(self._tokenize(params.negative_prompt or "", grids, "negative_prompt"))
        size_px = params.size_px or self._size_of(params, resolution_px)
        generated_px = cover(size_px, self._configs.size_multiple_px)
        target_grid = Grid.of_pixels(*generated_px, px_per_token)
        sigmas = self._sigmas(params, target_grid, warnings)
        request = PreparedRequest(
            request_id=request_id,
            prompts=tuple(prompts),
            condition_images=images,
            target_grid=target_grid,
            crop=centre_crop(generated_px, size_px),
            sigmas=sigmas,
            seeds=tuple((params.seed + index) % SEEDS for index in range(params.num_images)),
            true_cfg_scale=params.true_cfg_scale,
            preview_steps=preview_steps(len(sigmas) - 1, params.num_previews),
            arrived_s=arrived_s,
            deadline_s=None if params.timeout_s is None else arrived_s + params.timeout_s,
            priority=params.priority,
            alone=params.deterministic,
        )
        usage = TokenUsage(
            text_tokens=sum(prompt.layout.num_text_tokens for prompt in prompts),
            condition_image_tokens=sum(grid.num_tokens for grid in grids) * len(prompts),
            output_image_tokens=target_grid.num_tokens * params.num_images,
        )
        return Admission(request, usage, tuple(warnings))

    def _tokenize(self, prompt: str, grids: list[Grid], param: str) -> TokenizedPrompt:
        tokenized = self._tokenizer(prompt, grids)
        if tokenized.layout.num_text_tokens > self._card.max_prompt_tokens:
            limit = f"at most {self._card.max_prompt_tokens} are supported"
            raise InvalidRequest(
                f"'{param}' has {tokenized.layout.num_text_tokens} tokens; {limit}.",
                param=param,
                code="string_above_max_length",
            )
        return tokenized

    def _guided(self, params: GenerationParams, warnings: list[str]) -> bool:
        if params.true_cfg_scale > 1 and params.negative_prompt is None:
            warnings.append("'true_cfg_scale' has no effect without a 'negative_prompt'.")
        if params.true_cfg_scale <= 1 and params.negative_prompt is not None:
            warnings.append("'negative_prompt' has no effect unless 'true_cfg_scale' is greater than 1.")
        return params.true_cfg_scale > 1 and params.negative_prompt is not None

    def _size_of(self, params: GenerationParams, resolution_px: int) -> tuple[int, int]:
        last = params.condition_images[-1] if params.condition_images else None
        aspect = last.width / last.height if last else 1.0
        return fit_area(resolution_px**2, aspect, self._configs.size_multiple_px)

    def _sigmas(self, params: GenerationParams, target_grid: Grid, warnings: list[str]) -> tuple[float, ...]:
        default = self._card.default_num_steps
        num_steps = params.num_steps or default
        if self._card.fixed_num_steps and num_steps != default:
            warnings.append(f"'num_inference_steps' has no effect: this model always takes {default} steps.")
        return self._schedule(num_steps, target_grid.num_tokens)


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """After which steps previews are due: evenly spaced, the first one well before 40 % of the work, each after a step
    of its own, and none after the last one, whose picture is the result. So a request of few steps has fewer."""
    steps = (max(number, 2 * number * num_steps // (2 * num_previews + 5)) for number in range(1, num_previews + 1))
    return tuple(step for step in steps if step < num_steps)
