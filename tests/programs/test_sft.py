"""Supervised fine-tuning: the loss is the paper's, its gradient is that of the whole mini-batch, its runs are whole."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import (
    CHECKPOINT,
    CPU,
    RunOfOneStep,
    assert_same_gradients,
    gradients,
    last_checkpoint,
    listing,
    metrics,
    save_model,
    tiny_policy,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.splits import load_split
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.sft import SFTArgs, evaluate, main, train_step

EOS = 1


def rows_with_targets(cafe_data, count: int = 8) -> list[dict]:
    return load_split(cafe_data, "finetune", "train")[:count]


def loss_by_hand(logits: torch.Tensor, ids: list[int], counted: list[bool], label_smoothing: float) -> torch.Tensor:
    """Sum over counted t of (1-e) * -log p(y_t) + e / V * sum_v -log p(v) (Szegedy et al. 2016, section 7)."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(1, len(ids)):
        if not counted[t]:
            continue
        log_sum = torch.log(sum(torch.exp(logits[t - 1, v]) for v in range(logits.shape[1])))
        total = total + (1 - label_smoothing) * (log_sum - logits[t - 1, ids[t]])
        total = total + label_smoothing * sum(log_sum - logits[t - 1, v] for v in range(logits.shape[1])) / len(
            logits[0]
        )
    return total


@pytest.mark.parametrize("use_targets", [True, False])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradient_equal_a_float64_reference(use_targets, label_smoothing):
    prompts, responses = [[5, 6, 7], [8]], [[9, 10, EOS], [11, 12, 13, 14, EOS]]
    rows = [
        {"input_ids": p + r, "targets": torch.tensor([-100] * len(p) + r), "prompt_len": len(p)}
        for p, r in zip(prompts, responses)
    ]
    policy = tiny_policy("llama")
    flags = {"use_targets": use_targets, "label_smoothing": label_smoothing, "micro_batch_size": 1}
    run = RunOfOneStep(SFTArgs(data_dir="x", model_name="tiny", mini_batch_size=2, **flags), policy=policy)
    loss = train_step(run, policy, rows, 0)["train/loss"]

    exact = copy.deepcopy(policy).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for p, r in zip(prompts, responses):
        logits = exact.model(torch.tensor([p + r]), use_cache=False).logits[0]
        counted = [not use_targets] * len(p) + [True] * len(r)
        total = total + loss_by_hand(logits, p + r, counted, label_smoothing)
        count += sum(counted[1:])
    (total / count).backward()
    assert loss == pytest.approx(total.item() / count, rel=1e-5)
    assert_same_gradients(gradients(exact), run.gradients["policy"], atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("flags", [{}, {"use_targets": True, "label_smoothing": 0.1}])
def test_the_gradient_of_a_step_is_the_same_for_every_micro_batch_size(
    architecture, flags, cafe_data, tokenizer, tmp_path
):
    policy = load_policy(str(save_model(architecture, tmp_path, tokenizer)), ModelArgs(), tokenizer).eval()
    rows = rows_with_targets(cafe_data)
    found, losses = [], []
    for micro_batch_size in (8, 1, 2):
        args = SFTArgs(data_dir=str(cafe_data), model_name="tiny", micro_batch_size=micro_batch_size, **flags)
        run = RunOfOneStep(args, policy=policy)
        losses.append(train_step(run, policy, rows, tokenizer.pad_token_id)["train/loss"])
        found.append(run.gradients["policy"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for other in found[1:]:
        assert_same_gradients(found[0], other, atol=2e-6)


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_the_gradient_of_a_step_is_the_same_packed_and_padded(micro_batch_size, base_model, cafe_data, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(), tokenizer).eval()
    rows = rows_with_targets(cafe_data)
    found = []
    for packs in (False, True):
        args = SFTArgs(data_dir=str(cafe_data), model_name="tiny", micro_batch_size=micro_batch_size, use_targets=True)
        policy.packs = packs
        run = RunOfOneStep(args, policy=policy)
        train_step(run, policy, rows, tokenizer.pad_token_id)
        found.append(run.gradients["policy"])
    assert_same_gradients(*found, atol=2e-6)


@pytest.mark.parametrize(("eval_iters", "use_targets"), [(None, True), (2, True), (2, False)])
def test_the_validation_loss_is_the_mean_over_all_counted_tokens(
    eval_iters, use_targets, base_model, cafe_data, tokenizer
):
    policy = load_policy(str(base_model), ModelArgs(), tokenizer).train()
    rows = load_split(cafe_data, "finetune", "validation")
    args = SFTArgs(
        data_dir=str(cafe_data),
        model_name="tiny",
        mini_batch_size=5,
        micro_batch_size=5,
        use_targets=use_targets,
        eval_iters=eval_iters,
    )
    loss = evaluate(RunOfOneStep(args), policy, rows, tokenizer.pad_token_id)
    total, count = 0.0, 0
    for row in rows[: 10 if eval_iters else None]:
        ids, start = row["input_ids"].long(), row["prompt_len"] if use_targets else 1
        logprobs = policy.model(ids[None], use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        total -= float(logprobs.gather(-1, ids[start:, None]).sum())
        count += len(ids) - start
    assert loss == pytest.approx(total / count, rel=1e-4)
    assert policy.training  # the mode is restored


def test_the_loss_falls_from_about_that_of_a_uniform_guess(cafe_data, logs, tokenizer):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(logs), "--model_name", "tiny", "--max_steps", "12"]
    flags += ["--learning_rate", "3e-3", "--lr_warmup_steps", "2", "--log_interval", "1", "--epochs", "9"]
    flags += ["--save_interval", "100", "--eval_interval", "0"]
    losses = [row["train/loss"] for row in metrics(main([*flags, *CPU]))]
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), rel=0.1)
    assert losses[-1] < 0.8 * losses[0]


# ------------------------------------------------------------------------------------------------------- the program


def test_an_experiment_dir_holds_exactly_what_is_promised(sft_dir, cafe_data):
    folder = Path(sft_dir)
    found = [name for name in listing(folder) if "events.out" not in name]
    assert found == sorted(
        ["README.md", "args.json", "manifest.json", "metrics.jsonl", "samples.jsonl"]
        + [f"checkpoint-000002/{n}" for n in CHECKPOINT]
    )
    assert len(list((folder / "logs").glob("events.out*"))) == 1
    assert folder.parts[-4:-1] == ("rlhf-supervised-finetuning", cafe_data.parent.name, cafe_data.name)
    args = json.loads((folder / "args.json").read_text())
    assert args["program"] == "sft" and args["max_steps"] == 2 and args["versions"]["torch"]
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 2]
    assert rows[0].keys() == {"step", "train/loss", "train/grad_norm", "train/lr"}
    assert rows[2].keys() == {"step", "val/loss", "val/perplexity"}
    assert rows[2]["val/perplexity"] == pytest.approx(math.exp(rows[2]["val/loss"]))
    card = (folder / "README.md").read_text()
    assert "lightrlhf.sft" in card and "val/loss" in card


def test_plain_transformers_loads_the_checkpoint_with_its_tokenizer(sft_dir, tokenizer):
    folder = last_checkpoint(sft_dir)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_step_reads_a_mini_batch_and_the_evaluation_the_validation_split(cafe_data, base_model, tmp_path, tokenizer):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *CPU]
    flags += ["--max_steps", "1", "--lr_warmup_steps", "0", "--log_interval", "1"]
    runs = [main([*flags, "--micro_batch_size", size]) for size in ("8", "2")]
    whole, cut = (metrics(run)[0]["train/loss"] for run in runs)
    assert cut == pytest.approx(whole, rel=1e-5)
    policy = load_policy(str(last_checkpoint(runs[0])), ModelArgs(), tokenizer)
    args = SFTArgs(data_dir=str(cafe_data), model_name="tiny")
    rows = load_split(cafe_data, "finetune", "validation")
    expected = evaluate(RunOfOneStep(args), policy, rows, tokenizer.pad_token_id)
    assert metrics(runs[0])[-1]["val/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_two_runs_of_one_seed_are_bitwise_equal_and_of_two_seeds_are_not(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    flags += ["--max_steps", "3", "--lr_warmup_steps", "0", "--eval_interval", "0"]
    dirs = [main([*flags, *CPU, "--seed", seed]) for seed in ("1", "1", "2")]
    one, again, other = (weights(last_checkpoint(folder)) for folder in dirs)
    assert one == again and one != other


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--finetune_mode", "lora"], ["--finetune_mode", "last_layer"]])
def test_the_program_runs_with(flags, cafe_data, base_model, tmp_path):
    more = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    more += ["--max_steps", "2", "--lr_warmup_steps", "0", "--learning_rate", "1e-2", "--micro_batch_size", "4"]
    folder = last_checkpoint(main([*more, *flags, *CPU]))
    assert weights(folder) != (base_model / "model.safetensors").read_bytes()
    load_policy(str(folder), ModelArgs(), load_tokenizer(None, str(folder)))
