"""Things that are kept for a while: bounded in number, bytes and age, in memory. Safe to use from several threads.

In memory, because what is kept is worth little after a restart: there is no folder to fill, to clean up or to lack the
rights for.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    item: T
    num_bytes: int
    since_s: float


class Shelf(Generic[T]):
    """Keeps items by name. Past a bound the oldest go first; the newest always stays."""

    def __init__(
        self, *, max_items: int, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_items, self._max_bytes, self._max_age_s = max_items, max_bytes, max_age_s
        self._clock = clock
        self._kept: OrderedDict[str, _Kept[T]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Shelf: {len(self._kept)} items, {self._num_bytes} bytes>"

    def put(self, name: str, item: T, num_bytes: int) -> None:
        """Keep an item, instead of an earlier one of that name."""
        with self._lock:
            self._drop(name)
            self._kept[name] = _Kept(item, num_bytes, self._clock())
            self._num_bytes += num_bytes
            self._drop_expired()
            while len(self._kept) > self._max_items or (self._num_bytes > self._max_bytes and len(self._kept) > 1):
                self._drop(next(iter(self._kept)))

    def get(self, name: str) -> T | None:
        with self._lock:
            self._drop_expired()
            kept = self._kept.get(name)
            return None if kept is None else kept.item

    def drop(self, name: str) -> bool:
        """Forget an item; False when it is not here."""
        with self._lock:
            self._drop_expired()
            return self._drop(name)

    def _drop_expired(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        while self._kept and next(iter(self._kept.values())).since_s <= oldest_s:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> bool:
        kept = self._kept.pop(name, None)
        self._num_bytes -= kept.num_bytes if kept else 0
        return kept is not None
