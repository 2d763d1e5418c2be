"""Who comes when and asks for what: open-loop Poisson arrivals from a mix of kinds, the same for every policy and seed.

Open loop means that clients don't wait for each other: a slow server gets no fewer requests, as in the real world.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PROMPT_TOKENS = (30, 60, 120, 240)
GUIDANCE_SCALE = 4.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides how long a request takes. The picture is square."""

    side_px: int
    num_condition_images: int = 0
    guided: bool = False
    prompt_tokens: int = PROMPT_TOKENS[0]


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of sizes, and on top of them of one-image edits and of guided (CFG) requests."""

    name: str
    sizes: tuple[tuple[int, float], ...]  # (side_px, weight)
    edit_share: float = 0.0
    guided_share: float = 0.0

    def draw(self, dice: random.Random) -> Kind:
        sides, weights = zip(*self.sizes, strict=True)
        return Kind(
            side_px=dice.choices(sides, weights)[0],
            num_condition_images=int(dice.random() < self.edit_share),
            guided=dice.random() < self.guided_share,
            prompt_tokens=dice.choice(PROMPT_TOKENS),
        )

    def kinds(self, prompt_tokens: int = PROMPT_TOKENS[0]) -> dict[Kind, float]:
        """Every kind there is, with its share."""
        total = sum(weight for _, weight in self.sizes)
        shares: dict[Kind, float] = {}
        for side_px, weight in self.sizes:
            for images, images_share in ((0, 1 - self.edit_share), (1, self.edit_share)):
                for guided, guided_share in ((False, 1 - self.guided_share), (True, self.guided_share)):
                    if share := weight / total * images_share * guided_share:
                        shares[Kind(side_px, images, guided, prompt_tokens)] = share
        return shares

    def mean_s(self, seconds: Callable[[Kind], float]) -> float:
        """The mean of `seconds` over the mix: with the time of a kind run alone, one over the capacity."""
        return sum(
            share * seconds(kind) / len(PROMPT_TOKENS)
            for prompt_tokens in PROMPT_TOKENS
            for kind, share in self.kinds(prompt_tokens).items()
        )


UNIFORM = Mix("uniform", ((1024, 1),))
SIZES = Mix("sizes", ((512, 60), (1024, 35), (1536, 5)))
EDITS = Mix("edits", SIZES.sizes, edit_share=0.25, guided_share=0.15)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request on its way, `at_s` after the start."""

    at_s: float
    kind: Kind


def poisson_arrivals(mix: Mix, rate_per_s: float, count: int, seed: int) -> list[Arrival]:
    """`count` independent arrivals at `rate_per_s` on average."""
    dice = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(count):
        at_s += dice.expovariate(rate_per_s)
        arrivals.append(Arrival(at_s, mix.draw(dice)))
    return arrivals
