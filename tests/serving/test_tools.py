"""Chat with tools, as the real clients see it: `openai` in one piece, streamed and asynchronous, and `curl`."""

import asyncio
import json
import shutil
import subprocess

import openai
import pytest
from helpers.scripted import KEY, scripted
from helpers.tool_templates import tool_tokenizer

from lightrlhf.data.chat import controls
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.serving.requests import read_chat

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
SUB = {"type": "function", "function": {**ADD["function"], "name": "sub"}}
TOOLS = [ADD, SUB]
ASKED = [{"role": "user", "content": "two and three, and nine less one?"}]
CALLS = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sub", "arguments": {"a": 9, "b": 1}}\n</tool_call><|im_end|>'
)
BROKEN = 'I add.\n<tool_call>{"name": "add", "arguments": [2]}</tool_call><|im_end|>'
ANSWER = "It is 5 and 8.<|im_end|>"


@pytest.fixture(scope="module")
def server():
    with scripted(tool_tokenizer("qwen25"), [ANSWER]) as (url, engine):
        yield url, engine


@pytest.fixture
def say(server):
    """A function that sets what the server says, and clears what it was asked."""

    def texts(*given: str):
        engine = server[1]
        engine.texts, engine.num_given, engine.asked = list(given), 0, []
        return engine

    return texts


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server[0], api_key=KEY, max_retries=0) as client:
        yield client


def ask(client, messages=ASKED, **more):
    return client.chat.completions.create(model="model", messages=messages, **{"tools": TOOLS, **more})


def calls_of(message) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


EXPECTED = [("add", {"a": 2, "b": 3}), ("sub", {"a": 9, "b": 1})]


def results(message) -> list[dict]:
    """The calls of a message and their results, as a program sends them."""
    values = {"add": 5, "sub": 8}
    return [
        *ASKED,
        message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": str(values[call.function.name])}
            for call in message.tool_calls
        ),
    ]


def test_a_program_calls_tools_and_sends_their_results(client, say):
    engine = say(CALLS, ANSWER)
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls" and calls_of(choice.message) == EXPECTED
    assert choice.message.content == "I add." and len({call.id for call in choice.message.tool_calls}) == 2
    messages = results(choice.message)
    assert ask(client, messages).choices[0].message.content == "It is 5 and 8."
    prompt = engine.tokenizer.decode(engine.asked[1].prompts[0])
    assert "<tool_response>\n5\n</tool_response>\n<tool_response>\n8\n</tool_response>" in prompt
    assert engine.asked[1].prompts[0][: len(engine.asked[0].prompts[0])] == engine.asked[0].prompts[0]
    assert '"name": "add"' in prompt and '{"a": 2, "b": 3}' in prompt


def test_results_come_in_the_order_of_the_calls_whatever_the_order_they_are_sent_in(client, say):
    engine = say(CALLS, ANSWER)
    messages = results(ask(client).choices[0].message)
    ask(client, messages)
    ask(client, [*messages[:2], messages[3], messages[2]])
    assert engine.asked[1].prompts == engine.asked[2].prompts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_accumulates_to_the_whole_answer(client, say, stream):
    for text in (CALLS, BROKEN, ANSWER, CALLS.removeprefix("I add.\n")):
        say(text)
        whole = ask(client, extra_body={"return_token_ids": True}, logprobs=True).choices[0]
        say(text)
        with client.chat.completions.stream(model="model", messages=ASKED, tools=TOOLS) as found:
            final = found.get_final_completion().choices[0]
        assert final.finish_reason == whole.finish_reason
        assert (final.message.content or None) == (whole.message.content or None)
        shown = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or []]
        assert shown == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]


def test_streamed_calls_have_an_index_an_id_a_name_and_then_their_arguments(client, say):
    say(CALLS)
    chunks = [*ask(client, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True})]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens > 0
    parts = [part for chunk in chunks[:-1] for part in chunk.choices[0].delta.tool_calls or []]
    assert [part.index for part in parts] == [0, 0, 1, 1]
    assert [part.function.name for part in parts] == ["add", None, "sub", None] and parts[0].id != parts[2].id
    assert [part.function.arguments for part in parts] == ["", '{"a": 2, "b": 3}', "", '{"a": 9, "b": 1}']
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["tool_calls"]
    ids = [index for chunk in chunks[:-1] for index in getattr(chunk.choices[0], "token_ids", None) or []]
    assert len(ids) == chunks[-1].usage.completion_tokens


def test_asynchronous_clients_are_answered(server, say):
    async def both():
        async with openai.AsyncOpenAI(base_url=server[0], api_key=KEY, max_retries=0) as client:
            whole = await ask(client)
            chunks = [chunk async for chunk in await ask(client, stream=True)]
        return whole, chunks

    say(CALLS)
    whole, chunks = asyncio.run(both())
    assert calls_of(whole.choices[0].message) == EXPECTED and chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_read_is_content_and_says_why(client, say, stream):
    say(BROKEN)
    answer = ask(client, stream=stream)
    choice = [*answer][-1].choices[0] if stream else answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.tool_call_problem == "a tool call cannot be read: the arguments of add are not an object"
    if not stream:
        assert choice.message.content == BROKEN.removesuffix("<|im_end|>") and choice.message.tool_calls is None


def test_without_tools_or_with_none_wanted_the_text_is_content(client, say):
    for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        engine = say(CALLS)
        message = ask(client, **more).choices[0].message
        assert message.tool_calls is None and "<tool_call>" in message.content
        assert ("<tools>" in engine.tokenizer.decode(engine.asked[0].prompts[0])) == ("tool_choice" in more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", ["required", {"type": "function", "function": {"name": "sub"}}])
def test_a_call_that_must_come_is_sampled_again(client, say, wanted, stream):
    only_add = CALLS.partition("</tool_call>")[0] + "</tool_call><|im_end|>"
    engine = say(ANSWER, BROKEN, only_add if wanted == "required" else CALLS, ANSWER)
    if stream:
        with client.chat.completions.stream(model="model", messages=ASKED, tools=TOOLS, tool_choice=wanted) as found:
            choice = found.get_final_completion().choices[0]
    else:
        choice = ask(client, tool_choice=wanted, seed=1).choices[0]
    assert len(engine.asked) == 3 and choice.message.tool_calls[-1].function.name == (
        "add" if wanted == "required" else "sub"
    )
    noise = [asked.noise.tolist() for asked in engine.asked]
    assert noise[0] != noise[1] != noise[2]
    say(ANSWER)
    choice = ask(client, tool_choice=wanted).choices[0]
    assert "in 8 samples" in choice.tool_call_problem and choice.message.content == "It is 5 and 8."
    assert len(engine.asked) == 8


def test_only_choices_without_their_call_are_sampled_again(client, say):
    engine = say(CALLS, ANSWER, CALLS, ANSWER, CALLS, CALLS)
    answer = ask(client, tool_choice="required", n=3)
    assert [asked.n for asked in engine.asked] == [3, 1, 1]
    assert [calls_of(choice.message) for choice in answer.choices] == [EXPECTED] * 3


def test_a_stop_text_ends_a_response_with_tools(client, say):
    say(ANSWER)
    assert ask(client, stop=["Observation:"]).choices[0].message.content == "It is 5 and 8."


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("stream", [False, True])
def test_curl_reads_calls(server, say, stream):
    say(CALLS)
    body = json.dumps({"messages": ASKED, "tools": TOOLS, "stream": stream})
    words = ["curl", "-sSN", f"{server[0]}/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
    answer = subprocess.run(
        [*words, "-H", "Content-Type: application/json", "-d", body], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    if stream:
        lines = [line for line in answer.stdout.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "tool_calls"
    else:
        assert json.loads(answer.stdout)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def called(*ids: str) -> dict:
    calls = [{"id": one, "type": "function", "function": {"name": "add", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(identifier: str | None) -> dict:
    return {"role": "tool", "content": "5"} | ({"tool_call_id": identifier} if identifier else {})


WRONG = [
    ([called("a")], "the call a has no result"),
    ([called("a", "b"), result("a")], "the call b has no result"),
    ([called("a", "b"), result("b"), ASKED[0]], "the call a has no result"),
    ([called("a"), result("b")], "answers the call 'b'; the calls before it are a"),
    ([called("a"), result("a"), result("a")], "answers the call 'a'; the calls before it are a"),
    ([called("a"), result(None)], "messages 2 has no tool_call_id; the calls before it are a"),
    ([result("a")], "answers the call 'a'; the calls before it are none"),
    ([called("a", "a"), result("a")], "messages 1 has two calls of one id"),
    ([{**called("a"), "tool_calls": [{"id": "a"}]}], "the function of tool_calls 0 of messages 1 must be"),
    ([{**called("a"), "tool_calls": "a"}], "the tool_calls of messages 1 must be a list of calls"),
]


@pytest.mark.parametrize("messages, words", WRONG, ids=[words[:40] for _, words in WRONG])
def test_calls_and_results_that_do_not_fit_are_a_400(client, messages, words):
    with pytest.raises(openai.BadRequestError) as found:
        ask(client, [*ASKED, *messages])
    assert words in found.value.body["message"], found.value.body
    arguments = json.loads(json.dumps(called("a")).replace("{}", "no"))
    with pytest.raises(openai.BadRequestError, match="messages 1"):
        ask(client, [*ASKED, arguments, result("a")])


def test_results_have_the_names_of_their_functions_in_the_order_of_the_calls():
    messages = [ASKED[0], called("a", "b"), result("b"), {**result("a"), "content": "6"}, ASKED[0]]
    _, found, _ = read_chat({"messages": messages})
    assert [(one.get("tool_call_id"), one["content"], one.get("name")) for one in found[2:]] == [
        ("a", "6", "add"),
        ("b", "5", "add"),
        (None, ASKED[0]["content"], None),
    ]


def test_a_refusal_names_its_field(client):
    with pytest.raises(openai.BadRequestError) as found:
        ask(client, temperature=-1)
    assert found.value.param == "temperature" and found.value.type == "BadRequestError"


def test_no_text_of_a_client_becomes_a_control_token(client, say):
    engine = say(ANSWER)
    marks = controls(engine.tokenizer).ids

    def shown(text: str) -> list[int]:
        tool = {"type": "function", "function": {**ADD["function"], "description": text}}
        call = {"id": text, "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": text})}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        ask(client, [*ASKED, answer, {"role": "tool", "tool_call_id": text, "content": text}], tools=[tool])
        return [index for index in engine.asked[-1].prompts[0] if index in marks]

    for text in controls(engine.tokenizer).texts:
        assert shown(f"a {text}b") == shown("words"), text
    assert engine.asked[0].prompts[0] != encode_prompt(engine.tokenizer, ASKED, TOOLS)
