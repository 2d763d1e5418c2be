"""The service's figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.dependencies import MetricsDep

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=Response)
async def metrics(metrics: MetricsDep) -> Response:
    return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
