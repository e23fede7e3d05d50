"""Environments of an OpenEnv server, `--env ws://host:port`, over its WebSocket.

The server keeps an environment for each connection. Where an action is a single text, the policy's text is the action;
else the policy acts by a tool `act`, whose parameters are the action's fields. A row's column `options` goes to
`reset`, beside the seed.

An action that does not fit the server's schema is an observation; all other errors of the server are faults.

Left out: servers whose actions are calls of the Model Context Protocol (`--mcp` speaks to those), and frames that are
compressed.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.tool_env import WrongCall, arguments_of, as_content, error_text, result_message
from lightrlhf.generation.episode_env import Answer, Json, Message

WRONG_ACTION = "VALIDATION_ERROR"  # the code of the server's refusals of an action
REMEDIES = {"CAPACITY_REACHED": "; lower --env_workers, or raise the server's max_concurrent_envs"}
LONGEST_FRAME = 2**26  # bytes


class OpenEnv:
    """The environment of a connection. Raises: UsageError when the server cannot be reached."""

    gives_reward = True
    has_outcome = False
    is_stateless = False

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            schema = action_schema(url)
            self.socket = WebSocket(url)
        except (OSError, ValueError) as problem:
            raise UsageError(f"--env {url}: {problem}") from None
        fields = schema["properties"]
        is_text = len(fields) == 1 and next(iter(fields.values())).get("type") == "string"
        self.field = next(iter(fields)) if is_text else None
        self.has_reward = False
        self.tools: list[Json] | None = None if is_text else [tool_of(schema)]

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        self.has_reward = False
        data, problem = self._ask("reset", {"seed": seed, **(row.get("options") or {})})
        if problem:
            raise ValueError(problem)
        return [{"role": "user", "content": shown(data["observation"])}]

    def step(self, reply: Message) -> Answer:
        if self.field is not None:
            text, answer = self._act({self.field: reply.get("content") or ""})
            answer.counts = {"calls": 1, **answer.counts}
            answer.messages = [{"role": "user", "content": text}]
            return answer
        calls = reply.get("tool_calls") or []
        if not calls:
            return Answer(done=True, stop_reason="answer")
        total = Answer(counts={"calls": 0})
        for call in calls:
            text, answer = self._call(call) if not total.done else ("error: the episode is over", Answer())
            total.messages.append(result_message(call, text))
            total.reward, total.done = total.reward + answer.reward, total.done or answer.done
            for name, count in {"calls": 1, **answer.counts}.items():
                total.counts[name] = total.counts.get(name, 0) + count
        return total

    def finish(self, stop_reason: str) -> float | None:
        return 0.0 if self.has_reward else None  # rewards came with the turns

    def close(self) -> None:
        self.socket.close()

    def _call(self, call: Json) -> tuple[str, Answer]:
        """The text and the answer of a call."""
        try:
            if call["function"]["name"] != "act":
                raise WrongCall("unknown_tools", f"no tool {call['function']['name'][:60]}; there is act")
            return self._act(arguments_of(call["function"]))
        except WrongCall as problem:
            return error_text(problem), Answer(counts={"failed_calls": 1, problem.kind: 1})

    def _act(self, action: Json) -> tuple[str, Answer]:
        """The observation after an action, and the answer without it."""
        data, problem = self._ask("step", action)
        if problem:
            return f"error: {problem}", Answer(counts={"failed_calls": 1, "wrong_arguments": 1})
        reward = data.get("reward")
        self.has_reward |= reward is not None
        return shown(data["observation"]), Answer(reward=0.0 if reward is None else reward, done=bool(data.get("done")))

    def _ask(self, kind: str, data: Json) -> tuple[Json, str]:
        """What the server answers, or why it refuses the action. Raises: OSError or ValueError for any other error."""
        with suppress(OSError):  # a server that has left may have told why
            self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.socket.receive())
        if answer["type"] != "error":
            return answer["data"], ""
        told = answer["data"]
        if kind == "step" and told.get("code") == WRONG_ACTION:
            places = [(".".join(map(str, one.get("loc", ()))), one.get("msg")) for one in told.get("errors") or []]
            return {}, f"{told.get('message')}: {', '.join(f'{place} {text}' for place, text in places)[:300]}"
        raise ValueError(f"the server says: {told.get('code')} {told.get('message')}{REMEDIES.get(told['code'], '')}")


def action_schema(url: str) -> Json:
    """The schema of an action without its metadata, as the server tells it. Raises: OSError or ValueError."""
    import httpx2

    parts = urlsplit(url)
    place = f"{'https' if parts.scheme == 'wss' else 'http'}://{parts.netloc}/schema"
    try:
        schema = httpx2.get(place, timeout=30.0).raise_for_status().json()["action"]
    except httpx2.HTTPError as problem:
        raise ConnectionError(f"{place}: {problem}") from None
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    if not fields:
        raise ValueError("its actions have no fields")
    return {**schema, "properties": fields}


def tool_of(schema: Json) -> Json:
    """The tool by which a policy acts."""
    parameters = {"type": "object", "properties": schema["properties"], "required": schema.get("required", [])}
    parameters |= {name: schema[name] for name in ["$defs"] if name in schema}
    function = {"name": "act", "description": "Act in the environment.", "parameters": parameters}
    return {"type": "function", "function": function}


def shown(observation: Json) -> str:
    """An observation's only text, or all its fields."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(fields) == 1 else as_content(fields)


class WebSocket:
    """A connection of RFC 6455 for texts. Raises: OSError when it is lost.

    A thread reads it, so that pings are answered while no call waits: servers leave clients that do not.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "wss" else 80)
        self.socket = socket.create_connection((parts.hostname or "", port), timeout=30.0)
        if parts.scheme == "wss":
            self.socket = ssl.create_default_context().wrap_socket(self.socket, server_hostname=parts.hostname)
        self.file = self.socket.makefile("rb")
        lines = [
            f"GET {parts.path.rstrip('/') or '/ws'} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            "Sec-WebSocket-Version: 13",
        ]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        status = self.file.readline(1000)
        while self.file.readline(10_000).strip():
            pass
        if b" 101 " not in status:
            raise ConnectionError(f"it is not a WebSocket: {status.decode('latin-1').strip() or 'no answer'}")
        self.socket.settimeout(None)  # the pool limits each call
        self.lock = threading.Lock()  # of what writes a frame
        self.texts: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, text: str) -> None:
        self._write(text.encode(), opcode=1)

    def receive(self) -> str:
        """The next text. Raises: OSError or ValueError."""
        text = self.texts.get()
        if isinstance(text, Exception):
            self.texts.put(text)  # for the next call, too
            raise text
        return text

    def close(self) -> None:
        with suppress(OSError):
            self._write(b"", opcode=8)
            self.socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        """Queue each text, and at last why there are no more."""
        with self.socket, self.file:
            try:
                while True:
                    self.texts.put(self._next())
            except (OSError, ValueError) as problem:
                self.texts.put(problem)

    def _next(self) -> str:
        """The next text; answers pings."""
        text = b""
        while True:
            first, second = self._read(2)
            size = second & 127
            if size > 125:
                (size,) = struct.unpack(">H" if size == 126 else ">Q", self._read(2 if size == 126 else 8))
            if size + len(text) > LONGEST_FRAME:
                raise ConnectionError(f"the server sent more than {LONGEST_FRAME} bytes")
            data, opcode = self._read(size), first & 15
            if opcode == 8:
                raise ConnectionError("the server closed the connection")
            if opcode == 9:
                self._write(data, opcode=10)
            elif opcode < 8:
                text += data
                if first & 128:
                    return text.decode()

    def _read(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise ConnectionError("the connection was lost")
        return data

    def _write(self, data: bytes, opcode: int) -> None:
        """Send one frame, masked as a client must."""
        size, mask = len(data), os.urandom(4)
        head = bytes([128 | opcode, 128 | (size if size < 126 else 126 if size < 2**16 else 127)])
        head += b"" if size < 126 else struct.pack(">H" if size < 2**16 else ">Q", size)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        with self.lock:
            self.socket.sendall(head + mask + masked)
