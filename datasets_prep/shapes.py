"""Rows that are no format: a line that says what they are and what to write, or the nearest format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from datasets_prep.columns import DECISIVE, FORMATS, OURS, STEPS, SYNONYMS, some
from datasets_prep.messages import MESSAGE, earlier_turns, holds_turns
from datasets_prep.turns import BadRow

Values = dict[str, Any]  # of a row, by our names
NO_TEXTS = {"id", "ids", "model", "score", "system", "url"}  # words of columns that are neither prompt nor answer
SPOKEN = re.compile(r"(^|\n|\|)\s*(human|user)\s*[:|].*\n\W*(assistant|bot|ai|gpt)\s*[:|]", re.IGNORECASE | re.DOTALL)
ERRORS = {"error", "detail", "message", "status", "code", "statusCode", "success"}
ANSWERS = {*SYNONYMS["completion"], "completion", "completions", "responses", "answers", "ref", "conversation"}
PAIRS = "write prompt, chosen, rejected, as the example in howto/datasets.md does"


# -------------------------------------------------------------------------------------------------------- recognisers
def _is_tree(values: Values) -> bool:
    names = values.keys()
    is_one = {"message_id", "role", "text"} <= names
    return is_one or "message_tree_id" in names or isinstance(values.get("mapping"), dict)


def _whole_columns(values: Values) -> bool:
    """Whether a row is a table: each value a list of texts or numbers, or an object by row number."""
    lists = [value for value in values.values() if isinstance(value, list) and value]
    if lists and len(lists) == len(values) and "messages" not in values:
        plain = all(isinstance(part, str | int | float) for value in lists for part in value)
        return plain and len({len(value) for value in lists}) == 1 and any(isinstance(v[0], str) for v in lists)
    return bool(values) and all(isinstance(v, dict) and v and all(map(str.isdigit, v)) for v in values.values())


def _two_answers(values: Values) -> str:
    """Two columns of answers whose names differ in their last character: response_0 and response_1."""
    ends = {"a": "b", "A": "B", "0": "1", "1": "2", "j": "k"}
    names = [name for name, value in values.items() if isinstance(value, str | list) and _words(name) & ANSWERS]
    return next((f"{n} and {o}" for n in names if (o := n[:-1] + ends.get(n[-1:], "?")) in names), "")


def _scored(values: Values) -> str:
    """A column of several answers, each with a number, or with such a list beside it."""
    for name, value in values.items():
        if not isinstance(value, list) or len(value) < 2 or holds_turns(value):
            continue
        kinds = [{type(part) for part in (one.values() if isinstance(one, dict) else [one])} for one in value]
        beside = any(isinstance(values.get(other), list) for other in ("ranks", "scores", "ratings"))
        if all(str in kind and (kind & {int, float} or beside) for kind in kinds):
            return name
    return ""


def _without_roles(values: Values) -> str:
    """A column of several texts."""
    lists = (name for name, v in values.items() if isinstance(v, list) and v and all(isinstance(t, str) for t in v))
    return next(lists, "")


def _inside(values: Values) -> str:
    """Where the rows are inside of one, as jq writes it."""
    if len(values) > 1 and all(isinstance(value, dict) for value in values.values()):
        return ".[]"
    for name, value in values.items():
        is_list = isinstance(value, list) and value and all(isinstance(part, dict) for part in value)
        if is_list and not holds_turns(value):
            return f".{name}[]"
        if isinstance(value, dict) and value.keys() & {*OURS, "conversations"}:
            return f".{name}"
    return ""


def _dialogue_as_text(values: Values) -> str:
    return next((name for name, value in values.items() if isinstance(value, str) and SPOKEN.search(value)), "")


Recogniser = tuple[Callable[[Values], Any], str]  # what it finds, and the line
DIALOGUE = f'{{{{"messages": [{MESSAGE.replace("{", "{{").replace("}", "}}")}, …]}}}}'
ALWAYS: tuple[Recogniser, ...] = (  # even where the columns of a format are there
    (_is_tree, f"a tree of messages: write each path from its root to an answer as {DIALOGUE}"),
    (
        _whole_columns,
        "lists, not a text each; of whole columns write rows: pandas.read_json(FILE).to_json(NEW, "
        "orient='records', lines=True)",
    ),
)
NO_FORMAT: tuple[Recogniser, ...] = (
    (
        lambda v: any(keys <= v.keys() for keys in ({"role", "content"}, {"from", "value"})),
        f"one message a row: write {DIALOGUE}",
    ),
    (
        lambda v: next((name for name in v if name.endswith("input_ids")), ""),
        "tokenised rows ({}): give the texts; what was prepared here is used as it is, by --data_dir",
    ),
    (lambda v: v.keys() <= ERRORS and next(iter(v), ""), "an error message instead of data ({}): download it again"),
    (
        lambda v: {"question", "response_j", "response_k"} <= v.keys(),
        "pairs, response_j the better: --columns prompt=question,chosen=response_j,rejected=response_k",
    ),
    (_two_answers, f"two answers to a prompt ({{}}), of which another column says the better: {PAIRS}"),
)
NOTHING_NEAR: tuple[Recogniser, ...] = (
    (_scored, f"several answers to a prompt with scores ({{}}): {PAIRS}"),
    (_dialogue_as_text, f"a dialogue as text ({{}}): write {DIALOGUE}, or try datasets_prep.helpful_harmless"),
    (_inside, "the rows are inside of it: jq -c '{}' FILE > NEW.jsonl"),
    (_without_roles, f'texts without roles ({{}}): write {{{{"text": …}}}} for each, or {DIALOGUE}'),
)


def hint(values: Values, recognisers: Iterable[Recogniser]) -> str | None:
    """What a row is and what to write, by the first recogniser that finds something in it."""
    return next((line.format(found) for finds, line in recognisers if (found := finds(values))), None)


# ------------------------------------------------------------------------------------------------------ nearest format
def no_format(values: Values, nulls: set[str], columns: list[str]) -> str:
    """What the row is, or the columns found and the nearest format, with the flag that maps them to it."""
    if line := hint(values, NO_FORMAT):
        return line
    found = [name for name, value in values.items() if isinstance(value, (str, list, dict))]
    turns = [name for name in found if name not in DECISIVE and holds_turns(values[name])]
    decisive = {name for name in found if name in DECISIVE}
    formats = [f for f in FORMATS if f != STEPS and decisive <= set(f)] or [f for f in FORMATS if f != STEPS]

    def assigned(names: tuple[str, ...]) -> dict[str, str]:
        result: dict[str, str] = {}
        for name in names:
            like = [name, *SYNONYMS.get(name, [])]
            free = [column for column in found if column not in result.values() and column not in names]
            free = [column for column in free if _may_be(name, column, values[column], column in turns)]
            near = (column for column in free if not _words(column).isdisjoint(like))
            match = name if name in values else next(near, None)
            if match:
                result[name] = match
        return result

    def closeness(names: tuple[str, ...]) -> tuple[bool, int, int]:
        count = len(assigned(names))
        return count == len(names), count, -len(names)

    begin = f"no known format: columns {some(columns) or 'none'}; nearest: "
    answered = assigned(("instruction", "completion")).get("completion") if "instruction" in found else None
    if answered and not decisive:
        given = "" if "input" in found or "context" not in found else ",input=context"
        given += "".join(f",history={name}" for name in turns[:1] if name != "history")
        return f"{begin}instruction, input, output (--columns output={answered}{given})"
    best = max(formats, key=closeness)
    near = assigned(best)
    if (len(near) < 2 or len(near) < len(best)) and (line := hint(values, NOTHING_NEAR)):
        return line
    if null := sorted((set(best) - near.keys()) & nulls, key=OURS.index) or ([] if near else sorted(nulls)):
        return f"{null[0]}_is_null"
    if len(near) < len(best) and turns and not decisive:
        best, near = ("messages",), {"messages": turns[0]}
    if not near:
        best = ("prompt", "completion")
        is_text = any(not name.replace(" ", "_").isidentifier() for name in values)
        begin = ("the first line of a CSV file names its columns; " if is_text else "") + begin
    pairs = [f"{name}={near.get(name, 'COLUMN')}" for name in best if near.get(name) != name]
    pairs += [f"history={name}" for name in turns[:1] if "prompt" in best and name not in ("history", near["prompt"])]
    flag = ",".join(pairs or [f"{name}={name}" for name in best])
    return f"{begin}{', '.join(best)} (--columns {flag})"


def _may_be(name: str, column: str, value: Any, is_turns: bool) -> bool:
    """Whether a column may be proposed for one of our names, by what it holds."""
    if is_turns:
        return name == "messages" or (name == "prompt" and _asks(value))
    if name == "messages":
        return not isinstance(value, str) or value.lstrip().startswith("[")
    return isinstance(value, str) and _words(column).isdisjoint(NO_TEXTS)


def _asks(turns: Any) -> bool:
    """Whether turns end with the user's."""
    try:
        return (earlier_turns(turns) or [{"role": ""}])[-1]["role"] == "user"
    except BadRow:
        return False


def unread_answers(values: Values, names: Iterable[str]) -> list[str]:
    """Notes on columns beside a prompt alone that look like its answers."""
    if two := _two_answers(values):
        return [f"{two} kept as columns: for pairs {PAIRS}"]
    notes = []
    for name in names:
        is_text = isinstance(values[name], str) and values[name]
        if not (_words(name) & (ANSWERS - {"answer", "solution"}) or (name == "label" and is_text)):
            continue
        if is_text:
            notes.append(f"{name} kept as a column: --columns completion={name} makes it the answer")
        elif isinstance(values[name], list):
            notes.append(f"{name} kept as a column: for pairs {PAIRS}")
    return notes


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", name.lower()))
