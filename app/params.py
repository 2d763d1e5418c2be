"""From what a client sent to what the engine draws, the same for every endpoint."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from PIL import Image

from app.answers import EffectiveQuality
from app.errors import ApiError, invalid, printable
from app.images import Background, OutputFormat
from app.schemas import ImageRequest
from app.settings import Settings
from engine.request import GenerationParams, ModelCard
from models.layout import fit_area

DEMO_NAME = "easel-demo"
SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?")
ANSWER_S, ANSWER_SHARE = 0.5, 0.1  # of an announced read timeout, kept for the file and the way back
MAX_NAMED = 20  # unknown fields that one answer warns of
STEP_SHARE = {"medium": 0.60, "low": 0.35}
NO_EFFECT = {  # and the value that asks for nothing
    "moderation": "auto",
    "style": None,
    "input_fidelity": None,
    "complexity": None,
    "cache": False,
}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the finished pictures are to be written; the engine need not know."""

    model: str
    quality: EffectiveQuality
    background: Background
    format: OutputFormat
    compression: int


def served_name(settings: Settings) -> str:
    """The name clients see: the operator's, else the last part of the model's path or id."""
    if settings.served_model_name:
        return settings.served_model_name
    return PurePath(settings.model).name or DEMO_NAME if settings.model else DEMO_NAME


def check_model(name: str | None, settings: Settings) -> None:
    """Raise 404 unless `name` means the one model there is."""
    if name not in (None, served_name(settings), settings.model, *settings.model_aliases):
        message = f"There is no such model. This server has '{served_name(settings)}'."
        raise ApiError(404, message, param="model", code="model_not_found")


def params_from(request: ImageRequest, settings: Settings, card: ModelCard) -> tuple[GenerationParams, list[str]]:
    """Apply the limits and defaults that the schema can't know; also return warnings for the client.

    The condition images are left out: they are decoded only once all the rest is known to be valid.
    """
    check_model(request.model, settings)
    if request.stream and request.background_job:
        raise invalid("A background job can't be streamed: leave out one of the two.", param="background_job")
    size_px = parse_size(request.size, settings)
    resolution_px = check_resolution(request.resolution, settings)
    num_steps, quality_warnings = steps_for(request, card)
    num_images = request.n or 1

    side_px = resolution_px or card.default_resolution_px
    width_px, height_px = size_px or (side_px, side_px)
    pixel_steps = num_images * (num_steps or card.default_num_steps) * width_px * height_px
    if pixel_steps > settings.max_pixel_steps:
        message = (
            f"n × steps × pixels is {pixel_steps}, more than the {settings.max_pixel_steps} that one request gets."
        )
        raise invalid(message, param="n")

    seed = request.seed if request.seed not in (None, -1) else secrets.randbelow(2**32)
    params = GenerationParams(
        prompt=request.prompt,
        seed=seed,
        negative_prompt=request.negative_prompt,
        size_px=size_px,
        resolution_px=resolution_px,
        num_images=num_images,
        num_previews=(request.partial_images or 0) if request.stream else 0,
        num_steps=num_steps,
        true_cfg_scale=1.0 if request.true_cfg_scale is None else request.true_cfg_scale,
        timeout_s=request.timeout_s,
        priority=request.priority or 0,
        deterministic=request.deterministic or False,
    )
    return params, [*ignored_fields(request), *quality_warnings]


def output_options(request: ImageRequest, settings: Settings, default_format: OutputFormat = "png") -> OutputOptions:
    """How to write the pictures. Raises `ApiError` for a combination that can't be written."""
    output_format = request.output_format or default_format
    background = request.background or "auto"
    if background == "transparent" and output_format == "jpeg":
        raise invalid("jpeg has no transparency: use png or webp.", param="background")
    quality: EffectiveQuality = request.quality if request.quality in ("low", "medium") else "high"
    compression = 100 if request.output_compression is None else request.output_compression
    return OutputOptions(served_name(settings), quality, background, output_format, compression)


def parse_size(size: str | None, settings: Settings) -> tuple[int, int] | None:
    """(width, height) in pixels, or None for `auto`."""
    if size in (None, "auto"):
        return None
    match = SIZE.fullmatch(size)
    if match:
        width, height = int(match[1]), int(match[2])
        if in_limits(width, height, settings) and max(width, height) <= settings.max_aspect * min(width, height):
            return width, height
    raise invalid(
        f"Invalid 'size': it is 'auto' or WIDTHxHEIGHT with sides of {settings.min_side} to {settings.max_side}, "
        f"at most {settings.max_output_pixels} pixels and an aspect ratio of at most {settings.max_aspect:g}:1.",
        param="size",
    )


def within(params: GenerationParams, announced: str | None) -> GenerationParams:
    """Shorten the time limit to the read timeout that an SDK announces in its header, if it says anything useful.

    The answer must be out before the client stops reading, or it would ask for the same picture again.
    """
    if announced is None or not SECONDS.fullmatch(announced) or not (announced_s := float(announced)):
        return params
    announced_s -= min(ANSWER_S, ANSWER_SHARE * announced_s)
    return replace(params, timeout_s=min(announced_s, params.timeout_s or announced_s))


def with_images(
    params: GenerationParams, images: Sequence[Image.Image], settings: Settings, card: ModelCard
) -> GenerationParams:
    """Add the decoded condition images. An output of automatic size takes the shape of the last one, and must keep to
    the limits of outputs; its rounding to the model's grid does not count against the aspect ratio."""
    if params.size_px is None and images:
        width, height = images[-1].size
        area_px = (params.resolution_px or card.default_resolution_px) ** 2
        fitted = fit_area(area_px, width / height, card.size_multiple_px)
        if max(width, height) > settings.max_aspect * min(width, height) or not in_limits(*fitted, settings):
            message = "The last image's shape makes an output outside of the limits: give a 'size'."
            raise invalid(message, param="size")
    return replace(params, condition_images=tuple(images))


def in_limits(width: int, height: int, settings: Settings) -> bool:
    """Whether an output may have these sides, its aspect ratio aside."""
    short, long = sorted((width, height))
    return short >= settings.min_side and long <= settings.max_side and width * height <= settings.max_output_pixels


def check_resolution(resolution_px: int | None, settings: Settings) -> int | None:
    if resolution_px is None:
        return None
    if resolution_px < settings.min_side or resolution_px**2 > settings.max_output_pixels:
        message = f"Invalid 'resolution': it is at least {settings.min_side}, and its square at most "
        raise invalid(f"{message}{settings.max_output_pixels}.", param="resolution")
    return resolution_px


def steps_for(request: ImageRequest, card: ModelCard) -> tuple[int | None, list[str]]:
    """The number of denoise steps, None for the checkpoint's own. An explicit count wins over `quality`."""
    share = STEP_SHARE.get(request.quality or "auto")
    if request.num_inference_steps is not None or share is None:
        return request.num_inference_steps, []
    if card.fixed_num_steps:
        return None, ["'quality' has no effect: this model always takes the same number of steps."]
    return max(1, round(share * card.default_num_steps)), []


def ignored_fields(request: ImageRequest) -> list[str]:
    """Warnings for what was accepted and does nothing."""
    unknown = list(request.model_extra or {})[:MAX_NAMED]
    warnings = [f"Unknown parameter: '{printable(name)}'. It was ignored." for name in unknown]
    for name, neutral in NO_EFFECT.items():
        if getattr(request, name) not in (None, neutral):
            warnings.append(f"'{name}' has no effect here.")
    if request.output_compression not in (None, 100) and request.output_format in (None, "png"):
        warnings.append("'output_compression' has no effect on png.")
    if not request.stream:
        without = [name for name in ("partial_images", "stream_options") if getattr(request, name)]
        warnings += [f"'{name}' has no effect without 'stream'." for name in without]
    return warnings
