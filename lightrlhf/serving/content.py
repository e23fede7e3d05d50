"""Bodies of requests."""

from __future__ import annotations

from starlette.requests import Request

from lightrlhf.serving.answers import Json
from lightrlhf.serving.bodies import Refusal, read_json

LARGEST_BODY = 64 * 2**20  # bytes; the noise of a rollout is the largest part


async def read_content(request: Request) -> bytes:
    """A body. Raises: Refusal when it is too large."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > LARGEST_BODY:
            raise Refusal(f"a body may have {LARGEST_BODY} bytes; send several requests", 413)
    return bytes(content)


async def read_body(request: Request) -> Json:
    """The JSON object in a body. Raises: Refusal when it is too large, or not one."""
    return read_json(await read_content(request))
