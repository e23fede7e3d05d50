"""Clients that would keep others from being answered: idle ones, ones that go away, ones that do not read."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx2
import pytest
from helpers import save_model
from helpers.processes import PATIENCE

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.generation.conversations import Conversation
from lightrlhf.generation.tickets import Job
from lightrlhf.models.loading import load_policy
from lightrlhf.serving import app, handling, listening, requests
from lightrlhf.serving.engine import Engine, at_once

KEY = "key of the tests"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": [5, 6], "max_tokens": 3}


class Running:
    """A server in a thread of this process."""

    def __init__(self, engine: Engine, port: int) -> None:
        self.engine, self.port = engine, port

    def ask(self, body: dict | None = None, path: str = TEXT) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        method = "GET" if body is None else "POST"
        return httpx2.request(
            method, f"http://127.0.0.1:{self.port}{path}", json=body, headers=headers, timeout=PATIENCE
        )

    def open(self, body: dict | None = None) -> socket.socket:
        """A connection, with a request that is not read."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        if body is not None:
            content = json.dumps(body)
            head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
            client.sendall(f"{head}\r\n\r\n{content}".encode())
        return client


@pytest.fixture(scope="module")
def engine(tmp_path_factory, tokenizer) -> Engine:
    path = save_model("llama", tmp_path_factory.mktemp("served") / "model", tokenizer)
    return Engine(load_policy(str(path), ModelArgs(), tokenizer).eval(), tokenizer, "model", str(path), num_slots=4)


@contextmanager
def serving(engine: Engine) -> Iterator[Running]:
    ready, servers = threading.Event(), []

    class Server(listening.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            servers.append(self)
            ready.set()

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(listening, "Server", Server)
        given = app.App(engine, KEY).asgi, listener, "serving"
        thread = threading.Thread(target=listening.serve, args=given, daemon=True)
        thread.start()
        assert ready.wait(PATIENCE)
        try:
            yield Running(engine, listener.getsockname()[1])
        finally:
            servers[0].force_exit = servers[0].should_exit = True
            thread.join(PATIENCE)


@pytest.fixture
def server(engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


def wait_until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_idle_connections_without_a_key_close_the_oldest_of_them_alone(engine, monkeypatch, capfd):
    monkeypatch.setattr(listening, "most_connections", lambda: 20)
    with serving(engine) as server:
        busy = server.open({**GOOD, "max_tokens": 200, "ignore_eos": True, "stream": True})
        assert busy.recv(12) == b"HTTP/1.1 200"
        idle = [server.open() for _ in range(400)]
        for client in idle[::3]:
            try:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
            except OSError:
                pass  # it is closed already
        assert server.ask(GOOD).status_code == 200
        content = b""
        while b"[DONE]" not in content:
            assert (more := busy.recv(65536))
            content += more
        ended = 0
        for client in idle:
            client.settimeout(0.01)
            try:
                ended += client.recv(1) == b""
            except ConnectionError:
                ended += 1
            except TimeoutError:
                pass
            client.close()
        assert 370 <= ended <= 400
        busy.close()
    assert len("".join(capfd.readouterr())) < 1000


def test_a_connection_without_a_whole_head_is_closed(engine, monkeypatch):
    monkeypatch.setattr(listening, "SECONDS_FOR_HEAD", 0.2)
    with serving(engine) as server, closing(server.open()) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass


def test_clients_that_are_killed_free_their_rows(server, engine):
    body = {**GOOD, "max_tokens": 240, "n": 4, "ignore_eos": True}
    for number in range(100):
        client = server.open({**body, "stream": number % 2 == 0})
        if number % 10 == 0:
            wait_until(lambda: engine.scheduler.memory.running)
        client.close()
    assert server.ask(GOOD).status_code == 200
    memory = engine.scheduler.memory
    wait_until(lambda: not memory.tickets and not engine.scheduler.line)
    assert not memory.running and memory.pages.blocks.room() == memory.pages.blocks.count


def test_a_client_that_does_not_read_its_stream_costs_others_nothing(server, engine):
    body = {**GOOD, "max_tokens": 250, "n": 8, "ignore_eos": True, "stream": True, "logprobs": 0}
    stalled = [server.open(body) for _ in range(4)]
    wait_until(lambda: engine.scheduler.memory.running)
    sampled = engine.scheduler.memory.counts
    before = sampled.sampled
    assert server.ask(GOOD).status_code == 200
    assert sampled.sampled - before < 4 * 8 * 250  # it did not wait for their ends
    for client in stalled:
        client.close()
    wait_until(lambda: not engine.scheduler.memory.tickets)


def test_health_is_answered_while_a_long_prompt_is_read(server, engine, monkeypatch):
    began, may_end, read = threading.Event(), threading.Event(), app.read_completion

    def slow(body, served, chat):
        if len(str(body)) > handling.LONG_BODY:
            began.set()
            assert may_end.wait(PATIENCE)
        return read(body, served, chat)

    monkeypatch.setattr(app, "read_completion", slow)
    monkeypatch.setattr(engine, "longest_token", 2**20)
    with ThreadPoolExecutor() as pool:
        long = pool.submit(server.ask, {"prompt": "a tea " * 2**17, "max_tokens": 2})
        assert began.wait(PATIENCE)
        assert server.ask(path="/health").status_code == 200
        assert server.ask(GOOD).status_code == 200
        assert not long.done()
        may_end.set()
        assert long.result().status_code == 400 and "positions" in long.result().text


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server, engine, monkeypatch):
    most = engine.limits().characters
    assert most == engine.limits().positions * max(map(len, engine.tokenizer.get_vocab()))
    message = {"role": "user", "content": "a" * (most // 2 + 1)}
    session = server.ask({}, "/sessions").json()
    monkeypatch.setattr(requests, "encode_prompt", lambda *given: 1 / 0)
    monkeypatch.setattr(Conversation, "begin", lambda *given: 1 / 0)
    chats: list[dict[str, Any]] = [{"messages": [message, message]}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "a" * most})}}
    for more in ({"content": "", "reasoning_content": "a" * most}, {"tool_calls": [call]}):
        chats.append({"messages": [message, {"role": "assistant", **more}]})
    chats[-1]["messages"].append({"role": "tool", "tool_call_id": "c", "content": "a"})
    tool = {"type": "function", "function": {"name": "f", "description": "a" * most}}
    chats.append({"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    asked: list[Any] = [(TEXT, {"prompt": "a" * (most + 1)})]
    asked += [(path, chat) for chat in chats for path in (CHAT, f"/sessions/{session['id']}{CHAT}")]
    for path, body in asked:
        answer = server.ask(body, path)
        assert answer.status_code == 400 and "characters does not fit" in answer.text


@pytest.mark.slow
def test_health_is_answered_all_along_while_a_prompt_of_4_mb_is_read(server, engine, monkeypatch):
    monkeypatch.setattr(engine, "longest_token", 2**20)
    waits, began = [], time.monotonic()
    with ThreadPoolExecutor() as pool:
        long = pool.submit(server.ask, {"prompt": "a tea " * (2**22 // 6), "max_tokens": 2})
        while not long.done():
            asked = time.monotonic()
            assert server.ask(path="/health").status_code == 200
            waits.append(time.monotonic() - asked)
    assert long.result().status_code == 400 and "positions" in long.result().text
    assert max(waits) < (time.monotonic() - began) / 3, waits


def test_a_full_queue_is_a_429_with_a_time(server, engine, monkeypatch):
    monkeypatch.setattr(handling, "MOST_WAITING", 3)
    released = threading.Event()
    holding = engine.scheduler.run(Job(at_once(lambda: released.wait(PATIENCE))))  # the thread that computes
    wait_until(lambda: holding.has_begun)
    clients = [server.open({**GOOD, "max_tokens": 240, "ignore_eos": True}) for _ in range(3)]
    wait_until(lambda: len(engine.scheduler.line) == 3)
    refused = server.ask(GOOD)
    released.set()
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "RateLimitError"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    for client in clients:
        client.close()
    wait_until(lambda: not engine.scheduler.memory.tickets)
    assert server.ask(GOOD).status_code == 200


@pytest.mark.parametrize("temperature", [1e7, 1e21, 1e30])
def test_a_temperature_that_makes_all_tokens_equal_is_refused(server, temperature):
    refused = server.ask({**GOOD, "temperature": temperature})
    assert refused.status_code == 400 and "temperature" in refused.json()["error"]["message"]
