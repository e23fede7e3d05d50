"""Sessions over the routes: what their trace says, new weights between two turns, keys, clients that go away."""

import asyncio
import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import torch
from helpers import save_model
from helpers.processes import PATIENCE
from helpers.templates import ZOO
from helpers.trained import train_a_little
from starlette.testclient import TestClient

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.rendering import TOOLS
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.models.loading import load_policy
from lightrlhf.serving import session_routes
from lightrlhf.serving.answers import Answer, Choice
from lightrlhf.serving.app import App
from lightrlhf.serving.engine import Engine
from lightrlhf.serving.requests import Served
from lightrlhf.serving.sessions import Settings

KEY = "key of the tests"
HELLO = {"role": "user", "content": "a tea, please"}
MORE = {"role": "user", "content": "with milk?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = save_model("llama", tmp_path_factory.mktemp("sessions") / "first", tokenizer, max_position_embeddings=512)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory, folder, tokenizer):
    """A folder with other weights of the same shapes."""
    policy = load_policy(str(folder), ModelArgs(), tokenizer)
    train_a_little(policy)
    policy.model.save_pretrained(path := tmp_path_factory.mktemp("sessions") / "second")
    return path


@pytest.fixture
def engine(folder, tokenizer) -> Engine:
    policy = load_policy(str(folder), ModelArgs(), tokenizer).eval()
    return Engine(policy, tokenizer, "model", str(folder), num_slots=2)


@pytest.fixture
def app(engine) -> App:
    return App(engine, KEY)


@pytest.fixture
def client(app):
    with TestClient(app.asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def opened(client, **settings) -> tuple[str, dict[str, str]]:
    """A session's chat route and the header with its key."""
    answer = client.post("/sessions", json={"max_tokens": 8, "seed": 3, **settings})
    assert answer.status_code == 200, answer.text
    session = answer.json()
    return session["base_url"] + "/chat/completions", {"Authorization": f"Bearer {session['key']}"}


def turn(client, session, *messages, **fields) -> dict:
    """The message of the next turn of a session."""
    route, key = session
    answer = client.post(route, json={"messages": [*messages], **fields}, headers=key)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def trace_of(client, session) -> dict:
    answer = client.get(session[0].removesuffix("/v1/chat/completions") + "/trace")
    assert answer.status_code == 200, answer.text
    return answer.json()


def end(client, session) -> int:
    return client.delete(session[0].removesuffix("/v1/chat/completions")).status_code


def expected_logprobs(policy, row: dict) -> torch.Tensor:
    """Log-probabilities of a row's sampled ids in one pass over it."""
    ids = torch.tensor([row["ids"]])
    with torch.inference_mode():
        logprobs = policy.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[torch.tensor(row["mask"][1:]).bool()]


def sampled(row: dict) -> torch.Tensor:
    return torch.tensor([value for value, is_sampled in zip(row["logprobs"], row["mask"]) if is_sampled])


# --------------------------------------------------------------------------------------------------------------- turns
def test_turns_go_on_in_one_row_whose_log_probabilities_are_the_policys(client, engine, tokenizer):
    session, messages = opened(client), [HELLO]
    for _ in range(4):
        messages += [turn(client, session, *messages), MORE]
    trace = trace_of(client, session)
    (row,) = trace["rows"]
    assert row["began"] == "first" and [one["row"] for one in trace["turns"]] == [0] * 4
    first = encode_prompt(tokenizer, [HELLO])
    assert row["ids"][: len(first)] == first and trace["turns"][0]["start"] == len(first)
    assert sum(row["mask"]) == sum(one["end"] - one["start"] for one in trace["turns"])
    torch.testing.assert_close(sampled(row), expected_logprobs(engine.policy, row))
    assert trace["turns"][2]["request"] == {"messages": messages[:5]}
    assert trace["turns"][2]["reply"] == messages[5]
    assert {one["version"] for one in trace["turns"]} == {"default"}
    assert trace["settings"]["seed"] == 3 and trace["settings"]["temperature"] == 1.0
    rendered = client.get(session[0].removesuffix("/v1/chat/completions") + "/trace?rendering").json()
    assert "".join(own for own, _ in rendered["rows"][0].pop("rendering")) == tokenizer.decode(row["ids"])
    assert rendered == trace


def test_a_stream_is_the_answer_in_parts_and_is_recorded_alike(client):
    plain, streamed = opened(client), opened(client)
    whole = turn(client, plain, HELLO)
    route, key = streamed
    body = {"messages": [HELLO], "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(route, json=body, headers=key).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts[:-1]) == whole["content"]
    assert parts[-1]["usage"]["completion_tokens"] > 0
    one, other = trace_of(client, plain), trace_of(client, streamed)
    assert one["rows"] == other["rows"] and one["turns"][0]["reply"] == other["turns"][0]["reply"]


def test_the_seed_and_the_number_of_a_sample_give_its_noise(client):
    def replies(**settings) -> list[str]:
        session = opened(client, **settings)
        return [turn(client, session, HELLO)["content"] for _ in range(2)]

    first, second = replies(), replies(seed=4)
    assert first == replies() and first != second and first[0] != first[1]


def test_temperature_and_length_are_the_sessions(client, engine):
    session = opened(client, temperature=0.5, max_tokens=3)
    turn(client, session, HELLO, temperature=0.5, max_tokens=100)
    trace = trace_of(client, session)
    assert sum(trace["rows"][0]["mask"]) <= 3 and trace["turns"][0]["request"]["max_tokens"] == 100
    colder = engine.policy.model.lm_head.weight.data.mul_(2)
    assert len(colder)
    torch.testing.assert_close(sampled(trace["rows"][0]), expected_logprobs(engine.policy, trace["rows"][0]))


def test_what_differs_is_refused_by_name_and_leaves_no_turn(client):
    session = opened(client)
    for field, value in {"temperature": 0.3, "top_p": 0.5, "n": 2, "seed": 1}.items():
        answer = client.post(session[0], json={"messages": [HELLO], field: value}, headers=session[1])
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(field)
    answer = client.post(session[0], json={"messages": [HELLO] * 300}, headers=session[1])
    assert answer.status_code == 400 and "positions" in answer.json()["error"]["message"]
    assert trace_of(client, session)["turns"] == []
    turn(client, session, HELLO)


def test_a_session_that_is_not_trained_takes_other_settings(client):
    session = opened(client, train=False)
    replies = {turn(client, session, HELLO, temperature=0, seed=seed)["content"] for seed in (1, 2)}
    assert len(replies) == 1 and len(trace_of(client, session)["turns"]) == 2


@pytest.mark.parametrize("body", [{"temperature": 0}, {"seeds": 3}, {"model": "another"}, {"max_tokens": "5"}])
def test_wrong_settings_are_refused_by_name(client, body):
    answer = client.post("/sessions", json=body)
    assert answer.status_code == 400 and next(iter(body)) in answer.json()["error"]["message"]


# --------------------------------------------------------------------------------------------------------- new weights
def reload(client, folder):
    return client.post("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


def test_a_session_goes_on_with_new_weights(client, engine, other):
    session = opened(client)
    messages = [HELLO, turn(client, session, HELLO), MORE]
    before = trace_of(client, session)["rows"][0]
    old = expected_logprobs(engine.policy, before)
    assert reload(client, other).status_code == 200
    turn(client, session, *messages)
    trace = trace_of(client, session)
    assert [one["version"] for one in trace["turns"]] == ["default", "reloaded-1"]
    (row,) = trace["rows"]
    new = expected_logprobs(engine.policy, row)
    torch.testing.assert_close(sampled(row)[: len(old)], old)  # as they were sampled
    torch.testing.assert_close(sampled(row)[len(old) :], new[len(old) :])  # all ids read by the new weights
    assert not torch.allclose(new[: len(old)], old)


@pytest.mark.parametrize("paused", [False, True])
def test_new_weights_wait_for_a_session_that_holds_them(client, other, paused):
    session, free = opened(client, hold_weights=True), opened(client)
    messages = [HELLO, turn(client, session, HELLO), MORE]
    with ThreadPoolExecutor(2) as pool:
        if paused:  # as trainers do
            client.post("/pause")
        reloading = pool.submit(reload, client, other)
        time.sleep(0.3)
        turned = pool.submit(turn, client, session, *messages)
        is_answered, is_held = bool(wait([turned], PATIENCE).done), not reloading.done()
        assert end(client, session) == 200
        client.post("/resume")
        assert reloading.result(PATIENCE).status_code == 200
    assert is_answered and turned.result()["role"] == "assistant" and is_held
    turn(client, free, HELLO)
    assert trace_of(client, free)["turns"][0]["version"] == "reloaded-1"


def test_a_session_reads_what_is_new_alone_while_its_keys_and_values_are_known(client, other):
    session, messages = opened(client, max_tokens=24), [HELLO]
    for number in range(4):
        if number == 3:
            assert reload(client, other).status_code == 200
        messages += [turn(client, session, *messages), MORE]
    trace = trace_of(client, session)
    before = [0, *(one["end"] for one in trace["turns"][:-1])]
    assert all(end - 40 < one["cached"] <= end for end, one in zip(before[:3], trace["turns"]))
    assert trace["turns"][2]["cached"] > trace["turns"][1]["cached"] > 0
    assert trace["turns"][3]["cached"] == 0
    assert trace["counts"]["tokens_read_again"] >= before[3]


def test_a_session_that_was_evicted_goes_on_by_reading_its_ids_again(folder, tokenizer):
    policy = load_policy(str(folder), ModelArgs(), tokenizer).eval()
    config = policy.model.config
    a_token = 2 * 4 * config.num_hidden_layers * config.hidden_size
    engine = Engine(policy, tokenizer, "model", str(folder), num_slots=1, cache_bytes=640 * a_token)
    with TestClient(App(engine, KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        session, messages = opened(client, max_tokens=24), [HELLO]
        messages += [turn(client, session, *messages), MORE]
        for seed in range(6):
            turn(client, opened(client, max_tokens=200, seed=seed), {**HELLO, "content": f"{seed} " * 60})
        turn(client, session, *messages)
        trace = trace_of(client, session)
    (row,) = trace["rows"]
    assert trace["turns"][1]["cached"] == 0 and trace["counts"]["tokens_read_again"] == trace["turns"][0]["end"]
    torch.testing.assert_close(sampled(row), expected_logprobs(policy, row))


def test_a_session_that_is_not_used_holds_no_weights(client, other, monkeypatch):
    monkeypatch.setattr(session_routes, "LONGEST_HOLD", 0.0)
    opened(client, hold_weights=True)
    assert reload(client, other).status_code == 200


# ---------------------------------------------------------------------------------------------------------------- keys
def test_the_key_of_a_session_opens_its_own_chat_route_alone(app, client):
    session, neighbour = opened(client), opened(client)
    own = session[0].removesuffix("/v1/chat/completions")
    routes = [(method, route.path) for route in app.routes for method in route.methods or ()]
    assert len(routes) > 20
    for method, path in routes:
        for identifier in (own.split("/")[2], neighbour[0].split("/")[2]):
            full = path.replace("{id}", identifier)
            status = client.request(method, full, headers=session[1], json={"messages": [HELLO]}).status_code
            is_own = full == session[0]
            assert (status == 401) == (not is_own and path != "/health"), (method, full, status)
    odd = [
        "/%2e%2e/v1/models",
        "//",
        "/trace/",
        "/v1/chat/completions/",
        "/v1/chat/completions/../../trace",
        "%2ftrace",
    ]
    for path in odd:
        assert client.get(own + path, headers=session[1]).status_code == 401
    for key in ("", "Bearer ", "Bearer x", session[1]["Authorization"].lower(), session[1]["Authorization"] + " "):
        assert client.post(session[0], json={"messages": [HELLO]}, headers={"Authorization": key}).status_code == 401
    assert end(client, session) == 200
    assert client.post(session[0], json={"messages": [HELLO]}, headers=session[1]).status_code == 401
    assert client.post(session[0], json={"messages": [HELLO]}).status_code == 404  # by the server's key
    assert end(client, session) == 404
    turn(client, neighbour, HELLO)


def test_sessions_that_are_dropped_leave_nothing(app, client):
    open_ones = app.sessions.sessions.open
    seen = []
    for number in range(1000):
        session = opened(client)
        if number % 100 == 0:
            turn(client, session, HELLO, max_tokens=1)
            seen.append(weakref.ref(open_ones[session[0].split("/")[2]]))
        assert end(client, session) == 200
    gc.collect()
    assert not open_ones and not [one for one in seen if one() is not None]


# --------------------------------------------------------------------------------------------- at once, and going away
def slowed(engine, monkeypatch) -> threading.Event:
    """Let turns sample one token, then wait until the event is set or they are cancelled."""
    go_on, sample, engine.sampled = threading.Event(), engine.stream, []

    async def stream(request):
        async for piece in sample(request):
            engine.sampled.append(piece)
            yield piece
            while not go_on.is_set():
                await asyncio.sleep(0.01)

    monkeypatch.setattr(engine, "stream", stream)
    return go_on


def test_requests_at_once_are_answered_one_after_another(client, engine, monkeypatch):
    go_on, session = slowed(engine, monkeypatch), opened(client)
    with ThreadPoolExecutor(3) as pool:
        jobs = []
        for words in ("one", "two", "three"):
            jobs.append(pool.submit(turn, client, session, {"role": "user", "content": words}))
            time.sleep(0.2)
        go_on.set()
        replies = [job.result(PATIENCE) for job in jobs]
    trace = trace_of(client, session)
    assert [one["request"]["messages"][0]["content"] for one in trace["turns"]] == ["one", "two", "three"]
    assert [one["reply"] for one in trace["turns"]] == replies and len(trace["rows"]) == 3


def test_too_many_requests_at_once_are_refused(client, engine, monkeypatch):
    monkeypatch.setattr(session_routes, "MOST_WAITING", 1)
    go_on, session = slowed(engine, monkeypatch), opened(client)
    with ThreadPoolExecutor(2) as pool:
        jobs = []
        for _ in range(2):
            jobs.append(pool.submit(turn, client, session, HELLO))
            time.sleep(0.2)
        answer = client.post(session[0], json={"messages": [HELLO]}, headers=session[1])
        assert answer.status_code == 429
        go_on.set()
        assert all(job.result(PATIENCE) for job in jobs)


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_is_ended_stops_its_request(client, engine, monkeypatch, stream):
    go_on, session = slowed(engine, monkeypatch), opened(client)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, session[0], json={"messages": [HELLO], "stream": stream}, headers=session[1])
        time.sleep(0.3)
        assert end(client, session) == 200
        answer = asked.result(PATIENCE)
    assert "the session has ended" in answer.text
    go_on.set()
    turn(client, opened(client), HELLO, max_tokens=1)  # the engine is free


def connected(app, session, body: dict, leaving: asyncio.Event, blocked: bool = False):
    """A request by a client that goes away at an event, and, if `blocked`, never reads."""
    content, sent = [json.dumps(body).encode()], asyncio.Event()

    async def receive() -> dict:
        if content:
            return {"type": "http.request", "body": content.pop(), "more_body": False}
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.set()
        if blocked:
            await leaving.wait()

    route, key = session
    headers = [(b"authorization", key["Authorization"].encode())]
    scope = {"type": "http", "method": "POST", "path": route, "headers": headers, "query_string": b"", "root_path": ""}
    scope |= {"http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    return app.asgi({**scope, "raw_path": route.encode()}, receive, send), sent


async def until(holds) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_turn_which_is_recorded(app, engine, monkeypatch, stream):
    go_on = slowed(engine, monkeypatch)

    async def run() -> dict:
        session = app.sessions.sessions.begin(Settings(max_tokens=8))
        at = f"/sessions/{session.id}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
        leaving = asyncio.Event()
        request, _ = connected(app, at, {"messages": [HELLO], "stream": stream}, leaving)
        job = asyncio.ensure_future(request)
        await until(lambda: len(engine.sampled) == 1)
        leaving.set()
        await asyncio.wait_for(job, PATIENCE)
        await until(lambda: not session.lock.locked())
        assert not session.trace()["is_answered"]
        go_on.set()
        again, _ = connected(app, at, {"messages": [HELLO]}, asyncio.Event())
        await asyncio.wait_for(again, PATIENCE)
        return session.trace()

    trace = asyncio.run(run())
    assert [one["stop_reason"] for one in trace["turns"]][0] == "cancelled" and len(trace["rows"]) == 2
    assert sum(trace["rows"][0]["mask"]) == 1
    assert trace["is_answered"] and trace["failed_requests"] == 0
    assert trace["messages"] == [HELLO, trace["turns"][-1]["reply"]]


def test_requests_that_fail_on_the_servers_side_are_counted_apart_from_wrong_ones(app, client, monkeypatch):
    (route, key), words = opened(client), {"messages": [HELLO]}
    too_long = {"messages": [{**HELLO, "content": "a tea, please " * 600}]}
    assert client.post(route, json=too_long, headers=key).status_code == 400
    assert trace_of(client, (route, key))["failed_requests"] == 0

    async def failing(asked):
        raise MemoryError("no memory")
        yield

    monkeypatch.setattr(app.sessions.engine, "stream", failing)
    assert client.post(route, json=words, headers=key).status_code == 500
    trace = trace_of(client, (route, key))
    assert trace["failed_requests"] == 1 and trace["is_answered"] and trace["turns"] == []


def test_a_reload_whose_client_goes_away_does_not_come_later(app, engine, other):
    async def run() -> None:
        session, leaving = app.sessions.sessions.begin(Settings(hold_weights=True)), asyncio.Event()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
        at = "/collective_rpc", {"Authorization": f"Bearer {KEY}"}
        job = asyncio.ensure_future(connected(app, at, body, leaving)[0])
        await asyncio.sleep(0.2)
        leaving.set()
        await asyncio.sleep(0.2)
        app.sessions.sessions.end(session.id)
        await asyncio.wait_for(job, PATIENCE)

    asyncio.run(run())
    assert engine.num_reloads == 0


def test_a_client_that_never_reads_does_not_hold_its_session(app, engine):
    async def run() -> dict:
        session = app.sessions.sessions.begin(Settings(max_tokens=8))
        at = f"/sessions/{session.id}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
        leaving = asyncio.Event()
        request, sent = connected(app, at, {"messages": [HELLO], "stream": True}, leaving, blocked=True)
        job = asyncio.ensure_future(request)
        await sent.wait()
        await until(lambda: session.conversation.turns)
        again, _ = connected(app, at, {"messages": [MORE]}, asyncio.Event())
        await asyncio.wait_for(again, PATIENCE)
        leaving.set()
        await asyncio.wait_for(job, PATIENCE)
        return session.trace()

    trace = asyncio.run(run())
    assert len(trace["turns"]) == 2 and "cancelled" not in {one["stop_reason"] for one in trace["turns"]}


def scripted(tokenizer, ids: list[int]):
    """An engine whose every answer has these ids."""

    class Scripted:
        version, adapters, name = "v1", {}, "model"
        scheduler = SimpleNamespace(num_waiting=lambda: 0)

        def limits(self):
            return Served(tokenizer, len(tokenizer), 2048, 2**20, ["model"])

        async def stream(self, request):
            yield 0, Choice(ids, [-0.5] * len(ids), "stop"), Answer([], None, "v1")

    engine = Scripted()
    engine.tokenizer = tokenizer
    return engine


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_result_goes_on_behind_the_call_that_was_sampled(stream):
    """A model that calls a tool, told its result: one row, the call's ids as they were sampled."""
    kind = ZOO["qwen25"]
    tokenizer, question = kind.tokenizer, [{"role": "user", "content": "What is it?"}]
    call = '{"name": "known_function", "arguments": {"known_argument": "known-value"}}'
    ids = tokenizer(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    with TestClient(App(scripted(tokenizer, ids), KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        session = opened(client, max_tokens=100)
        body = {"messages": question, "tools": TOOLS, "stream": stream, "tool_choice": "required"}
        answer = client.post(session[0], json=body, headers=session[1])
        assert answer.status_code == 200, answer.text
        if stream:
            parts = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
            deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
            (named,) = [one for delta in deltas for one in delta.get("tool_calls", []) if one.get("id")]
            pieces = [one for delta in deltas for one in delta.get("tool_calls", [])]
            arguments = "".join(one["function"].get("arguments") or "" for one in pieces)
            function = {"name": named["function"]["name"], "arguments": arguments}
            reply = {"role": "assistant", "tool_calls": [{"id": named["id"], "type": "function", "function": function}]}
        else:
            reply = answer.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "42"}
        again = {"messages": [*question, reply, result], "tools": TOOLS}
        assert client.post(session[0], json=again, headers=session[1]).status_code == 200
        trace = trace_of(client, session)
    (row,) = trace["rows"]
    assert [one["stop_reason"] for one in trace["turns"]] == ["tool_calls"] * 2
    first, second = trace["turns"]
    assert row["ids"][first["start"] : first["end"]] == ids == row["ids"][second["start"] : second["end"]]
    assert "42" in tokenizer.decode(row["ids"][first["end"] : second["start"]])
    assert first["request"]["tool_choice"] == "required"


@pytest.mark.parametrize("name, value", [("\\u0000", "1"), ("known_function", "[" * 250 + "]" * 250)])
def test_a_call_that_no_request_may_bring_back_is_answered_and_recorded(name, value):
    tokenizer = ZOO["qwen25"].tokenizer
    call = f'{{"name": "{name}", "arguments": {{"known_argument": {value}}}}}'
    ids = tokenizer(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    with TestClient(App(scripted(tokenizer, ids), KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        session = opened(client, max_tokens=600)
        reply = turn(client, session, HELLO, tools=TOOLS)
        trace = trace_of(client, session)
        assert client.get(session[0].removesuffix("/v1/chat/completions") + "/trace?rendering").status_code == 200
    ((row,), (recorded,)) = trace["rows"], trace["turns"]
    assert row["ids"][recorded["start"] : recorded["end"]] == ids
    assert recorded["reply"]["tool_calls"] == reply["tool_calls"] and recorded["stop_reason"] == "tool_calls"
