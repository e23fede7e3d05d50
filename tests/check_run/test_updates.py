"""Optimiser steps in numbers: clean ones have no fault, planted ones are named."""

import numpy as np
import pytest

from lightrlhf.check_run import check_steps
from lightrlhf.checks.step import Step


def update(**changed):
    """(arrays, config) of the first step of AdamW on three parameters of four; `a.lora_A` has a gradient of 0."""
    arrays = {"trainable": [1, 1, 1, 0], "optimised": [1, 1, 1, 0], "grad_norm": [0.5, 0.6, 0, -1]}
    arrays |= {"grad_max": [0.1, 0.2, 0, -1], "change": [1e-3, 1e-3, 0, 0], "weight_max": [0.3, 0.2, 0.1, np.nan]}
    arrays |= {"learning_rate": [1e-3] * 3 + [np.nan], "weight_decay": [0.0] * 3 + [np.nan]}
    config = {"method": "update", "update": 1, "updates": 10, "optimizer": "AdamW", "scheduler": "linear", "warmup": 0}
    config |= {"peak_learning_rate": 1e-3, "max_grad_norm": 1.0, "is_first": True, "reference": "kept"}
    config["parameters"] = ["w.lora_B", "v.lora_B", "a.lora_A", "base"]
    config["adapters"] = ["lora_"]
    arrays = {name: np.array(values) for name, values in arrays.items()}
    for name, value in changed.items():
        (arrays if name in arrays else config)[name] = value
    return arrays, config


def faults_of(**changed):
    """{check: fault} of what is wrong."""
    return {one.name: one.fault for one in check_steps([Step(*update(**changed))]) if one.says == "wrong"}


def test_a_clean_update_is_right():
    verdicts = {one.name: one.says for one in check_steps([Step(*update())])}
    assert [verdicts[name] for name in ("update", "rate", "reference")] == ["right"] * 3


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({"optimised": np.array([1, 0, 1, 0])}, "trained parameters are not in the optimiser"),
        ({"change": np.array([1e-3, 0, 0, 0])}, "parameters did not change"),
        ({"change": np.array([1e-3, 0, 0, 0]), "dtype": "bfloat16"}, "updates lost to rounding"),
        ({"change": np.array([1e-3, 1e-3, 0, 1])}, "frozen parameters changed"),
        ({"change": np.array([1e-3, 2e-3, 0, 0])}, "update larger than the learning rate"),
        ({"change": np.array([1e-3, 1e-4, 0, 0])}, "update smaller than the learning rate"),
        ({"grad_norm": np.array([3.0, 4.0, 0, -1])}, "gradients not clipped"),
        ({"grad_norm": np.array([np.nan, 0.6, 0, -1])}, "gradients are not finite"),
        ({"parameters": ["w.lora_B", "norm", "a.lora_A", "base"]}, "base weights trained beside the adapter"),
        ({"foreign_parameters": 2}, "the optimiser has other parameters"),
        ({"is_tied": False}, "tied weights came apart"),
    ],
)
def test_what_an_update_did_wrong_is_named(changed, fault):
    assert faults_of(**changed) == {"update": fault}


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({"learning_rate": np.array([0.0, 0, 0, np.nan]), "change": np.zeros(4)}, "learning rate of 0"),
        ({"update": 6}, "learning rate is not the schedule's"),
        ({"warmup": 10}, "warm-up longer than the run"),
        ({"reference": "moved"}, "the reference moved"),
        ({"reference": "policy"}, "the reference is the policy"),
    ],
)
def test_a_rate_or_a_reference_that_is_wrong_is_named(changed, fault):
    assert list(faults_of(**changed).values()) == [fault]


def test_rates_of_schedules_and_of_warm_up_are_right():
    first = {"learning_rate": np.array([0.0, 0, 0, np.nan]), "change": np.zeros(4), "warmup": 2}
    assert faults_of(**first) == {} and "rate" in faults_of(**first | {"update": 3})
    half = np.array([5e-4] * 3 + [np.nan])
    for scheduler in ("linear", "cosine"):
        assert faults_of(update=6, scheduler=scheduler, learning_rate=half, is_first=False) == {}
    assert faults_of(update=6, scheduler="constant") == {}


def test_small_rates_and_schedules_that_are_not_known_are_no_fault():
    small = {"learning_rate": np.array([1e-9] * 3 + [np.nan]), "change": np.array([1e-9, 0, 0, 0]), "is_first": False}
    small |= {"weight_max": np.array([0.01, 1.0, 0.1, np.nan]), "scheduler": "polynomial", "warmup": 5}
    assert faults_of(**small) == {}  # the rate is below the rounding of a weight of 1
    still = {"learning_rate": np.array([0.0, 0, 0, np.nan]), "change": np.zeros(4), "scheduler": "cosine_with_min_lr"}
    assert faults_of(**still, warmup=2) == {}
    assert faults_of(**still, warmup=2, update=6) == {"rate": "learning rate of 0"}
    assert faults_of(**still, warmup=2, update=3) == {}
    assert faults_of(**still, warmup=2, update=4) == {"rate": "learning rate of 0"}


def test_sizes_of_updates_allow_rounding_of_large_weights_and_small_gradients():
    large = {"weight_max": np.array([1e4, 0.2, 0.1, np.nan]), "change": np.array([1.6e-3, 1e-3, 0, 0])}
    assert faults_of(**large) == {}
    small = {"grad_max": np.array([0.1, 1e-12, 0, -1]), "change": np.array([1e-3, 1e-5, 0, 0])}
    assert faults_of(**small) == {}


def test_a_run_of_one_update_may_be_its_warm_up():
    still = {"learning_rate": np.array([0.0, 0, 0, np.nan]), "change": np.zeros(4), "scheduler": "linear"}
    assert faults_of(**still, updates=1, warmup=1) == {}
    assert faults_of(**still, updates=2, warmup=2) == {"rate": "warm-up longer than the run"}


def test_weight_decay_adds_to_the_size_of_an_update():
    decay = {"weight_decay": np.array([10.0] * 3 + [np.nan])}
    assert faults_of(**decay, change=np.array([3.5e-3, 1e-3, 0, 0])) == {}
    found = faults_of(**decay, change=np.array([5e-3, 1e-3, 0, 0]))
    assert found == {"update": "update larger than the learning rate"}
