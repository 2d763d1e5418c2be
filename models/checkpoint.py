"""Filling modules from a checkpoint's safetensors files.

Loading is strict: a missing, left-over or wrongly shaped tensor is a `CheckpointError` that names it and its file.
Modules are built on the meta device; each parameter is then allocated once, in its final dtype and on its final
device, and the published tensors are copied into it. Nothing is ever unpickled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.config import read_json
from models.errors import CheckpointError
from models.quantization import FP8, SCALE_SUFFIX, Quantized, quantize_rows

log = logging.getLogger(__name__)

Room = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Where a weight, told by its name, shape and dtype, is to lie."""

READERS = 8  # threads that read and copy to the device at once
ROWS = 2048  # of a weight that are quantized at once


class TensorFiles:
    """The tensors of one component, over one file or a sharded set with an index."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.exists():
            names = {single.name}
        elif index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index} has no weight_map")
            names = set(weight_map.values())
            if not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"{index}: weight_map names something that is no file")
        else:
            raise CheckpointError(f"{single} is missing (and there is no {index.name} beside it)")
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        for name in sorted(names):
            self._add(folder / name)

    def _add(self, path: Path) -> None:
        if path.parent != self.folder:
            raise CheckpointError(f"{path} lies outside of {self.folder}")
        try:
            self._open[path] = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
        for tensor in self._open[path].keys():  # noqa: SIM118 (safe_open is no mapping)
            self._file_of[tensor] = path

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU and in the dtype it was stored in."""
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        try:
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None

    def file_of(self, name: str) -> Path:
        return self._file_of[name]


def as_published(name: str) -> tuple[str, ...]:
    """The published tensors of a network whose parameters are called like them."""
    return (name,)


def load_weights(
    module: nn.Module,
    files: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    published_names: Callable[[str], tuple[str, ...]] = as_published,
    unused: Iterable[str] = (),
    room: Room | None = None,
) -> None:
    """Fill every parameter of `module` (built on the meta device) from `files`. Weights lie on `device`, unless `room`
    says where.

    `published_names` gives, for one of our names, the published tensors stacked into it along dimension 0. `unused`
    are patterns of published tensors that this code has no use for; any other left-over tensor is an error.
    """
    started_s = time.monotonic()
    dtypes = stored_dtypes(module, dtype)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    scales = {name + SCALE_SUFFIX for name, stored in dtypes.items() if stored == FP8}

    def place(name: str) -> Tensor:
        if room is not None:
            return room(name, shapes[name], dtypes[name])
        return torch.empty(shapes[name], dtype=dtypes[name], device=device)

    def filled(name: str) -> dict[str, Tensor]:
        sources, target = published_names(name), place(name)
        if name + SCALE_SUFFIX in scales:
            quantized = Quantized(target, place(name + SCALE_SUFFIX))
            _fill_quantized(quantized, sources, files, device)
            return {name: quantized.values, name + SCALE_SUFFIX: quantized.scales}
        for part, source in _parts(target, sources):
            part.copy_(_read_float(source, part.shape, files))
        return {name: target}

    with ThreadPoolExecutor(READERS) as pool:
        for tensors in pool.map(filled, [name for name in shapes if name not in scales]):
            for name, tensor in tensors.items():
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    used = {published for name in shapes if name not in scales for published in published_names(name)}
    used |= {f"{weight}{SCALE_SUFFIX}" for name in scales for weight in published_names(name[: -len(SCALE_SUFFIX)])}
    patterns = tuple(unused)
    for name in files:
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in patterns):
            raise CheckpointError(f"{files.file_of(name)}: unexpected tensor {name}")
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    log.info("loaded %s: %.2f GB in %.1f s", files.folder.name, num_bytes / 1e9, time.monotonic() - started_s)


def stored_dtypes(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every parameter once it is loaded in `dtype`: that, unless it is FP8 or the scale of such."""
    fp8 = {name for name, parameter in module.named_parameters() if parameter.dtype == FP8}
    scales = {name + SCALE_SUFFIX for name in fp8}
    return {
        name: FP8 if name in fp8 else torch.float32 if name in scales else dtype
        for name, _ in module.named_parameters()
    }


def _parts(target: Tensor, sources: Sequence[str]) -> Iterator[tuple[Tensor, str]]:
    """The rows of `target` that each source fills."""
    return zip(target.chunk(len(sources)), sources, strict=True)


def _read(name: str, shape: torch.Size, files: TensorFiles) -> Tensor:
    tensor = files.read(name)
    if tensor.shape != shape:
        found, expected = tuple(tensor.shape), tuple(shape)
        raise CheckpointError(f"{files.file_of(name)}: tensor {name} has shape {found}, expected {expected}")
    return tensor


def _read_float(name: str, shape: torch.Size, files: TensorFiles) -> Tensor:
    tensor = _read(name, shape, files)
    if not tensor.is_floating_point() or tensor.dtype == FP8:
        raise CheckpointError(f"{files.file_of(name)}: tensor {name} has dtype {tensor.dtype}")
    return tensor


def _fill_quantized(whole: Quantized, sources: Sequence[str], files: TensorFiles, device: torch.device) -> None:
    """A weight as E4M3, whether it is stored so or is quantized now, on `device`."""
    for (values, source), scales in zip(_parts(whole.values, sources), whole.scales.chunk(len(sources)), strict=True):
        if source + SCALE_SUFFIX in files:
            values.copy_(_read(source, values.shape, files))
            scales.copy_(_read_float(source + SCALE_SUFFIX, scales.shape, files))
            continue
        weight = _read_float(source, values.shape, files)
        for start in range(0, len(weight), ROWS):
            rows = slice(start, start + ROWS)
            quantized = quantize_rows(weight[rows].to(device))
            values[rows], scales[rows] = quantized.values, quantized.scales
