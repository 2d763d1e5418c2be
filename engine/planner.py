"""What fits on a device: a model's memory under every choice that changes it, predicted before anything is loaded.

Weights are counted exactly, on networks without data. What works beside them is an estimate from measured peaks; while
the service runs, the device's own count decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

import torch

from engine.config import EngineConfig
from models.config import CheckpointConfigs
from models.errors import CheckpointError
from models.image_model import Networks, has_kernels, resolve_device, resolve_dtype
from models.offload import RING, WeightLayout
from models.precision import Precision
from models.prefilling import room_bytes
from models.prefix_kv import KV_FORMATS
from models.quantization import multiplies_fp8
from models.tiling import TILE_PX, free_bytes, workspace_bytes_per_px

log = logging.getLogger(__name__)

OFFLOADS = ("none", "component", "block")
STEP_MAPS = 17  # of the transformer's width, alive at once in a step: 0.50 GiB were measured at 1024²
SMALL_BYTES = 2**30  # of files, below which a start needs no prediction
OTHER_BYTES = 704 * 2**20  # graphs of the text encoder, one prompt's prefix, caches that fill, the allocator's rest


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that would be used, and what is free on it and on the host."""

    device: torch.device
    dtype: torch.dtype
    fused: bool
    multiplies_fp8: bool
    free_bytes: int
    host_free_bytes: int

    @classmethod
    def look(cls, config: EngineConfig) -> Self:
        """Raises `CheckpointError` for a GPU that is not there."""
        device = resolve_device(config.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise CheckpointError(f"device {config.device}: PyTorch {torch.__version__} sees no such GPU")
        dtype = resolve_dtype(config.dtype, device)
        host = _host_free_bytes()
        free = free_bytes(device) if device.type == "cuda" else host
        fused = not config.eager and has_kernels(device, dtype)
        return cls(device, dtype, fused, multiplies_fp8(device, dtype), free, host)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one picture at a time under a choice: the weights' and all that are on the device, and those of the
    host's memory that offloaded weights wait in."""

    precision: Precision
    offload: str
    weights_bytes: int
    device_bytes: int
    host_bytes: int

    @property
    def flags(self) -> str:
        """How to ask `easel serve` for it."""
        dtypes = {
            "--transformer-dtype": self.precision.transformer,
            "--text-encoder-dtype": self.precision.text_encoder,
        }
        flags = [f"{flag} fp8" for flag, dtype in dtypes.items() if dtype == "fp8"]
        return " ".join(flags + [f"--offload {self.offload}"] * (self.offload != "none"))

    def fits(self, machine: Machine) -> bool:
        on_device = self.device_bytes
        if machine.device.type == "cpu":  # where both are the same memory
            return on_device + self.host_bytes <= machine.host_free_bytes
        return on_device <= machine.free_bytes and self.host_bytes <= machine.host_free_bytes


@dataclass(frozen=True, slots=True)
class Planner:
    """Predicts the memory of a model's pictures of up to `config.max_output_pixels`."""

    config: EngineConfig
    configs: CheckpointConfigs
    machine: Machine

    def asked(self) -> Footprint:
        """What the config asks for."""
        return self._footprint(self.config.precision, self.config.offload)

    def choices(self) -> Iterator[Footprint]:
        """As the config asks otherwise, every precision and offload: those first that cost least speed and quality."""
        asked = replace(self.config.precision, transformer="auto", text_encoder="auto")
        fp8 = replace(asked, transformer="fp8", text_encoder="fp8")
        for offload, precision in product(OFFLOADS, (asked, fp8)):
            yield self._footprint(precision, offload)

    def recommended(self) -> Footprint | None:
        """The first choice that fits."""
        return next((choice for choice in self.choices() if choice.fits(self.machine)), None)

    def check(self) -> None:
        """Log what is to be expected of a model of some size. Raises `CheckpointError` when not even the weights have
        room."""
        if sum(file.stat().st_size for file in self.configs.folder.rglob("*.safetensors")) < SMALL_BYTES:
            return
        asked, free = self.asked(), self.machine.free_bytes
        need = f"this needs about {gib(asked.device_bytes)} of memory for its largest pictures; {gib(free)} are free"
        if asked.fits(self.machine):
            log.info("%s", need)
            return
        better = self.recommended()
        advice = f"try {better.flags or 'the default flags'}" if better else "nothing that can be chosen makes it fit"
        if asked.weights_bytes > free or asked.host_bytes > self.machine.host_free_bytes:
            raise CheckpointError(f"{self.configs.folder} does not fit: {need}; {advice}")
        log.warning("%s; %s, or a smaller --max-output-pixels", need, advice)

    def _footprint(self, precision: Precision, offload: str) -> Footprint:
        dtype = self.machine.dtype
        networks = Networks.build(self.configs, precision, scaled=self.machine.multiplies_fp8)
        layouts = [WeightLayout.of_unloaded(network, blocks, dtype) for network, blocks in networks.with_blocks()]
        weights = sum(layout.num_bytes for layout in layouts)
        outside, block = (
            max(sizes) for sizes in zip(*((x.outside_bytes, x.block_bytes) for x in layouts), strict=True)
        )
        on_device = {
            "none": weights,
            "component": max(layout.num_bytes for layout in layouts),
            "block": outside + RING * block,
        }[offload]
        workspace = self._step_bytes() + self._decode_bytes() + self._prefill_bytes(precision, offload) + OTHER_BYTES
        return Footprint(precision, offload, on_device, on_device + workspace, weights if offload != "none" else 0)

    def _step_bytes(self) -> int:
        tokens = self.config.max_output_pixels // self.configs.px_per_token**2
        return STEP_MAPS * tokens * self.configs.transformer.inner_dim * self.machine.dtype.itemsize

    def _prefill_bytes(self, precision: Precision, offload: str) -> int:
        """The room of captured prefills, where there are any (see `ImageModel.prefiller`)."""
        config, captures = self.configs.transformer, self.machine.fused and self.config.decode_graphs
        if not captures or not config.causal_condition or offload == "block":
            return 0
        return room_bytes(config, self.machine.dtype, KV_FORMATS[precision.prefix_kv])

    def _decode_bytes(self) -> int:
        pixels = self.config.max_output_pixels
        if self.config.vae_tiling != "off":
            pixels = min(pixels, TILE_PX**2)
        return pixels * workspace_bytes_per_px(self.configs.vae, self.machine.fused, self.machine.dtype)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _host_free_bytes() -> int:
    """Host memory that can still be had."""
    memory = Path("/proc/meminfo")
    for line in memory.read_text().splitlines() if memory.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
