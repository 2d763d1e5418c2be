"""What a captured decode step reads: tensors at fixed addresses, filled anew before every step.

Prefixes stay where their requests keep them. The step finds them by address and length, both read on the device, so
neither a prompt's length nor whose prefix it is belongs to a step's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from models.config import TransformerConfig
from models.prefix_kv import Prefix, PrefixKV
from models.quantization import Activation, Fp8Linear, Quantized

GAP = 256  # slots of zeros behind each row: attention reads whole tiles, and what lies behind the end must be finite


@dataclass(frozen=True, slots=True)
class Row:
    """One branch of one picture, about to take a step: latents (tokens, channels), the timestep, the target's rotary
    table (2, tokens, head_dim / 2), and the prefix."""

    latents: Tensor
    sigma: float
    rotary: Tensor
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Inputs and buffers of a step over `len(latents)` rows of `tokens` target tokens.

    `qkv` has `tokens + capacity` slots a row: those of the target, and, where `capacity` is not 0, the keys and values
    of up to `capacity - GAP` prefix tokens and a gap behind them. Every layer fills it anew.
    """

    tokens: int
    capacity: int
    latents: Tensor  # (rows, tokens, channels)
    rotary: Tensor  # (rows, 2, tokens, head_dim / 2) float32
    qkv: Tensor  # (rows, slots, 3, heads, head_dim)
    fp8: tuple[bool, bool]  # whether the prefixes' keys, and values, are E4M3
    numbers: Tensor  # (11 × rows,) int32: the next four, as they cross to the device
    staging: Iterator[Tensor]  # the same in host memory, two in turn: the last step's may still be on its way

    @classmethod
    def allocate(
        cls,
        config: TransformerConfig,
        rows: int,
        tokens: int,
        capacity: int,
        fp8: tuple[bool, bool],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        heads, head_dim = config.num_attention_heads, config.attention_head_dim
        on_cuda = device.type == "cuda"
        return cls(
            tokens=tokens,
            capacity=capacity,
            latents=torch.zeros(rows, tokens, config.in_channels, dtype=dtype, device=device),
            rotary=torch.zeros(rows, 2, tokens, head_dim // 2, device=device),
            qkv=torch.zeros(rows, tokens + capacity, 3, heads, head_dim, dtype=dtype, device=device),
            fp8=fp8,
            numbers=torch.zeros(11 * rows, dtype=torch.int32, device=device),
            staging=cycle(torch.zeros(11 * rows, dtype=torch.int32, pin_memory=on_cuda) for _ in range(2)),
        )

    @property
    def addresses(self) -> Tensor:  # (4, rows) int64, of the rows' prefix KV
        return self._number(0, 8).view(torch.int64).view(4, -1)

    @property
    def prefix_lens(self) -> Tensor:  # (rows,) int32
        return self._number(8, 9)

    @property
    def key_lens(self) -> Tensor:  # (rows,) int32, target and prefix
        return self._number(9, 10)

    @property
    def timestep(self) -> Tensor:  # (rows,) float32
        return self._number(10, 11).view(torch.float32)

    def _number(self, start: int, end: int) -> Tensor:
        rows = len(self.latents)
        return self.numbers[start * rows : end * rows]

    def fill(self, rows: Sequence[Row]) -> None:
        """Take rows whose prefixes are cached. These must stay alive until the step has run, and all but the last step
        must have run before this is called again."""
        count = len(rows)
        lens = [row.prefix.layout.prefix_len_tokens for row in rows]
        torch.stack([row.latents for row in rows], out=self.latents)
        torch.stack([row.rotary for row in rows], out=self.rotary)
        staged = next(self.staging)
        numbers = staged.numpy()
        addresses = [row.prefix.addresses for row in rows if isinstance(row.prefix, PrefixKV)]
        numbers[: 8 * count].view(np.int64).reshape(4, count)[:] = np.transpose(addresses)
        numbers[8 * count : 9 * count] = lens
        numbers[9 * count : 10 * count] = [self.tokens + length for length in lens]
        numbers[10 * count :].view(np.float32)[:] = [row.sigma for row in rows]
        self.numbers.copy_(staged, non_blocking=True)

    def project(self, x: Activation, linear: nn.Linear | Fp8Linear) -> Tensor:
        """The q/k/v projections of x (rows, tokens, dim), written to their slots and returned as (rows, tokens, 3,
        heads, head_dim)."""
        slots = self.qkv.flatten(2)[:, : self.tokens]
        is_whole = slots.is_contiguous()
        if isinstance(x, Quantized):
            assert isinstance(linear, Fp8Linear)
            for row in [slice(None)] if is_whole else [slice(row, row + 1) for row in range(len(slots))]:
                linear.write(Quantized(x.values[row], x.scales[row]), slots[row].flatten(0, 1))
        else:
            weight = linear.dequantized(x.dtype) if isinstance(linear, Fp8Linear) else linear.weight
            if is_whole:
                torch.mm(x.flatten(0, 1), weight.T, out=slots.flatten(0, 1))
            else:
                torch.bmm(x, weight.T.expand(len(x), -1, -1), out=slots)
        return self.qkv[:, : self.tokens]
