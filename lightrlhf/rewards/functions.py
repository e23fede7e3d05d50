"""Calling reward functions: TRL's and verl's signatures, plain or `async`, for texts or messages.

    f(prompts, completions, **columns) -> one number or None for each        as TRL calls its reward functions
    f(data_source, solution_str, ground_truth, extra_info) -> a number       as verl calls `compute_score`, one response

The second is known by its parameters' names. Either may return `{"score": number, …}` for a number, and may be `async`:
all calls of a batch are then awaited together. None means that a reward does not apply to a response. Anything else is
refused: the values of a dict, the letters of a text or the rows of a table are not scores of responses.

This module loads no torch: a process that only scores starts in a tenth of a second.

Left out: TRL's `trainer_state` and `log_extra`, and what verl's functions return beside their score.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from lightrlhf.cli.errors import first_line
from lightrlhf.cli.functions import parameters_of, scores_one

RewardFunction = Callable[..., Any]
RewardFunctions = RewardFunction | Sequence[RewardFunction]
ANSWERS = ("ground_truth", "answer", "solution")  # columns of right answers, the first that a row has is taken


class Response(NamedTuple):
    """The arguments of a reward function for one response, as plain values that other processes can receive."""

    prompt: Any  # text, or messages
    completion: Any  # text, or a list of one assistant message where the prompt is messages
    ids: list[int] | None  # of the completion
    columns: dict[str, Any]


class Failure(Exception):
    """Why there is no score for a response; kind: timeouts, crashes or errors."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def call_function(function: RewardFunction, responses: Sequence[Response]) -> list[float | None | Failure]:
    """For each response the function's number, None if it returned None, or a Failure with the reason.

    Raises: whatever a function of many responses raises; Failure where it returns anything else than one for each.
    """
    if scores_one(function):
        return [number_of(value) for value in await_results([call_one(function, response) for response in responses])]
    (scores,) = await_results([call_all(function, responses)])
    if isinstance(scores, Exception):
        raise scores
    return [number_of(value) for value in one_of_each(scores, len(responses))]


def one_of_each(returned: Any, count: int) -> list[Any]:
    """The values of a list, a tuple or a one-dimensional tensor or array. Raises: Failure unless there are `count`."""
    values = None
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes | bytearray):
        values = list(returned)
    elif len(getattr(returned, "shape", ())) == 1 and hasattr(returned, "tolist"):
        values = returned.tolist()
    if values is None:
        raise Failure("errors", f"it returned {describe(returned)}, not a list with a number or None for each response")
    if len(values) != count:
        raise Failure("errors", f"it returned {len(values)} scores for {count} completions")
    return values


def call_all(function: RewardFunction, responses: Sequence[Response]) -> Any:
    """One call for all responses; by the names `prompts` and `completions` where the function has the second.

    Raises: Failure for a parameter without a column of the data.
    """
    names = {name for response in responses for name in response.columns} - {"prompts", "completions"}
    given = {name: [response.columns.get(name) for response in responses] for name in names}
    parameters = parameters_of(function) or []
    own = {parameter.name for parameter in parameters}
    if "completion_ids" in own:
        given["completion_ids"] = [response.ids for response in responses]
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    texts_of = {"prompts", "completions"} if "completions" in own else {*needed[:2]}
    if lacking := [name for name in needed if name not in texts_of | given.keys()]:
        columns = ", ".join(sorted(names)) or "none"
        raise Failure("errors", f"it needs {' and '.join(lacking)}, no column of the data; their columns: {columns}")
    texts = [response.prompt for response in responses], [response.completion for response in responses]
    if "completions" in own:  # as TRL does; it may have no `prompts`, or another order
        return function(prompts=texts[0], completions=texts[1], **given)
    return function(*texts, **given)


def call_one(function: RewardFunction, response: Response) -> Any:
    """verl's call for one response, or the exception it raised.

    `ground_truth` is the column of that name, else the one in `reward_model` (verl's own data), `answer` or `solution`;
    `data_source` the column of that name, else `task` or an empty text; `extra_info` that column, else all of them.
    """
    columns = response.columns
    nested = columns.get("reward_model")
    truth = nested.get("ground_truth") if isinstance(nested, dict) else None
    if truth is None:
        truth = next((columns[name] for name in ANSWERS if columns.get(name) is not None), None)
    given = {
        "data_source": columns.get("data_source") or columns.get("task") or "",
        "solution_str": as_text(response.completion),
        "ground_truth": truth,
    }
    parameters = parameters_of(function) or []
    if any(p.name == "extra_info" or p.kind is p.VAR_KEYWORD for p in parameters):
        given["extra_info"] = columns.get("extra_info") or columns
    try:
        return function(**given)
    except Exception as problem:  # whatever a user's function raises
        return problem


def as_text(text: Any) -> str:
    """A prompt or completion as plain text; of messages their contents, separated by empty lines."""
    if isinstance(text, str):
        return text
    contents = (message["content"] for message in text)
    return "\n\n".join(content for content in contents if isinstance(content, str))  # beside calls there may be none


def await_results(results: list[Any]) -> list[Any]:
    """Results with the coroutines among them awaited together; one that raises leaves its exception."""
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if not waiting:
        return results

    async def together() -> list[Any]:
        return await asyncio.gather(*(results[i] for i in waiting), return_exceptions=True)

    for i, result in zip(waiting, run_coroutine(together())):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        results[i] = result
    return results


def run_coroutine(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """The result of a coroutine, also inside a running event loop, such as a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def number_of(value: Any) -> float | None | Failure:
    """The value returned for a response as a number, or a Failure. True is 1 and False is 0; a text is not a number."""
    if isinstance(value, Exception):
        return failure_of(value)
    number = value["score"] if isinstance(value, dict) and "score" in value else value
    if number is None:
        return None
    try:
        if not hasattr(number, "__float__") or len(getattr(number, "shape", ())):
            raise TypeError
        return float(number)
    except Exception:  # a user's value may raise anything
        return Failure("errors", f"it returned {describe(value)} for a response, not a number or None")


def describe(value: Any) -> str:
    """The type of a value, and its beginning, in one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's class may raise anything
        text = ""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} {text[:60]}{'…' if len(text) > 60 else ''}".strip()


def failure_of(problem: BaseException) -> Failure:
    """An exception with where it was raised, in one line."""
    if isinstance(problem, Failure):
        return problem
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure("errors", f"{type(problem).__name__}: {first_line(problem)}{where}")
