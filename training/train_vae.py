"""Trains the autoencoder for a given time and saves what it has. `python -m training.train_vae --help`.

Loss: absolute and squared error of pixels and of their differences; no adversary, no perceptual network, no KL term.
Latents are normalised by the batch and a little noise is added before decoding: the encoder then spreads what matters
over the latents' range, and the decoder forgives the small errors of a denoised latent.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.vae import Vae
from training.muon import Average, Matrix, Muon
from training.networks import new_vae
from training.pictures import PictureSource, held_out_photos, load_photos
from training.schedule import Clock, held_out_scenes
from training.spec import RESOLUTION_PX, SEED

MAX_NOISE = 0.2


class Autoencoder(nn.Module):
    """The training pass: pictures in [-1, 1] and noise to reconstructions. Statistics are the batch's own."""

    def __init__(self, vae: Vae) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, pictures: Tensor, noise: Tensor) -> Tensor:
        z = self.vae.quant_conv(self.vae.encoder(pictures)).chunk(2, dim=1)[0].float()
        std, mean = torch.std_mean(z, dim=(0, 2, 3), keepdim=True)
        noisy = z + noise * std
        del mean
        return self.vae.decoder(self.vae.post_quant_conv(noisy))


def loss_of(output: Tensor, pictures: Tensor) -> Tensor:
    error = output.float() - pictures
    down, across = error.diff(dim=2), error.diff(dim=3)
    pixels = error.abs().mean() + 4 * error.square().mean()
    return pixels + 0.5 * (down.abs().mean() + across.abs().mean())


def psnr_db(output: Tensor, pictures: Tensor) -> float:
    """Mean over pictures in [-1, 1] of the PSNR over all four channels."""
    error = (output.float().clamp(-1, 1) - pictures).square().mean(dim=(1, 2, 3)) / 4
    return float((-10 * error.log10()).mean())


@torch.inference_mode()
def reconstruct(vae: Vae, pictures: Tensor, noise: float = 0.0) -> Tensor:
    outputs = []
    for part in pictures.split(32):
        z = vae.quant_conv(vae.encoder(part)).chunk(2, dim=1)[0]
        z = z + noise * torch.randn_like(z) * z.std(dim=(0, 2, 3), keepdim=True)
        outputs.append(vae.decoder(vae.post_quant_conv(z)).clamp(-1, 1))
    return torch.cat(outputs)


def optimisers(vae: Vae) -> tuple[Muon, torch.optim.Optimizer]:
    """Muon for the convolutions between the outer layers, Adam for the rest."""
    outer = {id(module.weight) for module in (vae.encoder.conv_in, vae.encoder.conv_out, vae.decoder.conv_in,
                                              vae.decoder.conv_out, vae.quant_conv, vae.post_quant_conv)}  # fmt: skip
    matrices = [Matrix(p) for p in vae.parameters() if p.ndim == 4 and min(p.shape[:2]) > 1 and id(p) not in outer]
    chosen = {id(matrix.parameter) for matrix in matrices}
    rest = [p for p in vae.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)
    return Muon(matrices, weight_decay=0.05), adam


def train(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(SEED)
    vae = new_vae().to(device, memory_format=torch.channels_last)
    average = Average(vae)
    if args.resume:
        vae.load_state_dict(load_file(args.resume, device=args.device))
        average = Average(vae)
    source = PictureSource(device, load_photos().to(device), torch.Generator(device).manual_seed(SEED), args.side)
    network: nn.Module = Autoencoder(vae)
    if args.compile:
        source.compile()
        network = torch.compile(network, dynamic=False)
    muon, adam = optimisers(vae)
    scenes = held_out_scenes(96, args.side).to(device) * 2 - 1
    photos = held_out_photos().to(device) * 2 - 1
    clock = Clock(args.seconds, args.log)
    step, decay = 0, 0.0
    while not clock.is_over():
        rate = args.rate * clock.rate(step)
        pictures = source.batch(args.rows) * 2 - 1
        noise = torch.randn(args.rows, 16, args.side // 16, args.side // 16, device=device, generator=source.generator)
        noise *= torch.rand(args.rows, 1, 1, 1, device=device, generator=source.generator) * MAX_NOISE
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = network(pictures.contiguous(memory_format=torch.channels_last), noise)
            loss = loss_of(output, pictures)
        loss.backward()
        adam.param_groups[0]["lr"] = rate * args.adam
        muon.step(rate)
        adam.step()
        adam.zero_grad(set_to_none=True)
        for parameter in vae.parameters():
            parameter.grad = None
        decay = min(0.998, step / (step + 10))
        average.update(decay)
        if step == 5:
            clock.restart()
        if clock.is_due():
            average.swap()
            clock.report(
                step=step, loss=float(loss.detach()), scenes_db=psnr_db(reconstruct(vae, scenes), scenes),
                noisy_db=psnr_db(reconstruct(vae, scenes, 0.1), scenes),
                photos_db=psnr_db(reconstruct(vae, photos), photos),
            )  # fmt: skip
            average.swap()
        step += 1
    average.swap()
    save_file({name: tensor.contiguous().cpu() for name, tensor in vae.state_dict().items()}, args.output)
    report = {"steps": step, "rows": args.rows, "scenes_db": psnr_db(reconstruct(vae, scenes), scenes)}
    report["photos_db"] = [psnr_db(reconstruct(vae, photo[None]), photo[None]) for photo in photos]
    print(json.dumps(report), flush=True)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, required=True, help="safetensors file of the averaged weights")
    options.add_argument("--resume", type=Path, help="weights to start from")
    options.add_argument("--seconds", type=float, default=200)
    options.add_argument("--rows", type=int, default=48)
    options.add_argument("--side", type=int, default=RESOLUTION_PX)
    options.add_argument("--rate", type=float, default=0.01)
    options.add_argument("--adam", type=float, default=0.15, help="Adam's rate as a part of Muon's")
    options.add_argument("--log", type=float, default=20, help="seconds between reports")
    options.add_argument("--device", default="cuda")
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return options


if __name__ == "__main__":
    started = time.perf_counter()
    train(parser().parse_args())
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)
