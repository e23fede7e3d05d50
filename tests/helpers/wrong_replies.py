"""Invalid replies of a rollout server: a table of them, by name."""

import copy
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

from helpers.servers import reply

DEEP = b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NOT_IDS = (None, 7, "a", [], {}, [None], ["3"], [3.0], [False], [[3]], [-1], [2**31], [10**30], [3, None, 4])
NOT_LOGPROBS = (None, 7, "a", [], {}, [None] * 3, ["-1"] * 3, [True] * 3, [[-1.0]] * 3, [0.5] * 3, [-1.0] * 2)
NOT_LOGPROBS += ([-1.0] * 4, [float("nan")] * 3, [float("inf")] * 3, [float("-inf")] * 3, [-(10**400)] * 3)
ENDS = (None, "abort", "error", "content_filter", "tool_calls", "", 0, True, [], {}, "LENGTH", "stop")
Change = Callable[[Any], Any]


def json_reply(value: object) -> bytes:
    return reply(json.dumps(value).encode(), {"Content-Type": "application/json"})


def changed(change: Change) -> Callable:
    """A step of a script: the right answer, changed."""

    def step(server: object, body: object, right: Any) -> bytes:
        return json_reply(change(copy.deepcopy(right)))

    return step


def of_choice(**values: object) -> Change:
    """A change of the second choice of an answer."""

    def change(answer: Any) -> Any:
        answer["choices"][1].update(values)
        return answer

    return change


def short(value: object) -> str:
    return repr(value)[:30]


def of_vllm() -> dict[str, Callable]:
    """By name a step that answers a request of 3 tokens for at least two rows, wrongly."""
    found: dict[str, Change] = {}
    for value in NOT_IDS:
        ids = (value * 3)[:3] if isinstance(value, list) else value  # as many as log-probabilities
        found[f"token_ids {short(value)}"] = of_choice(token_ids=ids)
    found["token_ids of another vocabulary"] = of_choice(token_ids=[3, 4, 5000])
    found["token_ids too many"] = of_choice(token_ids=[3] * 4, logprobs={"token_logprobs": [-1.0] * 4})
    found["token_ids too few"] = of_choice(token_ids=[3] * 2, logprobs={"token_logprobs": [-1.0] * 2})
    found["token_ids beyond an end token"] = of_choice(token_ids=[3, 1, 4])
    for value in NOT_LOGPROBS:
        found[f"logprobs {short(value)}"] = of_choice(logprobs={"token_logprobs": value})
    for value in (None, [], [-1.0] * 3, {}, {"tokens": ["a"]}):
        found[f"no logprobs, {short(value)}"] = of_choice(logprobs=value)
    for end in ENDS:
        found[f"finish_reason {end!r}"] = of_choice(finish_reason=end)
    for index in (0, 2, 99, -1, "1", 1.0, True, None, [], 10**30):
        found[f"index {short(index)}"] = of_choice(index=index)
    for prompt in ([9, 9], [], None, "a", [[5]]):
        found[f"prompt_token_ids {short(prompt)}"] = of_choice(prompt_token_ids=prompt)
    for value in (None, {}, "a", 3, [None], [[]], [3], [{}]):
        found[f"choices {short(value)}"] = lambda answer, value=value: answer | {"choices": value}
    found["one choice too few"] = lambda answer: answer | {"choices": answer["choices"][:-1]}
    found["one choice too many"] = lambda answer: answer | {"choices": [*answer["choices"], answer["choices"][0]]}
    found["a choice twice"] = lambda answer: answer | {"choices": [answer["choices"][0]] * len(answer["choices"])}
    found["prompts in another order"] = lambda answer: (
        answer | {"choices": [c | {"index": i} for i, c in enumerate(reversed(answer["choices"]))]}
    )
    for model in ("another", None, 3, ["tiny"]):
        found[f"model {model!r}"] = lambda answer, model=model: answer | {"model": model}
    found["error with status 200"] = lambda answer: {"error": {"message": "overloaded"}}
    return {name: changed(change) for name, change in found.items()}


def broken(whole: bytes) -> dict[str, bytes | list]:
    """By name what no server may send in place of a body in JSON, as bytes, or as a list of bytes and pauses."""
    found: dict[str, bytes | list] = {}
    bodies = {
        "html": b"<html><h1>502 Bad Gateway</h1></html>",
        "event stream": b'data: {"choices": []}\n\ndata: [DONE]\n\n',
        "empty": b"",
        "null": b"null",
        "list": b"[1]",
        "number": b"1e999",
        "truncated": whole[:-3],
        "two documents": whole + whole,
        "invalid UTF-8": whole.replace(b"WRONG", b"\xff\xfe"),
        "lone surrogate": b'{"choices": "\\ud800"}',
        "deep": DEEP,
        "huge number": b'{"choices": ' + b"9" * 5000 + b"}",
        "NaN": b'{"choices": NaN}',
        "NUL": b"\x00" * 50,
        "UTF-16": whole.decode().encode("utf-16")[:-1],
        "17 MiB": b'{"choices": "' + b"a" * 17 * 2**20 + b'"}',
    }
    for name, content in bodies.items():
        found[f"body {name}"] = reply(content)
    encodings = {"gzip": b"\x1f\x8b\x08\x00garbage", "deflate": b"garbage", "br": b"\xff\xff\xff"}
    encodings |= {"zstd": b"\x28\xb5\x2f\xfdgarbage", "gzip, gzip": gzip.compress(b"garbage")}
    for name, encoded in encodings.items():
        found[f"broken {name}"] = reply(encoded, {"Content-Encoding": name})
    found["truncated gzip"] = reply(gzip.compress(whole)[:-20], {"Content-Encoding": "gzip"})
    found["truncated deflate"] = reply(zlib.compress(whole)[:-6], {"Content-Encoding": "deflate"})
    found["bomb"] = reply(gzip.compress(b"a" * 2**26), {"Content-Encoding": "gzip"})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    for name, length in {"too large": b"9999", "too small": b"20", "negative": b"-5", "no number": b"abc"}.items():
        found[f"length {name}"] = head + b"Content-Length: " + length + b"\r\n\r\n" + whole
    found["two lengths"] = head + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n" + whole
    found["chunks cut"] = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(whole) + whole
    found["chunk size wrong"] = head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + whole
    found["no status line"] = b"WRONG" * 40
    found["closed at once"] = b""
    found["header without end"] = b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000
    found["drips bytes"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", *([0.1, b" "] * 100)]
    found["drips headers"] = [b"HTTP/1.1 200 OK\r\n", *([0.1, b"X: y\r\n"] * 100)]
    found["100 without end"] = [b"HTTP/1.1 100 Continue\r\n\r\n", 0.1] * 100
    return found


def of_bytes() -> dict[str, bytes | list | Callable]:
    """By name what no server may send."""
    whole = b'{"choices": [], "text": "WRONG"}'
    found: dict[str, bytes | list | Callable] = {**broken(whole)}
    found["body of another type"] = reply(whole, {"Content-Type": "text/html"})
    found["reset in the midst"] = reset
    for code in (201, 202, 204, 206, 402, 405, 406, 408, 409, 410, 415, 418, 425, 429, 451, 500, 502, 503, 504, 599):
        found[f"status {code}"] = reply(whole, status=code)
    for code, place in ((301, "http://127.0.0.1:9/"), (302, "//"), (307, "http://[::bad"), (308, "\xff")):
        found[f"status {code} to {place}"] = reply(whole, {"Location": place}, code)
    for value in ("0", "nan", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Foo 99999 99:99:99", "soon", "", "-inf"):
        found[f"Retry-After {value!r}"] = reply(whole, {"Retry-After": value}, 429 if value else 503)
    for code in (401, 403, 404):
        found[f"status {code}"] = reply(b'{"detail": "no"}', {"Content-Type": "application/json"}, code)
    return found


def wrong_replies() -> dict[str, bytes | list | Callable]:
    """All of them."""
    return {**of_vllm(), **of_bytes()}


def reset(server: Any, body: object, right: object) -> list:
    """Half of an answer, then the end of the connection."""
    content = json.dumps(right).encode()
    return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content), content[: len(content) // 2]]
