"""Writes a training's averaged weights as a checkpoint in the published folder format, in bfloat16.

`python -m training.export --state STATE --vae VAE.safetensors --processor PROCESSOR --output FOLDER`. The formats are
the public ones: `transformer/` and `vae/` as diffusers names their tensors, `text_encoder/` as transformers saves it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from models.transformer import Transformer, published_names
from models.vae import Vae
from training.encode import Statistics
from training.flow import Flow
from training.networks import new_text_encoder, new_transformer
from training.spec import NUM_STEPS, RESOLUTION_PX, SCHEDULER, TRANSFORMER, VAE, text_encoder_config
from training.state import load_averages, load_vae, load_weights

VERSION = "0.42.1"  # of diffusers, whose format this is
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = {
    "_class_name": "QwenImage21Pipeline",
    "_diffusers_version": VERSION,
    "processor": ["transformers", "Qwen3VLProcessor"],
    "sample_sigmas": None,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
    "num_inference_steps": NUM_STEPS,
    "output_resolution": RESOLUTION_PX,
}


def export(flow: Flow, vae: Vae, statistics: Statistics, processor: Path, folder: Path) -> None:
    """Write the whole folder; what was there before is replaced, but for its model card."""
    card = folder / "README.md"
    text = card.read_text() if card.exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if text is not None:
        card.write_text(text)
    shutil.copytree(processor, folder / "processor")
    _write_json(folder / "model_index.json", INDEX)
    (folder / "scheduler").mkdir()
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _export_transformer(flow.transformer, folder / "transformer")
    _export_vae(vae, statistics, folder / "vae")
    _export_text_encoder(flow, processor, folder / "text_encoder")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def _export_transformer(transformer: Transformer, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in transformer.named_parameters():
        names = published_names(name)
        tensors |= dict(zip(names, parameter.detach().chunk(len(names)), strict=True))
    config = {"_class_name": "QwenImage21Transformer2DModel", "patch_size": 1, **asdict(TRANSFORMER)}
    _write(folder, config, tensors)


def _export_vae(vae: Vae, statistics: Statistics, folder: Path) -> None:
    numbers = replace(
        VAE,
        latents_mean=tuple(round(value, 6) for value in statistics.mean.tolist()),
        latents_std=tuple(round(value, 6) for value in statistics.std.tolist()),
    )
    config = {
        "_class_name": "AutoencoderKLQwenImage21",
        "attn_scales": [],
        "dropout": 0.0,
        "is_residual": True,
        "patch_size": None,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 1,
        **asdict(numbers),
    }
    _write(folder, config, {name: parameter.detach() for name, parameter in vae.named_parameters()})


def _export_text_encoder(flow: Flow, processor: Path, folder: Path) -> None:
    """The final norm is not used and was not trained; the output layer is tied to the embeddings. The config asks for
    float32, as diffusers loads the other two, though the weights are stored in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(processor, local_files_only=True)
    model = Qwen3VLForConditionalGeneration(text_encoder_config(tokenizer))
    weights = {f"model.{name}": parameter.detach() for name, parameter in flow.encoder.model.named_parameters()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"model.language_model.norm.weight", "lm_head.weight"}, missing
    model.to(torch.bfloat16).save_pretrained(folder)
    config = folder / "config.json"
    _write_json(config, json.loads(config.read_text()) | {"dtype": "float32"})


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    ordered = {"_class_name": config.pop("_class_name"), "_diffusers_version": VERSION, **dict(sorted(config.items()))}
    _write_json(folder / "config.json", ordered)
    save_file({name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()},
              folder / WEIGHTS, metadata={"format": "pt"})  # fmt: skip


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--state", type=Path, required=True)
    options.add_argument("--vae", type=Path, required=True)
    options.add_argument("--processor", type=Path, required=True)
    options.add_argument("--output", type=Path, required=True)
    arguments = options.parse_args()
    trained = Flow(new_text_encoder(arguments.processor), new_transformer())
    weights = load_weights(arguments.state)
    load_averages(trained, weights)
    export(
        trained, load_vae(Vae(VAE), arguments.vae), Statistics(weights["latents.mean"], weights["latents.std"]),
        arguments.processor, arguments.output,
    )  # fmt: skip
