"""Masks, (height, width) bool, without a package for them: growing, shrinking and connected regions.

A region is found from the runs of each row, joined with those they touch in the row above.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter


def box_mean(mask: np.ndarray, radius_px: int) -> np.ndarray:
    """The part of the square of 2 × radius + 1 pixels around each pixel that is in the mask, to 1 / 255."""
    blurred = Image.fromarray(mask.astype(np.uint8) * 255).filter(ImageFilter.BoxBlur(radius_px))
    mean: np.ndarray = np.asarray(blurred) / np.float32(255)
    return mean


def dilate(mask: np.ndarray, radius_px: int) -> np.ndarray:
    grown: np.ndarray = box_mean(mask, radius_px) > 0
    return grown


def erode(mask: np.ndarray, radius_px: int) -> np.ndarray:
    shrunk: np.ndarray = box_mean(mask, radius_px) == 1
    return shrunk


def connected_regions(mask: np.ndarray, min_area_px: int) -> list[np.ndarray]:
    """The regions of `mask` (height, width) bool that hold at least `min_area_px` pixels, corners touching counts."""
    runs: list[tuple[int, int, int]] = []  # row, start, end
    parent: list[int] = []
    above: list[int] = []
    for row, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(line.astype(np.int8), prepend=0, append=0))
        current = []
        for start, end in edges.reshape(-1, 2).tolist():
            index = len(runs)
            runs.append((row, start, end))
            parent.append(index)
            current.append(index)
            for other in above:
                if runs[other][1] <= end and start <= runs[other][2]:
                    parent[_root(parent, other)] = _root(parent, index)
        above = current
    regions: dict[int, np.ndarray] = {}
    for index, (row, start, end) in enumerate(runs):
        region = regions.setdefault(_root(parent, index), np.zeros(mask.shape, bool))
        region[row, start:end] = True
    return [region for region in regions.values() if region.sum() >= min_area_px]


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index
