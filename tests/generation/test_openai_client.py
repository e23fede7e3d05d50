"""The client of OpenAI-compatible servers: a scripted one that misbehaves, and a real `transformers serve`."""

import itertools
import json
import socket
import time
from types import SimpleNamespace

import pytest
from helpers.errors import error_naming
from helpers.processes import PATIENCE
from helpers.servers import RawServer, Scripted, half_closed, reply, silent, status, wait_at_most

from lightrlhf.cli.errors import RunFailure
from lightrlhf.generate import main
from lightrlhf.generation.openai_client import RemoteArgs, Reply, Servers
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl


def client(*servers: Scripted, request: float = PATIENCE, **options) -> Servers:
    wait_at_most(request, PATIENCE)
    return Servers(RemoteArgs(base_url=[s.url for s in servers], **options), "tiny", first_wait=0.01)


def prompts(*texts: str) -> list[dict]:
    return [{"prompt": text} for text in texts]


def test_replies_keep_the_order_and_concurrent_requests_are_limited(serve):
    slow = {str(n): [lambda h: time.sleep(0.02) or h.send(500, {})] for n in range(40)}
    one, two = serve(slow), serve(slow)
    with client(one, two, max_workers=3) as servers:
        replies = list(servers.replies(prompts(*map(str, range(40)))))
    assert replies == [Reply(f"{n}!") for n in range(40)]
    out = [(when, change) for span in one.spans + two.spans for when, change in zip(span, (1, -1))]
    assert 1 < max(itertools.accumulate(change for _, change in sorted(out))) <= 3
    assert min(len(one.asked), len(two.asked)) >= 18


def test_chat_and_plain_completions_and_their_stop_reason(serve):
    server = serve()
    with client(server) as servers:
        chat, plain = servers.replies([{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "long"}])
    assert chat == Reply("hi!", truncated=False) and plain == Reply("long!", truncated=True)


@pytest.mark.parametrize(
    "failure",
    [
        status(429, Retry_After="0.05"),
        status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        status(503),
        status(200, b"<html>gateway</html>"),
        status(200, {"choices": []}),
        status(200, {"choices": [{"message": None, "text": None}]} | {"choices": None}),
        half_closed,
        silent,
    ],
    ids=["429", "429 until a date", "503", "html", "no choice", "null", "half closed", "time-out"],
)
def test_a_transient_failure_is_retried(serve, failure):
    server = serve({"a": [failure, failure]})
    with client(server, request=2.0 if failure is silent else PATIENCE) as servers:
        assert list(servers.replies(prompts("a", "b"))) == [Reply("a!"), Reply("b!")]
    assert server.asked["a"] == 3 and server.asked["b"] == 1


def answer(text: object = "WRONG", end: object = "stop", **more) -> bytes:
    return reply(json.dumps({"choices": [{"text": text, "finish_reason": end, "index": 0}], **more}).encode())


@pytest.mark.parametrize(
    "said",
    [
        answer(None),
        answer(7),
        answer(["WRONG"]),
        answer("\ud800"),
        answer(end="abort"),
        answer(end="content_filter"),
        answer(end=None),
        answer(choices=[{"text": "WRONG", "finish_reason": "stop"}] * 2),
        answer(id="cmpl-lightrlhf-0123456789abcdef-00000000"),
        reply(b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        reply(b"\x1f\x8b\x08\x00garbage", {"Content-Encoding": "gzip"}),
        [b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", *([0.05, b" "] * 200)],
    ],
    ids="null number list surrogate abort filter no_end two another's deep gzip drips".split(),
)
def test_what_is_no_answer_is_asked_again_or_reported(said):
    with RawServer({"q": [said]}) as server, client(server, request=1.0) as servers:
        (seen,) = servers.replies(prompts("q"))
    assert seen == Reply("q!") or seen.error.startswith("not answered")


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_an_answer_too_many_is_none_of_the_next_request(pause):
    script = [answer("q!"), pause, answer()] if pause else answer("q!") + answer()
    with RawServer({"q": [script]}) as server, client(server, max_workers=1) as servers:
        assert list(servers.replies(prompts("q", "r"))) == [Reply("q!"), Reply("r!")]


def test_retry_after_is_respected(serve):
    server = serve({"a": [status(429, Retry_After="0.5")]})
    began = time.monotonic()
    with client(server) as servers:
        assert next(servers.replies(prompts("a"))) == Reply("a!")
    assert time.monotonic() - began >= 0.5


def test_a_request_is_retried_at_another_server(serve):
    dead, alive = serve({"a": [half_closed] * 99, "b": [half_closed] * 99}), serve()
    with client(dead, alive) as servers:
        assert [r.text for r in servers.replies(prompts("a", "b"))] == ["a!", "b!"]


def test_the_last_failure_is_one_line_that_names_the_server(serve, monkeypatch):
    server = serve({"b": [status(500, {"error": "on\nfire"})] * 9})
    monkeypatch.setattr("lightrlhf.generation.openai_client.MAX_ATTEMPTS", 3)
    with client(server) as servers:
        replies = servers.replies(prompts("a", "b", "c"))
        assert next(replies) == Reply("a!")
        with error_naming(RunFailure, f"--base_url {server.url}", "status 500: on fire"):
            next(replies)


def test_a_refused_request_is_reported_and_the_others_continue(serve):
    server = serve({"b": [status(400, {"detail": "too long"})]})
    with client(server) as servers:
        assert [r.error for r in servers.replies(prompts("a", "b", "c"))] == [None, "status 400: too long", None]


def test_refusing_every_request_or_the_model_or_the_key_ends_the_program(serve):
    everything = {str(n): [status(422, {"detail": "top_k?"})] for n in range(20)}
    with client(serve(everything)) as servers, error_naming(RunFailure, "status 422", "top_k?"):
        list(servers.replies(prompts(*map(str, range(20)))))
    lacking = serve({"a": [status(404)] * 2})
    for url in (lacking.url, lacking.url.removesuffix("/v1")):
        with client(SimpleNamespace(url=url)) as servers, error_naming(RunFailure, "status 404") as told:
            list(servers.replies(prompts("a")))
        assert ("/v1?" in str(told.value)) is (url != lacking.url)
    with client(serve({"a": [status(401)]})) as servers, error_naming(RunFailure, "OPENAI_API_KEY"):
        list(servers.replies(prompts("a")))


def test_the_key_is_sent_and_never_printed(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = serve({"b": [status(401)]})
    with client(server) as servers:
        list(servers.replies(prompts("a")))
        with pytest.raises(RunFailure) as failure:
            list(servers.replies(prompts("b")))
        assert "secret" not in str(failure.value) + repr(servers.args)
    assert server.headers_seen[0]["authorization"] == "Bearer sk-secret"


def test_health_is_awaited_at_models_where_there_is_no_health_path(serve):
    late, plain = serve(healthy_after=3), serve(health=False)
    with client(late, plain) as servers:
        servers.wait_until_healthy()
    assert late.asked["/health"] == 4 and plain.asked["/v1/models"] == 1


def test_a_server_that_never_answers_is_one_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    wait_at_most(PATIENCE, 0.2)
    args = RemoteArgs(base_url=[url])
    with Servers(args, "tiny", first_wait=0.05) as servers, error_naming(RunFailure, f"--base_url {url}"):
        servers.wait_until_healthy()


@pytest.mark.parametrize("url", ["localhost:8000", "http://me:secret@host/v1"])
def test_an_address_that_is_invalid_or_contains_a_password_is_refused(url):
    with pytest.raises(ValueError, match="--base_url") as refusal:
        RemoteArgs(base_url=[url])
    assert "secret" not in str(refusal.value)


# ------------------------------------------------------------------------------------------------------ a real server
@pytest.mark.slow
def test_transformers_serve_answers(transformers_serve):
    url, model = transformers_serve
    wait_at_most(PATIENCE, PATIENCE)
    args = RemoteArgs(base_url=[url], max_workers=2)
    conversation = [{"role": "user", "content": "Two coffees, please."}]
    options = {"max_tokens": 5, "temperature": 0.0}
    with Servers(args, model) as servers:
        servers.wait_until_healthy()
        replies = list(servers.replies([{"prompt": "A tea", **options}, {"messages": conversation, **options}] * 2))
    assert replies[:2] == replies[2:] and all(reply.text and reply.error is None for reply in replies)
    assert all(reply.truncated for reply in replies)


@pytest.mark.slow
def test_generate_writes_what_transformers_serve_answers(transformers_serve, tmp_path):
    url, model = transformers_serve
    chat = [{"role": "user", "content": "Two coffees, please."}]
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "A tea", "n": 1}, {"prompt": chat, "n": 2}])
    flags = ["--rollout_engine", "openai", "--base_url", url, "--model_name", model, "--max_new_tokens", "4"]
    flags += ["--prompts_file", str(tmp_path / "prompts.jsonl"), "--output_dir", str(tmp_path), "--accelerator", "cpu"]
    rows = read_jsonl(main(flags)[0])
    assert [(row["n"], row["prompt"]) for row in rows] == [(1, "A tea"), (2, chat)]
    assert all(row["responses"][0] and row["truncated"] == [True] and "errors" not in row for row in rows)
