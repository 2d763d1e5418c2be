from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift, retrieve_timesteps

from models.config import read_json
from models.layout import Grid
from models.sampling import euler_update, guide, starting_noise
from models.sigmas import sigma_schedule


@pytest.mark.parametrize("sample_sigmas", [None, (1.0, 0.8, 0.45, 0.2)])
@pytest.mark.parametrize("num_steps", [2, 8, 40, 200])
@pytest.mark.parametrize("tokens", [256, 4096, 16384])
@pytest.mark.parametrize("name", ["first", "second"])
def test_schedule_equals_the_reference(
    checkpoints: dict[str, Path], name: str, tokens: int, num_steps: int, sample_sigmas: tuple[float, ...] | None
) -> None:
    config = read_json(checkpoints[name] / "scheduler" / "scheduler_config.json")
    reference = FlowMatchEulerDiscreteScheduler.from_config(config)
    grid = np.linspace(1.0, 1 / num_steps, num_steps) if sample_sigmas is None else sample_sigmas
    mu = calculate_shift(tokens, 256, 8192, 0.5, 0.9)
    retrieve_timesteps(reference, num_steps, "cpu", sigmas=grid, mu=mu)
    ours = sigma_schedule(config, num_steps, tokens, sample_sigmas)
    assert len(ours) == len(grid) + 1
    torch.testing.assert_close(torch.tensor(ours), reference.sigmas, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"time_shift_type": "linear"},
        {"shift_terminal": None},
        {"use_dynamic_shifting": False, "shift": 3.0},
        {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": 0.1},
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True, "shift_terminal": None},
        {"use_beta_sigmas": True},
        {"invert_sigmas": True},
    ],
    ids=str,
)
def test_every_kind_of_schedule_is_the_reference_to_the_last_bit(checkpoint: Path, changes: dict[str, object]) -> None:
    config = read_json(checkpoint / "scheduler" / "scheduler_config.json") | changes
    reference = FlowMatchEulerDiscreteScheduler.from_config(config)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(1024, *(config[name] for name in names))
    reference.set_timesteps(sigmas=np.linspace(1.0, 1 / 12, 12), mu=mu)
    assert sigma_schedule(config, 12, 1024) == tuple(reference.sigmas.tolist())


def test_a_single_step_has_a_finite_schedule(checkpoint: Path) -> None:
    config = read_json(checkpoint / "scheduler" / "scheduler_config.json")
    assert config["shift_terminal"] is not None
    ours = sigma_schedule(config, 1, 256)
    assert ours[-1] == 0 and math.isfinite(ours[0]) and ours[0] > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_equals_the_reference_draw_in_every_dtype(dtype: torch.dtype) -> None:
    grid = Grid(6, 8)
    theirs = torch.randn(1, 1, 16, 6, 8, generator=torch.Generator("cpu").manual_seed(7), dtype=dtype)
    theirs = theirs.view(1, 16, 48).transpose(1, 2)[0]
    assert torch.equal(starting_noise(7, grid, 16).to(dtype), theirs)
    assert not torch.equal(starting_noise(8, grid, 16).to(dtype), theirs)


def test_guidance_and_update_are_the_textbook_ones() -> None:
    cond, uncond = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    assert guide(cond, uncond, 4.0).tolist() == [9.0, 1.0]
    assert guide(cond, uncond, 1.0).tolist() == [3.0, 1.0]
    assert euler_update(torch.tensor([1.0]), torch.tensor([2.0]), 0.5, 0.25).tolist() == [0.5]


def test_update_is_done_in_float32() -> None:
    latents, velocity = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)
    for _ in range(4):
        # 1 + 1/512 rounds to 1 in bfloat16, but 1 + 3/512 does not: the product must not be rounded first.
        latents = euler_update(latents, velocity, 0.0, 0.00586)
    assert latents.dtype is torch.bfloat16 and float(latents) > 1.02
