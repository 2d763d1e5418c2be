"""Offloaded weights: the same numbers, one copy in host memory, places that never change."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.loading import load_preparer, load_runner, model_card, read_configs
from engine.request import GenerationParams, PreparedRequest
from engine.runner import Runner
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample
from models.config import CheckpointConfigs
from models.image_model import ImageModel, Networks
from models.offload import RING, WeightLayout
from models.precision import AS_STORED, Precision
from models.transformer import BLOCKS
from tests.pictures import photo

CPU = torch.device("cpu")
FP8 = Precision(transformer="fp8", text_encoder="fp8", last_steps=1)
MODES = ("component", "block")


def draw(runner: Runner, request: PreparedRequest) -> Tensor:
    """A picture, the device's work interrupted by another request's encode, as batching does it."""
    other = replace(request, request_id="other")
    runner.add(request)
    runner.add(other)
    runner.run(EncodePrompt(request.request_id))
    runner.run(Prefill(request.request_id))
    for step in range(request.num_steps):
        runner.run(DenoiseStep(request.batch_key, (Sample(request.request_id, 0, step),)))
        if step == 0:
            runner.run(EncodePrompt("other"))
            runner.free_caches()
    picture = runner.run(DecodeImage(request.request_id, 0))
    assert picture is not None
    runner.remove(request.request_id)
    runner.remove("other")
    return torch.from_numpy(picture)


@pytest.mark.parametrize("precision", [AS_STORED, FP8], ids=["stored", "fp8"])
def test_pictures_are_equal_bit_for_bit(checkpoints: dict[str, Path], precision: Precision) -> None:
    config = EngineConfig(model=str(checkpoints["first"]), device="cpu", precision=precision)
    configs = read_configs(config)
    params = GenerationParams(
        "a circle", seed=3, size_px=(64, 64), num_steps=3, condition_images=(photo("RGBA", (64, 64)),)
    )
    request = load_preparer(configs, model_card(config, configs)).prepare(params, "one", 0.0).request
    pictures = [draw(load_runner(replace(config, offload=mode)), request) for mode in ("none", *MODES)]
    assert pictures[0].float().std() > 1
    assert all(torch.equal(picture, pictures[0]) for picture in pictures[1:])


@pytest.mark.parametrize("mode", MODES)
def test_every_weight_lies_in_the_arena_and_stays_there(checkpoints: dict[str, Path], mode: str) -> None:
    configs = CheckpointConfigs.read(checkpoints["first"])
    whole = ImageModel.load(configs, CPU, torch.float32)
    model = ImageModel.load(configs, CPU, torch.float32, offload=mode)
    networks = (model.text_encoder, model.transformer, model.vae)
    weights = [weight for network in networks for weight in network.parameters()]
    arenas = {weight.untyped_storage().data_ptr() for weight in weights}
    assert len(arenas) == 1
    all_bytes = sum(weight.nbytes for weight in weights)
    assert weights[0].untyped_storage().nbytes() < all_bytes
    places = [weight.data_ptr() for weight in weights]
    assert model.offloaded is not None
    for network, counterpart in zip(networks, (whole.text_encoder, whole.transformer, whole.vae), strict=True):
        model.bring(network)
        for (name, weight), exact in zip(network.named_parameters(), counterpart.parameters(), strict=True):
            assert f"{BLOCKS}." in name or "layers." in name or torch.equal(weight, exact), name
    assert places == [weight.data_ptr() for weight in weights]


def test_streamed_blocks_hold_their_own_weights_while_they_are_current(checkpoints: dict[str, Path]) -> None:
    configs = CheckpointConfigs.read(checkpoints["first"])
    whole = ImageModel.load(configs, CPU, torch.float32)
    model = ImageModel.load(configs, CPU, torch.float32, offload="block")
    model.bring(model.transformer)
    seen = 0
    for block, exact in zip(
        model.transformer.in_order(model.transformer.blocks), whole.transformer.blocks, strict=True
    ):
        assert all(map(torch.equal, block.parameters(), exact.parameters()))
        seen += 1
    assert seen == configs.transformer.num_layers > RING


def test_a_layout_tells_the_bytes_of_a_network(checkpoints: dict[str, Path]) -> None:
    networks = Networks.build(CheckpointConfigs.read(checkpoints["first"]), FP8, scaled=False)
    loaded = ImageModel.load(CheckpointConfigs.read(checkpoints["first"]), CPU, torch.float32, precision=FP8)
    layout = WeightLayout.of_unloaded(networks.transformer, BLOCKS, torch.float32)
    exact = sum(weight.nbytes for weight in loaded.transformer.parameters())
    assert exact <= layout.num_bytes < exact + 256 * len(layout.places)
    blocks = len(layout.pieces) - 1
    assert layout.outside_bytes + blocks * layout.block_bytes == layout.num_bytes


def test_pieces_do_not_overlap() -> None:
    layers = nn.ModuleDict({"head": nn.Linear(3, 5), "blocks": nn.ModuleList([nn.Linear(7, 2) for _ in range(3)])})
    layout = WeightLayout(dict(layers.named_parameters()), "blocks")
    spans = sorted((place.offset, place.end) for place in layout.places.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for name, place in layout.places.items():
        start, end = layout.pieces[layout.piece_of[name]]
        assert start <= place.offset and place.end <= end and place.offset % 256 == 0
