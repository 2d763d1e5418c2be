"""Works that take turns: none comes more often after one than after another."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from benchmarks.turns import balanced_turns


@pytest.mark.parametrize("count", range(2, 8))
def test_each_work_comes_after_each_other_once(count: int) -> None:
    turns = balanced_turns(count)
    follows = Counter(zip([turns[-1], *turns], turns, strict=False))
    assert follows == Counter(permutations(range(count), 2))
    assert turns[0] == 0


def test_one_work_has_one_turn() -> None:
    assert balanced_turns(1) == [0]
