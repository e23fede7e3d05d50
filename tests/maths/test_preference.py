"""Losses on pairs and on labelled responses: the papers' formulas in plain floats, and what must hold of each."""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrlhf.maths.preference import (
    DIVERGENCES,
    GAP_LOSSES,
    LENGTH_LOSSES,
    LOSSES,
    RANKED_LOSSES,
    RAPO,
    REFERENCE_FREE,
    Pairs,
    chosen_nll,
    implicit_rewards,
    log_odds,
)
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES, Responses, bco, kto

LOG_RATIOS = st.floats(-6, 6)
NUMBER = st.floats(-20, 20)
SIDES = ("policy_chosen_logps", "policy_rejected_logps", "ref_chosen_logps", "ref_rejected_logps")


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_s(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def close(a, b, tolerance: float = 1e-9) -> bool:
    return torch.allclose(*(torch.as_tensor(x, dtype=torch.float64) for x in (a, b)), atol=tolerance, rtol=tolerance)


def pairs_of(w, l, rw=0.0, rl=0.0, dtype=torch.float64, **changes) -> Pairs:  # noqa: E741
    """Pairs from log-probabilities of policy (w, l) and reference (rw, rl), numbers or lists."""
    columns = [torch.as_tensor(x, dtype=dtype).reshape(-1).clone() for x in (w, l, rw, rl)]
    for column in columns[:2]:
        column.requires_grad_()
    return Pairs(**{**dict(zip(SIDES, columns)), "beta": 0.3} | changes)


def slopes_of(pairs: Pairs, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sides = [pairs.policy_chosen_logps, pairs.policy_rejected_logps]
    return torch.autograd.grad(loss.sum(), sides, allow_unused=True, materialize_grads=True)


# ---------------------------------------------------------------------------------------------------- the formulas
def loss_of(name: str, r: SimpleNamespace) -> float:
    """A pair's loss from log-probabilities of policy (w, l) and reference (rw, rl), one line a paper."""
    a, b, beta, e, w, l = r.w - r.rw, r.l - r.rl, r.beta, r.smoothing, r.w, r.l  # noqa: E741
    z = beta * (a - r.weight * b) + r.alpha * (r.nw - r.nl)
    q, p = s(z), s(r.margin)
    match name:
        case "sigmoid":
            return -(1 - e) * log_s(z) - e * log_s(-z)
        case "robust":
            return (-(1 - e) * log_s(z) + e * log_s(-z)) / (1 - 2 * e)
        case "ipo":
            return (a / r.nw - r.weight * b / r.nl - 1 / (2 * beta)) ** 2
        case "hinge":
            return max(0.0, 1 - z)
        case "nca_pair":
            return -log_s(beta * a) - 0.5 * log_s(-beta * a) - 0.5 * log_s(-beta * b)
        case "sppo_hard":
            return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2
        case "exo_pair":
            e = e or 1e-3
            return q * (log_s(z) - math.log(1 - e)) + (1 - q) * (log_s(-z) - math.log(e))
        case "bco_pair":
            return -log_s(beta * a - r.baseline) - log_s(-(beta * b - r.baseline))
        case "apo_zero":
            return 1 - s(beta * a) + s(beta * b)
        case "apo_down":
            return s(beta * a) + 1 - s(beta * (a - b))
        case "rev_kl":
            return -p * log_s(z) - (1 - p) * log_s(-z)
        case "kl":
            return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        case "tv":
            return abs(q - p)
        case "hellinger":
            return 0.5 * ((q**0.5 - p**0.5) ** 2 + ((1 - q) ** 0.5 - (1 - p) ** 0.5) ** 2)
        case "raft":
            return -w
        case "discopop":
            m = s(z / 0.05)
            return -(1 - m) * log_s(z) + m * math.exp(-z)
        case "simpo":
            return -log_s(beta * w / r.nw - beta * l / r.nl - r.gamma)
        case "orpo":
            pw, pl = math.exp(w / r.nw), math.exp(l / r.nl)
            return -w / r.nw - beta * log_s(math.log(pw / (1 - pw)) - math.log(pl / (1 - pl)))
        case "cpo":
            return -log_s(beta * (w - l)) - w / r.nw
    raise AssertionError(name)


def total_of(name: str, rows: list[SimpleNamespace]) -> float:
    """The sum over the pairs of a step; a ranked loss compares the sorted sides."""
    if name not in RANKED_LOSSES:
        return sum(loss_of(name, row) for row in rows)
    sides = [(r.w - r.l, r.rw - r.rl) if name == "aot" else (r.w - r.rw, r.l - r.rl) for r in rows]
    gaps = [rows[0].beta * (x - y) for x, y in zip(*map(sorted, zip(*sides)))]
    return sum(-(1 - rows[0].smoothing) * log_s(z) - rows[0].smoothing * log_s(-z) for z in gaps)


def drawn_rows(name: str, seed: int) -> list[SimpleNamespace]:
    """Pairs of a step; seed 0 has the defaults of the flags, the others draw every one that the loss reads."""
    rng = random.Random(f"{name} {seed}")
    flags = {"beta": rng.uniform(0.05, 1), "smoothing": 0.0, "alpha": 0.0, "baseline": 0.0, "gamma": 0.0}
    if seed:
        flags |= {"smoothing": rng.uniform(0.01, 0.3), "baseline": rng.uniform(-0.7, 0.7), "gamma": rng.random()}
        flags["alpha"] = rng.uniform(-0.1, 0.1) if name in LENGTH_LOSSES else 0.0
    rows = []
    for _ in range(5):
        row = {key: -rng.uniform(0.5, 30) for key in ("w", "l", "rw", "rl")}
        row |= {"nw": rng.randint(1, 20), "nl": rng.randint(1, 20), "margin": rng.uniform(-3, 3)}
        row["weight"] = rng.uniform(0.3, 1) if seed and name in GAP_LOSSES else 1.0
        rows.append(SimpleNamespace(**flags, **row | ({"rw": 0.0, "rl": 0.0} if name in REFERENCE_FREE else {})))
    return rows


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_and_its_gradient_equal_the_formula_of_the_paper(name):
    for seed in range(5):
        rows = drawn_rows(name, seed)
        one = rows[0]
        w, l, rw, rl, nw, nl, margins, weight = (  # noqa: E741
            torch.tensor([vars(row)[key] for row in rows], dtype=torch.float64)
            for key in ("w", "l", "rw", "rl", "nw", "nl", "margin", "weight")
        )
        flags = {"beta": one.beta, "label_smoothing": one.smoothing, "length_alpha": one.alpha, "margins": margins}
        flags |= {"chosen_lengths": nw, "rejected_lengths": nl, "rejected_weight": weight}
        pairs = pairs_of(w, l, rw, rl, **flags, baseline=one.baseline, gamma=one.gamma)
        found = LOSSES[name](pairs)
        assert found.shape == (len(rows),)
        if name in RANKED_LOSSES:
            assert close(found.sum(), total_of(name, rows)), seed
        else:
            assert close(found, [loss_of(name, row) for row in rows]), seed
        for side, slope in zip("wl", slopes_of(pairs, found)):
            for i, row in enumerate(rows):
                ends = []
                for step in (1e-5, -1e-5):
                    moved = SimpleNamespace(**vars(row) | {side: vars(row)[side] + step})
                    ends.append(total_of(name, [*rows[:i], moved, *rows[i + 1 :]]))
                assert float(slope[i]) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6, rel=1e-6), (seed, side, i)


@pytest.mark.parametrize("name", sorted(RAPO))
def test_the_weight_of_the_rejected_side_is_the_formula_and_has_no_gradient(name):
    for seed in range(5):
        rng = random.Random(seed)
        w, l, rw, rl, score = (*(-rng.uniform(0.5, 9) for _ in range(4)), rng.uniform(-1, 3))  # noqa: E741
        pairs = pairs_of(w, l, rw, rl, beta=0.2)
        found = RAPO[name](pairs, torch.tensor([score])) if name == "ra" else RAPO[name](pairs)
        by_hand = {"ra": 1 / (1 + max(score, 0)), "app_1": 1 / (1 - 0.1 * 0.2 * rl)}
        by_hand["app_2"] = 1 / (1 + max(0.2 * (l - rl), 0))
        assert found.item() == pytest.approx(by_hand[name]) and not found.requires_grad


def test_the_chosen_nll_is_per_token():
    found = chosen_nll(pairs_of([-3.0, -8.0], [-1.0, -1.0], chosen_lengths=torch.tensor([4.0, 5.0])))
    assert found.tolist() == pytest.approx([0.75, 1.6])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_stays_finite_far_from_the_reference(name):
    for w, l in ((-1.0, -9e3), (-9e3, -1.0)):  # noqa: E741
        pairs = pairs_of(w, l, -500.0, -500.0)
        loss = LOSSES[name](pairs)
        assert all(torch.isfinite(x).all() for x in (loss, *slopes_of(pairs, loss)))


def test_a_longer_chosen_response_pulls_less_with_a_length_term():
    """R-DPO's sign: length that is rewarded explains the preference, so less is left for the policy to learn."""

    def pull(length: float) -> float:
        pairs = pairs_of(-9.0, -4.0, -7.0, -6.0, length_alpha=0.1, chosen_lengths=length, rejected_lengths=5.0)
        return -float(slopes_of(pairs, LOSSES["sigmoid"](pairs))[0])

    assert pull(20.0) < pull(5.0) < pull(1.0)


# ---------------------------------------------------------------------------------------------------- what must hold
LOGP = st.floats(-30, -0.1)
OF_REFERENCE = sorted(set(LOSSES) - set(REFERENCE_FREE) - {"raft"})
GROW_WITH_THE_GAP = ["sigmoid", "hinge", "simpo", "orpo", "cpo", *sorted(RANKED_LOSSES)]


@given(st.sampled_from(sorted(GAP_LOSSES)), LOGP, LOGP, LOGP, LOGP, st.floats(-5, 5))
def test_losses_of_the_gap_forget_a_common_shift(name, w, l, rw, rl, shift):  # noqa: E741
    assert close(LOSSES[name](pairs_of(w, l, rw, rl)), LOSSES[name](pairs_of(w + shift, l + shift, rw, rl)), 1e-7)


@given(st.sampled_from(OF_REFERENCE), LOGP, LOGP, LOGP, LOGP, st.floats(-5, 5))
def test_losses_see_log_ratios_alone(name, w, l, rw, rl, shift):  # noqa: E741
    other = pairs_of(w + shift, l - shift, rw + shift, rl - shift)
    assert close(LOSSES[name](pairs_of(w, l, rw, rl)), LOSSES[name](other), 1e-7)


@given(st.sampled_from(GROW_WITH_THE_GAP), LOGP, LOGP, LOGP, LOGP, st.floats(0, 5))
def test_a_less_likely_rejected_response_costs_no_more(name, w, l, rw, rl, less):  # noqa: E741
    assert LOSSES[name](pairs_of(w, l - less, rw, rl)) <= LOSSES[name](pairs_of(w, l, rw, rl)) + 1e-12


@given(LOGP, LOGP, LOGP, LOGP, st.floats(0, 0.49))
def test_smoothed_dpo_swaps_with_its_smoothing(w, l, rw, rl, e):  # noqa: E741
    other = LOSSES["sigmoid"](pairs_of(l, w, rl, rw, label_smoothing=1 - e))
    assert close(LOSSES["sigmoid"](pairs_of(w, l, rw, rl, label_smoothing=e)), other)


@given(LOGP, LOGP, LOGP, LOGP, st.floats(0, 0.4))
def test_robust_dpo_is_unbiased_under_flips(w, l, rw, rl, e):  # noqa: E741
    right = LOSSES["robust"](pairs_of(w, l, rw, rl, label_smoothing=e))
    flipped = LOSSES["robust"](pairs_of(l, w, rl, rw, label_smoothing=e))
    assert close((1 - e) * right + e * flipped, LOSSES["sigmoid"](pairs_of(w, l, rw, rl)), 1e-8)


@given(LOGP, LOGP, st.floats(0, 0.4))
def test_dpo_at_the_reference_is_log_two_whatever_the_smoothing(w, l, e):  # noqa: E741
    assert close(LOSSES["sigmoid"](pairs_of(w, l, w, l, label_smoothing=e)), math.log(2))


# ------------------------------------------------------------------------------------------------------- divergences
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
def test_the_gap_of_a_divergence_enters_every_loss_of_z(name):
    divergence = partial(DIVERGENCES[name], alpha=0.4)
    ratios = torch.tensor([0.7, -0.4], dtype=torch.float64)
    gap = float(-divergence(ratios).diff())
    flags = {"smoothing": 0.1, "weight": 1.0, "alpha": 0.0, "nw": 1, "nl": 1, "margin": 0.0, "baseline": 0, "gamma": 0}
    row = SimpleNamespace(w=gap, l=0.0, rw=0.0, rl=0.0, beta=0.3, **flags)
    pairs = pairs_of(0.7, -0.4, divergence=divergence, label_smoothing=0.1, margins=torch.zeros(1).double())
    for loss in sorted(LENGTH_LOSSES):
        found = LOSSES[loss](pairs)
        assert close(found, [loss_of(loss, row)]), loss


@given(st.sampled_from(sorted(DIVERGENCES)), NUMBER, st.floats(0, 5), st.floats(0.1, 0.9))
def test_divergences_rise_with_the_ratio(name, x, more, alpha):
    low, high = DIVERGENCES[name](torch.tensor([x, x + more], dtype=torch.float64), alpha=alpha)
    assert low <= high + 1e-12


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_a_reward_is_zero_at_the_reference_and_finite_far_from_it(name):
    divergence = partial(DIVERGENCES[name], alpha=0.5)
    assert float(divergence(torch.zeros(()))) == pytest.approx(0, abs=1e-7)
    for loss in sorted(LENGTH_LOSSES):
        for a, b in ((-900.0, 3.0), (3.0, -900.0), (-900.0, -901.0), (500.0, 500.0)):
            pairs = pairs_of(a, b, dtype=torch.float32, divergence=divergence)
            value = LOSSES[loss](pairs).sum()
            slopes = torch.autograd.grad(value, [pairs.policy_chosen_logps, pairs.policy_rejected_logps])
            assert all(torch.isfinite(t).all() for t in (value, *slopes)), (loss, a, b)


def test_a_response_far_below_the_reference_is_still_pulled_up():
    """Where exp overflows the reward goes on growing, as its tangent."""
    pairs = pairs_of(-900.0, 0.0, dtype=torch.float32, divergence=DIVERGENCES["forward_kl"])
    slope = torch.autograd.grad(LOSSES["sigmoid"](pairs).sum(), pairs.policy_chosen_logps)[0]
    assert float(slope) < 0


def test_alpha_lies_between_the_two_kls():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    small, large = (DIVERGENCES["alpha"](x, alpha=alpha) for alpha in (1e-6, 1 - 1e-6))
    assert torch.allclose(small, DIVERGENCES["reverse_kl"](x), atol=1e-4)
    assert torch.allclose(large, DIVERGENCES["forward_kl"](x), atol=1e-4)


def test_the_reverse_kl_is_bitwise_dpo():
    a, b = torch.randn(50), torch.randn(50)
    pairs = pairs_of(a, b, dtype=torch.float32, divergence=partial(DIVERGENCES["reverse_kl"], alpha=0.5))
    assert torch.equal(pairs.logits, 0.3 * (a - b))


def test_log_odds_are_finite_at_the_ends():
    lengths = torch.tensor([2.0, 2.0])
    found, _ = log_odds(pairs_of([0.0, -4000.0], [-1.0, -1.0], dtype=torch.float32, chosen_lengths=lengths))
    found = found.detach()
    assert torch.isfinite(found).all() and float(found[0]) > 10 and float(found[1]) == pytest.approx(-2000)
    pairs = pairs_of([0.0, -4000.0], [-1.0, -1.0], dtype=torch.float32, chosen_lengths=lengths)
    assert torch.isfinite(torch.autograd.grad(LOSSES["orpo"](pairs).sum(), pairs.policy_chosen_logps)[0]).all()


# ----------------------------------------------------------------------------------------------- labelled responses
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


@given(NUMBER, NUMBER, st.floats(0, 5), st.floats(0.01, 2))
def test_labels_of_responses_mirror_each_other(logp, ref, point, beta):
    def loss(function, logp, ref, point, good):
        values = {"policy_logps": torch.tensor([logp]).double(), "ref_logps": torch.tensor([ref]).double()}
        return function(Responses(**values, desirable=torch.tensor([good]), beta=beta, reference_point=point))

    for function in (kto, bco):
        assert close(loss(function, logp, ref, point, True), loss(function, ref, logp, -point, False), 1e-8)
        assert loss(function, logp, ref, point, True) >= 0
    assert close(loss(kto, logp, ref, point, True) + loss(kto, logp, ref, point, False), 1.0, 1e-8)
