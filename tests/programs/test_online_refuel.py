"""Online REFUEL: pairs share the data's prefix, rewards are what the flags say, a resumed run ends the same."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, RunOfOneStep, last_checkpoint, metrics, tiny_policy, weights
from safetensors.torch import load_file

from lightrlhf import online_refuel, refuel
from lightrlhf.generation.dialogues import load_dialogues
from lightrlhf.generation.users import recorded_user
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.online_refuel import OnlineRefuelArgs, main
from lightrlhf.rewards.loading import load_rewards

ONLINE = ["--reward_function", "helpers.rewards:vowels", "--rollout_size", "6"]
ONLINE += ["--max_new_tokens", "6", "--mini_batch_size", "4", "--micro_batch_size", "4", "--learning_rate", "1e-3"]
ONLINE += ["--max_steps", "3", "--save_interval", "1"]
ONLINE += ["--log_interval", "1", "--eval_interval", "2", "--eval_dialogues", "4"]


@pytest.fixture
def flags(talk_data, sft_dir, tmp_path):
    return ["--data_dir", str(talk_data), "--sft_experiment_dir", sft_dir, *ONLINE, *CPU, "--log_dir", str(tmp_path)]


@pytest.mark.slow
def test_it_starts_at_the_initial_policy_and_resumes_bitwise(flags):
    run = Path(main([*flags, "--ppo_epochs", "2"]))
    rows = metrics(run)
    first = next(row for row in rows if "objective/kl" in row)
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5) and first["objective/valid_ratio"] == 1.0
    assert sum("val/score" in row for row in rows) == 2 and (run / "samples.jsonl").is_file()
    end = weights(last_checkpoint(run))
    assert end != weights(run / "checkpoint-000002")
    shutil.rmtree(run / "checkpoint-000003")
    main(["--resume_from", str(run)])
    assert weights(last_checkpoint(run)) == end
    assert [row for row in metrics(run) if "val/score" not in row] == [r for r in rows if "val/score" not in r]


@pytest.mark.slow
def test_given_objects_do_what_flags_do(flags, talk_data, tmp_path):
    from helpers.rewards import vowels

    by_flags = main([*flags, "--max_steps", "2"])
    given = dict(zip((word[2:] for word in flags[::2]), flags[1::2]))
    del given["reward_function"], given["data_dir"]
    values = {name: parse_value(value) for name, value in given.items()} | {"max_steps": 2}
    dialogues = {split: load_dialogues(str(talk_data), split) for split in ("train", "validation")}
    steps = []
    run = online_refuel.train(
        OnlineRefuelArgs(**values),
        tokenizer=load_tokenizer(str(talk_data), None),
        dialogues=dialogues,
        user=recorded_user,
        reward=vowels,
        on_step=lambda step, row: steps.append(step),
    )
    assert metrics(run) == metrics(by_flags) and steps == [row["step"] for row in metrics(run)]
    assert weights(last_checkpoint(run)) == weights(last_checkpoint(by_flags))


def parse_value(text: str):
    return float(text) if "e-" in text else int(text) if text.isdigit() else text


def make_pairs(talk_data, tokenizer, scorer=None, **given):
    """Pairs of one step of tiny models, with what they were made of; scorer: in place of the reward function."""
    fixed = {"max_new_tokens": 5, "init_kl_coeff": 0.0, "data_dir": str(talk_data)}
    fixed |= {"reward_function": ["helpers.rewards:vowels"], "model_name": "tiny", "accelerator": "cpu"}
    args = OnlineRefuelArgs(**(fixed | given))
    policy = tiny_policy("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    reference = tiny_policy("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.05)
    run = RunOfOneStep(args, policy=policy)
    scorer = scorer or load_rewards(args, run.device, args.rollout_mini_batch_size, grouped=True).of_groups
    rows = load_dialogues(str(talk_data), "train")[:8]
    sampler = online_refuel.DialogueSampler(run, policy, recorded_user, tokenizer, None)
    pairs, row = online_refuel.make_pairs(run, sampler, reference, scorer, rows)
    return policy, reference, rows, pairs, row


def test_rewards_are_the_score_less_the_kl_at_the_turn_and_a_cut_turn_is_penalised(talk_data, tokenizer):
    penalty = {"penalty_reward_value": -7.0}
    policy, reference, _, plain, row = make_pairs(talk_data, tokenizer, **penalty)
    *_, charged, _ = make_pairs(talk_data, tokenizer, init_kl_coeff=0.3, **penalty)
    assert 0 < row["completions/truncated_ratio"]
    for i, pair in enumerate(plain.rows):
        for place, side in enumerate(("chosen", "rejected")):
            ids, mask = pair[f"{side}_input_ids"], pair[f"{side}_action_mask"]
            assert (float(plain.rewards[place, i]) == -7.0) == (ids[-1] != tokenizer.eos_token_id)
            inputs = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), mask[None]
            with torch.no_grad():
                logp, ref = (float(model(*inputs, temperature=0.8).logprobs.sum()) for model in (policy, reference))
            assert float(plain.old_logps[place, i]) == pytest.approx(logp, abs=1e-4)
            expected = float(plain.rewards[place, i]) - 0.3 * (logp - ref)
            assert float(charged.rewards[place, i]) == pytest.approx(expected, abs=1e-4)


def test_pairs_share_the_datas_prefix_and_whitened_rewards_have_mean_0(talk_data, tokenizer):
    *_, rows, pairs, _ = make_pairs(talk_data, tokenizer, whiten_rewards=True)
    assert float(pairs.rewards.mean()) == pytest.approx(0, abs=1e-5)
    assert float(pairs.rewards.var(correction=0)) == pytest.approx(1, abs=1e-3)
    starts = []
    for row, pair in zip(rows, pairs.rows):
        start = int(pair["chosen_action_mask"].long().argmax()) + 1
        assert pair["chosen_input_ids"][:start] == pair["rejected_input_ids"][:start] == row.input_ids[:start]
        starts.append([span[0] for span in row.turn_spans].index(start))
    assert len(set(starts)) > 1  # turns differ within a batch
    assert any(pair["chosen_input_ids"] != pair["rejected_input_ids"] for pair in pairs.rows)


def test_a_pair_without_two_scores_is_neither_whitened_nor_trained_on(talk_data, tokenizer):
    """Of eight pairs one lacks a score of one side, and one both; ends are so frequent that few turns are cut."""
    scores = [None, None, *(i / 2 for i in range(6)), 3.0, None, *(-float(i) for i in range(6))]
    given = {"whiten_rewards": True, "penalty_reward_value": 0.0, "eos_ids": [*range(2, 500)]}
    policy, *_, rows, pairs, row = make_pairs(talk_data, tokenizer, lambda _: [[score] for score in scores], **given)
    assert row["completions/truncated_ratio"] == 0 and row["objective/valid_ratio"] == 6 / 8
    assert [pair["row"] for pair in pairs.rows] == [one.index for one in rows[2:]]
    kept = torch.tensor([scores[2:8], scores[10:]])
    expected = (kept - kept.mean()) / kept.std(correction=0)
    assert torch.allclose(pairs.rewards, expected, atol=1e-5)
    assert row["objective/score"] == pytest.approx(float(kept.mean()))
    run = RunOfOneStep(OnlineRefuelArgs(data_dir="data", model_name="tiny", accelerator="cpu"), policy=policy)
    metrics = refuel.train_step(run, policy, pairs.select([]), pad_id=0)  # of ranks that have no pair
    assert math.isnan(metrics["train/loss"])
    assert not any(gradient.any() for gradient in run.gradients["policy"].values())


@pytest.mark.slow
def test_mini_batches_divide_the_pairs_of_a_rollout(flags, sft_dir):
    """At a small rate two steps, on half of the pairs each, are one of twice the rate on all.

    A first step of Adam with so large an epsilon is one of gradient descent; its second moment has no weight.
    """
    plain = ["--optimizer_eps", "1e6", "--optimizer_beta1", "0", "--gradient_clip_val", "0", "--lr_warmup_steps", "0"]
    plain += ["--lr_scheduler_type", "constant", "--rollout_size", "8", "--max_steps", "1", "--eval_dialogues", "0"]
    start, changes = load_file(last_checkpoint(sft_dir) / "model.safetensors"), []
    for size, rate in (("4", "1e1"), ("8", "2e1")):
        run = main([*flags, *plain, "--mini_batch_size", size, "--learning_rate", rate])
        end = load_file(last_checkpoint(run) / "model.safetensors")
        changes.append(torch.cat([(end[name] - start[name]).flatten() for name in start]))
    one, other = changes
    assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--noptepochs", "4"], "--ppo_epochs"),
        (["--kl_coef", "0.05"], "--init_kl_coeff"),
        (["--num_layers_unfrozen", "2"], "--finetune_mode last_layer"),
        (["--max_new_tokens", "900"], "--total_length 2048"),
    ],
)
def test_bad_flags_and_refuels_own_are_refused_in_one_line(flags, capsys, wrong, message):
    with pytest.raises(SystemExit) as stop:
        main([*flags, *wrong])
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert wrong[0] in error and message in error
