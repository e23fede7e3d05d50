"""The curriculum by pass rate: counts, weights, draws, and a run that is resumed."""

import dataclasses
import math
import shutil
from collections import Counter

import pytest
import torch
from helpers import last_checkpoint, metrics, tiny_model, weights
from helpers.errors import error_naming
from helpers.rollouts import rollout_of

from lightrlhf import GRPOArgs, UsageError, grpo
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training.pass_rates import PassRates
from lightrlhf.training.ranks import LocalRanks

NAN = math.nan
SCORES = torch.tensor([1.0, 0.0, 1.0, 1.0, NAN, 0.5])  # of responses to the prompts 3, 3, 1, 1, 1, 0


def rollout(episode=None):
    whole = rollout_of([[2, 3]] * 6, [[4, 1]] * 6)
    return dataclasses.replace(whole, row=torch.tensor([3, 3, 1, 1, 1, 0]), episode=episode)


def pass_rates(counts=None) -> PassRates:
    return PassRates(0.75, torch.zeros(5, 2, dtype=torch.float64) if counts is None else torch.tensor(counts).double())


def test_passes_are_counted_by_prompt_and_halved_when_it_comes_again():
    one = pass_rates()
    first = one.update(rollout(), SCORES, LocalRanks())
    assert one.counts.tolist() == [[0, 1], [2, 2], [0, 0], [1, 2], [0, 0]]
    rates = [1 / 3, 3 / 4, 1 / 2, 1 / 2, 1 / 2]
    assert one.weights().tolist() == pytest.approx([4 * p * (1 - p) for p in rates])
    total, squares = (sum((4 * p * (1 - p)) ** power for p in rates) for power in (1, 2))
    assert first == {
        "curriculum/seen": pytest.approx(3 / 5),
        "curriculum/spread": pytest.approx(total**2 / squares / 5),
    }
    one.update(rollout(), torch.tensor([0.0, 0, NAN, NAN, NAN, 1]), LocalRanks())
    assert one.counts.tolist() == [[1, 1.5], [2, 2], [0, 0], [0.5, 3], [0, 0]]


def test_an_episode_of_several_rows_counts_once():
    one = pass_rates()
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    one.update(rollout(torch.tensor([0, 0, 1, 2, 2, 3])), scores, LocalRanks())
    assert one.counts.tolist() == [[1, 1], [1, 2], [0, 0], [1, 1], [0, 0]]


def test_ranks_share_what_they_have_seen():
    class TwoRanks(LocalRanks):
        def sum(self, value):
            found.append(value)
            return sum(found)

    found, whole, part = [], pass_rates(), pass_rates()
    whole.update(rollout(), SCORES, LocalRanks())
    for rows in (slice(0, 1), slice(1, None)):  # the group of prompt 3 lies on both
        part = pass_rates()
        part.update(rollout().select(rows), SCORES[rows], TwoRanks())
    assert part.counts.tolist() == whole.counts.tolist()


def test_prompts_are_drawn_by_their_weights_without_repetition():
    one = pass_rates([[8, 8], [4, 8], [0, 8], [8, 16], [0, 0]])
    drawn = [one.draw(2, torch.Generator().manual_seed(seed)) for seed in range(4000)]
    assert all(len({*pair}) == 2 for pair in drawn)
    first, chances = Counter(pair[0] for pair in drawn), one.weights() / one.weights().sum()
    assert float(chances[0] / chances[1]) == pytest.approx(0.36)
    for prompt, chance in enumerate(chances.tolist()):
        assert first[prompt] / 4000 == pytest.approx(chance, abs=0.025)
    assert one.draw(5, torch.Generator().manual_seed(1)) == one.draw(5, torch.Generator().manual_seed(1))


def test_a_solved_prompt_keeps_a_share_of_its_weight():
    one = pass_rates()
    for _ in range(50):
        one.update(rollout_of_one(8), torch.ones(8), LocalRanks())
    assert float(one.weights()[2]) == pytest.approx(2 / 8, abs=0.05) and float(one.weights()[0]) == 1


def rollout_of_one(size: int):
    whole = rollout_of([[2, 3]] * size, [[4, 1]] * size)
    return dataclasses.replace(whole, row=torch.full((size,), 2))


# -------------------------------------------------------------------------------------------------------------- a run
KINDS = ("always", "never", "now and then")
PROMPTS = [{"prompt": f"Say {word}", "kind": kind} for word in ("tea", "water", "milk", "rum") for kind in KINDS]
SIZES = {"num_generations": 8, "rollout_size": 2, "mini_batch_size": 16, "micro_batch_size": 16, "max_new_tokens": 4}


def luck(prompts, completions, kind, **columns):
    """Passes by the kind of the prompt, else by the response."""
    return [{"always": 1.0, "never": 0.0}.get(one, sum(map(ord, text)) % 2) for one, text in zip(kind, completions)]


def trained(tokenizer, tmp_path, rows=PROMPTS, **changes):
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    policy = tiny_model("llama", vocab_size=len(tokenizer), **special)
    given = SIZES | {"log_rollouts": 16, "save_interval": 8, "log_interval": 1, "eval_interval": 0, "max_steps": 24}
    args = GRPOArgs(**(given | changes), accelerator="cpu", log_dir=str(tmp_path), learning_rate=1e-6)
    return grpo.train(args, policy=policy, tokenizer=tokenizer, prompts=rows, reward=luck)


@pytest.mark.slow
def test_a_run_draws_what_it_can_learn_from_and_resumes_bitwise(tokenizer, tmp_path):
    folder = trained(tokenizer, tmp_path, curriculum_score=1.0)
    rows, logged = read_jsonl(folder / "rollouts.jsonl"), metrics(folder)
    drawn = Counter(row["columns"]["kind"] for row in rows if row["step"] > 8)
    assert drawn["now and then"] > drawn["always"] + drawn["never"] > 0
    assert logged[0]["curriculum/seen"] == 2 / 12 < logged[-1]["curriculum/seen"]
    assert logged[-1]["curriculum/spread"] < logged[0]["curriculum/spread"] <= 1
    end, state = weights(last_checkpoint(folder)), torch.load(last_checkpoint(folder) / "resume.pt")["extra"]
    assert state["pass_rates"].shape == (12, 2)
    shutil.rmtree(last_checkpoint(folder))  # the one before is of step 16
    trained(tokenizer, tmp_path, curriculum_score=1.0, resume_from=str(folder))
    assert read_jsonl(folder / "rollouts.jsonl") == rows and weights(last_checkpoint(folder)) == end
    with error_naming(UsageError, "--curriculum_score", "0.5", "1"):
        trained(tokenizer, tmp_path, curriculum_score=0.5, resume_from=str(folder), max_steps=25)


def test_a_run_without_it_keeps_no_pass_rates(tokenizer, tmp_path):
    folder = trained(tokenizer, tmp_path, max_steps=1)
    assert "pass_rates" not in torch.load(last_checkpoint(folder) / "resume.pt")["extra"]
    assert not [name for name in metrics(folder)[0] if name.startswith("curriculum")]


def test_too_few_prompts_to_choose_from_are_refused(tokenizer, tmp_path):
    with error_naming(UsageError, "--curriculum_score 1", "2 of 2 prompts", "--rollout_size"):
        trained(tokenizer, tmp_path, rows=PROMPTS[:2], curriculum_score=1.0)


@pytest.mark.parametrize("other", [{"data_weights": [1.0]}, {"resample_rounds": 1}])
def test_another_way_to_draw_prompts_is_refused_by_name(other):
    with error_naming(ValueError, "--curriculum_score", f"--{next(iter(other))}"):
        GRPOArgs(**SIZES, curriculum_score=1.0, **other)
