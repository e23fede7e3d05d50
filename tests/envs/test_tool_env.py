"""Plain functions as tools: schemas, results in order, and what a call does wrong."""

import asyncio
import json

import pytest
from helpers.templates import controls
from helpers.tool_templates import FORMS, tool_tokenizer

from lightrlhf.data.rendering import TOOLS
from lightrlhf.envs.tool_env import LONGEST_RESULT, ToolEnv, as_content
from lightrlhf.generation.conversations import Conversation
from lightrlhf.generation.episode_env import opening


def add(a: int, b: float = 1.0) -> float:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


async def slow(text: str) -> str:
    """Say a text late.

    Args:
        text: what to say.
    """
    await asyncio.sleep(0.02)
    return text


def fail() -> str:
    """Fail."""
    raise RuntimeError("no luck")


def call(name, number=0, **arguments):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def say(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


@pytest.fixture
def env():
    return ToolEnv([add, slow, fail])


def test_schemas_come_from_hints_and_docstring(env):
    schema = env.tools[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first one."}


def test_results_stand_in_the_order_of_the_calls(env):
    answer = env.step(say(call("slow", 0, text="first"), call("add", 1, a=2, b=3), call("slow", 2, text="third")))
    assert [one["content"] for one in answer.messages] == ["first", "5", "third"]
    assert [one["tool_call_id"] for one in answer.messages] == ["c0", "c1", "c2"]
    assert answer.counts == {"calls": 3} and not answer.done


WRONG = [
    (call("ad", a=1), "unknown_tools", "error: no tool ad; there is add, slow, fail"),
    (call("add"), "wrong_arguments", "error: add: missing a required argument: 'a'"),
    (call("add", a=1, c=2), "wrong_arguments", "error: add: got an unexpected keyword argument 'c'"),
    (call("add", a="1"), "wrong_arguments", "error: add: a must be of type int, not '1'"),
    (call("add", a=True), "wrong_arguments", "error: add: a must be of type int, not True"),
    ({"function": {"name": "add", "arguments": "{"}}, "wrong_arguments", "error: the arguments are not JSON"),
    ({"function": {"name": "add", "arguments": "[1]"}}, "wrong_arguments", "error: the arguments are not an object"),
    (call("fail"), "tool_errors", "error: RuntimeError: no luck"),
]


@pytest.mark.parametrize("wrong, kind, text", WRONG)
def test_what_a_call_does_wrong_is_told_and_counted(env, wrong, kind, text):
    answer = env.step(say(wrong, call("add", 1, a=1)))
    assert answer.messages[0]["content"].startswith(text) and answer.messages[1]["content"] == "2.0"
    assert answer.counts == {"calls": 2, "failed_calls": 1, kind: 1}


def test_a_reply_without_a_call_ends_the_episode(env):
    answer = env.step({"role": "assistant", "content": "It is 5."})
    assert answer.done and answer.stop_reason == "answer" and not answer.messages


def test_arguments_may_be_json_text(env):
    text = {"id": "x", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    assert env.step(say(text)).messages[0]["content"] == "2.0"


@pytest.mark.parametrize("name", FORMS)
def test_a_result_spells_no_control_token(name):
    tokenizer = tool_tokenizer(name)
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in sorted(controls(tokenizer))]

    def ids_of(result):
        env = ToolEnv([lambda: result])
        env.caller.functions["say"] = env.caller.functions.pop("<lambda>")
        made = {"id": "abcdefghi", "type": "function", "function": {"name": "say", "arguments": {}}}
        reply = {"role": "assistant", "content": "", "tool_calls": [made]}
        messages = [{"role": "user", "content": "Go."}, reply, *env.step(reply).messages]
        ids = Conversation(tokenizer).begin(messages, TOOLS).ids
        return [index for index in ids if index in controls(tokenizer)]

    assert tokens and ids_of(" ".join(tokens)) == ids_of("nothing")


class Unsayable:
    def __str__(self):
        raise ValueError("no words")


def test_any_result_is_a_text():
    assert as_content({"a": [1, None]}) == '{"a": [1, null]}'
    assert as_content(b"x") == "\"b'x'\"" and as_content(None) == "null"
    with pytest.raises(ValueError, match="words"):
        as_content(Unsayable())
    as_content("a\ud800b").encode()
    long = as_content("a" * LONGEST_RESULT + "b")
    assert long.startswith("aaa") and long.endswith("ab") and "[101 characters left out]" in long
    assert len(long) <= LONGEST_RESULT and as_content(long) == long


def test_the_first_message_of_the_environment_joins_the_user_s():
    prompt = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Begin."}]
    shown = opening(prompt, [{"role": "user", "content": "A door."}])
    assert [one["content"] for one in shown] == ["Play.", "Begin.\n\nA door."]
    assert prompt[1]["content"] == "Begin." and opening(prompt, []) == prompt
