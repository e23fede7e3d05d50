"""Judging pairs: verdicts are kept, position bias and malformed replies are counted, intervals are right."""

import contextlib
import io
import json
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer

import pytest
import torch
from helpers import ROOT, environment
from helpers.errors import error_naming, refused
from helpers.processes import GRACE, PATIENCE, started
from helpers.servers import Handler, answering, half_closed, status

from lightrlhf import judge
from lightrlhf.data.tokens import decode
from lightrlhf.maths.ops import wilson_interval
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl


def write(folder, name: str, responses: dict[str, str], **columns) -> str:
    """A file of `generate` with one response a prompt."""
    rows = [
        {"prompt": prompt, "responses": [text, "?"], "response": text, **columns} for prompt, text in responses.items()
    ]
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Ten prompts; A's answers are good on even ones, B's on odd ones, and both on the last two."""
    a = {f"p{i}": "good" if i % 2 == 0 or i > 7 else "bad bad" for i in range(10)}
    b = {f"p{i}": "good too" if i > 7 else "good" if i % 2 else "bad bad" for i in range(9, -1, -1)}  # in another order
    return [write(tmp_path, "one.jsonl", a | {"only": "x"}), write(tmp_path, "two.jsonl", b)]


class JudgeHandler(Handler):
    """A judge that prefers `good` to `bad` and what comes first to its equal; `server.script` may say otherwise."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = request["messages"][0]["content"]
        first, second = (asked.split(f"reply {x}>\n")[1].split("\n<")[0] for x in "AB")
        prompt = asked.split("<conversation>\n")[1].split("\n<")[0]
        with self.server.lock:
            self.server.asked.append((prompt, first, second, len(request["messages"])))
            step = self.server.script.pop((prompt, len(request["messages"])), None)
        if callable(step):
            return step(self)
        better = "A" if ("good" in first) >= ("good" in second) else "B"
        text = step or f"The first says {first}.\n**Verdict: {better}**"
        self.send(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler)
    made.script, made.asked, made.lock = {}, [], threading.Lock()
    with answering(made) as made.url:
        yield made


def run(files, *flags: str) -> tuple[dict, list[dict]]:
    results = judge.main(["--responses_file", *map(str, files), *flags])
    output = flags[flags.index("--output_file") + 1]
    return results, read_jsonl(output)


def remote(server, tmp_path, *flags: str) -> list[str]:
    return ["--base_url", server.url, "--judge_model", "m", "--output_file", str(tmp_path / "out.jsonl"), *flags]


def test_both_orders_are_asked_and_disagreement_is_a_tie(files, server, tmp_path):
    results, records = run(files, *remote(server, tmp_path))
    assert [row["prompt"] for row in records] == [f"p{i}" for i in range(10)]
    assert [row["verdict"] for row in records] == ["A", "B"] * 4 + ["tie", "tie"]
    assert {(p, a, b) for p, a, b, _ in server.asked} >= {("p0", "good", "bad bad"), ("p0", "bad bad", "good")}
    assert (results["win"], results["tie"], results["loss"], results["win_rate"]) == (0.4, 0.2, 0.4, 0.5)
    assert results["orders_disagree"] == 0.2 and results["prefers_first"] == 0.6
    assert results["only_in_a"] == 1 and results["only_in_b"] == 0
    low, high = results["win_rate_interval"]
    assert 0 < low < 0.5 < high < 1
    assert json.loads((tmp_path / "out.json").read_text()) == results
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("judged_by", ["openai", "human"])
def test_identical_texts_are_ties_that_no_judge_is_asked_about(judged_by, server, tmp_path, monkeypatch, capsys):
    """A judge that always prefers the first, and a person who always types 1, award nothing for 20 identical pairs."""
    same = {f"p{i}": f"answer {i}" for i in range(20)}
    padded = {prompt: f" {text}\n" for prompt, text in same.items()}
    one = write(tmp_path, "one.jsonl", same | {"last": "bad"})
    two = write(tmp_path, "two.jsonl", padded | {"last": "good"})
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n" * 21))
    by_person = ["--judge", "human", "--output_file", str(tmp_path / "out.jsonl")]
    results, records = run([one, two], *(remote(server, tmp_path) if judged_by == "openai" else by_person))
    assert [row["verdict"] for row in records[:20]] == ["tie"] * 20
    assert (results["identical"], results["judged"], results["tie"]) == (20, 21, 20 / 21)
    if judged_by == "openai":
        assert {prompt for prompt, *_ in server.asked} == {"last"}
        assert results["orders_disagree"] == 0  # of the pair that was asked about
    else:
        assert "answer" not in capsys.readouterr().out.split("A:")[0]


def test_malformed_replies_are_asked_again_then_counted(files, server, tmp_path, monkeypatch):
    """p0 comes right at the second try, p1 never; busy and broken servers are the client's to mend."""
    monkeypatch.setattr("lightrlhf.judge.MAX_MALFORMED", 2)
    server.script = {("p0", 1): "Both have merits.", ("p1", 1): "Hm.", ("p1", 3): "Well.", ("p3", 1): half_closed}
    server.script |= {("p2", 1): status(429, Retry_After="0.01"), ("p4", 1): status(400)}
    flags = remote(server, tmp_path, "--max_workers", "1")
    results, records = run(files, *flags)
    assert [row["verdict"] for row in records[:5]] == ["A", "malformed", "A", "B", "malformed"]
    assert results["malformed"] == 2 and results["judged"] == 8
    assert records[1]["replies"][0] == "Well." and records[4]["replies"][0].startswith("status 400")
    assert sorted(n for p, _, _, n in server.asked if p == "p1") == [1, 1, 3]  # both orders, one with a reminder


@pytest.mark.slow
def test_an_interrupted_run_resumes(files, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    flags = remote(server, tmp_path)
    _, complete = run(files, *flags)
    output = tmp_path / "out.jsonl"
    text = output.read_text()
    lines = text.splitlines(keepends=True)
    output.write_text("".join(lines[:4]) + lines[4][:20])
    asked = len(server.asked)
    results, records = run(files, *flags)
    assert records == complete and output.read_text() == text and results["judged"] == 10
    assert len(server.asked) == asked + 2 * 6
    written = "".join(path.read_text(errors="replace") for path in tmp_path.iterdir())
    assert "secret" not in written + capsys.readouterr().out
    assert "task was dialogue, now webgpt" in refused(
        capsys, judge.main, "--responses_file", *files, *flags, "--task", "webgpt"
    )


@pytest.mark.parametrize(
    "reply, verdict",
    [
        ("Verdict: A", "A"),
        ("I first thought verdict: A.\nVerdict: **B**", "B"),
        ("verdict - Tie", "tie"),
        ("The verdict: a tie.", "tie"),
        ("Verdict: a close call, with a slight edge to B", None),
        ("Verdict: A and B are equal", None),
        ("Verdict: A/B", None),
        (" b. ", "B"),
        ("A is better", None),
        ("Verdict: Apples", None),
        ("", None),
    ],
)
def test_verdicts_are_read_and_not_guessed(reply, verdict):
    assert judge.read_verdict(reply) == verdict


def test_verdicts_are_not_written_where_results_go(tmp_path):
    files = [write(tmp_path, f"{name}.jsonl", {"p": name}) for name in "ab"]
    with error_naming(ValueError, f"--output_file {tmp_path / 'out.json'}", ".jsonl"):
        judge.JudgeArgs(judge="helpers.rewards:shorter", responses_file=files, output_file=f"{tmp_path}/out.json")


def test_each_task_asks_for_its_criteria():
    pair = {"prompt": "P!", "a": "first!", "b": "second!"}
    for task, words in (("summarization", "fluency"), ("dialogue", "helpful"), ("webgpt", "usefulness")):
        asked = judge.question(task, pair, False)
        assert words in asked and asked.index("first!") < asked.index("second!")
        swapped = judge.question(task, pair, True)
        assert swapped.index("second!") < swapped.index("first!") and "P!" in swapped


# ---------------------------------------------------------------------------------------------------- other judges
def test_a_function_judges_by_its_scores(tmp_path):
    files = [write(tmp_path, f"{name}.jsonl", {f"p{i}": name * (i + 1) for i in range(5)}, extra="e") for name in "ab"]
    longer = write(tmp_path, "c.jsonl", {f"p{i}": "c" * (i + 2) for i in range(5)})
    flags = ["--judge", "helpers.rewards:shorter", "--output_file", str(tmp_path / "out.jsonl")]
    results, records = run([files[0], longer], *flags)
    assert [row["verdict"] for row in records] == ["A", "A", "A", "malformed", "A"]
    assert records[0]["score_a"] == -1 and records[0]["score_b"] == -2
    assert results["win"] == 1 and results["win_rate_interval"] == pytest.approx([0.5101, 1], abs=1e-4)
    assert "orders_disagree" not in results


def test_a_reward_model_judges_as_it_scores(tmp_path, rm_dir, tokenizer):
    answers = ["Certainly, a muffin.", "Ugh, a bagel. Next!", "What now?"]
    one = write(tmp_path, "one.jsonl", {f"Guest: {i}\nBarista:": answers[i] for i in range(3)})
    two = write(tmp_path, "two.jsonl", {f"Guest: {i}\nBarista:": answers[2 - i] for i in range(3)})
    flags = ["--judge", "reward", "--rm_experiment_dir", rm_dir, "--accelerator", "cpu"]
    _, records = run([one, two], *flags, "--output_file", str(tmp_path / "out.jsonl"))
    scorer = load_scorer(rm_dir, torch.device("cpu"), 4, "--rm_experiment_dir")
    for row in records:
        (expected,) = scorer([[Sample(row["prompt"], row["a"]), Sample(row["prompt"], row["b"])]])
        assert [row["score_a"], row["score_b"]] == pytest.approx(expected, abs=1e-5)
        assert row["verdict"] == ("tie" if row["a"] == row["b"] else "AB"[expected[1] > expected[0]])


@pytest.mark.parametrize("has_response_ids", [True, False])
def test_a_reward_model_reads_the_ids_of_rows_that_have_them(has_response_ids, tmp_path, rm_dir, tokenizer):
    """Their text has lost the control tokens of the prompt."""
    prompt = [tokenizer.eos_token_id, *tokenizer("Guest: Hi\nBarista:", add_special_tokens=False)["input_ids"]]
    texts = [" Certainly, a muffin.", " What now?"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    files = []
    for name, own, text in zip(("one.jsonl", "two.jsonl"), ids, texts):
        own_ids = {"response_ids": [own]} if has_response_ids else {}
        row = {"prompt": decode(tokenizer, prompt), "prompt_ids": prompt, "responses": [text], **own_ids}
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        files.append(str(tmp_path / name))
    flags = ["--judge", "reward", "--rm_experiment_dir", rm_dir, "--accelerator", "cpu"]
    _, (record,) = run(files, *flags, "--output_file", str(tmp_path / "out.jsonl"))
    scorer = load_scorer(rm_dir, torch.device("cpu"), 4, "--rm_experiment_dir")
    known = [Sample("", text, False, prompt, own, {}, scorer.encoding.tokenizer) for text, own in zip(texts, ids)]
    (expected,) = scorer([known])
    assert [record["score_a"], record["score_b"]] == pytest.approx(expected, abs=1e-5)
    assert "samples" not in record


def test_a_person_judges_blind_stops_and_resumes(files, tmp_path, monkeypatch, capsys):
    flags = ["--judge", "human", "--output_file", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr("sys.stdin", io.StringIO("1\nx\n2\n3\nq\n"))
    results, records = run(files, *flags)
    shown = capsys.readouterr().out
    assert "one.jsonl" not in shown.split("A:")[0] and shown.count("p0") == 1
    assert results["judged"] == 3 and results["left"] == 7
    expected = [records[0]["shown_first"], {"A": "B", "B": "A"}[records[1]["shown_first"]], "tie"]
    assert [row["verdict"] for row in records] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n" * 2 + "1\n" * 5))
    results, records = run(files, *flags)
    assert "p0" not in capsys.readouterr().out.split("A:")[0]
    assert results["skipped"] == 2 and results["judged"] == 8 and results["left"] == 0
    assert len({row["shown_first"] for row in records}) == 2  # the order is drawn


# A shell starts what it puts in the background with interrupts ignored, which is inherited: a terminal's are not.
AT_A_TERMINAL = """
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


@pytest.mark.slow
def test_a_person_judges_at_a_terminal(files, tmp_path):
    """Key by key at a pseudo-terminal; Ctrl-C, which a terminal turns into an interrupt, loses nothing.

    Python delivers an interrupt that arrives between the prompt and the read of its answer only after that read, so the
    key is sent again until the program ends.
    """
    out = tmp_path / "out.jsonl"
    program = [sys.executable, "-m", "lightrlhf.judge", "--responses_file", *files, "--judge", "human"]
    for keys, judged in ((["1\n", "2\n", "\x03"], 2), (["3\n"] * 8, 10)):
        with started(
            [sys.executable, "-c", AT_A_TERMINAL, *program, "--output_file", str(out)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        ) as process:
            for key in keys:
                shown = b""
                while not shown.endswith(b"/ q: "):
                    letter = process.stdout.read(1)
                    assert letter, shown
                    shown += letter
                process.stdin.write(key.encode())
            while keys[-1] == "\x03":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                    break
                with contextlib.suppress(BrokenPipeError):  # it has just ended
                    process.stdin.write(b"\x03")
            rest, _ = process.communicate(timeout=PATIENCE)
        assert len(read_jsonl(out)) == judged, rest
        assert process.returncode == (130 if keys[-1] == "\x03" else 0), rest
    assert b"win rate" in rest


@pytest.mark.slow
def test_transformers_serve_as_a_judge(transformers_serve, files, tmp_path):
    url, model = transformers_serve
    first = tmp_path / "first.jsonl"
    write_jsonl(first, read_jsonl(files[0])[:2])
    files = [first, files[1]]
    flags = ["--base_url", url, "--judge_model", model, "--max_new_tokens", "4"]
    results, records = run(files, *flags, "--output_file", str(tmp_path / "out.jsonl"))
    assert len(records) == 2 and all(all(row["replies"]) for row in records)  # a random model has no verdict to give
    assert results["judged"] + results["malformed"] == 2


# ------------------------------------------------------------------------------------------------------- statistics
def verdicts(text: str, prompts: str | None = None) -> list[dict]:
    """Records of verdicts A, B and = (a tie), on prompts named by letters, each its own by default."""
    names = prompts or [str(i) for i in range(len(text))]
    return [{"verdict": {"=": "tie"}.get(v, v), "prompt": p, "a": "x", "b": "y"} for v, p in zip(text, names)]


def test_few_equal_verdicts_are_not_certain():
    results = judge.summary(verdicts("AAA"), seed=0)
    for name, interval in (
        ("win", (0.4385, 1)),
        ("tie", (0, 0.5615)),
        ("loss", (0, 0.5615)),
        ("win_rate", (0.4385, 1)),
    ):
        assert results[f"{name}_interval"] == pytest.approx(interval, abs=1e-4)
    low, high = results["length_controlled_win_rate_interval"]
    assert low < 0.5 and high > 0.99
    low, high = judge.summary(verdicts("==="), seed=0)["win_rate_interval"]
    assert low < 0.2 and high > 0.8


def test_intervals_are_wilsons_of_the_pairs_ties_half():
    results = judge.summary(verdicts("A" * 50 + "B" * 30 + "=" * 20), seed=0)
    assert results["win_rate_interval"] == pytest.approx(wilson_interval(60, 100))
    assert results["tie_interval"] == pytest.approx(wilson_interval(20, 100))


def test_verdicts_on_one_prompt_are_not_as_many_observations():
    once = judge.summary(verdicts("AABAB"), seed=0)["win_rate_interval"]
    thrice = judge.summary(verdicts("AABAB" * 3, "abcde" * 3), seed=0)["win_rate_interval"]
    assert thrice == pytest.approx(once)


def test_the_verdict_may_be_read_at_any_time():
    few, many = (judge.summary(verdicts("A" * n), seed=0) for n in (5, 30))
    assert few["e_value_a"] == pytest.approx(1.5**4 / 2) and "no verdict" in judge.verdict_so_far(few)
    assert many["e_value_b"] == 0.5 and judge.verdict_so_far(many).startswith("A is better: its e-value is 6.39e+04")
    lost = judge.summary(verdicts("B" * 30 + "A" * 40), seed=0)
    assert judge.verdict_so_far(lost).startswith("B is better")  # which was decided when A began to win
    once = judge.summary(verdicts("AABAB"), seed=0)
    again = judge.summary(verdicts("AABABBBBB", "abcdeabce"), seed=0)  # further pairs change nothing that was seen
    assert [again[f"e_value_{side}"] for side in "ab"] == [once[f"e_value_{side}"] for side in "ab"]


@pytest.mark.parametrize("judged_by", ["helpers.rewards:thousands"])
def test_only_equal_scores_or_equal_texts_tie(tmp_path, judged_by):
    one = write(tmp_path, "one.jsonl", {"p0": "1000.009", "p1": "1000.000", "p2": "7", "p3": "inf"})
    two = write(tmp_path, "two.jsonl", {"p0": "1000.000", "p1": "1000.0000", "p2": "7", "p3": "1"})
    _, records = run([one, two], "--judge", judged_by, "--output_file", str(tmp_path / "out.jsonl"))
    assert [row["verdict"] for row in records] == ["A", "tie", "tie", "malformed"]


# -------------------------------------------------------------------------------------------------------- the sample
def test_samples_are_seeded_spread_and_of_the_same_prompts(tmp_path):
    rows = [{"prompt": f"p{i}", "response": "r", "subreddit": "big" if i < 80 else f"s{i}"} for i in range(100)]
    files = []
    for name, order in (("one", rows), ("two", rows[::-1])):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in order))
    flags = ["--responses_file", *map(str, files), "--sample", "20", "--max_per_subreddit", "5"]
    written = judge.main(flags)
    assert written == [str(tmp_path / f"{name}-sampled.jsonl") for name in ("one", "two")]
    one, two = map(read_jsonl, written)
    assert one == two and len(one) == 20
    assert sum(row["subreddit"] == "big" for row in one) == 5
    judge.main([*flags, "--seed", "1"])
    assert read_jsonl(written[0]) != one


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--judge", "openai"], "--judge openai needs --base_url"),
        (["--judge", "reward"], "--judge reward needs --rm_experiment_dir"),
        (["--judge", "gpt"], "--judge gpt"),
        (["--judge", "nowhere:f"], "--judge nowhere:f cannot be imported"),
        (["--sample", "5", "--max_per_subreddit", "5"], "has no column subreddit"),
        (["--judge", "human", "--mini_batch_size", "2"], "--rollout_mini_batch_size"),
        (["--responses_file", "nowhere.jsonl"], "--responses_file nowhere.jsonl does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_calls_are_one_line(flags, line, files, capsys):
    given = flags if "--responses_file" in flags else ["--responses_file", *files, *flags]
    assert line in refused(capsys, judge.main, *given)


def test_a_prompt_that_comes_twice_is_matched_in_order(tmp_path):
    rows = {"one": ["a1", "a2", "a3"], "two": ["b1", "b2"]}
    for name, texts in rows.items():
        lines = [json.dumps({"prompt": "p", "response": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    args = judge.JudgeArgs(responses_file=[str(tmp_path / f"{name}.jsonl") for name in rows], judge="human")
    pairs, unmatched = judge.match_rows(args.responses_file)
    assert [(pair["a"], pair["b"]) for pair in pairs] == [("a1", "b1"), ("a2", "b2")]
    assert unmatched == {"only_in_a": 1, "only_in_b": 0}


def test_files_without_a_common_prompt_are_refused(tmp_path, capsys):
    one, two = write(tmp_path, "one.jsonl", {"a": "x"}), write(tmp_path, "two.jsonl", {"b": "x"})
    assert "have no prompt in common" in refused(capsys, judge.main, "--responses_file", one, two, "--judge", "human")
