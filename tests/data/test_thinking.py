"""Responses behind prompts that open or close thinking, and messages in the shape that a template takes."""

from importlib.metadata import version
from typing import Any

import pytest
from helpers.ends import tokenizer_of
from packaging.version import Version

from datasets_prep.common import complete
from datasets_prep.turns import BadRow, Dialogue
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rendering import render
from lightrlhf.data.rows import load_rows
from lightrlhf.data.tokens import encode_prompt, encode_response

ASKED = [{"role": "user", "content": "what is two"}]
SYSTEM = {"role": "system", "content": "be brief"}
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}ANSWER{% else %}"
    "{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}PROMPT{% endif %}"
)


def turns(prompt: str, answer: str = "{{ m.content }}") -> Any:
    """A tokenizer of ChatML with these parts of a template."""
    return marked(TURNS.replace("PROMPT", prompt).replace("ANSWER", answer))


def marked(template: str) -> Any:
    tokenizer = tokenizer_of(template, "<|im_start|>", "<|im_end|>", added=("<think>", "</think>"))
    return complete(tokenizer, None)


def answer(content: str = "2", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def trained(tokenizer: Any, message: dict[str, Any], prompt: Any = ASKED, tools: Any = None) -> tuple[str, str]:
    """What follows the words of the prompt, and the response."""
    dialogue = Dialogue(tokenizer, [*prompt, message], tools, [message])
    turn = dialogue.turn(len(prompt))
    return turn.prompt.rpartition("<|im_start|>assistant\n")[2], turn.answer.removesuffix("<|im_end|>")


# ----------------------------------------------------------------------------------------------------------- thinking
# what the prompt opens is in no answer (DeepSeek-R1, QwQ); in answers with reasoning (MiniMax M2); ended in each answer
# (GLM 4.7, Nemotron 3), also where the reasoning is dropped (DeepSeek V3.1); ended by another mark (Cohere)
STRIPPED = "{{ m.content.split('</think>')[-1] }}"
WRITTEN = (
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
)
ENDED = "{{ '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}"
LINES = (
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' if m.reasoning_content else '<think></think>' }}"
    "{{ m.content }}"
)
DROPPED = "{{ '</think>' + m.content.split('</think>')[-1] }}"
MARKED = (
    "{% if m.reasoning_content %}{{ '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{% endif %}"
    "{{ '[' + m.content + ']' }}"
)


@pytest.mark.parametrize(
    "prompt, written, plain, reasoned",
    [
        ("<think>\n", STRIPPED, "\n</think>\n\n2", "one and one\n</think>\n\n2"),
        ("<think>\n", WRITTEN, "\n</think>\n\n2", "one and one\n</think>\n\n2"),
        ("<think>\n", ENDED, "</think>2", "one and one</think>2"),
        ("<think>", ENDED, "</think>2", "one and one</think>2"),
        ("<think>\n", LINES, "</think>2", "one and one\n</think>\n2"),
        ("<think>", DROPPED, "</think>2", "one and one</think>2"),
        ("<|START_THINKING|>", MARKED, "<|END_THINKING|>[2]", "one and one<|END_THINKING|>[2]"),
        ("<think>\n", "{{ '<think>\n' + m.content }}", "\n</think>\n\n2", "one and one\n</think>\n\n2"),
    ],
)
def test_a_prompt_that_opens_thinking_is_answered_by_its_end(prompt, written, plain, reasoned):
    tokenizer = turns(prompt, written)
    assert trained(tokenizer, answer()) == (prompt, plain)
    assert trained(tokenizer, answer(reasoning_content="one and one")) == (prompt, reasoned)
    for text in ("<think>\none and one\n</think>\n\n2", "one and one\n</think>\n\n2"):  # the second as sampled
        assert trained(tokenizer, answer(text)) == (prompt, reasoned)
    for message in (answer(), answer(reasoning_content="one and one")):
        text = f"{trained(tokenizer, message)[1]}<|im_end|>"
        assert tokenizer.decode(encode_response(tokenizer, message, ASKED)) == text


def test_an_answer_that_repeats_its_reasoning_keeps_both():
    tokenizer = turns("<think>\n", STRIPPED)
    assert trained(tokenizer, answer("2", reasoning_content="2")) == ("<think>\n", "2\n</think>\n\n2")


@pytest.mark.parametrize("closed", ["<think></think>", "<think>\n\n</think>\n\n", "</think>"])
def test_a_prompt_that_closes_thinking_is_answered_at_once(closed):
    """Where the answer has no reasoning; with it, the template's own variable opens thinking."""
    tokenizer = turns("{% if enable_thinking %}{{ '<think>\n' }}{% else %}{{ '" + closed + "' }}{% endif %}", STRIPPED)
    assert trained(tokenizer, answer()) == (closed, "2")
    assert trained(tokenizer, answer(reasoning_content="one and one")) == ("<think>\n", "one and one\n</think>\n\n2")
    assert trained(tokenizer, answer(), [*ASKED, answer(reasoning_content="history"), *ASKED]) == (closed, "2")
    with pytest.raises(UsageError, match="enable_thinking"):  # a prompt encoded alone is one that closes thinking
        encode_response(tokenizer, answer(reasoning_content="one and one"), ASKED)
    tokenizer.chat_template = "{% set enable_thinking = true %}" + tokenizer.chat_template
    ids = encode_response(tokenizer, answer(reasoning_content="one and one"), ASKED)
    assert tokenizer.decode(ids) == "one and one\n</think>\n\n2<|im_end|>"


def test_an_end_of_thinking_that_the_prompt_has_already_is_not_trained():
    tokenizer = turns("<think></think>", "{{ '</think>' + m.content }}")
    assert trained(tokenizer, answer()) == ("<think></think>", "2")


def test_reasoning_is_refused_where_the_prompt_always_closes_thinking():
    tokenizer = turns("<think></think>", STRIPPED)
    with pytest.raises(BadRow, match="generation_prompt_closes_thinking"):
        trained(tokenizer, answer(reasoning_content="one and one"))


def test_reasoning_that_is_written_beside_calls_alone_is_put_between_the_same_tags():
    closed = "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"
    tokenizer = turns(closed)
    assert trained(tokenizer, answer()) == ("<|channel>thought\n<channel|>", "2")
    assert trained(tokenizer, answer(reasoning_content="one")) == ("", "<|channel>thought\none\n<channel|>2")


def test_each_turn_is_trained_behind_its_served_prompt():
    """The end of thinking is in no later prompt, so a dialogue of two turns is two rows."""
    tokenizer = turns("<think>\n", STRIPPED)
    talk = Dialogue(tokenizer, [*ASKED, answer(), *ASKED, answer("two")], None)
    first, second = talk.turn(1), talk.turn(3)
    assert second.answer == "\n</think>\n\ntwo<|im_end|>" and not second.prompt.startswith(first.prompt + first.answer)
    assert second.prompt == render(tokenizer, talk.messages[:3], add_generation_prompt=True)


def test_the_words_of_a_user_open_no_thinking():
    template = "{% for m in messages %}{{ m.content + ('<|im_end|>' if loop.index is even else '') }}{% endfor %}"
    tokenizer = complete(tokenizer_of(template, "<|im_end|>"), None)  # which has no token for it
    asked = [{"role": "user", "content": "what is <think>"}]
    assert Dialogue(tokenizer, [*asked, answer()], None).turn(1).answer == "2<|im_end|>"


def test_a_prompt_that_begins_the_answer_is_refused():
    with pytest.raises(BadRow, match="generation_prompt_is_not_the_answers_beginning"):
        trained(turns("Let me see: "), answer())


def test_system_words_that_later_messages_move_stay_in_the_prompt():
    template = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
        "{{ '<|im_start|>' + (system + ' ' if loop.last else '') + m.content + '<|im_start|>assistant\n' }}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    talk = Dialogue(marked(template), [SYSTEM, *ASKED, answer(), *ASKED, answer("two")], None)
    assert talk.turn(2).prompt == "<|im_start|>be brief what is two<|im_start|>assistant\n"
    assert [talk.turn(index).answer for index in (2, 4)] == ["2<|im_end|>", "two<|im_end|>"]
    assert "be brief" in talk.turn(4).prompt.rpartition("2<|im_end|>")[2]


# ------------------------------------------------------------------------------------------------------------- shapes
CALLS = [{"id": "known0001", "type": "function", "function": {"name": "add", "arguments": {"to": "one"}}}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


def test_a_content_is_a_list_of_parts_where_the_template_reads_parts():
    tokenizer = marked(TURNS.replace("{{ m.content }}", PARTS).replace("ANSWER", PARTS).replace("PROMPT", ""))
    assert trained(tokenizer, answer(), [SYSTEM, *ASKED]) == ("", "2")
    assert "what is two" in tokenizer.decode(encode_prompt(tokenizer, ASKED))
    (row,) = load_rows("finetune", "train", None, [{"prompt": ASKED, "completion": answer()}], tokenizer)
    assert tokenizer.decode(row["input_ids"][row["prompt_len"] :]) == "2<|im_end|>"


def test_tools_are_a_list_where_the_template_loops_over_them():
    tokenizer = marked("{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + turns("").chat_template)
    assert trained(tokenizer, answer()) == ("", "2")
    assert tokenizer.decode(encode_prompt(tokenizer, ASKED, TOOLS)).startswith("add")


@pytest.mark.parametrize(
    "written",
    [
        "{% if m.content is none %}{% set call = m.tool_calls[0].function %}"
        "{{ call.name ~ ' ' ~ call.arguments | tojson }}{% else %}{{ m.content }}{% endif %}",
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name + ' ' + m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}",
        "{% if m.content is none %}{{ m.tool_calls[0].function.name + ' ' + m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}",
    ],
    ids=["without content", "arguments as text", "both"],
)
def test_a_call_is_given_as_the_template_reads_it(written):
    tools = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    tokenizer = marked(tools + TURNS.replace("PROMPT", "").replace("ANSWER", written))
    _, response = trained(tokenizer, answer("", tool_calls=CALLS), tools=TOOLS)
    assert response == 'add {"to": "one"}'
    assert trained(tokenizer, answer()) == ("", "2")


# before transformers 5.21 a template that reads `thinking` gets none, and such rows are dropped and counted
RENAMED = pytest.mark.skipif(Version(version("transformers")) < Version("5.21"), reason="transformers 5.21 renames it")


@pytest.mark.parametrize("name", ["reasoning_content", pytest.param("thinking", marks=RENAMED)])
def test_reasoning_has_the_name_that_the_template_reads(name):
    tokenizer = turns("", "{{ '(' ~ m." + name + " ~ ')' + m.content }}")
    assert trained(tokenizer, answer(reasoning_content="one")) == ("", "(one)2")


@pytest.mark.parametrize("problem", ["{{ messages.nothing.at_all }}", "{% include 'no_file' %}", "{{ 1 // 0 }}"])
def test_whatever_a_template_raises_is_one_line(problem):
    tokenizer = turns("")
    tokenizer.chat_template = "{% if messages | length > 1 %}" + problem + "{% endif %}" + tokenizer.chat_template
    with pytest.raises(BadRow, match="refused_by_chat_template"):
        trained(tokenizer, answer())
    with pytest.raises(UsageError):
        encode_response(tokenizer, answer(), ASKED)
