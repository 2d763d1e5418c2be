from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope, apply_rotary_emb_qwen

from models.layout import Grid, prefix_layout
from models.rope import apply_rotary, prefix_table, target_table

AXES = (8, 12, 12)


def test_tables_equal_the_reference_for_text_images_and_target() -> None:
    grids = [Grid(4, 6), Grid(6, 2)]
    target = Grid(2, 8)
    runs = [(3, None), (0, grids[0]), (2, None), (0, grids[1]), (4, None)]
    slots = [flag for text, grid in runs for flag in ([False] * text if grid is None else [True] * grid.num_slots)]
    layout = prefix_layout(slots, grids)
    is_image = [flag for text, grid in runs for flag in ([False] * text if grid is None else [True] * grid.num_tokens)]
    mask = torch.tensor(is_image + [True] * target.num_tokens)
    shapes = [(1, grid.height, grid.width) for grid in (*grids, target)]
    reference = QwenImage21Rope(10000, list(AXES))(shapes, mask, torch.device("cpu"))
    prefix = prefix_table(layout, AXES)
    own = torch.cat([prefix, target_table(target, layout.target_position, AXES)], dim=1)
    torch.testing.assert_close(torch.complex(*own), reference, rtol=0, atol=1e-6)


def test_rotation_equals_the_reference_and_rows_may_differ() -> None:
    x = torch.randn(2, 5, 3, 32, generator=torch.Generator().manual_seed(0))
    tables = torch.stack([target_table(Grid(1, 5), frame, AXES) for frame in (3, 40)])
    ours = apply_rotary(x, tables)
    for row in range(2):
        theirs = apply_rotary_emb_qwen(x[row : row + 1], torch.complex(*tables[row]), use_real=False)
        torch.testing.assert_close(ours[row : row + 1], theirs)
        torch.testing.assert_close(apply_rotary(x[row : row + 1], tables[row]), theirs)
    assert not torch.allclose(ours[0], apply_rotary(x, tables[1])[0])


def test_positions_past_the_reference_table_keep_growing() -> None:
    """The reference wraps into its negative positions behind 8,191; a long prompt with images must not."""
    near, far = (target_table(Grid(1, 1), frame, AXES) for frame in (100, 9000))
    expected = torch.tensor(9000.0)
    assert not torch.allclose(near, far)
    torch.testing.assert_close(far[0, 0, 0], expected.cos())
