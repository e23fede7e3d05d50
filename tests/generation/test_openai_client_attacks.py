"""Servers that misbehave: what no server said to a question is never an answer, and nothing ends in a traceback."""

import json
import time

import pytest
from helpers.servers import RawServer, reply, wait_at_most
from helpers.wrong_replies import DEEP, broken

from lightrlhf.cli.errors import UsageError
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl

NOTHING = [None, 7, 1.5, True, [], ["a"], {}, {"text": "a"}, [{"type": "text", "text": "a"}], "\ud800", "a\udfffb"]
ENDS = [
    None,
    "abort",
    "content_filter",
    "error",
    "tool_calls",
    "function_call",
    "cancelled",
    "",
    0,
    True,
    [],
    {},
    "STOP",
]


def choice(text="WRONG", end="stop", **more):
    return {"message": {"role": "assistant", "content": text}, "text": text, "finish_reason": end, "index": 0} | more


def answers(*choices, **more) -> bytes:
    return reply(json.dumps({"choices": list(choices), **more}).encode())


def cases() -> dict[str, object]:
    """By name what the server does to the first request: bytes, or a list of bytes and pauses."""
    found: dict[str, object] = {}
    whole = json.dumps({"choices": [choice()]}).encode()
    for value in NOTHING:
        found[f"content {value!r}"] = answers(choice(value))
    for end in ENDS:
        found[f"finish_reason {end!r}"] = answers(choice(end=end))
    for choices in (None, [], {}, "a", 3, [None], [[]], ["WRONG"], [3], [{}], [choice()] * 2, [choice()] * 9):
        found[f"choices {str(choices)[:20]} {len(choices) if isinstance(choices, list) else ''}"] = reply(
            json.dumps({"choices": choices}).encode()
        )
    for index in (1, -1, "0", 0.5, [], True):
        found[f"index {index!r}"] = answers(choice(index=index))
    for role in ("user", "system", "tool", 3):
        found[f"role {role}"] = answers(choice(message={"role": role, "content": "WRONG"}, text=None))
    found["refusal"] = answers(choice(message={"content": None, "refusal": "I cannot"}, text=None))
    found["tool calls"] = answers(choice(message={"content": "WRONG", "tool_calls": [{"id": "a"}]}, text=None))
    found["no finish_reason"] = answers({"message": {"content": "WRONG"}, "text": "WRONG"})
    found["of another request"] = answers(choice(), id="cmpl-lightrlhf-0123456789abcdef-00000000")
    found["header of another request"] = reply(whole, {"X-Request-Id": "lightrlhf-0123456789abcdef-00000000"})
    found["error with status 200"] = reply(b'{"error": {"message": "overloaded"}}')
    found |= broken(whole)
    for code in (408, 409, 425, 429, 500, 502, 503, 504, 529, 599):
        found[f"status {code}"] = reply(whole, status=code)
    for value in ("nan", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Foo 99999 99:99:99", "soon", "", "-inf"):
        found[f"Retry-After {value!r}"] = reply(whole, {"Retry-After": value}, status=429)
    return found


# one line ends the program: no retry would change it, and an answer in it is none to this question
ENDING = {code: reply(b'{"choices": [%s]}' % json.dumps(choice()).encode(), {"Location": "http://127.0.0.1:9/"}, code)
          for code in (101, 201, 202, 203, 204, 206, 300, 301, 302, 303, 304, 305, 307, 308, 401, 402, 403, 404, 405,
                       406, 410, 415, 418, 451)}  # fmt: skip


def client(server, **options) -> Servers:
    wait_at_most(1.5, 5.0)
    options = {"max_workers": 2} | options
    return Servers(RemoteArgs(base_url=[server.url], **options), "tiny", first_wait=0.01)


def outcome(server, question: dict) -> str:
    """What became of a question between two others: its answer, or why there is none."""
    with client(server) as servers:
        texts = []
        for one in ({"prompt": "before"}, question, {"prompt": "after"}):
            try:
                (got,) = servers.replies([one])
                texts.append(got.text if got.error is None else f"none: {got.error}")
            except UsageError as problem:
                texts.append(f"line: {problem}")
    wrong = texts[0] != "before!" or texts[2] != "after!" or "\n" in texts[1]
    return f"neighbours {texts}" if wrong else texts[1]


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_no_answer_is_one(case, chat):
    for name, script in cases().items():
        for times in (1, 9):
            if times == 9 and (isinstance(script, list) or "MiB" in name or "Retry" in name):
                continue
            if times == 9 and chat:  # the same code after the first attempts
                continue
            question = {"messages": [{"role": "user", "content": "q"}]} if chat else {"prompt": "q"}
            if not chat and name.startswith(("role", "refusal", "tool calls")):
                continue
            with RawServer({"q": [script] * times}) as server:
                began = time.monotonic()
                seen = outcome(server, question)
            kept = (
                seen == "q!" or seen.startswith("none: not answered") if times == 1 else seen[:5] in ("none:", "line:")
            )
            held = kept and "WRONG" not in seen.split("last with")[0] and time.monotonic() - began < 20
            case(f"{'chat' if chat else 'plain'}, {times} times, {name}", held, seen[:90])


def test_other_statuses_end_with_one_line(case):
    for code, script in ENDING.items():
        with RawServer({"q": [script] * 9}) as server:
            seen = outcome(server, {"prompt": "q"})
        case(f"status {code}", seen.startswith("line:") and "\n" not in seen, seen[:90])
    for code in (400, 413, 422):
        for content in (b'{"error": "\\ud800\\u001b[31m"}', DEEP, b"\xff" * 9999, b"", b"a\nb"):
            with RawServer({"q": [reply(content, status=code)]}) as server:
                seen = outcome(server, {"prompt": "q"})
            held = seen.startswith("none: status") and len(seen) < 400 and seen.isprintable()
            case(f"status {code}, {content[:9]!r}", held, seen[:60])


def test_surplus_answers_shift_nothing(case):
    surplus = answers(choice())
    for name, extra in {
        "answer": surplus,
        "half an answer": surplus[:40],
        "line": b"\r\n\r\n",
        "99": surplus * 99,
    }.items():
        for pause in (0.0, 0.05):
            script = [answers(choice("q!")), pause, extra] if pause else answers(choice("q!")) + extra
            with RawServer({"q": [script]}) as server:
                seen = outcome(server, {"prompt": "q"})
            case(f"surplus {name} after {pause} s", seen == "q!", seen[:60])


def test_another_model_is_told_once(case, capsys):
    with RawServer({q: [answers(choice(f"{q}!"), model="other")] for q in "ab"}) as server, client(server) as servers:
        list(servers.replies([{"prompt": "a"}, {"prompt": "b"}]))
    told = capsys.readouterr().err
    case("another model", told.count("answers as other, asked for tiny") == 1, told.strip())


# --------------------------------------------------------------------------------------------------------- end to end
SICK = {
    "null": answers(choice(None)),
    "abort": answers(choice(end="abort")),
    "two choices": answers(choice(), choice()),
    "deep": reply(DEEP),
    "surrogates": answers(choice("\ud800")),
    "broken gzip": reply(b"\x1f\x8b\x08\x00garbage", {"Content-Encoding": "gzip"}),
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
    "redirect": reply(b"", {"Location": "http://127.0.0.1:9/"}, 302),
}
QUESTIONS = [f"question {n}" for n in range(6)]


def attempt(main, flags) -> str:
    try:
        main([str(flag) for flag in flags])
    except SystemExit as stopped:
        return f"exit {stopped.code}"
    except BaseException as problem:
        return f"traceback {type(problem).__name__}"
    return "done"


@pytest.mark.parametrize("program", ["generate", "annotate", "judge", "users"])
def test_nothing_is_lost_or_wrong_after_the_server_heals(case, program, tmp_path, capsys, monkeypatch):
    from lightrlhf import annotate, generate, judge
    from lightrlhf.cli.errors import RunFailure
    from lightrlhf.generation.dialogues import Dialogue
    from lightrlhf.generation.users import ServedUser

    monkeypatch.setattr(Servers.__init__, "__defaults__", (0.01,))
    for name, script in SICK.items():
        folder = tmp_path / name.replace(" ", "_")
        write_jsonl(folder / "p.jsonl", [{"prompt": text} for text in QUESTIONS])
        sick = {text: [script] * 99 for text in QUESTIONS[2:]}
        wait_at_most(2.0, 600.0)
        remote = ["--max_workers", 2]
        if program == "generate":
            flags = ["--prompts_file", folder / "p.jsonl", "--output_file", folder / "r.jsonl", "--model_name", "tiny"]
            flags += ["--rollout_engine", "openai", *remote]
            wanted = [f"{text}!" for text in QUESTIONS]
            with RawServer(sick) as server:
                first = attempt(generate.main, [*flags, "--base_url", server.url])
                server.script.clear()
                second = attempt(generate.main, [*flags, "--base_url", server.url])
            rows = read_jsonl(folder / "r.jsonl")
            got = [row["responses"][0] for row in rows]
            fits = all(text == want or (text is None and row["errors"]) for text, want, row in zip(got, wanted, rows))
            case(f"generate, {name}", first in ("exit 1", "done") and second == "done" and fits and len(got) == 6,
                 f"{first}, {second}, {sum(map(bool, got))} of 6")  # fmt: skip
        elif program == "annotate":  # what no server said has no reward, and nothing else lacks one
            flags = ["--prompts_file", folder / "p.jsonl", "--output_file", folder / "r.jsonl", "--model_name", "tiny"]
            flags += ["--rollout_engine", "openai", *remote, "--num_generations", 2]
            scored = ["--responses_file", folder / "r.jsonl", "--reward_function", "helpers.rewards:constant"]
            scored += ["--output_file"]
            with RawServer(sick) as server:
                first = attempt(generate.main, [*flags, "--base_url", server.url])
                half = attempt(annotate.main, [*scored, folder / "half.jsonl"])
                num_half = len(read_jsonl(folder / "half.jsonl"))
                server.script.clear()
                second = attempt(generate.main, [*flags, "--base_url", server.url])
            refused = attempt(annotate.main, [*scored, folder / "half.jsonl"])  # rewards of other responses
            whole = attempt(annotate.main, [*scored, folder / "whole.jsonl"])
            rows = read_jsonl(folder / "half.jsonl") + read_jsonl(folder / "whole.jsonl")
            fits = all(text is None or text == f"{row['prompt']}!" for row in rows for text in row["responses"])
            fits &= all([text and 1.0 for text in row["responses"]] == row["rewards"] for row in rows)
            steps = f"{first}, {half}, {second}, {refused}, {whole}"
            held = half == second == whole == "done" and refused == ("done" if num_half == 6 else "exit 2")
            case(f"annotate, {name}", held and fits and len(read_jsonl(folder / "whole.jsonl")) == 6, steps)
        elif program == "judge":
            for side in "ab":
                write_jsonl(folder / f"{side}.jsonl", [{"prompt": t, "response": f"{t} {side}"} for t in QUESTIONS])
            flags = ["--responses_file", folder / "a.jsonl", folder / "b.jsonl", "--judge_model", "tiny", *remote]
            flags += ["--output_file", folder / "v.jsonl"]
            with RawServer({"": [answers(choice("Verdict: A"))] * 4 + [script] * 99}) as server:
                first = attempt(judge.main, [*flags, "--base_url", server.url])
                server.script[""] = [answers(choice("Verdict: A"))] * 999
                server.asked.clear()
                second = attempt(judge.main, [*flags, "--base_url", server.url])
            rows = read_jsonl(folder / "v.jsonl")
            fits = all(
                reply == "Verdict: A" or (reply.startswith("not answered") and row["verdict"] == "malformed")
                for row in rows
                for reply in row["replies"]
            )
            case(f"judge, {name}", first in ("exit 1", "done") and second == "done" and fits and len(rows) == 6,
                 f"{first}, {second}, {[row['verdict'] for row in rows]}")  # fmt: skip
        else:
            dialogues = [Dialogue(n, [{"role": "user", "content": text}], {}) for n, text in enumerate(QUESTIONS)]
            with RawServer({"": [script] * 999}) as server:
                args = RemoteArgs(base_url=[server.url])
                with Servers(args, "tiny") as servers:
                    user = ServedUser(servers, 1.0, 8)
                    try:
                        seen = str(user(dialogues, 0))
                    except RunFailure as problem:
                        seen = f"line: {problem}"
                    server.script[""] = [answers(choice("Question: next?"))] * 999
                    server.asked.clear()
                    healed = user(dialogues, 0) == ["next?"] * 6
            case(f"users, {name}", seen.startswith("line:") and "\n" not in seen and healed, seen[:80])
