"""Plain Python functions as tools, and calling the tools of a turn.

    def add(a: int, b: int) -> str:
        '''Add two numbers.

        Args:
            a: the first one.
            b: the second one.
        '''
        return str(a + b)

Type hints and docstring become the schema that the chat template shows, by transformers' `get_json_schema`. A tool may
be `async`: the calls of a turn are then awaited together. Results stand in the order of the calls.

The policy reads the error of a failed call: an unknown tool, arguments that do not fit, an exception of the tool.
Errors are counted by kind. A long result keeps its head and tail.

Left out: results that are pictures, and schemas for what hints cannot say.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightrlhf.cli.errors import first_line
from lightrlhf.generation.episode_env import Answer, Json, Message

Tool = Callable[..., Any]
LONGEST_RESULT = 100_000  # characters; a limit in tokens is the caller's


class ToolEnv:
    """Functions as an environment: without a reward or an end, and with nothing kept from call to call."""

    gives_reward = False
    is_stateless = True

    def __init__(self, functions: Sequence[Tool]) -> None:
        self.caller = ToolCaller(functions)

    @property
    def tools(self) -> list[Json]:
        return self.caller.schemas()

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        return []

    def step(self, reply: Message) -> Answer:
        return self.caller.answer(reply)

    def finish(self, stop_reason: str) -> float | None:
        return None


class ToolCaller:
    """Calls functions by name; the event loop of the `async` ones is kept from turn to turn, as clients need it."""

    def __init__(self, functions: Sequence[Tool]) -> None:
        self.functions = {function.__name__: function for function in functions}
        self.loop = asyncio.new_event_loop()

    def schemas(self) -> list[Json]:
        """The tools' JSON schemas. Raises: what transformers says of a function without hints or docstring."""
        from transformers.utils import get_json_schema

        return [get_json_schema(function) for function in self.functions.values()]

    def answer(self, reply: Message) -> Answer:
        """The results of a reply's calls; a reply without one ends the episode."""
        calls = reply.get("tool_calls") or []
        if not calls:
            return Answer(done=True, stop_reason="answer")
        counts: Counter[str] = Counter(calls=len(calls))
        results = self.settled([self._begin(call["function"], counts) for call in calls])
        messages = []
        for call, result in zip(calls, results):
            try:
                if isinstance(result, BaseException):
                    raise result
                content = as_content(result)
            except (Exception, asyncio.CancelledError) as problem:  # of a tool, or of its result
                counts.update({getattr(problem, "kind", "tool_errors"): 1, "failed_calls": 1})
                content = error_text(problem)
            messages.append(result_message(call, content))
        return Answer(messages, counts=dict(counts))

    def _begin(self, function: Json, counts: Counter[str]) -> Any:
        """A tool's result, a coroutine of it, or the exception it raised."""
        try:
            tool, arguments = self.functions.get(function["name"]), arguments_of(function)
            if tool is None:
                raise WrongCall(
                    "unknown_tools", f"no tool {function['name'][:60]}; there is {', '.join(self.functions)}"
                )
            check_arguments(tool, arguments)
            return tool(**arguments)
        except Exception as problem:  # whatever a tool raises
            return problem

    def settled(self, values: list[Any]) -> list[Any]:
        """Values with the coroutines among them awaited together; one that raises leaves its exception."""
        waiting = [i for i, value in enumerate(values) if inspect.isawaitable(value)]

        async def together() -> list[Any]:
            return await asyncio.gather(*(values[i] for i in waiting), return_exceptions=True)

        for i, value in zip(waiting, self.loop.run_until_complete(together()) if waiting else []):
            values[i] = value
        return values


class WrongCall(Exception):
    """What the policy did wrong in a call; kind: unknown_tools or wrong_arguments."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def arguments_of(function: Json) -> dict[str, Any]:
    """The arguments of a call, an object or the JSON text of one. Raises: WrongCall."""
    given = function.get("arguments") or {}
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as problem:
        raise WrongCall("wrong_arguments", f"the arguments are not JSON: {first_line(problem)}") from None
    if not isinstance(given, dict):
        raise WrongCall("wrong_arguments", f"the arguments are not an object: {given!r:.60}")
    return given


def check_arguments(tool: Tool, arguments: dict[str, Any]) -> None:
    """Raises: WrongCall where arguments lack or exceed a tool's parameters, or differ from its hints."""
    name = getattr(tool, "__name__", "the tool")
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as problem:
        raise WrongCall("wrong_arguments", f"{name}: {problem}") from None
    hints = get_type_hints(tool)
    for key, value in arguments.items():
        if not fits(value, hints.get(key, Any)):
            expected = getattr(hints[key], "__name__", None) or str(hints[key])
            raise WrongCall("wrong_arguments", f"{name}: {key} must be of type {expected}, not {value!r:.60}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a hint's type; what JSON does not know fits anything."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    kind = {float: (int, float), tuple: list}.get(origin or hint, origin or hint)
    if kind not in ((int, float), int, str, bool, list, dict, NoneType):
        return True
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def error_text(problem: BaseException) -> str:
    """What the policy reads of a call that failed."""
    kind = "" if isinstance(problem, WrongCall) else f"{type(problem).__name__}: "
    return as_content(f"error: {kind}{first_line(problem)}")


def result_message(call: Json, content: str) -> Message:
    """The message of a call's result."""
    shown = {"tool_call_id": call["id"]} if "id" in call else {}
    return {"role": "tool", "name": call["function"]["name"], **shown, "content": content}


def as_content(result: Any) -> str:
    """A tool's result as a text that can be tokenised: JSON of tables and lists, head and tail of a long one.

    Raises: whatever the result's class raises, and json for what is nested too deep.
    """
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if len(text) > LONGEST_RESULT:
        half = LONGEST_RESULT // 2 - 50
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text.encode("utf-8", "replace").decode()  # lone surrogates have no encoding
