"""The checkpoint's own numbers, read from the JSON files in its folder.

No size, count or statistic of the network lives in code: everything below comes from `model_index.json` and from the
`config.json` of each component. A field that asks for something this code does not do is refused by name, because
ignoring it would draw a wrong picture instead of failing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from models.errors import CheckpointError
from models.layout import SLOT_SIDE_TOKENS

PIPELINE_CLASS = "QwenImage21Pipeline"
SCHEDULER_CLASS = "FlowMatchEulerDiscreteScheduler"
DEFAULT_NUM_STEPS = 40
DEFAULT_RESOLUTION_PX = 1024


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `CheckpointError` names the file when it is missing or is no such thing."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def _refuse(path: Path, config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    for key, allowed in only.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"{path}: {key} = {value!r} is not supported (only {allowed[0]!r})")


def _pick(cls: type[Any], path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, checked against their types, lists as tuples; a field without a default
    must be there."""
    picked: dict[str, Any] = {}
    types = get_type_hints(cls)
    for field in fields(cls):
        value = config.get(field.name)
        if value is not None:
            picked[field.name] = _checked(value, types[field.name], f"{path}: {field.name}")
        elif field.default is MISSING:
            raise CheckpointError(f"{path}: {field.name} is missing")
    return picked


def _checked(value: Any, expected: Any, name: str) -> Any:
    """`value` if it is of the type `expected`: bool, a positive int or float, or a tuple of one of them."""
    options = [option for option in get_args(expected) if option is not type(None)]
    if isinstance(expected, UnionType):
        return _checked(value, options[0], name)
    if get_origin(expected) is tuple:
        if not isinstance(value, list) or not value:
            raise CheckpointError(f"{name} = {value!r} is not a list with entries")
        signed = name.endswith(("latents_mean", "indexes"))
        return tuple(item if signed and _is_number(item) else _checked(item, options[0], name) for item in value)
    if expected is bool and isinstance(value, bool):
        return value
    if expected is int and _is_number(value) and isinstance(value, int) and value > 0:
        return value
    if expected is float and _is_number(value) and value > 0:
        return value
    raise CheckpointError(f"{name} = {value!r} is not a {'bool' if expected is bool else 'positive number'}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """`transformer/config.json`. Widths are channels; `axes_dims_rope` are the rotary channels of (frame, height,
    width) and add up to `attention_head_dim`."""

    in_channels: int
    num_layers: int
    attention_head_dim: int
    num_attention_heads: int
    context_in_dim: int
    mlp_ratio: int
    axes_dims_rope: tuple[int, ...]
    eps: float = 1e-6
    causal_condition: bool = True
    out_channels: int | None = None

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / "config.json"
        config = read_json(path)
        _refuse(path, config, {"_class_name": ("QwenImage21Transformer2DModel",), "patch_size": (1,)})
        parsed = cls(**_pick(cls, path, config))
        if sum(parsed.axes_dims_rope) != parsed.attention_head_dim:
            raise CheckpointError(f"{path}: axes_dims_rope do not add up to attention_head_dim")
        if parsed.out_channels not in (None, parsed.in_channels):
            raise CheckpointError(f"{path}: out_channels differs from in_channels")
        return parsed


@dataclass(frozen=True, slots=True)
class VaeConfig:
    """`vae/config.json`. One entry of `dim_mult` per resolution level; `temperal_downsample` (the published spelling)
    says which levels carry the folded-away time axis in their shortcut."""

    base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    decoder_base_dim: int | None = None
    in_channels: int = 4
    out_channels: int = 4

    @property
    def spatial_ratio(self) -> int:
        """Pixels per latent along a side. It follows from the architecture; `scale_factor_spatial` in published
        configs does not agree with the network and is not read."""
        return 2 ** (len(self.dim_mult) - 1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / "config.json"
        config = read_json(path)
        only = {
            "_class_name": ("AutoencoderKLQwenImage21",),
            "is_residual": (True,),
            "attn_scales": ([],),
            "patch_size": (None,),
            "in_channels": (4,),
            "out_channels": (4,),
        }
        _refuse(path, config, only)
        parsed = cls(**_pick(cls, path, config))
        if len(parsed.temperal_downsample) < len(parsed.dim_mult) - 1:
            raise CheckpointError(f"{path}: temperal_downsample is shorter than dim_mult asks for")
        for name in ("latents_mean", "latents_std"):
            if len(getattr(parsed, name)) != parsed.z_dim:
                raise CheckpointError(f"{path}: {name} does not have z_dim = {parsed.z_dim} entries")
        return parsed


@dataclass(frozen=True, slots=True)
class LanguageConfig:
    """`text_config` of `text_encoder/config.json`; `mrope_section` are the rotary channel pairs of (temporal, height,
    width)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    mrope_section: tuple[int, ...]
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`vision_config` of `text_encoder/config.json`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class TextEncoderConfig:
    """`text_encoder/config.json`. Older files keep the rotary numbers in `rope_scaling` and beside it."""

    language: LanguageConfig
    vision: VisionConfig

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls.parse(read_json(folder / "config.json"), folder / "config.json")

    @classmethod
    def parse(cls, config: Mapping[str, Any], path: Path) -> Self:
        """From the object in the file at `path`."""
        _refuse(path, config, {"model_type": ("qwen3_vl",)})
        parts = [config.get(name) for name in ("text_config", "vision_config")]
        language, vision = (dict(part) if isinstance(part, Mapping) else {} for part in parts)
        _refuse(path, language, {"hidden_act": ("silu",), "attention_bias": (False,)})
        _refuse(path, vision, {"hidden_act": ("gelu_pytorch_tanh",)})
        for part, rope_type in ((language, "default"), (vision, "axial")):
            rotary = part.get("rope_parameters") or part.get("rope_scaling") or {}
            if not isinstance(rotary, Mapping):
                raise CheckpointError(f"{path}: rope_parameters is no object")
            _refuse(path, rotary, {"rope_type": (rope_type,), "mrope_interleaved": (True,)})
            part |= rotary
        return cls(
            LanguageConfig(**_pick(LanguageConfig, path, language)), VisionConfig(**_pick(VisionConfig, path, vision))
        )


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """`model_index.json`. `sample_sigmas` is the sigma grid that distilled checkpoints ship with. A checkpoint may
    also name its own `num_inference_steps` and `output_resolution` (pixels along a side of a square picture)."""

    sample_sigmas: tuple[float, ...] | None = None
    num_inference_steps: int = DEFAULT_NUM_STEPS
    output_resolution: int = DEFAULT_RESOLUTION_PX

    @property
    def default_num_steps(self) -> int:
        return len(self.sample_sigmas) if self.sample_sigmas else self.num_inference_steps

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / "model_index.json"
        config = read_json(path)
        if config.get("_class_name") != PIPELINE_CLASS:
            raise CheckpointError(f"{path}: _class_name is {config.get('_class_name')!r}, expected {PIPELINE_CLASS!r}")
        return cls(**_pick(cls, path, config))


@dataclass(frozen=True, slots=True)
class CheckpointConfigs:
    """The configs of a checkpoint folder; cheap to read, no weights."""

    folder: Path
    index: ModelIndex
    transformer: TransformerConfig
    vae: VaeConfig
    scheduler: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        index = ModelIndex.read(folder)
        scheduler_path = folder / "scheduler" / "scheduler_config.json"
        scheduler = read_json(scheduler_path)
        _refuse(scheduler_path, scheduler, {"_class_name": (SCHEDULER_CLASS,)})
        configs = cls(
            folder=folder,
            index=index,
            transformer=TransformerConfig.read(folder / "transformer"),
            vae=VaeConfig.read(folder / "vae"),
            scheduler=scheduler,
        )
        if configs.vae.z_dim != configs.transformer.in_channels:
            raise CheckpointError(
                f"{folder}: the VAE has {configs.vae.z_dim} latent channels, "
                f"the transformer takes {configs.transformer.in_channels}"
            )
        return configs

    @property
    def px_per_token(self) -> int:
        return self.vae.spatial_ratio

    @property
    def size_multiple_px(self) -> int:
        """Sides of generated pictures are multiples of this."""
        return SLOT_SIDE_TOKENS * self.px_per_token
