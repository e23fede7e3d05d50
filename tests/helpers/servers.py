"""A scripted OpenAI-compatible server with faults."""

import contextlib
import json
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

from lightrlhf.cli.patience import REQUEST, SERVER


def wait_at_most(request: float, server: float) -> None:
    """Let programs wait so many seconds for an answer, and for a server, until the test ends."""
    os.environ.update({REQUEST: str(request), SERVER: str(server)})


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
        if not hasattr(self.server, "healthy_after"):
            return self.send(200, {})
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


@contextlib.contextmanager
def answering(server: HTTPServer) -> Iterator[str]:
    """Context manager: the address of a server that answers in a thread of this process."""
    with server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()


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


# ----------------------------------------------------------------------------------------------------------- raw bytes
def reply(content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> bytes:
    """A response as bytes, on a connection that stays open."""
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


class RawServer:
    """A server on a socket that sends what its script says, byte for byte, whatever HTTP thinks of it.

    script: by the last text of a request (or "", any) what its first, second, … attempt gets: bytes, or bytes and
    pauses in seconds. Later ones get the text and "!". An empty answer closes the connection.
    """

    def __init__(self, script: dict[str, list]) -> None:
        self.script, self.asked, self.lock = script, defaultdict(int), threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def __enter__(self) -> "RawServer":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while first := lines.readline():
                    headers = dict(
                        line.decode().lower().strip().split(": ", 1) for line in iter(lines.readline, b"\r\n")
                    )
                    content = lines.read(int(headers.get("content-length", 0)))
                    if not self._answer(connection, first, content):
                        connection.shutdown(socket.SHUT_RDWR)
                        return
            except OSError:
                return  # the client has gone

    def _answer(self, connection: socket.socket, first: bytes, content: bytes) -> bool:
        """Send one answer; returns whether the connection stays open."""
        if first.startswith(b"GET"):
            connection.sendall(reply(b"{}"))
            return True
        if not content:  # the client has gone
            return False
        request = json.loads(content)
        chat = "messages" in request
        text = request["messages"][-1]["content"] if chat else request["prompt"]
        key = text if text in self.script else ""
        with self.lock:
            self.asked[key] += 1
            steps = self.script.get(key, [])
            step = steps[self.asked[key] - 1] if self.asked[key] <= len(steps) else None
        if step is None:
            said = {"message": {"role": "assistant", "content": f"{text}!"}} if chat else {"text": f"{text}!"}
            step = reply(json.dumps({"choices": [{**said, "index": 0, "finish_reason": "stop"}]}).encode())
        for part in step if isinstance(step, list) else [step]:
            if isinstance(part, float):
                time.sleep(part)
            else:
                connection.sendall(part)
        return (
            isinstance(step, bytes)
            and step.startswith(b"HTTP/1.1")
            and b"Content-Length: 9999" not in step[:90]
            and (b"\r\n\r\n" in step and b"chunked" not in step[:90])
        )


# ------------------------------------------------------------------------------------------------------ rollout servers
def right_ids(prompt: list[int], choice: int, count: int) -> list[int]:
    """The response of a fake rollout server, known without a model: it depends on the prompt and its number among n."""
    return [3 + (sum(prompt) + 7 * choice + 3 * place) % 40 for place in range(count)]


class FakeVLLM(RawServer):
    """vLLM's routes with answers that are computed from the ids; its record is what a client can be held against.

    script: by route what its first, second, … request gets in place of the right answer: bytes, bytes and pauses, None
    for the right one, or a function of (this server, the request, the right answer) that returns one of these or a new
    answer, and may wait. asked: the requests of each route.
    """

    name = "0.32.0"
    served = "tiny"

    def __init__(self, script: dict[str, list] | None = None, **settings: object) -> None:
        super().__init__(script or {})
        self.url = self.url.removesuffix("/v1")
        self.settings = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 64}
        self.settings |= settings
        self.version, self.is_paused, self.adapters = "default", False, {}
        self.bodies: dict[str, list] = defaultdict(list)

    def _answer(self, connection: socket.socket, first: bytes, content: bytes) -> bool:
        """Send one answer; returns whether the connection stays open: never, as clients ask once on each."""
        path = first.split()[1].decode().partition("?")[0]
        try:
            body = json.loads(content or b"null")
        except ValueError:
            return False
        with self.lock:
            self.bodies[path].append(body)
            count = len(self.bodies[path])
            steps = self.script.get(path, [])
            step = steps[count - 1] if count <= len(steps) else None
            right = self.right(path, body) if step is None or callable(step) else None
        if callable(step):
            step = step(self, body, right)
        else:
            step = right if step is None else step
        if not isinstance(step, bytes | list) or (isinstance(step, list) and not isinstance(step[0], bytes)):
            step = reply(json.dumps(step).encode(), {"Content-Type": "application/json"})
        for part in step if isinstance(step, list) else [step]:
            if isinstance(part, float):
                time.sleep(part)
            else:
                connection.sendall(part)
        return False

    def right(self, path: str, body: dict) -> object:
        """What a server in order answers, and does."""
        if path == "/health":
            return {}
        if path == "/version":
            return {"version": self.name}
        if path == "/v1/models":
            adapters = [{"id": name, "root": root, "parent": self.served} for name, root in self.adapters.items()]
            return {"data": [*adapters, {"id": self.served, "root": "/m", "parent": None}]}
        if path == "/server_info":
            return {"vllm_config": {"model_config": self.settings}}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        elif path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        elif path == "/is_paused":
            return {"is_paused": self.is_paused}
        elif path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/v1/completions":
            return self.completions(body)
        elif path not in ("/collective_rpc", "/reset_prefix_cache", "/sleep", "/wake_up"):
            return reply(b'{"detail": "Not Found"}', status=404)
        return {"success": True}

    def completions(self, body: dict) -> dict:
        """The answer to a request of completions."""
        choices = []
        for prompt in body["prompt"]:
            for number in range(body["n"]):
                ids = right_ids(prompt, number, body["max_tokens"])
                values = {"token_logprobs": [-token / 8 for token in ids]}
                choices.append({"index": len(choices), "token_ids": ids, "logprobs": values, "text": ""})
                choices[-1] |= {"finish_reason": "length", "prompt_token_ids": prompt}
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": choices}
