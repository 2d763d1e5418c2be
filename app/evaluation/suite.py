"""What is measured, and how verdicts add up: held-out prompts and edits, judged one by one, summed by attribute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from app.evaluation.analysis import analyse
from app.evaluation.captions import caption
from app.evaluation.edits import ONE_IMAGE, TWO_IMAGES, Edit, draw_edit
from app.evaluation.judge import judge_edit, judge_scene, kept_psnr_db
from app.evaluation.scenes import Scene, draw_scene, has_held_out_pair

SUITE_SEED = 99


@dataclass(frozen=True, slots=True)
class Case:
    """One held-out request: a complete caption of a scene, or an edit's instruction with its sources."""

    prompt: str
    target: Scene
    seed: int
    edit: Edit | None = None

    @property
    def sources(self) -> tuple[Scene, ...]:
        return self.edit.sources if self.edit else ()


@dataclass(frozen=True, slots=True)
class Score:
    """Rights among `count` verdicts."""

    name: str
    right: int
    count: int

    @property
    def part(self) -> float:
        return self.right / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """A case with its verdict, and what else was measured on its picture."""

    case: Case
    verdict: dict[str, bool]
    edge_px: tuple[float, ...]
    kept_db: float | None


def scene_cases(count: int, seed: int = SUITE_SEED) -> list[Case]:
    """Complete captions of held-out scenes."""
    rng = Random(seed)
    cases = []
    for index in range(count):
        scene = draw_scene(rng, lambda drawn: drawn.is_held_out)
        cases.append(Case(caption(scene, rng, complete=True), scene, seed + index))
    return cases


def edit_cases(count: int, seed: int = SUITE_SEED) -> list[Case]:
    """Held-out edits, the kinds by turns."""
    rng = Random(seed + 1)
    kinds = (*ONE_IMAGE, *TWO_IMAGES)
    edits = [draw_edit(rng, kinds[index % len(kinds)], lambda drawn: drawn.is_held_out) for index in range(count)]
    return [Case(edit.instruction, edit.target, seed + index, edit) for index, edit in enumerate(edits)]


def judge(case: Case, picture: np.ndarray) -> Judged:
    """Analyse one picture (height, width, 4) uint8."""
    finding = analyse(picture)
    edges = tuple(thing.edge_px for thing in finding.things)
    if case.edit is not None:
        return Judged(case, judge_edit(case.edit, picture), edges, kept_psnr_db(case.edit, picture))
    return Judged(case, judge_scene(case.target, finding), edges, None)


def scores(judged: Sequence[Judged]) -> list[Score]:
    """Accuracy by attribute, by number of things and by kind of edit."""
    found: dict[str, list[bool]] = defaultdict(list)
    for one in judged:
        for name, right in _lines(one):
            found[name].append(right)
    return [Score(name, sum(verdicts), len(verdicts)) for name, verdicts in found.items()]


def _lines(one: Judged) -> Iterable[tuple[str, bool]]:
    case, verdict = one.case, one.verdict
    if case.edit is not None:
        good = all(verdict.values())
        yield from ((f"edits: {name}", right) for name, right in verdict.items())
        yield "edits: obeyed and kept", good
        yield f"edit: {case.edit.kind}", good
        return
    yield from verdict.items()
    if case.target.background.kind == "transparent":
        yield "alpha, transparent", verdict["alpha"]
    yield f"all right, {len(case.target.things)} thing{'s' * (len(case.target.things) > 1)}", all(verdict.values())
    if has_held_out_pair(case.target.things):
        yield "colour and shape, unseen pair", verdict["colour"] and verdict["shape"]


def mean_edge_px(judged: Sequence[Judged]) -> float:
    widths = [width for one in judged for width in one.edge_px]
    return float(np.mean(widths)) if widths else float("nan")


def median_kept_db(judged: Sequence[Judged]) -> float:
    kept = [one.kept_db for one in judged if one.kept_db is not None and np.isfinite(one.kept_db)]
    return float(np.median(kept)) if kept else float("nan")


def table(judged: Sequence[Judged]) -> str:
    """The scores as text, one a line."""
    lines = [f"{score.name:<32}{100 * score.part:6.1f} %   {score.right} of {score.count}" for score in scores(judged)]
    lines.append(f"{'edge width, mean':<32}{mean_edge_px(judged):6.2f} px")
    if any(one.kept_db is not None for one in judged):
        lines.append(f"{'kept in edits, median PSNR':<32}{median_kept_db(judged):6.1f} dB")
    return "\n".join(lines)
