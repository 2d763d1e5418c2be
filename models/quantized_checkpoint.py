"""Writing a checkpoint whose networks are FP8 already: half the bytes on disk, and nothing to quantize at start.

A quantized weight keeps its published name, as E4M3, with a float32 scale for each output channel beside it; the
component's `config.json` says which layers were left out. Everything else is copied as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models import image_model, transformer
from models import text_encoder as text_encoder_module
from models.checkpoint import ROWS
from models.config import CheckpointConfigs, read_json
from models.errors import CheckpointError
from models.precision import Precision
from models.quantization import SCALE_SUFFIX, Fp8Linear, QuantizationPlan, quantize_rows


def write_quantized(configs: CheckpointConfigs, target: Path, precision: Precision) -> None:
    """Write the checkpoint to `target`, a folder that does not exist yet, with the networks that `precision` names in
    FP8. Raises `CheckpointError`."""
    folder = configs.folder
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    text_encoder = text_encoder_module.TextEncoder.build(folder / "text_encoder", folder / "processor")
    with torch.device("meta"):
        network = transformer.Transformer(configs.transformer)
        followed = image_model.quantize(folder, precision, text_encoder, network, scaled=False)
    if already := [name for name in followed if QuantizationPlan.read(folder / name / "config.json")]:
        raise CheckpointError(f"{folder / already[0]} is FP8 already")
    weights = {
        "text_encoder": _fp8_weights(text_encoder, text_encoder_module.published_names),
        "transformer": _fp8_weights(network, transformer.published_names),
    }
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copytree(folder, part)
        _quantize_files(part, followed, weights)
        part.rename(target)
    except (OSError, SafetensorError) as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # of the first file among all
        raise CheckpointError(f"{target} can't be written: {reason}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _quantize_files(folder: Path, plans: dict[str, QuantizationPlan], weights: dict[str, set[str]]) -> None:
    """Quantize the `weights` of each network in `folder` in place, and note its plan."""
    for name, plan in plans.items():
        for path in sorted((folder / name).glob("*.safetensors")):
            tensors = load_file(path)
            save_file(_quantized(tensors, weights[name]), path)
        for path in (folder / name).glob("*.safetensors.index.json"):
            index = read_json(path)
            of_scales = {key + SCALE_SUFFIX: file for key, file in index["weight_map"].items() if key in weights[name]}
            index["weight_map"] |= of_scales
            path.write_text(json.dumps(index, indent=2) + "\n")
        config_path = folder / name / "config.json"
        config_path.write_text(json.dumps(read_json(config_path) | {"quantization_config": plan.as_config()}, indent=2))


def _fp8_weights(network: nn.Module, published_names: transformer.PublishedNames) -> set[str]:
    layers = [name for name, module in network.named_modules() if isinstance(module, Fp8Linear)]
    return {published for name in layers for published in published_names(f"{name}.weight")}


def _quantized(tensors: dict[str, Tensor], chosen: set[str]) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in chosen:
            written[name] = tensor
            continue
        parts = [quantize_rows(rows) for rows in tensor.split(ROWS)]
        written[name] = torch.cat([part.values for part in parts])
        written[name + SCALE_SUFFIX] = torch.cat([part.scales for part in parts])
    return written
