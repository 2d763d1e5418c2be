"""Where every token of a request sits: grids, segments and positions. Plain integers, no torch.

The joint sequence is `text and condition images (the prefix), then the target image`. It is causal, and each image
block is bidirectional inside itself. A block's bounds come from its grid, never from runs of image tokens: two images
with no text between them stay two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SLOT_SIDE_TOKENS = 2  # one image slot of the vision-language sequence stands for 2×2 latent tokens
SLOT_TOKENS = SLOT_SIDE_TOKENS**2


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Height and width of an image block, in tokens."""

    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        return self.height * self.width

    @property
    def num_slots(self) -> int:
        return self.num_tokens // SLOT_TOKENS

    @classmethod
    def of_pixels(cls, width_px: int, height_px: int, px_per_token: int) -> Grid:
        return cls(height_px // px_per_token, width_px // px_per_token)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive prefix tokens of one kind. `position` is the shared rotary position of the first text token, or the
    frame position of a whole image block; `grid` is None for text."""

    start: int
    end: int
    position: int
    grid: Grid | None

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """The prefix of one CFG branch. `target_position` is the frame position at which its target block starts."""

    segments: tuple[Segment, ...]
    target_position: int

    @property
    def prefix_len_tokens(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @property
    def num_text_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments if segment.grid is None)


def prefix_layout(is_image_slot: Sequence[bool], condition_grids: Iterable[Grid]) -> PrefixLayout:
    """Lay out a prefix from the vision-language sequence: `is_image_slot` per token, and the images' latent grids in
    order. Text advances the position by one a token, an image block by the longer side of its grid.

    Raises `ValueError` when slots and grids do not account for each other.
    """
    segments: list[Segment] = []
    grids = iter(condition_grids)
    start = position = cursor = 0
    while cursor < len(is_image_slot):
        if is_image_slot[cursor]:
            grid = next(grids, None)
            if grid is None or not all(is_image_slot[cursor : cursor + grid.num_slots]):
                raise ValueError("the image slots of the prompt do not match the condition images")
            cursor += grid.num_slots
            segment = Segment(start, start + grid.num_tokens, position, grid)
            position += max(grid.height, grid.width)
        else:
            text_end = cursor
            while text_end < len(is_image_slot) and not is_image_slot[text_end]:
                text_end += 1
            segment = Segment(start, start + text_end - cursor, position, None)
            position += text_end - cursor
            cursor = text_end
        segments.append(segment)
        start = segment.end
    if cursor != len(is_image_slot) or next(grids, None) is not None:
        raise ValueError("the image slots of the prompt do not match the condition images")
    return PrefixLayout(tuple(segments), position)


def fit_area(area_px: int, aspect: float, multiple_px: int) -> tuple[int, int]:
    """(width, height) in pixels near `area_px` at `aspect` = width / height, each side the nearest multiple of
    `multiple_px` and at least one of them."""
    width_px = math.sqrt(area_px * aspect)
    height_px = width_px / aspect
    return (
        max(1, round(width_px / multiple_px)) * multiple_px,
        max(1, round(height_px / multiple_px)) * multiple_px,
    )


def cover(size_px: tuple[int, int], multiple_px: int) -> tuple[int, int]:
    """The smallest (width, height) with sides multiple of `multiple_px` that covers `size_px`."""
    return tuple(math.ceil(side / multiple_px) * multiple_px for side in size_px)  # type: ignore[return-value]


def centre_crop(generated_px: tuple[int, int], size_px: tuple[int, int]) -> tuple[slice, slice]:
    """(rows, columns) that cut the centred `size_px` (width, height) out of a generated picture."""
    left, top = ((generated_px[axis] - size_px[axis]) // 2 for axis in (0, 1))
    return slice(top, top + size_px[1]), slice(left, left + size_px[0])
