"""Tiles: every cell is covered, what they make is what the whole makes, and a failed allocation halves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor
from torch.nn import functional as F

from models.checkpoint import TensorFiles, load_weights
from models.config import CheckpointConfigs
from models.folder import embedded_checkpoint
from models.tiling import TiledVae, in_tiles, plan, shrinking
from models.vae import UNUSED_WEIGHTS, Vae
from tests.models.conftest import Pair
from tests.oracle import psnr_db

SIZES = [2, 8, 31, 32, 33, 34, 56, 57, 90, 256]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tile", [8, 16, 32])
def test_tiles_have_one_length_cover_the_axis_and_overlap_by_a_quarter(size: int, tile: int) -> None:
    axis = plan(size, tile)
    assert axis.length == min(size, tile)
    assert axis.starts[0] == 0
    assert axis.starts[-1] + axis.length == size
    gaps = [after - before for before, after in zip(axis.starts, axis.starts[1:], strict=False)]
    assert all(0 < gap <= tile - tile // 4 for gap in gaps)


@pytest.mark.parametrize(("height", "width"), [(2, 2), (34, 90), (32, 33), (57, 8)])
def test_pointwise_decode_in_tiles_equals_the_whole(height: int, width: int) -> None:
    latents = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))

    def decode(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=16, mode="nearest").clamp(-1, 1)

    tiled = in_tiles(decode, latents, 32, 1, 16)
    torch.testing.assert_close(tiled, decode(latents))


@pytest.mark.parametrize(("height", "width"), [(32, 64), (544, 1440)])
def test_pointwise_encode_in_tiles_equals_the_whole(height: int, width: int) -> None:
    pixels = torch.rand(1, 4, height, width, generator=torch.Generator().manual_seed(2))

    def encode(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 16)

    torch.testing.assert_close(in_tiles(encode, pixels, 32, 16, 1), encode(pixels))


def test_a_seam_is_a_ramp_from_one_tile_to_the_next() -> None:
    values = iter([torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)])
    blended = in_tiles(lambda _: next(values), torch.zeros(1, 1, 8, 12), 8, 1, 1)
    row = blended[0, 0, 0]
    assert row.tolist() == [0, 0, 0, 0, 0, 0.25, 0.75, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("fitting_px", "tried"), [(512, [512]), (256, [512, 256]), (128, [512, 256, 128])])
def test_failed_allocations_halve_the_tile_for_this_picture_only(fitting_px: int, tried: list[int]) -> None:
    seen: list[int] = []

    def run(tile_px: int) -> Tensor:
        seen.append(tile_px)
        if tile_px > fitting_px:
            raise torch.OutOfMemoryError
        return torch.zeros(1)

    shrinking(run)
    assert seen == tried
    shrinking(run)
    assert seen == tried * 2


def test_the_failure_of_the_smallest_tile_is_the_callers() -> None:
    seen: list[int] = []

    def run(tile_px: int) -> Tensor:
        seen.append(tile_px)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        shrinking(run)
    assert seen == [512, 256, 128]


@pytest.mark.parametrize("kind", ["decode", "encode"])
def test_auto_takes_the_whole_first_and_tiles_after_a_failed_allocation(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    vae = pairs["first"].model.vae
    x = torch.zeros(1, vae.config.z_dim, 34, 2) if kind == "decode" else torch.zeros(1, 4, 544, 32)
    run, fail = getattr(Vae, kind), [True]
    sides: list[int] = []

    def limited(self: Vae, given: Tensor) -> Tensor:
        sides.append(given.shape[2])
        if fail[0] and given.shape[2] == x.shape[2]:
            raise torch.OutOfMemoryError
        return run(self, given)

    monkeypatch.setattr(Vae, kind, limited)
    tiled = TiledVae(vae, "auto")
    with torch.inference_mode():
        in_parts = getattr(tiled, kind)(x)
        fail[0] = False
        whole = getattr(tiled, kind)(x)
    cell = x.shape[2] // 34
    assert sides == [34 * cell, 32 * cell, 32 * cell, 34 * cell]
    assert in_parts.shape == whole.shape


@pytest.mark.parametrize("size_px", [(544, 608)])
def test_a_photograph_in_tiles_is_the_photograph(size_px: tuple[int, int]) -> None:
    """Through a network that was trained, there and back; its attention over all positions keeps it from equality."""
    configs = CheckpointConfigs.read(embedded_checkpoint())
    with torch.device("meta"):
        vae = Vae(configs.vae)
    files = TensorFiles(configs.folder / "vae", "diffusion_pytorch_model")
    cpu = torch.device("cpu")
    load_weights(vae, files, dtype=torch.float32, device=cpu, unused=UNUSED_WEIGHTS)
    photograph = Image.fromarray(data.coffee()).convert("RGBA").resize(size_px)
    pixels = torch.from_numpy(np.array(photograph)).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.inference_mode():
        whole, tiled = (part.decode(part.encode(pixels))[0] for part in (TiledVae(vae, "off"), TiledVae(vae, "on")))
    ours, theirs = (((part + 1) * 127.5).round().to(torch.uint8).numpy() for part in (tiled, whole))
    assert not np.array_equal(ours, theirs)
    assert psnr_db(ours, theirs) >= 45
    assert psnr_db(theirs, np.array(photograph).transpose(2, 0, 1)) > 20
