"""Checkpoints that tests build for themselves, of different sizes, each once a session."""

from __future__ import annotations

import os
from pathlib import Path

os.putenv("GOMP_SPINCOUNT", "0")  # as the engine does, before torch is imported

import pytest

from tests.tiny_checkpoint import TinySpec, build_checkpoint

SPECS = {
    "first": TinySpec(),
    "second": TinySpec(
        seed=1,
        heads=2,
        head_dim=48,
        axes_dims=(8, 20, 20),
        layers=2,
        mlp_ratio=2,
        text_hidden=96,
        text_layers=2,
        text_heads=2,
        vision_hidden=48,
        vision_depth=3,
        deepstack=(0, 1),
        z_dim=8,
        vae_base=6,
        vae_decoder_base=None,
        dim_mult=(1, 1, 2, 4, 4),
        res_blocks=2,
        temporal=(True, False, True, False),
        shift_terminal=None,
        num_steps=5,
        vocab_size=500,
    ),
    "turbo": TinySpec(seed=2, sample_sigmas=(1.0, 0.8, 0.45, 0.2)),
    "uncached": TinySpec(seed=3, causal_condition=False),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: build_checkpoint(root / name, spec) for name, spec in SPECS.items()}


@pytest.fixture(scope="session")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["first"]
