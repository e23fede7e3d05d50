"""A forwarder between a client and a server that may change what passes, as a server with a fault would."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from safetensors.torch import load_file, save_file

from helpers.processes import PATIENCE


class Answer(NamedTuple):
    """What a server says."""

    status: int
    body: Any  # JSON, or bytes


class Faults:
    """Nothing is changed; subclasses override some methods."""

    def route(self, path: str) -> str:
        """The path that is asked in place of a request's."""
        return path

    def asked(self, path: str, body: Any) -> Any:
        """What is passed on in place of a request's body; an `Answer` is given without asking the server."""
        return body

    def answered(self, path: str, answer: Answer) -> Answer:
        """What is given in place of the server's answer."""
        return answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults
    target: str

    def log_message(self, *_: object) -> None:
        pass

    def forward(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = self.faults.asked(self.path, json.loads(sent) if sent else None)
        answer = body if isinstance(body, Answer) else self.faults.answered(self.path, self.pass_on(body))
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/plain" if isinstance(answer.body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def pass_on(self, body: Any) -> Answer:
        headers = {name: self.headers[name] for name in ("Authorization",) if name in self.headers}
        url = self.target + self.faults.route(self.path)
        response = httpx2.request(self.command, url, json=body, headers=headers, timeout=PATIENCE)
        try:
            return Answer(response.status_code, response.json())
        except ValueError:
            return Answer(response.status_code, response.content)

    do_GET = do_POST = forward


@contextlib.contextmanager
def forwarding(target: str, faults: Faults) -> Iterator[str]:
    """Context manager: the address of a forwarder to the server at `target`."""
    handler = type("Forwarder", (Handler,), {"faults": faults, "target": target})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(PATIENCE)


# -------------------------------------------------------------------------------------------------------------- faults
class StaleCache(Faults):
    """A cache of prefixes that says it is reset, and is not, with one salt for all weights."""

    def route(self, path: str) -> str:
        return f"{path}&clear_cache=false" if path.startswith("/pause?") else path

    def asked(self, path: str, body: Any) -> Any:
        if path == "/reset_prefix_cache":
            return Answer(200, {"success": True})
        if path == "/v1/completions" and "prompt_logprobs" not in body:  # those are always computed anew
            return {name: value for name, value in body.items() if name != "cache_salt"}
        return body


class FirstAdapter(Faults):
    """Adapters are kept by a key that is always the same, so the first one serves all names; paths are told, too."""

    def __init__(self, tells_paths: bool) -> None:
        self.tells_paths, self.first = tells_paths, ""
        self.roots: dict[str, str] = {}

    def asked(self, path: str, body: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            self.roots[body["lora_name"]] = body["lora_path"]
            if self.first:
                return Answer(200, {})
            self.first = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            self.roots.pop(body["lora_name"])
            return Answer(200, {})
        if path == "/v1/completions" and body["model"] in self.roots:
            return body | {"model": self.first}
        return body

    def answered(self, path: str, answer: Answer) -> Answer:
        if path == "/v1/completions" and self.roots:
            return Answer(answer.status, answer.body | {"model": [*self.roots][-1]})
        if path == "/v1/models":
            data = [model for model in answer.body["data"] if not model["parent"]]
            first = next((model["root"] for model in answer.body["data"] if model["parent"]), "")
            for name, root in self.roots.items():
                data.append({"id": name, "root": first if self.tells_paths else root, "parent": data[0]["id"]})
            return Answer(answer.status, answer.body | {"data": data})
        return answer


class OtherVersion(Faults):
    """Weights whose version is another one than was set, from the `good`-th answer on."""

    def __init__(self, good: int = 0) -> None:
        self.good = good

    def answered(self, path: str, answer: Answer) -> Answer:
        if path == "/weight_info":
            self.good -= 1
            return answer if self.good >= 0 else Answer(200, {"weight_version": "another-7"})
        return answer


class OldHead(Faults):
    """A head that is tied to the embeddings, and stays as it was when these change."""

    def asked(self, path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            file = Path(body["kwargs"]["weights_path"]) / "model.safetensors"
            weights = load_file(file)
            del weights["lm_head.weight"]
            save_file(weights, file)
        return body


class NoReload(Faults):
    """Weights that are said to be loaded, and are not."""

    def asked(self, path: str, body: Any) -> Any:
        return Answer(200, {"results": [None]}) if path == "/collective_rpc" else body
