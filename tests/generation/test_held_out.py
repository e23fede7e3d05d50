"""Answers to the same validation prompts throughout SFT and DPO: rows as of RL programs, and training is unchanged."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import last_checkpoint, metrics, weights
from helpers.programs import assert_resumes, main_of

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.splits import load_split
from lightrlhf.generation import held_out
from lightrlhf.generation.held_out import LONGEST_ANSWER, HeldOut
from lightrlhf.models.loading import load_policy
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training.ranks import LocalRanks

STAGES = {"sft": ("finetune", "input_ids"), "dpo": ("preference", "chosen_input_ids")}


@pytest.fixture(scope="module")
def finished(runs):
    """The experiment dir of a run of each program with an evaluation every other step, made once."""
    made: dict[str, Path] = {}

    def make(program: str) -> Path:
        if program not in made:
            more = ["--eval_interval", 2, "--log_rollouts", 3, "--keep_last", 0]
            made[program] = Path(main_of(program)(runs.flags(program, runs.folder / program, *more, steps=4)))
        return made[program]

    return make


@pytest.mark.parametrize("program", STAGES)
def test_the_first_validation_prompts_are_answered_greedily_at_each_evaluation(program, finished, cafe_data, tokenizer):
    rows = read_jsonl(finished(program) / "samples.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(step, group) for step in (2, 4) for group in range(3)]
    stage, name = STAGES[program]
    prompts = dict.fromkeys(
        tuple(r[name][: r["prompt_len"]].tolist()) for r in load_split(cafe_data, stage, "validation")
    )
    model = load_policy(str(last_checkpoint(finished(program))), ModelArgs(), tokenizer).model.eval()
    for row, prompt in zip(rows[3:], prompts):
        assert tuple(row["prompt_ids"]) == prompt and rows[row["group"]]["prompt_ids"] == row["prompt_ids"]
        assert (row["split"], row["version"], row["score"], row["advantages"]) == ("validation", 4, None, None)
        assert row["mask"] == [1] * len(row["response_ids"]) and len(row["mask"]) <= LONGEST_ANSWER
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert expected.tolist() == row["response_ids"]
        assert row["truncated"] == (len(row["response_ids"]) == LONGEST_ANSWER)


@pytest.mark.slow
@pytest.mark.parametrize("program", STAGES)
def test_training_is_bitwise_that_without_them(program, finished, runs, tmp_path):
    more = ["--eval_interval", 2, "--log_rollouts", 0]
    without = Path(main_of(program)(runs.flags(program, tmp_path, *more, steps=4)))
    assert not (without / "samples.jsonl").exists()
    assert weights(last_checkpoint(without)) == weights(last_checkpoint(finished(program)))
    assert metrics(without) == metrics(finished(program))


@pytest.mark.slow
@pytest.mark.parametrize("program", STAGES)
def test_a_resumed_run_has_the_same_answers(program, finished, tmp_path):
    folder = shutil.copytree(finished(program), tmp_path / "run")
    expected = (folder / "samples.jsonl").read_bytes()
    assert_resumes(main_of(program), folder)
    assert (folder / "samples.jsonl").read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ppo", "grpo"])
def test_rl_programs_keep_answers_to_the_same_prompts_in_the_same_form(program, finished, runs, tmp_path):
    more = ["--eval_interval", 2, "--log_rollouts", 3]
    rows = read_jsonl(Path(main_of(program)(runs.flags(program, tmp_path, *more, steps=4))) / "samples.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(step, group) for step in (2, 4) for group in range(3)]
    assert all(row.keys() == read_jsonl(finished("sft") / "samples.jsonl")[0].keys() for row in rows)
    for one, two in zip(rows[:3], rows[3:]):
        assert one["prompt_ids"] == two["prompt_ids"]
    assert all(row["split"] == "validation" and row["version"] == row["step"] for row in rows)
    assert all(isinstance(row["score"], float | int) and len(row["log_ratio"]) == len(row["mask"]) for row in rows)


# ------------------------------------------------------------------------------------------------------- the prompts
def run_of(said: list[str], **changes) -> SimpleNamespace:
    """What it needs of a run."""
    args = SimpleNamespace(**({"log_rollouts": 2, "strategy": "auto"} | changes))
    return SimpleNamespace(
        args=args, ranks=LocalRanks(), dry=None, print0=said.append, autocast=lambda: torch.inference_mode()
    )


def row_of(*ids: int, prompt_len: int) -> dict:
    return {"input_ids": torch.tensor(ids), "prompt_len": prompt_len}


def test_repeated_prompts_documents_and_long_prompts_are_left_out(base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(), tokenizer)
    limit = policy.model.config.max_position_embeddings
    long = row_of(*[5] * (limit - 1), prompt_len=limit - 1)
    rows = [long, row_of(3, 4, 5, prompt_len=2), row_of(3, 4, 9, prompt_len=2), row_of(3, 4, prompt_len=0)]
    rows += [row_of(7, 8, prompt_len=1), row_of(9, 8, prompt_len=1)]
    chosen = HeldOut(run_of([]), policy, rows, tokenizer)
    assert chosen.prompts == [[3, 4], [7]]
    assert HeldOut(run_of([], log_rollouts=0), policy, rows, tokenizer).prompts == []


def test_where_it_cannot_be_done_a_note_says_so_once(base_model, tokenizer, monkeypatch):
    def refuse(*args):
        raise UsageError("this architecture has no KV cache")

    said: list[str] = []
    policy, rows = load_policy(str(base_model), ModelArgs(), tokenizer), [row_of(3, 4, prompt_len=1)]
    assert HeldOut(run_of(said, strategy="fsdp"), policy, rows, tokenizer).prompts == []
    assert said.pop() == "note: no answers to validation prompts are kept with --strategy fsdp"
    monkeypatch.setattr(held_out, "generate", refuse)
    run = run_of(said)
    answers = HeldOut(run, policy, rows, tokenizer)
    for _ in range(2):
        answers.log(run, policy)
    assert said == ["note: no answers to validation prompts are kept: this architecture has no KV cache"]
