"""Correct steps that are unusual: nothing in them may be called wrong."""

import json

import numpy as np
import pytest
from helpers.steps import policy_step, sft_step

from lightrlhf.check_run import check_steps
from lightrlhf.checks.step import Step, from_rows, read_steps


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
