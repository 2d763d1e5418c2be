"""CUDA graphs that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

import torch

Result = TypeVar("Result")


class GraphPool:
    """The memory of graphs that do not run at the same time: what one leaves there is gone once another one runs."""

    def __init__(self) -> None:
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Do `work` once, so that kernels are compiled and libraries are set up, then capture it. Returns the graph,
        and what the captured call returned, which each replay fills anew."""
        work()
        torch.cuda.synchronize()
        pool = next((other.pool() for other in self._graphs), None)  # the first of all makes one
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
        self._graphs.add(graph)
        return graph, result
