"""PPO: each loss by its formula, one gradient however it is cut, and a start where policy and reference agree."""

import copy
import dataclasses
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
    rows_of,
    weights,
)
from helpers.rollouts import rollout_of, scores_of
from transformers import AutoModelForCausalLM

from lightrlhf import ppo
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.data.macro_parsers import Span
from lightrlhf.generation.rollout import score_logprobs
from lightrlhf.generation.rollout_metrics import rollout_metrics
from lightrlhf.generation.rollout_sampler import RolloutSampler
from lightrlhf.maths import macro_actions
from lightrlhf.maths.macro_actions import fixed_segments
from lightrlhf.maths.ops import gae, policy_loss, whiten
from lightrlhf.models import packing, roles
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.ppo import (
    PPOArgs,
    PPOBatch,
    bound_scores,
    estimate_advantages,
    load_critic,
    main,
    minibatches,
    predict_values,
    segment_responses,
    update_minibatch,
    value_loss,
)
from lightrlhf.rewards.kl import token_rewards
from lightrlhf.sft import main as sft
from lightrlhf.training.resume import read_checkpoint

EOS = 1
PROMPTS, RESPONSES = rows_of(3, 9, 1, 5), [[*row, EOS] for row in rows_of(6, 2, 4, 1)]


def ppo_args(cafe_data, **changes) -> PPOArgs:
    sizes = {"rollout_size": 4, "mini_batch_size": 4, "micro_batch_size": 4, "actor_learning_rate": 1e-3}
    return PPOArgs(data_dir=str(cafe_data), model_name="tiny", reward_function=["x:y"], **(sizes | changes))


def ppo_batch(dtype=torch.float32) -> PPOBatch:
    batch = response_batch(PROMPTS, RESPONSES, EOS)
    mask = batch.action_mask
    noise = torch.randn(4, *mask.shape, dtype=dtype) * mask
    return PPOBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=mask,
        logprobs=(noise[0] - 3) * mask,
        values=noise[1],
        advantages=noise[2],
        returns=noise[3],
        segments=fixed_segments(mask, 1),
    )


# ---------------------------------------------------------------------------------------------------------- losses
def surrogate_loss(batch: PPOBatch, logprobs, entropy=None, entropy_coeff: float = 0.0):
    return policy_loss(logprobs, batch.logprobs, batch.advantages, batch.action_mask, 0.2, entropy, entropy_coeff)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.05])
def test_the_policy_loss_and_its_gradient_equal_a_float64_reference(entropy_coeff):
    """Schulman et al. 2017, eq. 7 and the entropy bonus of eq. 9, action by action."""
    batch = ppo_batch(torch.float64)
    logprobs = (batch.logprobs + 0.4 * torch.randn_like(batch.logprobs)).requires_grad_()
    entropy = torch.rand_like(batch.logprobs).requires_grad_()
    loss = surrogate_loss(batch, logprobs, entropy if entropy_coeff else None, entropy_coeff)
    found = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for b, t in batch.action_mask.nonzero().tolist():
        ratio = torch.exp(logprobs[b, t] - batch.logprobs[b, t])
        advantage = float(batch.advantages[b, t])
        bounded = min(max(ratio.item(), 0.8), 1.2)
        if ratio.item() * advantage <= bounded * advantage:
            total = total - ratio * advantage
        else:
            total, clipped = total - bounded * advantage, clipped + 1
        total = total - entropy_coeff * entropy[b, t]
    assert clipped > 1  # both branches are met
    expected = torch.autograd.grad(total, (logprobs, entropy))
    assert float(loss) == pytest.approx(float(total), abs=1e-10)
    for mine, reference in zip(found, expected):
        assert torch.allclose(mine, reference, atol=1e-12)


def test_the_value_loss_and_its_gradient_equal_a_float64_reference():
    batch = ppo_batch(torch.float64)
    values = (batch.values + 0.4 * torch.randn_like(batch.values)).requires_grad_()
    loss = value_loss(values, batch, 0.2)
    (found,) = torch.autograd.grad(loss, values)
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for b, t in batch.action_mask.nonzero().tolist():
        value, old, target = values[b, t], float(batch.values[b, t]), float(batch.returns[b, t])
        bounded = min(max(value.item(), old - 0.2), old + 0.2)
        plain = (value - target) ** 2
        if (bounded - target) ** 2 > plain.item():
            total, clipped = total + 0.5 * (bounded - target) ** 2, clipped + 1
        else:
            total = total + 0.5 * plain
    assert clipped > 1
    (expected,) = torch.autograd.grad(total, values)
    assert float(loss) == pytest.approx(float(total), abs=1e-10)
    assert torch.allclose(found, expected, atol=1e-12)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    batch = ppo_batch(torch.float64)
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = surrogate_loss(batch, logprobs)
    (found,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(found, -batch.advantages * batch.action_mask)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_the_gradients_of_an_update_are_the_same_for_every_micro_batch_size(
    entropy_coeff, base_model, cafe_data, tokenizer
):
    actor = load_policy(str(base_model), ModelArgs(), tokenizer).eval()
    critic = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0).eval()
    batch = ppo_batch()
    batch.logprobs = score_logprobs(actor, batch, 0.7, 4) + 0.1 * torch.randn_like(batch.logprobs) * batch.action_mask
    found, reported = [], []
    for micro_batch_size, packs in ((4, False), (1, False), (2, False), (4, True)):
        actor.packs = critic.packs = packs
        changes = {"micro_batch_size": micro_batch_size, "temperature": 0.7, "entropy_coeff": entropy_coeff}
        run = RunOfOneStep(ppo_args(cafe_data, **changes), policy=actor, critic=critic)
        reported.append(update_minibatch(run, actor, critic, batch))
        found.append(run.gradients)
    for other in found[1:]:
        for name in ("policy", "critic"):
            assert_same_gradients(found[0][name], other[name], atol=2e-6)
    for name, value in reported[0].items():
        assert [row[name] for row in reported] == pytest.approx([value] * 4, abs=1e-5)


def test_the_gradient_of_an_update_is_that_of_the_formula_at_the_sampling_temperature(base_model, cafe_data, tokenizer):
    actor = load_policy(str(base_model), ModelArgs(), tokenizer).eval()
    critic = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0).eval()
    batch = ppo_batch()
    batch.logprobs = score_logprobs(actor, batch, 0.7, 4)
    run = RunOfOneStep(ppo_args(cafe_data, temperature=0.7, vf_coeff=0.5), policy=actor, critic=critic)
    update_minibatch(run, actor, critic, batch)
    exact = copy.deepcopy(actor).double()
    loss, value_part = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    exact_critic = copy.deepcopy(critic).double()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        ids = torch.tensor([prompt + response])
        logprobs = (exact.model(ids, use_cache=False).logits[0] / 0.7).log_softmax(-1)
        hidden = exact_critic.model.base_model(ids, use_cache=False).last_hidden_state
        values = exact_critic.model.score(hidden)[0, :, 0]
        for t in range(len(prompt) - 1, ids.shape[1] - 1):
            new = logprobs[t, ids[0, t + 1]]
            loss = loss - torch.exp(new - new.detach()) * batch.advantages[row, t].double()
            old, target = batch.values[row, t].double(), batch.returns[row, t].double()
            bounded = old + (values[t] - old).clamp(-0.2, 0.2)
            value_part = value_part + 0.5 * torch.maximum((values[t] - target) ** 2, (bounded - target) ** 2)
    (loss / batch.num_actions).backward()
    (0.5 * value_part / batch.num_actions).backward()
    for name, module in (("policy", exact), ("critic", exact_critic)):
        reference = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert_same_gradients(reference, run.gradients[name], atol=1e-5)


# ------------------------------------------------------------------------------------------------------ the rollout
def test_advantages_are_whitened_over_the_rollout_not_per_response(cafe_data):
    rollout = rollout_of(PROMPTS, RESPONSES)
    rewards = torch.zeros(rollout.action_mask.shape)
    for row, number in enumerate([5.0, -5.0, 5.0, -5.0]):
        rewards[row][rollout.action_mask[row].nonzero()[-1]] = number
    values = torch.zeros_like(rewards)
    batch = estimate_advantages(ppo_args(cafe_data), rollout, rewards, values, fixed_segments(rollout.action_mask, 1))
    means = [float(batch.advantages[row][batch.action_mask[row]].mean()) for row in range(4)]
    assert means[0] > 0.3 and means[2] > 0.3 and means[1] < -0.3 and means[3] < -0.3
    counted = batch.advantages[batch.action_mask]
    assert abs(float(counted.mean())) < 1e-5 and float(counted.std(correction=0)) == pytest.approx(1, abs=1e-3)
    assert (batch.advantages[~batch.action_mask] == 0).all()


def test_scores_are_clipped_and_a_missing_end_costs_its_penalty(cafe_data, tokenizer):
    args = ppo_args(cafe_data, reward_clip_value=2.0, missing_eos_penalty=1.0)
    rollout = rollout_of(PROMPTS, RESPONSES, truncated=[False, True, False, True])
    raw = [9.0, 9.0, -9.0, 0.5]
    assert bound_scores(args, rollout, scores_of(raw))[0].total.tolist() == [2.0, 1.0, -2.0, -0.5]
    free = ppo_args(cafe_data, clip_rewards=False)
    assert bound_scores(free, rollout, scores_of(raw))[0].total.tolist() == raw


def test_a_sample_scored_nan_learns_nothing(base_model, cafe_data, tokenizer):
    """Its actions are gone, so neither gradients nor the whitening of the others know that it was there."""
    actor = load_policy(str(base_model), ModelArgs(), tokenizer).eval()
    critic = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0).eval()
    found = []
    for keep, scores in (([0, 1, 2, 3], [1.0, math.nan, -1.0, 0.3]), ([0, 2, 3], [1.0, -1.0, 0.3])):
        torch.manual_seed(0)
        rollout = rollout_of([PROMPTS[i] for i in keep], [RESPONSES[i] for i in keep])
        rollout.logprobs = score_logprobs(actor, rollout, 1.0, 4)
        rollout.ref_logprobs = rollout.logprobs
        run = RunOfOneStep(ppo_args(cafe_data), policy=actor, critic=critic)
        before = rollout.action_mask.clone()
        scored = bound_scores(run.args, rollout, scores_of(scores))[0].total
        assert torch.equal(rollout.action_mask, before)
        assert scored.isnan().tolist() == [math.isnan(x) for x in scores]
        rollout = rollout.masked(~scored.isnan())
        rewards = token_rewards(rollout, scored, 0.1)
        batch = estimate_advantages(
            run.args, rollout, rewards, torch.zeros_like(rewards), fixed_segments(rollout.action_mask, 1)
        )
        assert torch.isfinite(batch.advantages).all()
        update_minibatch(run, actor, critic, batch)
        found.append(run.gradients)
    for name in ("policy", "critic"):
        assert_same_gradients(found[1][name], found[0][name], atol=2e-6)


SCORES = {"half": [1.0, math.nan, -1.0, math.nan], "one": [math.nan] * 3 + [0.5], "none": [math.nan] * 4}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_metrics_are_means_over_what_was_scored_and_over_what_was_sampled(cafe_data, scores, monkeypatch):
    """A response without a score is no score of 0 and no KL of 0."""
    rollout = rollout_of(PROMPTS, RESPONSES, truncated=[True, False, False, True])
    rollout.ref_logprobs = rollout.logprobs - torch.tensor([9.0, 8.0, 10.0, 9.0])[:, None] / rollout.lengths()[:, None]
    rollout.ref_logprobs = torch.where(rollout.action_mask, rollout.ref_logprobs, 0.0)
    given = torch.tensor(scores)
    rewards = token_rewards(rollout.masked(~given.isnan()), given, 0.1)
    assert torch.isfinite(rewards).all() and (rewards[given.isnan()] == 0).all()
    run = RunOfOneStep(ppo_args(cafe_data))
    found = rollout_metrics(run, rollout, given, rewards)
    valid = [i for i, value in enumerate(scores) if not math.isnan(value)]
    assert found["objective/kl"] == pytest.approx(9.0, rel=1e-5)
    assert found["objective/valid_ratio"] == len(valid) / 4
    assert found["completions/mean_length"] == sum(map(len, RESPONSES)) / 4
    assert found["completions/truncated_ratio"] == 0.5
    entropy = [-rollout.logprobs[i].sum() / len(RESPONSES[i]) for i in range(4)]
    assert found["objective/entropy"] == pytest.approx(float(sum(entropy)) / 4, rel=1e-5)
    if not valid:
        assert math.isnan(found["objective/score"]) and math.isnan(found["objective/reward"])
        return
    assert found["objective/score"] == pytest.approx(sum(scores[i] for i in valid) / len(valid))
    kl = [9.0, 8.0, 10.0, 9.0]
    expected = sum(scores[i] - 0.1 * kl[i] for i in valid) / len(valid)
    assert found["objective/reward"] == pytest.approx(expected, rel=1e-5)
    other = [torch.tensor([8.0, 4, 4, 0, 4, 4]), torch.tensor([4.0, 4, 4])]  # sums of four responses scored 1, KL 2
    monkeypatch.setattr(run.ranks, "sum", lambda tensor: tensor + other.pop(0))
    both = rollout_metrics(run, rollout, given, rewards)
    assert both["objective/kl"] == pytest.approx((9.0 * 4 + 8) / 8, rel=1e-5)
    assert both["objective/score"] == pytest.approx((sum(scores[i] for i in valid) + 4) / (len(valid) + 4))


def test_values_are_those_of_the_state_each_action_was_taken_in(base_model, tokenizer):
    critic = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0).train()
    rollout = rollout_of(PROMPTS, RESPONSES)
    values = predict_values(critic, rollout, batch_size=3)
    assert critic.training
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        ids = torch.tensor([prompt + response])
        alone = critic.eval()(ids, ids >= 0)[0]
        start = len(prompt) - 1
        assert torch.allclose(values[row, start : start + len(response)], alone[start:-1], atol=1e-5)
    assert (values[~rollout.action_mask] == 0).all()


@pytest.mark.parametrize("rows, size, fullest", [(8, 4, 8), (7, 4, 8), (5, 2, 5), (3, 8, 3)])
def test_minibatches_hold_every_row_once_and_are_as_many_on_every_rank(rows, size, fullest):
    batch = response_batch(rows_of(*[2] * rows), [[10 + i, EOS] for i in range(rows)], 0)
    parts = list(minibatches(batch, size, fullest, torch.Generator().manual_seed(0)))
    assert len(parts) == math.ceil(fullest / size)
    assert sorted(int(ids[2]) for part in parts for ids in part.input_ids) == [10 + i for i in range(rows)]
    assert max(map(len, parts)) <= size


# ------------------------------------------------------------------------------------------------------- the program
SMALL = ["--max_steps", "2", "--rollout_size", "8", "--mini_batch_size", "8", "--micro_batch_size", "4"]
SMALL += ["--rollout_mini_batch_size", "4", "--max_new_tokens", "8", "--log_interval", "1", "--eval_interval", "2"]
SMALL += ["--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"]
OBJECTIVE = ["objective/kl", "objective/score", "objective/reward", "objective/entropy", "objective/kl_coeff"]
POLICY = ["policy/loss", "policy/clipfrac", "policy/approxkl", "policy/ratio", "policy/grad_norm"]
VALUE = ["value/loss", "value/grad_norm", "value/explained_variance"]
COMPLETIONS = ["completions/mean_length", "completions/truncated_ratio", "completions/eos_ratio"]


@pytest.mark.slow
def test_several_rewards_are_weighted_logged_and_resumed(cafe_data, base_model, rm_dir, tmp_path, light_functions):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), *SMALL, *CPU, "--max_steps", "2"]
    flags += ["--rm_experiment_dir", str(rm_dir), "--reward_function", "rewards:length", "rewards:vowels"]
    flags += [
        "--reward_weights", "0", "1", "0.5", "--clip_rewards", "False", "--eval_interval", "0", "--log_interval", "1",
    ]  # fmt: skip
    folder = main([*flags, "--log_dir", str(tmp_path / "whole")])
    for row in metrics(folder):
        assert math.isfinite(row["reward/reward_model"]) and row["objective/valid_ratio"] == 1
        total = row["reward/length"] + 0.5 * row["reward/vowels"]
        assert row["objective/score"] == pytest.approx(total, abs=1e-5)
        assert [row[f"reward/{kind}"] for kind in ("timeouts", "crashes", "errors")] == [0, 0, 0]
    started = main([*flags, "--log_dir", str(tmp_path / "parts"), "--reward_timeout", "60", "--save_interval", "1"])
    assert weights(last_checkpoint(started)) == weights(last_checkpoint(folder))  # a process of its own changes nothing
    resumed = main(["--resume_from", started, "--max_steps", "3", "--init_kl_coeff", "0.7"])
    assert [(row["step"], row["objective/kl_coeff"]) for row in metrics(resumed)] == [(1, 0.1), (2, 0.1), (3, 0.7)]


@pytest.mark.slow
def test_max_kl_ends_the_passes_over_a_rollout_and_keeps_the_schedule(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *SMALL, *CPU]
    flags += ["--reward_function", "helpers.rewards:length", "--actor_learning_rate", "1e-2", "--ppo_epochs", "5"]
    flags += ["--mini_batch_size", "4", "--lr_scheduler_type", "cosine", "--max_steps", "3", "--eval_interval", "0"]
    plain, wide, narrow = (
        main([*flags, *more]) for more in ([], ["--max_kl", "1e9"], ["--max_kl", "0.02", "--log_interval", "1"])
    )
    assert weights(last_checkpoint(plain)) == weights(last_checkpoint(wide))
    assert metrics(plain) == metrics(wide) and [row["policy/updates"] for row in metrics(plain)] == [10, 10, 10]
    updates = [row["policy/updates"] for row in metrics(narrow)]
    assert all(2 <= number < 10 for number in updates)  # the first sees the policy that sampled
    assert [row["train/lr"] for row in metrics(narrow)] == [row["train/lr"] for row in metrics(plain)]


def test_max_kl_counts_up_to_the_mini_batch_that_exceeds_it(monkeypatch, cafe_data):
    found = iter([0.0, 0.1, 0.3, 0.1])
    monkeypatch.setattr(ppo, "update_minibatch", lambda *_: {"policy/approxkl": next(found)})
    run = RunOfOneStep(ppo_args(cafe_data, max_kl=0.2, ppo_epochs=2, mini_batch_size=2, micro_batch_size=2))
    skipped = []
    run.learners.skip_updates = skipped.append
    means = ppo.update(run, None, None, ppo_batch(), 0)
    assert means == {"policy/approxkl": pytest.approx(0.4 / 3), "policy/updates": 3} and skipped == [1]


def test_an_experiment_dir_holds_exactly_what_is_promised(cafe_data, sft_dir, rm_dir, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--rm_experiment_dir", rm_dir]
    flags += ["--min_p", "0.01", "--eos_ids", "7", "9", "--stop_strings", "a b", "--log_dir", str(tmp_path)]
    folder = main([*flags, *SMALL, *CPU])
    found = [name for name in listing(folder) if "events.out" not in name]
    names = ["README.md", "args.json", "manifest.json", "metrics.jsonl", "rollouts.jsonl", "samples.jsonl"]
    assert found == sorted(names + [f"checkpoint-000002/{name}" for name in CHECKPOINT])
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 2]
    assert rows[0].keys() >= {"step", "train/lr", *OBJECTIVE, *POLICY, *VALUE, *COMPLETIONS}
    assert rows[2].keys() >= {"step", "val/score", "val/kl", "val/mean_length", "val/truncated_ratio"}
    times = json.loads(open(f"{folder}/metrics.jsonl").readline())
    assert {"time/rollout", "time/score", "time/update", "time/tokens_per_second"} <= times.keys()
    samples = [json.loads(line) for line in open(f"{folder}/samples.jsonl")]
    assert samples and all({"step", "prompt", "response", "score"} <= row.keys() for row in samples)
    config = json.loads((last_checkpoint(folder) / "generation_config.json").read_text())
    assert config["max_new_tokens"] == 8 and config["do_sample"] is True
    assert config["min_p"] == 0.01 and config["eos_token_id"][1:] == [7, 9] and config["stop_strings"] == ["a b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--temperature", "0.7", "--top_k", "20", "--top_p", "0.9"],
        ["--finetune_mode", "lora"],
        ["--disable_dropout", "False"],
        ["--finetune_mode", "last_layer", "--kl_estimator", "k3", "--entropy_coeff", "0.01"],
    ],
)
def test_before_the_first_update_the_ratio_is_one_and_the_kl_is_zero(flags, cafe_data, base_model, tmp_path):
    """One minibatch in one pass: what the update sees is the policy that sampled. The next step has moved."""
    more = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    more += ["--reward_function", "helpers.rewards:length"]
    first, second, _ = metrics(main([*more, *SMALL, *flags, *CPU]))
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert first["policy/approxkl"] == pytest.approx(0, abs=1e-7)
    assert first["policy/clipfrac"] == 0
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert second["objective/kl"] != first["objective/kl"]


@pytest.mark.slow
def test_actor_critic_reference_and_reward_model_compute_packed_texts(
    cafe_data, base_model, rm_dir, tmp_path, monkeypatch
):
    inputs, packed = roles.Role._inputs, set()

    def noted(role, *given):
        found = inputs(role, *given)
        if found[1] is not None:
            packed.add((id(role), type(role).__name__, role.training))
        return found

    monkeypatch.setattr(roles.Role, "_inputs", noted)
    sample = RolloutSampler.sample
    monkeypatch.setattr(RolloutSampler, "sample", lambda *given: packed.clear() or sample(*given))  # not of the trials
    monkeypatch.setattr(packing, "MOST_COST", 9.0)  # whether it pays or not
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    main([*flags, "--rm_experiment_dir", rm_dir, *SMALL, "--eval_interval", "0", *CPU])
    kinds = sorted((kind, training) for _, kind, training in packed)
    expected = [("Policy", False), ("Policy", True)]  # the reference, and the actor's updates
    expected += [("ScalarModel", False), ("ScalarModel", False), ("ScalarModel", True)]  # scores, values, and updates
    assert kinds == expected


@pytest.mark.slow
def test_the_reference_is_the_sft_model_with_its_adapter(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path)]
    steps = ["--max_steps", "2", "--finetune_mode", "lora", "--learning_rate", "1e-2", "--lr_warmup_steps", "0"]
    start = sft([*flags, "--model_name", str(base_model), *steps, *CPU])
    more = ["--sft_experiment_dir", start, "--reward_function", "helpers.rewards:length", "--finetune_mode", "lora"]
    first = metrics(main([*flags, *more, *SMALL, *CPU]))[0]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_several_epochs_and_minibatches_take_that_many_updates(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    flags += ["--reward_function", "helpers.rewards:length", *SMALL, "--mini_batch_size", "4", "--ppo_epochs", "3"]
    state = torch.load(last_checkpoint(main([*flags, *CPU])) / "resume.pt", weights_only=True)
    for name in ("policy", "critic"):
        assert state["schedulers"][name]["last_epoch"] == 2 * 3 * 2
        steps = {int(entry["step"]) for entry in state["optimizers"][name]["state"].values()}
        assert steps == {2 * 3 * 2}


@pytest.mark.slow
def test_a_reward_for_length_makes_answers_longer(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *SMALL]
    flags += ["--reward_function", "helpers.rewards:length", "--max_steps", "12", "--eval_interval", "0"]
    flags += ["--epochs", "9", "--rollout_size", "32", "--init_kl_coeff", "0", "--actor_learning_rate", "1e-2"]
    flags += ["--save_interval", "100", "--ppo_epochs", "2"]
    rows = metrics(main([*flags, *CPU]))
    assert rows[-1]["objective/score"] > rows[0]["objective/score"] + 0.1
    assert rows[-1]["objective/kl"] > 0.1


def test_the_critic_starts_from_the_reward_model_or_the_policy(cafe_data, sft_dir, rm_dir, tokenizer):
    args = PPOArgs(data_dir=str(cafe_data), sft_experiment_dir=sft_dir, rm_experiment_dir=rm_dir)
    reward = load_scalar(rm_dir, ModelArgs(), tokenizer, seed=0)
    policy = load_policy(sft_dir, ModelArgs(), tokenizer)
    from_reward = load_critic(args, tokenizer, policy)
    assert all(torch.equal(a, b) for a, b in zip(reward.state_dict().values(), from_reward.state_dict().values()))
    from_policy = load_critic(dataclasses.replace(args, critic_init="policy"), tokenizer, policy)
    body = policy.model.base_model.state_dict()
    mine = from_policy.model.base_model.state_dict()
    assert all(torch.equal(value, mine[name]) for name, value in body.items())
    assert not torch.equal(from_policy.model.score.weight, reward.model.score.weight)


@pytest.mark.slow
def test_the_trained_policy_is_the_saved_one(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path)]
    folder = last_checkpoint(main([*flags, "--reward_function", "helpers.rewards:length", *SMALL, *CPU]))
    assert weights(folder) != (base_model / "model.safetensors").read_bytes()
    state = read_checkpoint(folder)[0]["learned"]["policy"]
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, saved[name.removeprefix("model.")]) for name, value in state.items())


@pytest.mark.slow
def test_a_function_that_gives_only_nan_changes_no_weight(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *SMALL]
    flags += ["--eval_interval", "0"]
    folder = last_checkpoint(main([*flags, "--reward_function", "helpers.rewards:always_nan", *CPU]))
    assert weights(folder) == (base_model / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "moves"), [("always_nan", False), ("every_other", True)])
def test_the_kl_weight_follows_the_kl_of_all_samples_and_stays_where_none_was_scored(
    cafe_data, base_model, tmp_path, reward, moves
):
    """At the reference the KL is 0, far below the target: the weight falls by 0.2 * 8 / 10,000 a rollout.

    The last of three is that of a resumed run.
    """
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *SMALL]
    flags += ["--reward_function", f"helpers.rewards:{reward}", "--adaptive_kl_coeff", "True", *CPU]
    started = main([*flags, "--actor_learning_rate", "1e-9"])
    rows = metrics(main(["--resume_from", started, "--max_steps", "3"]))
    factor = 1 - 0.2 * 8 / 10_000 if moves else 1.0
    trained = [row for row in rows if "objective/kl" in row]
    expected = [0.1, 0.1 * factor, 0.1 * factor**2]
    assert [row["objective/kl_coeff"] for row in trained] == pytest.approx(expected, rel=1e-9)
    assert [row["objective/valid_ratio"] for row in trained] == [0.5 if moves else 0.0] * 3
    assert all(("objective/score" in row) == moves for row in trained)


def test_macro_actions_of_one_token_are_token_ppo_bitwise(cafe_data):
    batch = ppo_batch()
    rollout = rollout_of(PROMPTS, RESPONSES)
    mask = rollout.action_mask
    advantages, returns = gae(batch.returns, batch.values, mask, 1.0, 0.95)
    found = estimate_advantages(
        ppo_args(cafe_data, ngram=1), rollout, batch.returns, batch.values, fixed_segments(mask, 1)
    )
    assert torch.equal(found.advantages, whiten(advantages, mask))
    assert torch.equal(found.returns, returns)


def test_a_constituent_of_at_most_the_cutoff_is_one_macro_action(cafe_data, tokenizer):
    text = "two muffins, please"
    ids = tokenizer(text)["input_ids"]
    rollout = dataclasses.replace(rollout_of([[5]], [ids]), tokenizer=tokenizer)
    halves = (Span(0, 11), Span(11, len(text)))
    for cutoff, count in ((len(ids), 1), (len(ids) - 1, 2)):
        args = ppo_args(cafe_data, termination_condition="parsing", parser="python", parsing_cutoff=cutoff)
        segments, failures = segment_responses(
            args, rollout, torch.zeros(1, 0), lambda text: [Span(0, len(text), halves)]
        )
        assert (int(segments.max()) + 1, failures) == (count, 0)


@pytest.mark.slow
@pytest.mark.parametrize("more, number", [([], 12), (["--repeat_times=1"], 4)])
def test_each_length_comes_as_often_as_its_flag_says(more, number, cafe_data, tmp_path, monkeypatch):
    drawn, original = [], macro_actions.random_segments
    monkeypatch.setattr(macro_actions, "random_segments", lambda *given: drawn.append(given[1]) or original(*given))
    where = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name=tiny", *CPU]
    sizes = ["--rollout_size=4", "--mini_batch_size=4", "--micro_batch_size=2", "--max_new_tokens=12", "--max_steps=1"]
    reward = "--reward_function=helpers.rewards:length"
    main([*where, *sizes, *more, "--termination_condition=randomized", reward, "--eval_interval=0"])
    assert [noise.shape for noise in drawn] == [(4, number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--ngram=0", "--value_function=first"],
        ["--ngram=3", "--gae_gamma=0.99"],
        ["--termination_condition=randomized", "--value_function=position"],
        ["--termination_condition=ppl", "--value_function=unit"],
        ["--termination_condition=parsing", "--ngram=2"],
    ],
    ids=lambda flags: flags[0],
)
def test_macro_actions_train(flags, cafe_data, tmp_path):
    where = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name=tiny", *CPU]
    sizes = ["--rollout_size=4", "--mini_batch_size=4", "--micro_batch_size=2", "--max_new_tokens=12", "--max_steps=2"]
    reward = "--reward_function=helpers.rewards:length"
    rows = metrics(main([*where, *sizes, *flags, reward, "--log_interval=1", "--eval_interval=0"]))
    assert all(row["completions/macro_length"] > 1 and row["completions/parse_failures"] == 0 for row in rows)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
