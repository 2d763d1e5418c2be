"""FP8 on the CPU: what is rounded and how far, which layers, and checkpoints that are, or become, FP8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.config import CheckpointConfigs
from models.errors import CheckpointError
from models.image_model import ImageModel
from models.layout import Grid, prefix_layout
from models.ops import PLAIN
from models.precision import AS_STORED, Precision
from models.prefix_kv import KV_FORMATS, PrefixKV, kv_bytes_per_token
from models.quantization import FP8, FP8_MAX, Fp8Linear, QuantizationPlan, Quantized, quantize_rows, takes_fp8
from models.quantized_checkpoint import write_quantized
from models.rope import target_table
from models.transformer import BLOCKS, Transformer, published_names
from tests.closeness import relative_error

ROUNDING = 0.03  # relative L2 of three bits of mantissa, with room
CPU = torch.device("cpu")


def load(folder: Path, precision: Precision = AS_STORED) -> ImageModel:
    return ImageModel.load(CheckpointConfigs.read(folder), CPU, torch.float32, precision=precision)


def fp8_layers(model: ImageModel) -> set[str]:
    networks = (model.transformer, model.text_encoder)
    return {name for network in networks for name, layer in network.named_modules() if isinstance(layer, Fp8Linear)}


def predict(model: ImageModel, kv_fp8: tuple[bool, bool] = (False, False)) -> Tensor:
    """A velocity, from made-up text and latents that are the same for every model."""
    network, grid, draw = model.transformer, Grid(4, 4), torch.Generator().manual_seed(0)
    layout = prefix_layout([False] * 6, [])
    text = torch.randn(6, network.config.context_in_dim, generator=draw)
    latents = torch.randn(1, grid.num_tokens, network.config.in_channels, generator=draw)
    rotary = target_table(grid, layout.target_position, network.config.axes_dims_rope)[None]
    with torch.inference_mode():
        prefix = network.prefill(text, [], layout, kv_fp8)
        return network.decode(latents, torch.tensor([0.4]), rotary, [prefix])


def test_rows_are_rounded_to_three_bits_each_by_its_own_scale() -> None:
    x = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0])[:, None]
    )
    quantized = quantize_rows(x)
    assert quantized.values.dtype == FP8
    assert torch.equal(quantized.values[:4].float().abs().amax(-1), torch.full((4,), FP8_MAX))
    for row in range(4):
        assert 0.01 < relative_error(quantized.to(torch.float32)[row], x[row]) < ROUNDING
    assert not quantized.to(torch.float32)[4].any()


def test_numbers_that_are_none_stay_so() -> None:
    x = torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])
    assert quantize_rows(x).to(torch.float32).isnan().any(-1).all()


def test_a_layer_multiplies_by_its_dequantized_weight() -> None:
    weight, x = torch.randn(48, 32), torch.randn(2, 5, 32).bfloat16()
    for scaled in (False, True):
        layer = Fp8Linear(32, 48, scaled)
        quantized = quantize_rows(weight)
        layer.weight.data, layer.weight_scale.data = quantized.values, quantized.scales
        assert takes_fp8(layer) == scaled
        given = quantize_rows(x).to(torch.float32) if scaled else x.float()
        assert relative_error(layer(x), given @ quantized.to(torch.float32).T) < 1e-2
        assert relative_error(layer(x), x.float() @ weight.T) < 2 * ROUNDING


def test_plain_operations_quantize_where_they_are_asked_to() -> None:
    x, scale, gate = torch.randn(2, 3, 32), torch.randn(2, 1, 32), torch.randn(2, 1, 32)
    for fp8, plain in (
        (PLAIN.norm_modulate(x, scale, 1e-6, True), PLAIN.norm_modulate(x, scale, 1e-6)),
        (
            PLAIN.add_norm_modulate(x, gate, x, scale, 1e-6, True)[1],
            PLAIN.add_norm_modulate(x, gate, x, scale, 1e-6)[1],
        ),
        (PLAIN.silu_mul(x, True), PLAIN.silu_mul(x)),
        (PLAIN.quantize(x), x),
    ):
        assert isinstance(fp8, Quantized)
        assert isinstance(plain, Tensor)
        assert relative_error(fp8.to(torch.float32), plain) < ROUNDING


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        (QuantizationPlan(), set()),
        (QuantizationPlan(("img_mlp",)), {"mlp.gate_up", "mlp.down"}),
        (QuantizationPlan(("img_mlp.out",)), {"mlp.down"}),
        (QuantizationPlan(("attn.to_k",)), {"attn.to_qkv"}),
        (QuantizationPlan(("transformer_blocks.*.attn.to_out.0",)), {"attn.to_out"}),
        (QuantizationPlan(("to_o",)), set()),  # a part of a word is no name
    ],
)
def test_ignored_layers(checkpoint: Path, plan: QuantizationPlan, kept: set[str]) -> None:
    config = CheckpointConfigs.read(checkpoint).transformer
    with torch.device("meta"):
        network = Transformer(config)
        matched = plan.quantize(network, BLOCKS, published_names, scaled=False)
    assert matched == (set() if plan.ignored == ("to_o",) else set(plan.ignored))
    every = {"attn.to_qkv", "attn.to_out", "mlp.gate_up", "mlp.down"}
    for block in network.blocks:
        assert {name for name, layer in block.named_modules() if isinstance(layer, Fp8Linear)} == every - kept
    outside = [name for name, layer in network.named_modules() if isinstance(layer, Fp8Linear)]
    assert all(name.startswith(f"{BLOCKS}.") for name in outside)


def test_first_and_last_blocks_and_a_block_by_name(checkpoint: Path) -> None:
    blocks = {"transformer": "fp8", "first_blocks": 1, "last_blocks": 1}
    only_middle = {name.split(".")[1] for name in fp8_layers(load(checkpoint, Precision(**blocks)))}
    assert only_middle == {"1"}
    named = Precision(transformer="fp8", ignored_layers=("transformer_blocks.0", "transformer_blocks.2."))
    assert {name.split(".")[1] for name in fp8_layers(load(checkpoint, named))} == {"1"}


def test_fp8_predicts_nearly_the_same_in_half_the_bytes(checkpoint: Path) -> None:
    exact, fp8 = load(checkpoint), load(checkpoint, Precision(transformer="fp8", text_encoder="fp8"))
    assert 0 < relative_error(predict(fp8), predict(exact)) < 3 * ROUNDING
    weight, quantized = (model.transformer.blocks[0].mlp.gate_up.weight for model in (exact, fp8))
    assert quantized.nbytes * 4 == weight.nbytes
    assert any(name.startswith("model.language_model.layers") for name in fp8_layers(fp8))
    assert not any("visual" in name for name in fp8_layers(fp8))


def test_a_text_encoder_in_fp8_reads_nearly_the_same(checkpoint: Path) -> None:
    from models.preprocess import PromptTokenizer

    prompt = PromptTokenizer(checkpoint / "processor")("a red circle", [])
    exact, fp8 = (load(checkpoint, Precision(text_encoder=dtype)).text_encoder for dtype in ("auto", "fp8"))
    assert 0 < relative_error(fp8.encode(prompt), exact.encode(prompt)) < 3 * ROUNDING


@pytest.mark.parametrize("steps", [{"first_steps": 1}, {"last_steps": 2}])
def test_steps_without_fp8_have_a_transformer_of_their_own(checkpoint: Path, steps: dict[str, int]) -> None:
    precision = Precision(transformer="fp8", **steps)
    model = load(checkpoint, precision)
    assert not any(isinstance(layer, Fp8Linear) for layer in model.exact.modules())
    usual, exact = model.decoders(None)
    assert usual is not exact
    chosen = [step for step in range(5) if precision.is_exact(step, 5)]
    assert chosen == ([0] if "first_steps" in steps else [3, 4])
    without = load(checkpoint, Precision(**steps))  # nothing is FP8: one is enough
    assert without.exact is without.transformer


@pytest.mark.parametrize("name", ["fp8", "fp8_v"])
def test_prefix_kv_in_fp8(checkpoint: Path, name: str) -> None:
    model, fp8 = load(checkpoint), KV_FORMATS[name]
    error, exact = relative_error(predict(model, fp8), predict(model)), predict(model)
    assert 0 < error < ROUNDING
    both = relative_error(predict(model, KV_FORMATS["fp8"]), exact)
    assert relative_error(predict(model, KV_FORMATS["fp8_v"]), exact) < both


def test_the_bytes_of_a_prefix_are_those_it_is_charged(checkpoint: Path) -> None:
    config, layout = CheckpointConfigs.read(checkpoint).transformer, prefix_layout([False] * 7, [])
    sizes = []
    for fp8 in KV_FORMATS.values():
        kv = PrefixKV.allocate(layout, config, torch.zeros(1, dtype=torch.bfloat16), fp8)
        assert kv.num_bytes == 7 * kv_bytes_per_token(config, torch.bfloat16, fp8)
        sizes.append(kv.num_bytes)
    whole, half, three_quarters = sizes
    assert half < three_quarters < whole


@pytest.mark.parametrize("fp8", list(KV_FORMATS.values()))
def test_the_first_tokens_share_memory_until_they_are_cloned(checkpoint: Path, fp8: tuple[bool, bool]) -> None:
    config = CheckpointConfigs.read(checkpoint).transformer
    whole = PrefixKV.allocate(prefix_layout([False] * 7, []), config, torch.zeros(1), fp8)

    def write(kv: PrefixKV, tokens: int) -> None:
        for layer in range(config.num_layers):
            k, v = torch.randn(2, 1, tokens, config.num_attention_heads, config.attention_head_dim)
            kv.write(layer, k, v, quantize_rows)

    def read(kv: PrefixKV) -> Tensor:
        return torch.stack([torch.stack(kv.read(layer, torch.float32)) for layer in range(config.num_layers)])

    write(whole, 7)
    first = whole.first(prefix_layout([False] * 3, []))
    cloned, before = first.clone(), read(first).clone()
    assert torch.equal(before, read(whole)[:, :, :3])
    write(first, 3)
    assert torch.equal(read(whole)[:, :, :3], read(first))
    assert torch.equal(read(cloned), before)
    assert cloned.num_bytes == 3 * kv_bytes_per_token(config, torch.float32, fp8)
    assert all(part.is_contiguous() for part in (cloned.keys, cloned.values) if isinstance(part, Tensor))


def test_written_checkpoints_are_what_quantizing_at_start_gives(checkpoint: Path, tmp_path: Path) -> None:
    precision = Precision(transformer="fp8", text_encoder="fp8", first_blocks=1, ignored_layers=("attn.to_out",))
    write_quantized(CheckpointConfigs.read(checkpoint), tmp_path / "fp8", precision)
    ours, theirs = load(tmp_path / "fp8"), load(checkpoint, precision)
    assert fp8_layers(ours) == fp8_layers(theirs)
    assert torch.equal(predict(ours), predict(theirs))
    assert torch.equal(predict(load(tmp_path / "fp8", Precision(transformer="fp8"))), predict(theirs))


def test_what_cannot_be_is_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    configs = CheckpointConfigs.read(checkpoint)
    with pytest.raises(CheckpointError, match="no layer that would be FP8 is called img_mpl"):
        load(checkpoint, Precision(transformer="fp8", ignored_layers=("img_mpl", "img_mlp")))
    with pytest.raises(CheckpointError, match="no layer that would be FP8 is called img_mlp"):
        load(checkpoint, Precision(ignored_layers=("img_mlp",)))
    fp8 = tmp_path / "fp8"
    write_quantized(configs, fp8, Precision(transformer="fp8"))
    with pytest.raises(CheckpointError, match="exists already"):
        write_quantized(configs, fp8, Precision(transformer="fp8"))
    with pytest.raises(CheckpointError, match="is FP8 already"):
        write_quantized(CheckpointConfigs.read(fp8), tmp_path / "again", Precision(transformer="fp8"))
    with pytest.raises(CheckpointError, match="layers cannot be chosen any more"):
        load(fp8, Precision(transformer="fp8", first_blocks=1))
    with pytest.raises(CheckpointError, match="nothing to run with"):
        load(fp8, Precision(last_steps=1))
    foreign = Path(shutil.copytree(checkpoint, tmp_path / "foreign"))
    path = foreign / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match=r"transformer/config.json: quantized by 'gptq'"):
        load(foreign)
