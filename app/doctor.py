"""`easel doctor`: what this machine has, and which flags make a model fit it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from app.settings import Settings
from models.errors import CheckpointError

PACKAGES = ("easel", "torch", "triton", "fa3-fwd")


def examine(settings: Settings) -> None:
    """Print the report. What keeps the service from starting ends in `SystemExit`."""
    import torch

    from engine.loading import read_configs
    from engine.planner import Machine, Planner, gib

    config = settings.engine_config()
    try:
        machine = Machine.look(config)
        planner = Planner(config, read_configs(config, weights=False), machine)
        choices, asked = list(planner.choices()), planner.asked()
    except CheckpointError as error:
        raise SystemExit(f"easel: {error}") from error
    print("versions ", ", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]))
    if machine.device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(machine.device)))
        name = torch.cuda.get_device_name(machine.device)
        print(f"device    {name}, compute capability {capability}, {gib(machine.free_bytes)} free")
        print(f"          fused kernels: {_yes(machine.fused)}; FP8 products: {_yes(machine.multiplies_fp8)}")
    else:
        print(f"device    {machine.device.type}: no GPU is used")
    print(f"host      {gib(machine.host_free_bytes)} free")
    print(f"model     {planner.configs.folder}, in {str(machine.dtype).removeprefix('torch.')}")
    print(f"pictures  up to {config.max_output_pixels} pixels, one at a time\n")
    best = next((choice for choice in choices if choice.fits(machine)), None)
    print("  device     host  fits  flags")
    for choice in choices:
        marks = [text for text, is_so in (("as asked", choice == asked), ("recommended", choice == best)) if is_so]
        sizes = f"{choice.device_bytes / 2**30:8.1f} {choice.host_bytes / 2**30:8.1f}"
        note = f"   <- {', '.join(marks)}" if marks else ""
        print(f"{sizes}  {_yes(choice.fits(machine)):4s}  {choice.flags or '(none)'}{note}")
    print(
        "\nGiB, predicted. FP8 changes pictures a little; offload costs a copy of the weights from the host's memory:"
    )
    print("by component once a request, by block in every step.")
    if best is None:
        raise SystemExit("easel: nothing that can be chosen makes this model fit")


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
