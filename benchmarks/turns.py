"""In which order works take turns, so that none profits from what runs before it."""

from __future__ import annotations


def balanced_orders(count: int) -> list[list[int]]:
    """Rounds of works 0 to `count - 1`; over all rounds each comes after every other one equally often (a Williams
    design)."""
    zigzag = [((index + 1) // 2 if index % 2 else count - index // 2) % count for index in range(count)]
    rounds = [[(work + shift) % count for work in zigzag] for shift in range(count)]
    is_balanced = count % 2 == 0 or count == 1
    return rounds if is_balanced else rounds + [order[::-1] for order in rounds]
