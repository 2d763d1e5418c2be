"""In which order works take turns, so that none profits from what runs before it."""

from __future__ import annotations


def balanced_turns(count: int) -> list[int]:
    """Turns of works 0 to `count - 1` in which each comes right after every other one exactly once, the first after the
    last: a closed walk over all ordered pairs. It starts at work 0; one work alone has one turn."""
    after = {work: [other for other in range(count) if other != work] for work in range(count)}
    walk, closed = [0], list[int]()
    while walk:  # a walk that is stuck is back where it began: what is closed waits until its detours are in
        if after[walk[-1]]:
            walk.append(after[walk[-1]].pop())
        else:
            closed.append(walk.pop())
    return closed[:0:-1] or [0]
