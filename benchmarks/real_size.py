"""A checkpoint of the published model's size with random weights: speed does not depend on what they are.

    python -m benchmarks.real_size FOLDER [--device cuda]

Weights are drawn with the variance that keeps activations of order one, norms are ones, biases zeros. Tokenizer, image
processor and sigma schedule are the embedded checkpoint's. Writes about 33 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.config import TextEncoderConfig, TransformerConfig, VaeConfig, read_json
from models.folder import embedded_checkpoint
from models.qwen3_vl import Qwen3VL
from models.transformer import Transformer, published_names
from models.vae import Vae

SHARD_BYTES = 3 * 2**30
TRANSFORMER = {
    "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "causal_condition": True, "context_in_dim": 4096,
    "eps": 1e-6, "in_channels": 64, "mlp_ratio": 3, "num_attention_heads": 32, "num_layers": 32, "out_channels": 64,
}  # fmt: skip
VAE = {
    "base_dim": 96, "decoder_base_dim": 144, "dim_mult": [1, 2, 4, 8, 8], "num_res_blocks": 2, "z_dim": 64,
    "temperal_downsample": [False, False, False, False], "latents_mean": [0.0] * 64, "latents_std": [1.0] * 64,
}  # fmt: skip
LANGUAGE = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5e6, "rope_type": "default",
    },
}  # fmt: skip
VISION = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
    "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
}  # fmt: skip


def configs() -> dict[str, dict[str, Any]]:
    """The `config.json` of every component: the embedded checkpoint's, with the published sizes."""
    embedded = embedded_checkpoint()
    read = {name: read_json(embedded / name / "config.json") for name in ("transformer", "vae", "text_encoder")}
    text_encoder = read["text_encoder"]
    return {
        "transformer": read["transformer"] | TRANSFORMER,
        "vae": read["vae"] | VAE,
        "text_encoder": text_encoder
        | {
            "text_config": text_encoder["text_config"] | LANGUAGE,
            "vision_config": text_encoder["vision_config"] | VISION,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    }


def random_weights(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a module that was built on the meta device."""
    for name, parameter in module.named_parameters():
        yield name, tuple(parameter.shape)


def draw(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """One tensor; see the module's head."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1 or name.endswith("gamma"):
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    fan_in = torch.Size(shape[1:]).numel()
    return torch.randn(shape, dtype=torch.bfloat16, device=device) * fan_in**-0.5


def fill(module: nn.Module, device: str) -> nn.Module:
    """Give a module that was built on the meta device its weights, on `device`."""
    for name, shape in list(random_weights(module)):
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(draw(name, shape, device), requires_grad=False)
        module.get_submodule(owner).register_parameter(leaf, parameter)
    return module.eval()


def write_component(folder: Path, stem: str, shapes: dict[str, tuple[int, ...]], device: str) -> None:
    """Draw and write tensors in shards with an index."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        if size + num_bytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += num_bytes
    files = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, shard: dict[str, tuple[int, ...]]) -> None:
        save_file({name: draw(name, shape, device).cpu() for name, shape in shard.items()}, folder / file)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, files, shards))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_checkpoint(folder: Path, device: str) -> None:
    embedded = embedded_checkpoint()
    for name in ("processor", "scheduler"):
        shutil.copytree(embedded / name, folder / name, dirs_exist_ok=True)
    index = read_json(embedded / "model_index.json") | {"output_resolution": 1024, "num_inference_steps": 40}
    (folder / "model_index.json").write_text(json.dumps(index))
    for name, config in configs().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        transformer = Transformer(TransformerConfig.read(folder / "transformer"))
        vae = Vae(VaeConfig.read(folder / "vae"))
        encoder = Qwen3VL(TextEncoderConfig.read(folder / "text_encoder"))
    shapes = {}
    for name, (rows, *rest) in random_weights(transformer):
        published = published_names(name)
        shapes.update({part: (rows // len(published), *rest) for part in published})
    write_component(folder / "transformer", "diffusion_pytorch_model", shapes, device)
    write_component(folder / "vae", "diffusion_pytorch_model", dict(random_weights(vae)), device)
    prefixed = {f"model.{name}": shape for name, shape in random_weights(encoder)}
    write_component(folder / "text_encoder", "model", prefixed, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.device)
