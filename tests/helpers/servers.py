"""A scripted OpenAI-compatible server with faults."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted(ThreadingHTTPServer):
    """Answers the first, second, … request of a prompt by the steps of its script; later ones by an echo."""

    daemon_threads = True

    def __init__(self, script: dict[str, list], healthy_after: int = 0, health: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.healthy_after, self.health = script, healthy_after, health
        self.asked: dict[str, int] = defaultdict(int)
        self.headers_seen: list[dict[str, str]] = []
        self.spans = []  # (arrival, answer) times of each request
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, body: object, **headers: str) -> None:
        if self.command == "POST" and hasattr(self.server, "spans"):
            self.server.spans.append((self.began, time.monotonic()))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.asked[self.path] += 1
            count = self.server.asked[self.path]
        if self.path == "/health" and not self.server.health:
            return self.send(404, {})
        self.send(200 if count > self.server.healthy_after else 503, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path == "/v1/chat/completions"
        prompt = request["messages"][-1]["content"] if chat else request["prompt"]
        server = self.server
        with server.lock:
            server.asked[prompt] += 1
            server.headers_seen.append({k.lower(): v for k, v in self.headers.items()})
            self.began = time.monotonic()
            steps = server.script.get(prompt, [])
            step = steps[server.asked[prompt] - 1] if server.asked[prompt] <= len(steps) else None
        if step is not None:
            return step(self)
        text = f"{prompt}!"
        choice = {"message": {"content": text}} if chat else {"text": text}
        self.send(200, {"choices": [{**choice, "finish_reason": "length" if prompt == "long" else "stop"}]})


def status(code: int, body: object = None, **headers: str):
    return lambda handler: handler.send(code, body if body is not None else {"error": {"message": "no"}}, **headers)


def half_closed(handler: Handler) -> None:
    """Announce more bytes than are sent, then close the connection."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def silent(handler: Handler) -> None:
    time.sleep(3.0)
    handler.close_connection = True
