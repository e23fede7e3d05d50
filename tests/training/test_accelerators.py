"""Which device `--accelerator` is, the same for every program, and what an Apple GPU refuses."""

import platform

import pytest
import torch
from helpers.errors import error_naming
from lightning.fabric.accelerators import MPSAccelerator

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.models.loading import find_device
from lightrlhf.training.distributed import make_fabric


@pytest.fixture
def on_a_mac(monkeypatch):
    """Let torch say that there is an Apple GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    MPSAccelerator.is_available.cache_clear()
    yield
    MPSAccelerator.is_available.cache_clear()


@pytest.mark.parametrize("accelerator, kind", [("auto", "mps"), ("gpu", "mps"), ("mps", "mps"), ("cpu", "cpu")])
def test_training_and_the_other_programs_find_the_same_device(accelerator, kind, on_a_mac):
    assert find_device(accelerator).type == make_fabric(TrainArgs(accelerator=accelerator)).device.type == kind


def test_bfloat16_is_that_of_the_device(on_a_mac):
    assert make_fabric(TrainArgs(precision="bf16-mixed")).strategy.precision.device == "mps"


@pytest.mark.parametrize(
    "flags, fact",
    [
        ({"devices": 2}, "rank"),
        ({"strategy": "ddp"}, "--strategy ddp"),
        ({"precision": "16-mixed"}, "CUDA"),
        ({"accelerator": "cuda"}, "mps, cpu"),
    ],
)
def test_what_an_apple_gpu_cannot_do_is_refused_by_name(flags, fact, on_a_mac):
    with error_naming(UsageError, fact):
        make_fabric(TrainArgs(**flags))
    if "accelerator" not in flags:  # the way out
        make_fabric(TrainArgs(**flags | {"accelerator": "cpu", "precision": "32-true"}))


@pytest.mark.parametrize("accelerator", ["gpu", "tpu", "mps"])
def test_a_device_that_is_not_there_is_refused(accelerator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with error_naming(UsageError, f"--accelerator {accelerator}", "cpu"):
        make_fabric(TrainArgs(accelerator=accelerator))
