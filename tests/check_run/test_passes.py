"""Passes against rows alone, samples, texts, pairs and targets in numbers: clean ones are right, faults are named."""

import numpy as np
import pytest
import torch
from helpers.steps import PROMPT, float32, pair_step, policy_step, sft_step

from lightrlhf.check_run import check_steps
from lightrlhf.checks.capture import dropout_of, row_slopes
from lightrlhf.checks.step import Step


def verdicts_of(arrays, config):
    return {one.name: one for one in check_steps([Step(arrays, config)])}


def faults_of(arrays, config):
    """{check: fault} of what is wrong."""
    return {name: one.fault for name, one in verdicts_of(arrays, config).items() if one.says == "wrong"}


def with_rows_alone(made):
    arrays, config = made
    return arrays | {"alone_logprobs": arrays["new_logprobs"]}, config


@pytest.mark.parametrize("made", [policy_step(), pair_step(), sft_step()])
def test_passes_that_are_those_of_rows_alone_are_right(made):
    assert verdicts_of(*with_rows_alone(made))["passes"].says == "right"


@pytest.mark.parametrize(
    "settings, fault",
    [
        ({}, "pass differs from its rows alone"),
        ({"dropout": 0.1}, "dropout on in one of the passes"),
        ({"packed": True}, "texts of a packed row see each other"),
    ],
)
def test_what_changed_a_pass_is_named(settings, fault):
    arrays, config = with_rows_alone(policy_step())
    arrays["alone_logprobs"] = arrays["alone_logprobs"] * np.float32(1.1)
    if "packed" in settings:
        arrays["alone_logprobs"][0] = arrays["new_logprobs"][0]
    assert faults_of(arrays, config | settings) == {"passes": fault}


def test_a_temperature_that_was_not_applied_and_padding_are_named():
    arrays, config = with_rows_alone(policy_step())
    arrays |= {"plain_logprobs": arrays["new_logprobs"], "alone_logprobs": arrays["alone_logprobs"] * np.float32(1.3)}
    assert faults_of(arrays, config) == {"passes": "temperature not applied"}
    arrays, config = with_rows_alone(policy_step())
    arrays["attention_mask"] = arrays["attention_mask"].copy()
    arrays["attention_mask"][:4, 0], arrays["prompt_len"][:4] = False, PROMPT - 1
    arrays["alone_logprobs"] = arrays["alone_logprobs"] + np.float32(0.1) * (np.arange(16) < 4)[:, None]
    assert faults_of(arrays, config) == {"passes": "padding changes the pass"}


def test_dropout_is_allowed_in_sft():
    arrays, config = with_rows_alone(sft_step())
    arrays["alone_logprobs"] = arrays["alone_logprobs"] * np.float32(1.1)
    assert verdicts_of(arrays, config | {"dropout": 0.1})["passes"].says == "cannot tell"


def sampled(temperature: float):
    """Steps of 20 rows of 12 tokens from known distributions of 8, drawn at a temperature."""
    made = torch.Generator().manual_seed(3)
    logprobs = torch.randn(20, 12, 8, generator=made).mul(1.5).log_softmax(-1)
    drawn = torch.multinomial((logprobs / temperature).softmax(-1).view(-1, 8), 1, generator=made).view(20, 12)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    arrays = {"alone_logprobs": logprobs.gather(-1, drawn[..., None])[..., 0], "alone_entropy": entropy}
    arrays["alone_spread"] = (logprobs.exp() * (logprobs + entropy[..., None]).square()).sum(-1)
    return {name: float32(one) for name, one in arrays.items()} | {"loss_mask": np.ones((20, 12))}, {"temperature": 1.0}


@pytest.mark.parametrize("temperature, fault", [(1.0, None), (0.3, "likely"), (3.0, "unlikely")])
def test_samples_of_another_temperature_are_named(temperature, fault):
    arrays, config = sampled(temperature)
    found = verdicts_of(arrays, config)["samples"]
    assert found.fault == (f"samples too {fault} for the policy" if fault else "")
    assert verdicts_of(arrays, config | {"top_p": 0.9})["samples"].says == "cannot tell"


@pytest.mark.parametrize(
    "field, values, fault",
    [
        ("rewarded_row", np.arange(16) ^ 1, "rewarded text of another row"),
        ("differs_at", np.where(np.arange(16) == 3, 2, np.nan), "ids are not the template's of the text"),
        ("is_known", np.arange(16) != 3, "rows that the data set lacks"),
    ],
)
def test_rows_that_are_of_other_texts_are_named(field, values, fault):
    arrays, config = policy_step()
    right = {"rewarded_row": np.arange(16), "differs_at": np.full(16, np.nan), "is_known": np.ones(16)}
    assert verdicts_of(arrays | right, config)["texts"].says == "right"
    assert faults_of(arrays | right | {field: values}, config) == {"texts": fault}


def test_pairs_that_were_exchanged_and_groups_of_several_prompts_are_named():
    arrays, config = pair_step()
    sides = {"half": np.arange(16) >= 8, "side": np.arange(16) < 8}
    assert verdicts_of(arrays | sides, config)["pairs"].says == "right"
    sides["side"] = np.arange(16) >= 8
    assert faults_of(arrays | sides, config) == {"pairs": "chosen and rejected exchanged"}
    arrays, config = policy_step()
    arrays["input_ids"] = np.roll(arrays["input_ids"], 1, 0)
    for name in ("attention_mask", "loss_mask"):
        arrays[name] = np.roll(arrays[name], 1, 0)
    assert verdicts_of(arrays, config)["members"].fault == "prompts of a group differ"


@pytest.mark.parametrize("shift, fault", [(1, "labels one late"), (-1, "labels one early")])
def test_labels_that_were_shifted_are_named(shift, fault):
    arrays, config = sft_step()
    mask = arrays.pop("loss_mask")
    arrays["labels"] = np.where(mask, np.roll(arrays["input_ids"], shift, 1), -100)
    assert faults_of(arrays, config)["mask"] == fault


def test_the_weights_of_tokens_are_those_of_the_loss_and_other_targets_leave_a_rest():
    torch.manual_seed(0)
    head, ids = torch.nn.Linear(6, 9), torch.randint(9, (7,))
    hidden = torch.randn(7, 6, requires_grad=True)
    logprobs = head(hidden).log_softmax(-1)
    weights = torch.rand(6)
    (gradient,) = torch.autograd.grad((weights * logprobs[:-1].gather(-1, ids[1:, None])[:, 0]).sum(), hidden)
    slopes, rest = row_slopes(head, ids, hidden, gradient)
    torch.testing.assert_close(slopes, torch.cat([torch.zeros(1), weights]).double(), atol=1e-5, rtol=1e-5)
    assert float(rest.max()) < 1e-5
    (gradient,) = torch.autograd.grad(head(hidden).log_softmax(-1).gather(-1, ids[:, None]).sum(), hidden)
    assert float(row_slopes(head, ids, hidden, gradient)[1].max()) > 0.1
    assert float(row_slopes(head, ids, hidden, gradient, ahead=0)[1].max()) < 1e-5


@pytest.mark.parametrize(
    "targets, fault", [([0], "labels not shifted"), ([2], "labels shifted twice"), ([], "loss of other tokens")]
)
def test_a_loss_of_other_tokens_is_named(targets, fault):
    arrays, config = sft_step()
    arrays["unexplained"] = np.full(arrays["input_ids"].shape, 1e-4)
    assert faults_of(arrays, config) == {}
    arrays["unexplained"][2, 4] = 0.7
    assert faults_of(arrays, config | {"slope_targets": targets}) == {"loss": fault}


def test_advantages_that_changed_after_sampling_are_named():
    arrays, config = policy_step()
    arrays["given_advantages"] = arrays["advantages"].copy()
    del arrays["rewards"]
    assert verdicts_of(arrays, config)["advantages"].says == "right"
    arrays["advantages"] = np.roll(arrays["advantages"], 1)
    assert verdicts_of(arrays, config)["advantages"].fault == "rows misaligned"
    assert verdicts_of(arrays | {"advantages": -arrays["given_advantages"]}, config)["advantages"].fault == "sign"


def test_weights_that_are_a_multiple_of_the_meant_ones_are_named():
    arrays, config = policy_step()
    del arrays["loss"]
    assert faults_of(arrays | {"loss_slopes": arrays["loss_slopes"] * 4}, config) == {"loss": "scaled by 4"}


def test_copies_in_a_group_are_seen_by_rows_alone():
    arrays, config = policy_step()
    arrays["alone_logprobs"] = arrays.pop("old_logprobs")
    for name in ("input_ids", "loss_mask", "attention_mask"):
        arrays[name] = arrays[name].copy()
        arrays[name][1] = arrays[name][0]
    keep = {name: arrays[name] for name in ("input_ids", "loss_mask", "attention_mask", "prompt_len", "group")}
    found = verdicts_of(keep | {"alone_logprobs": arrays["alone_logprobs"] * 4}, config)["members"]
    assert found.fault == "members share their noise"


def test_dropout_of_attention_is_seen_though_it_is_no_module():
    layer = torch.nn.Linear(1, 1)
    layer.attention_dropout = 0.1
    assert dropout_of(layer) == 0.1 and dropout_of(layer.eval()) == 0.0


def test_sums_of_the_reference_that_were_stored_are_those_of_rows_alone():
    arrays, config = policy_step()
    reference = arrays.pop("ref_logprobs").astype(np.float64)
    sums, lengths = (reference * arrays["loss_mask"]).sum(1), arrays["loss_mask"].sum(1)
    arrays = {name: arrays[name] for name in ("input_ids", "attention_mask", "loss_mask", "prompt_len")}
    arrays |= {"alone_ref_logprobs": reference}

    def verdict(stored):
        return verdicts_of(arrays | {"ref_sum": stored}, config)["passes"]

    assert verdict(sums).says == "right"
    assert verdict(np.roll(sums, 1)).fault == "rows misaligned"
    assert verdict(sums / lengths).fault == "means in place of sums"
    assert verdict(sums * 1.1).fault == "reference of other weights or rows"
    del arrays["alone_ref_logprobs"]
    assert verdict(sums).says == "cannot tell"
