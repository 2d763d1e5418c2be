"""FP8 on a GPU that multiplies it: kernels against the plain path, layers against their dequantized weights, and steps
with everything in FP8 captured and replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.config import TransformerConfig
from models.decoding import GraphResult, PackedDecoder, PlainDecoder
from models.graphs import GraphPool
from models.layout import Grid, prefix_layout
from models.ops import PLAIN
from models.packed import Row
from models.prefix_kv import KV_FORMATS, PrefixKV
from models.quantization import Fp8Linear, QuantizationPlan, Quantized, quantize_rows
from models.rope import target_table
from models.transformer import BLOCKS, Transformer, published_names
from tests.closeness import relative_error

if torch.cuda.is_available():
    from models import kernels
    from models.fused import FusedOps

ONE_ROUNDING = 0.03  # relative L2 of rounding to three bits of mantissa, with room
CUDA = torch.device("cuda")
CONFIG = TransformerConfig(
    num_layers=3, num_attention_heads=4, attention_head_dim=64, axes_dims_rope=(16, 24, 24), in_channels=16,
    context_in_dim=48, mlp_ratio=2, causal_condition=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def assert_same(ours: object, exact: Quantized) -> None:
    """Equal but for the last bit of a scale, and what it rounds the other way."""
    assert isinstance(ours, Quantized)
    assert relative_error(ours.scales, exact.scales) < 1e-2
    assert relative_error(ours.to(torch.float32), exact.to(torch.float32)) < 5e-3


@pytest.mark.parametrize(("rows", "tokens", "dim"), [(1, 7, 192), (2, 5, 4096), (1, 3, 12288), (2, 33, 1008)])
def test_kernels_quantize_what_the_plain_path_quantizes(rows: int, tokens: int, dim: int) -> None:
    x, branch, gate, scale = draw(rows, tokens, dim), draw(rows, tokens, dim), draw(rows, 1, dim), draw(rows, 1, dim)
    x[0, 0] = 0
    assert torch.equal(kernels.quantize(x).values.float(), quantize_rows(x).values.float())
    assert_same(kernels.quantize(x), quantize_rows(x))
    wide = [part.float() for part in (x, gate, branch, scale)]
    assert_same(kernels.norm_modulate(x, scale, 1e-6, True), quantize_rows(PLAIN.norm_modulate(wide[0], wide[3], 1e-6)))
    added, normed = kernels.add_norm_modulate(x.clone(), gate, branch, scale, 1e-6, True)
    assert_same(normed, quantize_rows(PLAIN.norm_modulate(added.float(), wide[3], 1e-6)))
    gate_up = draw(rows, tokens, 2 * dim)
    assert_same(kernels.silu_mul(gate_up, True), quantize_rows(PLAIN.silu_mul(gate_up.float())))


def layer_of(weight: Tensor) -> Fp8Linear:
    layer = Fp8Linear(weight.shape[1], weight.shape[0], scaled=True).cuda()
    quantized = quantize_rows(weight)
    layer.weight.data, layer.weight_scale.data = quantized.values, quantized.scales
    return layer


@pytest.mark.parametrize("tokens", [1, 5, 173, 512])
def test_a_layer_multiplies_what_it_holds(tokens: int) -> None:
    layer, x = layer_of(draw(160, 96) * torch.rand(160, 1, device="cuda")), draw(2, tokens, 96)
    x[0, 0] *= 1000
    exact = quantize_rows(x).to(torch.float32) @ layer.dequantized(torch.float32).T
    assert relative_error(layer(x), exact) < 1e-2
    assert relative_error(layer(kernels.quantize(x)), exact) < 1e-2


def networks() -> tuple[Transformer, Transformer]:
    """One in FP8 on the fused path, and one of the same weights, dequantized, on the plain path in float32."""
    torch.manual_seed(0)
    with CUDA:
        plain, fused = Transformer(CONFIG), Transformer(CONFIG, FusedOps.of(CUDA, CONFIG.attention_head_dim))
        fused.load_state_dict(plain.state_dict())
        original = dict(plain.named_parameters())
        QuantizationPlan(first_blocks=1).quantize(fused, BLOCKS, published_names, scaled=True)
    for name, layer in fused.named_modules():
        if isinstance(layer, Fp8Linear):
            quantized = quantize_rows(original[name + ".weight"])
            layer.weight.data, layer.weight_scale.data = quantized.values, quantized.scales
            original[name + ".weight"].data = quantized.to(torch.float32)
    for parameter in fused.parameters():
        if parameter.dtype == torch.float32 and parameter.shape[-1] != 1:
            parameter.data = parameter.data.bfloat16()
    return fused.eval().requires_grad_(False), plain.eval().requires_grad_(False)


@pytest.mark.parametrize("fp8", list(KV_FORMATS.values()))
def test_steps_in_fp8_are_captured_and_close_to_the_plain_path(fp8: tuple[bool, bool]) -> None:
    fused, plain = networks()
    assert isinstance(fused.ops, FusedOps)
    captured, eager = (PackedDecoder(fused, fused.ops.decode_attention, pool) for pool in (GraphPool(), None))
    grid = Grid(8, 8)

    def row(seed: int, text_len: int) -> tuple[Row, Row]:
        layout = prefix_layout([False] * text_len, [])
        text, latents = draw(text_len, CONFIG.context_in_dim), draw(grid.num_tokens, CONFIG.in_channels)
        table = target_table(grid, layout.target_position, CONFIG.axes_dims_rope).cuda()
        ours = Row(latents, 0.1 * seed, table, fused.prefill(text, [], layout, fp8))
        theirs = replace(ours, latents=latents.float(), prefix=plain.prefill(text.float(), [], layout, fp8))
        return ours, theirs

    results = []
    for lens in ([20], [300], [20, 7, 300], [1, 2, 3]):
        ours, theirs = zip(*(row(seed, length) for seed, length in enumerate(lens)), strict=True)
        assert all(isinstance(one.prefix, PrefixKV) and one.prefix.fp8 == fp8 for one in ours)
        velocity, result = captured.decode(ours)
        results.append(result)
        assert torch.equal(velocity, eager.decode(ours)[0])
        assert relative_error(velocity, PlainDecoder(plain).decode(theirs)[0]) < 3 * ONE_ROUNDING
    assert results == [GraphResult.CAPTURED, GraphResult.HIT] * 2
