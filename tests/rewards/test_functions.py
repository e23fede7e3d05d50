"""Reward functions of all signatures, several of them weighted, and processes that can be killed."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers import ROOT, environment, rewards, rows_of
from helpers.errors import error_naming
from helpers.rollouts import EOS, rollout_of

from lightrlhf.cli import processes
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.fields import check_args
from lightrlhf.cli.functions import check_columns, load_function
from lightrlhf.cli.groups import RewardArgs
from lightrlhf.data.scores import Scores
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.rewards.audit import RewardAudit
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.functions import Response, call_function
from lightrlhf.rewards.loading import load_rewards
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.rewards.scorers import EnvScorer, FunctionScorer
from lightrlhf.rewards.turns import returns_to_go
from lightrlhf.training.ranks import LocalRanks

NAN = math.nan


def samples(*texts, **columns):
    return [Sample("p", text, columns={n: v[i] for n, v in columns.items()}) for i, text in enumerate(texts)]


def scores(function, *texts, **columns):
    return FunctionScorer(function).score(samples(*texts, **columns))


def same(one, other) -> bool:
    return [None if x is None else repr(float(x)) for x in one] == [
        None if x is None else repr(float(x)) for x in other
    ]


def make(reward, **flags) -> Rewards:
    return load_rewards(RewardArgs(**flags), torch.device("cpu"), 8, reward)


def of_texts(rewards_of: Rewards, tokenizer, *texts, columns=()):
    prompts = [encode_prompt(tokenizer, "Guest: tea")] * len(texts)
    answers = [encode_response(tokenizer, text) for text in texts]
    rollout = rollout_of(
        prompts, answers, tokenizer.pad_token_id, columns=list(columns) or [{} for _ in texts], tokenizer=tokenizer
    )
    return rewards_of(rollout)


# ------------------------------------------------------------------------------------------------------- signatures
def test_a_function_may_name_its_parameters_as_trl_does_in_any_order():
    def reward(completions, answer, **kwargs):
        assert kwargs["prompts"] == ["p", "p"]
        return [float(text == right) for text, right in zip(completions, answer)]

    check_columns(reward, "reward")
    assert scores(reward, "a", "b", answer=["a", "a"]) == [1.0, 0.0]


def test_a_function_that_names_completion_ids_gets_them():
    def reward(prompts, completions, completion_ids, **columns):
        return [len(ids) for ids in completion_ids]

    given = [Sample("p", "r", False, [1], [4, 5, 6])]
    assert FunctionScorer(reward).score(given) == [3.0]


def test_a_prompt_of_messages_is_given_as_messages_but_a_dialogue_as_texts():
    seen = []

    def reward(prompts, completions, **columns):
        seen.append((prompts, completions))
        return [1.0]

    user = [{"role": "user", "content": "Hi"}]
    FunctionScorer(reward, takes_messages=True).score([Sample(user, "Hello")])
    FunctionScorer(reward, takes_messages=True).score([Sample(user, "Hello", columns={"messages": user})])
    FunctionScorer(reward).score([Sample(user, "Hello")])  # a judge
    assert seen[0] == ([user], [[{"role": "assistant", "content": "Hello"}]])
    assert seen[1:] == [(["Hi"], ["Hello"])] * 2


def test_verls_function_is_called_for_each_response():
    columns = {"data_source": ["sums"] * 2, "ground_truth": ["12", "12"], "index": [0, 1]}
    assert scores(rewards.digits, "12", "1", **columns) == [1.0, 0.5]
    nested = {"data_source": ["sums"], "reward_model": [{"ground_truth": "9"}], "extra_info": [{"index": 3}]}
    assert scores(rewards.digits, "9", **nested) == [1.0]
    assert load_function("helpers.rewards:digits", "--reward_function") is rewards.digits
    with error_naming(UsageError, "accept"):
        load_function("helpers.rewards:digits", "--user_function", "f(dialogues, seeds, **columns) -> list[str]")


def test_a_function_is_loaded_from_a_file_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "own_reward_of_a_file.py"
    file.write_text("def f(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n")
    found = load_function(f"{file}:f", "--reward_function")
    assert found(["a"], ["b"]) == [1.0] and load_function("own_reward_of_a_file:f", "--reward_function") is found
    monkeypatch.chdir(tmp_path)
    assert load_function(f"{file.name}:f", "--reward_function") is found
    scorer = FunctionScorer(found, f"{file}:f", timeout=60, path=f"{file}:f")  # called in another process
    assert same(scorer.score(samples("x", "y")), [1.0, 1.0])
    Path("json.py").write_text(file.read_text())
    Path("my-reward.py").write_text(file.read_text())
    for path, *facts in [
        (f"{file}:g", "no g", "f"),
        (str(file), f"{file}:function"),
        ("own_reward_of_a_file.f", "own_reward_of_a_file:f"),
        ("missing.py:f", "missing.py"),
        ("json.py:f", "rename"),
        ("my-reward.py:f", "rename"),
    ]:
        with error_naming(UsageError, f"--reward_function {path}", *facts):
            load_function(path, "--reward_function")


def test_one_call_of_many_that_raises_costs_its_response_and_all_that_raise_end_the_run(capsys):
    def reward(data_source, solution_str, ground_truth):
        return {"x": 1.0}[solution_str]

    scorer = FunctionScorer(reward, "m:f")
    with error_naming(RunFailure, "m:f", "KeyError: 'y'", "test_functions.py"):
        scorer.score(samples("y", "z"))
    assert same(scorer.score(samples("x", "y")), [1.0, NAN]) and scorer.failures == {"errors": 1}
    assert "m:f: no score for a response, KeyError: 'y'" in capsys.readouterr().err
    assert same(scorer.score(samples("y")), [NAN])  # it has worked before


def test_an_async_function_is_awaited_also_inside_a_running_loop():
    assert scores(rewards.slow_length, "a", "bcd") == [1.0, 3.0]
    begun = []

    async def one(data_source, solution_str, ground_truth):
        begun.append(solution_str)
        while len(begun) < 2:  # the second call must begin before the first ends
            await asyncio.sleep(0)
        return 1.0

    async def notebook():
        return scores(one, "a", "b")

    assert asyncio.run(asyncio.wait_for(notebook(), 60)) == [1.0, 1.0]


# ---------------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5],
        (True, False),
        range(2),
        np.array([1.0, 0.5], dtype=np.float32),
        torch.tensor([1.0, 0.5], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), np.float32(0.5)],
        [np.True_, Decimal("0.5")],
        [{"score": 1.0, "parts": [1]}, None],
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_a_sequence_of_numbers_is_a_result(returned):
    values = scores(lambda prompts, completions, **columns: returned, "a", "b")
    assert values[0] in (1.0, 0.0) and values[1] in (0.5, 0.0, 1.0, None)
    assert all(value is None or type(value) is float for value in values)


async def pairs_of_numbers():
    yield 1.0


@pytest.mark.parametrize(
    "returned",
    [
        {"a": 1.0, "b": 0.5},
        {1.0, 0.5},
        "10",
        b"10",
        iter([1.0, 0.5]),
        pairs_of_numbers(),
        [[1.0], [0.5]],
        ["1", "0.5"],
        [torch.ones(1), torch.ones(1)],
        torch.ones(2, 1),
        np.ones((2, 2)),
        np.array(["1", "0.5"]),
        [{"scores": 1.0}, {"scores": 0.5}],
        [1.0, 0.5, 0.0],
        1.0,
        None,
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_what_is_no_sequence_of_numbers_ends_the_run_with_the_functions_path(returned):
    scorer = FunctionScorer(lambda prompts, completions, **columns: returned, "package.rewards:mine")
    with error_naming(RunFailure, "package.rewards:mine", "returned"):
        scorer.score(samples("a", "b"))


@pytest.mark.parametrize("returned", ["1", {"score": "1"}, {"acc": 1.0}, [1.0], (1.0, {}), np.ones(1)])
def test_verls_function_returns_a_number_or_none(returned):
    def verl(data_source, solution_str, ground_truth):
        return returned

    with error_naming(RunFailure, "m:f", "returned", "None"):
        FunctionScorer(verl, "m:f").score(samples("a", "b"))


@pytest.mark.parametrize(
    "function",
    [lambda prompts, completions, answer, **columns: [1.0], lambda texts, replies, *, answer, **columns: [1.0]],
)
def test_a_parameter_that_is_no_column_is_named_with_the_columns(function):
    with error_naming(RunFailure, "m:f", "answer", "solution, task"):
        FunctionScorer(function, "m:f").score(samples("c", solution=["4"], task=["sum"]))
    assert scores(function, "c", answer=["4"]) == [1.0]


def test_a_process_refuses_a_text_of_one_digit():
    with error_naming(RunFailure, "helpers.rewards:digit", "str '1'"):
        limited("helpers.rewards:digit", 60.0).score(samples("a"))


def test_a_function_given_from_python_is_named_by_its_path():
    (scorer,) = make(rewards.length).scorers
    assert scorer.name == "helpers.rewards:length"


# ---------------------------------------------------------------------------------------------------------- several
def even(prompts, completions, **columns):
    return [None if len(text) % 2 else 2.0 for text in completions]


def test_rewards_are_summed_by_weight_and_kept_apart(tokenizer):
    found = of_texts(make([rewards.length, even], reward_weights=[1.0, 0.25]), tokenizer, " Sure.", " No.")
    assert found.names == ("length", "even") and found.failures == {"timeouts": 0, "crashes": 0, "errors": 0}
    torch.testing.assert_close(found.parts, torch.tensor([[0.6, 2.0], [0.4, 2.0]]))
    torch.testing.assert_close(found.total, torch.tensor([1.1, 0.9]))


def test_none_leaves_the_others_but_a_failure_or_no_reward_at_all_is_no_score():
    rows = {"none": None, "nan": NAN, "one": 1.0}
    of = lambda *given: Rewards([], ("a",) * len(given), torch.ones(len(given))).total([rows[g] for g in given])
    assert of("none", "one") == 1.0 and of("one", "one") == 2.0
    assert of("none", "none") is None and of("nan", "one") is None
    logged = Rewards([], ("a", "b"), torch.tensor([1.0, 0.0]))
    assert logged.total([3.0, NAN]) == 3.0 and logged.total([None, 1.0]) is None


def test_an_episode_that_failed_is_seen_by_no_scorer_and_not_scored_whatever_the_weights(tokenizer):
    def strict(prompts, completions, episode, **columns):
        assert not any(one["fault"] for one in episode)
        return [2.0] * len(prompts)

    given = SimpleNamespace(audit_function="helpers.rewards:vowels", reward_timeout=0.0)
    scorer, audit = FunctionScorer(strict), RewardAudit(given, LocalRanks())
    audit.scorer = scorer
    of = Rewards([scorer, EnvScorer()], ("strict", "env"), torch.tensor([1.0, 0.0]), audit)
    columns = [{"episode": {"fault": fault, "score": 1.0}} for fault in (None, "errors")]
    found = of_texts(of, tokenizer, " Sure.", " No.", columns=columns)
    expected = {"total": [2.0, NAN], "parts": [[2.0, 1.0], [NAN, NAN]], "audit": [2.0, NAN]}
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), torch.tensor(values), equal_nan=True)


def test_credit_by_turn_has_the_weight_of_the_environment_not_of_a_function_of_its_name(tokenizer):
    columns = [{"episode": {"turns": 2, "rewards": [1.0, 1.0]}}]
    rollout = rollout_of([[5]], [[6]], tokenizer.pad_token_id, columns=columns, tokenizer=tokenizer)
    total, weights = torch.tensor([5.0]), torch.tensor([10.0, 2.0])
    found = Scores(total=total, parts=torch.zeros(1, 2), names=("env", "env_2"), weights=weights)
    assert returns_to_go(rollout, found, total, 2).tolist() == [[5.0, 3.0]]


def test_names_are_unique_and_none_is_that_of_a_count():
    def timeouts(prompts, completions, **columns):
        return [0.0] * len(completions)

    assert make([rewards.length, rewards.length, timeouts]).names == ("length", "length_2", "timeouts_2")


@pytest.mark.parametrize(
    "flags, reward, fact",
    [
        ({}, None, "--reward_function"),
        ({"reward_function": ["a:b"]}, rewards.length, "--reward_function"),
        ({}, [], "reward:"),
        ({"reward_weights": [0.5]}, [], "reward:"),
        ({"reward_function": ["a:b", "c:d"], "reward_weights": [1.0]}, None, "--reward_weights 1.0"),
        ({"rm_experiment_dir": ".", "reward_weights": [1.0]}, rewards.length, "2"),
        ({"reward_weights": [0.0]}, rewards.length, "0"),
        ({}, [rewards.length, 3], "reward"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags, reward, fact):
    with error_naming(UsageError, fact):
        check_args(RewardArgs(**flags), RewardArgs, {"reward": reward})


# --------------------------------------------------------------------------------------- processes that can be killed
def limited(path: str, seconds: float = 1.0) -> FunctionScorer:
    return FunctionScorer(load_function(path, "--reward_function"), path, timeout=seconds, path=path)


def test_a_hung_or_crashing_call_costs_its_own_response(tokenizer, capsys):
    rewards_of = make(None, reward_function=["helpers.rewards:shaky"], reward_timeout=1.0)
    texts = ["fine", "hang", "good", "die", "raise", "none", "nan", "well"]
    found = rewards_of.scorers[0].score(samples(*texts))
    assert same(found, [1.0, NAN, 1.0, NAN, NAN, None, NAN, 1.0])
    assert rewards_of.scorers[0].failures == {"timeouts": 1, "crashes": 1, "errors": 2}
    errors = capsys.readouterr().err
    for message in ("killed after 1 seconds", "its process ended with status 7", "KeyError: 'answer'"):
        assert message in errors
    assert of_texts(rewards_of, tokenizer, " fine", " hang").failures == {"timeouts": 1, "crashes": 0, "errors": 0}


def test_processes_are_used_again_and_end_with_their_scorer():
    scorer = limited("helpers.rewards:length", 60.0)
    assert scorer.score(samples("abc", "d", "ef", "g")) == [0.3, 0.1, 0.2, 0.1]
    first = [worker.process for worker in scorer.workers.workers]
    assert scorer.score(samples("abcd")) == [0.4] and [w.process for w in scorer.workers.workers] == first
    first[0].kill()
    first[0].wait()
    assert scorer.score(samples("ab", "c", "d")) == [0.2, 0.1, 0.1]  # no response is to blame
    now = [worker.process for worker in scorer.workers.workers]
    del scorer
    assert all(process.poll() is not None for process in [*first, *now])


def test_a_function_that_cannot_be_imported_elsewhere_is_refused():
    with error_naming(UsageError, "lambda", "imported"):
        make(lambda *texts, **columns: [1.0], reward_timeout=1.0)
    scorer = FunctionScorer(rewards.length, timeout=9.0, path="helpers.no_rewards:length")
    with error_naming(RunFailure, "helpers.no_rewards:length", "ModuleNotFoundError"):
        scorer.score(samples("a"))
    assert not scorer.workers.workers


HUNG = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.scorers import FunctionScorer
from helpers.rewards import length, shaky
busy = FunctionScorer(length, timeout=600.0, path="helpers.rewards:length")
busy.score([Sample("p", "a")])
hung = FunctionScorer(shaky, timeout=600.0, path="helpers.rewards:shaky")
print("ready", flush=True)
hung.score([Sample("p", "hang")])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_run_that_is_stopped_while_a_call_hangs(how):
    if how is not signal.SIGINT and not sys.platform.startswith("linux"):
        pytest.skip("only Linux ends a hung process with the one that started it")
    command = [sys.executable, "-c", HUNG]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"ready\n"
        assert b"hangs\n" in iter(run.stderr.readline, b"")
        children = psutil.Process(run.pid).children(recursive=True)
        os.kill(run.pid, how)
        run.wait(60)
        _, alive = psutil.wait_procs(children, timeout=30)
    assert len(children) >= 2 and all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


def test_a_function_is_imported_before_its_time_runs(monkeypatch):
    monkeypatch.setattr(processes, "START_LIMIT", 0.0)
    with error_naming(RunFailure, "0 seconds"):
        limited("helpers.rewards:length").score(samples("a"))


def test_a_call_of_no_responses_gives_none():
    assert call_function(rewards.length, []) == [] and limited("helpers.rewards:length").score([]) == []
    assert call_function(rewards.length, [Response("p", "abc", None, {})]) == [0.3]


def test_rows_without_a_score_have_nan(tokenizer):
    found = make(rewards.always_nan)(rollout_of(rows_of(2, 2), [[5, EOS], [6, EOS]], tokenizer=tokenizer))
    assert found.total.isnan().all() and found.parts.isnan().all() and found.failures["errors"] == 2
