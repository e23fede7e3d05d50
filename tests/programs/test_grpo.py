"""GRPO: one gradient however a rollout is cut, baselines of whole groups, and groups that are replaced."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, RunOfOneStep, assert_same_gradients, last_checkpoint, metrics, rows_of, weights
from helpers.errors import error_naming
from helpers.rollouts import rollout_of

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.fields import check_args
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import joined
from lightrlhf.data.scores import Scores
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.generation.rollout_metrics import row_means
from lightrlhf.grpo import (
    GRPOArgs,
    GRPOBatch,
    estimate_advantages,
    find_equal_groups,
    main,
    minibatches,
    penalize_length,
    update_minibatch,
)
from lightrlhf.maths.groups import ADVANTAGES
from lightrlhf.maths.policy_losses import AGGREGATIONS, LOSSES
from lightrlhf.models.loading import load_policy
from lightrlhf.models.probes import enable_packing
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.rewards.scorers import FunctionScorer
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.training.ranks import LocalRanks

EOS = 1
PROMPT_ROWS = rows_of(6, 9, 3)
PROMPTS = [PROMPT_ROWS[i] for i in (0, 0, 0, 1, 1, 1, 1, 2)]
GROUP = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])  # of three, four and one response
RESPONSES = [[*row, EOS] for row in rows_of(6, 2, 4, 1, 3, 5, 2, 4)]


def grpo_args(**changes) -> GRPOArgs:
    sizes = {"num_generations": 4, "rollout_size": 2, "mini_batch_size": 8, "micro_batch_size": 8}
    given = {"data_dir": "x", "model_name": "tiny", "reward_function": ["x:y"], "max_new_tokens": 12, **sizes}
    return GRPOArgs(**(given | changes))


def rollout():
    return dataclasses.replace(rollout_of(PROMPTS, RESPONSES), group=GROUP, num_groups=3)


def scores_of(*parts: list[float]) -> Scores:
    table = torch.tensor(parts).T  # (B, R)
    names = tuple(f"reward_{i}" for i in range(len(parts)))
    weights = torch.ones(len(parts), dtype=torch.float64)
    return Scores(total=table.sum(1), parts=table, names=names, weights=weights, failures={"timeouts": 0})


def batch_of(args: GRPOArgs, seed: int = 0) -> GRPOBatch:
    torch.manual_seed(seed)
    scores = scores_of([1.0, 0.0, 0.5, 2.0, math.nan, 0.25, 1.0, 3.0])
    return estimate_advantages(args, rollout(), scores)


@pytest.fixture(scope="module")
def policy(base_model, tokenizer):
    args = ModelArgs(model_name=str(base_model), disable_dropout=True)
    policy = load_policy(str(base_model), args, tokenizer, "--model_name")
    enable_packing(policy)
    assert policy.packs
    return policy


def gradients_of(policy, args: GRPOArgs, batch: GRPOBatch) -> dict[str, torch.Tensor]:
    run = RunOfOneStep(args, policy=policy)
    policy.zero_grad()
    update_minibatch(run, policy, dataclasses.replace(batch), args.load_loss())
    policy.zero_grad()
    return run.gradients["policy"]


SETTINGS = [{"aggregation": name} for name in AGGREGATIONS]
SETTINGS += [{"loss_type": name} for name in LOSSES]
SETTINGS += [{"advantage": name} for name in ADVANTAGES]
SETTINGS += [
    {"importance_sampling_level": "sequence", "aggregation": "sequence"},
    {"init_kl_coeff": 0.1, "kl_placement": "loss"},
    {"init_kl_coeff": 0.1},
    {"init_kl_coeff": 0.1, "advantage": "none", "normalize_advantages": True},
    {"overlong_filter": True},
    {"entropy_coeff": 0.3, "aggregation": "sequence"},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_gradient_does_not_depend_on_micro_batches_padding_or_sharing(changes, policy):
    whole = grpo_args(**changes)
    batch = batch_of(whole)
    expected = gradients_of(policy, whole, batch)
    for size in (1, 3):
        cut = dataclasses.replace(whole, micro_batch_size=size, mini_batch_size=size * 2)
        assert_same_gradients(gradients_of(policy, cut, batch), expected, atol=2e-6)
    alone = dataclasses.replace(batch, input_ids=batch.input_ids)
    policy.packs = False
    try:
        assert_same_gradients(gradients_of(policy, whole, alone), expected, atol=2e-6)
    finally:
        policy.packs = True
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    assert_same_gradients(gradients_of(policy, whole, batch.select(order)), expected, atol=2e-6)


def in_two_rows(rollout, scores: Scores):
    """The same responses, two of them cut in two rows: the second has the first one's actions as its context."""
    rows, episode = [0, 0, 1, 2, 3, 4, 5, 5, 6, 7], torch.tensor([0, 0, 1, 2, 3, 4, 5, 5, 6, 7])
    cut = dataclasses.replace(rollout.select(torch.tensor(rows)), episode=episode)
    for first in (0, 6):
        places = cut.action_mask[first].nonzero()[:, 0]
        cut.action_mask[first, places[1:]] = False
        cut.attention_mask[first, places[1] + 1 :] = False
        cut.action_mask[first + 1, places[0]] = False
    cut.logprobs, cut.ref_logprobs = cut.logprobs * cut.action_mask, cut.ref_logprobs * cut.action_mask
    return cut, scores.select(torch.tensor(rows))


OF_ROWS = ("overlong_filter", "importance_sampling_level", "normalize_advantages")  # what sees rows, not episodes


@pytest.mark.parametrize("changes", [one for one in SETTINGS if not {*OF_ROWS} & {*one}], ids=str)
def test_an_episode_of_several_rows_counts_once(changes, policy):
    args, given = grpo_args(**changes), scores_of([1.0, 0.0, 0.5, 2.0, math.nan, 0.25, 1.0, 3.0])
    torch.manual_seed(0)
    made = rollout()
    whole, cut = estimate_advantages(args, made, given), estimate_advantages(args, *in_two_rows(made, given))
    assert len(cut) == 10 and torch.equal(cut.advantages.amax(1)[[0, 2, 3]], whole.advantages.amax(1)[:3])
    assert_same_gradients(gradients_of(policy, args, cut), gradients_of(policy, args, whole), atol=2e-6)
    assert_same_gradients(
        gradients_of(policy, dataclasses.replace(args, micro_batch_size=1), cut), gradients_of(policy, args, whole)
    )


def test_an_own_advantage_and_the_scoring_see_an_episode_once():
    args = grpo_args(advantage="helpers.rewards:median_advantage")
    given = scores_of([1.0, 0.0, 0.5, 2.0, 0.75, 0.25, 1.0, 3.0])
    made = rollout()
    cut, scores = in_two_rows(made, given)
    whole = estimate_advantages(args, made, given).advantages.sum(1) / made.action_mask.sum(1)
    found = estimate_advantages(args, cut, scores).advantages.sum(1) / cut.action_mask.sum(1)
    assert torch.equal(found, whole[cut.episode]) and whole.abs().max() > 0
    seen: list[int] = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.extend(map(len, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    cut.texts = [("", "")] * len(cut)
    scored = Rewards([FunctionScorer(reward)], ("reward",), torch.ones(1))(cut)
    assert seen == [len(row) for row in RESPONSES] and scored.total.tolist() == [seen[i] for i in cut.episode]


def test_minibatches_keep_episodes_whole():
    torch.manual_seed(0)
    cut, scores = in_two_rows(rollout(), scores_of([1.0, 0.0, 0.5, 2.0, math.nan, 0.25, 1.0, 3.0]))
    batch = estimate_advantages(grpo_args(), cut, scores)
    parts = [part.episode.tolist() for part in minibatches(batch, 1, 8, torch.Generator().manual_seed(1))]
    assert sorted(map(len, parts)) == [1, 1, 1, 1, 1, 1, 2, 2] and all(len({*part}) == 1 for part in parts)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.3])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_ranks_add_up_to_the_gradient_of_one(name, entropy_coeff, policy):
    """Group 1 lies on both ranks; each rank's sums are completed by those of the other."""
    args = grpo_args(aggregation=name, entropy_coeff=entropy_coeff)
    batch = batch_of(args)
    expected = gradients_of(policy, args, batch)
    parts = [slice(0, 5), slice(5, 8)]
    sums: list[list[torch.Tensor]] = [[], []]

    class Rank(LocalRanks):
        def __init__(self, index: int, whole: bool) -> None:
            super().__init__()
            self.index, self.whole, self.calls = index, whole, 0

        def sum(self, value):
            if not self.whole:
                sums[self.index].append(value.clone())
                return value
            self.calls += 1
            return sums[0][self.calls - 1] + sums[1][self.calls - 1]

    found: dict[str, torch.Tensor] = {}
    for whole in (False, True):
        for index, part in enumerate(parts):
            run = RunOfOneStep(args, policy=policy)
            run.ranks = Rank(index, whole)
            policy.zero_grad()
            update_minibatch(run, policy, batch.select(part), args.load_loss())
            policy.zero_grad()
            if whole:
                for key, value in run.gradients["policy"].items():
                    found[key] = found.get(key, 0) + value
    assert_same_gradients(found, expected, atol=2e-6)


# -------------------------------------------------------------------------------------------------------- advantages
def test_the_advantage_of_an_unscored_response_is_zero_and_it_is_out_of_the_loss():
    batch = batch_of(grpo_args())
    assert not batch.action_mask[4].any() and batch.action_mask[3].any()
    assert batch.advantages[4].abs().max() == 0
    assert batch.advantages[7].abs().max() == 0 and batch.action_mask[7].any()  # alone in its group


def test_every_token_has_the_advantage_of_its_response():
    batch = batch_of(grpo_args(advantage="mean"))
    first = batch.advantages[0][batch.action_mask[0]]
    assert first.tolist() == pytest.approx([0.5] * len(RESPONSES[0]))
    assert batch.advantages[~batch.action_mask].abs().max() == 0


def test_ranks_give_a_function_of_ones_own_whole_groups():
    """Group 1 lies on both ranks, and has a response without a score."""
    scores = [1.0, 0.0, 0.5, 2.0, math.nan, 0.25, 1.0, 3.0]
    args = grpo_args(advantage="helpers.rewards:median_advantage")
    whole, made = estimate_advantages(args, rollout(), scores_of(scores)), rollout()
    assert whole.advantages.amax(1).tolist() == [0.5, 0, 0, 1, 0, 0, 0, 0]
    assert whole.advantages.amin(1).tolist() == [0, -0.5, 0, 0, 0, -0.75, 0, 0]
    parts = [slice(0, 5), slice(5, 8)]

    class Rank(LocalRanks):
        def gather(self, value):
            return [(GROUP[part].tolist(), scores[part]) for part in parts]

    for index, part in enumerate(parts):
        ranks = Rank()
        ranks.rank = index
        found = estimate_advantages(args, made.select(part), scores_of(scores[part]), None, ranks).advantages
        assert torch.equal(found, whole.advantages[part, : found.shape[1]])


def test_responses_without_an_advantage_learn_from_the_entropy_alone(policy):
    """All scores are equal: without the bonus there is no gradient, with it entropy rises."""
    for coefficient in (0.0, 0.3):
        args = grpo_args(entropy_coeff=coefficient)
        gradients = gradients_of(policy, args, estimate_advantages(args, rollout(), scores_of([1.0] * 8)))
        assert any(gradient.abs().max() > 0 for gradient in gradients.values()) == bool(coefficient)


def test_a_kl_in_the_reward_is_not_divided_by_the_deviation():
    args = grpo_args(init_kl_coeff=0.3)
    torch.manual_seed(0)
    made = rollout()
    kl = ((made.logprobs - made.ref_logprobs) * made.action_mask).sum(1)[:3]
    batch = batch_of(args)
    plain = batch_of(grpo_args())
    expected = plain.advantages[:3].amax(1) + plain.advantages[:3].amin(1) - 0.3 * (kl - kl.mean())
    found = batch.advantages[:3].amax(1) + batch.advantages[:3].amin(1)
    assert torch.allclose(found, expected, atol=1e-5)


def test_rewards_to_go_and_whitening_make_reinforce_plus_plus():
    args = grpo_args(advantage="none", normalize_advantages=True, init_kl_coeff=0.2)
    torch.manual_seed(0)
    made = rollout()
    batch = batch_of(args)
    scores = [1.0, 0.0, 0.5, 2.0, math.nan, 0.25, 1.0, 3.0]
    returns = []
    for row, score in enumerate(scores):
        if math.isnan(score):
            continue
        places = made.action_mask[row].nonzero()[:, 0].tolist()
        penalties = [-0.2 * float(made.logprobs[row, t] - made.ref_logprobs[row, t]) for t in places]
        returns += [sum(penalties[i:]) + score for i in range(len(places))]
    values = torch.tensor(returns, dtype=torch.float64)
    expected = (values - values.mean()) / values.std(correction=0)
    assert batch.advantages[batch.action_mask].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_whitened_advantages_of_equal_scores_are_exactly_zero():
    args = grpo_args(advantage="none", normalize_advantages=True)
    many = dataclasses.replace(rollout_of(PROMPTS * 12, RESPONSES * 12), group=GROUP.repeat(12), num_groups=3)
    for score in (0.1, 0.2, 0.3, 0.6, 0.7, 0.9):
        batch = estimate_advantages(args, many, scores_of([score] * 96))
        assert batch.advantages.abs().max() == 0


def test_each_reward_can_be_normalised_before_the_sum():
    """GDPO: a reward of 1,000 and one of 1 weigh the same; one that does not apply adds nothing."""
    args = grpo_args(normalize_each_reward=True, advantage="mean")
    large, small = [1000.0, 0.0, 0.0, 0, 0, 0, 0, 0], [0.0, 1.0, math.nan, 0, 0, 0, 0, 0]
    scores = scores_of(large, small)
    total = torch.tensor([1000.0, 1.0, 0, 0, 0, 0, 0, 0])
    scores = dataclasses.replace(scores, total=total, weights=torch.tensor([1.0, 2.0]))
    batch = estimate_advantages(args, rollout(), scores)
    found = batch.advantages[:3, :].sum(1) / batch.action_mask[:3].sum(1)
    root = 0.5**0.5
    third = 3**0.5 / 3
    expected = torch.tensor([2 * third - 2 * root, -third + 2 * root, -third])
    assert torch.allclose(found, expected - expected.mean(), atol=1e-4)


@pytest.mark.parametrize("advantage", ["std", "mean", "batch_std", "rloo"])
def test_a_response_whose_other_reward_failed_is_in_no_baseline(advantage):
    """As if it had not been sampled; nor is a response in one whose reward, of weight 0, is beyond float32."""
    accuracy, failing = [0.0, 0.0, 1.0, 0.0, 1.0], [0.2, 0.9, 0.4, 0.5, math.nan]
    one_group = {"group": torch.zeros(5, dtype=torch.int64), "num_groups": 1}
    whole = dataclasses.replace(rollout_of([[5]] * 5, [[6]] * 5), **one_group)
    args = grpo_args(normalize_each_reward=True, advantage=advantage)

    def found(rollout, weights: tuple[float, ...], *rewards: list[float]) -> list[float]:
        scores = scores_of(*rewards)
        scores = dataclasses.replace(scores, total=scores.parts[:, :2].sum(1), weights=torch.tensor(weights))
        return estimate_advantages(args, rollout, scores).advantages[:, 0].tolist()

    expected = found(whole.select(slice(0, 4)), (1.0, 1.0), accuracy[:4], failing[:4])
    assert found(whole, (1.0, 1.0), accuracy, failing) == pytest.approx([*expected, 0.0])
    logged = [math.inf, 0.0, 0.0, 0.0, 0.0]
    assert found(whole, (1.0, 1.0, 0.0), accuracy, failing, logged) == pytest.approx([*expected, 0.0])
    if advantage == "std":
        assert expected == pytest.approx([-1.221, 0.690, 0.933, -0.402], abs=1e-3)


def test_normalised_rewards_decide_whether_a_group_has_a_signal():
    """The sums of group 0 are equal, those of the normalised rewards are not."""
    scores = scores_of([2.0, 0.0, 1.0, 0, 0, 0, 0, 0], [-2.0, 0.0, -1.0, 0, 0, 0, 0, 0])
    scores = dataclasses.replace(scores, weights=torch.tensor([1.0, 2.0]))
    for changes, expected in (({}, [0, 1, 2]), ({"normalize_each_reward": True}, [1, 2])):
        args = grpo_args(**changes)
        assert find_equal_groups(RunOfOneStep(args), rollout(), scores).tolist() == expected


def test_a_score_beyond_float32_is_no_score():
    scores = scores_of([math.inf, 0.0, 0.5, 0, 0, 0, 0, 0])
    batch = estimate_advantages(grpo_args(), rollout(), scores)
    assert not batch.action_mask[0].any() and batch.advantages.isfinite().all() and batch.advantages[2].max() > 0


def test_length_is_penalised_softly_and_cut_responses_can_be_left_out():
    args = grpo_args(max_new_tokens=6, overlong_buffer=4, overlong_penalty=2.0, missing_eos_penalty=1.0)
    made = dataclasses.replace(rollout(), truncated=torch.tensor([False, True] + [False] * 6))
    lengths = torch.tensor([len(row) for row in RESPONSES])
    expected = -2.0 * ((lengths - 2) / 4).clamp(0, 1) - made.truncated.float()
    assert torch.allclose(penalize_length(args, made, torch.zeros(8)), expected)
    filtered = estimate_advantages(grpo_args(overlong_filter=True), made, scores_of([1.0, 0.0, 0.5, 0, 0, 0, 0, 0]))
    assert not filtered.action_mask[1].any() and filtered.advantages[0].max() > 0


def test_groups_without_two_scores_are_found():
    run = RunOfOneStep(grpo_args())
    equal = scores_of([1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 0.0, 5.0])
    assert find_equal_groups(run, rollout(), equal).tolist() == [0, 2]
    unscored = scores_of([1.0, math.nan, math.nan, 0.0, 1.0, 0.0, 0.0, 5.0])
    assert find_equal_groups(run, rollout(), unscored).tolist() == [0, 2]


def test_rollouts_of_different_widths_are_joined():
    wide, narrow = rollout(), dataclasses.replace(rollout_of([[5, 6]], [[7, EOS]]), group=torch.tensor([3]))
    both = joined([narrow, wide])
    assert both.input_ids.shape == (9, wide.input_ids.shape[1]) and both.row.tolist() == [0, *range(8)]
    assert both.response_ids() == [[7, EOS], *RESPONSES] and both.group.tolist() == [3, *GROUP.tolist()]
    assert not both.attention_mask[0, 4:].any() and both.logprobs[0, 4:].abs().max() == 0


def test_minibatches_keep_groups_together_and_hold_every_row_once():
    batch = batch_of(grpo_args())
    parts = list(minibatches(batch, 4, 8, torch.Generator().manual_seed(1)))
    assert len(parts) == 2
    seen = torch.cat([part.logprobs[part.action_mask] for part in parts])
    assert sorted(seen.tolist()) == sorted(batch.logprobs[batch.action_mask].tolist())
    assert sum(len(set(part.group.tolist())) for part in parts) <= 3 + 1  # one cut cuts at most one group


def test_a_mean_score_as_divisor_refuses_scores_below_zero():
    with error_naming(RunFailure, "maxrl", "-1.0"):
        estimate_advantages(grpo_args(advantage="maxrl"), rollout(), scores_of([-1.0] + [0.0] * 7))


# ---------------------------------------------------------------------------------------------------------- programs
RUN = ["--num_generations", "4", "--rollout_size", "4", "--mini_batch_size", "8", "--micro_batch_size", "4"]
RUN += ["--max_new_tokens", "6", "--max_steps", "2", "--log_interval", "1", "--learning_rate", "1e-2", *CPU]
RUN += ["--eval_interval", "0"]


def flags(cafe_data, base_model, tmp_path, *more) -> list[str]:
    given = ["--data_dir", cafe_data, "--model_name", base_model, "--log_dir", tmp_path, *RUN, *more]
    return [str(flag) for flag in given]


def test_the_ratio_is_one_and_the_kl_zero_before_the_first_update(cafe_data, base_model, tmp_path):
    more = ["--reward_function", "helpers.rewards:vowels", "--init_kl_coeff", "0.1", "--mini_batch_size", "16"]
    first = metrics(main(flags(cafe_data, base_model, tmp_path, *more)))[0]
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4) and first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["policy/clipfrac"] == 0 and first["policy/loss"] == pytest.approx(0, abs=1e-2)


@pytest.mark.slow
def test_what_is_scored_by_a_pass_in_bf16_agrees_with_a_pass(cafe_data, base_model, tmp_path):
    """Without a reference, too, whose place a pass of packed groups would take, which rounds differently."""
    more = ["--reward_function", "helpers.rewards:vowels", "--precision", "bf16-mixed", "--max_steps", "1"]
    assert metrics(main(flags(cafe_data, base_model, tmp_path, *more)))


@pytest.mark.slow
def test_without_a_kl_there_is_no_reference_and_no_kl_is_logged(cafe_data, base_model, tmp_path):
    logged = metrics(main(flags(cafe_data, base_model, tmp_path, "--reward_function", "helpers.rewards:vowels")))
    assert "objective/kl" not in logged[0]
    assert logged[0]["reward/vowels"] == pytest.approx(logged[0]["objective/score"])


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_same_and_the_members_of_a_group_differ(cafe_data, base_model, tmp_path):
    """A seed for each request, as reproducible modes elsewhere have it, makes the K responses of a prompt one text."""
    more = ["--reward_function", "helpers.rewards:vowels", "--save_interval", "1", "--log_rollouts", "16"]
    run = Path(main(flags(cafe_data, base_model, tmp_path, *more)))
    sampled, end = read_jsonl(run / "rollouts.jsonl"), weights(last_checkpoint(run))
    groups: dict[tuple[int, str], list[str]] = {}
    for row in sampled:
        groups.setdefault((row["step"], row["prompt"]), []).append(row["response"])
    assert min(len(set(texts)) for texts in groups.values()) > 1
    shutil.rmtree(run / "checkpoint-000002")
    main(["--resume_from", str(run)])
    assert read_jsonl(run / "rollouts.jsonl") == sampled and weights(last_checkpoint(run)) == end


@pytest.mark.slow
def test_equal_scores_change_nothing(cafe_data, base_model, tmp_path):
    logged = metrics(main(flags(cafe_data, base_model, tmp_path, "--reward_function", "helpers.rewards:constant")))
    assert [row["objective/zero_std_ratio"] for row in logged] == [1, 1]
    assert [row["policy/grad_norm"] for row in logged] == [0, 0]
    assert "policy/ratio" not in logged[0]  # a mean over nothing


@pytest.mark.slow
def test_groups_without_a_signal_are_replaced_at_most_so_often(cafe_data, base_model, tmp_path):
    more = ["--reward_function", "helpers.rewards:constant", "--resample_rounds", "3"]
    row = metrics(main(flags(cafe_data, base_model, tmp_path, *more)))[0]
    assert row["sampling/prompts"] == 4 * 4 and row["sampling/wasted_tokens"] > 0


@pytest.mark.slow
def test_a_loss_of_ones_own_by_import_path(cafe_data, base_model, tmp_path, capsys):
    scorer = ["--reward_function", "helpers.rewards:vowels"]
    own = metrics(
        main(flags(cafe_data, base_model, tmp_path / "own", *scorer, "--loss_type", "helpers.rewards:own_loss"))
    )
    plain = metrics(main(flags(cafe_data, base_model, tmp_path / "plain", *scorer, "--loss_type", "reinforce")))
    assert own[1]["objective/score"] == plain[1]["objective/score"]
    assert own[1]["policy/loss"] == pytest.approx(plain[1]["policy/loss"])


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"num_generations": 1}, ["--advantage std", "--num_generations"]),
        ({"mini_batch_size": 16, "micro_batch_size": 8}, ["--mini_batch_size 16", "8"]),
        ({"loss_type": "cispoo"}, ["--loss_type cispoo"]),
        ({"advantage": "median"}, ["--advantage median"]),
        ({"overlong_buffer": 12}, ["--overlong_buffer 12", "--max_new_tokens 12"]),
    ],
)
def test_flags_that_cannot_be_meant_are_one_line(given, facts):
    with error_naming(ValueError, *facts):
        grpo_args(**given)


@pytest.mark.parametrize(
    ("name", "fact"), [("mean_loss", "(2, 3)"), ("constant_loss", "gradient"), ("loss_of_two", "TypeError")]
)
def test_a_loss_that_is_none_is_refused_before_the_model_is_loaded(name, fact):
    with error_naming(UsageError, f"--loss_type helpers.rewards:{name}", fact):
        grpo_args(loss_type=f"helpers.rewards:{name}").load_loss()


@pytest.mark.slow
def test_an_advantage_of_ones_own_by_import_path(cafe_data, base_model, tmp_path):
    """Those in rollouts.jsonl are of the scores there: above the median positive, below it negative."""
    more = ["--reward_function", "helpers.rewards:vowels", "--advantage", "helpers.rewards:median_advantage"]
    run = main(flags(cafe_data, base_model, tmp_path, *more, "--log_rollouts", "16"))
    rows = read_jsonl(run + "/rollouts.jsonl")
    assert len(rows) == 32
    for step, group in {(row["step"], row["group"]) for row in rows}:
        members = [row for row in rows if (row["step"], row["group"]) == (step, group)]
        median = sorted(row["score"] for row in members)[1]
        for row in members:
            assert row["advantages"] == pytest.approx([row["score"] - median] * len(row["mask"]), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("one_advantage", "(2, 4)"),
        ("advantage_without_a_number", "finite"),
        ("loss_of_two", "TypeError"),
        ("missing", "missing"),
    ],
)
def test_an_advantage_that_is_none_is_refused_before_the_model_is_loaded(name, fact):
    with error_naming(UsageError, f"--advantage helpers.rewards:{name}", fact):
        check_args(grpo_args(advantage=f"helpers.rewards:{name}", reward_function=["helpers.rewards:vowels"]), GRPOArgs)


def test_a_rank_without_rows_samples_and_scores_nothing(policy, tokenizer):
    """As where fewer responses are replaced, or fewer prompts held out, than there are ranks."""

    def noise(rank: int, world_size: int) -> torch.Tensor:
        ranks = LocalRanks(seed=3)
        ranks.rank, ranks.world_size = rank, world_size
        return ranks.noise(1, 5, 7)

    assert noise(0, 2).shape == (0, 5) and torch.equal(noise(1, 2), noise(0, 1))

    def rewards(prompts, completions, **columns):
        return [len(max(completions))] * len(completions)  # it expects some

    empty = generate_rollout(policy, policy, [], grpo_args(), tokenizer, noise(0, 2), 4)
    scored = Rewards([FunctionScorer(rewards)], ("rewards",), torch.ones(1))(empty)
    assert len(empty) == 0 and scored.total.shape == (0,) and scored.parts.shape == (0, 1)
    assert len(joined([rollout(), empty])) == len(rollout())
    assert math.isnan(row_means(RunOfOneStep(grpo_args()), [empty.lengths()], empty.truncated)[0])


@pytest.mark.slow
def test_adapters_at_a_rate_for_full_tuning_are_warned_of(cafe_data, base_model, tmp_path, capsys):
    scorer = ["--reward_function", "helpers.rewards:vowels", "--finetune_mode", "lora", "--max_steps", "1"]
    main(flags(cafe_data, base_model, tmp_path / "low", *scorer, "--learning_rate", "1e-6"))
    assert "warning: --learning_rate 1e-06 suits full fine-tuning" in capsys.readouterr().out
    main(flags(cafe_data, base_model, tmp_path / "usual", *scorer, "--learning_rate", "1e-4"))
    assert "suits full fine-tuning" not in capsys.readouterr().out
