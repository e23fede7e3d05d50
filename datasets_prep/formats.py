"""Formats of raw rows: from the columns that people have to the row that `datasets_prep.common` prepares.

A row is read as the first of these formats whose columns it has, not null:

| format | columns | row |
|---|---|---|
| OpenAI's pairs | `input` (with `messages`), `preferred_output, non_preferred_output` | prompt, chosen, rejected |
| unpaired preferences | `prompt, completion, label`, or `messages, label` | prompt, completion, label |
| pairs | `prompt, chosen, rejected`; or `chosen, rejected`, both with the prompt | prompt, chosen, rejected |
| prompt and completion | `prompt, completion` | prompt, completion; messages if it is several |
| dialogues | `messages`, or ShareGPT's `conversations` | messages; prompt if nothing is answered |
| prompts | `prompt`, or RLHFlow's `context_messages` | prompt |
| text | `text` | text |

Alpaca's `instruction` and `input` are a prompt, its `output` the completion. `system` and `tools` belong to all but
text, and `history` (messages, or pairs of texts) to each prompt of one user turn. A row with the columns of two formats
is refused, unless both say the same (`messages` beside an equal `chosen`) or the other is `text`, which people add as a
rendering; such columns are kept as plain ones, and noted. A response is text, or a message where it has more than that
(reasoning, tool calls).

Changed, and noted: messages after the last answer of a dialogue are cut. Refused, because any remedy of ours would
change what is trained: two assistant messages in a row, sides of a pair that are several messages, steps with a label
each (TRL's `prompt, completions, labels`: joining steps needs a separator that the data does not name).

Left out: images and sounds (refused), templates' own arguments (`chat_template_kwargs`, noted).
"""

from __future__ import annotations

import os
import re
from typing import Any

from datasets_prep import shapes
from datasets_prep.columns import DECISIVE, FORMATS, OURS, STEPS, SYNONYMS, ours, two_formats
from datasets_prep.messages import (
    answer,
    as_dialogue,
    as_message,
    as_messages,
    check_ends,
    check_order,
    earlier_turns,
    holds_turns,
    list_of,
    parsed,
    side,
    text_of,
    truth,
    user_message,
)
from datasets_prep.nulls import without_fill
from datasets_prep.turns import BadRow, Messages
from lightrlhf.storage.jsonl import Row

DIALOGUE_AS_TEXT = re.compile(r"(?<=\n)(Human|Assistant|User): ")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NEEDED = {names: frozenset(names) for names in FORMATS}
QUESTIONS = ("question", "query", "instruction", "problem", "input")  # beside a pair of texts, surely its prompt


def to_row(raw: dict[str, Any], mapping: dict[str, str] | None = None) -> Row:
    """The row of raw columns, of which `mapping` names some.

    Every column that was not read is in `columns`. `notes` are what was changed or not read, for the report to count.
    Raises: BadRow with the reason.
    """
    mapping = mapping or {}
    by_column = {theirs: ours for ours, theirs in mapping.items()}
    column_of: dict[str, str] = {}  # by our name, or its own
    for column, value in raw.items():
        name = by_column.get(column) or ours(column, value)
        if value is None or (name in mapping and mapping[name] != column):
            continue
        if name in column_of:
            raise BadRow(f"two formats: {column_of[name]} and {column}; choose one: --columns {name}={column}")
        column_of[name] = column
    values = {name: raw[column] for name, column in column_of.items()}
    nulls = {by_column.get(column) or ours(column) for column in raw if raw[column] is None}
    reader = _Reader(values, column_of, nulls & set(OURS), set(mapping))
    row = reader.row()
    check_ends(row)
    if column_of.get("prompt") == "context_messages" and row.keys() <= {"prompt", "tools", "read_as"}:
        row["stage"] = "prompts"
    read = {column_of[name] for name in reader.used if name in column_of}
    left = {column: value for column, value in raw.items() if column not in read}
    left = {c: v for c, v in left.items() if v is not None or (by_column.get(c) or ours(c)) not in OURS}
    row["columns"] = {column: plain(value) for column, value in left.items()}
    return row | ({"notes": reader.notes} if reader.notes else {})


def plain(value: Any) -> Any:
    """`value` as plain data for a `.pt` file; other objects as text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


# ------------------------------------------------------------------------------------------------------------ formats
class _Reader:
    """Reads one row: `used` are the names it was read from, `notes` what was changed or not read."""

    def __init__(self, values: dict[str, Any], shown: dict[str, str], nulls: set[str], mapped: set[str]) -> None:
        self.values, self.nulls, self.mapped = dict(without_fill(values)), nulls, mapped
        self.shown = dict(shown)  # our name: the column's, for errors
        self.columns = sorted(shown.values())
        self.tools: list[dict[str, Any]] = []
        self.used: set[str] = set()
        self.notes: list[str] = []

    def row(self) -> Row:
        values = self.values
        for name in MEDIA:
            if values.get(name):
                raise BadRow(f"column {name}: images and sounds are not read")
        self._read_alpaca()
        self._read_dialogue_before_a_pair()
        if not self.mapped and (line := shapes.hint(values, shapes.ALWAYS)):
            raise BadRow(line)
        names = next((names for names in FORMATS if self._fits(names)), None)
        if names is None:
            raise self._no_format()
        self.used |= set(names)
        if names == STEPS:
            raise BadRow("steps with a label each are not read; nearest: prompt, completion, label of the whole answer")
        if names[0] == "input":
            self._read_openai_preference()
        if names != ("text",):
            self._read_tools()
        row = (
            {"text": text_of(values["text"], "text")} if names == ("text",)
            else self._pair() if "chosen" in names or names[0] == "input"
            else self._dialogue() if names[0] == "messages"
            else self._answered() if "completion" in names
            else {"prompt": self._prompt()}
        )  # fmt: skip
        self._check_others(names, row)
        return row | ({"tools": self.tools} if self.tools else {})

    def _fits(self, names: tuple[str, ...]) -> bool:
        if not self.values.keys() >= NEEDED[names]:
            return False
        return self.mapped & {*DECISIVE, "label", "text"} <= {*names, *self.used}

    def _no_format(self) -> BadRow:
        for name in sorted(self.mapped & self.nulls):
            return BadRow(f"{name}_is_null")
        return BadRow(shapes.no_format(self.values, self.nulls, self.columns))

    def _read_alpaca(self) -> None:
        """`instruction`, `input`, `history` and `output` as prompt and completion."""
        values = self.values
        answered = "output" in values or {"chosen", "rejected"} <= values.keys()
        if "instruction" not in values or not answered or "prompt" in values and "output" not in values:
            return
        if twice := {"prompt", "completion"} & values.keys():
            raise BadRow(two_formats(["instruction", "output"], sorted(twice)))
        text = text_of(values["instruction"], "instruction")
        if added := values.get("input"):
            text += "\n" + text_of(added, "input")
        if values.get("history") and not holds_turns(values["history"]):
            raise BadRow("history: pairs of texts are expected")
        values["prompt"] = user_message(text)
        self.used |= {"instruction", "input", "history"}
        self.shown["prompt"] = "instruction"
        if "output" in values:
            values["completion"] = values["output"]
            self.used.add("output")
            self.shown["completion"] = "output"

    def _read_dialogue_before_a_pair(self) -> None:
        """A dialogue that ends with the user, beside a pair, is the prompt of it."""
        values = self.values
        if {"chosen", "rejected", "messages"} <= values.keys() and "prompt" not in values:
            messages = as_messages(list_of(values["messages"], "messages"))
            if messages and messages[-1]["role"] in ("user", "tool"):
                values["prompt"] = messages
                del values["messages"]
                self.used.add("messages")

    def _read_openai_preference(self) -> None:
        values = self.values
        given = values["input"]
        if isinstance(given, str):
            given = parsed(given)
        if not isinstance(given, dict) or "messages" not in given:
            raise BadRow("input has no messages; nearest: prompt, chosen, rejected")
        values["prompt"] = list_of(given["messages"], "messages")
        if given.get("tools"):
            values["tools"] = given["tools"]
        if unknown := sorted(given.keys() - {"messages", "tools", "parallel_tool_calls"}):
            raise BadRow(f"unknown key of input: {unknown[0]}")
        values["chosen"] = list_of(values["preferred_output"], "preferred_output")
        values["rejected"] = list_of(values["non_preferred_output"], "non_preferred_output")
        self.used |= {"prompt", "chosen", "rejected"}

    def _read_tools(self) -> None:
        """The schemas of `tools`, each with its type. Raises: BadRow."""
        values = self.values
        if "messages" in values and "tools" not in values and "functions" in values:  # OpenAI's older name
            values["tools"] = values["functions"]
            self.used.add("functions")
        if "chat_template_kwargs" in values:
            self.notes.append("chat_template_kwargs kept as a column: the template is given no arguments")
        self.used.add("tools")
        for tool in list_of(values.get("tools") or [], "tools", "functions' schemas"):
            tool = parsed(tool) if isinstance(tool, str) else tool
            if not isinstance(tool, dict) or not ("name" in tool or isinstance(tool.get("function"), dict)):
                raise BadRow("tools: a list of functions' schemas is expected")
            self.tools.append(tool if "function" in tool else {"type": "function", "function": tool})

    def _prompt(self) -> str | Messages:
        """The prompt as text, or as messages if it, `system` or `tools` are such. Raises: BadRow."""
        value = self.values["prompt"]
        prompt = as_messages(value) if isinstance(value, list) else text_of(value, "prompt")
        if before := self._earlier_turns(prompt):
            prompt = [*before, *as_dialogue(prompt)]
        if isinstance(prompt, str) and (self._system() or self.tools):
            prompt = user_message(prompt)
        if isinstance(prompt, str):
            return prompt
        prompt = self._with_system(prompt)
        check_order(prompt)
        if prompt[-1]["role"] not in ("user", "tool"):
            raise BadRow(f"the prompt ends with the {prompt[-1]['role']}: end it with a user message")
        return prompt

    def _earlier_turns(self, prompt: str | Messages) -> Messages:
        """The turns in the column `history`, which are read before a prompt of a text or of one user message."""
        value = self.values.get("history")
        is_one = isinstance(prompt, str) or [message["role"] for message in prompt] == ["user"]
        if not value or not is_one or not (holds_turns(value) or "history" in self.mapped):
            return []
        turns = earlier_turns(value)
        if turns is None:
            raise BadRow("history: a list of messages, or of pairs of a user's and an assistant's text, is expected")
        self.used.add("history")
        return turns

    def _system(self) -> str:
        self.used.add("system")
        value = self.values.get("system") or ""
        if isinstance(value, dict):
            return str(as_message({"role": "system", **value})["content"])
        return text_of(value, "system") if value else ""

    def _with_system(self, messages: Messages) -> Messages:
        text = self._system()
        if not text.strip():
            return messages
        if messages and messages[0]["role"] in ("system", "developer"):
            if messages[0]["content"] != text:
                raise BadRow("two system messages: one in the column system, another in the dialogue")
            return messages
        return [{"role": "system", "content": text}, *messages]

    def _dialogue(self) -> Row:
        """`{messages}` up to the last answer, which a label is of; `{prompt}` if there is none. Raises: BadRow."""
        row = self._cut(self._with_system(as_messages(list_of(self.values["messages"], "messages"))))
        if "label" not in self.used:
            return row
        if "messages" not in row:
            raise BadRow("a label of a dialogue without an answer")
        *prompt, last = row["messages"]
        return {"prompt": prompt, "completion": answer(last), "label": truth(self.values["label"])}

    def _cut(self, messages: Messages) -> Row:
        check_order(messages)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            if messages[-1]["role"] != "user":
                raise BadRow("a dialogue of a system message alone")
            self.notes.append("a dialogue without an answer: read as a prompt")
            return {"prompt": messages}
        if messages[answers[-1] + 1 :]:
            self.notes.append("messages after the last answer cut")
        return {"messages": messages[: answers[-1] + 1]}

    def _answered(self) -> Row:
        """`{prompt, completion[, label]}`, or `{messages}` whose earlier answers have weight 0. Raises: BadRow."""
        value = self.values["completion"]
        label = {"label": truth(self.values["label"])} if "label" in self.used else {}
        if isinstance(value, (list, dict)):
            messages = as_messages([value] if isinstance(value, dict) else value)
            prompt = as_dialogue(self._prompt())
            if len(messages) == 1:
                return {"prompt": prompt, "completion": answer(messages[0]), **label}
            if label:
                raise BadRow("a label of several messages: label one assistant message")
            if messages[0]["role"] != "assistant":
                raise BadRow("the completion begins with no assistant message: move the start to the prompt")
            before = [message | ({"weight": 0} if message["role"] == "assistant" else {}) for message in prompt]
            return self._cut([*before, *messages])
        return {"prompt": self._prompt(), "completion": text_of(value, "completion"), **label}

    def _pair(self) -> Row:
        """`{prompt, chosen, rejected}`, whose prompt is separate or begins both sides. Raises: BadRow."""
        chosen, rejected = (side(self.values[name], name) for name in ("chosen", "rejected"))
        if isinstance(chosen, str) and isinstance(rejected, str):
            if "prompt" in self.values:
                return {"prompt": self._prompt(), "chosen": chosen, "rejected": rejected}
            if self.values.keys() & set(QUESTIONS):
                raise self._no_format()
            if holds_turns(self.values.get("history")):
                raise BadRow("history beside a pair without a prompt; nearest: prompt, chosen, rejected")
            common = os.path.commonprefix([chosen, rejected])
            prompt = common[: common.rfind(" ")] if " " in common else ""  # ends at a word boundary
            if not prompt.strip():
                raise BadRow("chosen and rejected have no prompt in common; nearest: prompt, chosen, rejected")
            if found := DIALOGUE_AS_TEXT.search(chosen):
                raise BadRow(f"a dialogue as text ({found[0]!r}): give messages, or use datasets_prep.helpful_harmless")
            if not (chosen[len(common) :].strip() and rejected[len(common) :].strip()):
                raise BadRow("one side of the pair is the beginning of the other; nearest: prompt, chosen, rejected")
            self.values["prompt"], start = prompt, len(prompt)
            self.used.add("prompt")
            self.notes.append("prompt: what chosen and rejected begin with, as text")
            return {"prompt": self._prompt(), "chosen": chosen[start:], "rejected": rejected[start:], "is_plain": True}
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise BadRow("one side of the pair is text, the other messages")
        if not chosen or not rejected:
            raise BadRow("a side of the pair is empty")
        if chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant":
            return self._pair_of_dialogues(chosen, rejected)
        if len(chosen) > 1 or len(rejected) > 1:
            raise BadRow("sides of several messages: one assistant message each after the prompt")
        if "prompt" not in self.values:
            raise BadRow("a pair without a prompt; nearest: prompt, chosen, rejected")
        return {"prompt": as_dialogue(self._prompt()), "chosen": answer(chosen[0]), "rejected": answer(rejected[0])}

    def _pair_of_dialogues(self, chosen: Messages, rejected: Messages) -> Row:
        sides = [chosen, rejected]
        common = min(len(side) for side in sides) - 1
        same = next((n for n in range(common) if chosen[n] != rejected[n]), common)
        if {side[same]["role"] for side in sides} != {"assistant"}:
            raise BadRow("chosen and rejected have different prompts")
        if any(len(side) > same + 1 for side in sides):
            raise BadRow("sides of several messages: one assistant message each after the prompt")
        prompt = chosen[:same]
        if "prompt" in self.values and not _says({"messages": prompt}, "prompt", self.values["prompt"]):
            raise BadRow("the prompt differs from the one that chosen and rejected begin with")
        self.values["prompt"] = prompt
        self.used.add("prompt")
        return {"prompt": self._prompt(), "chosen": answer(chosen[same]), "rejected": answer(rejected[same])}

    def _check_others(self, names: tuple[str, ...], row: Row) -> None:
        """Note the columns of other formats that say the same. Raises: BadRow if they say something else."""
        unread = self.values.keys() - self.used
        kept = [name for name in (*DECISIVE, "text") if name in unread]
        if unused := sorted(self.mapped & self.values.keys() - self.used):
            raise BadRow(f"--columns names {unused[0]}, which {', '.join(names)} does not go with")
        if kept and not self.mapped:
            other = [name for name in kept if not self._agrees(names, row, name)]
            second = next((f for f in FORMATS if set(other) <= set(f) <= self.values.keys()), None)
            if other and second is None:
                raise self._no_format()
            if other and second:
                raise BadRow(two_formats([self.shown[name] for name in names], [self.shown[name] for name in second]))
        read_as = ", ".join(self.shown.get(name, name) for name in names)
        row["read_as"] = f"{FORMATS[names]} ({read_as})"
        self.notes += [f"{self.shown[name]} kept as a column beside {read_as}" for name in kept]
        more = {name for other in FORMATS if self.nulls and set(names) < set(other) for name in other} & self.nulls
        if "label" in more:
            raise BadRow("label_is_null")
        self.notes += [f"{name} is null: read as {read_as}" for name in sorted(more & set(DECISIVE))]
        others = sorted(self.values.keys() - self.used - {*kept})
        turns = [name for name in others if holds_turns(self.values[name])]
        remedy = "; --columns history={0} reads it before the prompt" if isinstance(row.get("prompt"), str) else ""
        self.notes += [f"{self.shown[name]} holds turns and is not read" + remedy.format(name) for name in turns]
        if "prompt" in self.used:
            asked = [name for name in others if name in SYNONYMS["prompt"] and name not in turns]
            self.notes += [f"{self.shown[name]} kept as a column beside the prompt" for name in asked]
        if names == ("prompt",) and not self.mapped:
            self.notes += shapes.unread_answers(self.values, others)
        if any(self.values.get(name) in (0, False) for name in ("weight", "train")):
            self.notes.append("weight or train of a row is not read: give it to its messages")

    def _agrees(self, names: tuple[str, ...], row: Row, name: str) -> bool:
        """Whether column `name` of another format says nothing else; of `text` beside answers that is assumed."""
        return names != ("prompt",) if name == "text" else _says(row, name, self.values[name])


def _says(row: Row, name: str, value: Any) -> bool:
    """Whether column `name` of another format says nothing but what the row says."""
    if "text" in row:
        return False
    whole = row.get("messages")
    if whole is None:
        last = row.get("chosen", row.get("completion"))
        last = [] if last is None else [last if isinstance(last, dict) else {"role": "assistant", "content": last}]
        whole = [*as_dialogue(row["prompt"]), *last]
    asked = [message["content"].strip() for message in whole if message["role"] == "user"]
    if isinstance(value, str):
        if name == "completion":
            return value.strip() == whole[-1]["content"].strip()
        return name == "prompt" and value.strip() in (asked[:1] + asked[-1:])
    if name not in ("prompt", "messages") or not isinstance(value, list):
        return False
    try:
        messages = as_messages(value)
    except BadRow:
        return False
    return whole[: len(messages)] == messages and (name == "prompt" or len(messages) == len(whole))
