"""How far two tensors are apart."""

from __future__ import annotations

from torch import Tensor


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖ in float64. NaN compares as infinitely far."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    return error if error == error else float("inf")
