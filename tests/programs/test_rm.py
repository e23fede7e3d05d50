"""Reward modelling: three losses by their formulas, one gradient however it is cut, a model transformers can read."""

import json
import math

import pytest
import torch
from helpers import (
    CHECKPOINT,
    CPU,
    RunOfOneStep,
    assert_same_gradients,
    last_checkpoint,
    listing,
    metrics,
    save_model,
    weights,
)
from transformers import AutoModelForSequenceClassification

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import preference_batch
from lightrlhf.data.splits import load_split
from lightrlhf.models.loading import load_scalar
from lightrlhf.models.roles import last_token
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rm import LOSSES, RMArgs, evaluate, main, pair_sums, train_step

LOSS_TYPES = ["per_sample", "last_token", "average"]
PAIRS = [  # prompt, chosen, rejected
    ([5, 6], [7, 8, 1], [7, 9, 10, 11, 1]),  # differ in the middle, the rejected one is longer
    ([5], [6, 7, 8, 9, 1], [10, 1]),  # differ at once, the chosen one is longer
    ([5, 6, 7], [8, 1], [8, 1]),  # equal
    ([5], [6, 7, 8], [6, 7]),  # one is the beginning of the other (both cut)
    ([5], [6, 7], [6, 7, 8, 9]),  # and the other way round
]


def rows() -> list[dict]:
    return [
        {"prompt_len": len(p), "chosen_input_ids": p + chosen, "rejected_input_ids": p + rejected}
        for p, chosen, rejected in PAIRS
    ]


def log_sigmoid_loss(margin: torch.Tensor) -> torch.Tensor:
    return torch.log(1 + torch.exp(-margin))


def loss_by_hand(chosen, rejected, chosen_ids: list[int], rejected_ids: list[int], loss_type: str) -> torch.Tensor:
    """One pair, from the scores at its own tokens only."""
    if loss_type == "last_token":
        return log_sigmoid_loss(chosen[-1] - rejected[-1])
    if loss_type == "pair":  # logits of the first one's being better
        return (log_sigmoid_loss(chosen[-1]) + log_sigmoid_loss(-rejected[-1])) / 2
    longest = max(len(chosen_ids), len(rejected_ids))
    first = len(chosen_ids) - 1  # of equal texts the last token
    for t in range(longest):
        if t >= len(chosen_ids) or t >= len(rejected_ids) or chosen_ids[t] != rejected_ids[t]:
            first = t
            break
    if loss_type == "average":
        means = []
        for side in (chosen, rejected):
            start = min(first, len(side) - 1)
            means.append(sum(side[start:]) / len(side[start:]))
        return log_sigmoid_loss(means[0] - means[1])
    losses = []
    for t in range(first, longest):  # behind its end a side keeps its last score
        losses.append(log_sigmoid_loss(chosen[min(t, len(chosen) - 1)] - rejected[min(t, len(rejected) - 1)]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("pad_id", [0, 1])
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "pair"])
def test_the_loss_and_its_gradient_equal_a_float64_reference(loss_type, pad_id):
    batch = preference_batch(rows(), pad_id)
    scores = torch.randn(batch.input_ids.shape, dtype=torch.float64, requires_grad=True)
    loss = LOSSES[loss_type](scores, batch.input_ids, batch.attention_mask).sum()
    (gradient,) = torch.autograd.grad(loss, scores)
    total = torch.zeros((), dtype=torch.float64)
    for i, (prompt, chosen, rejected) in enumerate(PAIRS):
        one, other = prompt + chosen, prompt + rejected
        total = total + loss_by_hand(scores[i, : len(one)], scores[i + len(PAIRS), : len(other)], one, other, loss_type)
    (expected,) = torch.autograd.grad(total, scores)
    assert float(loss) == pytest.approx(float(total), abs=1e-12)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert (gradient[~batch.attention_mask] == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_equal_texts_have_loss_log_two_and_no_nan(loss_type):
    batch = preference_batch([rows()[2]], 1)
    scores = torch.randn(1, batch.input_ids.shape[1]).repeat(2, 1).requires_grad_()
    loss = LOSSES[loss_type](scores, batch.input_ids, batch.attention_mask).sum()
    loss.backward()
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)
    assert torch.isfinite(scores.grad).all()


def test_a_tie_is_half_right():
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0], [9.0, 1.0], [0.0, 1.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    chosen, rejected, right = pair_sums(scores, mask)
    assert (float(chosen), float(rejected), float(right)) == (4.0, 2.0, 1.5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_the_gradient_of_a_step_is_the_same_for_every_micro_batch_size(
    architecture, loss_type, cafe_data, tokenizer, tmp_path
):
    folder = save_model(architecture, tmp_path, tokenizer)
    model = load_scalar(str(folder), ModelArgs(), tokenizer, seed=0).eval()
    pairs = load_split(cafe_data, "preference", "train")[:8]
    found, reported = [], []
    for micro_batch_size in (8, 1, 2):
        args = RMArgs(
            data_dir=str(cafe_data), model_name="tiny", micro_batch_size=micro_batch_size, loss_type=loss_type
        )
        run = RunOfOneStep(args, reward=model)
        reported.append(train_step(run, model, pairs, tokenizer.pad_token_id))
        found.append(run.gradients["reward"])
    for other in found[1:]:
        assert_same_gradients(found[0], other, atol=2e-6)
    for name, value in reported[0].items():
        assert [row[name] for row in reported] == pytest.approx([value] * 3, abs=1e-5)


def test_evaluation_counts_every_pair_once_and_measures_all_scores(base_model, cafe_data, tokenizer):
    model = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0).eval()
    pairs = load_split(cafe_data, "preference", "validation")
    args = RMArgs(data_dir=str(cafe_data), model_name="tiny", mini_batch_size=5, micro_batch_size=5)
    found, statistics = evaluate(RunOfOneStep(args), model, pairs, tokenizer.pad_token_id)
    sides = [
        [float(model(row[key][None].long(), row[key][None] >= 0)[0, -1]) for row in pairs]
        for key in ("chosen_input_ids", "rejected_input_ids")
    ]
    both = torch.tensor(sides, dtype=torch.float64)
    assert found["val/rewards/accuracies"] == pytest.approx(float((both[0] > both[1]).double().mean()))
    assert found["val/rewards/margins"] == pytest.approx(float((both[0] - both[1]).mean()), abs=1e-5)
    assert statistics["mean"] == pytest.approx(float(both.mean()), abs=1e-5)
    assert statistics["std"] == pytest.approx(float(both.std(correction=0)), abs=1e-5)


# ------------------------------------------------------------------------------------------------------- the program


def test_an_experiment_dir_holds_exactly_what_is_promised(rm_dir):
    found = [name for name in listing(rm_dir) if "events.out" not in name]
    saved = {*CHECKPOINT, "reward_statistics.json"} - {"generation_config.json"}
    files = {"README.md", "args.json", "manifest.json", "metrics.jsonl"}
    assert found == sorted(files | {f"checkpoint-000002/{name}" for name in saved})
    rows = metrics(rm_dir)
    assert [row["step"] for row in rows] == [1, 2, 2]
    rewards = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert rows[0].keys() == {"step", "train/loss", "train/grad_norm", "train/lr"} | rewards
    assert rows[2].keys() == {"step", "val/loss"} | {f"val/{name}" for name in rewards}
    statistics = json.loads((last_checkpoint(rm_dir) / "reward_statistics.json").read_text())
    assert statistics.keys() == {"mean", "std"} and statistics["std"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", "lora", "last_layer"])
def test_transformers_scores_with_the_trained_reward_model(mode, cafe_data, sft_dir, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path)]
    flags += ["--max_steps", "2", "--lr_warmup_steps", "0", "--learning_rate", "1e-2", "--finetune_mode", mode]
    folder = last_checkpoint(main([*flags, *CPU]))
    tokenizer = load_tokenizer(None, str(folder))
    options = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id} if mode == "lora" else {}  # its base has none
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
    assert type(theirs).__name__ == "LlamaForSequenceClassification" and theirs.config.num_labels == 1
    ours = load_scalar(str(folder), ModelArgs(), tokenizer, seed=5, needs_head=True).eval()
    batch = preference_batch(load_split(cafe_data, "preference", "test"), tokenizer.pad_token_id)
    scores = theirs(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, 0]
    mine = last_token(ours(batch.input_ids, batch.attention_mask), batch.attention_mask)
    assert torch.allclose(scores, mine, atol=1e-5)
    assert weights(folder) != weights(last_checkpoint(sft_dir))


@pytest.mark.slow
def test_a_model_that_compares_says_so(cafe_data, sft_dir, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *CPU]
    folder = last_checkpoint(main([*flags, "--loss_type", "pair", "--max_steps", "1"]))
    assert json.loads((folder / "config.json").read_text())["compares_pairs"] is True


def test_training_learns_the_pairs_it_sees(cafe_data, logs):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(logs), "--model_name", "tiny", "--epochs", "3"]
    flags += ["--learning_rate", "3e-3", "--lr_warmup_steps", "2", "--log_interval", "1", "--save_interval", "100"]
    flags += [
        "--mini_batch_size", "20", "--micro_batch_size", "20", "--eval_interval", "0", "--loss_type", "last_token",
    ]  # fmt: skip
    losses = [row["train/loss"] for row in metrics(main([*flags, *CPU])) if "train/loss" in row]
    assert losses[0] == pytest.approx(math.log(2), abs=0.15)
    assert losses[-1] < losses[0]
