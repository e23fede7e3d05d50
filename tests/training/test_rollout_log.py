"""`rollouts.jsonl`: rows of every RL program that agree with the rollout, the same ones when a run is resumed."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import last_checkpoint, metrics, rows_of
from helpers.programs import main_of
from helpers.rollouts import rollout_of, scores_of
from helpers.tiny_runs import ITERATED, SAMPLING

from lightrlhf.cli.groups import TrainArgs
from lightrlhf.data.scores import Scores
from lightrlhf.data.tokens import decode
from lightrlhf.generation.dialogues import Dialogue
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.online_refuel import log_sides
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training import rollout_log
from lightrlhf.training.ranks import LocalRanks
from lightrlhf.training.rollout_log import (
    append_rollouts,
    log_rollouts,
    log_samples,
    rollout_row,
    round_number,
    write_iteration,
)
from lightrlhf.training.run import Run

ROW = {
    "step", "version", "prompt", "group", "response", "prompt_ids", "response_ids", "mask", "log_ratio", "advantages",
    "values", "score", "rewards", "audit", "truncated", "columns",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(runs):
    """The experiment dir of a run of each program, made once."""
    made: dict[str, Path] = {}

    def make(program: str) -> Path:
        if program not in made:
            flags = runs.flags(program, runs.folder / program, "--keep_last", 0, steps=4)
            made[program] = Path(main_of(program)(flags))
        return made[program]

    return make


@pytest.mark.parametrize("program", SAMPLING)
def test_rows_of_every_step_whose_arrays_fit_the_response(program, finished):
    rows = read_jsonl(finished(program) / "rollouts.jsonl")
    tokenizer = load_tokenizer(None, str(last_checkpoint(finished(program))))
    steps = sorted({row["step"] for row in rows})
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
    for row in rows:
        assert row.keys() == ROW
        assert row["version"] == row["step"] - 1
        assert decode(tokenizer, row["prompt_ids"]) == row["prompt"]
        assert decode(tokenizer, row["response_ids"]) == row["response"] and row["response_ids"]
        assert len(row["mask"]) == len(row["response_ids"]) and set(row["mask"]) <= {0, 1} and any(row["mask"])
        for name in ("log_ratio", "advantages", "values"):
            assert row[name] is None or len(row[name]) == len(row["mask"])
        assert isinstance(row["score"], int | float)
    groups = [row["group"] for row in rows if row["step"] == 1]
    assert groups == sorted(groups) and groups[0] == 0


def test_ppo_logs_what_it_learned_from(finished):
    rows = read_jsonl(finished("ppo") / "rollouts.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(step, i) for step in range(1, 5) for i in range(4)]
    for number, logged in enumerate(metrics(finished("ppo")), start=1):
        kept = [row for row in rows if row["step"] == number]  # all four of the step
        assert logged["objective/score"] == pytest.approx(sum(row["score"] for row in kept) / 4, rel=1e-4)
        assert logged["objective/kl"] == pytest.approx(sum(sum(row["log_ratio"]) for row in kept) / 4, abs=1e-4)
        assert logged["completions/truncated_ratio"] == sum(row["truncated"] for row in kept) / 4
        advantages = [value for row in kept for value in row["advantages"]]
        assert sum(advantages) == pytest.approx(0, abs=1e-2) and max(advantages) > 0.1  # whitened
        assert all(value != 0 for row in kept for value in row["values"])
    assert any(value for row in rows if row["step"] > 1 for value in row["log_ratio"])


def test_grpo_logs_whole_groups_with_their_rewards_by_name(finished):
    rows = read_jsonl(finished("grpo") / "rollouts.jsonl")
    for step in range(1, 5):
        kept = [row for row in rows if row["step"] == step]  # all six of the step, after groups were replaced
        assert sorted(row["group"] for row in kept) == [0, 0, 1, 1, 2, 2]
        for one, two in zip(kept[::2], kept[1::2]):
            assert one["prompt_ids"] == two["prompt_ids"] and one["group"] == two["group"]
            assert (one["advantages"][0] - two["advantages"][0]) * (one["score"] - two["score"]) >= 0
        assert all(row["rewards"] == {"whole_vowels": row["score"]} and row["values"] is None for row in kept)
    assert any(any(row["log_ratio"]) for row in rows if row["step"] > 1)
    wasted = [row["sampling/wasted_tokens"] for row in metrics(finished("grpo"))]
    assert any(wasted)


def test_without_a_reference_there_is_no_log_ratio(runs, tmp_path):
    flags = runs.flags("grpo", tmp_path, "--init_kl_coeff", 0, steps=1)
    rows = read_jsonl(Path(main_of("grpo")(flags)) / "rollouts.jsonl")
    assert rows and all(row["log_ratio"] is None and row["advantages"] for row in rows)


def test_reflect_rl_logs_whole_episodes_with_what_was_observed_as_mask_0(finished):
    rows = read_jsonl(finished("reflect_rl") / "rollouts.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(n, i) for n in range(1, 5) for i in (0, 0, 1, 1)]
    tokenizer = load_tokenizer(None, str(last_checkpoint(finished("reflect_rl"))))
    for row in rows:
        seen = [row["prompt_ids"]]  # the prompts of the episode's decisions
        for token, sampled in zip(row["response_ids"], row["mask"]):
            seen += [[]] if sampled else []
            seen[-1] += [] if sampled else [token]
        assert seen.pop() == [] and len(seen) == sum(row["mask"])  # an action of one token after each prompt
        assert all(decode(tokenizer, prompt).endswith("# Action : \n") for prompt in seen)
        advantages = {value for value, sampled in zip(row["advantages"], row["mask"]) if sampled}
        assert len(advantages) == 1  # of the episode, within its group
        assert not any(value for value, sampled in zip(row["advantages"], row["mask"]) if not sampled)
    for one, two in zip(rows[::2], rows[1::2]):
        assert one["prompt_ids"] == two["prompt_ids"]
        gap = (one["advantages"][0] - two["advantages"][0]) * (one["score"] - two["score"])
        assert gap > 0 or (one["score"] == two["score"] and one["advantages"][0] == two["advantages"][0] == 0)
    assert any(row["advantages"][0] for row in rows) and any(sum(row["mask"]) > 1 for row in rows)


@pytest.mark.parametrize("program", ["online_refuel", "iterative_refuel"])
def test_dialogues_are_logged_from_the_trained_turn_on_with_the_users_words_as_mask_0(program, finished):
    rows = read_jsonl(finished(program) / "rollouts.jsonl")
    tokenizer = load_tokenizer(None, str(last_checkpoint(finished(program))))
    assert [row["group"] for row in rows if row["step"] == 1] == [0, 0, 1, 1, 2, 2, 3, 3]
    longer = 0
    for row in rows:
        ids = [token if sampled else -1 for token, sampled in zip(row["response_ids"], row["mask"])]
        shown = decode(tokenizer, [token for token, one in zip(row["response_ids"], ids) if one < 0])
        assert row["mask"][0] == row["mask"][-1] == 1 and shown.count("Guest:") == shown.count("Barista:")
        longer += "Guest:" in shown
    assert longer
    for one, two in zip(rows[::2], rows[1::2]):
        assert one["prompt_ids"] == two["prompt_ids"] and one["response_ids"] != two["response_ids"]
    if program == "online_refuel":
        for number, logged in enumerate(metrics(finished(program)), start=1):  # all four pairs of a step
            kl = sum(sum(row["log_ratio"]) for row in rows if row["step"] == number) / 8
            assert logged["objective/kl"] == pytest.approx(kl, rel=1e-3, abs=1e-4)
        assert any(any(row["log_ratio"]) for row in rows if row["step"] == 4)
    else:
        files = [read_jsonl(finished(program) / "iteration-01" / f"{name}.jsonl") for name in ("dialogues", "rewards")]
        for i, dialogue, rewards in zip(range(4), *files):
            for row, side in zip(rows[2 * i : 2 * i + 2], ("first", "second")):
                assert row["score"] == pytest.approx(rewards[side][dialogue["horizon"]], rel=1e-4)
                assert row["prompt_ids"] + row["response_ids"] == dialogue[side]["input_ids"]


def test_online_dpo_logs_the_responses_to_the_first_prompts(finished):
    rows = read_jsonl(finished("online_dpo") / "rollouts.jsonl")
    for step in (1, 2):
        kept = [row for row in rows if row["step"] == step]
        scored = read_jsonl(finished("online_dpo") / f"iteration-0{step}" / "rewards.jsonl")
        assert [row["response"] for row in kept] == [text for row in scored[:4] for text in row["responses"]]
        assert [row["score"] for row in kept] == pytest.approx([r for row in scored[:4] for r in row["rewards"]])
        assert [row["group"] for row in kept] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_rows(finished, runs, tmp_path):
    folder = shutil.copytree(finished("ppo"), tmp_path / "run")
    expected = (folder / "rollouts.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoint-000004")
    with (folder / "rollouts.jsonl").open("ab") as file:
        file.write('{"step": 2, "response": "☕'.encode()[:-1])
    main_of("ppo")(["--resume_from", str(folder)])
    assert (folder / "rollouts.jsonl").read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize("program", SAMPLING)
def test_0_writes_none(program, runs, tmp_path):
    folder = main_of(program)(runs.flags(program, tmp_path, "--log_rollouts", 0, steps=1))
    assert not (Path(folder) / "rollouts.jsonl").exists() and (Path(folder) / "metrics.jsonl").exists()


def test_the_first_step_and_every_log_interval_th_are_logged(runs, tmp_path):
    flags = runs.flags("ppo", tmp_path, "--log_interval", 3, "--log_rollouts", 3, "--save_interval", 9)
    rows = read_jsonl(Path(main_of("ppo")(flags)) / "rollouts.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(step, i) for step in (1, 3, 6) for i in range(3)]


# ---------------------------------------------------------------------------------------------------------- the writer
def run_of(folder: Path, **changes) -> SimpleNamespace:
    """What the writer needs of a run at its first step."""
    args = SimpleNamespace(**({"log_rollouts": 8, "log_interval": 1} | changes))
    files = SimpleNamespace(directory=folder, writing=nullcontext)
    log = SimpleNamespace(time_writing=nullcontext, log_texts=lambda name, rows, step: None)
    parts = {"ranks": LocalRanks(), "files": files, "metric_log": log, "phase": nullcontext, "print0": print}
    return SimpleNamespace(args=args, step=0, dry=None, **parts)


def test_a_row_has_the_numbers_of_its_own_tokens(tokenizer, tmp_path):
    prompts, responses = rows_of(3, 9), rows_of(6, 2)  # as wide rows, so that padding differs
    rollout = rollout_of(prompts, responses, truncated=[True, False], columns=[{"answer": 7}, {}], tokenizer=tokenizer)
    rollout.action_mask[0, 4] = False  # the third token of the first response was an environment's
    width = rollout.action_mask.shape
    advantages, values = torch.arange(width.numel()).reshape(width).float(), torch.randn(width)
    total, reward = torch.tensor([0.123456789, math.nan]), torch.tensor([math.nan, 2.0])
    weights = torch.ones(1, dtype=torch.float64)
    scores = Scores(total=total, parts=reward[:, None], names=("exact",), weights=weights, audit=reward + 1)
    log_rollouts(run_of(tmp_path), rollout, scores, advantages, values)
    one, two = read_jsonl(tmp_path / "rollouts.jsonl")
    assert (one["prompt_ids"], one["response_ids"]) == (prompts[0], responses[0])
    assert (two["prompt_ids"], two["response_ids"]) == (prompts[1], responses[1])
    assert one["mask"] == [1, 1, 0, 1, 1, 1] and two["mask"] == [1, 1]
    assert one["advantages"] == [2, 3, 4, 5, 6, 7]  # position t predicts token t+1
    assert two["advantages"] == [width[1] + 8, width[1] + 9]
    ratio = (rollout.logprobs - rollout.ref_logprobs)[1, 8:10]
    assert two["log_ratio"] == pytest.approx(ratio.tolist(), rel=1e-4)
    assert one["values"] == pytest.approx(values[0, 2:8].tolist(), rel=1e-4)
    assert (one["score"], two["score"]) == (0.12346, None)
    assert (one["rewards"], two["rewards"]) == ({"exact": None}, {"exact": 2})
    assert (one["audit"], two["audit"]) == (None, 3)
    assert (one["truncated"], two["truncated"]) == (True, False)
    assert (one["columns"], two["columns"]) == ({"answer": 7}, {})


def test_the_first_samples_of_the_first_rank_alone_are_kept(tokenizer, tmp_path):
    rollout = rollout_of(rows_of(*[3] * 6), rows_of(*[2] * 6), tokenizer=tokenizer)
    for run in (run_of(tmp_path, log_rollouts=4), run_of(tmp_path)):
        run.ranks.is_first = run.args.log_rollouts == 4
        log_rollouts(run, rollout, scores_of([0.0] * 6), torch.zeros(rollout.action_mask.shape))
    assert [row["response_ids"] for row in read_jsonl(tmp_path / "rollouts.jsonl")] == rows_of(*[2] * 6)[:4]


def test_both_sides_of_a_dialogue_have_their_own_score_and_log_ratio(tokenizer, tmp_path):
    sides = [[Dialogue(i, [], [5, 6, 7 + i, 9 + side], [(2, 4)], [False]) for i in range(2)] for side in range(2)]
    ratios = torch.arange(12).reshape(2, 2, 3).float()  # (2, B, T-1)
    log_sides(run_of(tmp_path), tokenizer, [0, 0], sides, [1.0, 2.0, 3.0, None], ratios)
    rows = read_jsonl(tmp_path / "rollouts.jsonl")
    assert [row["response_ids"] for row in rows] == [[7, 9], [7, 10], [8, 9], [8, 10]]
    assert [row["score"] for row in rows] == [1, 3, 2, None]
    assert [row["log_ratio"] for row in rows] == [[1, 2], [7, 8], [4, 5], [10, 11]]


def test_columns_that_are_long_or_no_json_are_left_out(tokenizer):
    columns = {"answer": "42", "tests": [1, 2], "long": "x" * 501, "ids": torch.zeros(2), "nan": math.nan}
    columns |= {"half": "\ud800", "none": None}
    row = rollout_row(tokenizer, [3], [4], group=0, score=1.0, columns=columns)
    assert row["columns"] == {"answer": "42", "tests": [1, 2], "none": None}


@pytest.mark.parametrize(
    "value, kept",
    [(1.0, "1"), (-0.0, "0"), (1 / 3, "0.33333"), (-123456.7, "-123460"), (1.234567e-9, "1.2346e-09")]
    + [(value, "null") for value in (None, math.nan, math.inf, -math.inf)],
)
def test_numbers_have_five_digits_and_are_json(value, kept):
    assert json.dumps(round_number(value)) == kept


def test_an_iteration_that_is_written_again_replaces_its_rows(tokenizer, tmp_path):
    row = rollout_row(tokenizer, [3], [4], group=0, score=1.0)
    for number in (1, 2, 2):
        write_iteration(tmp_path, number, [row, row])
    rows = read_jsonl(tmp_path / "rollouts.jsonl")
    assert [one["step"] for one in rows] == [1, 1, 2, 2]


# ------------------------------------------------------------------------------------------------------ time and size
@pytest.mark.parametrize("name, write", [("rollouts.jsonl", append_rollouts), ("samples.jsonl", log_samples)])
def test_a_full_file_gets_no_more_rows_and_a_note_says_so_once(name, write, tokenizer, tmp_path, monkeypatch, capsys):
    row = rollout_row(tokenizer, [3], [4], group=0, score=1.0)
    run = run_of(tmp_path)
    write(run, [row])
    monkeypatch.setattr(rollout_log, "MOST_BYTES", 2 * (tmp_path / name).stat().st_size - 1)
    for _ in range(3):
        write(run, [row])
    assert len(read_jsonl(tmp_path / name)) == 2
    told = capsys.readouterr().out
    assert told.count("gets no more samples") == 1 and str(tmp_path / name) in told


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", *(program for program in SAMPLING if program not in ITERATED)])
def test_seconds_spent_on_logs_are_a_metric_of_training_rows(program, runs, tmp_path):
    folder = Path(main_of(program)(runs.flags(program, tmp_path, "--log_rollouts", 2, steps=3)))
    rows = read_jsonl(folder / "metrics.jsonl")
    assert all(row["time/logging"] > 0 for row in rows[1:])
    assert not any("time/logging" in row for row in rows if any(name.startswith("val/") for name in row))


def test_each_second_of_logging_is_counted_once(tmp_path, monkeypatch):
    clock = iter(range(100))
    run = Run(TrainArgs(log_dir=str(tmp_path), accelerator="cpu", logger="csv"), "test")
    loop = run.steps(9)
    next(loop)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    for _ in range(2):
        with run.metric_log.time_writing():
            pass
    run.metric_log.log({"val/loss": 1.0})
    run.metric_log.log({"train/loss": 1.0})
    run.metric_log.log({"train/loss": 1.0})
    monkeypatch.undo()
    rows = read_jsonl(run.files.directory / "metrics.jsonl")
    assert [row.get("time/logging") for row in rows] == [None, 3, 1]  # two parts and a row; the row before
    loop.close()
