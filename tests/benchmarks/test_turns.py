"""Works that take turns: none comes more often after one than after another."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.turns import balanced_orders


@pytest.mark.parametrize("count", range(1, 8))
def test_each_work_comes_after_each_other_equally_often(count: int) -> None:
    rounds = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in rounds)
    follows = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1
