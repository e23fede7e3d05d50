"""Tools of a server of the Model Context Protocol, `--mcp "command with arguments"` or `--mcp http://host/mcp`.

A command's server is talked to by lines of JSON-RPC on its stdin and stdout, one of an address by POST, whose answer is
JSON or a stream of events. A server may keep state in a session, so each episode begins another one; a command is
started anew for it. The server of a command gets no keys, as the process that starts it has none.

Tools are called one after another, in the order of the calls. An error that the server answers is an observation; a
connection that is lost is a fault.

Left out: resources, prompts, sampling and questions of the server, sign-in, and contents that are not texts.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.groups.agents import check_mcp
from lightrlhf.envs.tool_env import WrongCall, arguments_of, error_text, result_message
from lightrlhf.generation.episode_env import Answer, Json, Message

VERSION = "2025-06-18"
GREETING = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "lightrlhf", "version": "1"}}
USERS_PATH = "LIGHTRLHF_USERS_PYTHONPATH"  # variable: PYTHONPATH as the user has set it, where a process has its own
NO_METHOD = {"code": -32601, "message": "this client answers no requests but ping"}


class McpEnv:
    """The tools of a server; without a reward, and with a session for each episode.

    Raises: UsageError when the server cannot be started or reached.
    """

    gives_reward = False
    is_stateless = False

    def __init__(self, server: str) -> None:
        self.server = server
        check_mcp(server, "--mcp")
        try:
            self.session = Session(server)
            self.tools = self.session.tools()
        except (OSError, ValueError, LookupError) as problem:
            raise UsageError(f"--mcp {server}: {why_lost(problem)}") from None

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        if self.session.is_used:
            self.session.close()
            self.session = Session(self.server)
        return []

    def step(self, reply: Message) -> Answer:
        calls = reply.get("tool_calls") or []
        if not calls:
            return Answer(done=True, stop_reason="answer")
        counts: Counter[str] = Counter(calls=len(calls))
        messages = []
        for call in calls:
            kind, text = self._call(call["function"])
            if kind:
                counts.update({kind: 1, "failed_calls": 1})
            messages.append(result_message(call, text))
        return Answer(messages, counts=dict(counts))

    def finish(self, stop_reason: str) -> float | None:
        return None

    def close(self) -> None:
        self.session.close()

    def _call(self, function: Json) -> tuple[str, str]:
        """The kind of failure of a call, or "", and its text."""
        known = [tool["function"]["name"] for tool in self.tools]
        try:
            if function["name"] not in known:
                raise WrongCall("unknown_tools", f"no tool {function['name'][:60]}; there is {', '.join(known)}")
            arguments = arguments_of(function)
        except WrongCall as problem:
            return problem.kind, error_text(problem)
        self.session.is_used = True
        answer = self.session.ask("tools/call", {"name": function["name"], "arguments": arguments})
        if "error" in answer:
            return "tool_errors", f"error: {answer['error'].get('message')}"
        result = answer["result"]
        parts = [part.get("text") or f"[{part.get('type')} left out]" for part in result.get("content", [])]
        return "tool_errors" if result.get("isError") else "", "\n".join(parts)


class Session:
    """A session with a server, by a command or an address; lost, it raises OSError, ValueError or LookupError."""

    def __init__(self, server: str) -> None:
        self.last_id, self.is_used = 0, False
        self.by: Pipes | Posts = Posts(server) if server.startswith(("http://", "https://")) else Pipes(server)
        answer = self.ask("initialize", GREETING)
        self.by.version = result_of(answer)["protocolVersion"]
        self.by.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def tools(self) -> list[Json]:
        """The schemas of all tools."""
        found: list[Json] = []
        cursor: Json = {}
        while True:
            page = result_of(self.ask("tools/list", cursor))
            found += page["tools"]
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return [{"type": "function", "function": schema_of(tool)} for tool in found]

    def ask(self, method: str, params: Json) -> Json:
        """The answer to a request: an object with `result` or `error`."""
        self.last_id += 1
        for message in self.by.send({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params}):
            if message.get("id") == self.last_id and ("result" in message or "error" in message):
                return message
            if "method" in message and "id" in message:  # the server asks
                known = {"result": {}} if message["method"] == "ping" else {"error": NO_METHOD}
                self.by.send({"jsonrpc": "2.0", "id": message["id"], **known})
        raise ConnectionError(f"the server gave no answer to {method}; run it by itself to see why")

    def close(self) -> None:
        self.by.close()


def why_lost(problem: BaseException) -> str:
    """Why there is no session, in one line that says what to look at."""
    if isinstance(problem, json.JSONDecodeError):
        return f"it answers {problem.doc[:60]!r}, not JSON; a server of MCP is needed"
    if isinstance(problem, LookupError):
        return f"its answer has no {problem}; a server of MCP is needed"
    if isinstance(problem, BrokenPipeError):
        return "the server has ended; run it by itself to see why"
    return first_line(problem)


def result_of(answer: Json) -> Json:
    """Raises: ValueError for an answer with an error."""
    if "error" in answer:
        raise ValueError(f"the server says: {answer['error'].get('message')}")
    return answer["result"]


def schema_of(tool: Json) -> Json:
    """A tool as chat templates take it."""
    parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": tool.get("description") or tool["name"], "parameters": parameters}


class Pipes:
    """A server that was started by a command; each message is a line."""

    version = VERSION

    def __init__(self, command: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in (USERS_PATH, "PYTHONHASHSEED")}
        environment["PYTHONPATH"] = os.environ.get(USERS_PATH, os.environ.get("PYTHONPATH", ""))
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        self.process = subprocess.Popen(shlex.split(command), env=environment, **streams)

    def send(self, message: Json) -> Iterator[Json]:
        """Write a message; returns those that the server writes from now on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return (json.loads(line) for line in self.process.stdout if line.strip())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Posts:
    """A server at an address; each message is the body of a request."""

    version = VERSION

    def __init__(self, url: str) -> None:
        import httpx2

        accepts = {"Accept": "application/json, text/event-stream"}
        self.client = httpx2.Client(headers=accepts, timeout=None, follow_redirects=True)
        self.url = url

    def send(self, message: Json) -> Iterator[Json]:
        """Post a message; returns the messages of the answer. Raises: OSError when the server is lost, or refuses."""
        import httpx2

        try:
            response = self.client.post(self.url, json=message, headers={"MCP-Protocol-Version": self.version})
        except httpx2.HTTPError as problem:
            raise ConnectionError(f"no server answers there ({first_line(problem)})") from None
        if response.is_error:
            raise ConnectionError(f"status {response.status_code}: {response.text[:200]}")
        if session := response.headers.get("Mcp-Session-Id"):
            self.client.headers["Mcp-Session-Id"] = session
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            return (json.loads(data) for data in events_of(response.text))
        return iter([response.json()] if response.content.strip() else [])

    def close(self) -> None:
        """End the session, which a server need not allow."""
        import httpx2

        with suppress(httpx2.HTTPError):
            self.client.delete(self.url, timeout=5.0)
        self.client.close()


def events_of(text: str) -> Iterator[str]:
    """The data of each event of a stream."""
    for event in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:")]
        if "".join(lines).strip():
            yield "\n".join(lines)
