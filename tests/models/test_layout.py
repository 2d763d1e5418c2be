from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.layout import Grid, Segment, centre_crop, cover, fit_area, prefix_layout


def test_text_only_prefix() -> None:
    layout = prefix_layout([False] * 5, [])
    assert layout.segments == (Segment(0, 5, 0, None),)
    assert (layout.prefix_len_tokens, layout.num_text_tokens, layout.target_position) == (5, 5, 5)


def test_adjacent_images_stay_separate_blocks() -> None:
    wide, tall = Grid(2, 4), Grid(4, 2)
    slots = [False] * 3 + [True] * (wide.num_slots + tall.num_slots) + [False]
    layout = prefix_layout(slots, [wide, tall])
    assert [segment.grid for segment in layout.segments] == [None, wide, tall, None]
    assert [segment.position for segment in layout.segments] == [0, 3, 7, 11]
    assert layout.prefix_len_tokens == 3 + 8 + 8 + 1
    assert layout.target_position == 12


@pytest.mark.parametrize(
    ("slots", "grids"),
    [
        ([True, False], [Grid(2, 4)]),
        ([True, True], [Grid(2, 2)]),
        ([False], [Grid(2, 2)]),
        ([True], []),
        ([True], [Grid(2, 4)]),
    ],
)
def test_slots_and_grids_must_account_for_each_other(slots: list[bool], grids: list[Grid]) -> None:
    with pytest.raises(ValueError, match="do not match"):
        prefix_layout(slots, grids)


@given(
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.sampled_from([16, 32]),
)
def test_an_exact_size_is_covered_and_centred(width: int, height: int, multiple: int) -> None:
    generated = cover((width, height), multiple)
    for side, asked in zip(generated, (width, height), strict=True):
        assert side % multiple == 0
        assert 0 <= side - asked < multiple
    rows, columns = centre_crop(generated, (width, height))
    assert (rows.stop - rows.start, columns.stop - columns.start) == (height, width)
    assert abs(rows.start - (generated[1] - rows.stop)) <= 1
    assert columns.start >= 0
    assert columns.stop <= generated[0]


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_area_is_kept_and_no_side_vanishes(width: int, height: int) -> None:
    fitted = fit_area(1024 * 1024, width / height, 32)
    assert all(side >= 32 and side % 32 == 0 for side in fitted)
    if max(width, height) <= 8 * min(width, height):
        assert 0.9 < fitted[0] * fitted[1] / 1024**2 < 1.1
