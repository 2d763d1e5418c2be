"""From a prompt and condition images to what the encoders read: token ids and resized pixels. Runs on the CPU.

The prompt is a raw template; `apply_chat_template` tokenizes differently from what the network was trained on. It is
encoded span by span between its special tokens, with any special token in the user's text taken as plain characters:
the result equals tokenizing the whole string, except that nobody can write a turn or an image slot into a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from models.errors import CheckpointError
from models.inputs import ConditionImage, TokenizedPrompt
from models.layout import SLOT_SIDE_TOKENS, Grid, fit_area, prefix_layout

SYSTEM_PROMPT = "Comprehend and analyze the provided prompt."
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_SLOT = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of `processor/`. Where there is none in its own format, transformers makes it of older files."""
    path = folder / "tokenizer.json"
    try:
        if path.exists():
            return Tokenizer.from_file(str(path))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # what the library raises is of no narrower type
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from None


class PromptTokenizer:
    """Tokenizes prompts with the checkpoint's tokenizer, `processor/`."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.encode_special_tokens = True  # as plain text
        self.special: dict[str, int] = {}
        for token in (TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_SLOT):
            number = self._tokenizer.token_to_id(token)
            if number is None:
                raise CheckpointError(f"{folder}: the tokenizer has no token {token}")
            self.special[token] = number
        system_message = [self.special[TURN_START], *self._plain(f"system\n{SYSTEM_PROMPT}")]
        self._system = (*system_message, self.special[TURN_END], *self._plain("\n"))

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def __call__(self, prompt: str, condition_grids: Sequence[Grid] = ()) -> TokenizedPrompt:
        """Tokenize one prompt behind a run of image slots per condition grid. An empty prompt reads as one space."""
        special, slot = self.special, self.special[IMAGE_SLOT]
        ids = [*self._system, special[TURN_START]]
        lead = "user\n"
        for index, grid in enumerate(condition_grids):
            label = f"<image{index + 1}>" if index == 0 else f" <image{index + 1}>"
            ids += [*self._plain(lead + label), special[VISION_START], *[slot] * grid.num_slots, special[VISION_END]]
            lead = ""
        ids += [*self._plain(lead + (prompt or " ")), special[TURN_END], *self._plain("\n")]
        ids += [special[TURN_START], *self._plain("assistant\n")]
        kept = ids[len(self._system) :]
        return TokenizedPrompt(
            input_ids=tuple(ids),
            num_system_tokens=len(self._system),
            layout=prefix_layout([token == slot for token in kept], condition_grids),
        )


def prepare_condition_image(image: Image.Image, area_px: int, px_per_token: int) -> ConditionImage:
    """Resize an upright RGBA picture to about `area_px` pixels at its own aspect ratio, sides multiples of one image
    slot, and make the copy over white that the vision encoder sees."""
    multiple_px = SLOT_SIDE_TOKENS * px_per_token
    size_px = fit_area(area_px, image.width / image.height, multiple_px)
    resized = image.resize(size_px, resample=Image.Resampling.LANCZOS)
    white = Image.new("RGB", size_px, (255, 255, 255))
    white.paste(resized, mask=resized.getchannel("A"))
    rgba = np.array(resized)
    digest = hashlib.sha256(repr(rgba.shape).encode() + rgba.tobytes()).digest()
    return ConditionImage(rgba, np.array(white), Grid.of_pixels(*size_px, px_per_token), digest)
