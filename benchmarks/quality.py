"""What FP8 costs in quality: of one prediction by groups of layers, and of whole pictures by settings.

    python -m benchmarks.quality [--model FOLDER] [--device cuda] [--side 256] [--prompts 4] [--json FILE]

The sweep lets one request take its steps in bfloat16 and, at five of them, predicts the velocity again with some layers
quantized, weights and activations alike, or with its prefix KV: the relative L2 distance to the undisturbed prediction.
The second table draws held-out prompts, and edits for a third of the pictures, with the service's settings and compares
them with those of the checkpoint as it is. Of a checkpoint with random weights (`benchmarks.real_size`) only the sweep
means anything: `--prompts 0`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from app.evaluation.render import draw
from app.evaluation.suite import edit_cases, scene_cases
from benchmarks.pictures import as_json, psnr_db
from engine.config import EngineConfig
from engine.loading import load_preparer, load_runner, model_card, read_configs
from engine.prepare import Preparer
from engine.request import GenerationParams, PreparedRequest
from engine.runner import Runner
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample
from models.folder import embedded_checkpoint
from models.packed import Row
from models.precision import AS_STORED, Precision
from models.prefix_kv import KV_FORMATS
from models.quantization import Fp8Linear, QuantizationPlan, quantize_rows
from models.rope import target_table
from models.transformer import BLOCKS, Transformer, published_names

QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
OUT = ("attn.to_out",)
GATE_UP = ("img_mlp.gate_layer", "img_mlp.proj")
DOWN = ("img_mlp.out",)
EVERY = (*QKV, *OUT, *GATE_UP, *DOWN)

SWEPT_PROMPT = "a red circle on a white background"
EDITS_PART = 3  # every third picture is an edit
SETTINGS: dict[str, Precision] = {
    "transformer fp8": Precision(transformer="fp8"),
    "… first and last block kept": Precision(transformer="fp8", first_blocks=1, last_blocks=1),
    "… last 10 % of steps kept": Precision(transformer="fp8", last_steps=3),
    "… first and last 10 % kept": Precision(transformer="fp8", first_steps=3, last_steps=3),
    "text encoder fp8": Precision(text_encoder="fp8"),
    "prefix KV fp8": Precision(prefix_kv="fp8"),
    "prefix KV fp8_v": Precision(prefix_kv="fp8_v"),
    "all three fp8": Precision(transformer="fp8", text_encoder="fp8", prefix_kv="fp8"),
}

PROTECTIONS: dict[str, Precision] = {
    "all but 3 last steps": Precision(last_steps=3),
    "… and first step and block": Precision(first_blocks=1, first_steps=1, last_steps=3),
}


@dataclass(frozen=True, slots=True)
class Swept:
    """One choice of layers, or of layers and steps. `errors` by timestep; `fp8_part` is the share of a picture's
    multiplications that are FP8."""

    name: str
    errors: list[float]
    fp8_part: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One setting, over all prompts."""

    name: str
    median_psnr_db: float
    mean_psnr_db: float
    worst_psnr_db: float


def plans(num_blocks: int) -> dict[str, QuantizationPlan]:
    """What is swept: everything, one group alone, and what may protect quality."""
    few = max(1, num_blocks // 16)
    return {
        "all": QuantizationPlan(),
        "only to_qkv": QuantizationPlan((*OUT, *GATE_UP, *DOWN)),
        "only to_out": QuantizationPlan((*QKV, *GATE_UP, *DOWN)),
        "only img_mlp gate and up": QuantizationPlan((*QKV, *OUT, *DOWN)),
        "only img_mlp.out": QuantizationPlan((*QKV, *OUT, *GATE_UP)),
        "all but img_mlp": QuantizationPlan((*GATE_UP, *DOWN)),
        "all but img_mlp.out": QuantizationPlan(DOWN),
        f"all but first {few}": QuantizationPlan(first_blocks=few),
        f"all but last {few}": QuantizationPlan(last_blocks=few),
        f"all but first and last {2 * few}": QuantizationPlan(first_blocks=2 * few, last_blocks=2 * few),
    }


def variant(transformer: Transformer, plan: QuantizationPlan) -> tuple[Transformer, float]:
    """The same network with some layers in FP8, their input as well, and their share of the multiplications."""
    with torch.device("meta"):
        network = Transformer(transformer.config, transformer.ops)
        plan.quantize(network, BLOCKS, published_names, scaled=True)
    original = dict(transformer.named_parameters())
    quantized = 0
    for name, module in network.named_modules():
        if isinstance(module, Fp8Linear):
            weight = quantize_rows(original[f"{name}.weight"])
            module.weight = nn.Parameter(weight.values, requires_grad=False)
            module.weight_scale = nn.Parameter(weight.scales, requires_grad=False)
            quantized += weight.values.numel()
        else:
            for leaf, _ in list(module.named_parameters(recurse=False)):
                module.register_parameter(leaf, nn.Parameter(original[f"{name}.{leaf}".strip(".")], False))
    total = sum(weight.numel() for name, weight in original.items() if name.startswith(BLOCKS) and weight.ndim == 2)
    return network.eval(), quantized / total


def trajectory(runner: Runner, request: PreparedRequest) -> Iterator[tuple[int, Tensor]]:
    """Step numbers with the latents before them; the last number comes with the finished ones."""
    runner.add(request)
    runner.run(EncodePrompt(request.request_id))
    runner.run(Prefill(request.request_id))
    for step in range(request.num_steps):
        yield step, runner._states[request.request_id].latents[0]
        runner.run(DenoiseStep(request.batch_key, (Sample(request.request_id, 0, step),)))
    yield request.num_steps, runner._states[request.request_id].latents[0]


def sweep(runner: Runner, request: PreparedRequest) -> Iterator[Swept]:
    """Predictions of every plan at five evenly spaced steps of one request."""
    model, prompt = runner.model, request.prompts[0]
    chosen = {round(part * (request.num_steps - 1) / 4) for part in range(5)}
    visited = {step: latents.clone() for step, latents in trajectory(runner, request) if step in chosen}
    embeds = runner._states[request.request_id].prompt_embeds[0]
    runner.remove(request.request_id)
    axes = model.transformer.config.axes_dims_rope
    table = target_table(request.target_grid, prompt.layout.target_position, axes, model.device)

    @torch.inference_mode()
    def predict(network: Transformer, kv_format: str = "auto") -> list[Tensor]:
        prefix = network.prefill(embeds, [], prompt.layout, KV_FORMATS[kv_format])
        decoder = model.decoder_of(network, None)
        rows = [Row(latents, request.sigmas[step], table, prefix) for step, latents in visited.items()]
        return [decoder.decode([row])[0].float().clone() for row in rows]

    undisturbed = predict(model.transformer)

    def errors(network: Transformer, kv_format: str = "auto") -> list[float]:
        pairs = zip(predict(network, kv_format), undisturbed, strict=True)
        return [float((ours - exact).norm() / exact.norm()) for ours, exact in pairs]

    for name, plan in plans(model.transformer.config.num_layers).items():
        network, fp8_part = variant(model.transformer, plan)
        yield Swept(name, errors(network), fp8_part)
    for name, precision in PROTECTIONS.items():
        network, fp8_part = variant(model.transformer, QuantizationPlan(first_blocks=precision.first_blocks))
        exact = [step for step in range(request.num_steps) if precision.is_exact(step, request.num_steps)]
        found = zip(visited, errors(network), strict=True)
        kept = [0.0 if step in exact else error for step, error in found]
        yield Swept(name, kept, fp8_part * (1 - len(exact) / request.num_steps))
    for kv_format in ("fp8", "fp8_v"):
        yield Swept(f"prefix KV {kv_format}", errors(model.transformer, kv_format), 0.0)


def pictures(config: EngineConfig, requests: Sequence[PreparedRequest]) -> list[np.ndarray]:
    runner = load_runner(config)
    drawn = []
    for request in requests:
        for _ in trajectory(runner, request):
            pass
        drawn.append(runner.run(DecodeImage(request.request_id, 0)))
        runner.remove(request.request_id)
    return [picture for picture in drawn if picture is not None]


def compare(config: EngineConfig, requests: Sequence[PreparedRequest]) -> Iterator[Compared]:
    with_precision = functools.partial(EngineConfig, model=config.model, device=config.device, dtype=config.dtype)
    exact = pictures(with_precision(precision=AS_STORED), requests)
    for name, precision in SETTINGS.items():
        ours = pictures(with_precision(precision=precision), requests)
        found = [psnr_db(one, other) for one, other in zip(ours, exact, strict=True)]
        yield Compared(name, statistics.median(found), statistics.mean(found), min(found))


def held_out(count: int) -> list[GenerationParams]:
    """Prompts and edits that the embedded checkpoint was not trained on."""
    num_edits = count // EDITS_PART
    return [
        GenerationParams(case.prompt, case.seed, condition_images=tuple(map(Image.fromarray, draw(case.sources))))
        for case in (*scene_cases(count - num_edits), *edit_cases(num_edits))
    ]


def prepared(preparer: Preparer, all_params: Sequence[GenerationParams], side_px: int | None) -> list[PreparedRequest]:
    size_px = (side_px, side_px) if side_px else None
    return [
        preparer.prepare(replace(params, size_px=size_px), f"request {number}", 0.0).request
        for number, params in enumerate(all_params)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(embedded_checkpoint()))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--side", type=int, help="pixels along a side; unset means the checkpoint's own")
    parser.add_argument("--prompts", type=int, default=6, help="how many pictures are compared, edits included")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    config = EngineConfig(model=args.model, device=args.device, dtype=args.dtype)
    configs = read_configs(config)
    wanted = [GenerationParams(SWEPT_PROMPT, 0), *held_out(args.prompts)]
    swept_request, *requests = prepared(load_preparer(configs, model_card(config, configs)), wanted, args.side)
    print("relative L2 of the prediction      FP8 part   at five steps, first to last")
    swept = []
    for row in sweep(load_runner(replace(config, dtype="bfloat16")), swept_request):
        swept.append(row)
        print(f"{row.name:34} {row.fp8_part:8.2f}   {' '.join(f'{error:.4f}' for error in row.errors)}", flush=True)
    compared = []
    if args.prompts:
        print("pictures against the checkpoint as it is   PSNR dB: median, mean and worst")
        for result in compare(config, requests):
            compared.append(result)
            figures = (result.median_psnr_db, result.mean_psnr_db, result.worst_psnr_db)
            print(f"{result.name:42} {' '.join(f'{figure:8.1f}' for figure in figures)}", flush=True)
    if args.json is not None:
        tables = {"predictions": [asdict(row) for row in swept], "pictures": [asdict(row) for row in compared]}
        args.json.write_text(as_json({"model": Path(args.model).name, "prompts": args.prompts} | tables))


if __name__ == "__main__":
    main()
