"""Prompt embeddings from transformers' Qwen3-VL: the last decoder layer's output before the final norm.

The final norm is left out of the module, so that `last_hidden_state` is what the transformer was trained on. Rotary
positions and image patches are computed here from grids that are known on the CPU, so the encoder's forward needs no
data from the device to find its shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLModel

from models.checkpoint import TensorFiles, load_weights
from models.config import read_json
from models.errors import CheckpointError
from models.inputs import ConditionImage, TokenizedPrompt
from models.layout import SLOT_SIDE_TOKENS, PrefixLayout
from models.tensor_cache import CACHE_BYTES, TensorCache

if TYPE_CHECKING:
    from models.language_model import FusedLanguageModel, VisionFeatures

BLOCKS = "model.language_model.layers"
NOT_OF_THE_NETWORK = ("architectures", "quantization_config")  # entries of its config
UNUSED_WEIGHTS = ("lm_head.weight", "model.language_model.norm.weight")


def published_names(name: str) -> tuple[str, ...]:
    """Our parameters are called as they are published."""
    return (name,)


class TextEncoder(nn.Module):
    """The vision-language encoder; `encode` serves one prompt."""

    def __init__(self, model: Qwen3VLModel, processor: Qwen2VLImageProcessorPil) -> None:
        super().__init__()
        self.model = model
        self.model.language_model.norm = nn.Identity()
        self.patch_px: int = processor.patch_size
        self.merge: int = processor.merge_size
        self.temporal_patch: int = processor.temporal_patch_size
        self.mean, self.std = processor.image_mean, processor.image_std
        self._fused: FusedLanguageModel | None = None
        self._seen = TensorCache(CACHE_BYTES)  # what the vision tower made of images, when `fuse` was called

    def fuse(self, graphs: bool) -> None:
        """Run the language model's layers by `models.language_model`, captured for short text if `graphs`."""
        from models.language_model import FusedLanguageModel

        self._fused = FusedLanguageModel(self.model.language_model, graphs)

    def clear(self) -> None:
        """Give back the memory that is kept between prompts."""
        self._seen.clear()
        if self._fused is not None:
            self._fused.clear()

    @property
    def slot_px(self) -> int:
        """Pixels along a side of one image slot."""
        return self.patch_px * self.merge

    @property
    def hidden_size(self) -> int:
        return self.model.language_model.embed_tokens.embedding_dim

    @classmethod
    def build(cls, folder: Path, processor_folder: Path) -> TextEncoder:
        """The encoder of `text_encoder/` and the image settings in `processor/`, without weights."""
        raw = read_json(folder / "config.json")
        try:
            config = Qwen3VLConfig(**{key: value for key, value in raw.items() if key not in NOT_OF_THE_NETWORK})
            processor = Qwen2VLImageProcessorPil.from_pretrained(processor_folder, local_files_only=True)
        except (OSError, TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
            raise CheckpointError(f"{folder} or {processor_folder}: {error}") from None
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            return cls(Qwen3VLModel(config), processor).eval()

    def load(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Take the weights in `text_encoder/`."""
        load_weights(
            self, TensorFiles(folder, "model"), dtype=dtype, device=device,
            published_names=published_names, unused=UNUSED_WEIGHTS,
        )  # fmt: skip
        self._rebuild_rotary(device)

    def _rebuild_rotary(self, device: torch.device) -> None:
        """Rotary frequencies are no weights: they were left on the meta device and are computed again on the CPU."""
        for owner, name in ((self.model.language_model, "rotary_emb"), (self.model.visual, "rotary_pos_emb")):
            rotary = getattr(owner, name)
            setattr(owner, name, type(rotary)(owner.config).to(device))

    @torch.inference_mode()
    def encode(self, prompt: TokenizedPrompt, images: Sequence[ConditionImage] = ()) -> Tensor:
        """Embeddings of the text tokens after the system turn, image slots left out: (text tokens, hidden size)."""
        device = self.model.device
        positions = self._positions(prompt.num_system_tokens, prompt.layout).to(device)
        of_text, of_images = (index.to(device) for index in self._indices(prompt.layout))
        input_ids = torch.tensor(prompt.input_ids, device=device)
        if self._fused is not None:
            vision = self._see(images, of_images + prompt.num_system_tokens) if images else None
            hidden = self._fused(input_ids, positions, vision)
        else:
            inputs = self._vision_inputs(images) if images else {}
            hidden = self.model(
                input_ids=input_ids[None], position_ids=positions[:, None], use_cache=False, **inputs
            ).last_hidden_state[0]
        return hidden[prompt.num_system_tokens :][of_text]

    def _see(self, images: Sequence[ConditionImage], slots: Tensor) -> VisionFeatures:
        """The vision tower alone, image by image, as transformers runs it within its own forward."""
        from models.language_model import VisionFeatures

        def see(image: ConditionImage) -> Tensor:  # (1 + deepstack layers, slots, hidden size)
            inputs = self._vision_inputs([image])
            pixels = inputs["pixel_values"].to(self.model.dtype)
            seen = self.model.visual(pixels, grid_thw=inputs["image_grid_thw"], return_dict=True)
            return torch.stack([seen.pooler_output, *seen.deepstack_features])

        embeds, *deepstack = torch.cat([self._seen.get(image.digest, partial(see, image)) for image in images], dim=1)
        return VisionFeatures(slots, embeds, deepstack)

    def _vision_inputs(self, images: Sequence[ConditionImage]) -> dict[str, Tensor]:
        pixels = [torch.from_numpy(image.rgb).to(self.model.device) for image in images]
        grids = [self._patch_grid(image) for image in pixels]
        return {
            "pixel_values": torch.cat([self._patches(image) for image in pixels]),
            "image_grid_thw": torch.tensor(grids, device=self.model.device),
        }

    def _patch_grid(self, image: Tensor) -> tuple[int, int, int]:
        return 1, image.shape[0] // self.patch_px, image.shape[1] // self.patch_px

    def _patches(self, image: Tensor) -> Tensor:
        """Normalised patches, (patches, channels × frames × patch²), in the merge-block order the encoder reads."""
        mean, std = (torch.tensor(values, device=image.device) for values in (self.mean, self.std))
        pixels = ((image.float() / 255 - mean) / std).permute(2, 0, 1)
        _, rows, columns = self._patch_grid(image)
        side = (self.merge, self.patch_px)
        blocks = pixels.unflatten(1, (rows // self.merge, *side)).unflatten(4, (columns // self.merge, *side))
        patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(*[-1] * 5, self.temporal_patch, *[-1] * 2)
        return patches.reshape(rows * columns, -1)

    def _positions(self, num_system_tokens: int, layout: PrefixLayout) -> Tensor:
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

    def _indices(self, layout: PrefixLayout) -> tuple[Tensor, Tensor]:
        """Where text and image slots are in the vision-language sequence behind the system turn."""
        is_image = [
            torch.full((segment.num_tokens if segment.grid is None else segment.grid.num_slots,), bool(segment.grid))
            for segment in layout.segments
        ]
        slots = torch.cat(is_image)
        return (~slots).nonzero().flatten(), slots.nonzero().flatten()
