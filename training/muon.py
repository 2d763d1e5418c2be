"""Muon: momentum whose matrices are orthogonalised before they are applied, batched over matrices of one shape.

Small networks are trained from a few thousand updates here, and this reaches a given loss in fewer of them than Adam.
Stacked projections are orthogonalised part by part, convolutions as matrices (out, in × kernel²). Embeddings, norms,
biases and the outer projections stay with Adam.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter seen as `parts` matrices stacked along its first dimension."""

    parameter: nn.Parameter
    parts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.parameter.shape[0] // self.parts
        return rows, self.parameter[0].numel()


def orthogonalised(matrices: Tensor) -> Tensor:
    """Nearest (half-)orthogonal matrices, roughly: singular values between 0.7 and 1.2. (count, rows, columns)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)


class Muon:
    """One update for every shape of matrix; `momentum` is what has to be saved to carry on."""

    def __init__(self, matrices: Sequence[Matrix], decay: float = 0.95, weight_decay: float = 0.02) -> None:
        groups: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.items())
        self.momentum = [
            torch.zeros(sum(matrix.parts for matrix in group), *shape, device=group[0].parameter.device)
            for shape, group in self.groups
        ]
        self.decay, self.weight_decay = decay, weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (shape, group), momentum in zip(self.groups, self.momentum, strict=True):
            parameters = [matrix.parameter for matrix in group]
            gradient = torch.cat([_grad(matrix).reshape(matrix.parts, *shape) for matrix in group])
            momentum.lerp_(gradient, 1 - self.decay)
            update = orthogonalised(gradient.lerp(momentum, self.decay))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            updates, taken = [], 0
            for matrix in group:
                updates.append(update[taken : taken + matrix.parts].reshape(matrix.parameter.shape))
                taken += matrix.parts
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            torch._foreach_add_(parameters, updates, alpha=-scale)


def _grad(matrix: Matrix) -> Tensor:
    return torch.zeros_like(matrix.parameter) if matrix.parameter.grad is None else matrix.parameter.grad


class Average:
    """Exponential moving average of a network's weights."""

    def __init__(self, network: nn.Module) -> None:
        self.parameters = list(network.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        torch._foreach_lerp_(self.averages, [parameter.detach() for parameter in self.parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages."""
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
