"""When requests will be done that share the device: the cost model knows each of them alone.

Two things are learned from the steps that were done: how much longer one takes than the same step alone was predicted
to, and how many pictures it moves on. Whoever is `n`th in order is done when all work up to its own is done, at the
rate at which shared steps do it, but not before its own steps could be, whose pictures at best go side by side, with
everybody's way in between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cost_model import CORRECTION_BOUNDS

WEIGHT = 0.1  # of one step in what is learned


class Share(NamedTuple):
    """What a request has left: its whole work, in seconds alone, and of that its way in (encode and prefill)."""

    work_s: float
    entry_s: float = 0.0
    num_images: int = 1


@dataclass(slots=True)
class Pace:
    """`slowdown` is a factor of the time of a step alone, `sharing` the pictures in a step, as if all were as large as
    the largest."""

    slowdown: float = 1.0
    sharing: float = 1.0

    def learn(self, seconds: float, alone_s: Sequence[float]) -> None:
        """Take in a step that took `seconds`; its pictures' own steps would take `alone_s`."""
        longest_s = max(alone_s, default=0.0)
        if longest_s <= 0:
            return
        low, high = CORRECTION_BOUNDS  # a step that captured a graph, or that stood still, says little of the next
        self.slowdown += WEIGHT * (min(max(seconds / longest_s, low), high) - self.slowdown)
        self.sharing += WEIGHT * (sum(alone_s) / longest_s - self.sharing)

    def done_s(self, requests: Sequence[Share]) -> list[float]:
        """Seconds until each request is done, in their order."""
        entries_s = sum(request.entry_s for request in requests)
        done, work_s = [], 0.0
        for request in requests:
            work_s += request.work_s
            own_s = request.work_s / request.num_images
            done.append(max(self.slowdown * work_s / self.sharing, self.slowdown * own_s + entries_s - request.entry_s))
        return done
