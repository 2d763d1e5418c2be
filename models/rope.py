"""Three-axis rotary positions (frame, height, width).

Text advances one position shared by all three axes. An image block freezes its frame axis and lays rows and columns
out on a grid centred on zero. Angles are computed in float32 on the CPU, whatever device the weights are on, so that
they do not depend on where a checkpoint was loaded; the tables are then copied to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from models.layout import Grid, PrefixLayout

THETA = 10000.0


def _centred(length: int) -> Tensor:
    return torch.arange(length) - (length - length // 2)


@lru_cache(maxsize=64)
def _grid_positions(grid: Grid) -> Tensor:  # (height * width, 2): row, column
    rows = _centred(grid.height).repeat_interleave(grid.width)
    columns = _centred(grid.width).repeat(grid.height)
    return torch.stack([rows, columns], dim=1)


def _image_positions(grid: Grid, frame: int) -> Tensor:  # (tokens, 3)
    return torch.cat([torch.full((grid.num_tokens, 1), frame), _grid_positions(grid)], dim=1)


def rotary_table(positions: Tensor, axes_dims: Sequence[int]) -> Tensor:
    """Angles of integer `positions` (tokens, 3) as (2, tokens, head_dim / 2) float32: cosines, then sines."""
    angles = []
    for axis, dim in enumerate(axes_dims):
        inverse_frequencies = 1.0 / torch.pow(THETA, torch.arange(0, dim, 2).float().div(dim))
        angles.append(torch.outer(positions[:, axis].float(), inverse_frequencies))
    angle = torch.cat(angles, dim=1)
    return torch.stack([angle.cos(), angle.sin()])


def prefix_table(layout: PrefixLayout, axes_dims: Sequence[int]) -> Tensor:
    """The table of a prefix: (2, prefix tokens, head_dim / 2), float32, on the CPU."""
    positions = []
    for segment in layout.segments:
        if segment.grid is None:
            shared = torch.arange(segment.position, segment.position + segment.num_tokens)
            positions.append(shared[:, None].expand(-1, 3))
        else:
            positions.append(_image_positions(segment.grid, segment.position))
    return rotary_table(torch.cat(positions), axes_dims)


def target_table(grid: Grid, frame: int, axes_dims: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The table of a target block: (2, target tokens, head_dim / 2), float32, on `device`. `frame` depends on the
    prefix, so every row of a batch has its own table; rows and columns do not, and are kept."""
    table = _grid_table(grid, tuple(axes_dims), device or torch.device("cpu")).clone()
    of_frame = rotary_table(torch.tensor([[frame, 0, 0]]), axes_dims)[:, :, : axes_dims[0] // 2]
    table[:, :, : axes_dims[0] // 2] = of_frame.to(table.device)
    return table


@lru_cache(maxsize=16)
def _grid_table(grid: Grid, axes_dims: tuple[int, ...], device: torch.device) -> Tensor:
    return rotary_table(_image_positions(grid, 0), axes_dims).to(device)


def apply_rotary(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring channel pairs of `x` (rows, tokens, heads, head_dim) in float32.

    `table` is (2, tokens, head_dim / 2), or (rows, 2, tokens, head_dim / 2) when rows have their own positions.
    """
    cos, sin = table.unsqueeze(-2).unbind(-4)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).to(x.dtype)
