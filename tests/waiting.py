"""Waiting for what is only seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Return once `condition()` holds; give up after 20 s."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 what the other side does sets no event here
            await asyncio.sleep(0.005)
