"""Training examples by the hundred thousand: scenes as tensors, their captions as token ids. Made by many processes.

Every example has as many captions as asked for; training draws one each time. An example with condition images (an
edit) keeps its sources and its target. Nothing held out is ever made here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.evaluation.captions import caption
from app.evaluation.edits import ONE_IMAGE, TWO_IMAGES, Edit, draw_edit
from app.evaluation.render import SceneBatch
from app.evaluation.scenes import BACKGROUNDS, COLOURS, MAX_THINGS, SHAPES, Scene, draw_scene
from models.inputs import TokenizedPrompt
from models.layout import Grid
from models.preprocess import PromptTokenizer
from training.rows import PAD_TAILS, pad_rows
from training.spec import GRID_SIDE, SEED

CHUNK = 1000
GRID = Grid(GRID_SIDE, GRID_SIDE)
# Drawn more often than by turns: those that are hard to learn.
EDIT_KINDS = {0: (), 1: (*ONE_IMAGE, "recolour", "replace", "move", "remove", "remove", "remove"), 2: TWO_IMAGES}


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows of one kind. `scenes` holds the sources of every row, then its target: (rows × (images + 1)) in order."""

    input_ids: Tensor  # (rows, captions, padded length) int16
    lengths: Tensor  # (rows, captions) int16
    scenes: SceneBatch
    labels: Tensor  # (rows, label) int16: what the first target's things and background are
    base: Tensor  # (rows,) int64: the source whose rest is kept

    def __len__(self) -> int:
        return len(self.input_ids)


def labels_of(scene: Scene) -> list[int]:
    """Shape and colour of every thing (0 where there is none), kind and colours of the background."""
    labels = []
    for index in range(MAX_THINGS):
        thing = scene.things[index] if index < len(scene.things) else None
        labels += [SHAPES.index(thing.shape) + 1, list(COLOURS).index(thing.colour) + 1] if thing else [0, 0]
    colours = [list(COLOURS).index(name) + 1 for name in scene.background.colours]
    return [*labels, BACKGROUNDS.index(scene.background.kind), *colours, *[0] * (2 - len(colours))]


LABEL_SIZES = (*[len(SHAPES) + 1, len(COLOURS) + 1] * MAX_THINGS, len(BACKGROUNDS), len(COLOURS) + 1, len(COLOURS) + 1)


def _draw(num_images: int, rng: Random) -> Scene | Edit:
    if num_images == 0:
        return draw_scene(rng, lambda scene: not scene.is_held_out)
    return draw_edit(rng, rng.choice(EDIT_KINDS[num_images]), lambda edit: not edit.is_held_out)


def _chunk(processor: Path, num_images: int, captions: int, seed: int) -> list[np.ndarray]:
    """CHUNK rows as plain arrays."""
    torch.set_num_threads(1)
    rng, tokenizer = Random(seed), PromptTokenizer(processor)
    pad, grids = PAD_TAILS[num_images], [GRID] * num_images
    prompts: list[TokenizedPrompt] = []
    scenes: list[Scene] = []
    labels, bases = [], []
    while len(labels) < CHUNK:
        drawn = _draw(num_images, rng)
        if isinstance(drawn, Edit):
            texts, target, sources = [drawn.instruction] * captions, drawn.target, drawn.sources
        else:
            texts, target, sources = [caption(drawn, rng) for _ in range(captions)], drawn, ()
        tokenized = [tokenizer(text, grids) for text in texts]
        if max(prompt.layout.segments[-1].num_tokens for prompt in tokenized) > pad:
            continue
        prompts += tokenized
        scenes += [*sources, target]
        labels.append(labels_of(target))
        bases.append(drawn.base if isinstance(drawn, Edit) else 0)
    input_ids, lengths = pad_rows(prompts, pad)
    batch = SceneBatch.of([*scenes, _three()])[slice(0, len(scenes))]
    arrays = [input_ids.unflatten(0, (CHUNK, captions)).short(), lengths.unflatten(0, (CHUNK, captions)).short()]
    arrays += [getattr(batch, name) for name in SceneBatch.__slots__]
    return [tensor.numpy() for tensor in arrays] + [np.array(labels, np.int16), np.array(bases, np.int64)]


def _three() -> Scene:
    """Makes every chunk's scenes equally wide."""
    rng = Random(0)
    return draw_scene(rng, lambda scene: len(scene.things) == MAX_THINGS)


def make_examples(processor: Path, num_images: int, rows: int, captions: int, processes: int) -> Examples:
    """Rows by seeds, so that they do not depend on the number of processes."""
    seeds = [SEED + 10_000_000 * (num_images + 1) + index for index in range(-(-rows // CHUNK))]
    work = partial(_chunk, processor, num_images, captions)
    if processes > 1:
        with ProcessPoolExecutor(processes) as pool:
            chunks: Sequence[list[np.ndarray]] = list(pool.map(work, seeds))
    else:
        chunks = [work(seed) for seed in seeds]
    arrays = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*chunks, strict=True)]
    return Examples(arrays[0], arrays[1], SceneBatch(*arrays[2:-2]), arrays[-2], arrays[-1])


def save_examples(examples: Examples, path: Path) -> None:
    tensors = {name: getattr(examples, name) for name in ("input_ids", "lengths", "labels", "base")}
    save_file(tensors | {f"scenes.{name}": getattr(examples.scenes, name) for name in SceneBatch.__slots__}, path)


def load_examples(path: Path) -> Examples:
    tensors = load_file(path)
    scenes = SceneBatch(*(tensors[f"scenes.{name}"] for name in SceneBatch.__slots__))
    return Examples(tensors["input_ids"], tensors["lengths"], scenes, tensors["labels"], tensors["base"])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--processor", type=Path, required=True)
    options.add_argument("--output", type=Path, required=True, help="folder for one file a number of images")
    options.add_argument("--rows", type=int, nargs=3, default=(200_000, 60_000, 24_000))
    options.add_argument("--captions", type=int, default=3)
    options.add_argument("--processes", type=int, default=14)
    arguments = options.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for images, count in enumerate(arguments.rows):
        made = make_examples(
            arguments.processor, images, count, arguments.captions if images == 0 else 1, arguments.processes
        )
        save_examples(made, arguments.output / f"examples-{images}.safetensors")
        print(f"{len(made)} examples with {images} condition images", flush=True)
