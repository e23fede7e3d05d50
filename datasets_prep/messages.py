"""Messages of raw rows: OpenAI's `{role, content, …}` and ShareGPT's `{from, value}`, with everything they hold.

A turn may also be `{"user": "…", "assistant": "…"}`, one key of these, or a pair of texts; a list of messages may also
be an object of lists. Left out: images and sounds (refused).
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from datasets_prep.turns import BadRow, Messages
from lightrlhf.data import chat

ROLES = chat.ROLES | {"function_call": "assistant", "bing": "assistant", "bard": "assistant"}
ROLES |= {"function_response": "tool", "prompter": "user"}
PLAIN_ROLES = frozenset(ROLES.keys() - {"function_call"})
SPEAKERS = {name: role for name, role in ROLES.items() if role != "tool" and name != "model"}
SPEAKERS |= {"input": "user", "output": "assistant"}  # keys of a turn whose values are what they say
MESSAGE_KEYS = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "weight"}
OTHER_KEYS = {"from": "role", "speaker": "role", "value": "content", "text": "content", "parts": "content"}
OTHER_KEYS |= {"reasoning": "reasoning_content", "thinking": "reasoning_content"}
METADATA = {"id", "message_id", "timestamp", "created", "created_at", "date", "model", "language", "lang", "turn"}
MESSAGE = '{"role": …, "content": …}'
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
END_TOKENS = re.compile(  # of any model; </s> is also HTML's
    r"(<\|(?:im_end|endoftext|eot_id|end_of_text|end|eom_id)\|>|<end_of_turn>|<eos>|<｜end▁of▁sentence｜>|</s>)\s*$"
)
# columns whose text is never a list of messages written out
TEXTS = ("prompt", "completion", "chosen", "rejected", "messages")
MISPLACED = {  # (roles that a message may follow, what is wrong elsewhere); None is the start
    "system": ((None,), "a system message that is not the first: move it to the start"),
    "developer": ((None,), "a developer message that is not the first: move it to the start"),
    "assistant": (
        (None, "system", "developer", "user", "tool"),
        "two assistant messages in a row: join them into one",
    ),
    "tool": (("assistant", "tool"), "a tool message that follows no assistant message: put the call before it"),
}


def as_messages(turns: list[Any]) -> Messages:
    """Messages of OpenAI's `{role, content, …}` or ShareGPT's `{from, value}`, with every key kept.

    A call that ShareGPT writes as a turn of its own joins the assistant's message before it. Raises: BadRow.
    """
    if turns and all(isinstance(turn, list) and turn and isinstance(turn[0], dict) for turn in turns):
        if len(turns) > 1:
            raise BadRow("several dialogues in one row: write one a row")
        turns = turns[0]
    messages: Messages = []
    for given in turns:
        if is_plain(given):
            messages.append({"role": ROLES[given["role"]], "content": given["content"]})
            continue
        for turn in _said(given) or [given]:
            message = as_message(turn)
            is_call = (turn.get("from") or turn.get("role")) == "function_call"
            if is_call and messages and messages[-1]["role"] == "assistant":
                before = messages[-1]
                messages[-1] = before | {"tool_calls": [*before.get("tool_calls", []), *message["tool_calls"]]}
            else:
                messages.append(message)
    return messages


def is_plain(turn: Any) -> bool:
    """Whether a turn is a message of a usual role and a text alone, as most are."""
    if type(turn) is not dict or len(turn) != 2:
        return False
    role = turn.get("role")
    return type(role) is str and role in PLAIN_ROLES and type(turn.get("content")) is str


def as_message(turn: Any) -> dict[str, Any]:
    """One message, with the keys of MESSAGE_KEYS that it has. Raises: BadRow, which names an unknown key."""
    if not isinstance(turn, dict):
        raise BadRow(f"a {kind_of(turn)} in the place of a message: write {MESSAGE}")
    given: dict[str, Any] = {}
    first: dict[str, str] = {}  # of the keys with one meaning
    for key, value in turn.items():
        name = str(OTHER_KEYS.get(key, key))
        if value is None or key in METADATA:
            continue
        if first.setdefault(name, key) != key and given[name] != value:
            raise BadRow(f"a message with both {first[name]} and {key}")
        given[name] = value
    if "role" not in given:
        raise BadRow(f"a message without a role, of the keys {', '.join(sorted(turn)[:8])}: write {MESSAGE}")
    raw_role = given["role"].lower() if isinstance(given["role"], str) else None
    if raw_role not in ROLES:
        raise BadRow(f"unknown role {str(given['role'])[:20]!r}: user, assistant, system and tool are read")
    role = ROLES[raw_role]
    if raw_role == "function_call":
        calls = parsed(given.pop("content", None))
        given["tool_calls"] = calls if isinstance(calls, list) else [calls]
    elif "function_call" in given:  # OpenAI's older form
        given["tool_calls"] = [*given.get("tool_calls", []), given.pop("function_call")]
    weight = _weight(given, role)
    unknown = sorted(key for key in given.keys() - MESSAGE_KEYS if given[key] not in ("", [], {}))
    if unknown:
        raise BadRow(f"unknown key of a message: {unknown[0]}; remove it, or rename it to what it is")
    message: dict[str, Any] = {"role": role, "content": _content(given)}
    if role != "assistant" and (wrong := given.keys() & {"reasoning_content", "tool_calls"}):
        raise BadRow(f"{min(wrong)} in a {role} message")
    for key in ("reasoning_content", "tool_call_id", "name"):
        if key in given:
            message[key] = text_of(given[key], key)
    if given.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in list_of(given["tool_calls"], "tool_calls", "calls")]
    return message | ({} if weight is None else {"weight": weight})


def _weight(given: dict[str, Any], role: str) -> int | None:
    """The weight in `weight` or `train`, which are removed. Raises: BadRow."""
    weights = [given.pop(key) for key in ("weight", "train") if key in given]
    if not weights:
        return None
    if any(not isinstance(weight, (int, float)) or weight not in (0, 1) for weight in weights):
        raise BadRow("a message's weight is neither 0 nor 1")
    if len(set(weights)) > 1:
        raise BadRow("a message's weight and train disagree")
    if role == "assistant":
        return int(weights[0])
    if weights[0]:
        raise BadRow(f"weight 1 in a {role} message: only the assistant's are trained")
    return None


def _content(given: dict[str, Any]) -> str:
    """The text of a message; of parts, their texts joined. Raises: BadRow."""
    content = given.get("content")
    if content is None:
        if given.get("tool_calls"):
            return ""
        raise BadRow("message_content_is_null")
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return text_of(content, "message_content")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRow(f"a part of a message is {type(part).__name__}")
    kind = part.get("type")
    texts = [text for text in map(part.get, ("text", "value", "content")) if isinstance(text, str)]
    if kind in (None, "text", "input_text", "output_text") and len(texts) == 1:
        return texts[0]
    what = "of no type" if kind is None else f"{kind} without its text" if kind == "text" else str(kind)[:20]
    raise BadRow(f"a part of a message is not text but {what}: only text is read")


def _call(call: Any) -> dict[str, Any]:
    """`{type, [id], function: {name, arguments: dict}}` of a tool call in any usual form. Raises: BadRow."""
    call = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    function = call.pop("function", None) or {key: call.pop(key) for key in ("name", "arguments") if key in call}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow('a tool call without a function\'s name: write {"name": …, "arguments": {…}}')
    if unknown := sorted((call.keys() - {"type", "id"}) | (function.keys() - {"name", "arguments"})):
        raise BadRow(f"unknown key of a tool call: {unknown[0]}")
    if call.get("type", "function") != "function":
        raise BadRow("a tool call that is no function")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":  # of a function without any
        arguments = {}
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if not isinstance(arguments, dict):
        raise BadRow("a tool call's arguments are no JSON object")
    named = {"name": function["name"], "arguments": arguments}
    return {"type": "function", **({"id": call["id"]} if "id" in call else {}), "function": named}


def check_order(messages: Messages) -> None:
    """Raises: BadRow with what to do, if no chat template expects such an order."""
    if not messages:
        raise BadRow("no_messages")
    before = None
    for message in messages:
        allowed, wrong = MISPLACED.get(message["role"], ((before,), ""))
        if before not in allowed:
            raise BadRow(wrong)
        before = message["role"]


def check_ends(row: dict[str, Any]) -> None:
    """Raises: BadRow for an answer that ends with the end token of a model, written as text."""
    answers = [row[name] for name in ("text", "completion", "chosen", "rejected") if name in row]
    answers += [message for message in row.get("messages", ()) if message["role"] == "assistant"]
    for answer in answers:
        text = answer if isinstance(answer, str) else answer["content"]
        if (found := END_TOKENS.search(text)) and "<s>" not in text[1:]:
            raise BadRow(f"an answer or text that ends with {found[1]}: remove it, an end token is added")


def earlier_turns(value: Any) -> Messages | None:
    """Messages of a list of turns, given as messages or as pairs of user and assistant texts; None for anything else.

    JSON text, as in CSV, is parsed. Raises: BadRow for a message that cannot be read.
    """
    turns = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(turns, list) or not turns or not all(map(is_turn, turns)):
        return None
    return as_messages(turns)


def is_turn(turn: Any) -> bool:
    """Whether a value is a message, or what its speakers say in one turn."""
    return isinstance(turn, dict) and not turn.keys().isdisjoint(("role", "from", "speaker")) or _said(turn) is not None


def _said(turn: Any) -> Messages | None:
    """Messages of `{"user": "…", "assistant": "…"}`, or of a pair of their texts; None for anything else."""
    if isinstance(turn, list) and len(turn) == 2:
        turn = dict(zip(("user", "assistant"), turn))
    if not isinstance(turn, dict) or not turn or not all(isinstance(text, str) for text in turn.values()):
        return None
    said = [(SPEAKERS.get(str(name).lower()), text) for name, text in turn.items()]
    roles = [role for role, _ in said]
    if None in roles or len(set(roles)) < len(roles):
        return None
    order = ("system", "developer", "user", "assistant", "tool")
    return [{"role": role, "content": text} for role, text in sorted(said, key=lambda part: order.index(str(part[0])))]


def holds_turns(value: Any) -> bool:
    """Whether a column's value is a list of turns, read or refused by `earlier_turns`."""
    try:
        return earlier_turns(value) is not None
    except BadRow:
        return True


def answer(message: dict[str, Any]) -> str | dict[str, Any]:
    """An assistant message as a response: its text if it has nothing else. Raises: BadRow."""
    if message["role"] != "assistant":
        raise BadRow("the response is no assistant message")
    message = dict(message)
    if message.pop("weight", 1) == 0:
        raise BadRow("the response has weight 0")
    return message["content"] if message.keys() == {"role", "content"} else message


def as_dialogue(prompt: str | Messages) -> Messages:
    """A prompt as messages; text is what the user says."""
    return user_message(prompt) if isinstance(prompt, str) else prompt


def user_message(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def truth(value: Any) -> bool:
    """A label as True or False, from a truth value, 0 and 1, or (of CSV) their words. Raises: BadRow."""
    words = {"true": True, "1": True, "false": False, "0": False}
    known = words.get(value.strip().lower()) if isinstance(value, str) else None
    if known is None and isinstance(value, (bool, int, float)) and value in (0, 1):
        known = bool(value)
    if known is None:
        raise BadRow("label is neither true nor false: write these, or rename the column if it is no feedback")
    return known


def side(value: Any, name: str) -> str | Messages:
    if isinstance(value, list) or is_turn(value):
        return as_messages([value] if isinstance(value, dict) else value)
    return text_of(value, name)


def text_of(value: Any, name: str) -> str:
    """Raises: BadRow for what is not text, or is a list written as text (in a CSV cell)."""
    if name == "completion" and type(value) is int:  # an answer such as 4
        return str(value)
    if not isinstance(value, str):
        raise BadRow(f"{name} is a {kind_of(value)}, not a text: write the text itself")
    if name in TEXTS and MESSAGES_AS_TEXT.match(value):
        raise BadRow(f"{name} is a list of messages written as text: use .jsonl, or one column of messages")
    if name == "prompt" and value.startswith('["') and isinstance(parsed(value), list):
        raise BadRow(f"{name} is a list written as text: write the text itself")
    return value


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    names = {bool: "truth value", int: "number", float: "number", str: "text", list: "list", dict: "JSON object"}
    return names.get(type(value), type(value).__name__)


def list_of(value: Any, name: str, of: str = MESSAGE) -> list[Any]:
    """A list, also from JSON text, as CSV and some tools columns have it. Raises: BadRow."""
    if isinstance(value, str):
        value = parsed(value) or _python_list(value)
        if not isinstance(value, list):
            raise BadRow(f"{name} is a text, not a list of {of} or its JSON (json.dumps)")
    lists = list(value.values()) if isinstance(value, dict) else []
    if len(lists) > 1 and all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists):
        return [dict(zip(value, parts)) for parts in zip(*lists)]  # as `datasets` stores a sequence of structs
    if not isinstance(value, list):
        raise BadRow(f"{name} is a {kind_of(value)}, not a list of {of}")
    return value


def _python_list(text: str) -> Any:
    """Parse a list that Python's `str` wrote, as pandas does in a CSV file; None if the text is not one."""
    try:
        return ast.literal_eval(text) if re.match(r"\s*\[\s*\{", text) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def parsed(text: Any) -> Any:
    """Parse a JSON text; None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
