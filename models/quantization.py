"""FP8: tensors as E4M3 with a float32 scale for each row, and linear layers that multiply them.

Weights have one scale per output channel, activations one per token, found as they are computed. Where the GPU
multiplies FP8 (compute capability 8.9 and more) a layer takes quantized input and scales the product's rows and
columns; elsewhere, the CPU included, only the weight is FP8: it is dequantized for each call, which saves memory and no
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import read_json
from models.errors import CheckpointError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST = 1e-12  # of a row's largest number: a row of zeros has a scale too
MULTIPLE = 16  # of both sides of a weight in a matrix product of FP8
METHOD = "easel_fp8"  # `quant_method` in the config of a component that `easel quantize` wrote
SCALE_SUFFIX = "_scale"  # of the tensor beside a quantized one


@dataclass(frozen=True, slots=True)
class Quantized:
    """Numbers as E4M3: `values` (..., dim), and `scales` (..., 1) float32 that they are to be multiplied by."""

    values: Tensor
    scales: Tensor

    def to(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales).to(dtype)


Activation = Tensor | Quantized


def quantize_rows(x: Tensor) -> Quantized:
    """Each row of the last dimension with the scale that takes its largest number to the largest of E4M3."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
    return Quantized((wide * (FP8_MAX / largest)).to(FP8), largest / FP8_MAX)


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has matrix products of FP8, with results in `dtype`."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


class Fp8Linear(nn.Module):
    """A linear layer without bias whose weight is E4M3. `scaled` says whether its input is quantized too."""

    def __init__(self, in_features: int, out_features: int, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        weight = torch.empty(out_features, in_features, dtype=FP8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, 1), requires_grad=False)

    def forward(self, x: Activation) -> Tensor:
        if not self.scaled:
            assert isinstance(x, Tensor)
            return F.linear(x, self.dequantized(x.dtype))
        quantized = x if isinstance(x, Quantized) else quantize_rows(x)
        shape = quantized.values.shape
        out = torch.empty(*shape[:-1], len(self.weight), dtype=torch.bfloat16, device=self.weight.device)
        self.write(quantized, out.view(-1, len(self.weight)))
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight in another dtype."""
        return Quantized(self.weight, self.weight_scale).to(dtype)

    def write(self, x: Quantized, out: Tensor) -> None:
        """The product of a `scaled` layer with x (..., in_features), to `out` (tokens, out_features) in bfloat16."""
        torch._scaled_mm(
            x.values.flatten(0, -2),
            self.weight.T,
            scale_a=x.scales.view(-1, 1),
            scale_b=self.weight_scale.T,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )


def takes_fp8(linear: nn.Module) -> bool:
    """Whether a layer wants its input quantized."""
    return isinstance(linear, Fp8Linear) and linear.scaled


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """Which layers of a network become FP8: all that may, but for `ignored`, and for the first and last blocks.

    An entry of `ignored` is a published module name, a dotted part of one (`img_mlp`, `attn.to_q`), or a pattern with
    wildcards (`transformer_blocks.*.img_mlp.out`).
    """

    ignored: tuple[str, ...] = ()
    first_blocks: int = 0
    last_blocks: int = 0

    @classmethod
    def read(cls, config_path: Path) -> Self | None:
        """The plan by which a component was quantized when it was written; None when it is not quantized."""
        stored = read_json(config_path).get("quantization_config")
        if stored is None:
            return None
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        if method != METHOD:
            raise CheckpointError(f"{config_path}: quantized by {method!r}, which is not supported (only {METHOD!r})")
        return cls(tuple(stored["ignored_layers"]), stored["first_blocks"], stored["last_blocks"])

    def as_config(self) -> dict[str, object]:
        """What `read` reads."""
        blocks = {"first_blocks": self.first_blocks, "last_blocks": self.last_blocks}
        return {"quant_method": METHOD, "ignored_layers": list(self.ignored), **blocks}

    def quantize(
        self, network: nn.Module, blocks: str, published_names: Callable[[str], tuple[str, ...]], scaled: bool
    ) -> set[str]:
        """Put an empty `Fp8Linear` in the place of every linear layer in the blocks at `blocks` that is to be one.

        The network is not loaded yet. `published_names` is as in `models.checkpoint.load_weights`; a layer that is
        stacked from several published ones stays as it is when any of them is ignored. Returns the entries of `ignored`
        that matched something.
        """
        matched = set[str]()
        all_blocks = list(network.get_submodule(blocks).children())
        for number, block in enumerate(all_blocks):
            is_kept = number < self.first_blocks or number >= len(all_blocks) - self.last_blocks
            for name, layer in list(block.named_modules()):
                if not isinstance(layer, nn.Linear) or layer.bias is not None:
                    continue
                weights = published_names(f"{blocks}.{number}.{name}.weight")
                ignoring = self._matching([weight.removesuffix(".weight") for weight in weights])
                matched |= ignoring
                if not ignoring and not is_kept:
                    owner, _, leaf = name.rpartition(".")
                    fits = layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
                    quantized = Fp8Linear(layer.in_features, layer.out_features, scaled and fits)
                    setattr(block.get_submodule(owner), leaf, quantized)
        return matched

    def _matching(self, published: Sequence[str]) -> set[str]:
        return {entry for entry in self.ignored if any(_matches(name, entry) for name in published)}


def _matches(name: str, entry: str) -> bool:
    if any(wildcard in entry for wildcard in "*?["):
        return fnmatchcase(name, entry)
    return f".{entry.strip('.')}." in f".{name}."
