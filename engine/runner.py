"""Runs items of work on the device. The only place that touches a request's tensors.

A request's state here is its encoded prompts, its prefixes (one per CFG branch) and the latents of its images. Rows of
a denoise step are gathered from any requests with one batch key: prefixes may differ in length, steps in sigma.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.errors import GenerationFailed
from engine.request import PreparedRequest
from engine.scheduler import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample, Work
from models.image_model import ImageModel
from models.prefix_kv import Prefix
from models.rope import target_table
from models.sampling import euler_update, guide, starting_noise


@dataclass(slots=True)
class _State:
    request: PreparedRequest
    prompt_embeds: list[Tensor] = field(default_factory=list)  # per branch: (text tokens, hidden)
    condition_latents: list[Tensor] = field(default_factory=list)  # per image: (tokens, channels)
    prefixes: list[Prefix] = field(default_factory=list)  # per branch
    rotary: list[Tensor] = field(default_factory=list)  # per branch: (2, target tokens, head_dim / 2)
    latents: list[Tensor] = field(default_factory=list)  # per image: (tokens, channels)


class Runner:
    """Holds the networks and the device state of every request that has been started."""

    def __init__(self, model: ImageModel) -> None:
        self._model = model
        self._states: dict[str, _State] = {}

    def __repr__(self) -> str:
        prefix_bytes = sum(prefix.num_bytes for state in self._states.values() for prefix in state.prefixes)
        return f"<Runner: {len(self._states)} requests, {prefix_bytes} bytes of prefix>"

    def add(self, request: PreparedRequest) -> None:
        """Make a request known; nothing is allocated on the device yet."""
        self._states[request.request_id] = _State(request)

    def remove(self, request_id: str) -> None:
        """Drop everything that is held for a request."""
        self._states.pop(request_id, None)

    @torch.inference_mode()
    def run(self, work: Work) -> np.ndarray | None:
        """Do one item of work. Decoding returns the picture, (height, width, 4) uint8."""
        match work:
            case EncodePrompt():
                self._encode(self._states[work.request_id])
            case Prefill():
                self._prefill(self._states[work.request_id])
            case DenoiseStep():
                self._denoise(work.samples)
            case DecodeImage():
                return self._decode(self._states[work.request_id], work.image_index)
        return None

    def _encode(self, state: _State) -> None:
        device, dtype = self._model.device, self._model.dtype
        images = state.request.condition_images
        over_white = [torch.from_numpy(image.rgb).to(device) for image in images]
        state.prompt_embeds = [self._model.text_encoder.encode(prompt, over_white) for prompt in state.request.prompts]
        for image in images:
            pixels = torch.from_numpy(image.rgba).to(device).permute(2, 0, 1).unsqueeze(0).float()
            latents = self._model.vae.encode((pixels / 127.5 - 1).to(dtype))
            state.condition_latents.append(latents[0].flatten(1).T)

    def _prefill(self, state: _State) -> None:
        request, device, dtype = state.request, self._model.device, self._model.dtype
        transformer = self._model.transformer
        for prompt, embeds in zip(request.prompts, state.prompt_embeds, strict=True):
            state.prefixes.append(transformer.prefill(embeds, state.condition_latents, prompt.layout))
            table = target_table(request.target_grid, prompt.layout.target_position, transformer.config.axes_dims_rope)
            state.rotary.append(table.to(device))
        channels = transformer.config.in_channels
        for seed in request.seeds:
            state.latents.append(starting_noise(seed, request.target_grid, channels).to(device, dtype))
        state.prompt_embeds.clear()
        state.condition_latents.clear()

    def _denoise(self, samples: tuple[Sample, ...]) -> None:
        latents: list[Tensor] = []
        sigmas: list[float] = []
        rotary: list[Tensor] = []
        prefixes: list[Prefix] = []
        for sample in samples:
            state = self._states[sample.request_id]
            branches = state.request.num_branches
            latents += [state.latents[sample.image_index]] * branches
            sigmas += [state.request.sigmas[sample.step]] * branches
            rotary += state.rotary
            prefixes += state.prefixes
        timestep = torch.tensor(sigmas, device=self._model.device)
        velocity = self._model.transformer.decode(torch.stack(latents), timestep, torch.stack(rotary), prefixes)
        row = 0
        for sample in samples:
            state = self._states[sample.request_id]
            sigma, next_sigma = state.request.sigmas[sample.step : sample.step + 2]
            predicted = velocity[row]
            if state.request.num_branches > 1:
                predicted = guide(predicted, velocity[row + 1], state.request.true_cfg_scale)
            row += state.request.num_branches
            before = state.latents[sample.image_index]
            state.latents[sample.image_index] = euler_update(before, predicted, sigma, next_sigma)

    def _decode(self, state: _State, image_index: int) -> np.ndarray:
        grid = state.request.target_grid
        latents = state.latents[image_index].T.unflatten(1, (grid.height, grid.width)).unsqueeze(0)
        if not bool(latents.isfinite().all()):
            raise GenerationFailed("The model produced no finite picture for this request.")
        pixels = self._model.vae.decode(latents)[0].permute(1, 2, 0)
        picture: np.ndarray = ((pixels.float() * 0.5 + 0.5) * 255).round().to(torch.uint8).cpu().numpy()
        rows, columns = state.request.crop
        return np.ascontiguousarray(picture[rows, columns])
