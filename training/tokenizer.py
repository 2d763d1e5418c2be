"""The checkpoint's tokenizer: byte-level byte pairs learnt from captions, so that most words of the world are one token
and any other text still has one. `python -m training.tokenizer FOLDER` writes the processor folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from app.evaluation.captions import caption
from app.evaluation.edits import ONE_IMAGE, TWO_IMAGES, draw_edit
from app.evaluation.scenes import draw_scene
from models.preprocess import SYSTEM_PROMPT
from training.spec import SEED, VOCABULARY, image_processor

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(num_captions: int) -> Iterator[str]:
    rng = Random(SEED)
    for _ in range(num_captions):
        yield f"user\n{caption(draw_scene(rng, lambda scene: not scene.is_held_out), rng)}"
    for kind in (*ONE_IMAGE, *TWO_IMAGES):
        for _ in range(num_captions // 12):
            yield draw_edit(rng, kind, lambda edit: not edit.is_held_out).instruction
    for _ in range(num_captions):
        yield f"system\n{SYSTEM_PROMPT}\nuser\nassistant\n"
    for _ in range(num_captions // 10):
        yield "user\n<image1> <image2> <image3> <image4>"


def build_tokenizer(num_captions: int = 6000) -> Qwen2Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_captions), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def write_processor(folder: Path) -> None:
    """Tokenizer and image settings, as a checkpoint's `processor/`."""
    build_tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)


if __name__ == "__main__":
    write_processor(Path(sys.argv[1]))
