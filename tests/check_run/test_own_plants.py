"""Faults from reports, planted in tiny real runs of our own programs one by one: found, and by which name."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from helpers.programs import main_of
from helpers.tiny_runs import TinyRuns

from lightrlhf import check_run, grpo, ppo
from lightrlhf.generation import rollout, rollout_sampler, sampling
from lightrlhf.maths import groups, ops, policy_losses
from lightrlhf.rewards import kl
from lightrlhf.teachers import lesson
from lightrlhf.training import reference

LONG = ["--max_new_tokens=12", "--mini_batch_size=12", "--micro_batch_size=4", "--log_rollouts=100", "--verify=False"]
ENDS = [f"--eos_ids={list(range(20, 80))}"]  # so that responses end
LONG += [*ENDS, "--disable_dropout=True"]
GRPO = [*LONG, "--num_generations=4", "--ppo_epochs=1", "--resample_rounds=0"]
PPO, DISTILL = [*LONG, "--rollout_size=12"], [*LONG, "--rollout_size=12", "--num_generations=1"]


class Plant(NamedTuple):
    """A fault: a line that is changed, where it was reported, and the names that are right."""

    program: str
    flags: list[str]
    report: str
    names: set[str]  # empty where it is found by another name


def moved(values, by):
    """Columns of (B, T), moved to the right."""
    return torch.roll(values, by, 1) & (torch.arange(values.shape[1]) >= max(by, 0))


# ----------------------------------------------------------------------------------------------------------- advantages
def std_with_n(patch):
    made = groups.group_moments

    def moments(*given):
        found = made(*given)
        return found._replace(std=found.std * ((found.size - 1) / found.size).sqrt())

    patch.setattr(groups, "group_moments", moments)


def unscored_as_zero(patch):
    patch.setattr(grpo, "combine_scores", lambda args, rollout, scores, reduce=None: scores.total.nan_to_num())


def rewards_in_another_order(patch):
    made = grpo.combine_scores
    patch.setattr(grpo, "combine_scores", lambda *given: made(*given).roll(1))


def groups_mixed(patch):
    made = rollout_sampler.RolloutSampler._respond

    def respond(sampler, *given):
        found = made(sampler, *given)
        return dataclasses.replace(found, group=torch.arange(len(found)) % found.num_groups)

    patch.setattr(rollout_sampler.RolloutSampler, "_respond", respond)


def whitened_by_row(patch):
    def whiten(values, mask, **other):
        return torch.stack([made(row[None], one[None])[0] for row, one in zip(values, mask)])

    made = ops.whiten
    patch.setattr(ppo.ops, "whiten", whiten)


def no_kl(patch):
    made = kl.token_rewards
    patch.setattr(kl, "token_rewards", lambda rollout, scores, coeff, *more: made(rollout, scores, 0.0, *more))


# --------------------------------------------------------------------------------------------------- tokens and samples
def masked(patch, change):
    """Another mask of what was sampled."""
    made = rollout.make_rollout

    def make(*given):
        found = made(*given)
        return dataclasses.replace(found, action_mask=change(found) & found.attention_mask[:, 1:])

    patch.setattr(rollout, "make_rollout", make)


def mask_late(patch):
    masked(patch, lambda batch: moved(batch.action_mask, 1))


def mask_early(patch):
    masked(patch, lambda batch: moved(batch.action_mask, -1))


def prompts_trained(patch):
    masked(patch, lambda batch: batch.attention_mask[:, 1:])


def one_seed(patch):
    made = rollout_sampler.RolloutSampler._draw

    def draw(sampler, *given):
        rows, noise = made(sampler, *given)
        return rows, noise[:: sampler.responses].repeat_interleave(sampler.responses, 0)

    patch.setattr(rollout_sampler.RolloutSampler, "_draw", draw)


def sharp_samples(patch):
    made = sampling.inverse_cdf
    patch.setattr(sampling, "inverse_cdf", lambda probs, *given: made(probs.pow(4), *given))


def end_dropped(patch):
    made = rollout.sampled_batch

    def batch(prompts, sampled, pad_id):
        for ids, values, cut in zip(sampled.responses, sampled.logprobs, sampled.truncated):
            if not cut and len(ids) > 1:
                ids.pop(), values.pop()
        return made(prompts, sampled, pad_id)

    patch.setattr(rollout, "sampled_batch", batch)


def stale_sampler(patch):
    made = rollout.generate_rollout
    patch.setattr(rollout_sampler, "generate_rollout", lambda model, other, *given: made(other, other, *given))


# ----------------------------------------------------------------------------------------------------- losses, weights
def by_row(patch):
    made = policy_losses.token_weights

    def weights(*given):
        return made(*given[:3], "sequence", *given[4:])

    patch.setattr(policy_losses, "token_weights", weights)


def padding_counted(patch):
    made = policy_losses.token_weights

    def weights(mask, *given):
        return made(mask, *given) * mask.sum() / (len(mask) * mask.any(0).sum())

    patch.setattr(policy_losses, "token_weights", weights)


def another_reference(patch):
    made = reference.score_rows
    patch.setattr(reference, "score_rows", lambda *given: made(*given) * 1.1)


def never_steps(patch):
    patch.setattr(torch.optim.AdamW, "step", lambda *given, **named: None)


def steps_lost(patch):
    never_steps(patch)


# ------------------------------------------------------------------------------------------------------------- teachers
def forward_kl(patch):
    values(patch, lambda student, teacher, ids: (teacher.exp() * (teacher - student)).sum(-1))


def k3(patch):
    def of_samples(student, teacher, ids):
        return ops.kl_k3(*(one.gather(-1, ids[:, None])[:, 0] for one in (student, teacher)))

    values(patch, of_samples)


def unshifted(patch):
    values(patch, lambda student, teacher, ids: (student.exp() * (student - teacher.roll(1, 0))).sum(-1))


def values(patch, formula):
    """Another divergence of each token."""
    made = lesson.judge_exactly

    def judge(logits_of_teacher, targets, beta):
        inner = made(logits_of_teacher, targets, beta)

        def judged(logits, rows):
            found = inner(logits, rows)
            student, teacher = (one.log_softmax(-1) for one in (logits, logits_of_teacher(rows)))
            return found._replace(kl=formula(student, teacher, targets[rows]))

        return judged

    patch.setattr(lesson, "judge_exactly", judge)


# ---------------------------------------------------------------------------------------------------------------- tests
PLANTS = {
    std_with_n: Plant("grpo", GRPO, "TRL AsyncGRPO, ddof 0", {"std with n"}),
    unscored_as_zero: Plant("grpo", [*GRPO, "--reward_function=helpers.rewards:every_other"], "an exception of an "
                            "environment scored as 0", {"unscored rows taken as 0"}),
    rewards_in_another_order: Plant("grpo", GRPO, "TRL#5446, results in another order", {"rewards of other rows"}),
    groups_mixed: Plant("grpo", GRPO, "agent-lightning#489", {"prompts of a group differ"}),
    whitened_by_row: Plant("ppo", PPO, "design 6", {"whitened per sequence"}),
    no_kl: Plant("ppo", PPO, "KL logged, not applied", {"KL left out, whitened"}),
    mask_late: Plant("grpo", GRPO, "unsloth#5673", {"mask one late"}),
    mask_early: Plant("grpo", GRPO, "verl#6921", set()),
    prompts_trained: Plant("grpo", GRPO, "unsloth#5673, masks ignored", set()),
    one_seed: Plant("grpo", GRPO, "verl, SGLang: one seed for a group", {"members share their noise"}),
    sharp_samples: Plant("distill", DISTILL, "GOLD samples at .9, top_p .95", {"samples too likely for the policy"}),
    end_dropped: Plant("grpo", GRPO, "SkyRL#758, verl#6921", {"end token missing"}),
    stale_sampler: Plant("grpo", [*GRPO, "--init_kl_coeff=0.1"], "SkyRL", {"weights of another version"}),
    steps_lost: Plant("reflect_rl", [], "unsloth#5230", {"weights did not change"}),
    by_row: Plant("grpo", GRPO, "verl#7580", {"aggregation sequence"}),
    padding_counted: Plant("grpo", GRPO, "TRL, padded mean", {"padding counted"}),
    another_reference: Plant("dpo", LONG[-1:], "adapter missing in the reference", {"reference is not the start"}),
    never_steps: Plant("grpo", GRPO, "unsloth#5230", {"weights did not change"}),
    forward_kl: Plant("distill", DISTILL, "verl, k3 back-propagated", {"forward KL"}),
    k3: Plant("distill", DISTILL, "torchrl, verl", {"k3 of the samples"}),
    unshifted: Plant("distill", DISTILL, "TRL#5905, GOLD without the causal shift", {"teacher one late"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory, cafe_data, talk_data, tokenizer):
    return TinyRuns(tmp_path_factory.mktemp("plants"), cafe_data, talk_data, tokenizer)


QUICK = (by_row, whitened_by_row, k3)
EACH = [pytest.param(one, id=one.__name__, marks=() if one in QUICK else pytest.mark.slow) for one in PLANTS]


@pytest.mark.parametrize("change", EACH)
def test_a_planted_fault_is_found(made, tmp_path, monkeypatch, change):
    plant = PLANTS[change]
    change(monkeypatch)
    directory = main_of(plant.program)(made.flags(plant.program, tmp_path, *plant.flags, steps=4))
    monkeypatch.undo()
    found = [one.fault for one in check_run.run(check_run.CheckRunArgs(run=directory)) if one.says == "wrong"]
    assert {fault.partition(":")[0] for fault in found} & plant.names if plant.names else found
