"""Every setting of the service, and the only place that reads the environment.

One model serves four sources, first wins: a flag of `easel serve`, an `EASEL_…` variable, the YAML file named by
`config`, the default. A name that none of them knows is an error, whichever source it stands in: a misspelled limit
must not leave the service unlimited. A list is comma-separated in a flag or a variable, a plain list in YAML.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.logs import LogFormat
from engine.config import EngineConfig
from models.precision import Precision

ENV_PREFIX = "EASEL_"
ContentShape = Literal["text", "markdown", "parts"]


class SettingsError(ValueError):
    """A setting is unknown or has a value that can't be used; the message is for the operator."""


def split_commas(value: object) -> object:
    """Turn the text form of a list, `a,b`, into the list; anything else is left to the field's own validation."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def pixels_of(size: str) -> tuple[int, int]:
    """Width and height of `WxH`."""
    width, height = size.split("x")
    return int(width), int(height)


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
Sizes = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[1-9]\d{1,3}x[1-9]\d{1,3}$")], ...], NoDecode, BeforeValidator(split_commas)
]
Origins = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^\s/?#]+)$")], ...], NoDecode, BeforeValidator(split_commas)
]
HOST_PATTERN = r"(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\])"
HostPatterns = Annotated[
    tuple[Annotated[str, Field(pattern=rf"^{HOST_PATTERN}(:[1-9]\d{{0,4}})?$")], ...],
    NoDecode,
    BeforeValidator(split_commas),
]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(split_commas)]


class Settings(BaseSettings):
    """What an operator can choose. The descriptions are the text of `--help`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    config: Path | None = Field(None, description="YAML file that sets any of these, under the same names.")

    model: Name | None = Field(None, description="Checkpoint folder or hub id; unset means the embedded demo model.")
    served_model_name: Name | None = Field(
        None, description="Name that clients ask for; unset means the checkpoint's own."
    )
    model_aliases: Names = Field(
        ("gpt-image-1", "gpt-image-1-mini", "gpt-image-1.5", "dall-e-2", "dall-e-3"),
        description="Further names that mean the served model, for clients that hard-code one.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N; auto prefers a GPU."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Weight type; auto is bfloat16 on a GPU and float32 on the CPU."
    )
    transformer_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="fp8 keeps the transformer's weights in 8 bits; auto as the checkpoint has them."
    )
    text_encoder_dtype: Literal["auto", "fp8"] = Field("auto", description="The same for the text encoder.")
    prefix_kv_dtype: Literal["auto", "fp8", "fp8_v"] = Field(
        "auto", description="fp8 keeps what is cached of prompts and input images in 8 bits, fp8_v a half of it."
    )
    fp8_ignored_layers: Names = Field(
        (), description="Layers that stay out of fp8: parts of published names, like img_mlp, or patterns with *."
    )
    fp8_first_blocks: int = Field(0, ge=0, description="First transformer blocks that stay out of fp8.")
    fp8_last_blocks: int = Field(0, ge=0, description="Last transformer blocks that stay out of fp8.")
    fp8_first_steps: int = Field(
        0, ge=0, description="First steps of a picture without fp8; keeps the transformer a second time."
    )
    fp8_last_steps: int = Field(0, ge=0, description="Last steps of a picture without fp8, in the same way.")
    decode_graphs: bool = Field(
        True, description="Whether denoise steps and short prefills are captured as CUDA graphs and replayed."
    )
    eager: bool = Field(False, description="Whether to do without fused kernels and graphs on a GPU, to debug.")
    vae_tiling: Literal["auto", "on", "off"] = Field(
        "auto", description="Whether the VAE works in 512-pixel tiles; auto does so where the whole does not fit."
    )
    offload: Literal["none", "component", "block"] = Field(
        "none", description="Whether weights wait in host memory: whole networks, or the blocks of each as well."
    )
    warm_sizes: Sizes = Field((), description="Sizes, like 1536x1024, that are prepared for before it is ready.")

    host: Name = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 means all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: Secrets = Field((), description="Key that clients must send; several are all valid, none means open.")
    metrics_open: bool = Field(False, description="Whether /metrics can be read without a key when keys are set.")
    cors_origin: Origins = Field(
        (), description="Origin, like https://a.example, whose pages may call this service; * means all."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: LogFormat = Field("text", description="json logs one object a line, for a collector.")

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s?#]+$")] | None = Field(
        None,
        validation_alias=AliasChoices("otlp_endpoint", ENV_PREFIX + "OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        description="Collector for traces, OTLP over HTTP; also OTEL_EXPORTER_OTLP_ENDPOINT. Needs the extra otel.",
    )

    worker: Literal["process", "inline"] = Field(
        "process", description="Where the model runs: a process that is replaced when it dies, or a thread, to debug."
    )
    policy: Literal["shortest", "fcfs"] = Field(
        "shortest", description="Who goes first: the request with the least work left, or the one that came first."
    )
    max_stretch: float = Field(
        10.0, ge=1, allow_inf_nan=False, description="A request goes first after this many times its own run time."
    )
    hang_timeout_seconds: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="Silence after which a worker that has work is replaced."
    )
    max_queue: int = Field(64, ge=1, description="Requests admitted and unfinished before new ones get 429.")
    max_batch_rows: int = Field(8, ge=1, description="Rows (one guidance branch of one image) in a batch.")
    default_num_steps: int | None = Field(
        None, ge=1, le=200, description="Denoise steps when a request names none; unset means the checkpoint's."
    )
    default_resolution: int | None = Field(
        None, ge=32, le=4096, description="Resolution when a request names none; unset means the checkpoint's."
    )

    max_image_bytes: int = Field(20 * 2**20, ge=1, description="Largest input image file, in bytes.")
    allow_fetch: HostPatterns = Field(
        (),
        description="Host whose http(s) image URLs are fetched: a name, *.name for what is below it, or * for any, and "
        ":port for one besides 80 and 443. Addresses that are not public never are.",
    )
    max_body_bytes: int = Field(
        112 * 2**20, ge=1, description="Largest request body, in bytes: four of the largest images as data URLs fit."
    )
    max_bodies_bytes: int = Field(2**30, ge=1, description="Most bytes of the bodies of all requests under way.")
    max_image_pixels: int = Field(40_000_000, ge=1, description="Most pixels of an input image.")
    min_side: int = Field(64, ge=1, description="Shortest side of an output image, in pixels.")
    max_side: int = Field(4096, ge=1, description="Longest side of an output image, in pixels.")
    max_output_pixels: int = Field(2048 * 2048, ge=1, description="Most pixels of an output image.")
    max_aspect: float = Field(8.0, ge=1, description="Longest side of an output image over its shortest.")
    max_pixel_steps: int = Field(
        1_000_000_000, ge=1, description="Most work in one request: images times steps times output pixels."
    )
    unknown_fields: Literal["error", "warn"] = Field(
        "error", description="Whether a request field that nobody knows is refused or only named in warnings."
    )
    chat_content: ContentShape = Field(
        "text",
        description="Form of `content` in chat: a short text, the picture as Markdown, or parts.",
    )
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s?#]+$")] | None = Field(
        None, description="Address of this service in links to pictures; unset means the one that the client used."
    )
    link_seconds: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="Time for which a link to a picture holds."
    )
    link_store_bytes: int = Field(
        512 * 2**20, ge=1, description="Memory for the pictures behind links; the oldest give way to new ones."
    )
    job_seconds: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="Time for which the answer to a background job is kept."
    )
    max_jobs: int = Field(100, ge=1, description="Finished background jobs whose answers are kept.")
    job_store_bytes: int = Field(
        512 * 2**20, ge=1, description="Memory for the answers to background jobs; the oldest give way to new ones."
    )
    request_seconds: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="Time for a request's head, and between parts of its body."
    )
    answer_seconds: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="Time after which a client that does not take its answer is cut off.",
    )
    heartbeat_seconds: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="A stream with nothing to tell sends a comment this often."
    )
    drain_seconds: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="Time that running requests get to finish at shutdown."
    )

    @field_validator("model_aliases")
    @classmethod
    def _drop_empty_aliases(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name)  # so that an empty text means no alias

    @field_validator("api_key")
    @classmethod
    def _refuse_empty_key(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(key.get_secret_value() for key in keys):
            raise ValueError("a key is empty")  # an unset variable upstream, most likely: never read it as "no key"
        return keys

    @model_validator(mode="after")
    def _check_bodies(self) -> Settings:
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes ({self.max_bodies_bytes}) is less than max_body_bytes ({self.max_body_bytes})"
            )
        return self

    @model_validator(mode="after")
    def _check_sides(self) -> Settings:
        if self.min_side > self.max_side:
            raise ValueError(f"min_side ({self.min_side}) is greater than max_side ({self.max_side})")
        if self.min_side**2 > self.max_output_pixels:
            raise ValueError(f"max_output_pixels ({self.max_output_pixels}) is less than min_side squared")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources; called for each new object, so the YAML file is the one this object's `config` names."""
        refuse_unknown_variables()
        config = init_settings().get("config") or env_settings().get("config")
        yaml_settings = InitSettingsSource(settings_cls, read_yaml(Path(config)) if config else {})
        return init_settings, env_settings, yaml_settings

    def engine_config(self) -> EngineConfig:
        """The part of the settings that the engine is built from."""
        from models.folder import embedded_checkpoint

        return EngineConfig(
            model=self.model or str(embedded_checkpoint()),
            device=self.device,
            dtype=self.dtype,
            worker=self.worker,
            decode_graphs=self.decode_graphs,
            eager=self.eager,
            vae_tiling=self.vae_tiling,
            offload=self.offload,
            warm_sizes_px=tuple(pixels_of(size) for size in self.warm_sizes),
            precision=Precision(
                transformer=self.transformer_dtype,
                text_encoder=self.text_encoder_dtype,
                prefix_kv=self.prefix_kv_dtype,
                ignored_layers=self.fp8_ignored_layers,
                first_blocks=self.fp8_first_blocks,
                last_blocks=self.fp8_last_blocks,
                first_steps=self.fp8_first_steps,
                last_steps=self.fp8_last_steps,
            ),
            policy=self.policy,
            max_stretch=self.max_stretch,
            hang_timeout_s=self.hang_timeout_seconds,
            max_output_pixels=self.max_output_pixels,
            max_queue=self.max_queue,
            max_batch_rows=self.max_batch_rows,
            default_num_steps=self.default_num_steps,
            default_resolution_px=self.default_resolution,
        )


def refuse_unknown_variables() -> None:
    """Raise `SettingsError` for an `EASEL_…` variable that sets nothing."""
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    unknown = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise SettingsError(f"unknown environment variable: {', '.join(unknown)}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises `SettingsError`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"config: can't read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"config: {path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingsError(f"config: {path} does not hold a mapping of settings")
    return content


def load_settings(**flags: object) -> Settings:
    """Settings from all sources, `flags` first. Raises `SettingsError` with one line for each fault."""
    try:
        return Settings(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("\n".join(fault_line(fault["loc"], fault["msg"]) for fault in error.errors())) from error


def fault_line(location: tuple[int | str, ...], message: str) -> str:
    """One fault as `name: what is wrong`. Never the value: it may be a key."""
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    if location[0] not in Settings.model_fields:
        return f"{location[0]}: there is no such setting"
    return f"{location[0]}: {message}"
