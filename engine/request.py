"""What a client asks for and what it gets back, free of HTTP and of torch.

`GenerationParams` is what every endpoint turns its input into: the same params give the same pictures, whatever the
route. `GenerationResult` is what crosses back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from engine.batching import BatchKey
from models.inputs import ConditionImage, TokenizedPrompt
from models.layout import Grid


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """One request, as the client meant it. Field limits are checked by `app`; what needs the model, by the engine.

    `condition_images` are decoded pictures in mode RGBA, upright, at their own size and in the client's order.
    `size_px` is the exact (width, height) of the output, or None for `auto`: the last condition image's aspect ratio,
    or a square, at about `resolution_px`² pixels. `negative_prompt` "" is a negative prompt; None is none.
    `num_steps` and `resolution_px` None mean the checkpoint's defaults. Image i uses seed + i (modulo 2**32). Of each
    image, up to `num_previews` are shown while it is being made.

    Work that can't be finished within `timeout_s` is refused or given up. Among waiting requests a higher `priority`
    goes first. `deterministic` runs the request alone, so that neighbours can't change the rounding of its picture.
    """

    prompt: str
    seed: int
    negative_prompt: str | None = None
    condition_images: tuple[Image.Image, ...] = ()
    size_px: tuple[int, int] | None = None
    resolution_px: int | None = None
    num_images: int = 1
    num_previews: int = 0
    num_steps: int | None = None
    true_cfg_scale: float = 1.0
    timeout_s: float | None = None
    priority: int = 0
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of one request: prompt text, condition images, and target tokens over all its images."""

    text_tokens: int
    condition_image_tokens: int
    output_image_tokens: int


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """One finished picture: `pixels` is (height, width, 4) uint8 RGBA, not premultiplied."""

    pixels: np.ndarray
    seed: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds. `queue_s` is all the time in which nothing of it ran. Items shared with
    others count in full; `batch_size` is the mean number of pictures in its steps."""

    queue_s: float
    encode_s: float
    prefill_s: float
    steps_s: float
    decode_s: float
    batch_size: float


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request. `warnings` are sentences for the client about what had no effect."""

    images: tuple[GeneratedImage, ...]
    usage: TokenUsage
    num_steps: int
    warnings: tuple[str, ...]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has its place and nothing is wrong with it. Told once, before anything else."""

    usage: TokenUsage
    num_steps: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after each denoise step of one of a request's images."""

    image_index: int
    step: int  # finished steps, 1-based
    num_steps: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What one of a request's images will probably look like. Told in order, never twice, and not after the image."""

    image_index: int
    pixels: np.ndarray  # as in `GeneratedImage`


@dataclass(frozen=True, slots=True)
class Finished:
    """One of a request's images is done. Told once; the others may still be worked on."""

    image_index: int
    image: GeneratedImage


RequestEvent = Admitted | Progress | Preview | Finished


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """Where an admitted request is. `position` is 0 while it is running, else its place among those that wait; `step`
    and `num_steps` count over all its images; `eta_s` is a prediction."""

    request_id: str
    running: bool
    position: int
    step: int
    num_steps: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the loaded checkpoint can do; known as soon as its configs are read, before the weights are."""

    name: str
    max_condition_images: int
    default_resolution_px: int
    default_num_steps: int
    fixed_num_steps: bool  # the checkpoint ships its own sigma grid, so a step count is ignored
    size_multiple_px: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An admitted request in the form the worker runs: tokenized, resized, scheduled. It holds no device memory and
    is never changed, so a new worker can start it over at any time and reach the same pictures.

    `prompts` holds the conditional branch and, under guidance, the unconditional one. `sigmas` has one entry a step
    and the final one behind them. Image i starts from the noise of `seeds[i]`; `crop` cuts the asked-for rows and
    columns out of the generated picture. A preview of each image is due after each of `preview_steps`, which rise and
    end before the last step.
    """

    request_id: str
    prompts: tuple[TokenizedPrompt, ...]
    condition_images: tuple[ConditionImage, ...]
    target_grid: Grid
    crop: tuple[slice, slice]
    sigmas: tuple[float, ...]
    seeds: tuple[int, ...]
    true_cfg_scale: float
    preview_steps: tuple[int, ...] = ()
    arrived_s: float = 0.0  # on the monotonic clock, which all processes of a machine share
    deadline_s: float | None = None
    priority: int = 0
    alone: bool = False  # never shares a step

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def num_images(self) -> int:
        return len(self.seeds)

    @property
    def num_branches(self) -> int:
        return len(self.prompts)

    def decodes_after(self, step: int) -> int:
        """How many pictures of one image are still to be decoded once `step` of its steps are done."""
        return 1 + sum(preview_step > step for preview_step in self.preview_steps)

    @property
    def batch_key(self) -> BatchKey:
        return BatchKey(self.target_grid, tuple(image.grid for image in self.condition_images))
