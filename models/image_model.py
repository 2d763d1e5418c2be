"""A whole checkpoint: its three networks, with the weights in, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from models import text_encoder as text_encoder_module
from models import transformer as transformer_module
from models import vae as vae_module
from models.checkpoint import Room, TensorFiles, load_weights
from models.config import CheckpointConfigs
from models.decoding import Decoder, PackedDecoder, PlainDecoder
from models.errors import CheckpointError
from models.graphs import GraphPool
from models.offload import OffloadedWeights
from models.ops import PLAIN, Ops
from models.precision import AS_STORED, Precision
from models.prefilling import CapturedPrefiller, PlainPrefiller, Prefiller
from models.prefix_kv import KV_FORMATS
from models.quantization import QuantizationPlan, multiplies_fp8
from models.text_encoder import TextEncoder
from models.transformer import Transformer
from models.vae import Vae

if TYPE_CHECKING:
    from models.fused import FusedOps


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of a checkpoint. `exact` is a transformer without FP8 for the steps that ask for it, where they do;
    else it is `transformer`."""

    text_encoder: TextEncoder
    transformer: Transformer
    exact: Transformer
    vae: Vae

    @classmethod
    def build(cls, configs: CheckpointConfigs, precision: Precision, *, scaled: bool, ops: Ops = PLAIN) -> Self:
        """Without weights. `scaled` says whether FP8 is multiplied; raises `CheckpointError` for wishes that cannot be
        met, and for parts that do not belong together."""
        folder = configs.folder
        text_encoder = TextEncoder.build(folder / "text_encoder", folder / "processor")
        if text_encoder.slot_px != configs.size_multiple_px:
            raise CheckpointError(
                f"{folder}: an image slot is {text_encoder.slot_px} px wide for the vision encoder "
                f"but {configs.size_multiple_px} px for the transformer"
            )
        if text_encoder.hidden_size != configs.transformer.context_in_dim:
            raise CheckpointError(f"{folder}: the text encoder's hidden size is not the transformer's context_in_dim")
        with torch.device("meta"):
            transformer, vae = Transformer(configs.transformer, ops), Vae(configs.vae)
            followed = quantize(folder, precision, text_encoder, transformer, scaled)
            keeps_exact = "transformer" in followed and bool(precision.first_steps or precision.last_steps)
            exact = Transformer(configs.transformer, ops) if keeps_exact else transformer
        return cls(text_encoder, transformer.eval(), exact.eval(), vae.eval())

    @property
    def transformers(self) -> tuple[Transformer, ...]:
        return (self.transformer,) if self.exact is self.transformer else (self.transformer, self.exact)

    def load(self, folder: Path, dtype: torch.dtype, device: torch.device, offloaded: OffloadedWeights | None) -> None:
        """Take the weights: to the device, or, but for the VAE's, to where `offloaded` keeps them."""

        def room(network: nn.Module, blocks: str) -> Room | None:
            return None if offloaded is None else offloaded.room(network, blocks, dtype)

        blocks = text_encoder_module.BLOCKS
        self.text_encoder.load(folder / "text_encoder", dtype, device, room(self.text_encoder, blocks))
        for transformer in self.transformers:
            load_weights(
                transformer,
                TensorFiles(folder / "transformer", "diffusion_pytorch_model"),
                dtype=dtype,
                device=device,
                published_names=transformer_module.published_names,
                room=room(transformer, transformer_module.BLOCKS),
            )
        load_weights(
            self.vae,
            TensorFiles(folder / "vae", "diffusion_pytorch_model"),
            dtype=dtype,
            device=device,
            unused=vae_module.UNUSED_WEIGHTS,
        )

    def with_blocks(self) -> list[tuple[nn.Module, str | None]]:
        """Every network, and what its sequence of blocks is called, if it has one to speak of."""
        transformers = [(transformer, transformer_module.BLOCKS) for transformer in self.transformers]
        return [(self.text_encoder, text_encoder_module.BLOCKS), *transformers, (self.vae, None)]


@dataclass(frozen=True, slots=True)
class ImageModel:
    """The networks of a checkpoint, on one device, working in one dtype; see `Networks`. With `offloaded` weights a
    network has to be brought before each use."""

    configs: CheckpointConfigs
    text_encoder: TextEncoder
    transformer: Transformer
    exact: Transformer
    vae: Vae
    device: torch.device
    dtype: torch.dtype
    precision: Precision = AS_STORED
    fused: FusedOps | None = None
    offloaded: OffloadedWeights | None = None

    @classmethod
    def load(
        cls,
        configs: CheckpointConfigs,
        device: torch.device,
        dtype: torch.dtype,
        fused: bool = False,
        precision: Precision = AS_STORED,
        offload: str = "none",
    ) -> Self:
        """Load all weights; `CheckpointError` names the file and tensor at fault. `fused` makes the networks use the
        fused kernels, where the device has them (see `has_kernels`). `offload` is "none", "component" or "block" (see
        `models.offload`)."""
        fused_ops: FusedOps | None = None
        if fused:
            from models.fused import FusedOps

            fused_ops = FusedOps.of(device, configs.transformer.attention_head_dim)
        scaled = multiplies_fp8(device, dtype)
        networks = Networks.build(configs, precision, scaled=scaled, ops=fused_ops or PLAIN)
        offloaded = None if offload == "none" else OffloadedWeights(device, by_block=offload == "block")
        networks.load(configs.folder, dtype, device, offloaded)
        if fused:
            networks.vae.fuse()
            networks.text_encoder.fuse(graphs=True)
        elif device.type == "cpu":
            networks.vae.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # twice as fast there
        if offloaded is not None:
            offloaded.adopt(networks.vae)  # now that it has the form in which it works
            offloaded.settle()
        return cls(
            configs,
            networks.text_encoder,
            networks.transformer,
            networks.exact,
            networks.vae,
            device,
            dtype,
            precision,
            fused_ops,
            offloaded,
        )

    def bring(self, network: nn.Module) -> None:
        """Have the weights of one of the networks on the device."""
        if self.offloaded is not None:
            self.offloaded.bring(network)

    def decoders(self, pool: GraphPool | None) -> tuple[Decoder, Decoder]:
        """What runs this model's denoise steps, and those that want no FP8; one object where there is no difference.
        Steps are captured where there is a `pool` and the kernels serve the device."""
        usual = self.decoder_of(self.transformer, pool)
        return usual, usual if self.exact is self.transformer else self.decoder_of(self.exact, pool)

    def decoder_of(self, transformer: Transformer, pool: GraphPool | None) -> Decoder:
        """What runs the denoise steps of a transformer with this model's config."""
        if self.fused is not None and self.configs.transformer.causal_condition:
            return PackedDecoder(transformer, self.fused.decode_attention, pool)
        return PlainDecoder(transformer)

    def prefiller(self, pool: GraphPool | None) -> Prefiller:
        """What fills this model's prefixes: without FP8 where that can be, since it is done once a request. Streamed
        weights take longer than all launches: with them nothing is captured."""
        is_streamed = self.offloaded is not None and self.offloaded.by_block
        if (
            pool is not None
            and self.fused is not None
            and self.configs.transformer.causal_condition
            and not is_streamed
        ):
            return CapturedPrefiller(self.exact, self.kv_fp8, pool)
        return PlainPrefiller(self.exact, self.kv_fp8)

    @property
    def kv_fp8(self) -> tuple[bool, bool]:
        """How prefix KV is kept: one of `KV_FORMATS`."""
        return KV_FORMATS[self.precision.prefix_kv]


def plans(folder: Path, precision: Precision) -> dict[str, QuantizationPlan]:
    """By component, how those that are to be FP8 become it: as asked, or as the checkpoint has them."""
    blocks = {"first_blocks": precision.first_blocks, "last_blocks": precision.last_blocks}
    asked = {
        "text_encoder": (precision.text_encoder, QuantizationPlan(precision.ignored_layers)),
        "transformer": (precision.transformer, QuantizationPlan(precision.ignored_layers, **blocks)),
    }
    chosen = {}
    for name, (dtype, wish) in asked.items():
        stored = QuantizationPlan.read(folder / name / "config.json")
        if stored is not None and wish not in (stored, QuantizationPlan()):
            raise CheckpointError(f"{folder / name} is FP8 already: its layers cannot be chosen any more")
        if stored is not None or dtype == "fp8":
            chosen[name] = stored or wish
    return chosen


def quantize(
    folder: Path, precision: Precision, text_encoder: TextEncoder, transformer: Transformer, scaled: bool
) -> dict[str, QuantizationPlan]:
    """Make room for FP8 weights in both networks, which are not loaded yet. Returns the plans that were followed.
    Raises `CheckpointError` for wishes that cannot be met."""
    modules = {"text_encoder": (text_encoder, text_encoder_module), "transformer": (transformer, transformer_module)}
    chosen, matched = plans(folder, precision), set[str]()
    for name, plan in chosen.items():
        network, module = modules[name]
        matched |= plan.quantize(network, module.BLOCKS, module.published_names, scaled)
    if unmatched := sorted(set(precision.ignored_layers) - matched):
        raise CheckpointError(f"fp8_ignored_layers: no layer that would be FP8 is called {', '.join(unmatched)}")
    if (precision.first_steps or precision.last_steps) and QuantizationPlan.read(folder / "transformer/config.json"):
        raise CheckpointError(f"{folder} holds FP8 only: fp8_first_steps and fp8_last_steps have nothing to run with")
    return chosen


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
