"""Serving an ASGI app by uvicorn at a socket that is bound already.

Connections that ask nothing cost a file each, and a process without files answers no client. So their number is
limited: a new one closes the oldest that waits for a request or has sent only a part of its head.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 1024
SPARE_FILES = 128  # of the process, for its own work and what is accepted at a time
ACCEPTED, BACKLOG = 32, 2048  # connections that are accepted before any is looked at, and those that the system keeps
SECONDS_FOR_HEAD = 30.0  # from the connection to a whole head


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
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has one number for both
        print(self.ready, flush=True)


def limited(most: int) -> type[H11Protocol]:
    """A protocol with at most `most` open connections."""
    opened: dict[Any, None] = {}  # the oldest first

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            opened[self] = None
            self.loop.call_later(SECONDS_FOR_HEAD, self.close_without_head)
            if len(opened) > most:
                oldest = next((one for one in opened if one.is_idle()), self)
                oldest.close()

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            super().connection_lost(exc)

        def is_idle(self) -> bool:
            """Whether no request of it is answered at the moment."""
            return self.cycle is None or self.cycle.response_complete

        def close_without_head(self) -> None:
            if self.cycle is None:
                self.close()

        def close(self) -> None:
            opened.pop(self, None)
            self.transport.abort()

    return Protocol


def most_connections() -> int:
    """Connections to keep open, by the files that the process may have, as many as the system allows."""
    try:
        import resource
    except ImportError:  # on Windows
        return MOST_CONNECTIONS
    wanted, files = MOST_CONNECTIONS + SPARE_FILES, resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(files)
    if resource.RLIM_INFINITY != soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(files, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
        return max(min(wanted, resource.getrlimit(files)[0]) - SPARE_FILES, 1)
    return MOST_CONNECTIONS


def serve(app: ASGIApp, listener: socket.socket, ready: str) -> None:
    """Answer requests at a bound socket; prints `ready` once they are answered."""
    protocol = limited(most_connections())
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False}
    config = uvicorn.Config(app, loop="asyncio", http=protocol, backlog=ACCEPTED, **options)
    Server(config, ready).run(sockets=[listener])
