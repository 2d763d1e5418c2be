"""Checks the promise that nobody starves, on the simulated clock.

Once a request has been in for `max_stretch` times its predicted isolated time, it goes before everybody but those who
came earlier. So from then on it takes no longer than what is left of their work and its own, plus what the scheduler
had begun or slips in between two steps: an item of work at most, on this GPU, where nobody shares a step with it.
"""

from __future__ import annotations

import heapq

from benchmarks import simulated_gpu as gpu
from engine.cost_model import CostModel
from engine.request import PreparedRequest
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Work


class StarvationWatch:
    """Told of every arrival, item of work and end."""

    def __init__(self, costs: CostModel, max_stretch: float) -> None:
        self._costs = costs
        self._max_stretch = max_stretch
        self._live: dict[str, PreparedRequest] = {}  # in the order of arrival
        self._left_s: dict[str, float] = {}
        self._step_s: dict[str, float] = {}
        self._patience: list[tuple[float, str]] = []  # heap of (when it starts to starve, request)
        self._due_s: dict[str, float] = {}
        self.num_starved = 0
        self.worst_excess_s = 0.0  # by which somebody overstayed that work
        self.worst_quantum_s = 0.0  # the longest item of work

    def add(self, request: PreparedRequest) -> None:
        request_id = request.request_id
        self._live[request_id] = request
        self._left_s[request_id] = gpu.isolated_s(request)
        self._step_s[request_id] = gpu.step_s([request])
        starves_s = request.arrived_s + self._max_stretch * self._costs.isolated_s(request)
        heapq.heappush(self._patience, (starves_s, request_id))

    def look(self, now_s: float) -> None:
        """Work is about to be chosen: who starves from now on, and when is it due?"""
        while self._patience and self._patience[0][0] <= now_s:
            request_id = heapq.heappop(self._patience)[1]
            if request_id in self._live:
                self.num_starved += 1
                self._due_s[request_id] = now_s + self._left_until(request_id)

    def done(self, work: Work, seconds: float) -> None:
        self.worst_quantum_s = max(self.worst_quantum_s, seconds)
        match work:
            case DenoiseStep(_, samples):
                for sample in samples:
                    self._left_s[sample.request_id] -= self._step_s[sample.request_id]
            case EncodePrompt(request_id) | Prefill(request_id) | DecodeImage(request_id):
                self._left_s[request_id] -= seconds

    def remove(self, request_id: str, now_s: float) -> None:
        del self._live[request_id], self._left_s[request_id], self._step_s[request_id]
        if request_id in self._due_s:
            self.worst_excess_s = max(self.worst_excess_s, now_s - self._due_s.pop(request_id))

    @property
    def holds(self) -> bool:
        return self.worst_excess_s <= self.worst_quantum_s + 1e-6

    def _left_until(self, request_id: str) -> float:
        """Work left of everybody who came no later."""
        left_s = 0.0
        for other_id in self._live:
            left_s += self._left_s[other_id]
            if other_id == request_id:
                break
        return left_s
