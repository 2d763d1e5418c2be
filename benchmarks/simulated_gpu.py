"""How long work takes on the simulated GPU: the only place with its figures.

Measured on one H200, torch 2.11, bf16, 17-billion-parameter network of real shape: a denoise step of one row takes
25.5 ms at 1,024 target tokens (512²), 112 at 4,096 (1024²), 640 at 16,384 (2048²), and four rows of 1,024 take 100.
`fixed + per_token · tokens + per_pair · Σ tokens · context` meets all four (and so 297 ms at 9,216); below some 250
tokens the GPU waits for its weights. A 1024² condition image is 4,096 more tokens of context: 15 % more a step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from engine.cost_model import (
    CostModel,
    Measurement,
    Size,
    WorkKind,
    decode_size,
    encode_size,
    prefill_size,
    step_size,
    token_budget,
)
from engine.request import PreparedRequest

STEP_FLOOR_MS = 6.7
STEP_FIXED_MS = 0.71
STEP_PER_TOKEN_MS = 0.02322
STEP_PER_PAIR_MS = 9.643e-7  # a target token and a token of its context
PREFILL_FIXED_MS = 5.0
PREFILL_PER_TOKEN_MS = 0.0465  # 200 ms with one 1024² condition image
ENCODE_PER_PROMPT_MS = 35.0
ENCODE_PER_IMAGE_MS = 30.0
DECODE_MS = ((1_024, 34.0), (4_096, 110.0), (9_216, 240.0), (16_384, 422.0))  # by target tokens
PROFILE_NOISE = 0.02


def step_s(requests: Sequence[PreparedRequest]) -> float:
    """One denoise step of one picture of each request; every CFG branch is a row."""
    tokens = pairs = 0
    for request in requests:
        target = request.target_grid.num_tokens
        for prompt in request.prompts:
            tokens += target
            pairs += target * (target + prompt.layout.prefix_len_tokens)
    ms = STEP_FIXED_MS + STEP_PER_TOKEN_MS * tokens + STEP_PER_PAIR_MS * pairs
    return max(STEP_FLOOR_MS, ms) / 1000


def encode_s(request: PreparedRequest) -> float:
    ms = ENCODE_PER_PROMPT_MS * request.num_branches + ENCODE_PER_IMAGE_MS * len(request.condition_images)
    return ms / 1000


def prefill_s(request: PreparedRequest) -> float:
    tokens = sum(prompt.layout.prefix_len_tokens for prompt in request.prompts)
    return (PREFILL_FIXED_MS + PREFILL_PER_TOKEN_MS * tokens) / 1000


def decode_s(request: PreparedRequest) -> float:
    """Straight lines between the measured sizes, and on beyond them."""
    tokens = request.target_grid.num_tokens
    lower, upper = next((pair for pair in itertools.pairwise(DECODE_MS) if tokens <= pair[1][0]), DECODE_MS[-2:])
    slope = (upper[1] - lower[1]) / (upper[0] - lower[0])
    return (lower[1] + slope * (tokens - lower[0])) / 1000


def isolated_s(request: PreparedRequest) -> float:
    """A whole request with the GPU to itself."""
    per_image_s = request.num_steps * step_s([request]) + decode_s(request)
    return encode_s(request) + prefill_s(request) + request.num_images * per_image_s


def profile(requests: Sequence[PreparedRequest], seed: int) -> tuple[CostModel, int]:
    """What a start-up profile would know: a cost model fitted to noisy timings of `requests`, and the token budget.

    Each request is encoded, prefilled, decoded, and stepped in batches of 1, 2, 4 and 8 that don't exceed the largest
    request's tokens.
    """
    dice = random.Random(seed)
    measured: list[Measurement] = []

    def note(kind: WorkKind, size: Size, seconds: float) -> None:
        measured.append(Measurement(kind, size, seconds * dice.gauss(1.0, PROFILE_NOISE)))

    most_tokens = max(request.target_grid.num_tokens for request in requests)
    for request in requests:
        note(WorkKind.ENCODE, encode_size(request), encode_s(request))
        note(WorkKind.PREFILL, prefill_size(request), prefill_s(request))
        note(WorkKind.DECODE, decode_size(request), decode_s(request))
        for count in (1, 2, 4, 8):
            if count * request.target_grid.num_tokens <= most_tokens:
                note(WorkKind.STEP, step_size(request, count), step_s([request] * count))
    costs = CostModel()
    costs.fit(measured)
    return costs, token_budget(measured)
