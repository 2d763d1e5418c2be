"""How the numbers of the networks are kept: a choice made at start, free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`transformer` and `text_encoder` are "auto" (as the checkpoint has them) or "fp8". `prefix_kv` is "auto" (the
    working dtype), "fp8" or "fp8_v" (values only).

    What FP8 may not touch: layers that match `ignored_layers`, of both networks; the transformer's first and last
    blocks; and the first and last denoise steps of a picture, which then need the whole transformer a second time.
    """

    transformer: str = "auto"
    text_encoder: str = "auto"
    prefix_kv: str = "auto"
    ignored_layers: tuple[str, ...] = ()
    first_blocks: int = 0
    last_blocks: int = 0
    first_steps: int = 0
    last_steps: int = 0

    def is_exact(self, step: int, num_steps: int) -> bool:
        """Whether a step runs without FP8."""
        return step < self.first_steps or step >= num_steps - self.last_steps


AS_STORED = Precision()
