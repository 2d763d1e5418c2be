"""The autoencoder over a large picture in overlapping tiles, so that its workspace does not grow with the picture.

Tiles are cut in latent cells, all of one shape: the last of an axis is moved back to end with the picture. Where two
tiles overlap, the outer quarter of the overlap on either side is dropped, as there a tile lacks context, and the middle
half is blended linearly. One row of tiles and the output are held at a time, never all tiles.

Tiles are not the whole: the attention in the middle of the network sees all positions of what it is given, so a tiled
picture is close to the untiled one and never equal to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import VaeConfig
from models.vae import Vae

TILE_PX = 512
MIN_TILE_PX = 128
WORKSPACE_MAPS, FUSED_MAPS = 24, 7  # full-size feature maps alive at once: 6.6 and 1.7 GiB were measured at 1024²


@dataclass(frozen=True, slots=True)
class Axis:
    """Starts of the tiles along one axis and their common length, in latent cells."""

    starts: tuple[int, ...]
    length: int


def plan(size: int, tile: int) -> Axis:
    """Cover `size` cells by tiles of `tile` that overlap by at least a quarter; a smaller picture is one tile."""
    if size <= tile:
        return Axis((0,), size)
    stride = tile - tile // 4
    return Axis((*range(0, size - tile, stride), size - tile), tile)


def paste(canvas: Tensor, piece: Tensor, start: int, end: int, dim: int) -> None:
    """Put `piece` at `start` along `dim` of `canvas`, which is filled up to `end`, blending what both have."""
    overlap = max(0, end - start)
    skipped = overlap // 4
    blended = overlap - 2 * skipped
    if blended:
        shape = [1] * canvas.dim()
        shape[dim] = blended
        ramp = ((torch.arange(blended, device=canvas.device) + 0.5) / blended).reshape(shape).to(canvas.dtype)
        seam = canvas.narrow(dim, start + skipped, blended)
        seam.lerp_(piece.narrow(dim, skipped, blended), ramp)
    rest = piece.shape[dim] - skipped - blended
    canvas.narrow(dim, start + skipped + blended, rest).copy_(piece.narrow(dim, skipped + blended, rest))


def in_tiles(run: Callable[[Tensor], Tensor], x: Tensor, tile: int, in_cell: int, out_cell: int) -> Tensor:
    """`run` over `x` (rows, channels, height, width) in tiles of `tile` latent cells a side. A cell is `in_cell`
    elements of the input's sides and `out_cell` of the output's."""
    down, across = (plan(side // in_cell, tile) for side in x.shape[-2:])
    picture: Tensor | None = None
    bottom = 0
    for top in down.starts:
        strip: Tensor | None = None
        right = 0
        for left in across.starts:
            rows = x.narrow(2, top * in_cell, down.length * in_cell)
            piece = run(rows.narrow(3, left * in_cell, across.length * in_cell).contiguous())
            if strip is None:
                strip = piece.new_empty(*piece.shape[:3], x.shape[3] // in_cell * out_cell)
            paste(strip, piece, left * out_cell, right, dim=3)
            right = (left + across.length) * out_cell
        assert strip is not None, "an axis has at least one tile"
        if picture is None:
            picture = strip.new_empty(*strip.shape[:2], x.shape[2] // in_cell * out_cell, strip.shape[3])
        paste(picture, strip, top * out_cell, bottom, dim=2)
        bottom = (top + down.length) * out_cell
    assert picture is not None, "an axis has at least one tile"
    return picture


def shrinking(run: Callable[[int], Tensor], tile_px: int = TILE_PX) -> Tensor:
    """`run` with tiles of `tile_px`, halved after each failed allocation. Raises the last `torch.OutOfMemoryError`
    when `MIN_TILE_PX` does not fit either. Nothing is remembered: the next picture starts with the first size."""
    while True:
        try:
            return run(tile_px)
        except torch.OutOfMemoryError:
            if tile_px // 2 < MIN_TILE_PX:
                raise
        tile_px //= 2  # outside the handler, whose traceback keeps the failed run's tensors alive
        release()


@dataclass(frozen=True, slots=True)
class TiledVae:
    """A VAE that works in tiles: always ("on"), when the whole would not fit or did not ("auto"), or never ("off")."""

    vae: Vae
    mode: str

    def encode(self, pixels: Tensor) -> Tensor:
        """As `Vae.encode`."""
        return self._run(self.vae.encode, pixels, self.vae.config.spatial_ratio, 1)

    def decode(self, latents: Tensor) -> Tensor:
        """As `Vae.decode`."""
        return self._run(self.vae.decode, latents, 1, self.vae.config.spatial_ratio)

    def _run(self, run: Callable[[Tensor], Tensor], x: Tensor, in_cell: int, out_cell: int) -> Tensor:
        ratio = self.vae.config.spatial_ratio
        if self.mode == "off":
            return run(x)
        if self.mode == "auto" and self._workspace_bytes(x, in_cell) <= free_bytes(x.device):
            try:
                return run(x)
            except torch.OutOfMemoryError:
                pass
            release()
        return shrinking(lambda tile_px: in_tiles(run, x, max(1, tile_px // ratio), in_cell, out_cell))

    def _workspace_bytes(self, x: Tensor, in_cell: int) -> int:
        config = self.vae.config
        pixels = x.shape[0] * x.shape[2] * x.shape[3] * (config.spatial_ratio // in_cell) ** 2
        return workspace_bytes_per_px(config, self.vae.is_fused, x.dtype) * pixels


def workspace_bytes_per_px(config: VaeConfig, fused: bool, dtype: torch.dtype) -> int:
    """What a VAE takes beside its weights, for each pixel of what it encodes or decodes."""
    maps = FUSED_MAPS if fused else WORKSPACE_MAPS
    return maps * max(config.base_dim, config.decoder_base_dim or 0) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """What PyTorch may still allocate, under its memory fraction as well; without end on the CPU."""
    if device.type != "cuda":
        return 2**62
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device.index))
    return min(free + reserved, allowed) - allocated


def release() -> None:
    """Hand back the blocks that PyTorch keeps: a large one is not found among them."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
