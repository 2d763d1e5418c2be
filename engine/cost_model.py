"""Predicts how long work takes: fitted to a start-up profile, corrected by what really happens.

A denoise step costs `a + b·tokens + c·tokens·context`, the other items `a + b·units`. A correction factor per kind
follows the measured times, so predictions stay right when the machine is slower than it was at start-up. The model
drives order, deadlines, ETA, `Retry-After` and the backlog gauge; nothing else depends on it being right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from engine.request import PreparedRequest

CORRECTION_WEIGHT = 0.05  # of the newest measurement
CORRECTION_BOUNDS = (0.05, 20.0)


class WorkKind(StrEnum):
    """The kinds of work that are timed."""

    ENCODE = "encode"
    PREFILL = "prefill"
    STEP = "step"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Size:
    """What the cost of one item depends on. `tokens` are summed over rows: target tokens of a step or a decode,
    prefix tokens of a prefill, text and image tokens of an encode. `context` is what each of them attends to."""

    tokens: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed item of work."""

    kind: WorkKind
    size: Size
    seconds: float


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds: fixed, per token, per token and token of context."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_token_context_s: float = 0.0

    def seconds(self, size: Size) -> float:
        return self.fixed_s + size.tokens * (self.per_token_s + size.context * self.per_token_context_s)


# Rough figures of a large GPU; they stand in until a profile replaces them.
DEFAULTS = {
    WorkKind.ENCODE: Coefficients(0.03, 1e-5),
    WorkKind.PREFILL: Coefficients(0.01, 3e-5),
    WorkKind.STEP: Coefficients(0.002, 2.4e-5, 9e-10),
    WorkKind.DECODE: Coefficients(0.005, 2.6e-5),
}


@dataclass(slots=True)
class CostModel:
    """Predicted seconds of work items and of whole requests."""

    coefficients: dict[WorkKind, Coefficients] = field(default_factory=lambda: dict(DEFAULTS))
    corrections: dict[WorkKind, float] = field(default_factory=lambda: dict.fromkeys(WorkKind, 1.0))

    def predict_s(self, kind: WorkKind, size: Size) -> float:
        return self.coefficients[kind].seconds(size) * self.corrections[kind]

    def correct(self, measured: Measurement) -> None:
        """Move the kind's correction towards what was measured."""
        expected = self.coefficients[measured.kind].seconds(measured.size)
        if expected <= 0 or measured.seconds <= 0:
            return
        low, high = CORRECTION_BOUNDS
        ratio = min(max(measured.seconds / expected, low), high)
        old = self.corrections[measured.kind]
        self.corrections[measured.kind] = old + CORRECTION_WEIGHT * (ratio - old)

    def fit(self, profile: Sequence[Measurement]) -> None:
        """Replace coefficients by non-negative least squares over a profile; kinds it does not cover keep theirs."""
        for kind in WorkKind:
            of_kind = [measured for measured in profile if measured.kind is kind]
            if of_kind:
                self.coefficients[kind] = _fit(of_kind)
                self.corrections[kind] = 1.0

    def copy(self) -> CostModel:
        return replace(self, coefficients=dict(self.coefficients), corrections=dict(self.corrections))

    def step_s(self, request: PreparedRequest, num_images: int = 1) -> float:
        return self.predict_s(WorkKind.STEP, step_size(request, num_images))

    def encode_s(self, request: PreparedRequest) -> float:
        return self.predict_s(WorkKind.ENCODE, encode_size(request))

    def prefill_s(self, request: PreparedRequest) -> float:
        return self.predict_s(WorkKind.PREFILL, prefill_size(request))

    def decode_s(self, request: PreparedRequest) -> float:
        return self.predict_s(WorkKind.DECODE, decode_size(request))

    def isolated_s(self, request: PreparedRequest) -> float:
        """A whole request with the device to itself."""
        per_image = request.num_steps * self.step_s(request) + request.decodes_after(0) * self.decode_s(request)
        return self.encode_s(request) + self.prefill_s(request) + request.num_images * per_image


def encode_size(request: PreparedRequest) -> Size:
    return Size(sum(len(prompt.input_ids) for prompt in request.prompts) + condition_tokens(request))


def prefill_size(request: PreparedRequest) -> Size:
    return Size(sum(prompt.layout.prefix_len_tokens for prompt in request.prompts))


def step_size(request: PreparedRequest, num_images: int = 1) -> Size:
    """One step of `num_images` images of a request: every branch is a row."""
    target = request.target_grid.num_tokens
    prefix = sum(prompt.layout.prefix_len_tokens for prompt in request.prompts) // request.num_branches
    return Size(num_images * request.num_branches * target, target + prefix)


def decode_size(request: PreparedRequest) -> Size:
    return Size(request.target_grid.num_tokens)


def condition_tokens(request: PreparedRequest) -> int:
    return sum(image.grid.num_tokens for image in request.condition_images)


def token_budget(profile: Sequence[Measurement], gain: float = 1.1) -> int:
    """Tokens that fill the device: the smallest measured step whose throughput no larger one beats by `gain`."""
    steps = sorted((m for m in profile if m.kind is WorkKind.STEP and m.seconds > 0), key=lambda m: m.size.tokens)
    if not steps:
        return 1
    best = max(m.size.tokens / m.seconds for m in steps)
    return next(m.size.tokens for m in steps if m.size.tokens / m.seconds * gain >= best)


def _fit(measured: Sequence[Measurement]) -> Coefficients:
    """Least squares of relative error; a term whose coefficient would be negative is left out."""
    features = np.array([[1.0, m.size.tokens, m.size.tokens * m.size.context] for m in measured])
    seconds = np.array([m.seconds for m in measured])
    columns = [column for column in range(3) if features[:, column].any()]
    while True:
        weighted = features[:, columns] / seconds[:, None]
        scale = np.abs(weighted).max(axis=0)
        solution, *_ = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)
        solution = solution / scale
        if (solution >= 0).all() or len(columns) == 1:
            break
        columns.remove(columns[int(np.argmin(solution * scale))])
    found = dict(zip(columns, np.maximum(solution, 0.0).tolist(), strict=True))
    return Coefficients(found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0))
