"""How much of a picture a checkpoint's autoencoder gives back: held-out scenes, and photographs that it never saw.

python -m training.reconstruction [--model FOLDER] [--scenes 96] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.config import CheckpointConfigs
from models.folder import embedded_checkpoint
from models.image_model import ImageModel
from models.vae import Vae
from training.pictures import HELD_OUT_PHOTOS, held_out_photos
from training.schedule import held_out_scenes
from training.spec import RESOLUTION_PX
from training.train_vae import psnr_db


@torch.inference_mode()
def reconstruction_db(vae: Vae, pictures: Tensor) -> list[float]:
    """PSNR over all four channels of each of (pictures, 4, side, side) in [0, 1], rounded to bytes as a file is."""
    found = []
    for picture in pictures:
        given = picture[None] * 2 - 1
        returned = ((vae.decode(vae.encode(given)) * 0.5 + 0.5) * 255).round() / 255
        found.append(psnr_db(returned * 2 - 1, given))
    return found


@dataclass(frozen=True, slots=True)
class Figures:
    """PSNR of scenes, on average and the worst, and of each photograph."""

    num_scenes: int
    scenes_mean_db: float
    scenes_worst_db: float
    photos_db: dict[str, float]


def measure(folder: Path, num_scenes: int) -> Figures:
    vae = ImageModel.load(CheckpointConfigs.read(folder), torch.device("cpu"), torch.float32).vae
    scenes_db = reconstruction_db(vae, held_out_scenes(num_scenes, RESOLUTION_PX))
    photos_db = reconstruction_db(vae, held_out_photos())
    return Figures(
        num_scenes=num_scenes,
        scenes_mean_db=round(statistics.mean(scenes_db), 1),
        scenes_worst_db=round(min(scenes_db), 1),
        photos_db={name: round(db, 1) for name, db in zip(HELD_OUT_PHOTOS, photos_db, strict=True)},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="PSNR of pictures that went through the autoencoder and back.")
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--scenes", type=int, default=96)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    text = json.dumps(asdict(measure(options.model, options.scenes)), indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
