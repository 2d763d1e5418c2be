"""Fresh networks with the embedded checkpoint's numbers, ready to train."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer

from models.config import TextEncoderConfig
from models.qwen3_vl import Qwen3VL
from models.text_encoder import PixelNorm, TextEncoder
from models.transformer import Transformer
from models.vae import ResidualBlock, Vae
from training.spec import TRANSFORMER, VAE, image_processor, text_encoder_config


def new_text_encoder(processor_folder: Path) -> TextEncoder:
    tokenizer = AutoTokenizer.from_pretrained(processor_folder, local_files_only=True)
    config = TextEncoderConfig.parse(text_encoder_config(tokenizer).to_dict(), Path("config.json"))
    processor = image_processor()
    pixel_norm = PixelNorm(tuple(processor.image_mean), tuple(processor.image_std))
    encoder = TextEncoder(Qwen3VL(config), pixel_norm)
    _draw_weights(encoder)
    nn.init.normal_(encoder.model.language_model.embed_tokens.weight, std=0.5)
    nn.init.normal_(encoder.model.visual.pos_embed.weight, std=0.2)
    nn.init.normal_(encoder.model.visual.patch_embed.proj.weight, std=0.02)
    return encoder


def new_transformer() -> Transformer:
    """Residual branches start small, the output and all scales at zero; gates start open, with either sign, so that
    every block learns from the first step on."""
    transformer = Transformer(TRANSFORMER)
    _draw_weights(transformer)
    for block in transformer.blocks:
        for last in (block.attn.to_out, block.mlp.down):
            last.weight.data.mul_(0.3)
    for zeroed in (transformer.proj_out, transformer.out_scale):
        nn.init.zeros_(zeroed.weight)
    dim = TRANSFORMER.inner_dim
    for scale in (0, 2):  # order: attention scale, attention gate, feed-forward scale, feed-forward gate
        transformer.modulation[1].weight.data[scale * dim : (scale + 1) * dim].zero_()
    transformer.modulation[1].weight.data.mul_(3.0)
    return transformer


def new_vae() -> Vae:
    vae = Vae(VAE)
    for block in vae.modules():
        if isinstance(block, ResidualBlock):
            block.conv2.weight.data.mul_(0.3)
    return vae


def _draw_weights(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5 * 0.7)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
