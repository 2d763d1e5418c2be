"""`easel generate`: one request, judged, drawn and written as the service would, without HTTP around it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from app.errors import ApiError
from app.images import OutputFormat, decode_upload, encode
from app.multipart import MAX_IMAGES
from app.output import ProgressStream, write_file
from app.params import output_options, params_from, with_images
from app.schemas import ImageRequest, parse_json
from app.settings import Settings
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import GenerationParams, GenerationResult, Progress, RequestEvent
from models.errors import CheckpointError

FORMATS: dict[str, OutputFormat] = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}


def generate(args: argparse.Namespace, settings: Settings) -> None:
    """Draw what `args` asks for, print each file with its seed; what can't be done ends in `SystemExit`."""
    output: Path = args.output
    if output.suffix.lower() not in FORMATS:
        raise SystemExit(f"easel: {output}: the name must end in one of {', '.join(FORMATS)}")
    if not output.parent.is_dir():
        raise SystemExit(f"easel: {output.parent} is not a folder")
    try:
        request = request_from(args, FORMATS[output.suffix.lower()])
        pictures = read_pictures(args.image, settings)
        result = asyncio.run(draw(request, pictures, settings))
    except (ApiError, EngineError, CheckpointError) as error:
        raise SystemExit(f"easel: {error}") from error
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    write(result, request, output, settings)


def request_from(args: argparse.Namespace, output_format: OutputFormat) -> ImageRequest:
    fields = {
        "prompt": args.prompt,
        "negative_prompt": args.negative_prompt,
        "size": args.size,
        "resolution": args.resolution,
        "num_inference_steps": args.steps,
        "seed": args.seed,
        "true_cfg_scale": args.true_cfg_scale,
        "n": args.n,
        "output_format": output_format,
    }
    return parse_json(json.dumps(fields).encode(), ImageRequest, keep_unknown=False)


def read_pictures(paths: list[Path], settings: Settings) -> tuple[Image.Image, ...]:
    if len(paths) > MAX_IMAGES:
        raise SystemExit(f"easel: at most {MAX_IMAGES} images are taken")
    pictures = []
    for path in paths:
        try:
            pictures.append(decode_upload(path.read_bytes(), max_pixels=settings.max_image_pixels))
        except OSError as error:
            raise SystemExit(f"easel: can't read {path}: {error.strerror}") from error
        except ApiError as error:
            raise SystemExit(f"easel: {path}: {error}") from error
    return tuple(pictures)


async def draw(request: ImageRequest, pictures: tuple[Image.Image, ...], settings: Settings) -> GenerationResult:
    engine = Engine(replace(settings.engine_config(), worker="inline"))
    try:
        await engine.start()
        params, warnings = params_from(request, settings, engine.card)
        result = await run(engine, with_images(params, pictures, settings, engine.card))
        return replace(result, warnings=(*warnings, *result.warnings))
    finally:
        await engine.stop(0)


async def run(engine: Engine, params: GenerationParams) -> GenerationResult:
    with tqdm(unit="step", file=ProgressStream()) as bar:

        def on_event(event: RequestEvent) -> None:
            if isinstance(event, Progress):
                bar.total = params.num_images * event.num_steps
                bar.update()

        return await engine.generate(params, request_id="offline", on_event=on_event)


def write(result: GenerationResult, request: ImageRequest, output: Path, settings: Settings) -> None:
    options = output_options(request, settings)
    for number, image in enumerate(result.images, start=1):
        path = output if len(result.images) == 1 else output.with_stem(f"{output.stem}-{number}")
        file = encode(image.pixels, options.format, options.background, options.compression)
        write_file(path, file.data)
        print(f"{path} seed {image.seed}")
