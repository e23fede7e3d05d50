"""Serving an ASGI app by uvicorn at a socket that is bound already."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


class Server(uvicorn.Server):
    """A uvicorn server that says when it is ready and leaves signals to the program."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self.ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Change nothing: uvicorn would wait for requests that run."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer, then print the line."""
        await super().startup(sockets)
        print(self.ready, flush=True)


def serve(app: ASGIApp, listener: socket.socket, ready: str) -> None:
    """Answer requests at a bound socket; prints `ready` once they are answered."""
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="warning", access_log=False
    )
    Server(config, ready).run(sockets=[listener])
