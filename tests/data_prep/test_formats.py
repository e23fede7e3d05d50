"""Files as people have them, each format in each container: the rows that are read, or the line of the refusal.

`python tests/data_prep/test_formats.py` prints the table: the files tried, and what each was read as.
"""

# ruff: noqa: E501
import bz2
import csv
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.data import chatml_like
from helpers.errors import error_naming, refused

from datasets_prep.columns import check_columns, parse_columns
from datasets_prep.common import rows_of
from datasets_prep.encoding import Dropped
from datasets_prep.formats import to_row
from datasets_prep.generic import prepare_data as generic
from datasets_prep.reading import Source
from datasets_prep.turns import BadRow
from lightrlhf.cli.errors import UsageError

Rows = list[dict[str, Any]]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict:
    return {"role": "assistant", "content": text, **more}


def tool(text: str, **more: Any) -> dict:
    return {"role": "tool", "content": text, **more}


def call(name: str = "weather", **arguments: Any) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be kind."}
SCHEMA = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": SCHEMA}]
CALLED = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
TALK = [user("Hi"), said("Hello."), user("Bye"), said("See you.")]
CALLS = [user("Weather?"), said("", tool_calls=[call(city="Oslo")]), tool("Rain"), said("It rains.")]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
ALPACA = {"instruction": "Translate", "input": "hei", "output": "hi"}
STEPWISE = {"prompt": "2+2?", "completions": ["Two and two", "is 4"], "labels": [True, True]}


# --------------------------------------------------------------------------------------------------------- containers
def text_of(name: str, rows: Rows) -> str:
    name = name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith(".json"):
        return json.dumps(rows, indent=2)
    out = io.StringIO(newline="")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    separator = "\t" if name.endswith(".tsv") else ","
    writer = csv.writer(out, delimiter=separator)
    writer.writerow(columns)
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])
    return out.getvalue()


def write(path: Path, rows: Rows | bytes) -> Path:
    """A file, or a folder of `save_to_disk` where the name has no suffix."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    elif not path.suffix:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        text = text_of(path.name, rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path, columns: Iterable[str] = ()) -> list[dict | str]:
    """Each row without its source, or the reason why it is dropped; the error of a file that is refused."""
    try:
        mapping = parse_columns(columns)
        source = Source(str(path))
        check_columns(mapping, source)
        rows = list(rows_of(source, partial(to_row, mapping=mapping), None))
    except (UsageError, ValueError) as problem:
        return [str(problem).replace(str(path.parent) + "/", "")]
    hidden = {"source", "split", "read_as"}
    return [
        row.reason if isinstance(row, Dropped) else {k: v for k, v in row.items() if k not in hidden and (k, v) != ("columns", {})}
        for row in rows
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- table
# (file, rows or bytes, the rows read or what a refusal says, pairs of --columns)
CASES: list[tuple[str, Rows | bytes, list[Any], list[str]]] = []


def case(file: str, rows: Rows | bytes, *expected: Any, columns: str = "") -> None:
    CASES.append((file, rows, list(expected), columns.split(",") if columns else []))


# fmt: off
# OpenAI's messages
case("openai.jsonl", [{"messages": [SYSTEM, *TALK]}], {"messages": [SYSTEM, *TALK]})
case("openai.json", [{"messages": TALK, "id": 7}] * 2, *[{"messages": TALK, "columns": {"id": 7}}] * 2)
case("openai.jsonl.gz", [{"messages": TALK}], {"messages": TALK})
case("openai.csv", [{"messages": TALK}], {"messages": TALK})
case("openai_saved", [{"messages": TALK}], {"messages": TALK})
case("developer.jsonl", [{"messages": [{"role": "developer", "content": "Be brief."}, *TALK]}],
     {"messages": [{"role": "developer", "content": "Be brief."}, *TALK]})
case("parts.jsonl", [{"messages": [user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), TALK[1]]}],  # type: ignore[arg-type]
     {"messages": TALK[:2]})
case("image_part.jsonl", [{"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}]), TALK[1]]}],  # type: ignore[arg-type]
     "a part of a message is not text but image_url")
case("images.parquet", [{"messages": TALK, "images": [b"\x89PNG"]}], "column images: images and sounds are not read")
case("calls.jsonl", [{"messages": [user("Weather?"), {"role": "assistant", "content": None, "tool_calls": CALLED, "refusal": None},
                                   tool("Rain", tool_call_id="c1"), said("It rains.")], "tools": json.dumps(TOOLS)}],
     {"messages": [CALLS[0], said("", tool_calls=[{"id": "c1"} | call(city="Oslo")]), tool("Rain", tool_call_id="c1"),
                   CALLS[3]], "tools": TOOLS})
case("calls.parquet", [{"messages": CALLS, "tools": TOOLS}, {"messages": TALK, "tools": None}],
     {"messages": CALLS, "tools": TOOLS}, {"messages": TALK})
case("other_calls.arrow", [{"messages": [user("a"), said("", tool_calls=[call("f", x=1)]), tool("b"), said("", tool_calls=[call("g", y="z")])]}],
     {"messages": [user("a"), said("", tool_calls=[call("f", x=1)]), tool("b"), said("", tool_calls=[call("g", y="z")])]})
case("functions.jsonl", [{"messages": [user("Weather?"), said("", function_call={"name": "weather", "arguments": "{}"}),
                                       {"role": "function", "name": "weather", "content": "Rain"}, said("Wet.")], "functions": [SCHEMA]}],
     {"messages": [CALLS[0], said("", tool_calls=[call()]), tool("Rain", name="weather"), said("Wet.")], "tools": TOOLS})
case("bad_arguments.jsonl", [{"messages": [user("a"), said("", tool_calls=[{"function": {"name": "f", "arguments": "{x"}}])]}],
     "a tool call's arguments are no JSON object")
case("thinking.jsonl", [{"messages": [user("Hi"), said("Hello.", reasoning_content="Greet.")]}],
     {"messages": [user("Hi"), said("Hello.", reasoning_content="Greet.")]})
case("unknown_key.jsonl", [{"messages": [user("Hi"), said("Hello.", thoughts="Greet.")]}],
     "unknown key of a message: thoughts")
case("harmless_keys.jsonl", [{"messages": [user("Hi"), said("Hello.", refusal=None, audio=None, annotations=[])]}],
     {"messages": TALK[:2]})
case("weights.jsonl", [{"messages": [user("Hi"), said("Hello.", weight=0), user("Bye"), said("See you.", train=True)]}],
     {"messages": [user("Hi"), said("Hello.", weight=0), user("Bye"), said("See you.", weight=1)]})
case("half_weight.jsonl", [{"messages": [user("Hi"), said("Hello.", weight=0.5)]}], "weight is neither 0 nor 1")
case("user_weight.jsonl", [{"messages": [user("Hi") | {"weight": 1}, said("Hello.")]}], "weight 1 in a user message")
case("openai_pairs.jsonl", [{"input": {"messages": [user("Hi")], "tools": [], "parallel_tool_calls": True},
                             "preferred_output": [said("Hello.")], "non_preferred_output": [said("What?")]}],
     {"prompt": [user("Hi")], "chosen": "Hello.", "rejected": "What?"})
case("openai_pairs.csv", [{"input": {"messages": [user("Hi")]}, "preferred_output": [said("Yo.")], "non_preferred_output": [said("No.")]}],
     {"prompt": [user("Hi")], "chosen": "Yo.", "rejected": "No."})
# order of messages
case("two_users.jsonl", [{"messages": [user("Hi"), user("there"), said("Hello.")]}],
     {"messages": [user("Hi"), user("there"), said("Hello.")]})
case("two_answers.jsonl", [{"messages": [user("Hi"), said("Hello."), said("You?")]}],
     "two assistant messages in a row: join")
case("opens.jsonl", [{"messages": [said("Welcome!"), *TALK]}], {"messages": [said("Welcome!"), *TALK]})
case("ends_with_user.jsonl", [{"messages": [*TALK, user("Wait")]}],
     {"messages": TALK, "notes": ["messages after the last answer cut"]})
case("only_user.jsonl", [{"messages": [SYSTEM, user("Hi")]}],
     {"prompt": [SYSTEM, user("Hi")], "notes": ["a dialogue without an answer: read as a prompt"]})
case("late_system.jsonl", [{"messages": [*TALK, SYSTEM, *TALK]}], "a system message that is not the first: move it")
case("orphan_tool.jsonl", [{"messages": [user("Hi"), tool("Rain"), said("Wet.")]}],
     "a tool message that follows no assistant")
case("narrator.jsonl", [{"messages": [{"role": "narrator", "content": "Once"}, *TALK]}], "unknown role 'narrator': user, assistant, system and tool are read")
# ShareGPT
case("sharegpt.jsonl", [{"conversations": SHARED, "id": "x"}], {"messages": TALK[:2], "columns": {"id": "x"}})
case("sharegpt.parquet", [{"conversations": SHARED, "system": "Be kind."}, {"conversations": SHARED, "system": None}],
     {"messages": [SYSTEM, *TALK[:2]]}, {"messages": TALK[:2]})
case("sharegpt_tools.json", [{"conversations": [
        {"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "Let me see."},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "Rain"}, {"from": "gpt", "value": "It rains."}], "tools": json.dumps([SCHEMA])}],
     {"messages": [user("Weather?"), said("Let me see.", tool_calls=[call(city="Oslo")]), tool("Rain"), said("It rains.")],
      "tools": TOOLS})
case("sharegpt_pairs.jsonl", [{"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": {"from": "gpt", "value": "What?"}}],
     {"prompt": [user("Hi")], "chosen": "Hello.", "rejected": "What?"})
# Alpaca
ALPACA_ROW = {"prompt": [user("Translate\nhei")], "completion": "hi"}
case("alpaca.json", [ALPACA, ALPACA | {"input": "", "text": "Below is …"}],
     ALPACA_ROW, ALPACA_ROW | {"prompt": [user("Translate")], "columns": {"text": "Below is …"},
                               "notes": ["text kept as a column beside instruction, output"]})
case("alpaca.csv", [ALPACA | {"system": "Be kind."}], {"prompt": [SYSTEM, user("Translate\nhei")], "completion": "hi"})
case("alpaca.tsv", [ALPACA], ALPACA_ROW)
case("alpaca_history.jsonl", [ALPACA | {"history": [["Hi", "Hello."]]}],
     {"prompt": [user("Hi"), said("Hello."), user("Translate\nhei")], "completion": "hi"})
EARLIER = [user("Hi"), said("Hello.")]
case("history.jsonl", [{"prompt": "Sky?", "completion": "Blue.", "history": [["Hi", "Hello."]]}, {"prompt": "Sky?", "completion": "Blue.", "history": []}],
     {"prompt": [*EARLIER, user("Sky?")], "completion": "Blue."}, {"prompt": "Sky?", "completion": "Blue.", "columns": {"history": []}})
case("history_unnamed.jsonl", [{"question": "Sky?", "answer": "Blue.", "context": [["Hi", "Hello."]]}],
     "nearest: prompt, completion (--columns prompt=question,completion=answer,history=context)")
case("history_of_alpaca.jsonl", [{"instruction": "Sky?", "response": "Blue.", "before": EARLIER}],
     "(--columns output=response,history=before)")
case("history_mapped.csv", [{"question": "Sky?", "answer": "Blue.", "context": [{"user": "Hi", "assistant": "Hello."}]}],
     {"prompt": [*EARLIER, user("Sky?")], "completion": "Blue."}, columns="prompt=question,completion=answer,history=context")
case("history_of_pairs.parquet", [{"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red.", "history": EARLIER}],
     {"prompt": [*EARLIER, user("Sky?")], "chosen": "Blue.", "rejected": "Red."})
case("history_unread.jsonl", [{"question": "Sky?", "answer": "Blue.", "context": EARLIER}],
     {"prompt": "Sky?", "completion": "Blue.", "columns": {"context": EARLIER},
      "notes": ["context holds turns and is not read; --columns history=context reads it before the prompt"]}, columns="prompt=question,completion=answer")
case("history_no_turns.jsonl", [{"question": "Sky?", "answer": "Blue.", "context": ["Hi"]}],
     "history: a list of messages, or of pairs", columns="prompt=question,completion=answer,history=context")
case("history_beside_plain_pair.jsonl", [{"chosen": "The sky is blue", "rejected": "The sky is red", "history": EARLIER}],
     "history beside a pair without a prompt")
case("history_beside_dialogue.jsonl", [{"messages": TALK, "history": EARLIER}],
     {"messages": TALK, "columns": {"history": EARLIER}, "notes": ["history holds turns and is not read"]})
case("alpaca_pairs.jsonl", [{"instruction": "Greet", "input": "", "chosen": "A hello.", "rejected": "A no."}],
     {"prompt": [user("Greet")], "chosen": "A hello.", "rejected": "A no."})
# TRL's eight
case("text.jsonl", [{"text": "The sky is blue."}], {"text": "The sky is blue."})
case("text.csv", [{"text": 'Line one,\n"line two"'}], {"text": 'Line one,\n"line two"'})
case("prompt_only.parquet", [{"prompt": "The sky"}], {"prompt": "The sky"})
case("prompt_only_chat.jsonl", [{"prompt": [user("Hi")], "answer": "x"}],
     {"prompt": [user("Hi")], "columns": {"answer": "x"}})
case("prompt_completion.csv", [{"prompt": "The sky", "completion": " is blue."}],
     {"prompt": "The sky", "completion": " is blue."})
case("prompt_completion_chat.jsonl", [{"prompt": [user("Hi")], "completion": [said("Hello.", reasoning_content="Greet.")]}],
     {"prompt": [user("Hi")], "completion": said("Hello.", reasoning_content="Greet.")})
case("several_completions.jsonl", [{"prompt": TALK[:3], "completion": [said("", tool_calls=[call()]), tool("Rain"), said("Wet.")]}],
     {"messages": [user("Hi"), said("Hello.", weight=0), user("Bye"), said("", tool_calls=[call()]), tool("Rain"), said("Wet.")]})
case("pairs.csv", [{"prompt": "Sky?", "chosen": " Blue.", "rejected": " Red."}],
     {"prompt": "Sky?", "chosen": " Blue.", "rejected": " Red."})
case("pairs_chat.parquet", [{"prompt": [user("Hi")], "chosen": [said("Hello.")], "rejected": [said("What?")]}],
     {"prompt": [user("Hi")], "chosen": "Hello.", "rejected": "What?"})
case("pairs_implicit.jsonl", [{"chosen": TALK, "rejected": [*TALK[:3], said("No.")]}],
     {"prompt": TALK[:3], "chosen": "See you.", "rejected": "No."})
case("pairs_implicit_text.jsonl", [{"chosen": "The sky is blue", "rejected": "The sky is red"}],
     {"prompt": "The sky is", "chosen": " blue", "rejected": " red", "is_plain": True,
      "notes": ["prompt: what chosen and rejected begin with, as text"]})
for number, (one, other) in enumerate([("Q: Sky? A:", "Q: Sky? A: Red."), ("Q: Sky? A:\n", "Q: Sky? A: Red."), ("Q: Sky? A: R", "Q: Sky? A: Red.")]):
    case(f"pair_that_begins_another_{number}.jsonl", [{"chosen": other, "rejected": one}], "one side of the pair is the beginning of the other")
    case(f"pair_begun_by_another_{number}.csv", [{"chosen": one, "rejected": other}], "one side of the pair is the beginning of the other")
case("pairs_of_dialogue_texts.jsonl", [{side: f"\n\nHuman: Hi\n\nAssistant: {side}" for side in ("chosen", "rejected")}],
     "a dialogue as text ('Human: '): give messages, or use datasets_prep.helpful_harmless")
case("pairs_thinking.jsonl", [{"prompt": [user("Hi")], "chosen": [said("Hello.", reasoning_content="Greet.")], "rejected": [said("What?")]}],
     {"prompt": [user("Hi")], "chosen": said("Hello.", reasoning_content="Greet."), "rejected": "What?"})
case("pairs_of_episodes.jsonl", [{"chosen": [TALK[0], said("a"), *TALK[2:]], "rejected": [TALK[0], said("b"), *TALK[2:]]}],
     "sides of several messages: one assistant message each after the prompt")
case("pairs_of_two_prompts.jsonl", [{"chosen": TALK[:2], "rejected": [user("Ho"), TALK[1]]}],
     "chosen and rejected have different prompts")
case("unpaired.jsonl", [{"prompt": "Sky?", "completion": " Red.", "label": False}],
     {"prompt": "Sky?", "completion": " Red.", "label": False})
case("unpaired.csv", [{"prompt": "Sky?", "completion": " Blue.", "label": "True"}, {"prompt": "Sky?", "completion": " Red.", "label": "0"}],
     {"prompt": "Sky?", "completion": " Blue.", "label": True}, {"prompt": "Sky?", "completion": " Red.", "label": False})
case("unpaired_chat.parquet", [{"prompt": [user("Hi")], "completion": [said("Hello.")], "label": True}],
     {"prompt": [user("Hi")], "completion": "Hello.", "label": True})
case("unpaired_dialogue.jsonl", [{"messages": TALK, "label": False}, {"messages": TALK[:1], "label": True}, {"messages": TALK, "label": None}],
     {"prompt": TALK[:3], "completion": "See you.", "label": False}, "a label of a dialogue without an answer",
     "label_is_null")
case("no_label.jsonl", [{"prompt": "Sky?", "completion": " Red.", "label": "sky"}], "label is neither true nor false")
case("stepwise.jsonl", [STEPWISE], "steps with a label each are not read; nearest: prompt, completion, label")
# other shapes of messages
HELLO = {"messages": TALK[:2]}
case("older_roles.jsonl", [{"conversations": [{"from": "Human", "value": "Hi"}, {"from": name, "value": "Hello."}]} for name in ("bing", "bard")], HELLO, HELLO)
case("roles_of_a_tree.jsonl", [{"messages": [{"role": "prompter", "text": "Hi"}, said("w()"), {"role": "function_response", "text": "Rain"}, said("Wet.")]}],
     {"messages": [user("Hi"), said("w()"), tool("Rain"), said("Wet.")]})
case("speakers.jsonl", [{"messages": [{"speaker": "USER", "text": "Hi", "id": 1}, {"speaker": "assistant", "text": "Hello.", "model": "m"}]}], HELLO)
case("two_texts.jsonl", [{"messages": [{"role": "user", "text": "Hi", "content": "Ho"}]}], "a message with both text and content")
case("said.jsonl", [{"messages": [{"human": "Hi", "assistant": "Hello."}]}, {"messages": [{"user": "Hi"}, {"assistant": "Hello."}]},
                    {"messages": [["Hi", "Hello."]]}, {"conversation": [{"system": "Be kind.", "input": "Hi", "output": "Hello."}]}],
     HELLO, HELLO, HELLO, "nearest: messages (--columns messages=conversation)")
case("said_with_system.jsonl", [{"conversation": [{"output": "Hello.", "input": "Hi", "system": "Be kind."}]}], {"messages": [SYSTEM, *TALK[:2]]}, columns="messages=conversation")
case("too_deep.jsonl", [{"messages": [TALK[:2]]}, {"messages": [TALK, TALK]}], HELLO, "several dialogues in one row")
case("struct_of_lists.jsonl", [{"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello."]}}], HELLO)
case("one_message.jsonl", [{"messages": user("Hi")}], "messages is a JSON object, not a list")
case("texts_for_messages.jsonl", [{"messages": ["Hi", "Hello."]}], "a text in the place of a message")
case("without_roles.jsonl", [{"messages": [{"content": "Hi"}]}], "a message without a role, of the keys content")
case("odd_parts.jsonl", [{"messages": [user([part]), said("Hello.")]} for part in ({"type": "text", "value": "Hi"}, {"text": "Hi"}, {"type": "text", "content": "Hi"})],  # type: ignore[arg-type]
     HELLO, HELLO, HELLO)
case("part_alone.jsonl", [{"messages": [user({"type": "text", "text": "Hi"}), said("Hello.")]}], HELLO)  # type: ignore[arg-type]
case("gemini.jsonl", [{"systemInstruction": {"parts": [{"text": "Be kind."}]}, "contents": [{"role": "user", "parts": [{"text": "Hi"}]}, {"role": "model", "parts": [{"text": "Hello."}]}]},
                      {"contents": "Once upon a time", "text": "a"}],
     {"messages": [SYSTEM, *TALK[:2]]}, {"text": "a", "columns": {"contents": "Once upon a time"}})
case("reasoning.jsonl", [{"messages": [user("Hi"), said("Hello.", **{key: "Greet."})]} for key in ("reasoning", "thinking")],
     *[{"messages": [user("Hi"), said("Hello.", reasoning_content="Greet.")]}] * 2)
case("call_as_text.jsonl", [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "w()"}]}], "a tool call without a function's name: write {")
case("items.jsonl", [{"items": SHARED, "id": "x"}], "nearest: messages (--columns messages=items)")
# labels, system prompts and numbers
case("kto_tag.jsonl", [{"conversations": SHARED, "kto_tag": False}], {"prompt": [user("Hi")], "completion": "Hello.", "label": False})
case("system_prompt.jsonl", [{"system_prompt": "Be kind.", "messages": TALK}], {"messages": [SYSTEM, *TALK]})
case("openorca.jsonl", [{"id": "x", "system_prompt": "Be kind.", "question": "Sky?", "response": "Blue."}], "(--columns prompt=question,completion=response)")
case("a_number.jsonl", [{"prompt": "2+2?", "completion": 4}, {"prompt": "2+2?", "completion": 4.0}], {"prompt": "2+2?", "completion": "4"}, "completion is a number, not a text")
# answers that are not read
case("response.jsonl", [{"prompt": "Sky?", "response": "Blue."}, {"prompt": "Sky?", "label": "Blue."}],
     *[{"prompt": "Sky?", "columns": {name: "Blue."}, "notes": [f"{name} kept as a column: --columns completion={name} makes it the answer"]} for name in ("response", "label")])
case("two_responses.jsonl", [{"prompt": "Sky?", "response_0": "Blue.", "response_1": "Red.", "better": 0}],
     {"prompt": "Sky?", "columns": {"response_0": "Blue.", "response_1": "Red.", "better": 0},
      "notes": ["response_0 and response_1 kept as columns: for pairs write prompt, chosen, rejected, as the example in howto/datasets.md does"]})
case("ranked.jsonl", [{"prompt": "Sky?", "answers": ["Blue.", "Red."]}],
     {"prompt": "Sky?", "columns": {"answers": ["Blue.", "Red."]},
      "notes": ["answers kept as a column: for pairs write prompt, chosen, rejected, as the example in howto/datasets.md does"]})
case("list_cell.csv", [{"prompt": '["Sky?"]', "response_a": "Blue."}], "prompt is a list written as text")
case("scored_side.jsonl", [{"prompt": "Sky?", "chosen": {"text": "Blue.", "score": 5}, "rejected": {"text": "Red.", "score": 1}}], "chosen is a JSON object, not a text")
# end tokens
for number, row in enumerate([{"prompt": "a", "completion": "b</s>"}, {"messages": [user("Hi"), said("Hello.<|im_end|>\n")]},
                              {"text": "a <|endoftext|>"}, {"prompt": "a", "chosen": "b<end_of_turn>", "rejected": "c"}]):  # fmt: skip
    case(f"end_token_{number}.jsonl", [row], "an answer or text that ends with <")
case("html_strike.jsonl", [{"prompt": "a", "completion": "It is <s>old</s>"}, {"prompt": "</s>", "completion": "b"}],
     {"prompt": "a", "completion": "It is <s>old</s>"}, {"prompt": "</s>", "completion": "b"})
# rows of no format: what they are and what to write
for name, row, line in [
    ("stack_exchange", {"qid": 1, "question": "Sky?", "response_j": "Blue.", "response_k": "Red."}, "--columns prompt=question,chosen=response_j,rejected=response_k"),
    ("shp", {"history": "Sky?", "human_ref_A": "Blue.", "human_ref_B": "Red.", "labels": 1}, "two answers to a prompt (human_ref_A and human_ref_B)"),
    ("helpsteer3", {"context": TALK[:1], "response1": "Blue.", "response2": "Red.", "overall_preference": -2}, "two answers to a prompt (response1 and response2)"),
    ("arena", {"winner": "model_a", "conversation_a": TALK, "conversation_b": TALK}, "two answers to a prompt (conversation_a and conversation_b)"),
    ("ultrafeedback", {"instruction": "Sky?", "completions": [{"response": "Blue.", "score": 9.0}, {"response": "Red.", "score": 1}]}, "several answers to a prompt with scores (completions)"),
    ("scores_beside", {"query": "Sky?", "answers": ["Blue.", "Red."], "ranks": [0, 1]}, "several answers to a prompt with scores (answers)"),
    ("tree", {"message_tree_id": "t", "prompt": {"text": "Sky?", "role": "prompter", "replies": []}}, "a tree of messages"),
    ("flat_tree", {"message_id": "m", "parent_id": None, "text": "Sky?", "role": "prompter"}, "a tree of messages"),
    ("export", {"title": "t", "mapping": {"a": {"message": None}}}, "a tree of messages"),
    ("message", user("Hi"), "one message a row"),
    ("tokenised", {"input_ids": [1, 2], "labels": [-100, 2]}, "tokenised rows (input_ids)"),
    ("tokenised_pairs", {"chosen_input_ids": [1], "rejected_input_ids": [2]}, "tokenised rows (chosen_input_ids)"),
    ("error", {"error": "Invalid password."}, "an error message instead of data (error)"),
    ("whole_columns", {"prompt": ["Sky?", "Sea?"], "completion": ["Blue.", "Wet."]}, "lists, not a text each"),
    ("pandas", {"prompt": {"0": "Sky?"}, "completion": {"0": "Blue."}}, "lists, not a text each"),
    ("list_of_texts", {"text": ["The sky is blue.", "The sea is wet."]}, "lists, not a text each"),
    ("dialogue_as_text", {"chat": "USER: Hi\n\nASSISTANT: Hello."}, "a dialogue as text (chat)"),
    ("inside_list", {"train": [{"prompt": "a", "completion": "b"}], "n": 1}, "jq -c '.train[]' FILE"),
    ("inside", {"row": {"prompt": "a", "completion": "b"}}, "jq -c '.row' FILE"),
    ("by_id", {"x": {"prompt": "a"}, "y": {"prompt": "b"}}, "jq -c '.[]' FILE"),
    ("roleless", {"data": ["Hi", "Hello."], "id": "0"}, "texts without roles (data)"),
    ("human_bot", {"human": "Hi", "bot": "Hello."}, "(--columns prompt=human,completion=bot)"),
    ("summaries", {"document": "Long.", "summary": "Short."}, "(--columns prompt=document,completion=summary)"),
    ("nemotron", {"input": TALK[:1], "output": "Hello.", "reasoning": "off"}, "(--columns prompt=input,completion=output)"),
    ("metadata", {"question": "Sky?", "answer": "Blue.", "sources": [{"page": "x"}]}, "(--columns prompt=question,completion=answer)"),
]:  # fmt: skip
    case(f"shape_{name}.jsonl", [row], line)
case("no_header.csv", b"Sky?,Blue.\nSea?,Wet.\n", "the first line of a CSV file names its columns")
# other columns, several formats
case("collection.jsonl", [{"context_messages": [user("Hi")]}], {"prompt": [user("Hi")], "stage": "prompts"})
case("mixed_rows.jsonl", [{"prompt": "a", "completion": "b", "n": 1}, {"messages": TALK}, {"text": "c", "n": "one"}],
     {"prompt": "a", "completion": "b", "columns": {"n": 1}}, {"messages": TALK}, {"text": "c", "columns": {"n": "one"}})
case("questions.jsonl", [{"question": "Sky?", "answer": "Blue."}],
     "no known format: columns answer, question; nearest: prompt, completion (--columns prompt=question,completion=answer)")
case("mapped.jsonl", [{"question": "Sky?", "answer": "Blue.", "source": "x"}], {"prompt": "Sky?", "completion": "Blue.", "columns": {"source": "x"}},
     columns="prompt=question,completion=answer")
case("orca.jsonl", [{"system": "Be kind.", "question": "Hi", "chosen": "Yo.", "rejected": "No."}],
     "nearest: prompt, chosen, rejected (--columns prompt=question)")
case("orca_mapped.csv", [{"system": "Be kind.", "question": "Hi", "chosen": "Yo.", "rejected": "No."}],
     {"prompt": [SYSTEM, user("Hi")], "chosen": "Yo.", "rejected": "No."}, columns="prompt=question")
case("lmsys.parquet", [{"conversation": TALK, "model": "m"}], "nearest: messages (--columns messages=conversation)")
case("ultrachat.parquet", [{"prompt": "Hi", "prompt_id": "x", "messages": TALK}],
     {"messages": TALK, "columns": {"prompt": "Hi", "prompt_id": "x"}, "notes": ["prompt kept as a column beside messages"]})
case("ultrafeedback.parquet", [{"prompt": "Hi", "chosen": TALK[:2], "rejected": [user("Hi"), said("What?")], "messages": TALK[:2], "score": 8.5}],
     {"prompt": [user("Hi")], "chosen": "Hello.", "rejected": "What?", "columns": {"messages": TALK[:2], "score": 8.5},
      "notes": ["messages kept as a column beside prompt, chosen, rejected"]})
case("two_formats.jsonl", [{"prompt": "Sky?", "completion": " Blue.", "messages": TALK}],
     "two formats: prompt, completion and messages; choose one: --columns prompt=prompt,completion=completion or --columns messages=messages")
case("two_formats_chosen.jsonl", [{"prompt": "Sky?", "completion": " Blue.", "messages": TALK}],
     {"messages": TALK, "columns": {"prompt": "Sky?", "completion": " Blue."},
      "notes": [f"{name} kept as a column beside messages" for name in ("prompt", "completion")]}, columns="messages=messages")
case("half_a_pair.jsonl", [{"prompt": "Sky?", "chosen": " Blue."}],
     "nearest: prompt, chosen, rejected (--columns rejected=COLUMN)")
case("null_side.jsonl", [{"prompt": "Sky?", "chosen": " Blue.", "rejected": None}], "rejected_is_null")
case("null_completion.jsonl", [{"prompt": "Sky?", "completion": None}],
     {"prompt": "Sky?", "notes": ["completion is null: read as prompt"]})
case("nothing_known.csv", [{"a": "1", "b": "2"}],
     "columns a, b; nearest: prompt, completion (--columns prompt=COLUMN,completion=COLUMN)")
case("list_as_text.csv", [{"prompt": [user("Hi")], "completion": "Hello."}],
     "prompt is a list of messages written as text")
case("repr.csv", [{"messages": str(TALK)}], {"messages": TALK})
case("typo.jsonl", [{"question": "Sky?", "answer": "Blue."}], "no column qestion among question, answer; did you mean prompt=question?",
     columns="prompt=qestion")
case("swapped.jsonl", [{"question": "Sky?"}], "question is not a column that is read; did you mean prompt=question?",
     columns="question=prompt")
case("impossible.jsonl", [{"a": "b", "c": []}], "no format has messages and prompt", columns="prompt=a,messages=c")
# containers
case("data.json", b'{"data": [\n {"text": "a"},\n {"text": "b"}\n]}\n', {"text": "a"}, {"text": "b"})
case("columns_called_data.jsonl", b'{"data": [{"role": "user"}], "text": "a"}\n{"data": [], "text": "b"}\n',
     {"text": "a", "columns": {"data": [{"role": "user"}]}, "notes": ["data holds turns and is not read"]}, {"text": "b", "columns": {"data": []}})
case("more_than_data.json", b'{"data": [{"text": "a"}], "version": 1}',
     {"text": "a"}, "more_than_data.json:1: } is expected")
case("array.json.gz", gzip.compress(b'[{"text": "a"}, {"text": "b"}]'), {"text": "a"}, {"text": "b"})
case("open_array.json", b'[{"text": "a"},\n{"text": "b"', "open_array.json:2: not JSON")
case("kept_values.jsonl", b'{"text": "a", "n": 1, "when": "2024-05-01"}\n{"text": "b", "n": 1.5, "when": "soon"}\n',
     {"text": "a", "columns": {"n": 1, "when": "2024-05-01"}}, {"text": "b", "columns": {"n": 1.5, "when": "soon"}})
case("kept_values.csv", b"text,code\nNA,007\n1.50,\n",
     {"text": "NA", "columns": {"code": "007"}}, {"text": "1.50", "columns": {"code": ""}})
case("semicolons.csv", b"\xef\xbb\xbfprompt;completion\r\nSky, blue?;Yes.\r\n",
     {"prompt": "Sky, blue?", "completion": "Yes."})
case("ragged.csv", b"prompt,completion\na,b\nSky, blue?,Yes.\n", "ragged.csv:3: 3 cells for 2 columns")
case("open_quote.csv", b'prompt,completion\na,b\n"Sky?,Yes.\nc,d\n', "open_quote.csv:3: not a row of separated values")
case("same_column.csv", b"prompt,prompt\na,b\n", "same_column.csv:1: the column 'prompt' occurs twice")
case("latin1.csv", "text\ncafé\n".encode("latin-1"), "latin1.csv:2: byte 4 is not UTF-8")
case("damaged.csv.gz", gzip.compress(b"text\na\n")[:-6], "damaged.csv.gz:3: the compressed stream is damaged")
case("damaged.arrow", b"ARROW", "damaged.arrow: not a readable arrow file")
case("notes.txt", b"hello", "notes.txt: its name must end in .jsonl")
AB = ({"text": "a"}, {"text": "b"})
AB_LINES = b'{"text": "a"}\n{"text": "b"}\n'
PARQUET = pyarrow.BufferOutputStream()
pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*AB]), PARQUET)
case("over_lines.jsonl", b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n', *AB)
case("over_lines_with_commas.json", b'{\n "text": "a"\n},\n{\n "text": "b"\n},\n', *AB)
case("damage_over_lines.json", b'{\n "text": "a"\n}\n{\n "text": b\n}\n', "damage_over_lines.json:5: not JSON")
case("version_and_data.json", b'{\n "version": 1,\n "data": [{"question": "a"}]\n}', "jq -c '.data[]' FILE")
case("lines_of_messages.jsonl", [TALK[:2], TALK[:2]], HELLO, HELLO)  # type: ignore[list-item]
case("lines_of_lists.jsonl", b'["Sky?", "Blue."]\n["Sea?", "Wet."]\n', "lines_of_lists.jsonl:1: a JSON list, not an object")
case("lines_of_texts.jsonl", b'"a"\n"b"\n', 'lines_of_texts.jsonl:1: a text, not an object: write {"text": ')
case("array_of_texts.json", b'["a", "b"]', 'array_of_texts.json:1: a text, not an object: write {"text": ')
case("json_in_json.jsonl", json.dumps('{"text": "a"}').encode(), "JSON within a text")
case("commas.jsonl", b'{"text": "a"},\n{"text": "b"},\n', *AB)
case("last_comma.json", b'[{"text": "a"},\n{"text": "b"},\n]\n', *AB)
case("python.jsonl", b'{"text": "a", "x": None}\n', "python.jsonl:1: Python's notation")
case("carriage_returns.jsonl", b'{"text": "a"}\r{"text": "b"}\r', "carriage_returns.jsonl:1: several objects")
case("csv.jsonl", b"text,n\na,1\n", "csv.jsonl:1: separated values")
case("lines.csv", AB_LINES, *AB)
case("LINES.JSONL", AB_LINES, *AB)
case("lines.ndjson", AB_LINES, *AB)
case("spaces.csv", b"prompt, completion\nSky?,Blue.\n", {"prompt": "Sky?", "completion": "Blue."})
for suffix, content in [("gz", gzip.compress(AB_LINES)), ("bz2", bz2.compress(AB_LINES)), ("xz", lzma.compress(AB_LINES)),
                        ("zst", pyarrow.compress(AB_LINES, codec="zstd", asbytes=True))]:  # fmt: skip
    case(f"lines.jsonl.{suffix}", content, *AB)
    case(f"{suffix}_without_its_name.jsonl", content, *AB)
    case(f"damaged.jsonl.{suffix}", content[:-6], "the compressed stream is damaged")
case("plain.jsonl.gz", AB_LINES, *AB)
case("parquet.jsonl", PARQUET.getvalue().to_pybytes(), *AB)
for name in ("lfs.jsonl", "lfs.csv", "lfs.parquet", "lfs.json.gz"):
    case(name, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", f"{name} is a Git LFS pointer")
case("page.json", b"<!DOCTYPE html>\n<html>", "page.json is a web page")
case("page.parquet", b"\n<html>", "page.parquet is a web page")
case("denied.json", b'<?xml version="1.0"?><Error/>', "denied.json is a web page")
case("zip.zip", b"PK\x03\x04 train.jsonl", "zip.zip is a zip archive")
case("zip.jsonl", b"PK\x03\x04 train.jsonl", "zip.jsonl is a zip archive")
case("sheet.xlsx", b"PK\x03\x04 xl/workbook.xml", "sheet.xlsx is an Excel workbook")
case("finetune_train.pt", b"PK\x03\x04 archive/data.pkl", "--data_dir")
case("rows.pkl", b"\x80\x04]", "rows.pkl is a pickle")
for name, codec in [("16", "utf-16"), ("16le", "utf-16-le"), ("16be", "utf-16-be")]:
    case(f"utf{name}.jsonl", AB_LINES.decode().encode(codec), f"utf{name}.jsonl is UTF-16")
# fmt: on


@pytest.mark.parametrize("file, rows, expected, columns", CASES, ids=[file for file, *_ in CASES])
def test_table(tmp_path, file, rows, expected, columns):
    found = read(write(tmp_path / file, rows), columns)
    if found and isinstance(found[-1], str) and ":" in found[-1] and len(found) < len(expected):
        expected = expected[-1:]  # a damaged file is refused as a whole
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected):
        assert wanted in row if isinstance(wanted, str) and isinstance(row, str) else row == wanted


def test_the_table_is_large_enough():
    assert len(CASES) >= 90 and len({file for file, *_ in CASES}) == len(CASES)


# ------------------------------------------------------------------------------------------------------------ details
def test_a_null_in_arrow_is_no_key_but_one_in_json_is(tmp_path):
    calls = [said("", tool_calls=[call("f", x=1)]), said("", tool_calls=[call("g", y=None, z=2)])]
    rows = [{"messages": [user("a"), answer]} for answer in calls]
    assert read(write(tmp_path / "a.jsonl", rows)) == rows
    from_arrow = read(write(tmp_path / "a.parquet", rows))
    assert from_arrow == [rows[0], {"messages": [user("a"), said("", tool_calls=[call("g", z=2)])]}]


def test_json_columns_of_datasets_keep_their_nulls(tmp_path):
    import datasets

    value, json_type = datasets.Value("string"), datasets.Json()
    message = {"role": value, "content": value, "tool_calls": json_type}
    rows = [{"messages": [user("a"), said("", tool_calls=[call("g", y=None)])]}]
    for name in ("a.parquet", "saved"):
        stored = datasets.Dataset.from_list(rows, features=datasets.Features({"messages": datasets.List(message)}))
        stored.to_parquet(tmp_path / name) if name.endswith("parquet") else stored.save_to_disk(tmp_path / name)
        assert read(tmp_path / name) == rows


REFUSED = [
    ({"prompt": "a", "text": "b"}, "prompt", "text"),
    ({"messages": TALK, "conversations": SHARED}, "messages", "conversations"),
    (ALPACA | {"prompt": "a"}, "instruction, output", "prompt"),
    ({"prompt": [user("Hi")], "completion": [said("Hello.", weight=0)]}, "weight 0"),
    ({"prompt": "Ho", "chosen": TALK[:2], "rejected": [user("Hi"), said("No.")]}, "prompt"),
    ({"prompt": "Hi", "chosen": "Yo.", "rejected": [said("No.")]}, "text"),
    ({"messages": [SYSTEM, *TALK], "system": "Be rude."}, "system"),
    ({"prompt": TALK}, "assistant"),
    ({"messages": [user("Hi") | {"reasoning_content": "x"}, said("Yo.")]}, "reasoning_content", "user"),
    ({"messages": [user("Hi"), said("Yo.", weight=1, train=False)]}, "weight", "train"),
    ({"prompt": [user("Hi")], "completion": TALK[1:], "label": True}, "label"),
    ({"prompt": [user("Hi")], "completion": TALK[2:]}, "completion", "assistant"),
    ({"input": {"messages": [user("Hi")], "mood": "x"}, "preferred_output": [], "non_preferred_output": []},
     "input", "mood"),
    ({"messages": [user("Hi"), said("", tool_calls=[call() | {"mood": "x"}])]}, "mood"),
]  # fmt: skip


@pytest.mark.parametrize("raw, facts", [(raw, facts) for raw, *facts in REFUSED])
def test_what_would_be_read_wrongly_is_refused(raw, facts):
    with error_naming(BadRow, *facts):
        to_row(raw)


def test_arguments_of_a_template_are_noted():
    (note,) = to_row({"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}})["notes"]
    assert note.startswith("chat_template_kwargs kept as a column")


@pytest.mark.parametrize("label", [None, 2, -1, "yes", [], 0.5])
def test_labels_that_are_no_truth_values_never_reach_the_targets(label):
    raw = {"prompt": "a", "completion": "b", "label": label}
    with error_naming(BadRow, "label_is_null" if label is None else "label"):
        to_row(raw)


def test_a_mapped_column_takes_the_place_of_another():
    raw = {"prompt": "kept", "question": "Sky?", "completion": "Blue."}
    row = to_row(raw, parse_columns(["prompt=question"]))
    row.pop("read_as")
    assert row == {"prompt": "Sky?", "completion": "Blue.", "columns": {"prompt": "kept"}}


def test_a_mapped_column_is_read_or_refused():
    with error_naming(BadRow, "--columns", "system", "text"):
        to_row({"text": "a", "sys": "b"}, {"system": "sys"})
    with pytest.raises(BadRow, match="label_is_null"):
        to_row({"prompt": "a", "completion": "b", "good": None}, {"label": "good"})


def test_reasons_do_not_name_the_contents_of_a_row():
    reasons = {
        row for file, rows, _, columns in CASES if isinstance(rows, list)
        for row in read_once(file, rows, columns) if isinstance(row, str)
    }  # fmt: skip
    assert len(reasons) > 20 and not [reason for reason in reasons if "\n" in reason or len(reason) > 250]
    assert not any("Sky" in reason or "Hello" in reason for reason in reasons)


def read_once(file: str, rows: Rows | bytes, columns: list[str]) -> list[dict | str]:
    with tempfile.TemporaryDirectory() as folder:
        return read(write(Path(folder) / file, rows), columns)


@pytest.mark.parametrize(
    "columns, words",
    [
        ("prompt", "'prompt' is not a pair such as prompt=question"),
        ("prompt=", "is not a pair"),
        ("prompt=a,prompt=b", "prompt occurs twice"),
        ("prompt=a,completion=a", "a occurs twice"),
        ("title=a", "title is not a column that is read; the names are input, "),
    ],
)
def test_invalid_mappings_are_one_line_before_anything_is_read(tmp_path, capsys, columns, words):
    flags = [f"--destination_dir={tmp_path / 'out'}", "--dataset_name=none.jsonl", "--tokenizer_name=none"]
    assert words in refused(capsys, generic.main, *flags, "--columns", columns)
    assert not (tmp_path / "out").exists()


def main() -> None:
    """Print the table: file, what it was read as or refused with."""
    import datasets

    datasets.disable_progress_bars()
    refused = 0
    for file, rows, _, columns in CASES:
        found = read_once(file, rows, columns)
        refused += isinstance(found[-1], str)
        flag = f" --columns {','.join(columns)}" if columns else ""
        shown = [row if isinstance(row, str) else ", ".join(key for key in row if key != "columns") for row in found]
        print(f"| {file}{flag} | {'; '.join(dict.fromkeys(shown))} |")
    print(f"{len(CASES)} files tried, {len(CASES) - refused} read, {refused} refused")


if __name__ == "__main__":
    main()


def test_only_columns_that_look_like_cells_are_called_a_missing_header():
    for row, is_said in (({"q": "a", "a": "b"}, False), ({"Sky?": "Sea?", "Blue.": "Wet."}, True)):
        with pytest.raises(BadRow) as refused:
            to_row(row)
        assert ("the first line of a CSV file" in str(refused.value)) == is_said


def test_a_row_says_the_format_it_had():
    assert to_row({"conversations": TALK})["read_as"] == "dialogues (conversations)"
    assert to_row({"instruction": "a", "output": "b"})["read_as"] == "prompt and completion (instruction, output)"
    assert to_row({"question": "a"}, {"prompt": "question"})["read_as"] == "prompts (question)"


@pytest.mark.slow
def test_every_file_is_prepared_or_refused_in_one_line(tmp_path, capsys):
    """From file to splits: what is read is trained or counted, what is refused says so."""
    chatml_like().save_pretrained(tmp_path / "tokenizer")
    prepared = refused = 0
    for number, (file, rows, expected, columns) in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = write(folder / file, rows)
        capsys.readouterr()
        flags = {"destination_dir": folder / "out", "dataset_name": source, "tokenizer_name": tmp_path / "tokenizer"}
        flags |= {"validation_percentage": 0, "test_percentage": 0, "num_proc": 1}
        command = [f"--{name}={value}" for name, value in flags.items()]
        try:
            generic.main([*command, *(["--columns", ",".join(columns)] if columns else [])])
        except SystemExit:
            refused += 1
            error = capsys.readouterr().err.strip()
            assert len(error.splitlines()) == 1 and "Traceback" not in error, (file, error)
            assert not list(folder.glob("out/*.pt"))
            continue
        prepared += 1
        report = json.loads((folder / "out" / "report.json").read_text())
        assert any(not isinstance(one, str) for one in expected), file
        assert report["read_as"], file
    print(f"{len(CASES)} files: {prepared} prepared, {refused} refused in one line")
    assert prepared + refused == len(CASES) >= 45 and prepared and refused


# ------------------------------------------------------------------------------------------- nulls of a table's schema
def function(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


OF_A_TABLE: Rows = [
    {"messages": [user("Oslo?"), said("", tool_calls=[call("weather", city="Oslo")]), tool("Rain"), said("It rains.")],
     "tools": [function("weather", city={"type": "string", "default": "Rome"})]},
    {"messages": [user("2 + 3?"), said("", tool_calls=[call("add", a=2, b={"of": [3]})]), tool("5"), said("Five.")],
     "tools": [function("add", a={"type": "number", "description": "A number."}, b={"type": "object", "enum": []})]},
    {"messages": [user("Hi"), said("Hello.")], "tools": [function("add", a={"type": "number", "description": "One."})]},
]  # fmt: skip


def test_every_file_of_a_table_gives_the_same_rows(tmp_path):
    """Written by `datasets` and pandas, with each struct's every key, also as JSON text in cells."""
    import datasets

    table = datasets.Dataset.from_list(OF_A_TABLE)
    filled = list(table)
    assert filled[0]["tools"][0]["function"]["parameters"]["properties"]["a"] is None  # the table did fill
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl")
    table.to_pandas().to_json(tmp_path / "b.json", orient="records")
    table.save_to_disk(tmp_path / "saved")
    write(tmp_path / "a.csv", filled)
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in filled]
    write(tmp_path / "texts.parquet", texts)
    write(tmp_path / "texts.jsonl.gz", [row | {"tools": [json.dumps(tool) for tool in filled[i]["tools"]]}
                                        for i, row in enumerate(texts)])  # fmt: skip
    expected = [{"messages": row["messages"], "tools": row["tools"]} for row in OF_A_TABLE]
    for name in ("a.parquet", "a.jsonl", "b.json", "saved", "a.csv", "texts.parquet", "texts.jsonl.gz"):
        assert read(tmp_path / name) == expected, name


def test_tools_of_a_table_beside_a_completion_clean_its_call(tmp_path):
    tools = [function("add", a={"type": "number"}, city=None)]
    row = {"prompt": [user("Hi")], "completion": [said("", tool_calls=[call("add", a=1, city=None)])], "tools": tools}
    (found,) = read(write(tmp_path / "a.jsonl", [row]))
    assert found["completion"]["tool_calls"] == [call("add", a=1)]
    pair = {"input": {"messages": [user("Hi")], "tools": tools}, "preferred_output": row["completion"],
            "non_preferred_output": [said("No.")]}  # fmt: skip
    (found,) = read(write(tmp_path / "b.jsonl", [pair]))
    assert found["chosen"]["tool_calls"] == [call("add", a=1)]
    assert found["tools"] == [function("add", a={"type": "number"})]


def test_answers_that_are_json_text_stay_text_beside_tools_of_a_table(tmp_path):
    row = {"prompt": '{"a": null}', "completion": '[{"a": null}]', "tools": [function("add", a={}, city=None)]}
    (found,) = read(write(tmp_path / "a.jsonl", [row]))
    assert found["prompt"] == [user(row["prompt"])] and found["completion"] == row["completion"]
    assert found["tools"] == [function("add", a={})]


def test_nulls_that_were_written_stay(tmp_path):
    """Of a schema's values, of an argument, and beside what a server adds to an answer."""
    tools = [function("add", a={"type": ["number", "null"], "default": None, "enum": [1, None]})]
    called = said("", tool_calls=[call("add", a=None)], refusal=None, audio=None)
    (row,) = read(write(tmp_path / "a.jsonl", [{"messages": [user("Hi"), called], "tools": tools}]))
    assert row["tools"] == tools and row["messages"][1]["tool_calls"] == [call("add", a=None)]
