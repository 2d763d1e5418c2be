from __future__ import annotations

import pytest
import torch

from models.config import VaeConfig
from tests.closeness import relative_error
from tests.models.conftest import Pair


@pytest.mark.parametrize("size", [(64, 64), (96, 160)])
def test_encode_equals_the_reference(pair: Pair, size: tuple[int, int]) -> None:
    pixels = torch.rand(1, 4, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    theirs = pair.reference._encode_vae_image(pixels.unsqueeze(2), None)[:, :, 0]
    with torch.inference_mode():
        assert relative_error(pair.model.vae.encode(pixels), theirs) < 1e-4


@pytest.mark.parametrize("grid", [(4, 4), (2, 10)])
def test_decode_equals_the_reference(pair: Pair, grid: tuple[int, int]) -> None:
    config = pair.model.configs.vae
    latents = torch.randn(1, config.z_dim, *grid, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (config.latents_mean, config.latents_std))
    with torch.inference_mode():
        theirs = pair.reference.vae.decode((latents * std + mean).unsqueeze(2)).sample[:, :, 0]
        ours = pair.model.vae.decode(latents)
    assert relative_error(ours, theirs) < 1e-4
    assert ours.abs().max() <= 1


def test_rows_are_independent(pair: Pair) -> None:
    latents = torch.randn(3, pair.model.configs.vae.z_dim, 4, 2, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = pair.model.vae.decode(latents)
        alone = torch.cat([pair.model.vae.decode(row.unsqueeze(0)) for row in latents])
    assert relative_error(together, alone) < 1e-5


def test_ratio_comes_from_the_architecture_not_from_the_config(pair: Pair) -> None:
    assert pair.reference.vae.config.scale_factor_spatial == 8
    assert pair.model.configs.vae.spatial_ratio == 16
    four_levels = VaeConfig(4, 2, (1, 2, 2, 2), 1, (False, True, True), (0.0, 0.0), (1.0, 1.0))
    assert four_levels.spatial_ratio == 8
