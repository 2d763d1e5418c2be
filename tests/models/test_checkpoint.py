"""Broken checkpoints: each is refused with the file's and the tensor's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import CheckpointConfigs
from models.errors import CheckpointError
from models.folder import embedded_checkpoint, find_checkpoint
from models.image_model import ImageModel
from models.preprocess import PromptTokenizer
from tests.tiny_checkpoint import build_checkpoint

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
Q_NAME = "transformer_blocks.1.attn.to_q.weight"


def load(folder: Path) -> ImageModel:
    configs = CheckpointConfigs.read(folder)
    PromptTokenizer(folder / "processor")
    return ImageModel.load(configs, torch.device("cpu"), torch.float32)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy / WEIGHTS, lambda tensors: tensors.pop(Q_NAME))
    with pytest.raises(CheckpointError, match=f"transformer.*{Q_NAME}"):
        load(copy)


def test_left_over_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy / WEIGHTS, lambda tensors: tensors.update(stray=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model.safetensors: unexpected tensor stray"):
        load(copy)


def test_wrong_shape_is_named(copy: Path) -> None:
    edit_tensors(copy / WEIGHTS, lambda tensors: tensors.update({Q_NAME: torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=rf"{Q_NAME} has shape \(3, 5\), expected \(128, 128\)"):
        load(copy)


def test_integer_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy / WEIGHTS, lambda t: t.update({Q_NAME: torch.zeros(128, 128, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{Q_NAME} has dtype"):
        load(copy)


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "transformer/config.json",
        WEIGHTS,
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "scheduler/scheduler_config.json",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "empty"])
def test_damaged_file_is_named(copy: Path, name: str, damage: str) -> None:
    path = copy / name
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "garbage": b"\x80\x04K\x01."}.get(damage, b""))
    if damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        load(copy)


def test_missing_tokenizer_is_an_error(copy: Path) -> None:
    shutil.rmtree(copy / "processor")
    with pytest.raises(CheckpointError, match="processor"):
        load(copy)


def test_sharded_weights_load_like_single_ones(copy: Path) -> None:
    path = copy / WEIGHTS
    whole = load(copy)
    tensors = load_file(path)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, path.parent / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    path.unlink()
    index = path.parent / f"{path.name}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = load(copy)
    for name, parameter in whole.transformer.state_dict().items():
        assert torch.equal(parameter, sharded.transformer.state_dict()[name])
    (path.parent / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        load(copy)
    index.write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside"):
        load(copy)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, "FluxPipeline"),
        ("transformer/config.json", {"_class_name": "Other"}, "_class_name"),
        ("transformer/config.json", {"patch_size": 2}, "patch_size"),
        ("transformer/config.json", {"axes_dims_rope": [8, 8, 8]}, "axes_dims_rope"),
        ("transformer/config.json", {"num_layers": None}, "num_layers"),
        ("transformer/config.json", {"in_channels": 8, "out_channels": 8}, "latent channels"),
        ("vae/config.json", {"is_residual": False}, "is_residual"),
        ("vae/config.json", {"latents_mean": [0.0]}, "latents_mean"),
        ("transformer/config.json", {"num_layers": "3"}, "num_layers"),
        ("transformer/config.json", {"num_layers": True}, "num_layers"),
        ("transformer/config.json", {"eps": 0}, "eps"),
        ("vae/config.json", {"temperal_downsample": [False]}, "temperal_downsample"),
        ("vae/config.json", {"latents_std": [0.0] * 16}, "latents_std"),
        ("vae/config.json", {"dim_mult": []}, "dim_mult"),
        ("model_index.json", {"sample_sigmas": []}, "sample_sigmas"),
        ("model_index.json", {"sample_sigmas": ["a"]}, "sample_sigmas"),
        ("model_index.json", {"num_inference_steps": 0}, "num_inference_steps"),
        ("model_index.json", {"output_resolution": "x"}, "output_resolution"),
        ("scheduler/scheduler_config.json", {"_class_name": "EulerDiscreteScheduler"}, "EulerDiscreteScheduler"),
        ("text_encoder/config.json", {"text_config": 3}, "text_encoder"),
    ],
)
def test_configs_that_ask_for_something_else_are_refused(
    copy: Path, name: str, changes: dict[str, object], message: str
) -> None:
    edit_json(copy / name, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(copy)


def test_weights_take_the_asked_dtype(checkpoint: Path) -> None:
    model = ImageModel.load(CheckpointConfigs.read(checkpoint), torch.device("cpu"), torch.bfloat16)
    for network in (model.text_encoder, model.transformer, model.vae):
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
        assert not any(tensor.is_meta for tensor in network.state_dict().values())
    positions = torch.zeros(3, 1, dtype=torch.long)
    assert model.text_encoder.model.language_model.rotary(positions)[0].dtype is torch.float32


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    for model in (str(tmp_path / "nowhere"), "./nowhere", "no-such-thing", "a/b/c"):
        with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
            find_checkpoint(model)


def test_embedded_checkpoint_loads_and_stays_small() -> None:
    folder = embedded_checkpoint()
    load(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 14_000_000


def test_the_same_spec_builds_the_same_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    again = load_file(build_checkpoint(tmp_path / "again") / WEIGHTS)
    first = load_file(checkpoint / WEIGHTS)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
