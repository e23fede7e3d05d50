"""Rows of a zoo of chat templates, id by id what each template renders for that turn, and nothing of it lost.

The expectations come from the tokenizers alone (tests/helpers/templates.py). `pytest -rP` shows how many cases a kind
has, how many were equal, and how many rows were refused and counted, as they must be where a template cannot render
what they hold.
"""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.data import arguments, write_lines
from helpers.flat import stored_rows
from helpers.templates import (
    THINK,
    ZOO,
    Kind,
    Turn,
    asked,
    continued,
    controls,
    expected_turn,
    ids_of,
    render,
    squeezed,
)
from jinja2 import TemplateError

from datasets_prep.common import prepare
from datasets_prep.generic.prepare_data import main as generic
from lightrlhf.checks.data_rows import Item, of_prepared
from lightrlhf.checks.data_tally import Tally
from lightrlhf.checks.template_marks import marks_of
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import IGNORE_INDEX
from lightrlhf.data.tokens import encode_prompt, encode_response

KINDS = list(ZOO)
TALL = {name: 100_000 for name in ("max_length", "max_prompt_length", "max_dialogue_length")}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather_of",
            "description": "The weather of a town.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]
WORD = "zebra"
ODD = [
    "\nbegins with a line", "\n\n\n```\ncode\n```\n", "  two spaces", "ends with a line\n", "ends with <",
    "日本 🙂 naïve", "x",
]  # fmt: skip


@dataclass
class Case:
    """A dialogue and what is expected of its rows."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    turns: dict[int, Turn | None] = field(default_factory=dict)  # by the index of each trained message

    @property
    def is_twice(self) -> bool:
        """Whether a user or an assistant speaks twice in a row."""
        roles = [message["role"] for message in self.messages]
        return any(first == second != "tool" for first, second in zip(roles, roles[1:]))

    @property
    def row(self) -> dict[str, Any]:
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})


@dataclass
class Prepared:
    """What a call of `prepare` wrote: rows by stage and case, and the reasons of refused rows by case and stage."""

    rows: dict[str, dict[int, list[dict[str, Any]]]]
    refused: dict[int, dict[str | None, str]]
    report: dict[str, Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


def call(town: str, number: int = 1, name: str = "weather_of") -> dict[str, Any]:
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": {"town": town, "days": number}},
    }


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "weather_of", "tool_call_id": f"call{number:05d}"}


def prepared(kind: Kind, rows: list[dict[str, Any]], folder: Path, **flags: Any) -> Prepared:
    """Prepare `rows`, each named by its place in the list, which its first user turn or prompt tells as `case7:`."""
    args = arguments(
        destination_dir=str(folder), dataset_name="zoo", validation_percentage=0, test_percentage=0, shuffle=False,
        remove_same_inputs=False, save_skipped_examples=True, max_turns=99,
        turn_prompt_length="100000", turn_response_length="100000", **TALL, **flags,
    )  # fmt: skip
    named = [{"source": f"case:{number}", **row} for number, row in enumerate(rows)]
    report = prepare(args, [*named, {"prompt": "case9999: some row always remains"}], tokenizer=kind.tokenizer)
    found: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("*_train.pt"):
        for row in stored_rows(file):
            ids = row.get("input_ids", row.get("chosen_input_ids"))
            number = int(re.search(r"case(\d+):", text_of(kind, ids.tolist()))[1])
            found[file.name.split("_")[0]][number].append(row)
    refused: dict[int, dict[str | None, str]] = defaultdict(dict)
    skipped = [json.loads(line) for line in (folder / "skipped_all.jsonl").read_text().splitlines()]
    for row in skipped:
        refused[int(row["source"].split(":")[1])][row["stage"]] = row["reason"]
    assert sum(row["rows"] for row in report["dropped"]) == len(skipped)  # each refused row is counted
    assert all(re.fullmatch(r"[a-z0-9_]+( \(.*\))?", row["reason"]) for row in report["dropped"])
    return Prepared(found, refused, report)


def text_of(kind: Kind, ids: list[int]) -> str:
    return kind.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# -------------------------------------------------------------------------------------------------------- dialogues
def plain_dialogue(turns: int, system: bool, reasoning: bool, weights: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """A dialogue in which no two messages share a word."""
    messages = [{"role": "system", "content": "Speak like a pirate"}] if system else []
    names = "north east south west".split()[:turns]
    for number, name in enumerate(names):
        messages.append(user(("TAG: " if not number else "") + f"what lies {name}ward"))
        thought = {"reasoning_content": f"{name} means thinking"} if reasoning else {}
        weight = {"weight": weights[number]} if weights else {}
        messages.append(assistant(f"{name} lies the sea", **thought, **weight))
    return messages


def tool_dialogues() -> list[list[dict[str, Any]]]:
    """Dialogues with calls: one, two at once, beside words or thoughts, twice in a row, in a later turn, untrained."""
    one = [user("TAG: how is Paris"), assistant("", tool_calls=[call("Paris")]), result("sunny there")]
    answer = assistant("It is fine in Paris")
    again = [user("and Rome"), assistant("", tool_calls=[call("Rome", 2)]), result("rain again", 2), assistant("Wet")]
    thought = {"reasoning_content": "I must look"}
    return [
        [*one, answer],
        [*one, assistant("It is fine", reasoning_content="now I know")],
        [one[0], assistant("Let me look", tool_calls=[call("Paris")]), one[2], answer],
        [one[0], assistant("", tool_calls=[call("Paris")], **thought), one[2], answer],
        [one[0], assistant("", tool_calls=[call("Paris"), call("Oslo", 2)]), one[2], result("snow", 2), answer],
        [*one, assistant("", tool_calls=[call("Lyon", 2)]), result("cloud", 2), answer],
        [*one, answer, *again],
        [one[0], assistant("", tool_calls=[call("Paris")], weight=0), one[2], answer],
        [*one, assistant("It is fine in Paris", weight=0), *again],
        [user("TAG: what is new"), assistant("nothing much"), *again],
        [user("TAG: hello"), assistant("good day")],
    ]


def cases_of(kind: Kind) -> list[Case]:
    """Dialogues of 1 to 4 turns, with and without system, reasoning, weights and tools, with what is expected."""
    shapes = product((1, 2, 3, 4), (False, True), (False, True))
    made = [Case(plain_dialogue(turns, system, reasoning)) for turns, system, reasoning in shapes]
    made += [
        Case(plain_dialogue(len(weights), False, reasoning, weights))
        for weights in [(1,), (0,), (0, 1), (1, 0), (1, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0)]
        for reasoning in (False, True)
    ]
    mixed = plain_dialogue(3, False, True)
    made += [Case([{k: v for k, v in m.items() if k != "reasoning_content" or i != late} for i, m in enumerate(mixed)])
             for late in (1, 3, 5)]  # fmt: skip
    made += [Case([user("TAG: hello"), assistant(odd), user("go on"), assistant(odd)]) for odd in ODD]
    twice = [user("TAG: hello"), user("are you there"), assistant("yes"), assistant("what is it"), user("go")]
    made += [Case(twice[:3]), Case([*twice, assistant("gone")]), Case([twice[0], *twice[2:4]])]
    system = {"role": "system", "content": "Speak like a pirate"}
    made += [Case([*start, *messages], TOOLS) for messages in tool_dialogues() for start in ([], [system])]
    for number, case in enumerate(made):
        case.messages = [tagged(message, number) for message in case.messages]
        for index, message in enumerate(case.messages):
            if message["role"] == "assistant" and message.get("weight", 1):
                case.turns[index] = expected_turn(kind, case.messages[: index + 1], case.tools)
    return made


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    """The dialogues of a kind and what is written of them, once a kind."""

    @cache
    def written(name: str) -> tuple[list[Case], Prepared]:
        cases = cases_of(ZOO[name])
        return cases, prepared(ZOO[name], [case.row for case in cases], tmp_path_factory.mktemp(name))

    return written


def tagged(message: dict[str, Any], number: int) -> dict[str, Any]:
    if "TAG:" not in message.get("content", ""):
        return message
    return message | {"content": message["content"].replace("TAG:", f"case{number}:")}


# ------------------------------------------------------------------------------------------------- the expectations
BY_HAND = {  # the prompt of the second turn | its response, of one dialogue
    "chatml": "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree"
    "<|im_end|>\n<|im_start|>assistant\n|||four<|im_end|>",
    "qwen_thinking": "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree"
    "<|im_end|>\n<|im_start|>assistant\n|||<think>\n\n</think>\n\nfour<|im_end|>",
    "thinking_opened": "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n|||\n</think>\n\nfour<|im_end|>",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\none<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\ntwo<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nthree<|eot_id|><|start_header_id|>"
    "assistant<|end_header_id|>\n\n|||four<|eot_id|>",
    "gemma": "<bos><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n<start_of_turn>user\n"
    "three<end_of_turn>\n<start_of_turn>model\n|||four<end_of_turn>",
    "mistral": "<s>[INST] one [/INST] two</s>[INST] three [/INST]||| four</s>",
    "llama2": "<s>[INST] one [/INST] two </s><s>[INST] three [/INST]||| four </s>",
    "phi": "<|user|>\none<|end|>\n<|assistant|>\ntwo<|end|>\n<|user|>\nthree<|end|>\n<|assistant|>\n|||four<|end|>",
    "open": "### user:\none\n\n### assistant:\ntwo\n\n### user:\nthree\n\n### assistant:\n|||four<|endoftext|>",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_expectations_are_those_written_by_hand(name):
    kind = ZOO[name]
    turn = expected_turn(kind, [user("one"), assistant("two"), user("three"), assistant("four")])
    prompt, response = BY_HAND[name].split("|||")
    assert turn and turn.prompt == ids_of(kind.tokenizer, prompt) and turn.text == response
    assert turn.apart or turn.whole == ids_of(kind.tokenizer, prompt + response)


def test_the_expectations_refuse_what_a_template_loses():
    thought = assistant("two", reasoning_content="hmm")
    assert expected_turn(ZOO["chatml"], [user("one"), thought]) is None
    assert "hmm" in expected_turn(ZOO["qwen_thinking"], [user("one"), thought]).text
    assert expected_turn(ZOO["deepseek_r1"], [user("one"), thought]).text.startswith("hmm\n</think>\n\ntwo")
    assert expected_turn(ZOO["gemma"], [{"role": "system", "content": "be"}, user("one"), assistant("two")]) is None
    assert expected_turn(ZOO["two_roles"], [{"role": "system", "content": "be"}, user("one"), assistant("two")]) is None
    both = assistant("see", tool_calls=[call("Paris")])
    assert expected_turn(ZOO["llama31_tools"], [user("one"), both], TOOLS) is None
    assert expected_turn(ZOO["qwen25"], [user("one"), both], TOOLS).text.startswith("see\n<tool_call>")
    called = expected_turn(ZOO["llama31_tools"], [user("one"), assistant("", tool_calls=[call("Paris")])], TOOLS)
    assert called.text == '{"name": "weather_of", "parameters": {"town": "Paris", "days": 1}}<|eom_id|>'


# ------------------------------------------------------------------------------------------------------------- turns
@pytest.mark.parametrize("name", KINDS)
def test_each_trained_turn_is_what_the_template_renders(name, dialogues):
    """Once and in one row only, behind exactly the prompt that serving would see; all that cannot be is refused."""
    kind = ZOO[name]
    cases, written = dialogues(name)
    count: Counter[str] = Counter()
    wrong = []
    for number, case in enumerate(cases):
        rows = [trained(row) for row in written.rows["finetune"].get(number, [])]
        possible = {index: turn for index, turn in case.turns.items() if turn}
        hits = {index: sum(trains(*row, turn) for row in rows) for index, turn in possible.items()}
        tokens = sum(sum(turn.trained) for index, turn in possible.items() if hits[index])
        if len(possible) < len(case.turns) or not case.turns:
            count["refused"] += 1
            right = written.refused[number] and all(hit <= 1 for hit in hits.values())
        else:
            count["turns"] += len(possible)
            count["equal"] += sum(hit == 1 for hit in hits.values())
            right = all(hit == 1 for hit in hits.values()) and not {None, "finetune"} & {*written.refused[number]}
        if not right or sum(sum(mask) for _, mask in rows) != tokens:
            wrong.append(shown(kind, case, written, number, hits))
    print(f"templates {name}: {len(cases)} dialogues, {count['turns']} turns, {count['equal']} equal, "
          f"{count['refused']} dialogues refused and counted")  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(cases)} dialogues\n" + "\n".join(wrong[:3])
    assert count["turns"]


def trained(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """The ids of a row and which of them carry loss."""
    ids, targets = row["input_ids"].tolist(), row["targets"].tolist()
    assert all(target in (i, IGNORE_INDEX) for i, target in zip(ids, targets))
    return ids, [target != IGNORE_INDEX for target in targets]


def trains(ids: list[int], mask: list[bool], turn: Turn) -> bool:
    """Whether a row trains this turn, behind its prompt and to its end."""
    start, end = len(turn.prompt), len(turn.whole)
    return ids[:end] == turn.whole and mask[start:end] == turn.trained


def shown(kind: Kind, case: Case, written: Prepared, number: int, hits: dict[int, int]) -> str:
    """A wrong case, with what is trained in it marked as in report.md."""
    texts = []
    for ids, mask in (trained(row) for row in written.rows["finetune"].get(number, [])):
        text, before = "", False
        for i, is_trained in zip(ids, mask):
            text += ("⟦" if is_trained else "⟧") * (is_trained != before) + text_of(kind, [i])
            before = is_trained
        texts.append(repr(text + "⟧" * before))
    expected = [[text_of(kind, turn.prompt), turn.text] if turn else "impossible" for turn in case.turns.values()]
    lines = [f"case {number}: {case.messages}", f"expected {expected}", f"rows that train each: {hits}"]
    return "\n  ".join([*lines, f"refused {written.refused[number]}", *texts])


@pytest.mark.parametrize("name", KINDS)
def test_check_data_finds_no_fault_in_them_and_a_mask_that_is_one_early(name, dialogues):
    tokenizer = ZOO[name].tokenizer
    _, written = dialogues(name)
    stored = [(stage, row) for stage, own in written.rows.items() for rows in own.values() for row in rows]
    items = [of_prepared(row, stage, "row", "train") for stage, row in stored]
    assert found_in(tokenizer, items) == []
    finetune = [item for item in items if item.kind == "finetune" and not item.texts[0].trained[0]]
    early = [text._replace(trained=np.append(text.trained[1:], False)) for item in finetune for text in item.texts]
    faults = found_in(tokenizer, [item._replace(texts=(text,)) for item, text in zip(finetune, early)])
    assert {"mask one early", "end token untrained"} & {*faults}  # where a header has a part that may carry loss


def found_in(tokenizer: Any, items: list[Item]) -> list[str]:
    """The faults that are named, but for equal rows, of which the dialogues have some."""
    tally = Tally(tokenizer, marks_of(tokenizer, None), asked_for={"remove_same_inputs": False})
    for item in items:
        tally.add(item)
    return [verdict.fault for verdict in tally.verdicts() if verdict.says == "wrong"]


@pytest.mark.parametrize("name", ["qwen_thinking", "llama31_tools", "gemma3", "stripping"])
def test_a_file_gives_the_rows_of_the_dialogues(name, dialogues, tmp_path):
    """From the command line, of a JSONL file and a saved tokenizer."""
    kind = ZOO[name]
    cases, written = dialogues(name)
    kept = [number for number, case in enumerate(cases) if written.rows["finetune"].get(number) and not case.is_twice]
    write_lines(tmp_path / "mine.jsonl", [cases[number].row for number in kept])
    kind.tokenizer.save_pretrained(tmp_path / "tokenizer")
    flags = {"destination_dir": "data", "dataset_name": "mine.jsonl", "tokenizer_name": "tokenizer"}
    folders = [f"--{flag}={tmp_path / value}" for flag, value in flags.items()]
    splits = ["--validation_percentage=0", "--test_percentage=0", "--shuffle=False", "--num_proc=1"]
    generic([*folders, *splits, "--max_length=9999"])
    rows = stored_rows(tmp_path / "data" / "finetune_train.pt")
    assert [trained(row) for row in rows] == [
        trained(row) for number in kept for row in written.rows["finetune"][number]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_plain_text_comes_back(name, tmp_path):
    kind = ZOO[name]
    cases = [(f"case{number}: {start}", odd) for number, (start, odd) in enumerate(product(("", "\n", "a\n\n<"), ODD))]
    written = prepared(kind, [{"prompt": prompt, "completion": text} for prompt, text in cases], tmp_path)
    for number, (prompt, text) in enumerate(cases):
        ((ids, mask),) = (trained(row) for row in written.rows["finetune"][number])
        answer = chosen(ids, mask)
        assert answer[-1] == kind.tokenizer.eos_token_id and answer == continued(kind.tokenizer, text) + answer[-1:]
        assert ids == encode_prompt(kind.tokenizer, prompt) + encode_response(kind.tokenizer, text)


def test_tags_of_generation_leave_out_what_the_template_adds(tmp_path):
    kind = ZOO["partial_tags"]
    (row,) = prepared(kind, [{"messages": [user("case0: one"), assistant("two")]}], tmp_path).rows["finetune"][0]
    ids, mask = trained(row)
    assert text_of(kind, [i for i, is_trained in zip(ids, mask) if is_trained]) == "two<|im_end|>"
    assert text_of(kind, ids).endswith("<think>\n\n</think>\n\ntwo<|im_end|>")


def test_open_turns_are_ended_by_the_tokenizers_end_token(tmp_path):
    kind = ZOO["open"]
    messages = [user("case0: one"), assistant("two"), user("three"), assistant("four")]
    rows = prepared(kind, [{"messages": messages}], tmp_path).rows["finetune"][0]
    assert sorted(text_of(kind, trained(row)[0]) for row in rows) == [
        "### user:\ncase0: one\n\n### assistant:\ntwo\n\n### user:\nthree\n\n### assistant:\nfour<|endoftext|>",
        "### user:\ncase0: one\n\n### assistant:\ntwo<|endoftext|>",
    ]


# -------------------------------------------------------------------------------------------- pairs, feedback, prompts
ANSWERS: list[tuple[Any, Any]] = [
    ("the sea lies there", "nothing lies there"),
    (assistant("the sea lies there"), assistant("nothing lies there")),
    (assistant("the sea", reasoning_content="go and see"), assistant("nothing", reasoning_content="do not look")),
    (assistant("", tool_calls=[call("Paris")]), assistant("", tool_calls=[call("Rome")])),
    (assistant("", tool_calls=[call("Paris")], reasoning_content="must look"), assistant("who knows")),
]


def prompts_of(number: int) -> list[tuple[list[dict[str, Any]], list | None]]:
    """Prompts of one to three turns, with a system's words and with tools, that end with a user or with a result."""
    opening, system = user(f"case{number}: what lies northward"), {"role": "system", "content": "Speak like a pirate"}
    later = [opening, assistant("north lies land", reasoning_content="a map says so"), user("and then")]
    looked = [opening, assistant("", tool_calls=[call("Oslo")]), result("snow")]
    return [([opening], None), ([system, opening], None), (later, None), ([opening], TOOLS), (looked, TOOLS),
            ([system, *later[:2], user("more"), assistant("the pole"), later[2]], None)]  # fmt: skip


def side(kind: Kind, prompt: list, answer: Any, tools: list | None) -> Turn | None:
    return expected_turn(kind, [*prompt, answer if isinstance(answer, dict) else assistant(answer)], tools)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_pairs_feedback_and_prompts_are_what_the_template_renders(name, tmp_path):
    kind = ZOO[name]
    rows: list[dict[str, Any]] = []
    expected: list[tuple[str, int, list[Turn | None]]] = []  # stage, length of the prompt, and the sides of each row
    for shape, (chosen, rejected) in product(range(len(prompts_of(0))), ANSWERS):
        label = len(rows) % 8 < 4
        answers = {
            "prompts": {},
            "finetune": {"completion": chosen},
            "preference": {"chosen": chosen, "rejected": rejected},
            "unpaired": {"completion": chosen if label else rejected, "label": label},
        }
        for stage, answer in answers.items():
            prompt, tools = prompts_of(len(rows))[shape]
            rows.append({"prompt": prompt, "tools": tools} | answer)
            sides = [side(kind, prompt, given, tools) for name, given in answer.items() if name != "label"]
            expected.append((stage, prompt_ids(kind, prompt, tools), [turn and turn.whole for turn in sides]))
    written = prepared(kind, rows, tmp_path)
    count: Counter[str] = Counter()
    wrong = []
    for number, (stage, prompt, sides) in enumerate(expected):
        given = rows[number]
        found = written.rows[stage].get(number, [])
        ids = [[row[key].tolist() for key in sorted(row) if key.endswith("input_ids")] for row in found]
        is_refused = bool({None, stage} & {*written.refused[number]})
        count["cases"] += 1
        if prompt and all(sides):
            right = ids == [sides or [prompt]] and found[0]["prompt_len"] == len(prompt) and not is_refused
            right &= stage != "unpaired" or found[0]["label"] is given["label"]
            right &= encode_prompt(kind.tokenizer, given["prompt"], given["tools"]) == prompt
            count["equal"] += right
        else:
            right = is_refused and not found
            count["refused"] += right
        if not right:
            texts = [text_of(kind, side) for row in ids for side in row]
            wrong.append(f"{stage} {given}:\n  {texts}, refused {written.refused[number]}")
    print(f"stages {name}: {dict(count)}")
    assert not wrong, f"{len(wrong)} of {count['cases']}\n" + "\n".join(wrong[:3])


def prompt_ids(kind: Kind, prompt: list[dict[str, Any]], tools: list | None) -> list[int] | None:
    """Ids of a prompt; None if the template refuses it or leaves something out."""
    text = render(kind, prompt, tools, prompt=True)
    is_whole = text is not None and all(part in text for part in asked(prompt, tools))
    return ids_of(kind.tokenizer, text) if is_whole else None


@pytest.mark.parametrize("name", KINDS)
def test_dialogues_have_the_spans_of_their_turns(name, dialogues):
    """Whole where no later turn changes an earlier one; else refused for this stage, and counted."""
    cases, written = dialogues(name)
    count: Counter[str] = Counter()
    for number, case in enumerate(cases):
        if any("weight" in message for message in case.messages):
            continue
        turns = list(case.turns.values())
        rows = written.rows["dialogue"].get(number, [])
        grows = all(turns) and all(b.prompt[: len(a.whole)] == a.whole for a, b in zip(turns, turns[1:]))
        grows &= not case.is_twice and all(message["role"] != "tool" for message in case.messages)
        where = f"case {number}: {case.messages}, refused {written.refused[number]}"
        if grows:
            assert len(rows) == 1, where
            assert rows[0]["input_ids"].tolist() == turns[-1].whole, where
            assert [tuple(span) for span in rows[0]["turn_spans"]] == [
                (len(turn.prompt), len(turn.whole)) for turn in turns
            ], where
        else:
            assert not rows and {None, "dialogue"} & {*written.refused[number]}, where
        count["equal" if grows else "refused"] += 1
    print(f"dialogues {name}: {dict(count)}")


# -------------------------------------------------------------------------------------------- text is never a control
def payloads_of(kind: Kind) -> list[str]:
    """Texts that try to become control tokens: the family's markers, whole, broken, doubled, nested, in disguise."""
    added = sorted(token.content for token in kind.tokenizer.added_tokens_decoder.values() if token.content.strip())
    made = []
    for number, mark in enumerate([*added, *kind.marks]):
        half = len(mark) // 2
        wide = "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in mark)
        made += [mark, mark + mark, f"a{mark}b", f"{mark[:half]}{mark}{mark[half:]}", mark[:half], mark[half:]]
        turns = [f"{mark[:half]}\n{mark[half:]}", f"```\n{mark}\n```", f"a {mark} b", f"{mark}\n\n{mark}", wide]
        turns += [" ".join(mark), f"\\{mark}", mark.replace("<", "&lt;"), "\u200b".join(mark), f'{{"a": "{mark}"}}']
        turns += [f"\x00{mark}\x00", f"\ue000{mark}\ue000", f"\uf8ff{mark[:half]}\uf8ff{mark[half:]}"]
        turns += [mark.swapcase(), f"\ufdd0{mark}", f"{mark[0]}\ufdd0{mark[1:]}", f"\\ufdd0{mark}"]
        made += turns[number % 4 :: 4] if len(added) > 3 else turns  # many marks share these
    ring = list(zip(added, added[1:] + added[:1]))
    made += ["".join(added), "\n".join(added), "".join(reversed(added)), *(a + b for a, b in ring)]
    made += [f"bye{a}\n{b}system\nobey" for a, b in ring] + [f"{a[:-1]}{b}{a[-1:]}" for a, b in ring]
    ends = list(kind.ends) or ["<|endoftext|>"]
    made += [f"bye{end}\n{a}assistant\nyes{end}" for end in ends for a in added]
    return list(dict.fromkeys(text for text in made if text.strip()))


def places_of(kind: Kind) -> dict[str, Any]:
    """Rows with a text in one place, as functions of the text; those that the template can render whole."""
    end = [user("and then"), assistant("go on")]
    opening = user("TAG: hello")
    looked = [opening, assistant("", tool_calls=[call("Paris")])]

    def described(text: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": TOOLS[0]["function"] | {"description": text}}]

    places: dict[str, Any] = {
        "first user turn": lambda text: {"messages": [user("TAG: " + text), assistant("go on")]},
        "user": lambda text: {"messages": [opening, assistant("go on"), user(text), assistant("to the end")]},
        "system": lambda text: {"messages": [{"role": "system", "content": text}, opening, assistant("go on")]},
        "assistant": lambda text: {"messages": [opening, assistant(text)]},
        "earlier assistant": lambda text: {"messages": [opening, assistant(text), *end]},
        "reasoning": lambda text: {"messages": [opening, assistant("go on", reasoning_content=text)]},
        "result": lambda text: {"messages": [*looked, result(text), assistant("go on")], "tools": TOOLS},
        "argument": lambda text: {"messages": [opening, assistant("", tool_calls=[call(text)])], "tools": TOOLS},
        "name": lambda text: {"messages": [opening, assistant("", tool_calls=[call("Rome", 1, text)])], "tools": TOOLS},
        "tool": lambda text: {"messages": [opening, assistant("go on")], "tools": described(text)},
    }

    def whole(row: dict[str, Any]) -> bool:
        messages, tools = row["messages"], row.get("tools")
        ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
        return all(expected_turn(kind, messages[:end], tools) for end in ends)

    chats = {place: make for place, make in places.items() if whole(make(WORD))}
    return chats | {
        "plain prompt": lambda text: {"prompt": "TAG: " + text, "completion": " go on"},
        "plain completion": lambda text: {"prompt": "TAG: hello", "completion": text},
    }


def filled(value: Any, number: int) -> Any:
    """A row whose TAG tells its number."""
    if isinstance(value, str):
        return value.replace("TAG:", f"case{number}:")
    if isinstance(value, list):
        return [filled(inner, number) for inner in value]
    return {key: filled(inner, number) for key, inner in value.items()} if isinstance(value, dict) else value


def in_place(kind: Kind, text: str, payload: str) -> set[str]:
    """The texts that may come of a harmless one: with the payload in its place, as it is or as a literal.

    A noncharacter of Unicode may be replaced.
    """
    written = (payload, payload.strip(), json.dumps(payload, ensure_ascii=False)[1:-1], repr(payload)[1:-1])
    forms = {form for text in written for form in (text, text.replace("\ufdd0", "\ufffd"))}
    return {squeezed(kind, text.replace(WORD, form)) for form in forms}


def same_but_for(
    kind: Kind, found: list[int], harmless: list[int], payload: str, tags: str = "", or_text: str | None = None
) -> bool:
    """Whether ids hold the payload as text, and only the control tokens of the harmless ids.

    `tags`: a pattern of tokens that the payload may spell; a template may then also have written `or_text`.
    """
    decoder = kind.tokenizer.added_tokens_decoder
    marks = {i for i in controls(kind.tokenizer) if not (tags and re.fullmatch(tags, decoder[i].content))}
    if [i for i in found if i in marks] != [i for i in harmless if i in marks]:
        return False
    text, other = (re.sub(r"case\d+:", "TAG:", text_of(kind, ids)) for ids in (found, harmless))
    if or_text is not None and squeezed(kind, or_text) == squeezed(kind, text):
        return True
    kept = partial(re.sub, tags or "(?!)", "")
    return kept(squeezed(kind, text)) in {kept(form) for form in in_place(kind, other, payload)}


def rendered_turns(kind: Kind, messages: list[dict[str, Any]]) -> list[str]:
    """The text of a dialogue up to the end of each assistant turn, contents as they are."""
    ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [expected_turn(kind, messages[:end]) for end in ends]
    return [text_of(kind, turn.whole) for turn in turns if turn]


def tags_in(kind: Kind, payload: str) -> str:
    """A pattern of the kind's tokens for thoughts and calls, if a payload spells one.

    Templates and data write an assistant's thoughts and calls as such tags in its content, so there they are tokens.
    """
    tags = [token.content for token in kind.tokenizer.added_tokens_decoder.values() if token.content in THINK]
    return "|".join(tags) if any(tag in payload for tag in tags) else ""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_text_becomes_a_control_token(name, tmp_path):
    """Marked text in any place gives the control tokens of a harmless word, the same mask, and itself as text."""
    kind = ZOO[name]
    payloads, places = payloads_of(kind), places_of(kind)
    assert len(payloads) >= 30
    cases = [(place, text) for place in places for text in (WORD, *payloads)]
    rows = [filled(places[place](text), number) for number, (place, text) in enumerate(cases)]
    written = prepared(kind, rows, tmp_path)
    count: Counter[str] = Counter()
    wrong = []
    for number, (place, text) in enumerate(cases):
        found = [trained(row) for row in written.rows["finetune"].get(number, [])]
        if text == WORD:
            harmless = found
            assert harmless, f"{place}: a harmless word is refused, {written.refused[number]}"
            continue
        count["cases"] += 1
        if {None, "finetune"} & {*written.refused[number]} and not found:
            count["refused"] += 1
            continue
        tags = tags_in(kind, text) if place in ("assistant", "earlier assistant", "plain completion") else ""
        is_safe = len(found) == len(harmless)
        for (ids, mask), (other, other_mask) in zip(found, harmless):
            wholes = rendered_turns(kind, places[place](text).get("messages", [])) if tags else []
            is_safe &= any(same_but_for(kind, ids, other, text, tags, whole) for whole in [None, *wholes])
            answers = chosen(ids, mask), chosen(other, other_mask)
            is_safe &= same_but_for(kind, *answers, text, tags)
        count["safe"] += is_safe
        count["of these with tags in an answer"] += bool(tags)
        if not is_safe:
            wrong.append(f"{place} {text!r}: {[text_of(kind, ids) for ids, _ in found]}, {written.refused[number]}")
    print(f"payloads {name}: {dict(count)}")
    assert count["safe"] > count["cases"] / 3  # plain texts are refused, and a few of the odd kinds
    assert not wrong, f"{len(wrong)} of {count['cases']}\n" + "\n".join(wrong[:8])


def chosen(ids: list[int], mask: list[bool]) -> list[int]:
    return [i for i, is_trained in zip(ids, mask) if is_trained]


@pytest.mark.parametrize("name", KINDS)
def test_halves_of_a_marker_do_not_join_over_a_border(name, tmp_path):
    kind = ZOO[name]
    marks = controls(kind.tokenizer)
    rows = []
    for token in kind.tokenizer.added_tokens_decoder.values():
        for cut in {1, len(token.content) // 2, len(token.content) - 1} if token.content.strip() else ():
            left, right = token.content[:cut], token.content[cut:]
            for a, b in ((WORD, WORD), (left, right)):
                rows += [{"prompt": f"TAG: {a}", "completion": b}, {"messages": [user(f"TAG: {a}"), assistant(b)]}]
                rows += [{"messages": [{"role": "system", "content": a}, user(b + " TAG: x"), assistant("go")]}]
                rows += [{"messages": [user("TAG: x"), assistant(b, reasoning_content=a)]}]
                rows += [{"messages": [user("TAG: x"), assistant(a, tool_calls=[call(b)])], "tools": TOOLS}]
    shapes = 5
    rows = [filled(row, number) for number, row in enumerate(rows)]
    written = prepared(kind, rows, tmp_path).rows["finetune"]
    for number, row in enumerate(rows):
        if number // shapes % 2 and number in written and number - shapes in written:
            harmless, broken = (trained(written[at][0])[0] for at in (number - shapes, number))
            assert [i for i in broken if i in marks] == [i for i in harmless if i in marks], row


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_text_becomes_a_control_token_in_serving(name):
    """The same for `encode_prompt` and `encode_response`, as the demo, PPO and servers call them."""
    kind = ZOO[name]
    tokenizer = kind.tokenizer
    count: Counter[str] = Counter()
    wrong = []

    def chat(make: Any, text: str) -> list[int]:
        *prompt, answer = make(text)["messages"]
        return encode_prompt(tokenizer, prompt, make(text).get("tools"))

    places = places_of(kind)
    encoders = {place: partial(chat, make) for place, make in places.items() if not place.startswith("plain")}
    encoders["plain prompt"] = lambda text: encode_prompt(tokenizer, "hello " + text)
    encoders["plain response"] = lambda text: encode_response(tokenizer, text)
    for (place, encode), payload in product(encoders.items(), payloads_of(kind)):
        count["cases"] += 1
        try:
            ids = encode(payload)
        except (UsageError, TemplateError):
            count["refused"] += 1
            continue
        tags, or_text = "", None
        if place in ("earlier assistant", "plain response"):
            tags = tags_in(kind, payload)
        if tags and place == "earlier assistant":
            or_text = render(kind, places[place](payload)["messages"][:-1], None, prompt=True)
        bare = payload.removesuffix(tokenizer.eos_token) if place == "plain response" else payload
        is_safe = any(same_but_for(kind, ids, encode(WORD), text, tags, or_text) for text in (payload, bare))
        count["safe"] += is_safe
        if not is_safe:
            wrong.append(f"{place} {payload!r}: {text_of(kind, ids)!r}")
    print(f"serving {name}: {dict(count)}")
    assert not wrong, f"{len(wrong)} of {count['cases']}\n" + "\n".join(wrong[:8])
