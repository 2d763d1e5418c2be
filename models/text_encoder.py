"""Prompt embeddings from a Qwen3-VL: the last decoder layer's output before the final norm.

Rotary positions and image patches are computed here from grids that are known on the CPU, so the encoder's forward
needs no data from the device to find its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from models.checkpoint import Room, TensorFiles, as_published, load_weights
from models.config import TextEncoderConfig, read_json
from models.errors import CheckpointError
from models.inputs import ConditionImage, TokenizedPrompt
from models.layout import SLOT_SIDE_TOKENS, PrefixLayout
from models.qwen3_vl import Qwen3VL, VisionFeatures
from models.tensor_cache import CACHE_BYTES, TensorCache

BLOCKS = "model.language_model.layers"
UNUSED_WEIGHTS = ("lm_head.weight", "model.language_model.norm.weight")
Layers = Callable[[Tensor, Tensor, VisionFeatures | None], Tensor]  # as `models.qwen3_vl.LanguageModel`


published_names = as_published


@dataclass(frozen=True, slots=True)
class PixelNorm:
    """How pixels in [0, 1] become what the vision tower sees, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From `processor/`."""
        path = folder / "preprocessor_config.json"
        config: dict[str, Any] = read_json(path)
        values = [config.get(name) for name in ("image_mean", "image_std")]
        if not all(isinstance(value, list) and len(value) == 3 for value in values):
            raise CheckpointError(f"{path}: image_mean and image_std are not three numbers each")
        return cls(*(tuple(float(number) for number in value) for value in values if value is not None))


class TextEncoder(nn.Module):
    """The vision-language encoder; `encode` serves one prompt."""

    def __init__(self, model: Qwen3VL, pixel_norm: PixelNorm) -> None:
        super().__init__()
        self.model = model
        config = model.visual.config
        self.patch_px, self.merge = config.patch_size, config.spatial_merge_size
        self.temporal_patch = config.temporal_patch_size
        self.pixel_norm = pixel_norm
        self._run: Layers = model.language_model.forward
        self._clear_run: Callable[[], None] | None = None
        self._seen = TensorCache(CACHE_BYTES)  # what the vision tower made of images

    def fuse(self, graphs: bool) -> None:
        """Run the language model's layers by `models.language_model`, captured for short text if `graphs`."""
        from models.language_model import FusedLanguageModel

        fused = FusedLanguageModel(self.model.language_model, graphs)
        self._run, self._clear_run = fused, fused.clear

    def clear(self) -> None:
        """Give back the memory that is kept between prompts."""
        self._seen.clear()
        if self._clear_run is not None:
            self._clear_run()

    @property
    def slot_px(self) -> int:
        """Pixels along a side of one image slot."""
        return self.patch_px * self.merge

    @property
    def hidden_size(self) -> int:
        return self.model.language_model.embed_tokens.embedding_dim

    @classmethod
    def build(cls, folder: Path, processor_folder: Path) -> Self:
        """The encoder of `text_encoder/` and the image settings in `processor/`, without weights."""
        config, pixel_norm = TextEncoderConfig.read(folder), PixelNorm.read(processor_folder)
        with torch.device("meta"):
            return cls(Qwen3VL(config), pixel_norm).eval()

    def load(self, folder: Path, dtype: torch.dtype, device: torch.device, room: Room | None = None) -> None:
        """Take the weights in `text_encoder/`."""
        files = TensorFiles(folder, "model")
        load_weights(self, files, dtype=dtype, device=device, unused=UNUSED_WEIGHTS, room=room)

    @torch.inference_mode()
    def encode(self, prompt: TokenizedPrompt, images: Sequence[ConditionImage] = ()) -> Tensor:
        """Embeddings of the text tokens after the system turn, image slots left out: (text tokens, hidden size)."""
        device = self.model.language_model.embed_tokens.weight.device
        positions = self.positions(prompt.num_system_tokens, prompt.layout).to(device)
        of_text, of_images = (index.to(device) for index in self.indices(prompt.layout))
        input_ids = torch.tensor(prompt.input_ids, device=device)
        vision = self._see(images, of_images + prompt.num_system_tokens) if images else None
        return self._run(input_ids, positions, vision)[prompt.num_system_tokens :][of_text]

    def _see(self, images: Sequence[ConditionImage], slots: Tensor) -> VisionFeatures:
        """The vision tower, image by image."""
        embeds, *deepstack = torch.cat(
            [self._seen.get(image.digest, partial(self._look, image)) for image in images], 1
        )
        return VisionFeatures(slots, embeds, deepstack)

    def _look(self, image: ConditionImage) -> Tensor:
        weight = self.model.visual.patch_embed.proj.weight
        pixels = torch.from_numpy(image.rgb).to(weight.device)
        grid = self._patch_grid(pixels)
        features: Tensor = self.model.visual(self._patches(pixels, grid).to(weight.dtype), grid)
        return features

    def _patch_grid(self, image: Tensor) -> tuple[int, int]:
        return image.shape[0] // self.patch_px, image.shape[1] // self.patch_px

    def _patches(self, image: Tensor, grid: tuple[int, int]) -> Tensor:
        """Normalised patches, (patches, channels × frames × patch²), in the merge-block order the encoder reads."""
        mean, std = (
            torch.tensor(values, device=image.device) for values in (self.pixel_norm.mean, self.pixel_norm.std)
        )
        pixels = ((image.float() / 255 - mean) / std).permute(2, 0, 1)
        rows, columns = grid
        side = (self.merge, self.patch_px)
        blocks = pixels.unflatten(1, (rows // self.merge, *side)).unflatten(4, (columns // self.merge, *side))
        patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(*[-1] * 5, self.temporal_patch, *[-1] * 2)
        return patches.reshape(rows * columns, -1)

    def positions(self, num_system_tokens: int, layout: PrefixLayout) -> Tensor:
        """Rotary positions (3, tokens) of the vision-language sequence: temporal, height, width. They follow the same
        rule as the transformer's, on slots: text advances one, an image by its longer side."""
        spans = [torch.arange(num_system_tokens).expand(3, -1)]
        position = num_system_tokens
        for segment in layout.segments:
            if segment.grid is None:
                spans.append(torch.arange(position, position + segment.num_tokens).expand(3, -1))
                position += segment.num_tokens
                continue
            height, width = segment.grid.height // SLOT_SIDE_TOKENS, segment.grid.width // SLOT_SIDE_TOKENS
            rows = torch.arange(height).repeat_interleave(width)
            columns = torch.arange(width).repeat(height)
            spans.append(position + torch.stack([torch.zeros_like(rows), rows, columns]))
            position += max(height, width)
        return torch.cat(spans, dim=1)

    def indices(self, layout: PrefixLayout) -> tuple[Tensor, Tensor]:
        """Where text and image slots are in the vision-language sequence behind the system turn."""
        is_image = [
            torch.full((segment.num_tokens if segment.grid is None else segment.grid.num_slots,), bool(segment.grid))
            for segment in layout.segments
        ]
        slots = torch.cat(is_image)
        return (~slots).nonzero().flatten(), slots.nonzero().flatten()
