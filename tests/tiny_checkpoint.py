"""Builds small random checkpoints in the published folder format, the same every time.

`python -m tests.tiny_checkpoint FOLDER` writes one; tests build others with other sizes, so that nothing in the
project depends on one set of numbers. The networks are instantiated and saved by diffusers and transformers
themselves, which makes them an independent check of the loader. Their pictures are noise.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImage21Transformer2DModel
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from training.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, WORD_PATTERN

# Words the byte-pair merges are learnt from; enough for merges to cross the template's seams.
CORPUS = (
    "Comprehend and analyze the provided prompt.",
    "system\nuser\nassistant\n<image1> <image2> <image3> <image4>",
    "a red circle, a blue square and a green star on a plain white background",
    "replace the circle with a star; make it blue; move it to the left; remove the background",
    "one two three large small objects in the top left and bottom right corner\n\n\n  ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySpec:
    """The numbers of a tiny checkpoint. An image slot is always 32 pixels."""

    seed: int = 0
    heads: int = 4
    head_dim: int = 32
    axes_dims: tuple[int, int, int] = (8, 12, 12)
    layers: int = 3
    mlp_ratio: int = 3
    causal_condition: bool = True
    text_hidden: int = 64
    text_layers: int = 3
    text_heads: int = 4
    vision_hidden: int = 32
    vision_depth: int = 2
    deepstack: tuple[int, ...] = (0,)
    z_dim: int = 16
    vae_base: int = 8
    vae_decoder_base: int | None = 12
    dim_mult: tuple[int, ...] = (1, 2, 2, 4, 4)
    res_blocks: int = 1
    temporal: tuple[bool, ...] = (False, True, True, True)
    shift_terminal: float | None = 0.02
    sample_sigmas: tuple[float, ...] | None = None
    resolution: int = 256
    num_steps: int = 8
    vocab_size: int = 420


def build_checkpoint(folder: Path, spec: TinySpec | None = None) -> Path:
    """Write a whole checkpoint into `folder` and return it."""
    spec = spec or TinySpec()
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        tokenizer = _tokenizer(spec)
        tokenizer.save_pretrained(folder / "processor")
        image_processor = Qwen2VLImageProcessorPil(
            patch_size=16,
            merge_size=2,
            temporal_patch_size=2,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            size={"shortest_edge": 32 * 32, "longest_edge": 4096 * 4096},
        )
        image_processor.save_pretrained(folder / "processor")
        _enliven(_text_encoder(spec, tokenizer)).save_pretrained(folder / "text_encoder")
        _enliven(_transformer(spec)).save_pretrained(folder / "transformer")
        _enliven(_vae(spec)).save_pretrained(folder / "vae")
    _scheduler(spec).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "QwenImage21Pipeline",
        "_diffusers_version": "0.42.1",
        "processor": ["transformers", "Qwen3VLProcessor"],
        "sample_sigmas": spec.sample_sigmas,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"],
        "num_inference_steps": spec.num_steps,
        "output_resolution": spec.resolution,
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def _enliven(network: Any) -> Any:
    """Draw every weight so that each layer matters: matrices and kernels keep their input's variance, norm weights
    and biases leave the ones and zeros they start from. With the default initialisation most layers add next to
    nothing, and a mistake in them would pass for rounding."""
    for parameter in network.parameters():
        fan_in = parameter.numel() // parameter.shape[0]
        if fan_in > 1:
            parameter.data = torch.randn_like(parameter) * fan_in**-0.5
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return network.eval()


def _tokenizer(spec: TinySpec) -> Qwen2Tokenizer:
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
        vocab_size=spec.vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def _text_encoder(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    head_dim = spec.text_hidden // spec.text_heads
    sixth = head_dim // 6
    ids = tokenizer.get_vocab()
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": spec.text_hidden,
            "intermediate_size": 2 * spec.text_hidden,
            "num_hidden_layers": spec.text_layers,
            "num_attention_heads": spec.text_heads,
            "num_key_value_heads": spec.text_heads // 2,
            "head_dim": head_dim,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [head_dim // 2 - 2 * sixth, sixth, sixth],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": spec.vision_depth,
            "hidden_size": spec.vision_hidden,
            "intermediate_size": 2 * spec.vision_hidden,
            "num_heads": 2,
            "out_hidden_size": spec.text_hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(spec.deepstack),
            "patch_size": 16,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen3VLForConditionalGeneration(config)


def _transformer(spec: TinySpec) -> QwenImage21Transformer2DModel:
    return QwenImage21Transformer2DModel(
        in_channels=spec.z_dim,
        out_channels=spec.z_dim,
        num_layers=spec.layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.heads,
        context_in_dim=spec.text_hidden,
        mlp_ratio=spec.mlp_ratio,
        axes_dims_rope=spec.axes_dims,
        causal_condition=spec.causal_condition,
    )


def _vae(spec: TinySpec) -> AutoencoderKLQwenImage21:
    return AutoencoderKLQwenImage21(
        base_dim=spec.vae_base,
        decoder_base_dim=spec.vae_decoder_base,
        z_dim=spec.z_dim,
        dim_mult=list(spec.dim_mult),
        num_res_blocks=spec.res_blocks,
        temperal_downsample=list(spec.temporal),
        latents_mean=torch.randn(spec.z_dim).tolist(),
        latents_std=torch.rand(spec.z_dim).add(0.5).tolist(),
        scale_factor_spatial=8,
    )


def _scheduler(spec: TinySpec) -> Any:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=spec.shift_terminal,
    )


if __name__ == "__main__":
    build_checkpoint(Path(sys.argv[1]))
