"""A training's state as safetensors files of moderate size."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.image_model import CheckpointConfigs, ImageModel
from models.vae import Vae
from training.encode import Statistics
from training.flow import Flow
from training.muon import Average, Muon


def _is_transformer(name: str) -> bool:
    return name.startswith("transformer.")


def save_state(
    folder: Path, flow: Flow, average: Average, muon: Muon, adam: torch.optim.Optimizer, statistics: Statistics
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in flow.named_parameters()]
    weights = {f"raw.{name}": tensor.detach() for name, tensor in flow.named_parameters()}
    averages = {f"average.{name}": tensor for name, tensor in zip(names, average.averages, strict=True)}
    everything = weights | averages
    for prefix in ("raw", "average"):
        _save(folder / f"{prefix}-transformer.safetensors",
              {n: t for n, t in everything.items() if n.startswith(f"{prefix}.transformer.")})  # fmt: skip
    rest = {n: t for n, t in everything.items() if not _is_transformer(n.partition(".")[2])}
    _save(folder / "encoder.safetensors", rest | {"latents.mean": statistics.mean, "latents.std": statistics.std})
    moments = {f"muon.{index}": tensor.to(torch.bfloat16) for index, tensor in enumerate(muon.momentum)}
    for index, parameter in enumerate(adam.param_groups[0]["params"]):
        for name, value in adam.state.get(parameter, {}).items():
            moments[f"adam.{index}.{name}"] = value
    _save(folder / "moments.safetensors", moments)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_state(
    folder: Path, flow: Flow, average: Average, muon: Muon, adam: torch.optim.Optimizer, device: torch.device
) -> Statistics:
    """Fill everything from a folder; returns the statistics that the weights were trained with."""
    tensors = load_weights(folder)
    with torch.no_grad():
        for (name, parameter), averaged in zip(flow.named_parameters(), average.averages, strict=True):
            parameter.copy_(tensors[f"raw.{name}"])
            averaged.copy_(tensors[f"average.{name}"])
    moments = load_file(folder / "moments.safetensors")
    for index, momentum in enumerate(muon.momentum):
        momentum.copy_(moments[f"muon.{index}"])
    for index, parameter in enumerate(adam.param_groups[0]["params"]):
        prefix = f"adam.{index}."
        adam.state[parameter] = {
            name.removeprefix(prefix): tensor.to(parameter.device)
            for name, tensor in moments.items()
            if name.startswith(prefix)
        }
    return Statistics(tensors["latents.mean"].to(device), tensors["latents.std"].to(device))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Weights (`raw.…`), averages (`average.…`) and the latents' statistics."""
    tensors: dict[str, Tensor] = {}
    for name in ("raw-transformer", "average-transformer", "encoder"):
        tensors |= load_file(folder / f"{name}.safetensors")
    return tensors


def load_published(folder: Path, flow: Flow, average: Average) -> tuple[Vae, Statistics]:
    """Start from a checkpoint in the published format: weights without moments, its autoencoder and statistics."""
    model = ImageModel.load(CheckpointConfigs.read(folder), torch.device("cpu"), torch.float32)
    published = {f"transformer.{name}": tensor for name, tensor in model.transformer.named_parameters()}
    published |= {f"encoder.{name}": tensor for name, tensor in model.text_encoder.named_parameters()}
    with torch.no_grad():
        for (name, parameter), averaged in zip(flow.named_parameters(), average.averages, strict=True):
            if "_head." not in name:
                parameter.copy_(published[name])
                averaged.copy_(published[name])
    config = model.vae.config
    return model.vae, Statistics(torch.tensor(config.latents_mean), torch.tensor(config.latents_std))


def load_vae(vae: Vae, path: Path) -> Vae:
    vae.load_state_dict(load_file(path))
    return vae


def load_averages(flow: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the averaged weights into a network."""
    with torch.no_grad():
        for name, parameter in flow.named_parameters():
            parameter.copy_(tensors[f"average.{name}"])
