"""Correct steps that are unusual: nothing in them may be called wrong."""

import json

import numpy as np
import pytest
import torch
from helpers.steps import EOS, PROMPT, RESPONSE, float32, pair_step, policy_step, sft_step

from lightrlhf.check_run import check_steps
from lightrlhf.checks.advantages import check_advantages
from lightrlhf.checks.step import Missing, Step, from_rows, read_steps
from lightrlhf.checks.weights import texts_of
from lightrlhf.maths import ops, policy_losses


def verdicts_of(step: Step):
    return {one.name: one for one in check_steps([step])}


def faults_of(arrays, config):
    """{check: fault} of what is called wrong."""
    return {name: one.fault for name, one in verdicts_of(Step(arrays, config)).items() if one.says == "wrong"}


def test_answers_of_many_prompts_that_are_alike_by_chance_are_no_shared_noise():
    groups, size, answers = 200, 4, 100
    ids = np.random.default_rng(0).integers(answers, size=(groups * size, 1))
    arrays = {"input_ids": ids, "loss_mask": ids >= 0, "group": np.arange(groups * size) // size}
    arrays["old_logprobs"] = np.full(ids.shape, -np.log(answers))
    members = verdicts_of(Step(arrays, {}))["members"]
    assert members.says == "right" and "have a twin" in members.evidence


def test_labels_that_rows_of_other_lengths_lack_are_not_trained(tmp_path):
    rows = [{"input_ids": [3, 4, 5, 6], "labels": [5, 6]}, {"input_ids": [3, 4, 6], "labels": [-100, 4, 6]}]
    assert from_rows(rows, {}, "rows").mask().tolist() == [[False, False, True, True], [False, True, True, False]]
    np.savez(tmp_path / "step.npz", input_ids=[[3, 4, 5]], labels=[[-100, 5]], config=json.dumps({}))
    assert read_steps(str(tmp_path / "step.npz"))[0].mask().tolist() == [[False, False, True]]


def test_rows_of_prompts_and_responses_of_other_lengths_are_whole_texts(tmp_path):
    rows = [{"prompt_ids": [3, 4, 5], "completion_ids": [6, EOS], "loss_mask": [1, 1]}]
    rows += [{"prompt_ids": [0, 7], "prompt_mask": [0, 1], "completion_ids": [8, 9, EOS], "loss_mask": [1, 1, 1]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (step,) = read_steps(str(tmp_path))
    assert [(one.ids, one.places) for one in texts_of(step, 50)] == [
        ([3, 4, 5, 6, EOS], [3, 4]),
        ([7, 8, 9, EOS], [1, 2, 3]),
    ]
    assert step.responses().equal(step.mask()) and "wrong" not in {one.says for one in verdicts_of(step).values()}
    (own,) = from_rows([rows[1] | {"attention_mask": [0, 1, 1, 1, 1]}], {}, "rows").attended()
    assert own.tolist() == [False, True, True, True, True]


def test_rewards_of_several_functions_are_read_in_rows():
    rows = [{"input_ids": [3, EOS], "rewards": one} for one in ([1.0, 0.5, 0.0], [None, 2.0, None], [None] * 3)]
    step = from_rows(rows, {"reward_weights": [1, 2, 3]}, "rows")
    assert step.scores().nan_to_num(-1).tolist() == [2, 4, -1] and step.width == 2


def test_end_tokens_that_are_none_are_not_missed():
    arrays, config = sft_step()
    assert "mask" not in faults_of(arrays | {"truncated": np.zeros(16)}, config | {"eos_token_id": []})


@pytest.mark.parametrize("kind", ["std", None])
def test_a_row_without_a_trained_token_is_in_the_baseline_alone(kind):
    arrays, config = policy_step()
    arrays["loss_mask"] = arrays["loss_mask"] & (np.arange(16) != 5)[:, None]
    by_row, config["advantage"] = arrays["advantages"], kind
    arrays["advantages"] = by_row[:, None] * arrays["loss_mask"]
    assert check_advantages(Step(arrays, config)).says == "right"
    other = [
        check_advantages(Step(arrays | {"advantages": scale * arrays["advantages"]}, config)) for scale in (-1, 0.9)
    ]
    assert [one.fault for one in other] == ["sign", "scaled by 0.9"]
    del arrays["rewards"]
    arrays["given_advantages"] = np.where(np.arange(16) == 5, 7.0, by_row)
    assert check_advantages(Step(arrays, config)).says == "right"
    with pytest.raises(Missing):
        check_advantages(Step(arrays | {"loss_mask": arrays["loss_mask"] & False}, config))


@pytest.mark.parametrize("advantage, score", [("std", 3), ("batch_std", 3), ("maxrl", 0)])
def test_equal_scores_give_no_advantage(advantage, score):
    settings = {"num_generations": 5, "advantage": advantage}
    scores = np.repeat([3, score, 3, 3], 5).astype(np.float32)
    arrays = {"rewards": scores, "advantages": np.zeros(20, np.float32)}
    assert faults_of(arrays, settings) == {}
    arrays["advantages"][5:7] = 0.3, -0.3
    assert "advantages" in faults_of(arrays, settings)
    assert faults_of(arrays, settings | {"digits": 5}) == {}  # the log may have rounded scores that differ


def test_the_mean_of_equal_scores_may_be_rounded():
    rounded = np.full(14, 2.0**-24 / 1e-6, np.float32)  # (r - mean) / (0 + 1e-6), a mean of seven times 0.7 in float32
    arrays = {"rewards": np.full(14, 0.7, np.float32), "advantages": rounded}
    assert faults_of(arrays, {"num_generations": 7, "advantage": "std"}) == {}


@pytest.mark.parametrize("made", [policy_step(first_pass=True), sft_step()])
def test_sums_of_rows_cannot_tell_what_tokens_are_needed_for(made):
    arrays, config = made
    names = {name for name in arrays if name.endswith("logprobs") or name == "loss_slopes"}
    sums = {name: arrays[name].sum(1) for name in names}
    found = verdicts_of(Step(arrays | sums, config))
    needed = {"loss"} | ({"ratio", "kl"} if config["method"] == "grpo" else set())
    assert {found[name].evidence for name in needed} == {"needs new_logprobs of tokens"}
    alone = verdicts_of(Step(arrays | {name: sums[name] for name in names - {"new_logprobs"}}, config))["loss"]
    assert alone.says == ("right" if config["method"] == "sft" else "cannot tell")


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("aggregation", ["sequence", "sum", "constant"])
def test_rows_that_train_nothing_may_count_in_the_mean_over_rows(aggregation, counted):
    arrays, config = policy_step(aggregation=aggregation)
    trains = ~arrays["truncated"]
    arrays["loss_mask"] = arrays["loss_mask"] & trains[:, None]
    arrays["loss_slopes"] = arrays["loss_slopes"] * trains[:, None] / (1 if counted else trains.mean())
    del arrays["loss"]
    found = verdicts_of(Step(arrays, config))
    assert found["loss"].says == found["mask"].says == "right"
    assert ("empty rows counted" in found["loss"].evidence) == counted
    assert "loss" in faults_of(arrays | {"loss_slopes": arrays["loss_slopes"] * 2}, config)


@pytest.mark.parametrize("is_known_by", ["truncated", "settings"])
def test_a_step_whose_responses_were_all_left_out_cannot_be_told(is_known_by):
    arrays, config = policy_step(first_pass=True)
    arrays["loss_mask"] = arrays["loss_mask"] & False
    arrays |= {"loss": np.float32(0), "loss_slopes": arrays["loss_slopes"] * 0}
    assert faults_of(arrays, config)["mask"] == "nothing is trained"
    if is_known_by == "truncated":
        arrays["truncated"] = arrays["truncated"] | True
    else:
        config["mask_truncated"] = True
    found = verdicts_of(Step(arrays, config))
    assert "wrong" not in {one.says for one in found.values()}
    assert found["mask"].says == found["ratio"].says == "cannot tell"


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_line_break_that_a_template_writes_behind_the_end_may_be_trained(method):
    ids = np.array([[5, 6, 7, EOS, 9], [5, 6, 8, EOS, 9]])
    arrays = {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": np.arange(5)[None] + 0 * ids >= 2}
    arrays |= {"prompt_len": np.array([2, 2]), "truncated": np.array([0, 0])}
    assert faults_of(arrays, {"method": method, "eos_token_id": EOS}) == {}
    assert faults_of(arrays, {"method": "grpo", "eos_token_id": EOS}) == {"mask": "tokens after the end trained"}


@pytest.mark.parametrize("is_narrow", [True, False])
def test_labels_that_are_the_ids_do_not_count_their_first_token(is_narrow):
    arrays, config = sft_step()
    new, attended = arrays["new_logprobs"], arrays["attention_mask"]
    arrays["loss"] = np.float32(-new[:, 1:][attended[:, 1:]].mean())
    arrays = {name: arrays[name] for name in ("input_ids", "attention_mask", "new_logprobs", "loss")}
    arrays["labels"] = np.where(attended, arrays["input_ids"], -100)
    if is_narrow:
        arrays["new_logprobs"] = new[:, 1:]
        del arrays["input_ids"]
    assert verdicts_of(Step(arrays, config))["loss"].says == "right"


def test_arrays_that_begin_with_a_predicted_token_count_it():
    arrays, config = sft_step()
    new = arrays["new_logprobs"][:, PROMPT:]
    mask = arrays["loss_mask"][:, PROMPT:]
    assert (
        verdicts_of(Step({"new_logprobs": new, "loss_mask": mask, "loss": arrays["loss"]}, config))["loss"].says
        == "right"
    )


def test_responses_that_begin_with_several_untrained_tokens_have_no_late_mask():
    arrays, config = policy_step()
    place = np.arange(PROMPT + RESPONSE)[None]
    assert faults_of(arrays | {"loss_mask": arrays["loss_mask"] & (place > PROMPT)}, config)["mask"] == "mask one late"
    assert "mask" not in faults_of(arrays | {"loss_mask": arrays["loss_mask"] & (place > PROMPT + 1)}, config)


def test_a_token_that_is_certain_has_a_log_probability_of_0():
    arrays, config = policy_step()
    certain = arrays["loss_mask"] & (np.arange(PROMPT + RESPONSE) == PROMPT)
    arrays["old_logprobs"] = np.where(certain, 0, arrays["old_logprobs"])
    assert faults_of(arrays, config)["logprobs"] == "missing log-probabilities read as 0"
    others = {name: np.where(certain, -0.1, arrays[name]) for name in ("new_logprobs", "ref_logprobs")}
    assert "logprobs" not in faults_of(arrays | others, config)


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0}])
def test_a_sampler_that_had_one_token_to_choose_from_has_0(setting):
    arrays, config = policy_step()
    arrays["sampler_logprobs"] = arrays["old_logprobs"] * (np.arange(PROMPT + RESPONSE) != PROMPT)
    assert faults_of(arrays, config)["logprobs"] == "missing log-probabilities read as 0"
    assert "logprobs" not in faults_of(arrays, config | setting)
    same = arrays | {"input_ids": arrays["input_ids"] * 0 + 7}
    assert verdicts_of(Step(same, config | setting))["members"].says == "cannot tell"


def slopes_of(arrays, new):
    """The derivative of the clipped loss and its KL by log-probabilities."""
    new = torch.from_numpy(new).double().requires_grad_()
    mask, old, ref, advantages = (
        torch.from_numpy(arrays[name]) for name in ("loss_mask", "old_logprobs", "ref_logprobs", "advantages")
    )
    losses = policy_losses.clip_loss(new, new - old, advantages[:, None], mask, 0.2, 0.28) + 0.05 * ops.kl_k3(new, ref)
    (slopes,) = torch.autograd.grad((mask * losses).sum() / mask.sum(), new)
    return float32(slopes)


@pytest.mark.parametrize("side", [-1e-6, 1e-6])
def test_a_ratio_at_the_bound_may_be_clipped_or_not(side):
    arrays, config = policy_step()
    del arrays["loss"]
    first = arrays["loss_mask"] & (np.arange(PROMPT + RESPONSE) == PROMPT)
    bound = np.where(arrays["advantages"] > 0, np.log(1.28), np.log(0.8))[:, None]
    new = np.where(first, arrays["old_logprobs"] + bound, arrays["new_logprobs"])
    arrays |= {"new_logprobs": new.astype(np.float32), "loss_slopes": slopes_of(arrays, new + first * side)}
    assert verdicts_of(Step(arrays, config))["loss"].says == "right"
    arrays["loss_slopes"] = slopes_of(arrays, new + 0.3)
    assert "loss" in faults_of(arrays, config)


def test_a_start_token_that_was_sampled_is_no_doubled_one():
    arrays, config = policy_step()
    arrays["input_ids"] = arrays["input_ids"].copy()
    arrays["input_ids"][1, PROMPT - 1 : PROMPT + 1] = config["bos_token_id"]
    assert "mask" not in faults_of(arrays, config)
    arrays["input_ids"][1, PROMPT - 2] = config["bos_token_id"]
    assert faults_of(arrays, config)["mask"] == "doubled start token"


def test_a_reference_may_doubt_a_token_of_which_the_policy_is_certain():
    arrays, config = policy_step()
    for name in ("old_logprobs", "new_logprobs"):
        arrays[name] = np.zeros_like(arrays[name])
    arrays["ref_logprobs"] = np.full_like(arrays["ref_logprobs"], -2.0)
    assert "logprobs" not in faults_of(arrays, config)


def test_pairs_that_were_cut_before_their_answers_differ_are_no_copies():
    arrays, config = pair_step()
    half = len(arrays["input_ids"]) // 2
    for name in ("input_ids", "loss_mask"):
        arrays[name][half:] = arrays[name][:half]
    assert faults_of(arrays, config)["pairs"] == "chosen and rejected are the same"
    arrays["truncated"] = np.ones(2 * half)
    assert "pairs" not in faults_of(arrays, config)
