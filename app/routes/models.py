"""The one model, as OpenAI lists it, with a card that says what it can do."""

from __future__ import annotations

from typing import Literal, get_args

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app.dependencies import EngineDep, SettingsDep
from app.errors import ErrorBody
from app.images import OutputFormat
from app.multipart import MAX_IMAGES
from app.params import check_model, served_name
from app.schemas import MAX_IMAGES_OUT, MAX_PARTIAL_IMAGES, MAX_PROMPT_CHARS
from app.settings import Settings
from engine.engine import Engine

router = APIRouter(tags=["models"], responses={404: {"model": ErrorBody}, 503: {"model": ErrorBody}})


class SizeLimits(BaseModel):
    min_side: int
    max_side: int
    max_pixels: int
    max_aspect: float
    native_multiple: int


class Capabilities(BaseModel):
    """`fixed_num_steps`: the checkpoint has its own steps, and a request's count has no effect."""

    max_images: int
    max_input_images: int
    sizes: SizeLimits
    default_resolution: int
    default_num_inference_steps: int
    fixed_num_steps: bool
    default_true_cfg_scale: float
    max_prompt_chars: int
    max_prompt_tokens: int
    output_formats: list[str]
    response_formats: list[str] = ["b64_json", "url"]
    max_partial_images: int = MAX_PARTIAL_IMAGES
    needs_api_key: bool
    endpoints: list[str] = ["/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "easel"
    aliases: list[str]
    capabilities: Capabilities


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def list_models(request: Request, settings: SettingsDep, engine: EngineDep) -> ModelList:
    return ModelList(data=[describe(settings, engine, request.app.state.created)])


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request, settings: SettingsDep, engine: EngineDep) -> Model:
    check_model(model, settings)
    return describe(settings, engine, request.app.state.created)


def describe(settings: Settings, engine: Engine, created: int) -> Model:
    card = engine.card
    return Model(
        id=served_name(settings),
        created=created,
        aliases=list(settings.model_aliases),
        capabilities=Capabilities(
            max_images=MAX_IMAGES_OUT,
            max_input_images=min(MAX_IMAGES, card.max_condition_images),
            sizes=SizeLimits(
                min_side=settings.min_side,
                max_side=settings.max_side,
                max_pixels=settings.max_output_pixels,
                max_aspect=settings.max_aspect,
                native_multiple=card.size_multiple_px,
            ),
            default_resolution=card.default_resolution_px,
            default_num_inference_steps=card.default_num_steps,
            fixed_num_steps=card.fixed_num_steps,
            default_true_cfg_scale=1.0,
            max_prompt_chars=MAX_PROMPT_CHARS,
            max_prompt_tokens=card.max_prompt_tokens,
            output_formats=list(get_args(OutputFormat)),
            needs_api_key=bool(settings.api_key),
        ),
    )
