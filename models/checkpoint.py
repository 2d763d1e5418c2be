"""Filling modules from a checkpoint's safetensors files.

Loading is strict: a missing, left-over or wrongly shaped tensor is a `CheckpointError` that names it and its file.
Modules are built on the meta device; each parameter is then allocated once, in its final dtype and on its final
device, and the published tensors are copied into it. Nothing is ever unpickled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.config import read_json
from models.errors import CheckpointError

log = logging.getLogger(__name__)

READERS = 8  # threads that read and copy to the device at once


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


def load_weights(
    module: nn.Module,
    files: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    published_names: Callable[[str], tuple[str, ...]],
    unused: Iterable[str] = (),
) -> None:
    """Fill every parameter of `module` (built on the meta device) from `files`.

    `published_names` gives, for one of our names, the published tensors stacked into it along dimension 0. `unused`
    are patterns of published tensors that this code has no use for; any other left-over tensor is an error.
    """
    started_s = time.monotonic()
    parameters = dict(module.named_parameters())

    def filled(name: str) -> Tensor:
        target = torch.empty(parameters[name].shape, dtype=dtype, device=device)
        _fill(target, published_names(name), files)
        return target

    with ThreadPoolExecutor(READERS) as pool:
        for name, tensor in zip(parameters, pool.map(filled, parameters), strict=True):
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    used = {published for name in parameters for published in published_names(name)}
    patterns = tuple(unused)
    for name in files:
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in patterns):
            raise CheckpointError(f"{files.file_of(name)}: unexpected tensor {name}")
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    log.info("loaded %s: %.2f GB in %.1f s", files.folder.name, num_bytes / 1e9, time.monotonic() - started_s)


def _fill(target: Tensor, sources: tuple[str, ...], files: TensorFiles) -> None:
    rows = target.shape[0] // len(sources)
    for index, source in enumerate(sources):
        part = target[index * rows : (index + 1) * rows]
        tensor = files.read(source)
        if tensor.shape != part.shape:
            expected, found = tuple(part.shape), tuple(tensor.shape)
            raise CheckpointError(f"{files.file_of(source)}: tensor {source} has shape {found}, expected {expected}")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{files.file_of(source)}: tensor {source} has dtype {tensor.dtype}")
        part.copy_(tensor)
