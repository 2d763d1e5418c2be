"""A whole checkpoint: its three networks, with the weights in, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

import torch

from models import transformer as transformer_module
from models import vae as vae_module
from models.checkpoint import TensorFiles, load_weights
from models.config import CheckpointConfigs
from models.decoding import Decoder, PackedDecoder, PlainDecoder
from models.errors import CheckpointError
from models.ops import PLAIN
from models.text_encoder import TextEncoder
from models.transformer import Transformer
from models.vae import Vae

if TYPE_CHECKING:
    from models.fused import FusedOps


@dataclass(frozen=True, slots=True)
class ImageModel:
    """The networks of a checkpoint, on one device and in one dtype."""

    configs: CheckpointConfigs
    text_encoder: TextEncoder
    transformer: Transformer
    vae: Vae
    device: torch.device
    dtype: torch.dtype
    fused: FusedOps | None = None

    @classmethod
    def load(cls, configs: CheckpointConfigs, device: torch.device, dtype: torch.dtype, fused: bool = False) -> Self:
        """Load all weights; `CheckpointError` names the file and tensor at fault. `fused` makes the networks use the
        fused kernels, where the device has them (see `has_kernels`)."""
        folder = configs.folder
        text_encoder = TextEncoder.load(folder / "text_encoder", folder / "processor", dtype, device)
        if text_encoder.slot_px != configs.size_multiple_px:
            raise CheckpointError(
                f"{folder}: an image slot is {text_encoder.slot_px} px wide for the vision encoder "
                f"but {configs.size_multiple_px} px for the transformer"
            )
        if text_encoder.hidden_size != configs.transformer.context_in_dim:
            raise CheckpointError(f"{folder}: the text encoder's hidden size is not the transformer's context_in_dim")
        fused_ops: FusedOps | None = None
        if fused:
            from models.fused import FusedOps

            fused_ops = FusedOps.of(device, configs.transformer.attention_head_dim)
        with torch.device("meta"):
            transformer, vae = Transformer(configs.transformer, fused_ops or PLAIN), Vae(configs.vae)
        load_weights(
            transformer,
            TensorFiles(folder / "transformer", "diffusion_pytorch_model"),
            dtype=dtype,
            device=device,
            published_names=transformer_module.published_names,
        )
        load_weights(
            vae,
            TensorFiles(folder / "vae", "diffusion_pytorch_model"),
            dtype=dtype,
            device=device,
            published_names=lambda name: (name,),
            unused=vae_module.UNUSED_WEIGHTS,
        )
        if fused:
            vae.fuse()
            text_encoder.fuse(graphs=True)
        return cls(configs, text_encoder, transformer.eval(), vae.eval(), device, dtype, fused_ops)

    def decoder(self, graphs: bool) -> Decoder:
        """What runs this model's denoise steps."""
        if self.fused is not None and self.configs.transformer.causal_condition:
            return PackedDecoder(self.transformer, self.fused.decode_attention, graphs=graphs)
        return PlainDecoder(self.transformer)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels serve a device: CUDA of compute capability 8.0 or more, bfloat16, with Triton."""
    if device.type != "cuda" or dtype != torch.bfloat16 or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
