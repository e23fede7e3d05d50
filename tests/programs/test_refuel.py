"""REFUEL's loss against plain Python, and training on a folder of pairs alone."""

import math
from pathlib import Path

import pytest
import torch
from helpers import CPU, RunOfOneStep, assert_same_gradients, metrics, reseal, tiny_policy
from helpers.errors import refused
from helpers.programs import assert_resumes

from lightrlhf import refuel
from lightrlhf.cli.errors import StopTraining, UsageError
from lightrlhf.data.batch import dialogue_pair_batch
from lightrlhf.data.splits import save_split
from lightrlhf.refuel import Pairs, RefuelArgs, main, pair_losses, pairwise_loss, refuel_loss
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training.reference import sequence_logps


# ------------------------------------------------------------------------------------------------------------- loss
def test_the_loss_is_the_papers():
    """By hand: chosen moved by .5, rejected by -.25, scores 3 and 1, eta .1."""
    logps, old = torch.tensor([-2.0, -5.0]), torch.tensor([-2.5, -4.75])
    rewards = torch.tensor([3.0, 1.0])
    assert float(refuel_loss(logps, old, rewards, eta=0.1)) == pytest.approx((0.5 + 0.25 - 0.2) ** 2)
    assert float(pairwise_loss(logps, old, rewards, beta=0.4)) == pytest.approx(math.log(1 + math.exp(-0.4 * 0.75)))
    tied = torch.tensor([1.0, 1.0])
    assert float(pairwise_loss(logps, old, tied, beta=0.4)) == 0.0
    assert float(refuel_loss(logps, old, tied, eta=0.1)) == pytest.approx(0.75**2)


def pairs_of(*spans: tuple[int, int, int]) -> Pairs:
    """Pairs of a prefix, a turn and `end` tokens after it, each with two different turns."""
    rows, generator = [], torch.Generator().manual_seed(4)
    for number, (start, turn, end) in enumerate(spans):
        prefix = torch.randint(2, 61, (start,), generator=generator)
        row = {}
        for side, reward in (("chosen", 0.7 + number), ("rejected", 0.2)):
            ids = torch.cat([prefix, torch.randint(2, 61, (turn + end,), generator=generator)])
            places = torch.arange(1, len(ids))
            mask = (places >= start) & (places < start + turn)
            row |= {f"{side}_input_ids": ids, f"{side}_action_mask": mask, f"{side}_reward": reward}
        rows.append(row)
    rewards = torch.tensor([[row[f"{side}_reward"] for row in rows] for side in ("chosen", "rejected")])
    old = torch.tensor([[-9.0 - number for number in range(len(rows))], [-11.0 + n for n in range(len(rows))]])
    return Pairs(rows, rewards, old)


def plain_loss(policy, pairs: Pairs, eta: float, temperature: float):
    """The mean loss in float64, a row at a time, each log-probability looked up by a loop."""
    model = policy.model.double()
    total = 0.0
    for row, olds in zip(pairs.rows, pairs.old_logps.double().T):
        moved = []
        for side, old in zip(("chosen", "rejected"), olds):
            ids = row[f"{side}_input_ids"]
            logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
            said = sum(
                logits[t].log_softmax(-1)[ids[t + 1]] for t in range(len(ids) - 1) if row[f"{side}_action_mask"][t]
            )
            moved.append(said - old)
        total = total + (moved[0] - moved[1] - eta * (row["chosen_reward"] - row["rejected_reward"])) ** 2
    return total / len(pairs.rows)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_the_gradient_equals_a_float64_reference(talk_data, micro_batch_size):
    pairs, temperature = pairs_of((4, 5, 0), (9, 3, 0), (2, 7, 0)), 0.8
    policy = tiny_policy("llama")
    args = args_of(talk_data, micro_batch_size=micro_batch_size, mini_batch_size=3, eta=0.5, temperature=temperature)
    run = RunOfOneStep(args, policy=policy)
    metrics = refuel.train_step(run, policy, pairs, pad_id=0)  # of all pairs, one micro-batch or several
    reference = tiny_policy("llama").double()
    loss = plain_loss(reference, pairs, 0.5, temperature)
    loss.backward()
    loss = loss.detach()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_same_gradients({k: v.double() for k, v in run.gradients["policy"].items()}, wanted, atol=2e-5)
    assert metrics["train/loss"] == pytest.approx(float(loss), rel=1e-4)


def args_of(talk_data, **given) -> RefuelArgs:
    return RefuelArgs(data_dir=str(talk_data), model_name="tiny", accelerator="cpu", **given)


def test_the_losses_and_metrics_of_pairs_by_hand(talk_data):
    """Of three pairs the second moved against its scores."""
    rewards = torch.tensor([[3.0, 0.5, 2.0], [1.0, 0.25, 1.0]])
    old = torch.tensor([[-2.5, -3.5, -1.0], [-4.75, -3.0, -1.0]])
    logps = torch.tensor([-2.0, -4.0, -0.75, -5.0, -3.0, -1.0])  # the chosen sides, then the rejected ones
    gaps, targets = (0.75, -0.5, 0.25), (0.2, 0.025, 0.1)
    for loss_type in ("refuel", "dpo"):
        args = args_of(talk_data, loss_type=loss_type, eta=0.1, beta=0.4)
        losses, sums = pair_losses(args, logps, Pairs([{}] * 3, rewards, old))
        expected = [(gap - target) ** 2 for gap, target in zip(gaps, targets)]
        if loss_type == "dpo":
            expected = [math.log(1 + math.exp(-0.4 * gap)) for gap in gaps]
        assert losses.tolist() == pytest.approx(expected)
        means = refuel.mean_metrics("", (sums / 3).tolist())
        known = {"loss": sum(expected) / 3, "future": 0.5 / 3, "target": 0.325 / 3, "sign_align": 2 / 3}
        assert means == pytest.approx(known | {"chosen_ratio": 0.25 / 3, "rejected_ratio": -0.25 / 3})


def test_only_the_turns_own_tokens_have_gradient():
    """Tokens behind the turn change nothing at all; S is the sum over the turn's tokens and no others."""
    policy = tiny_policy("llama")
    (row,) = pairs_of((4, 5, 3)).rows
    batch = dialogue_pair_batch([row], pad_id=0)
    assert batch.group.tolist() == [0, 0]  # else prefixes are never shared
    changed = {k: v.clone() if torch.is_tensor(v) else v for k, v in row.items()}
    changed["chosen_input_ids"][9:] = 7
    told = [sequence_logps(policy, b, 1.0) for b in (batch, dialogue_pair_batch([changed], pad_id=0))]
    assert torch.equal(told[0], told[1])
    assert batch.action_mask.sum(1).tolist() == [5, 5]
    spoken = policy(batch.input_ids, batch.attention_mask, batch.attention_mask[:, 1:]).logprobs
    assert torch.allclose(told[0], spoken[:, 3:8].sum(1), atol=1e-5)
    changed["chosen_input_ids"][6] = (changed["chosen_input_ids"][6] + 1) % 61
    assert not torch.equal(told[0][:1], sequence_logps(policy, dialogue_pair_batch([changed], pad_id=0), 1.0)[:1])


def test_one_turn_is_rebel(talk_data):
    """REBEL (2404.16767, eq. 2) on prompt and response alone, written from that paper."""
    pairs = pairs_of((4, 5, 0), (6, 2, 0))
    policy = tiny_policy("llama")
    batch = dialogue_pair_batch(pairs.rows, pad_id=0)
    ours, _ = pair_losses(args_of(talk_data, eta=0.5), sequence_logps(policy, batch, 0.8), pairs)
    is_response = batch.attention_mask[:, 1:] & (
        torch.arange(1, batch.input_ids.shape[1]) >= torch.tensor([4, 6, 4, 6])[:, None]
    )
    logps = policy(batch.input_ids, batch.attention_mask, is_response, temperature=0.8).logprobs.sum(1)
    ratio, reward = (logps - pairs.old_logps.reshape(-1)).chunk(2), pairs.rewards
    expected = ((ratio[0] - ratio[1]) - 0.5 * (reward[0] - reward[1])) ** 2
    assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- program
SIZES = ["--mini_batch_size", "4", "--micro_batch_size", "2", "--learning_rate", "1e-3", "--max_new_tokens", "5"]
SIZES += ["--log_interval", "1", "--eval_interval", "1", "--save_interval", "1"]


@pytest.fixture(scope="module")
def pairs_dir(tmp_path_factory, tokenizer):
    """A folder as another program's tokenize stage leaves it."""
    folder = tmp_path_factory.mktemp("talk") / "pairs"
    save_split(folder, "refuel", "train", pairs_of((4, 5, 0), (9, 3, 0), (2, 7, 0), (6, 4, 0), (3, 3, 0)).rows)
    save_split(folder, "refuel", "validation", pairs_of((5, 5, 0), (8, 3, 0), (4, 4, 0)).rows)
    tokenizer.save_pretrained(folder / "tokenizer")
    reseal(folder)
    return folder


@pytest.fixture
def flags(pairs_dir, sft_dir, tmp_path):
    return ["--data_dir", str(pairs_dir), "--sft_experiment_dir", sft_dir, *SIZES, *CPU, "--log_dir", str(tmp_path)]


@pytest.mark.slow
def test_a_folder_of_pairs_is_enough_and_a_resumed_run_ends_the_same(flags):
    run = Path(main(flags))
    rows = metrics(run)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    first = next(row for row in rows if "train/loss" in row)
    assert first["train/chosen_ratio"] == pytest.approx(0, abs=1e-5)  # the policy starts at S_old
    assert {"val/loss", "val/sign_align"} <= rows[-1].keys()
    samples = read_jsonl(run / "samples.jsonl")  # at each evaluation
    assert {row["step"] for row in samples} == {1, 2}
    assert samples[0]["prompt"] and samples[0]["columns"].keys() == {"chosen_reply", "rejected_reply"}
    assert_resumes(main, run)


def test_eval_iters_counts_micro_batches(flags):
    whole, part = (metrics(main([*flags, *more]))[-1] for more in ([], ["--eval_iters", "1"]))
    assert whole["val/loss"] != part["val/loss"]


@pytest.mark.slow
def test_given_rows_and_policy_replace_the_files(pairs_dir, tokenizer, tmp_path):
    rows = {"train": pairs_of((4, 5, 0), (9, 3, 0), (2, 7, 0), (6, 4, 0)).rows, "validation": pairs_of((5, 5, 0)).rows}
    args = RefuelArgs(log_dir=str(tmp_path), accelerator="cpu", learning_rate=1e-3, log_interval=1, eval_interval=1)
    model = tiny_policy("llama", vocab_size=len(tokenizer)).model
    seen = []

    def stop(step, values):
        seen.append(step)
        raise StopTraining

    run = refuel.train(args, policy=model, tokenizer=tokenizer, rows=rows, on_step=stop)
    assert seen[0] == 1 and {"val/loss"} <= metrics(run)[-1].keys()
    assert not (Path(args.data_dir) / "old_logprobs.pt").exists()
    with pytest.raises(UsageError, match="chosen_input_ids"):
        refuel.train(args, policy=model, tokenizer=tokenizer, rows=[{"prompt": "x"}])


@pytest.mark.parametrize(
    ("old", "successor"),
    [
        (["--noptepochs", "2"], "--ppo_epochs"),
        (["--reward.kl_coef", "0.1"], "--init_kl_coeff"),
        (["--num_layers_unfrozen", "1"], "--finetune_mode last_layer"),
        (["--print_sample_output_freq", "1"], "evaluation"),
        (["--offload", "True"], "--offload"),
    ],
)
def test_a_flag_of_refuels_own_code_names_its_successor(flags, capsys, old, successor):
    message = refused(capsys, main, *flags, *old)
    assert old[0] in message and successor in message
