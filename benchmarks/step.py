"""Denoise steps of the published model's size on a GPU: ours, the reference, and what the chip can sustain.

    python -m benchmarks.step [--sizes 512,1024] [--rows 1,4] [--conditions 0,1] [--compiled 1024] [--fp8] [--json FILE]

Weights are random. For each shape, in one run: our prefill and step (captured, everything that is copied in included);
the step of diffusers' transformer from its own cache, eager and, for the sizes of `--compiled`, with its blocks
compiled; and the floor, which is the step's own matrix products and the fastest installed attention at their exact
sizes, captured too. With `--fp8` the same of our step with every block in FP8, whose products' floor starts from
quantized numbers. Each runs back to back for `--seconds` in all. They take turns, each once after every other one: the
chip is power-limited, so bursts read faster, and what it did a moment ago counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.environment import environment
from benchmarks.quality import variant
from benchmarks.real_size import TRANSFORMER, fill
from benchmarks.turns import balanced_turns
from models.config import TransformerConfig
from models.decoding import PackedDecoder
from models.fused import Flash3Attention, FusedOps
from models.graphs import GraphPool
from models.layout import Grid, prefix_layout
from models.packed import Row
from models.prefilling import CapturedPrefiller
from models.prefix_kv import KV_FORMATS, Prefix
from models.quantization import Activation, QuantizationPlan, quantize_rows
from models.rope import target_table
from models.transformer import Transformer, published_names

PX_PER_TOKEN = 16
PROMPT_TOKENS = 173
CONDITION = Grid(64, 64)
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
TIMESTEP = 0.625  # the same number in bfloat16, to which the reference rounds it


@dataclass(frozen=True, slots=True)
class Case:
    """One shape: a square target, rows of the batch, condition images of 1024²."""

    side_px: int
    rows: int
    conditions: int

    @property
    def grid(self) -> Grid:
        return Grid(self.side_px // PX_PER_TOKEN, self.side_px // PX_PER_TOKEN)


@dataclass(slots=True)
class Figures:
    """Milliseconds; `peak_gib` is over weights, of our step's first run, capture included."""

    case: Case
    dtype: str
    prefill_ms: float
    step_ms: float
    floor_ms: float
    floor_gemm_ms: float
    reference_ms: float | None
    reference_compiled_ms: float | None
    peak_gib: float
    against_reference: float | None  # relative L2 of the predictions


def sustained_ms(work: Callable[[], object], seconds: float) -> float:
    """Median time of `work`, back to back for a while after a warm-up."""
    return in_turns_ms([work], seconds)[0]


def in_turns_ms(works: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median times of works that take turns, each back to back for `seconds` in all. The first third of a turn does
    not count: in it the clock still answers to the work before."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    turns = balanced_turns(len(works))
    turn_ms = 1000 * seconds * len(works) / len(turns)
    if len(works) > 1:
        _turn(works[turns[-1]], turn_ms)  # the first that counts comes after it
    for index in turns:
        turn = _turn(works[index], turn_ms)
        times[index] += turn[len(turn) // 3 :]
    return [statistics.median(counted) for counted in times]


def _turn(work: Callable[[], object], turn_ms: float) -> list[float]:
    """The times of `work`, over and over for `turn_ms`."""
    times: list[float] = []
    while sum(times) < turn_ms or len(times) < 5:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def captured(work: Callable[[], object]) -> Callable[[], None]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class Ours:
    """Our transformer with random weights, and one made-up request per row."""

    dtype = "bf16"

    def __init__(self) -> None:
        self.config = TransformerConfig(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in TRANSFORMER.items()}
        )
        self.ops = FusedOps.of(DEVICE, self.config.attention_head_dim)
        with torch.device("meta"):
            transformer = Transformer(self.config, self.ops)
        torch.manual_seed(0)
        self.transformer = fill(transformer, "cuda")
        assert isinstance(self.transformer, Transformer)
        pool = GraphPool()
        self.prefiller = CapturedPrefiller(self.transformer, KV_FORMATS["auto"], pool)
        self.decoder = PackedDecoder(self.transformer, self.ops.decode_attention, pool)

    def input_of(self, x: Tensor) -> Activation:
        return x

    def inputs(self, case: Case) -> tuple[Tensor, list[Tensor], Tensor]:
        draw = torch.Generator("cuda").manual_seed(case.side_px)
        text = torch.randn(PROMPT_TOKENS, self.config.context_in_dim, generator=draw, device=DEVICE, dtype=DTYPE)
        conditions = [
            torch.randn(CONDITION.num_tokens, self.config.in_channels, generator=draw, device=DEVICE, dtype=DTYPE)
            for _ in range(case.conditions)
        ]
        tokens = case.grid.num_tokens
        latents = torch.randn(tokens, self.config.in_channels, generator=draw, device=DEVICE, dtype=DTYPE)
        return text, conditions, latents

    def prefill(self, case: Case) -> Callable[[], Prefix]:
        text, conditions, _ = self.inputs(case)
        slots = [False] * 5
        for _ in range(case.conditions):
            slots += [True] * CONDITION.num_slots + [False]
        slots += [False] * (PROMPT_TOKENS - slots.count(False))
        layout = prefix_layout(slots, [CONDITION] * case.conditions)
        return lambda: self.prefiller.prefill(text, conditions, layout)

    def step(self, case: Case, prefix: Prefix) -> Callable[[], Tensor]:
        _, _, latents = self.inputs(case)
        table = target_table(case.grid, prefix.layout.target_position, self.config.axes_dims_rope).to(DEVICE)
        rows = [Row(latents, TIMESTEP, table, prefix)] * case.rows
        return lambda: self.decoder.decode(rows)[0]

    def floor(self, case: Case, prefix_len: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """The step's matrix products, and its attention at exact lengths, without anything between them."""
        tokens, dim = case.grid.num_tokens, self.config.inner_dim
        x = torch.randn(case.rows, tokens, dim, device=DEVICE, dtype=DTYPE)
        wide = torch.randn(case.rows, tokens, dim * self.config.mlp_ratio, device=DEVICE, dtype=DTYPE)
        heads = (self.config.num_attention_heads, self.config.attention_head_dim)
        q = torch.randn(case.rows, tokens, *heads, device=DEVICE, dtype=DTYPE)
        k = torch.randn(case.rows, tokens + prefix_len, *heads, device=DEVICE, dtype=DTYPE)
        v = torch.randn_like(k)

        narrow_input, wide_input = self.input_of(x), self.input_of(wide)

        def products() -> None:
            for block in self.transformer.blocks:
                block.attn.to_qkv(narrow_input)
                block.attn.to_out(narrow_input)
                block.mlp.gate_up(narrow_input)
                block.mlp.down(wide_input)

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

        ways: list[Callable[[], object]] = [cudnn]
        if isinstance(self.ops.decode_attention, Flash3Attention):
            from fa3_fwd_interface import flash_attn_func

            ways.append(lambda: flash_attn_func(q, k, v))
        return products, min(ways, key=lambda way: sustained_ms(captured(way), 0.2))


class OursFp8(Ours):
    """The same weights, quantized."""

    dtype = "fp8"

    def __init__(self, ours: Ours) -> None:
        self.config, self.ops = ours.config, ours.ops
        self.transformer = variant(ours.transformer, QuantizationPlan())[0]
        pool = GraphPool()
        self.prefiller = CapturedPrefiller(self.transformer, KV_FORMATS["auto"], pool)
        self.decoder = PackedDecoder(self.transformer, self.ops.decode_attention, pool)

    def input_of(self, x: Tensor) -> Activation:
        return quantize_rows(x)


class Reference:
    """diffusers' transformer with the weights of ours."""

    def __init__(self, ours: Ours) -> None:
        with DEVICE:  # not on the meta device: it holds numbers besides its weights
            self.model = QwenImage21Transformer2DModel(**TRANSFORMER)
        weights: dict[str, Tensor] = {}
        for name, parameter in ours.transformer.named_parameters():
            parts = published_names(name)
            weights.update(zip(parts, parameter.chunk(len(parts)), strict=True))
        self.model.load_state_dict(weights, assign=True, strict=True)
        self.model.eval().requires_grad_(False)

    def step(self, ours: Ours, case: Case) -> Callable[[], Tensor]:
        text, conditions, latents = ours.inputs(case)
        rows = case.rows
        shapes = [[(1, CONDITION.height, CONDITION.width)] * case.conditions + [(1, case.grid.height, case.grid.width)]]
        slots = [False] * 5
        for _ in range(case.conditions):
            slots += [True] * CONDITION.num_slots + [False]
        slots += [False] * (PROMPT_TOKENS - slots.count(False))
        mask = torch.tensor([slots + [True] * case.grid.num_slots], device=DEVICE)
        full = torch.zeros(1, len(slots), text.shape[1], device=DEVICE, dtype=DTYPE)
        full[0, [index for index, slot in enumerate(slots) if not slot]] = text
        cache = QwenImage21KVCache(len(self.model.transformer_blocks))
        common = {"img_shapes": shapes * rows, "img_mask": mask.expand(rows, -1), "return_dict": False}
        common |= {"encoder_hidden_states": full.expand(rows, -1, -1), "kv_cache": cache}
        timestep = torch.full((rows,), TIMESTEP, device=DEVICE, dtype=DTYPE)
        joint = torch.cat([*conditions, latents])[None].expand(rows, -1, -1)
        self.model(hidden_states=joint, timestep=timestep, kv_cache_mode="extract", **common)
        tail = case.grid.num_tokens
        return lambda: self.model(hidden_states=joint, timestep=timestep, kv_cache_mode="cached", **common)[0][
            :, -tail:
        ]


def measure(case: Case, ours: Ours, reference: Reference | None, seconds: float) -> Figures:
    torch.cuda.empty_cache()
    prefill = ours.prefill(case)
    prefill_ms = sustained_ms(prefill, min(seconds, 0.5))
    prefix = prefill()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = ours.step(case, prefix)
    velocity = step().clone()
    peak_gib = (torch.cuda.max_memory_allocated() - held) / 2**30
    products, attention = ours.floor(case, prefix.layout.prefix_len_tokens)
    layers = ours.config.num_layers

    def whole_floor() -> None:
        products()
        for _ in range(layers):
            attention()

    works = [step, captured(whole_floor), captured(products)]
    difference = None
    if reference is not None:
        works.append(reference.step(ours, case))
        difference = float((works[-1]().float() - velocity.float()).norm() / velocity.float().norm())
    step_ms, floor_ms, gemm_ms, *reference_ms = in_turns_ms(works, seconds)
    theirs_ms = reference_ms[0] if reference_ms else None
    return Figures(case, ours.dtype, prefill_ms, step_ms, floor_ms, gemm_ms, theirs_ms, None, peak_gib, difference)


def row(figures: Figures) -> str:
    case = figures.case
    cells = [f"{case.side_px:5d} {case.rows:4d} {case.conditions:4d} {figures.dtype:4s}"]
    cells.append(f"{figures.prefill_ms:8.1f} {figures.step_ms:8.2f} {figures.floor_ms:8.2f}")
    cells.append(f"{figures.step_ms / figures.floor_ms:6.3f}")
    for theirs in (figures.reference_ms, figures.reference_compiled_ms):
        cells.append("       -      -" if theirs is None else f"{theirs:8.1f} {theirs / figures.step_ms:5.2f}x")
    cells.append(f"{figures.peak_gib:6.2f}")
    cells.append("" if figures.against_reference is None else f"{figures.against_reference:8.1e}")
    return " ".join(cells)


HEADER = " side rows cond      prefill     step    floor  ratio    eager     by compiled     by    GiB    error"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, default=[256, 512, 1024, 1536, 2048])
    parser.add_argument("--rows", type=numbers, default=[1])
    parser.add_argument("--conditions", type=numbers, default=[0])
    parser.add_argument("--compiled", type=numbers, default=[])
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with torch.inference_mode():
        ours = Ours()
        fp8 = OursFp8(ours) if args.fp8 else None
        reference = None if args.no_reference else Reference(ours)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {type(ours.ops.decode_attention).__name__}")
        print(HEADER)
        all_figures = []
        for side, rows, conditions in itertools.product(args.sizes, args.rows, args.conditions):
            figures = measure(Case(side, rows, conditions), ours, reference, args.seconds)
            all_figures.append(figures)
            print(row(figures), flush=True)
            if fp8 is not None:
                in_fp8 = measure(Case(side, rows, conditions), fp8, None, args.seconds)
                in_fp8.reference_ms = figures.reference_ms
                all_figures.append(in_fp8)
                print(row(in_fp8), flush=True)
        if reference is not None and args.compiled:
            reference.model.compile_repeated_blocks(dynamic=False)
            for figures in all_figures:
                if figures.case.side_px in args.compiled and figures.dtype == ours.dtype:
                    torch.compiler.reset()  # each shape gets its own code, and none meets a limit on recompiling
                    step = reference.step(ours, figures.case)
                    figures.reference_compiled_ms = sustained_ms(step, args.seconds)
                    print(row(figures), flush=True)
    if args.json is not None:
        report = {
            "environment": environment() | {"attention": type(ours.ops.decode_attention).__name__},
            "prompt_tokens": PROMPT_TOKENS,
            "steps": [asdict(figures) for figures in all_figures],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
