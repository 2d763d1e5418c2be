"""Every fused kernel against its plain counterpart: bfloat16 on the GPU against float32 of the same numbers.

Sizes are no powers of two, rows differ, outputs are poisoned, and buffers hold NaN where nothing may be read.
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import Tensor

from models.attention import target_attention
from models.config import TransformerConfig, VaeConfig
from models.layout import prefix_layout
from models.ops import PLAIN, qk_norm
from models.prefix_kv import KV_FORMATS, PrefixKV
from models.transformer import Attention
from models.vae import Vae
from tests.closeness import relative_error

if torch.cuda.is_available():
    from models import fused, kernels, prefix_kernels
    from models.fused import FLASH_3, Flash3Attention, FusedOps, TwoPartAttention
    from models.packed import PackedRows, Row

BFLOAT16 = 4e-3  # relative L2 of one rounding to bfloat16, with room


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(("rows", "tokens", "dim"), [(1, 7, 192), (3, 5, 4096), (2, 33, 1000)])
def test_norms(rows: int, tokens: int, dim: int) -> None:
    x, branch, gate, scale = draw(rows, tokens, dim), draw(rows, tokens, dim), draw(rows, 1, dim), draw(rows, 1, dim)
    wide = [part.float() for part in (x, gate, branch, scale)]
    assert relative_error(kernels.norm_modulate(x, scale, 1e-6), PLAIN.norm_modulate(wide[0], wide[3], 1e-6)) < BFLOAT16
    added, normed = kernels.add_norm_modulate(x.clone(), gate, branch, scale, 1e-6)
    plain_added, plain_normed = PLAIN.add_norm_modulate(*wide, 1e-6)
    assert relative_error(added, plain_added) < BFLOAT16
    assert relative_error(normed, plain_normed) < 2 * BFLOAT16


@pytest.mark.parametrize(("tokens", "dim"), [(1, 48), (9, 384), (65, 12288), (3, 5000)])
def test_silu_mul(tokens: int, dim: int) -> None:
    gate_up = draw(2, tokens, 2 * dim)
    assert relative_error(kernels.silu_mul(gate_up), PLAIN.silu_mul(gate_up.float())) < BFLOAT16


def layer_of(heads: int, dim: int) -> Attention:
    config = TransformerConfig(
        num_layers=1, num_attention_heads=heads, attention_head_dim=dim, axes_dims_rope=(dim,), in_channels=4,
        context_in_dim=4, mlp_ratio=1,
    )  # fmt: skip
    with torch.device("cuda"):
        layer = Attention(config).bfloat16().requires_grad_(False)
    layer.q_weight.normal_()
    layer.k_weight.normal_()
    return layer


def exact_qkv(layer: Attention, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float32, from the projections as they are."""
    wide = copy.deepcopy(layer).float()
    return PLAIN.split_qkv(qkv.flatten(2).float(), wide, rotary)


def config_of(layers: int, heads: int, dim: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers, num_attention_heads=heads, attention_head_dim=dim, axes_dims_rope=(dim,), in_channels=4,
        context_in_dim=4, mlp_ratio=1,
    )  # fmt: skip


def prefix_of(length: int, config: TransformerConfig, fp8: tuple[bool, bool]) -> PrefixKV:
    """Random keys and values, written layer by layer."""
    layout = prefix_layout([False] * length, [])
    kv = PrefixKV.allocate(layout, config, draw(1), fp8)
    for layer in range(config.num_layers):
        k, v = draw(2, 1, length, config.num_attention_heads, config.attention_head_dim)
        kv.write(layer, k, v, kernels.quantize)
    return kv


FORMATS = list(KV_FORMATS.values())


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize(("heads", "dim"), [(4, 48), (32, 128), (5, 64)])
def test_qk_norm_rope_and_append_prefix(heads: int, dim: int, fp8: tuple[bool, bool]) -> None:
    rows, tokens, layers, lens, gap = 3, 11, 4, [17, 1, 5], 3
    layer, rotary = layer_of(heads, dim), torch.randn(rows, 2, tokens, dim // 2, device="cuda")
    prefixes = [prefix_of(length, config_of(layers, heads, dim), fp8) for length in lens]
    qkv = torch.full((rows, tokens + 24, 3, heads, dim), float("nan"), device="cuda", dtype=torch.bfloat16)
    qkv[:, :tokens] = draw(rows, tokens, 3, heads, dim)
    exact = exact_qkv(layer, qkv[:, :tokens], rotary)
    kernels.qk_norm_rope_(qkv[:, :tokens], layer.q_weight, layer.k_weight, layer.eps, rotary)
    addresses = torch.tensor([prefix.addresses for prefix in prefixes], device="cuda").T.contiguous()
    device_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    prefix_kernels.append_prefix(addresses, device_lens, qkv, tokens, 2, gap, fp8)
    for index in range(3):
        error = relative_error(qkv[:, :tokens, index], exact[index])
        assert error < 2 * BFLOAT16 if index < 2 else error == 0
    for row, length in enumerate(lens):
        behind, end = qkv[row, tokens : tokens + length], tokens + length
        keys, values = prefixes[row].read(2, torch.bfloat16)
        assert torch.equal(behind[:, 1], keys)
        assert torch.equal(behind[:, 2], values)
        assert not qkv[row, end : end + gap, 1:].any()
        assert torch.isnan(qkv[row, end + gap :]).all()
        assert torch.isnan(qkv[row, tokens:, 0]).all()  # nobody needs queries of a prefix


def test_split_qkv() -> None:
    tokens, heads, dim = 21, 5, 64
    layer, rotary = layer_of(heads, dim), torch.randn(2, tokens, dim // 2, device="cuda")
    qkv = draw(1, tokens, 3 * heads * dim)
    q, k, v = exact_qkv(layer, qkv.view(1, tokens, 3, -1), rotary)
    fused_q, fused_k, fused_v = FusedOps.of(torch.device("cuda"), dim).split_qkv(qkv, layer, rotary)
    assert relative_error(fused_q, q) < 2 * BFLOAT16
    assert relative_error(fused_k, k) < 2 * BFLOAT16
    assert torch.equal(fused_v.float(), v)


def ways() -> list[str]:
    found = ["cudnn", "flash"]
    return [*found, "flash3", "flash3 in two parts"] if importlib.util.find_spec("fa3_fwd_interface") else found


def attention_of(way: str) -> fused.DecodeAttention:
    blocks = {"cudnn": "cudnn_block", "flash": "flash_block", "flash3 in two parts": "flash_3_block"}
    return TwoPartAttention(getattr(fused, blocks[way])) if way in blocks else Flash3Attention()


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize(("tokens", "lens"), [(64, [200]), (256, [3, 65, 1000]), (100, [1, 129])])
def test_decode_attention(way: str, tokens: int, lens: list[int], fp8: tuple[bool, bool]) -> None:
    heads, dim, number = 4, 128, 1
    attend = attention_of(way)
    rows, layer, config = len(lens), layer_of(heads, dim), config_of(3, heads, dim)
    prefixes = [prefix_of(length, config, fp8) for length in lens]
    capacity = attend.capacity(tokens, max(lens))
    packed = PackedRows.allocate(config, rows, tokens, capacity, fp8, torch.bfloat16, torch.device("cuda"))
    packed.qkv.fill_(float("nan"))
    rotary = torch.randn(rows, 2, tokens, dim // 2, device="cuda")
    packed.fill([Row(*row) for row in zip(draw(rows, tokens, 4), [0.5] * rows, rotary, prefixes, strict=True)])
    x = draw(rows, tokens, heads * dim)
    q, k, v = exact_qkv(layer, layer.to_qkv(x).view(rows, tokens, 3, -1), rotary)
    exact = target_attention(q, k, v, [prefix.read(number, torch.float32) for prefix in prefixes]).flatten(2)
    assert relative_error(attend(packed, number, layer, x), exact) < 3 * BFLOAT16


def test_flash_3_is_found_where_it_is_installed() -> None:
    assert (importlib.util.find_spec(FLASH_3) is not None) == ("flash3" in ways())


def test_norm_rotate_halves() -> None:
    tokens, heads, dim = 9, 5, 96
    x, weight = draw(tokens, heads, dim), draw(dim)
    cos, sin = torch.randn(2, tokens, dim // 2, device="cuda").repeat(1, 1, 2)
    first, second = qk_norm(x.float(), weight.float(), 1e-6).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    exact = torch.cat([first, second], dim=-1) * cos[:, None] + turned * sin[:, None]
    assert relative_error(kernels.norm_rotate_halves(x, weight, 1e-6, cos, sin), exact) < BFLOAT16


@pytest.mark.parametrize("temporal", [(False, True), (True, False)])
def test_fused_vae(temporal: tuple[bool, bool]) -> None:
    config = VaeConfig(
        z_dim=4, base_dim=24, decoder_base_dim=36, dim_mult=(1, 2, 2), num_res_blocks=1, temperal_downsample=temporal,
        latents_mean=(0.1,) * 4, latents_std=(1.5,) * 4,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device("cuda"):
        plain, reduced, fused = Vae(config), Vae(config), Vae(config)
    for parameter in plain.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    reduced.load_state_dict(plain.state_dict())
    fused.load_state_dict(plain.state_dict())
    reduced.bfloat16()
    fused.bfloat16().requires_grad_(False).fuse()
    latents, pixels = torch.randn(2, 4, 10, 6, device="cuda"), torch.rand(2, 4, 24, 40, device="cuda") * 2 - 1
    with torch.inference_mode():
        for name, given in (("decode", latents), ("encode", pixels)):
            exact = getattr(plain, name)(given)
            theirs = relative_error(getattr(reduced, name)(given.bfloat16()), exact)
            assert relative_error(getattr(fused, name)(given.bfloat16()), exact) <= 1.5 * theirs, name
