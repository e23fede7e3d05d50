"""Losses on responses: divergences by the derivative of their f, labelled responses by the formulas of the papers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrlhf.maths.preference import DIVERGENCES, LENGTH_LOSSES, LOSSES, Pairs, implicit_rewards, log_odds
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES, Responses

LOG_RATIOS = st.floats(-6, 6)


def f(name: str, u: float, alpha: float) -> float:
    """Generators of table 1 of Wang et al. 2023."""
    match name:
        case "reverse_kl":
            return u * math.log(u)
        case "forward_kl":
            return -math.log(u)
        case "js":
            return u * math.log(u) - (u + 1) * math.log((u + 1) / 2)
        case "alpha":
            return (u ** (1 - alpha) - (1 - alpha) * u - alpha) / (alpha * (alpha - 1))
    raise AssertionError(name)


def derivative(name: str, u: float, alpha: float) -> float:
    step = 1e-4 * u
    return (f(name, u + step, alpha) - f(name, u - step, alpha)) / (2 * step)


def pairs_of(a, b, dtype=torch.float64, **changes) -> Pairs:
    """Pairs with these log-ratios."""
    a, b = (torch.as_tensor(x, dtype=dtype).reshape(-1).clone().requires_grad_() for x in (a, b))
    zero = torch.zeros_like(a)
    given = {"policy_chosen_logps": a, "policy_rejected_logps": b, "ref_chosen_logps": zero, "ref_rejected_logps": zero}
    return Pairs(**({**given, "beta": 0.3} | changes))


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
@given(a=LOG_RATIOS, b=LOG_RATIOS, alpha=st.floats(0.1, 0.9))
def test_a_divergence_gives_the_difference_of_the_derivatives_of_its_f(name, a, b, alpha):
    pairs = pairs_of(a, b, divergence=partial(DIVERGENCES[name], alpha=alpha))
    expected = 0.3 * (derivative(name, math.exp(a), alpha) - derivative(name, math.exp(b), alpha))
    assert float(pairs.logits.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    chosen, rejected = implicit_rewards(pairs)
    assert float((chosen - rejected).detach()) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # the slope by the log-ratio is beta f''(u) u
    slope = torch.autograd.grad(pairs.logits.sum(), pairs.policy_chosen_logps)[0]
    u = math.exp(a)
    second = (derivative(name, u * 1.001, alpha) - derivative(name, u * 0.999, alpha)) / (0.002 * u)
    assert float(slope) == pytest.approx(0.3 * second * u, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_a_reward_is_zero_at_the_reference_and_finite_far_from_it(name):
    divergence = partial(DIVERGENCES[name], alpha=0.5)
    assert float(divergence(torch.zeros(()))) == pytest.approx(0, abs=1e-7)
    for loss in sorted(LENGTH_LOSSES):
        for a, b in ((-900.0, 3.0), (3.0, -900.0), (-900.0, -901.0), (500.0, 500.0)):
            pairs = pairs_of(a, b, torch.float32, divergence=divergence)
            value = LOSSES[loss](pairs).sum()
            slopes = torch.autograd.grad(value, [pairs.policy_chosen_logps, pairs.policy_rejected_logps])
            assert all(torch.isfinite(t).all() for t in (value, *slopes)), (loss, a, b)


def test_a_response_far_below_the_reference_is_still_pulled_up():
    """Where exp overflows the reward goes on growing, as its tangent."""
    pairs = pairs_of(-900.0, 0.0, torch.float32, divergence=DIVERGENCES["forward_kl"])
    slope = torch.autograd.grad(LOSSES["sigmoid"](pairs).sum(), pairs.policy_chosen_logps)[0]
    assert float(slope) < 0


def test_alpha_lies_between_the_two_kls():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    small, large = (DIVERGENCES["alpha"](x, alpha=alpha) for alpha in (1e-6, 1 - 1e-6))
    assert torch.allclose(small, DIVERGENCES["reverse_kl"](x), atol=1e-4)
    assert torch.allclose(large, DIVERGENCES["forward_kl"](x), atol=1e-4)


def test_the_reverse_kl_is_bitwise_dpo():
    a, b = torch.randn(50), torch.randn(50)
    pairs = pairs_of(a, b, torch.float32, divergence=partial(DIVERGENCES["reverse_kl"], alpha=0.5))
    assert torch.equal(pairs.logits, 0.3 * (a - b))


def test_log_odds_are_finite_at_the_ends():
    lengths = torch.tensor([2.0, 2.0])
    found, _ = log_odds(pairs_of([0.0, -4000.0], [-1.0, -1.0], torch.float32, chosen_lengths=lengths))
    found = found.detach()
    assert torch.isfinite(found).all() and float(found[0]) > 10 and float(found[1]) == pytest.approx(-2000)
    pairs = pairs_of([0.0, -4000.0], [-1.0, -1.0], torch.float32, chosen_lengths=lengths)
    assert torch.isfinite(torch.autograd.grad(LOSSES["orpo"](pairs).sum(), pairs.policy_chosen_logps)[0]).all()


# ----------------------------------------------------------------------------------------------- labelled responses
def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(name: str, logp: float, ref: float, good: bool, beta: float, point: float, weights: dict) -> float:
    weight = weights["desirable_weight" if good else "undesirable_weight"]
    if name == "kto":  # lambda_y - v, with the paper's z0 = point / beta
        z0, r = point / beta, logp - ref
        value = weight * (s(beta * (r - z0)) if good else s(beta * (z0 - r)))
        return weight - value
    probability = s(beta * (logp - ref) - point)
    return -weight * math.log(probability if good else 1 - probability)


@pytest.mark.parametrize("name", sorted(UNPAIRED_LOSSES))
@given(
    logps=st.lists(st.tuples(st.floats(-20, -1), st.floats(-20, -1), st.booleans()), min_size=1, max_size=6),
    point=st.floats(0, 1),
)
def test_a_loss_of_labelled_responses_and_its_gradient_equal_the_plain_formula(name, logps, point):
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    policy, ref, good = ([row[i] for row in logps] for i in range(3))
    tensor = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    given = {"policy_logps": tensor, "ref_logps": torch.tensor(ref, dtype=torch.float64)}
    responses = Responses(**given, desirable=torch.tensor(good), beta=0.2, reference_point=point, **weights)
    found = UNPAIRED_LOSSES[name](responses)
    hand = partial(by_hand, name, beta=0.2, point=point, weights=weights)
    expected = [hand(p, r, g) for p, r, g in zip(policy, ref, good)]
    assert found.tolist() == pytest.approx(expected, rel=1e-9)
    (slopes,) = torch.autograd.grad(found.sum(), tensor)
    steps = [(hand(p + 1e-5, r, g) - hand(p - 1e-5, r, g)) / 2e-5 for p, r, g in zip(policy, ref, good)]
    assert slopes.tolist() == pytest.approx(steps, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("name", "expected"), [("kto", 0.5), ("bco", math.log(2))])
def test_at_the_reference_a_response_costs_half_or_log_two(name, expected):
    logps = torch.tensor([-3.0, -90.0])
    responses = Responses(policy_logps=logps, ref_logps=logps, desirable=torch.tensor([True, False]), beta=0.1)
    assert UNPAIRED_LOSSES[name](responses).tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize("name", sorted(UNPAIRED_LOSSES))
def test_a_loss_of_labelled_responses_is_finite_far_from_the_reference(name):
    logps = torch.tensor([-1e4, 1e4, -1e4, 1e4], requires_grad=True)
    good = torch.tensor([True, True, False, False])
    loss = UNPAIRED_LOSSES[name](Responses(policy_logps=logps, ref_logps=torch.zeros(4), desirable=good, beta=0.5))
    assert torch.isfinite(loss).all() and torch.isfinite(torch.autograd.grad(loss.sum(), logps)[0]).all()
