"""`run.end_step`: what ends a step logs, evaluates and saves, and leaves all that is learned from unchanged."""

import copy
import random

import pytest
import torch
from helpers import last_checkpoint, metrics
from helpers.programs import main_of
from helpers.tiny_runs import TRAINED, experiment_of

from lightrlhf.training.run import Run

EVERY = ("--eval_interval", 1, "--save_interval", 1, "--log_interval", 1)
MORE = {"online_refuel": ("--eval_dialogues", 2)}
ENDED_BY_HAND = ("ppo", "grpo", "reflect_rl")


def state_of(run: Run) -> dict:
    """All that the next step's loss and update are made of."""
    state: dict = {"random": random.getstate(), "torch": torch.get_rng_state()}
    for name, (module, optimizer, scheduler) in run.learners.by_name.items():
        parameters = dict(module.named_parameters())
        state[f"{name} weights"] = {key: (one.detach().clone(), one._version) for key, one in parameters.items()}
        state[f"{name} gradients"] = {key: one.grad for key, one in parameters.items()}
        state[f"{name} optimiser"] = copy.deepcopy(optimizer.state_dict())
        state[f"{name} schedule"] = scheduler.state_dict()
        state[f"{name} mode"] = [one.training for one in module.modules()]
    return state


def assert_equal(one, other, path=""):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (mine, theirs) in enumerate(zip(one, other)):
            assert_equal(mine, theirs, f"{path}/{index}")
    else:
        assert one == other, path


@pytest.mark.slow
@pytest.mark.parametrize("program", [one for one in TRAINED if one not in ENDED_BY_HAND])
def test_the_end_of_a_step_changes_nothing_that_reaches_a_loss(program, runs, tmp_path, monkeypatch):
    end_step, calls = Run.end_step, []

    def compared(run, metrics, *more, **options):
        assert {type(value) for value in metrics.values()} <= {float, int}  # no tensor with a graph
        before = state_of(run)
        end_step(run, metrics, *more, **options)
        assert_equal(before, state_of(run))
        calls.append(run.step)

    monkeypatch.setattr(Run, "end_step", compared)
    main_of(program)(runs.flags(program, tmp_path, *EVERY, *MORE.get(program, ()), steps=2))
    folder = experiment_of(tmp_path)
    assert calls == [1, 2]
    assert last_checkpoint(folder).name == "checkpoint-000002"
    assert {name for row in metrics(folder) for name in row if name.startswith("val/")}
