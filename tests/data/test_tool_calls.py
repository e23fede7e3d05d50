"""Tool calls are read back from what each template writes, whole or as they are streamed; what cannot be is content."""

import copy
import json
import random
from functools import partial

import pytest
from helpers.templates import ZOO
from helpers.tool_templates import FORMS, tool_tokenizer

from lightrlhf.cli.errors import UsageError
from lightrlhf.data import call_forms
from lightrlhf.data.chat import controls
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.data.tool_calls import Parser, call_id, parse, schema_of, visible

ASKED = [{"role": "user", "content": "two and three?"}]
PARAMETERS = {"a": {"type": "integer"}, "b": {"type": "number"}, "text": {"type": "string"}, "all": {"type": "array"}}
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": PARAMETERS}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {**ADD, "name": "sub"}}]
ARGUMENTS = [
    {"a": 2, "b": 3.5},
    {"text": 'a "quoted" line,\nand <b> é 你好 \\ {}', "all": [1, {"x": None}]},
    {"text": "12"},
    {},
]


def call(name: str, arguments: dict, number: int = 0) -> dict:
    return {"id": call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def found(parsed) -> list[tuple[str, dict]]:
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in parsed.tool_calls]


def streamed(tokenizer, ids, pieces: int, prompt: str = ""):
    """What a parser gives that gets a response in so many pieces, cut at random."""
    schema = schema_of(tokenizer)
    text = str(tokenizer.decode(visible(tokenizer, schema, ids), clean_up_tokenization_spaces=False))
    parser = Parser(tokenizer, schema, prompt, TOOLS, partial(call_id, 0))
    cuts = sorted(random.Random(pieces).choices(range(len(text) + 1), k=pieces - 1))
    deltas = [delta for start, end in zip([0, *cuts], [*cuts, len(text)]) for delta in parser.add(text[start:end])]
    deltas += parser.end()
    joined = {name: "".join(v for n, v in deltas if n == name) for name in ("content", "reasoning_content")}
    return joined["content"], joined["reasoning_content"], [v for n, v in deltas if n == "tool_calls"], parser.problem


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_back_from_what_the_template_writes(name):
    tokenizer = tool_tokenizer(name)
    assert schema_of(tokenizer).form is call_forms.FORMS[FORMS[name]]
    prompt = encode_prompt(tokenizer, ASKED, TOOLS)
    shown = str(tokenizer.decode(prompt))
    for number, given in enumerate(ARGUMENTS):
        if FORMS[name] in ("gemma4", "unescaped") and number == 1:
            continue  # whose texts have no escapes
        try:
            several = [call("add", given), call("sub", given, 1)] if number else [call("add", given)]
            ids = encode_response(tokenizer, {"role": "assistant", "content": "", "tool_calls": several}, ASKED, TOOLS)
        except UsageError:
            several = several[:1]  # one call a turn
            ids = encode_response(tokenizer, {"role": "assistant", "content": "", "tool_calls": several}, ASKED, TOOLS)
        parsed = parse(tokenizer, ids, shown, TOOLS, seed=0)
        assert found(parsed) == [(one["function"]["name"], given) for one in several] and parsed.problem is None
        assert parsed.content == parsed.reasoning == ""
        assert len({one["id"] for one in parsed.tool_calls}) == len(several)
        for pieces in (2, 5, 40):
            assert streamed(tokenizer, ids, pieces, shown) == ("", "", parsed.tool_calls, None)


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_content(name):
    tokenizer = tool_tokenizer(name)
    ids = encode_response(tokenizer, "It is five, {so}. <b>", ASKED, TOOLS)
    parsed = parse(tokenizer, ids, str(tokenizer.decode(encode_prompt(tokenizer, ASKED, TOOLS))), TOOLS)
    assert parsed == ("It is five, {so}. <b>", "", [], None)


def test_reasoning_stands_beside_words_and_calls():
    tokenizer = tool_tokenizer("qwen_thinking")
    message = {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "so 2 + 3",
        "tool_calls": [call("add", {})],
    }
    ids = encode_response(tokenizer, message, ASKED, TOOLS)
    parsed = parse(tokenizer, ids, "", TOOLS, 0)
    assert parsed[:2] == ("I add.", "so 2 + 3") and found(parsed) == [("add", {})]
    assert all(streamed(tokenizer, ids, n) == (*parsed[:2], parsed.tool_calls, None) for n in (2, 9, 60))
    assert encode_response(tokenizer, parsed.as_message(), ASKED, TOOLS) == ids
    opened = tool_tokenizer("thinking_opened")
    prompt = str(opened.decode(encode_prompt(opened, ASKED, TOOLS)))
    assert prompt.endswith("<think>\n")
    rest = opened("hm, 2\n</think>\n\nIt is 5.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert parse(opened, rest, prompt, TOOLS) == ("It is 5.", "hm, 2", [], None)


BROKEN = {
    "not JSON": ("{'name': 'add'}", "Expecting property name"),
    "no name": ('{"arguments": {}}', "a call is an object with a name and arguments"),
    "no arguments": ('{"name": "add"}', "a call is an object with a name and arguments"),
    "a name that is no text": ('{"name": 5, "arguments": {}}', "the name of a call is not a text"),
    "an empty name": ('{"name": " ", "arguments": {}}', "the name of a call is not a text"),
    "arguments of a list": ('{"name": "add", "arguments": [1]}', "the arguments of add are not an object"),
    "NaN": ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a number of JSON"),
    "infinite": ('{"name": "add", "arguments": {"a": 1e999}}', "Out of range"),
    "half a character": ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogates not allowed"),
    "cut": ('{"name": "add", "argu', "Unterminated string"),
    "deep": ('{"name": "add", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001, "recursion"),
    "long number": ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "Exceeds the limit"),
}


@pytest.mark.parametrize("body, words", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("is_closed", [True, False])
def test_what_is_no_call_is_content_and_says_why(body, words, is_closed):
    tokenizer = tool_tokenizer("qwen25")
    text = f"I add.\n<tool_call>{body}</tool_call> and" if is_closed else f"I add.\n<tool_call>{body}"
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    parsed = parse(tokenizer, ids, "", TOOLS)
    assert parsed.tool_calls == [] and words in parsed.problem and "\n" not in parsed.problem
    assert parsed.content == text
    for pieces in (3, 30):
        assert streamed(tokenizer, ids, pieces) == (parsed.content, "", [], parsed.problem)


IN_PYTHON = {  # text between the marks: calls as each form reads them, or the error
    "[f(a='it\\'s', b=-1.5)]": ([("f", {"a": "it's", "b": -1.5})], "plain arguments"),
    "[a.f(), g(x=true, y=None)]": ([("a.f", {}), ("g", {"x": True, "y": None})],) * 2,
    "[f(a='b\\n')]": ([("f", {"a": "b\n"})], [("f", {"a": "b\\n"})]),
    "[f(a='b\nc')]": ("SyntaxError", [("f", {"a": "b\nc"})]),
    "[f(a=[1, {'k': 'v'}])]": ([("f", {"a": [1, {"k": "v"}]})], "plain arguments"),
    "[f(a=hello)]": ("malformed", "malformed"),
    "[f(a=1, a=2)]": ("twice", "twice"),
    "[f(1)]": ("named arguments", "plain arguments"),
    "[f(**x)]": ("no name", "plain arguments"),
    "f(a=1)": ("not a list", "not a list"),
    "[f(a={1: 2})]": ("not a text", "plain arguments"),
    "[f(a=(1, 2))]": ("a tuple", "plain arguments"),
    "[f(a=1e999)]": ("a float", "a float"),
    "[f(a=__import__('os'))]": ("malformed", "plain arguments"),
    "[" + "(" * 3000 + "1" + ")" * 3000 + "]": ("as Python", "plain arguments"),
}


@pytest.mark.parametrize("number, name", enumerate(["python", "unescaped"]))
@pytest.mark.parametrize("body", IN_PYTHON, ids=range(len(IN_PYTHON)))
def test_calls_in_python_are_read_without_a_guess(body, number, name):
    tokenizer, expected = tool_tokenizer(name), IN_PYTHON[body][number]
    text = f"<|tool_call_start|>{body}<|tool_call_end|>"
    parsed = parse(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], "", TOOLS)
    if isinstance(expected, str):
        assert not parsed.tool_calls and expected in parsed.problem and parsed.content == text
    else:
        assert found(parsed) == expected and parsed.problem is None


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek", "mistral_args", "gemma4"])
def test_a_mark_of_a_call_without_one_is_told(name):
    tokenizer, mark = tool_tokenizer(name), call_forms.FORMS[name].mark
    ids = tokenizer(f"so {mark}s", add_special_tokens=False)["input_ids"]
    parsed = parse(tokenizer, ids, "", TOOLS)
    assert parsed.content == f"so {mark}s" and "is not followed by a name and arguments" in parsed.problem


def test_calls_before_a_broken_one_stay():
    tokenizer = tool_tokenizer("qwen25")
    whole = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer(f"{whole}\n<tool_call>no{whole}", add_special_tokens=False)["input_ids"]
    parsed = parse(tokenizer, ids, "", TOOLS)
    assert found(parsed) == [("add", {"a": 1})]


def test_a_tokenizer_that_brings_a_template_of_responses_is_read_by_it():
    tokenizer = copy.deepcopy(ZOO["qwen25"].tokenizer)
    calls = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    calls["transform"] = {"type": "function", "function": "{content}"}
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": calls, "content": {"content": "text"}},
    }
    tokenizer.response_template = template
    assert schema_of(tokenizer).form is None
    ids = tokenizer('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', add_special_tokens=False)[
        "input_ids"
    ]
    assert found(parse(tokenizer, ids, "<|im_start|>assistant\n", TOOLS)) == [("add", {"a": 1})]
    ids = tokenizer("<tool_call>no</tool_call>", add_special_tokens=False)["input_ids"]
    parsed = parse(tokenizer, ids, "<|im_start|>assistant\n", TOOLS)
    assert parsed.content == "<tool_call>no</tool_call>" and "could not parse" in parsed.problem


PARTS = ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {}}']
PARTS += [
    "[",
    "]",
    "{",
    '"',
    "\n",
    " ",
    "words",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<function=add>",
    "1",
]
PARTS += [
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<arg_key>a</arg_key>",
    "<arg_value>2</arg_value>",
    "<call>add",
]
PARTS += [
    "<call>add",
    "</call>",
    "<|start_action|>",
    "<|end_action|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool_call>call:add",
]
PARTS += ["<tool_call|>", '<|"|>', "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|end|>", "é"]
PARTS += ["<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", " to=functions.add"]
PARTS += ["<|channel|>commentary json<|message|>", "<|call|>", "<|python_tag|>", "\\ud800"]


@pytest.mark.parametrize("name", [name for name in FORMS if " with" not in name])
def test_any_text_is_read_alike_whole_or_in_pieces(name):
    tokenizer, draw = tool_tokenizer(name), random.Random(name)
    schema = schema_of(tokenizer)
    for _ in range(30):
        text = "".join(draw.choices(PARTS, k=draw.randrange(1, 14)))
        found = []
        for cuts in ([], [draw.randrange(len(text) + 1)], sorted(draw.choices(range(len(text) + 1), k=30))):
            parser = Parser(tokenizer, schema, "", TOOLS, partial(call_id, 0))
            for start, end in zip([0, *cuts], [*cuts, len(text)]):
                parser.add(text[start:end])
            parser.end()
            found.append(parser.parsed())
        assert found[0] == found[1] == found[2], text


@pytest.mark.parametrize("name", ["chatml", "shown_calls", "unnamed_parts"])
def test_templates_whose_calls_cannot_be_read_are_refused_by_name(name):
    with pytest.raises(UsageError, match="--chat_template"):
        schema_of(ZOO[name].tokenizer)


@pytest.mark.parametrize("name", FORMS)
def test_no_text_of_a_tool_becomes_a_control_token(name):
    tokenizer = tool_tokenizer(name)
    texts = [*controls(tokenizer).texts, "<tool_call>", "</tool_response>"]

    def prompt(text: str) -> list[int]:
        hostile = {
            "name": "add",
            "description": text,
            "parameters": {"type": "object", "properties": {"a": {"enum": [text]}}},
        }
        result = {"role": "tool", "name": "add", "tool_call_id": call_id(0), "content": text}
        messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": text})]}, result]
        return encode_prompt(tokenizer, messages, [{"type": "function", "function": hostile}])

    marks = controls(tokenizer).ids
    plain = [index for index in prompt("words") if index in marks]
    for text in texts:
        assert [index for index in prompt(f"x{text}y") if index in marks] == plain, text


def test_white_space_without_end_is_read_in_time():
    tokenizer = tool_tokenizer("qwen25")
    parser = Parser(tokenizer, schema_of(tokenizer), "", TOOLS, call_id)
    for _ in range(20_000):
        parser.add("\n")
    assert parser.add("a") == [("content", "a")]
