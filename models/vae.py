"""The image autoencoder: RGBA pixels to latents and back, in two dimensions.

The published network is a video autoencoder's image specialisation, so tensors carry its names and some of its shape:
shortcuts of levels with `temperal_downsample` fold a time axis that, for one frame, holds a zero frame on the way down
and a dropped copy on the way up. Its temporal convolutions (`time_conv`) never run on images and are not loaded.

Latents here are normalised, `(z - mean) / std`, as the transformer sees them. Encoding takes the posterior's mode.

On CUDA in bfloat16 `Vae.fuse` makes the same network faster and smaller: channels-last memory, one kernel for a norm
with its SiLU and for a residual with its biases, and upsampling folded into the convolution behind it.
Oracle: `AutoencoderKLQwenImage21` of diffusers 0.42.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import VaeConfig

MIN_CHANNELS = 32  # of a convolution's output: with fewer the library falls back to a kernel many times slower
UNUSED_WEIGHTS = ("*.time_conv.weight", "*.time_conv.bias")


class RMSNorm(nn.Module):
    """RMS norm over channels, in float32, then SiLU unless `silu` is off. `gamma` has the published rank: (channels, 1,
    1), or one more."""

    def __init__(self, channels: int, rank: int = 4, silu: bool = True) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * (rank - 1)))
        self.root = channels**0.5
        self.silu = silu
        self.fused = False

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The norm of `x`, plus `bias` per channel."""
        if self.fused:
            from models.vae_kernels import rms_norm

            return rms_norm(x, self.gamma, bias, self.silu)
        x = x if bias is None else x + bias.reshape(-1, 1, 1)
        x = F.normalize(x.float(), dim=1).to(x.dtype) * self.root * self.gamma.reshape(-1, 1, 1)
        return F.silu(x) if self.silu else x


def conv(in_channels: int, out_channels: int, kernel: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2)


class ResidualBlock(nn.Module):
    """Two norm, SiLU, 3×3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(in_channels)
        self.conv1 = conv(in_channels, out_channels, 3)
        self.norm2 = RMSNorm(out_channels)
        self.conv2 = conv(out_channels, out_channels, 3)
        self.conv_shortcut = conv(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()
        self.fused = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return self._fused(x)
        hidden = self.conv1(self.norm1(x))
        hidden = self.conv2(self.norm2(hidden))
        return hidden + self.conv_shortcut(x)

    def _fused(self, x: Tensor) -> Tensor:
        """The same with every bias added where its convolution's output is read next."""
        from models.vae_kernels import add_

        assert self.conv2.bias is not None
        hidden = F.conv2d(self.norm1(x), self.conv1.weight, padding=1)
        hidden = F.conv2d(self.norm2(hidden, self.conv1.bias), self.conv2.weight, padding=1)
        if isinstance(self.conv_shortcut, nn.Identity):
            return add_(hidden, self.conv2.bias, x)
        return add_(hidden, self.conv2.bias, F.conv2d(x, self.conv_shortcut.weight), self.conv_shortcut.bias)


class AttentionBlock(nn.Module):
    """Single-head attention over all latent positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, rank=3, silu=False)
        self.to_qkv = conv(channels, 3 * channels, 1)
        self.proj = conv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(x.shape)
        return self.proj(attended) + x


class MidBlock(nn.Module):
    """Residual, attention, residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels) for _ in range(2)])
        self.attentions = nn.ModuleList([AttentionBlock(channels)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(nn.Module):
    """Halve both sides with a strided convolution, padded below and to the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)


class Upsample(nn.Module):
    """Double both sides by nearest neighbour, then a 3×3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest-exact"), conv(channels, channels, 3))
        self.folded: Tensor | None
        self.register_parameter("folded", None)

    def fold(self) -> None:
        """Do both in one transposed convolution, with 4/9 of the arithmetic: of the nine neighbours that an output
        pixel sees, those that are copies of one input pixel are summed in the weights beforehand."""
        weight = self._conv.weight  # (out, in, 3, 3)
        spread = torch.tensor(
            [[0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], device=weight.device
        )
        folded = torch.einsum("yh,xw,oihw->ioyx", spread, spread, weight.float()).to(weight.dtype)
        self.folded = nn.Parameter(folded.contiguous(memory_format=torch.channels_last), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)

    def unbiased(self, x: Tensor) -> Tensor:
        """The output without the convolution's bias, folded."""
        assert self.folded is not None, "call `fold` first"
        return F.conv_transpose2d(x, self.folded, stride=2, padding=1)

    @property
    def bias(self) -> Tensor:
        assert self._conv.bias is not None
        return self._conv.bias

    @property
    def _conv(self) -> nn.Conv2d:
        return cast(nn.Conv2d, self.resample[1])


class DownBlock(nn.Module):
    """Residual blocks and an optional downsample, beside an average-pooling shortcut."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, halve: bool, temporal: bool) -> None:
        super().__init__()
        self.out_channels, self.side, self.frames = out_channels, 2 if halve else 1, 2 if temporal else 1
        widths = [in_channels] + [out_channels] * num_blocks
        self.resnets = nn.ModuleList([ResidualBlock(*pair) for pair in pairwise(widths)])
        self.downsampler = Downsample(out_channels) if halve else nn.Identity()

    def shortcut(self, x: Tensor) -> Tensor:
        """Space to channels, then the mean of neighbouring channels. A folded time axis puts a frame of zeros before
        ours, which the mean counts."""
        folded = F.pixel_unshuffle(x, self.side).unflatten(1, (x.shape[1], 1, self.side**2))
        folded = F.pad(folded, (0, 0, 0, 0, 0, 0, self.frames - 1, 0)).flatten(1, 3)
        return folded.unflatten(1, (self.out_channels, -1)).mean(dim=2)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        for resnet in self.resnets:
            x = resnet(x)
        return self.downsampler(x) + shortcut


class UpBlock(nn.Module):
    """Residual blocks; a level that doubles both sides adds a shortcut made of repeated channels."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, double: bool, temporal: bool) -> None:
        super().__init__()
        self.out_channels, self.doubles, self.frames = out_channels, double, 2 if temporal else 1
        self.fused = False
        widths = [in_channels] + [out_channels] * (num_blocks + 1)
        self.resnets = nn.ModuleList([ResidualBlock(*pair) for pair in pairwise(widths)])
        self.upsampler = Upsample(out_channels) if double else nn.Identity()

    def shortcut(self, x: Tensor) -> Tensor:
        """Repeat channels, of a folded time axis keep the last frame, then channels to space."""
        repeats = self.out_channels * self.frames * 4 // x.shape[1]
        repeated = x.repeat_interleave(repeats, dim=1).unflatten(1, (self.out_channels, self.frames, 4))
        return F.pixel_shuffle(repeated[:, :, -1].flatten(1, 2), 2)

    def forward(self, x: Tensor) -> Tensor:
        entry = x
        for resnet in self.resnets:
            x = resnet(x)
        if not self.doubles:
            return x
        if self.fused and isinstance(self.upsampler, Upsample):
            from models.vae_kernels import add_shuffled_

            return add_shuffled_(self.upsampler.unbiased(x), self.upsampler.bias, entry, self.frames)
        return self.upsampler(x) + self.shortcut(entry)


class Encoder(nn.Module):
    """(rows, 4, height, width) in [-1, 1] to the posterior's mean and log variance."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        widths = [config.base_dim * mult for mult in (1, *config.dim_mult)]
        last = len(config.dim_mult) - 1
        self.conv_in = conv(config.in_channels, widths[0], 3)
        self.down_blocks = nn.ModuleList(
            DownBlock(
                widths[level],
                widths[level + 1],
                config.num_res_blocks,
                halve=level < last,
                temporal=level < last and config.temperal_downsample[level],
            )
            for level in range(last + 1)
        )
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = conv(widths[-1], 2 * config.z_dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(self.norm_out(self.mid_block(x)))


class Decoder(nn.Module):
    """Latents to (rows, 4, height, width), not yet clamped."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        base = config.decoder_base_dim or config.base_dim
        mults = (config.dim_mult[-1], *reversed(config.dim_mult))
        widths = [base * mult for mult in mults]
        last = len(config.dim_mult) - 1
        temporal = tuple(reversed(config.temperal_downsample))
        self.conv_in = conv(config.z_dim, widths[0], 3)
        self.mid_block = MidBlock(widths[0])
        self.up_blocks = nn.ModuleList(
            UpBlock(
                widths[level],
                widths[level + 1],
                config.num_res_blocks,
                double=level < last,
                temporal=level < last and temporal[level],
            )
            for level in range(last + 1)
        )
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = conv(widths[-1], config.out_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(self.norm_out(x))


class Vae(nn.Module):
    """Encoder and decoder with the 1×1 convolutions between them and the latent statistics."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quant_conv = conv(2 * config.z_dim, 2 * config.z_dim, 1)
        self.post_quant_conv = conv(config.z_dim, config.z_dim, 1)
        self.decoder = Decoder(config)
        self.is_fused = False

    def fuse(self) -> None:
        """Switch to the fused kernels, for good; see the module's head."""
        self.is_fused = True
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for module in self.modules():
            if isinstance(module, RMSNorm | ResidualBlock | UpBlock):
                module.fused = True
            if isinstance(module, Upsample):
                module.fold()
        out = self.decoder.conv_out
        if (missing := -out.out_channels % MIN_CHANNELS) and out.bias is not None:
            out.weight = nn.Parameter(F.pad(out.weight, (0, 0, 0, 0, 0, 0, 0, missing)), requires_grad=False)
            out.weight.data = out.weight.contiguous(memory_format=torch.channels_last)
            out.bias = nn.Parameter(F.pad(out.bias, (0, missing)), requires_grad=False)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.tensor(self.config.latents_mean, dtype=like.dtype, device=like.device)
        std = torch.tensor(self.config.latents_std, dtype=like.dtype, device=like.device)
        return mean.reshape(-1, 1, 1), std.reshape(-1, 1, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        """(rows, 4, height, width) in [-1, 1] to normalised latents (rows, z_dim, height / ratio, width / ratio)."""
        z, _ = self.quant_conv(self.encoder(pixels)).chunk(2, dim=1)
        mean, std = self._statistics(z)
        return (z - mean) / std

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (rows, z_dim, height, width) to pixels (rows, 4, height × ratio, width × ratio), clamped
        to [-1, 1]."""
        mean, std = self._statistics(latents)
        pixels = self.decoder(self.post_quant_conv(latents * std + mean))
        return pixels[:, : self.config.out_channels].clamp(-1.0, 1.0)
