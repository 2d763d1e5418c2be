"""Pictures in a conversation."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.bodies import JSON, media_type_of, read_body
from app.chat import ChatRequest, order_of, warnings_of
from app.chat_answers import ChatAnswer, ChatCompletion, ChatCompletionChunk
from app.dependencies import Counted, CountingDep, ServicesDep
from app.disconnect import unless_disconnected
from app.openapi import ERROR_RESPONSES, data_event, error_event, event_stream, request_body, schema_of
from app.orders import take_order
from app.streaming import EventStream

router = APIRouter(prefix="/v1/chat", tags=["chat"], responses=ERROR_RESPONSES, dependencies=[Counted])


@router.post(
    "/completions",
    response_model=ChatCompletion,
    responses={
        200: {
            "description": "The pictures: at once, or in chunks with `stream`, closed by `[DONE]`.",
            "content": event_stream(data_event(schema_of(ChatCompletionChunk)), error_event()),
        }
    },
    openapi_extra=request_body(json=schema_of(ChatRequest)),
)
async def chat_completion(request: Request, services: ServicesDep, counting: CountingDep) -> Response:
    """Draw what the last user message asks for, from its images, or else from the assistant's last picture."""
    settings = services.settings
    media_type_of(request, JSON)
    body = await read_body(request, settings.max_body_bytes)
    chat, fields, sources = await asyncio.to_thread(order_of, body, keep_unknown=services.keeps_unknown)
    order = await take_order(request, fields, sources, services)
    answer = ChatAnswer(
        order,
        settings.chat_content,
        [*warnings_of(chat), *order.warnings],
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        heartbeat_s=settings.heartbeat_seconds,
        metrics=services.metrics,
    )
    drawing = await order.admit()
    if chat.stream:
        counting.postpone()
        return EventStream(answer.chunks(drawing), drawing.close, counting)
    async with drawing:
        result = await unless_disconnected(request.receive, drawing.result())
    content, file_s = await asyncio.to_thread(answer.whole, result)
    services.metrics.delivered(result, file_s)
    return Response(content, media_type=JSON)
