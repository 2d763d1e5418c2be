"""Runs items of work on the device. The only place that touches a request's tensors.

A request's state here is its encoded prompts, its prefixes (one per CFG branch) and the latents of its images. Rows of
a denoise step are gathered from any requests with one batch key: prefixes may differ in length, steps in sigma. An
item either happens as a whole or not at all, so it can be tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.errors import DeviceLost, DeviceOutOfMemory, GenerationFailed
from engine.messages import DeviceMemory
from engine.profile import Profile, measure
from engine.request import PreparedRequest
from engine.work import DecodeImage, DecodePreview, DenoiseStep, DropPrefix, EncodePrompt, Prefill, Sample, Work
from models.graphs import GraphPool
from models.image_model import ImageModel
from models.inputs import ConditionImage, TokenizedPrompt
from models.layout import Grid
from models.packed import Row
from models.prefix_kv import Prefix
from models.rope import target_table
from models.sampling import clean_estimate, euler_update, guide, starting_noise
from models.tensor_cache import CACHE_BYTES, TensorCache
from models.tiling import TiledVae


@dataclass(slots=True)
class _State:
    request: PreparedRequest
    prompt_embeds: list[Tensor] = field(default_factory=list)  # per branch: (text tokens, hidden)
    condition_latents: list[Tensor] = field(default_factory=list)  # per image: (tokens, channels)
    prefixes: list[Prefix] = field(default_factory=list)  # per branch
    rotary: list[Tensor] = field(default_factory=list)  # per branch: (2, target tokens, head_dim / 2)
    latents: list[Tensor] = field(default_factory=list)  # per image: (tokens, channels)
    estimates: dict[int, Tensor] = field(default_factory=dict)  # per image with a preview to decode: (tokens, channels)
    images_done: int = 0


@contextmanager
def _device_errors() -> Iterator[None]:
    """The device's errors as the engine's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory from error
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error)) from error


class Runner:
    """Holds the networks and the device state of every request that has been started."""

    def __init__(
        self,
        model: ImageModel,
        max_target_tokens: int,
        graphs: bool = True,
        warm_grids: Sequence[Grid] = (),
        vae_tiling: str = "auto",
    ) -> None:
        """`max_target_tokens` is the largest picture's; memory is kept free for decoding one. Pictures of `warm_grids`
        are prepared for before the first request comes."""
        self._model = model
        self.max_target_tokens = max_target_tokens
        self.warm_grids = tuple(warm_grids)
        pool = GraphPool() if graphs else None  # of one, for all: a step or a prefill is done before the next begins
        self._prefiller = model.prefiller(pool)
        self._decoder, self._exact_decoder = model.decoders(pool)
        self._vae = TiledVae(model.vae, vae_tiling)
        self.shortcut = ""  # of the last item, see `WorkDone`
        self._prompts = TensorCache(CACHE_BYTES)
        self._images = TensorCache(CACHE_BYTES)
        self._states: dict[str, _State] = {}
        self._on_cuda = model.device.type == "cuda"
        self._started: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # steps: begin and end

    def __repr__(self) -> str:
        prefix_bytes = sum(prefix.num_bytes for state in self._states.values() for prefix in state.prefixes)
        return f"<Runner: {len(self._states)} requests, {prefix_bytes} bytes of prefix>"

    def add(self, request: PreparedRequest) -> None:
        """Make a request known; nothing is allocated on the device yet."""
        self._states[request.request_id] = _State(request)

    def remove(self, request_id: str) -> None:
        """Drop everything that is held for a request."""
        self._states.pop(request_id, None)

    @property
    def model(self) -> ImageModel:
        return self._model

    @property
    def tiles_vae(self) -> bool:
        """Whether the VAE may work in tiles."""
        return self._vae.mode != "off"

    def profile(self, max_rows: int) -> Profile:
        """Time and measure items of every kind; leaves nothing behind."""
        return measure(self, max_rows)

    def run(self, work: Work) -> np.ndarray | None:
        """Do one item of work and wait for the device. Decoding returns the picture, (height, width, 4) uint8.

        Raises `DeviceOutOfMemory`, `DeviceLost`, `GenerationFailed`, or whatever else went wrong inside.
        """
        with _device_errors(), torch.inference_mode():
            result = self._run(work)
            if self._on_cuda:
                torch.cuda.synchronize(self._model.device)
        return result

    @property
    def runs_ahead(self) -> bool:
        """Whether `start` returns before its step is done."""
        return self._on_cuda

    def start(self, step: DenoiseStep) -> None:
        """Queue a step on the device, behind at most one that has not been finished. Raises like `run`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with _device_errors(), torch.inference_mode():
            begin.record()
            self._run(step)
            end.record()
        self._started.append((begin, end))

    def finish(self) -> float:
        """Wait for the first started step; the seconds that the device took. Raises `DeviceLost`."""
        begin, end = self._started.popleft()
        with _device_errors():
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000

    def device_memory(self) -> DeviceMemory | None:
        """What is held of the device now; None where that is the host's memory."""
        if not self._on_cuda:
            return None
        device = self._model.device
        _, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total)

    def free_caches(self) -> None:
        """Give what the allocator keeps for later back to the device."""
        kept = (self._prefiller, self._decoder, self._exact_decoder, self._model.text_encoder)
        for keeper in (*kept, self._prompts, self._images):
            keeper.clear()
        if self._on_cuda:
            torch.cuda.empty_cache()

    def _run(self, work: Work) -> np.ndarray | None:
        self.shortcut = ""
        match work:
            case EncodePrompt():
                self._encode(self._states[work.request_id])
            case Prefill():
                self._prefill(self._states[work.request_id])
            case DropPrefix():
                self._states[work.request_id].prefixes = []
            case DenoiseStep():
                self._denoise(work.samples)
            case DecodeImage():
                state = self._states[work.request_id]
                return self._decode(state, state.latents[work.image_index])
            case DecodePreview():
                state = self._states[work.request_id]
                return self._decode(state, state.estimates[work.image_index])
        return None

    def _encode(self, state: _State) -> None:
        images = state.request.condition_images
        digests = tuple(image.digest for image in images)
        misses = self._prompts.misses
        state.prompt_embeds = [
            self._prompts.get((prompt.input_ids, digests), partial(self._encode_prompt, prompt, images))
            for prompt in state.request.prompts
        ]
        self.shortcut = "hit" if self._prompts.misses == misses else "miss"
        state.condition_latents = [
            self._images.get(image.digest, partial(self._encode_image, image)) for image in images
        ]

    def _encode_prompt(self, prompt: TokenizedPrompt, images: Sequence[ConditionImage]) -> Tensor:
        self._model.bring(self._model.text_encoder)
        return self._model.text_encoder.encode(prompt, images)

    def _encode_image(self, image: ConditionImage) -> Tensor:
        pixels = torch.from_numpy(image.rgba).to(self._model.device).permute(2, 0, 1).unsqueeze(0).float()
        self._model.bring(self._model.vae)
        latents = self._vae.encode((pixels / 127.5 - 1).to(self._model.dtype))
        return latents[0].flatten(1).T.contiguous()

    def _prefill(self, state: _State) -> None:
        """Fill the prefixes; the first time, draw the noise as well. Latents under way outlive a dropped prefix."""
        request, config, device = state.request, self._model.configs.transformer, self._model.device
        self._model.bring(self._model.exact)
        prefixes, rotary = [], []
        for prompt, embeds in zip(request.prompts, state.prompt_embeds, strict=True):
            prefixes.append(self._prefiller.prefill(embeds, state.condition_latents, prompt.layout))
            position = prompt.layout.target_position
            rotary.append(target_table(request.target_grid, position, config.axes_dims_rope, device))
        if not state.latents:
            noise = [starting_noise(seed, request.target_grid, config.in_channels) for seed in request.seeds]
            state.latents = [latents.to(device, self._model.dtype) for latents in noise]
        state.prefixes, state.rotary = prefixes, rotary

    def _denoise(self, samples: tuple[Sample, ...]) -> None:
        rows: list[Row] = []
        for sample in samples:
            state = self._states[sample.request_id]
            latents, sigma = state.latents[sample.image_index], state.request.sigmas[sample.step]
            branches = zip(state.rotary, state.prefixes, strict=True)
            rows += [Row(latents, sigma, rotary, prefix) for rotary, prefix in branches]
        precision = self._model.precision
        is_exact = any(
            precision.is_exact(sample.step, self._states[sample.request_id].request.num_steps) for sample in samples
        )
        self._model.bring(self._model.exact if is_exact else self._model.transformer)
        velocity, result = (self._exact_decoder if is_exact else self._decoder).decode(rows)
        self.shortcut = result.value  # the enum's module would take torch along to where `WorkDone` is unpacked
        row, updated, estimates = 0, [], {}
        for sample in samples:
            state = self._states[sample.request_id]
            sigma, next_sigma = state.request.sigmas[sample.step : sample.step + 2]
            predicted = velocity[row]
            if state.request.num_branches > 1:
                predicted = guide(predicted, velocity[row + 1], state.request.true_cfg_scale)
            row += state.request.num_branches
            if sample.step + 1 in state.request.preview_steps:
                estimates[sample] = clean_estimate(state.latents[sample.image_index], predicted, sigma)
            updated.append(euler_update(state.latents[sample.image_index], predicted, sigma, next_sigma))
        for sample, latents in zip(samples, updated, strict=True):
            state = self._states[sample.request_id]
            state.latents[sample.image_index] = latents
            if sample in estimates:
                state.estimates[sample.image_index] = estimates[sample]
            if sample.step + 1 == state.request.num_steps:
                state.images_done += 1
            if state.images_done == state.request.num_images:
                state.prefixes, state.rotary = [], []

    def _decode(self, state: _State, latents: Tensor) -> np.ndarray:
        grid = state.request.target_grid
        latents = latents.T.unflatten(1, (grid.height, grid.width)).unsqueeze(0)
        if not bool(latents.isfinite().all()):
            raise GenerationFailed("The model produced no finite picture for this request.")
        self._model.bring(self._model.vae)
        pixels = self._vae.decode(latents)[0].permute(1, 2, 0)
        picture: np.ndarray = ((pixels.float() * 0.5 + 0.5) * 255).round().to(torch.uint8).contiguous().cpu().numpy()
        rows, columns = state.request.crop
        return np.ascontiguousarray(picture[rows, columns])
