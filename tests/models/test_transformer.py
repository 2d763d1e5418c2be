"""Prefill and decode against the reference's two phases, batches against single rows, and the packed names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor

from models.layout import Grid, PrefixLayout, prefix_layout
from models.prefix_kv import EmbeddedPrefix, Prefix, PrefixKV
from models.rope import target_table
from models.transformer import published_names
from tests.closeness import relative_error
from tests.models.conftest import Pair

TARGET = Grid(6, 4)
IMAGES = (Grid(4, 2), Grid(2, 4))
LAYOUTS: dict[str, list[int | Grid]] = {  # text lengths and images, in order
    "text": [7],
    "one image": [3, IMAGES[0], 5],
    "two images": [3, IMAGES[0], 2, IMAGES[1], 4],
    "adjacent images": [2, IMAGES[0], IMAGES[1], 3],
}


class Case:
    """Random inputs of one row in both forms: ours, and the joint sequence the reference takes."""

    def __init__(self, pair: Pair, parts: Sequence[int | Grid], seed: int) -> None:
        config = pair.model.transformer.config
        draw = torch.Generator().manual_seed(seed)
        grids = [part for part in parts if isinstance(part, Grid)]
        slots = [
            flag for part in parts for flag in ([False] * part if isinstance(part, int) else [True] * part.num_slots)
        ]
        self.layout: PrefixLayout = prefix_layout(slots, grids)
        self.slots = torch.tensor(slots)
        self.joint_embeds = torch.randn(len(slots), config.context_in_dim, generator=draw)
        self.text_embeds = self.joint_embeds[~self.slots]
        self.conditions = [torch.randn(grid.num_tokens, config.in_channels, generator=draw) for grid in grids]
        self.latents = torch.randn(TARGET.num_tokens, config.in_channels, generator=draw)
        self.rotary = target_table(TARGET, self.layout.target_position, config.axes_dims_rope)
        self.shapes = [[(1, grid.height, grid.width) for grid in (*grids, TARGET)]]

    def prefill(self, pair: Pair) -> Prefix:
        return pair.model.transformer.prefill(self.text_embeds, self.conditions, self.layout)

    def reference(self, pair: Pair, timestep: float, cache: QwenImage21KVCache | None, mode: str | None) -> Tensor:
        mask = torch.cat([self.slots, torch.ones(TARGET.num_slots, dtype=torch.bool)])[None]
        joint = torch.cat([*self.conditions, self.latents])[None]
        out = pair.reference.transformer(
            hidden_states=joint,
            timestep=torch.tensor([timestep]),
            encoder_hidden_states=self.joint_embeds[None],
            img_shapes=self.shapes,
            img_mask=mask,
            kv_cache=cache,
            kv_cache_mode=mode,
            return_dict=False,
        )[0]
        return out[0, -TARGET.num_tokens :]


def decode(pair: Pair, cases: Sequence[Case], prefixes: Sequence[Prefix], timesteps: Sequence[float]) -> Tensor:
    latents = torch.stack([case.latents for case in cases])
    rotary = torch.stack([case.rotary for case in cases])
    return pair.model.transformer.decode(latents, torch.tensor(timesteps), rotary, prefixes)


@pytest.mark.parametrize("parts", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_prefill_and_decode_equal_both_phases_of_the_reference(pair: Pair, parts: list[int | Grid]) -> None:
    case = Case(pair, parts, seed=5)
    cache = QwenImage21KVCache(pair.model.transformer.config.num_layers)
    with torch.inference_mode():
        prefix = case.prefill(pair)
        fused = case.reference(pair, 1.0, cache, "extract")
        cached = case.reference(pair, 0.4, cache, "cached")
        assert relative_error(decode(pair, [case], [prefix], [1.0])[0], fused) < 1e-4
        assert relative_error(decode(pair, [case], [prefix], [0.4])[0], cached) < 1e-4
    assert isinstance(prefix, PrefixKV)
    for layer, theirs in enumerate(cache.layer_caches):
        keys, values = prefix.read(layer, torch.float32)
        assert relative_error(keys, theirs.k[0]) < 1e-4
        assert relative_error(values, theirs.v[0]) < 1e-4


def test_prefix_depends_on_neither_target_nor_step(pair: Pair) -> None:
    """What the whole engine rests on; the reference's cache is filled at step 0 but does not remember it."""
    case = Case(pair, LAYOUTS["two images"], seed=6)
    kv = []
    for timestep in (1.0, 0.3):
        cache = QwenImage21KVCache(pair.model.transformer.config.num_layers)
        with torch.inference_mode():
            case.reference(pair, timestep, cache, "extract")
        kv.append(cache.layer_caches[-1].k)
    assert relative_error(kv[0], kv[1]) < 1e-6


def test_checkpoint_without_causal_condition_recomputes_and_equals_the_reference(pairs: dict[str, Pair]) -> None:
    pair = pairs["uncached"]
    cases = [Case(pair, parts, seed) for seed, parts in enumerate(LAYOUTS.values())]
    timesteps = [0.9, 0.1, 0.5, 0.7]
    with torch.inference_mode():
        prefixes = [case.prefill(pair) for case in cases]
        ours = decode(pair, cases, prefixes, timesteps)
        for row, case in enumerate(cases):
            assert relative_error(ours[row], case.reference(pair, timesteps[row], None, None)) < 1e-4
    assert all(isinstance(prefix, EmbeddedPrefix) for prefix in prefixes)


def test_rows_with_unequal_prefixes_equal_the_same_rows_alone(pair: Pair) -> None:
    cases = [Case(pair, parts, seed) for seed, parts in enumerate(([3], [90], *LAYOUTS.values()))]
    timesteps = [1.0, 0.9, 0.7, 0.5, 0.3, 0.05]
    with torch.inference_mode():
        prefixes = [case.prefill(pair) for case in cases]
        together = decode(pair, cases, prefixes, timesteps)
        for row, case in enumerate(cases):
            alone = decode(pair, [case], prefixes[row : row + 1], timesteps[row : row + 1])
            assert relative_error(together[row], alone[0]) < 1e-4


def test_every_published_tensor_is_used_exactly_once(pair: Pair) -> None:
    theirs = sorted(pair.reference.transformer.state_dict())
    ours = sorted(name for own in pair.model.transformer.state_dict() for name in published_names(own))
    assert ours == theirs


def test_prefix_bytes_are_counted(pair: Pair) -> None:
    config = pair.model.transformer.config
    prefix = Case(pair, [10], seed=0).prefill(pair)
    assert prefix.num_bytes == 2 * config.num_layers * 10 * config.inner_dim * 4
