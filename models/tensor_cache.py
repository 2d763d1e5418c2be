"""Tensors by what they were computed from: the same prompt or picture is not encoded twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor

CACHE_BYTES = 2**28  # of each kind: prompt embeddings, vision features, condition latents


class TensorCache:
    """Keeps the most recently used tensors, up to `max_bytes` of them. They must not be written to."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tensors: OrderedDict[Hashable, Tensor] = OrderedDict()  # the least recently used first
        self.hits = self.misses = 0

    def __repr__(self) -> str:
        return f"<TensorCache: {len(self._tensors)} tensors, {self.num_bytes} bytes, {self.hits} hits>"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def get(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor of `key`, computed when it is not here."""
        if (found := self._tensors.get(key)) is not None:
            self._tensors.move_to_end(key)
            self.hits += 1
            return found
        self.misses += 1
        computed = self._tensors[key] = compute()
        while self.num_bytes > self._max_bytes:
            self._tensors.popitem(last=False)
        return computed

    def clear(self) -> None:
        self._tensors.clear()
