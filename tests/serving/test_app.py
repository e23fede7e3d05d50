"""Our own engine behind the routes: what it samples, what it refuses, and weights that change while it runs."""

import asyncio
import base64
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import save_model, tiny_model
from helpers.processes import PATIENCE
from helpers.trained import train_a_little
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DecodingArgs, ModelArgs
from lightrlhf.data.tokens import decode, encode_prompt
from lightrlhf.generation.engine import generate
from lightrlhf.generation.slots import Slots
from lightrlhf.models import lora
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy
from lightrlhf.models.saving import export_for_servers
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.serving.app import App
from lightrlhf.serving.engine import Engine

KEY = "key of the tests"
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "a tea, please"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = save_model("llama", tmp_path_factory.mktemp("served") / "first", tokenizer)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory, folder, tokenizer):
    """A folder with other weights of the same shapes."""
    policy = load_policy(str(folder), ModelArgs(), tokenizer)
    train_a_little(policy)
    policy.model.save_pretrained(path := tmp_path_factory.mktemp("served") / "second")
    return path


@pytest.fixture
def policy(folder, tokenizer) -> Policy:
    return load_policy(str(folder), ModelArgs(), tokenizer).eval()


@pytest.fixture
def engine(policy, tokenizer, folder) -> Engine:
    return Engine(policy, tokenizer, "model", str(folder), num_slots=2)


@pytest.fixture
def client(engine):
    with TestClient(App(engine, KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(folder, tokenizer):
    """A client for requests that are refused, all by one server."""
    engine = Engine(load_policy(str(folder), ModelArgs(), tokenizer).eval(), tokenizer, "model", str(folder), 2)
    with TestClient(App(engine, KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def ask(client, body: dict, path: str = TEXT) -> dict:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(client, **more) -> list[list[int]]:
    """Sampled ids of the prompts, the same at each call with the same weights."""
    body = {"prompt": PROMPTS, "max_tokens": 8, "seed": 3, "return_token_ids": True, **more}
    return [choice["token_ids"] for choice in ask(client, body)["choices"]]


def encoded(noise: torch.Tensor) -> str:
    return base64.b64encode(noise.numpy().astype("<f4").tobytes()).decode()


def events(client, body: dict, path: str = TEXT) -> list[dict]:
    """The server-sent events of a stream, without the last, [DONE]."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---------------------------------------------------------------------------------------------------------- completions
@pytest.mark.parametrize(
    "fields, flags",
    [
        ({}, {}),
        ({"temperature": 0.7, "stop_token_ids": [31, 40]}, {"temperature": 0.7, "eos_ids": [31, 40]}),
        ({"top_p": 0.8, "top_k": 20, "min_p": 0.01}, {"top_p": 0.8, "top_k": 20, "min_p": 0.01}),
        ({"temperature": 0}, {"do_sample": False}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ],
)
def test_choices_are_bitwise_those_of_the_engine_with_the_same_noise(client, policy, tokenizer, fields, flags):
    noise = torch.rand(6, 12)
    rows = [prompt for prompt in PROMPTS for _ in range(2)]
    local = generate(policy, rows, DecodingArgs(max_new_tokens=12, **flags), end_ids(tokenizer, policy.model), noise, 2)
    body = {"model": "model", "prompt": PROMPTS, "n": 2, "max_tokens": 12, "noise": encoded(noise), "logprobs": 0}
    answer = ask(client, {**body, "return_token_ids": True, **fields})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == rows
    assert [choice["token_ids"] for choice in answer["choices"]] == local.responses
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == local.logprobs
    assert [choice["finish_reason"] == "length" for choice in answer["choices"]] == local.truncated
    assert [choice["text"] for choice in answer["choices"]] == [decode(tokenizer, ids) for ids in local.responses]


def test_a_seed_gives_the_same_choices_again_and_no_seed_others(client):
    assert ids_of(client) == ids_of(client) != ids_of(client, seed=4)
    assert ids_of(client, seed=None) != ids_of(client, seed=None)


def test_ignore_eos_samples_beyond_the_end_token(client, policy, tokenizer):
    ends = end_ids(tokenizer, policy.model)
    noise = torch.rand(64, 60)
    body = {"prompt": PROMPTS[0], "n": 64, "max_tokens": 60, "noise": encoded(noise), "return_token_ids": True}
    rows = [choice["token_ids"] for choice in ask(client, body)["choices"]]
    assert any(row[-1] in ends and len(row) < 60 for row in rows)
    rows = [choice["token_ids"] for choice in ask(client, {**body, "ignore_eos": True})["choices"]]
    assert all(len(row) == 60 for row in rows) and any(set(row) & {*ends} for row in rows)


def test_only_allowed_tokens_are_sampled_with_log_probabilities_over_them(client, policy):
    allowed, temperature = [40, 9, 33], 0.6
    body = {"prompt": PROMPTS, "n": 8, "max_tokens": 3, "seed": 1, "logprobs": 0, "return_token_ids": True}
    answer = ask(client, {**body, "allowed_token_ids": allowed, "temperature": temperature})
    assert {index for choice in answer["choices"] for index in choice["token_ids"]} == {*allowed}
    for choice in answer["choices"]:
        ids = torch.tensor([choice["prompt_token_ids"] + choice["token_ids"]])
        logits = policy.model(ids, use_cache=False).logits[0, -4:-1, allowed] / temperature  # (3, A)
        places = [allowed.index(index) for index in choice["token_ids"]]
        expected = logits.log_softmax(-1)[torch.arange(3), places].tolist()
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_log_probabilities_of_the_prompts_tokens(client, policy):
    answer = ask(client, {"prompt": [*PROMPTS, [5]], "n": 2, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.5})
    for choice, prompt in zip(answer["choices"][::2], [*PROMPTS, [5]]):
        logprobs = policy.model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        expected = [float(logprobs[place, index]) for place, index in enumerate(prompt[1:])]
        assert choice["prompt_logprobs"][0] is None
        rows = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
        assert [row[str(index)]["logprob"] for row, index in rows] == pytest.approx(expected, abs=1e-4)


def test_the_likeliest_tokens_of_a_prompts_places(client, policy):
    prompts, count = [*PROMPTS, [5]], 3
    answer = ask(client, {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": count})
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = policy.model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        for place, row in enumerate(choice["prompt_logprobs"][1:]):
            wanted = {*logprobs[place].topk(count).indices.tolist(), prompt[place + 1]}
            assert {int(index) for index in row} == wanted
            for index, one in row.items():
                assert one["logprob"] == pytest.approx(float(logprobs[place, int(index)]), abs=1e-4)


def test_a_probability_of_0_by_rounding_is_a_number_of_json(client):
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "n": 4, "seed": 1, "ignore_eos": True, "logprobs": 0}
    body |= {"temperature": 0.0005, "repetition_penalty": 10.0}  # which is not in the log-probabilities
    values = [value for choice in ask(client, body)["choices"] for value in choice["logprobs"]["token_logprobs"]]
    assert min(values) == -9999.0 and max(values) <= 0
    streamed = [value for row in events(client, body) for value in row["choices"][0]["logprobs"]["token_logprobs"]]
    assert min(streamed) == -9999.0


def test_special_tokens_are_shown_when_asked_for(client, tokenizer):
    end = tokenizer.eos_token_id
    body = {"prompt": [5], "max_tokens": 2, "allowed_token_ids": [end], "ignore_eos": True}
    assert ask(client, body)["choices"][0]["text"] == ""
    assert ask(client, {**body, "skip_special_tokens": False})["choices"][0]["text"] == 2 * tokenizer.eos_token


def test_texts_become_ids_as_in_the_prepared_data_and_spell_no_control_token(client, tokenizer):
    text = f"two teas {tokenizer.eos_token} please"
    answer = ask(client, {"prompt": [text, "b"], "max_tokens": 1, "return_token_ids": True})
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
        encode_prompt(tokenizer, text),
        encode_prompt(tokenizer, "b"),
    ]
    assert tokenizer.eos_token_id not in answer["choices"][0]["prompt_token_ids"]


def test_chat_is_rendered_by_the_template(client, policy, tokenizer):
    noise = torch.rand(2, 6)
    prompt = encode_prompt(tokenizer, HELLO)
    ends = end_ids(tokenizer, policy.model)
    local = generate(policy, [prompt] * 2, DecodingArgs(max_new_tokens=6), ends, noise, 2)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a tea, "}, {"type": "text", "text": "please"}]}]
    for messages in (HELLO, parts):
        body = {"messages": messages, "max_completion_tokens": 6, "n": 2, "noise": encoded(noise), "logprobs": True}
        answer = ask(client, {**body, "return_token_ids": True}, CHAT)
        assert answer["object"] == "chat.completion" and answer["prompt_token_ids"] == prompt
        assert [choice["token_ids"] for choice in answer["choices"]] == local.responses
        messages = [choice["message"] for choice in answer["choices"]]
        texts = [decode(tokenizer, ids) for ids in local.responses]
        assert messages == [{"role": "assistant", "content": text} for text in texts]
        values = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in answer["choices"]]
        assert values == local.logprobs
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == sum(map(len, local.responses))


def test_roles_are_those_of_data_preparation(client, tokenizer):
    body = {"max_tokens": 1, "return_token_ids": True}
    for name, role in {"human": "user", "gpt": "assistant", "function": "tool", "developer": "system"}.items():
        answers = [
            ask(client, {**body, "messages": [*HELLO, {"role": one, "content": "x"}]}, CHAT) for one in (name, role)
        ]
        assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]


def test_chat_goes_on_to_the_last_position_by_default(client, policy):
    answer = ask(client, {"messages": HELLO, "seed": 1, "ignore_eos": True}, CHAT)
    assert answer["usage"]["total_tokens"] == policy.model.config.max_position_embeddings


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stop", [None, "e"])
def test_a_stream_has_the_parts_of_the_whole_answer(client, path, stop):
    given = {"prompt": PROMPTS[0]} if path == TEXT else {"messages": HELLO}
    body = {**given, "max_tokens": 20, "n": 2, "seed": 5, "logprobs": 0 if path == TEXT else True}
    body |= {"return_token_ids": True, "ignore_eos": True} | ({"stop": stop} if stop else {})
    answer = ask(client, body, path)
    rows = events(client, {**body, "stream_options": {"include_usage": True}}, path)
    assert rows.pop()["usage"] == answer["usage"]
    for choice in answer["choices"]:
        own = [row["choices"][0] for row in rows if row["choices"][0]["index"] == choice["index"]]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert [index for part in own for index in part["token_ids"]] == choice["token_ids"]
        shown = [part["logprobs"] for part in own]
        if path == TEXT:
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [token for part in shown for token in part["tokens"]] == choice["logprobs"]["tokens"]
            found = [value for part in shown for value in part["token_logprobs"]]
            expected = choice["logprobs"]["token_logprobs"]
        else:
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(part["delta"]["content"] for part in own) == choice["message"]["content"]
            found = [token["logprob"] for part in shown for token in part["content"]]
            expected = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert found == pytest.approx(expected, abs=1e-4)  # two rows at a time are rounded otherwise
        assert len(own) > 2 or stop


def test_a_stop_text_ends_a_response_and_is_shown_only_when_asked_for(client, tokenizer):
    body = {"prompt": PROMPTS[0], "max_tokens": 60, "n": 8, "seed": 2, "ignore_eos": True}
    without = ask(client, {**body, "stop": ["e"], "return_token_ids": True})["choices"]
    shown = ask(client, {**body, "stop": "e", "include_stop_str_in_output": True, "return_token_ids": True})["choices"]
    assert [choice["token_ids"] for choice in without] == [choice["token_ids"] for choice in shown]
    assert {choice["finish_reason"] for choice in shown} >= {"stop"}
    for cut, whole in zip(without, shown):
        assert whole["text"] == decode(tokenizer, whole["token_ids"])
        assert cut["text"] == whole["text"].partition("e")[0]


# ------------------------------------------------------------------------------------------------------------- refusals
GOOD = {"prompt": [5, 6], "max_tokens": 2}
REFUSED = [
    ({"model": "another"}, "unknown model 'another'; here are model"),
    ({"prompt": None}, "prompt must be a text or a list of token ids"),
    ({"prompt": []}, "prompt 0 must be a text or a list of token ids"),
    ({"prompt": ""}, "the prompt has no tokens"),
    ({"prompt": [[5], []]}, "prompt 1 must be"),
    ({"prompt": [5, 100_000]}, "prompt 0 has the token id 100000; the model has"),
    ({"prompt": [5, -1]}, "prompt 0 must be"),
    ({"prompt": [5, 1.0]}, "prompt 0 must be"),
    ({"prompt": [5, True]}, "prompt 0 must be"),
    ({"prompt": "\ud800"}, "the body is not JSON that can be read"),
    ({"prompt": {"text": "a"}}, "prompt 0 must be"),
    ({"max_tokens": 300}, "does not fit into the 256 positions; use at most 254"),
    ({"prompt": [5] * 256}, "fills the 256 positions"),
    ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, not 0"),
    ({"max_tokens": "5"}, "max_tokens must be"),
    ({"n": 0}, "n must be a whole number from 1"),
    ({"n": 10**9}, "n must be"),
    ({"n": 16_384, "prompt": [[5]] * 4}, "more than one request may ask for"),
    ({"temperature": -1}, "temperature must be a number from 0 to"),
    ({"temperature": 1e-9}, "temperature 1e-09 is neither 0"),
    ({"temperature": True}, "temperature must be"),
    ({"temperature": 1e21}, "temperature must be a number from 0 to"),
    ({"temperature": "1"}, "temperature must be"),
    ({"top_p": 0}, "top_p must be"),
    ({"top_k": -2}, "top_k must be"),
    ({"min_p": 2}, "min_p must be"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ({"seed": -1}, "seed must be"),
    ({"seed": 2**64}, "seed must be"),
    ({"logprobs": 5}, "logprobs must be 0"),
    ({"stop": ""}, "stop must be"),
    ({"stop": [1]}, "stop must be"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids has the token id"),
    ({"allowed_token_ids": []}, "allowed_token_ids must be a list of token ids, not empty"),
    ({"allowed_token_ids": [100_000]}, "allowed_token_ids has the token id 100000"),
    ({"noise": "%%"}, "noise is not base64"),
    ({"noise": "AAAA"}, "noise must have 1 x 2 float32 numbers (8 bytes), not 3"),
    ({"noise": encoded(torch.tensor([0.5, 1.0]))}, "noise must be numbers from 0 to below 1"),
    ({"noise": encoded(torch.tensor([0.5, float("nan")]))}, "noise must be numbers from 0 to below 1"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not served"),
    ({"echo": True}, "echo is not served"),
    ({"prompt_logprobs": 129}, "prompt_logprobs must be a whole number up to 128"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs are not streamed"),
    ({"temprature": 0.5}, "unknown field 'temprature'"),
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
REFUSED_CHAT = [
    ({"messages": None}, "messages must be a list"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": ["hello"]}, "messages 0 must be an object"),
    *(
        ({"messages": [*HELLO, {"role": role, "content": "x"}]}, f"message 1 has the role {role!r}; use system")
        for role in ("wizard", "User", "", "function_call")
    ),
    ({"messages": [{"role": None, "content": "x"}]}, "the role of messages 0 must be a text"),
    ({"messages": [{"role": "user"}]}, "the content of messages 0 must be a text"),
    ({"messages": [{"role": "user", "content": None}]}, "the content of messages 0 must be a text"),
    ({"messages": [{"role": "user", "content": 5}]}, "the content of messages 0 must be a text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the content of messages 0"),
    ({"messages": [{**HELLO[0], "audio": {}}]}, "messages 0 has 'audio', which is not served"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "the function of tools 0 must be an object with name"),
    ({"messages": HELLO, "tools": [ADD]}, "the chat template writes no tools; give another one by --chat_template"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "must be a name of up to 256"),
    ({"messages": HELLO, "tools": {}}, "tools must be a list of functions"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice required: the tools are none"),
    ({"messages": HELLO, "tool_choice": "some"}, "tool_choice must be none, auto, required or a function"),
]


def check_refusal(answer, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    line = answer.json()["error"]["message"]
    assert words in line and "\n" not in line and "Traceback" not in line, line


@pytest.mark.parametrize("wrong, words", REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_a_wrong_field_is_a_400_with_one_line(refusing, wrong, words):
    check_refusal(refusing.post(TEXT, content=json.dumps({**GOOD, **wrong})), 400, words)


@pytest.mark.parametrize("body, words", REFUSED_CHAT, ids=[words[:40] for _, words in REFUSED_CHAT])
def test_wrong_messages_are_a_400_with_one_line(refusing, body, words):
    check_refusal(refusing.post(CHAT, json={"max_tokens": 2, **body}), 400, words)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "the body is not JSON"),
        (b"{'prompt': 1}", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[1]", "the body must be a JSON object, not a list"),
        (b'{"temperature": NaN}', "the body is not JSON"),
        (b'{"temperature": 1e999}', "temperature must be"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (b"[" * 200_000, "recursion limit"),
        (b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", "recursion limit"),
    ],
)
@pytest.mark.parametrize("path", [TEXT, "/update_weight_version", "/v1/load_lora_adapter"])
def test_a_body_that_is_no_json_object_is_a_400_with_one_line(refusing, path, content, words):
    if path != TEXT and b'{"' in content:
        words = words if words.startswith(("the body", "recursion")) else "must be given, a text"
    check_refusal(refusing.post(path, content=content), 400, words)


def test_too_large_a_body_is_refused(client, monkeypatch):
    monkeypatch.setattr("lightrlhf.serving.handling.LARGEST_BODY", 100)
    check_refusal(client.post(TEXT, json={**GOOD, "user": "x" * 100}), 413, "a body may have 100 bytes")
    ask(client, GOOD)


def test_a_failure_of_the_engine_is_one_line_and_the_next_request_is_answered(client, engine, monkeypatch, capsys):
    before = ids_of(client)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.batch, "_sample", lambda *_: 1 // 0)
        check_refusal(client.post(TEXT, json=GOOD), 500, "ZeroDivisionError: integer division")
        answer = client.post(TEXT, json={**GOOD, "stream": True}).text
        assert "ZeroDivisionError" in answer and "[DONE]" not in answer
    assert ids_of(client) == before
    assert "Traceback" not in capsys.readouterr().err


def test_logits_that_are_not_finite_are_one_line(client, policy):
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[3] = float("nan")
    check_refusal(client.post(TEXT, json=GOOD), 500, "logits that are not finite")


def test_unknown_routes_and_methods_are_refused_in_json(client):
    check_refusal(client.post("/v1/embeddings", json={}), 404, "POST /v1/embeddings is not served")
    check_refusal(client.get(TEXT), 405, f"GET {TEXT} is not served")


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"bearer {KEY}x", KEY, "Bearer \xe9"])
def test_every_route_but_health_asks_for_the_key(engine, header):
    app = App(engine, KEY)
    with TestClient(app.asgi) as client:
        headers = {} if header is None else {b"authorization": header.encode("latin-1")}
        assert client.get("/health", headers=headers).status_code == 200
        paths = [
            "/version",
            "/metrics",
            "/v1/models",
            "/server_info",
            "/is_paused",
            "/weight_info",
            "/is_sleeping",
            "/nothing",
        ]
        posted = [TEXT, CHAT, "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        posted += ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up"]
        for method, path in [("GET", path) for path in paths] + [("POST", path) for path in posted]:
            check_refusal(client.request(method, path, headers=headers), 401, "the key is missing or wrong")
    assert app.intake.resumed.is_set()


# -------------------------------------------------------------------------------------------------------------- weights
def reload(client, folder) -> object:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return client.post("/collective_rpc", json=body)


def test_a_reload_turns_the_answers_into_those_of_the_new_weights(client, other, tokenizer):
    before = ids_of(client)
    fresh = Engine(load_policy(str(other), ModelArgs(), tokenizer), tokenizer, "model", str(other), num_slots=2)
    with TestClient(App(fresh, KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as expected:
        assert reload(client, other).json() == {"results": [None]}
        assert ids_of(client) == ids_of(expected) != before


def test_the_version_is_that_of_the_weights(client, folder, other):
    client.post("/update_weight_version", json={"new_version": "run-1"})
    assert client.get("/weight_info").json() == {"weight_version": "run-1"}
    assert ask(client, GOOD)["weight_version"] == "run-1"
    assert {row["weight_version"] for row in events(client, GOOD)} == {"run-1"}
    reload(client, other)
    assert client.get("/weight_info").json()["weight_version"] != "run-1"  # before the client says what they are
    check_refusal(client.post("/update_weight_version", json={"new_version": 5}), 400, "new_version must be given")


def test_sharded_files_are_read_and_tied_weights_may_be_stored_once(tmp_path, tokenizer):
    for tied in (False, True):
        models = [tiny_model("llama", tie_word_embeddings=tied, vocab_size=len(tokenizer)) for _ in range(2)]
        train_a_little(models[1])
        models[1].save_pretrained(tmp_path / f"{tied}", max_shard_size="20KB")
        assert len(list((tmp_path / f"{tied}").glob("*.safetensors"))) > 2
        engine = Engine(Policy(models[0]), tokenizer, "model", "")
        engine.reload(str(tmp_path / f"{tied}"))
        for name, value in models[1].state_dict().items():
            assert torch.equal(models[0].state_dict()[name], value), name


@pytest.mark.parametrize("tied_here, tied_there", [(False, False), (True, True), (False, True)])
def test_what_a_trainer_writes_for_servers_is_loaded(tmp_path, tokenizer, tied_here, tied_there):
    size = len(tokenizer)
    models = [tiny_model("llama", tie_word_embeddings=tied, vocab_size=size) for tied in (tied_here, tied_there)]
    train_a_little(models[1])
    export_for_servers(Policy(models[1]), tmp_path, tmp_path, as_adapter=False)
    Engine(Policy(models[0]), tokenizer, "model", "").reload(str(tmp_path))
    for name, value in models[1].state_dict().items():
        assert torch.equal(models[0].state_dict()[name], value), name


def wrong_folders(tmp_path, folder, tokenizer) -> dict[str, str]:
    """Folders that do not hold weights of this model, and words on why."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    norm, head = "model.norm.weight", "lm_head.weight"
    nan = weights[norm].clone()
    nan[1] = float("nan")
    changed = {
        "lacks": ({k: v for k, v in weights.items() if k != norm}, {}, f"it lacks {norm}"),
        "more": ({**weights, "model.extra": weights[norm].clone()}, {}, "it has model.extra, the model has not"),
        "shape": ({**weights, norm: weights[norm][:-1].clone()}, {}, f"its {norm} is 31, the model's 32"),
        "nan": ({**weights, norm: nan}, {}, f"weights that are not finite: {norm}"),
        "whole": ({**weights, norm: weights[norm].long()}, {}, f"its {norm} has int64 values, not float32"),
        "booleans": ({**weights, norm: weights[norm] > 0}, {}, f"its {norm} has bool values, not float32"),
        "double": ({**weights, norm: weights[norm].double() * 1e300}, {}, f"not finite: {norm}, as float32"),
        "heads": (weights, {"num_attention_heads": 8}, "config.json has num_attention_heads 8, the model 4"),
        "head": ({**weights, head: weights[head][:-1].clone()}, {}, f"its {head} is"),
    }
    found = {
        "": "the weights_path of kwargs must be given",
        str(tmp_path / "none"): "is not a folder that this server can see",
    }
    for name, (tensors, settings, words) in changed.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps(config | settings))
        found[str(tmp_path / name)] = words
    for name, content in (("cut", (folder / "model.safetensors").read_bytes()[:-1000]), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        found[str(tmp_path / name)] = "cannot be read"
    (tmp_path / "index").mkdir()
    index = {"weight_map": {norm: os.path.relpath(folder / "model.safetensors", tmp_path / "index")}}
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    found[str(tmp_path / "index")] = "has no model.safetensors"
    return found


def test_a_wrong_folder_leaves_the_old_weights(client, engine, tmp_path, folder, tokenizer):
    client.post("/update_weight_version", json={"new_version": "run-1"})
    before = ids_of(client)
    state = {name: value.clone() for name, value in engine.policy.model.state_dict().items()}
    for path, words in wrong_folders(tmp_path, folder, tokenizer).items():
        check_refusal(reload(client, path), 400, words)
        for name, value in engine.policy.model.state_dict().items():
            assert torch.equal(state[name], value), (path, name)
    assert ids_of(client) == before
    assert client.get("/weight_info").json() == {"weight_version": "run-1"}


def test_no_other_method_is_called(client):
    for body in ({}, {"method": "sleep"}, {"method": ["reload_weights"]}):
        check_refusal(client.post("/collective_rpc", json=body), 400, "method must be reload_weights")
    check_refusal(
        client.post("/collective_rpc", json={"method": "reload_weights", "kwargs": [1]}),
        400,
        "kwargs must be an object with weights_path",
    )


def test_while_paused_requests_wait_and_are_then_answered_by_the_new_weights(client, engine, other, monkeypatch):
    reload(client, other)
    expected = ids_of(client)
    reload(client, engine.root)
    old, arrived, served = ids_of(client), threading.Event(), engine.limits
    assert client.post("/pause?mode=wait").json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    monkeypatch.setattr(engine, "limits", lambda: arrived.set() or served())
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ids_of, client)
        assert arrived.wait(PATIENCE)
        assert reload(client, other).status_code == 200  # behind it in the queue, if it did not wait
        assert client.post("/resume").json() == {"status": "resumed"}
        assert answer.result(PATIENCE) == expected != old
    assert client.get("/is_paused").json() == {"is_paused": False}
    check_refusal(client.post("/pause?mode=keep"), 400, "mode keep is not served")


def test_pause_waits_for_what_runs(client, engine, monkeypatch):
    began, may_end, complete = threading.Event(), threading.Event(), engine.complete
    ended = []

    async def slow(asked):
        began.set()
        assert await asyncio.to_thread(may_end.wait, PATIENCE)
        ended.append(True)
        return await complete(asked)

    monkeypatch.setattr(engine, "complete", slow)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, client, GOOD)
        assert began.wait(PATIENCE)
        paused = pool.submit(lambda: (client.post("/pause?mode=wait"), list(ended)))
        while not client.get("/is_paused").json()["is_paused"]:
            pass
        was_done = paused.done()
        may_end.set()
        assert not was_done and paused.result(PATIENCE)[1] == [True] and answer.result(PATIENCE)
    client.post("/resume")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"noise": True}], ids=str)
def test_a_client_that_goes_away_ends_its_request(engine, more):
    """The server is told that the client has gone when a few tokens were sampled."""
    length, sampled = 200, engine.scheduler.memory.counts
    body = {"prompt": [5, 6], "max_tokens": length, "ignore_eos": True, **more}
    if "noise" in more:
        body["noise"] = encoded(torch.rand(1, length))
    steps, step = [], Slots.step
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def call() -> None:
        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": headers}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "root_path": ""}

        async def receive():
            if messages:
                return messages.pop()
            while sampled.sampled + len(steps) < 5:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        await App(engine, KEY).asgi(scope, receive, send)
        while engine.scheduler.memory.tickets or engine.scheduler.jobs:
            await asyncio.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(Slots, "step", lambda slots: (steps.append(1), time.sleep(0.005), step(slots)))
        compute = engine.scheduler.batch.step
        patch.setattr(engine.scheduler.batch, "step", lambda: (time.sleep(0.005), compute()))
        pool.submit(asyncio.run, asyncio.wait_for(call(), PATIENCE)).result()  # the main thread may have a loop
    assert sampled.sampled + len(steps) < length and not engine.scheduler.memory.running


# ------------------------------------------------------------------------------------------------------------- adapters
@pytest.fixture
def adapter(folder, tokenizer, tmp_path):
    """A peft folder on the served model."""
    policy = load_policy(str(folder), ModelArgs(finetune_mode="lora", lora_rank=2), tokenizer)
    train_a_little(policy)
    (tmp_path / "adapter").mkdir()
    lora.save_adapter(policy.model, policy.adapters, None, str(folder), tmp_path / "adapter")
    return tmp_path / "adapter"


def load(client, name: str, path) -> object:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def test_an_adapter_answers_by_its_name_and_the_model_stays_as_it_is(client, engine, adapter, folder, tokenizer):
    check_refusal(load(client, "step.0", folder), 400, "holds no adapter")
    assert all(weight.requires_grad for weight in engine.policy.model.parameters())
    before, noise = ids_of(client), torch.rand(3, 8)
    assert load(client, "step.1", adapter).status_code == 200
    policy = load_policy(str(adapter), ModelArgs(finetune_mode="lora"), tokenizer).eval()
    local = generate(policy, PROMPTS, DecodingArgs(max_new_tokens=8), end_ids(tokenizer, policy.model), noise, 2)
    body = {"prompt": PROMPTS, "max_tokens": 8, "noise": encoded(noise), "logprobs": 0, "return_token_ids": True}
    answer = ask(client, {**body, "model": "step.1"})
    assert answer["model"] == "step.1"
    assert [choice["token_ids"] for choice in answer["choices"]] == local.responses
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == local.logprobs
    assert ids_of(client) == ids_of(client, model="model") == before != ids_of(client, model="step.1")
    rows = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert rows["model"]["parent"] is None and rows["model"]["root"] == str(folder)
    assert rows["step.1"]["parent"] == "model" and rows["step.1"]["root"] == str(adapter)
    unload = {"lora_name": "step.1"}
    assert client.post("/v1/unload_lora_adapter", json=unload).status_code == 200
    check_refusal(client.post(TEXT, json={**GOOD, "model": "step.1"}), 400, "unknown model 'step.1'")
    check_refusal(client.post("/v1/unload_lora_adapter", json=unload), 400, "no adapter 'step.1' is loaded")
    assert all(weight.requires_grad for weight in engine.policy.model.parameters())  # exact samples depend on it
    assert ids_of(client) == before


ENDLESS = r"(?:\w|\.|[a-z])*[^\w.]"
PATTERNS = [
    {"target_modules": ENDLESS},
    {"exclude_modules": ENDLESS},
    {"rank_pattern": {ENDLESS: 3}},
    {"alpha_pattern": {ENDLESS: 3}},
    {"target_modules": "(q_proj"},
    {"layers_pattern": ENDLESS, "layers_to_transform": [0]},
]


def test_an_adapter_that_cannot_be_served_is_refused_and_leaves_no_trace(client, engine, adapter, folder, tmp_path):
    before = ids_of(client)
    assert load(client, "a", adapter).status_code == 200
    check_refusal(load(client, "a", adapter), 400, "a is loaded already")
    check_refusal(load(client, "model", adapter), 400, "model is loaded already")
    check_refusal(load(client, "b", tmp_path / "none"), 400, "is not a folder that this server can see")
    check_refusal(load(client, "b", folder), 400, "holds no adapter")
    check_refusal(load(client, "", adapter), 400, "lora_name must be given")
    check_refusal(reload(client, folder), 400, "adapters are loaded (a)")
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    first = min(weights)
    for changed, words in (
        ({k: v for k, v in weights.items() if k != first}, "lacks"),
        ({**weights, first: weights[first][:, :-1].clone()}, "size mismatch"),
        ({**weights, first: weights[first] * float("nan")}, "not finite"),
        ({**weights, first: weights[first].double() + 1e300}, "not finite"),
        ({**weights, first: weights[first].long()}, "has int64 values"),
        ({**weights, "base_model.model.none.lora_A.weight": weights[first].clone()}, "no layer"),
    ):
        save_file(changed, file)
        answer = load(client, "b", adapter)
        assert answer.status_code == 400 and words in answer.text, answer.text
        assert all({*layer.lora_A} == {"served_0"} for layer in lora.lora_layers(engine.policy.model).values())
    save_file(weights, file)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for changed in PATTERNS:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changed))
        start = time.monotonic()
        answer = load(client, "b", adapter)
        assert answer.status_code == 400 and min(changed) in answer.text, answer.text
        assert time.monotonic() - start < PATIENCE  # peft alone would match for years
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": r".*\.\w+_proj"}))
    for name in ("b", "c", "d"):
        assert load(client, name, adapter).status_code == 200
    check_refusal(load(client, "e", adapter), 400, "4 adapters are loaded; unload one of a, b, c, d")
    assert [row["id"] for row in client.get("/v1/models").json()["data"]] == ["model", "a", "b", "c", "d"]
    assert ids_of(client) == before and ids_of(client, model="a") == ids_of(client, model="d") != before


def test_an_adapter_on_top_of_a_merged_one_is_refused(adapter, tokenizer, folder):
    policy = load_policy(str(adapter), ModelArgs(), tokenizer)
    engine = Engine(policy, tokenizer, "model", str(adapter), merged_into=str(folder))
    with pytest.raises(UsageError, match="top"):
        engine.adapters.load("a", str(adapter))


# ---------------------------------------------------------------------------------------------------------- information
def test_what_a_trainer_compares(client, policy, tokenizer, folder):
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"].startswith("lightrlhf ")
    config = client.get("/server_info?config_format=json").json()["vllm_config"]["model_config"]
    assert config["logprobs_mode"] == "processed_logprobs" and config["max_model_len"] == 256
    assert config["dtype"] == "torch.float32"
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert client.post("/sleep?level=1").status_code == client.post("/wake_up").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    in_half = Engine(policy, tokenizer, "model", str(folder), dtype=torch.bfloat16)
    with TestClient(App(in_half, KEY).asgi, headers={"Authorization": f"Bearer {KEY}"}) as client:
        config = client.get("/server_info?config_format=json").json()["vllm_config"]["model_config"]
        assert config["dtype"] == "torch.bfloat16"
        noise = torch.rand(3, 8)
        with torch.autocast("cpu", torch.bfloat16):
            ends = end_ids(tokenizer, policy.model)
            local = generate(policy, PROMPTS, DecodingArgs(max_new_tokens=8), ends, noise, 64)
        body = {"prompt": PROMPTS, "max_tokens": 8, "noise": encoded(noise), "logprobs": 0, "return_token_ids": True}
        choices = ask(client, body)["choices"]
        assert [choice["logprobs"]["token_logprobs"] for choice in choices] == local.logprobs


def test_a_reset_forgets_prefixes_and_usage_counts_what_was_known(client):
    body = {"prompt": [5 + number % 30 for number in range(70)], "max_tokens": 2, "n": 2, "ignore_eos": True}

    def cached() -> int:
        return ask(client, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached()] == [0, 64]
    assert events(client, {**body, "stream_options": {"include_usage": True}})[-1]["usage"][
        "prompt_tokens_details"
    ] == {"cached_tokens": 64}
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0
    lines = dict(line.split() for line in client.get("/metrics").text.splitlines())
    assert int(lines["lightrlhf_sampled_tokens_total"]) == 16 and lines["lightrlhf_running_rows"] == "0"
