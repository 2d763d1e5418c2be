"""`easel quantize`: a checkpoint with its networks in FP8."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from app.settings import Settings
from engine.loading import read_configs
from models.errors import CheckpointError
from models.quantized_checkpoint import write_quantized


def quantize(args: argparse.Namespace, settings: Settings) -> None:
    """Write what `args` asks for; what can't be done ends in `SystemExit`. Both networks, unless one is named."""
    output: Path = args.output
    config = settings.engine_config()
    precision = config.precision
    if "fp8" not in (precision.transformer, precision.text_encoder):
        precision = replace(precision, transformer="fp8", text_encoder="fp8")
    if not output.parent.is_dir():
        raise SystemExit(f"easel: {output.parent} is not a folder")
    try:
        write_quantized(read_configs(config), output, precision)
    except CheckpointError as error:
        raise SystemExit(f"easel: {error}") from error
    print(output)
