"""Tiles: every cell is covered, what they make is what the whole makes, and a failed allocation halves them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.tiling import in_tiles, plan, shrinking

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
