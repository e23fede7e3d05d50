"""Learners: schedules, clipping, and what is not finite."""

import math

import pytest
import torch
from helpers.errors import error_naming

from lightrlhf.cli.errors import RunFailure


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def test_the_gradient_norm_is_clipped_to_the_given_value(run):
    one = run(gradient_clip_val=0.5, max_steps=1)
    module = linear()
    wrapped = one.setup("policy", module, 1e-3, 10)
    one.backward(wrapped(100 * torch.ones(1, 3)).sum())
    assert one.optimize("policy") == pytest.approx(math.sqrt(3 * 100**2 + 1), rel=1e-3)  # told before clipping
    (state, *_) = one.learners["policy"].optimizer.optimizer.state.values()
    first_moment = math.sqrt(float(state["exp_avg"].pow(2).sum())) / (1 - 0.9)
    assert first_moment == pytest.approx(0.5, rel=1e-3)  # of the weight; the bias has a hundredth of it


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(run, bad):
    one = run()
    wrapped = one.setup("policy", linear(), 1e-3, 10)
    one.progress.step = 6
    with error_naming(RunFailure, bad, "step 7"):
        one.backward(wrapped(torch.ones(1, 3)).sum() * bad)
        one.optimize("policy")


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_move(run):
    one = run()
    module = linear()
    wrapped = one.setup("policy", module, 1e-3, 10)
    before = [p.clone() for p in module.parameters()]
    (wrapped(torch.ones(1, 3)).sum()).backward()
    module.weight.grad[0, 0] = math.nan
    with error_naming(RunFailure, "policy gradient norm", "nan", "step 1"):
        one.optimize("policy")
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))


def test_the_rows_of_the_micro_batch_are_named(run):
    one = run()
    wrapped = one.setup("policy", linear(), 1e-3, 10)
    one.order.mix([4, 10])  # two sets, of which the second begins at row 4
    one.order.data_dirs = ["first", "second"]

    def learn(*losses: tuple[float, torch.Tensor | None]) -> None:
        for factor, rows in losses:
            one.backward(wrapped(torch.ones(1, 3)).abs().sum() * factor, rows)
        one.optimize("policy")

    with error_naming(RunFailure, "loss", "nan", "step 1", "3 of first, 0 of second"):
        learn((1.0, torch.tensor([5])), (math.nan, torch.tensor([3, 4])), (math.inf, torch.tensor([6])))
    one.order.ends = []
    with error_naming(RunFailure, "rows 0, 1", "15 and 14 more"):
        learn((math.inf, torch.arange(30)))
    one.order.name_rows("starts", ["north", "south"])
    with error_naming(RunFailure, "starts south"):
        learn((math.inf, torch.tensor([1, 1])))
    with error_naming(RunFailure, "loss", "inf", "step 1;"):
        learn((math.inf, None))


def test_a_gradient_is_named_by_the_rows_of_all_backward_passes_of_its_step(run):
    one, module = run(), linear()
    wrapped = one.setup("policy", module, 1e-3, 10)

    def learn(*rows: int) -> None:
        one.backward(wrapped(torch.ones(len(rows), 3)).sum(), torch.tensor(rows))

    learn(8)
    one.optimize("policy")
    one.progress.step = 1
    learn(5, 3)
    learn(4, 5)
    module.weight.grad[0, 0] = math.nan
    with error_naming(RunFailure, "step 2", "rows 3, 4, 5, counted"):
        one.optimize("policy")


class Saved(torch.nn.Linear):
    """Linear weights and a mask, which may be saved."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("scale", torch.ones(2))
        self.adapters = ()


@pytest.mark.parametrize("place", ["weight", "bias", "scale", "exp_avg", "exp_avg_sq", "loop"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_memory_is_not_saved(run, place, bad):
    one, module = run(), Saved()
    wrapped = one.setup("policy", module, 1e-3, 10)
    one.backward(wrapped(torch.ones(1, 3)).sum(), torch.tensor([2, 7]))
    one.optimize("policy")
    one.progress.step = 1
    module.mask = torch.tensor([0.0, -math.inf, -math.inf])  # as a mask that grows
    one.learners.check_finite(module, {"kl": 1.0})  # its own -inf is no fault
    if hasattr(module, place):
        getattr(module, place).data.view(-1)[0] = bad
    elif place != "loop":
        one.learners["policy"].optimizer.optimizer.state[module.weight][place][0, 0] = bad
    with error_naming(RunFailure, "step 1", "rows 2, 7, counted"):
        one.keep(module, None, lambda: {"kl": bad if place == "loop" else 1.0})
        one.save()
    assert not list(one.files.directory.glob("checkpoint-*"))


def test_biases_and_norms_are_not_decayed(run):
    one = run(weight_decay=0.1)
    one.setup("policy", linear(), 1e-3, 10)
    groups = one.learners["policy"].optimizer.param_groups
    assert [(group["weight_decay"], group["params"][0].dim()) for group in groups] == [(0.1, 2), (0.0, 1)]


def test_warm_up_may_be_a_share_of_all_steps(run):
    for ratio, steps in ((0.5, 3), (0.4, 3), (0.0, 0)):  # rounded up
        one = run(lr_scheduler_type="constant_with_warmup", lr_warmup_ratio=ratio)
        wrapped, found = one.setup("policy", linear(), 0.1, 6), []
        for _ in range(6):
            found.append(one.learners.learning_rate("policy"))
            one.backward(wrapped(torch.ones(1, 3)).sum())
            one.optimize("policy")
        assert found == pytest.approx([0.1 * min(step / steps, 1) if steps else 0.1 for step in range(6)])


@pytest.mark.parametrize(
    "flags, updates, warns",
    [
        ({"lr_warmup_steps": 3}, 9, None),
        ({"lr_warmup_steps": 4}, 9, "--lr_warmup_steps 4"),
        ({"lr_warmup_steps": 100}, 18, "--lr_warmup_steps 100"),
        ({"lr_warmup_ratio": 0.34}, 100, "--lr_warmup_ratio 0.34"),
        ({"lr_warmup_ratio": 0.03}, 2, None),  # one step of two, because a ratio is rounded up
        ({"lr_warmup_steps": 100, "lr_scheduler_type": "constant"}, 18, None),
        ({}, 18, None),
    ],
)
def test_a_warm_up_of_more_than_a_third_of_the_run_is_told_once(run, capsys, flags, updates, warns):
    one = run(**flags)
    for name in ("policy", "critic"):
        one.setup(name, linear(), 0.1, updates)
    told = [line for line in capsys.readouterr().out.splitlines() if "warms up" in line]
    assert len(told) == (warns is not None) and (not told or f"{warns} warms up for more than a third" in told[0])


@pytest.mark.parametrize(
    "name, rates",
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, *((1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3))]),
    ],
)
def test_the_schedule_is_the_named_one(run, name, rates):
    one = run(lr_scheduler_type=name, lr_warmup_steps=2)
    wrapped = one.setup("policy", linear(), 0.1, 6)
    found = []
    for _ in range(6):
        found.append(one.learners.learning_rate("policy"))
        one.backward(wrapped(torch.ones(1, 3)).sum())
        one.optimize("policy")
    assert found == pytest.approx([0.1 * rate for rate in rates])
