"""Which requests may share a denoise step."""

from __future__ import annotations

from dataclasses import dataclass

from models.layout import Grid


@dataclass(frozen=True, slots=True)
class BatchKey:
    """Rows with equal keys may run in one denoise step: same target grid, same condition images' grids.

    Prompt length, guidance, seed, step index and step count are no part of it: each row carries its own timestep,
    rotary table, prefix and modulation.
    """

    target_grid: Grid
    condition_grids: tuple[Grid, ...]
