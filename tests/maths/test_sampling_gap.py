"""Weights between sampler and trainer: floats by hand, properties, and expected gradients enumerated.

The enumeration has three tokens, the first of which ends a response, and at most three tokens a response: 15 responses.
The sampler mu is the trainer's pi_old at another temperature and with errors in its logits.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightrlhf.maths import sampling_gap
from lightrlhf.maths.groups import ADVANTAGES as GROUP_ADVANTAGES
from lightrlhf.maths.groups import group_advantages, group_moments
from lightrlhf.maths.ops import policy_loss
from lightrlhf.maths.policy_losses import LOSSES, TokenLoss, kl_loss, make_loss, sequence_log_ratio
from lightrlhf.maths.sampling_gap import CORRECTIONS, GapSize

INF, NAN = math.inf, math.nan


def importance_weights(logprobs: Tensor, sampler: Tensor, *settings) -> Tensor:
    """Weights of two sets of log-probabilities."""
    return sampling_gap.importance_weights(logprobs.double() - sampler.double(), *settings).to(logprobs.dtype)


def gap_size(logprobs: Tensor, sampler: Tensor, *settings) -> GapSize:
    """Size of the gap between two sets of log-probabilities."""
    return sampling_gap.gap_size(logprobs.double() - sampler.double(), *settings)


# ------------------------------------------------------------------------------------------------------------ floats
def weight_by_hand(ratios: list[float], at: int, kind: str, bound: float) -> float:
    """Of the action `at` among the actions of its row."""
    ratio = math.prod(ratios) if kind.startswith("sequence") else ratios[at]
    if kind.endswith("truncate"):
        return min(ratio, bound)
    return ratio if 1 / bound <= ratio <= bound else 0.0


def batch(dtype: torch.dtype, rows: int = 40, width: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of pi and mu and a mask with gaps; the last row has no action, others have junk off actions."""
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64) - 0.1
    sampler = logprobs + 0.6 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[-1] = False
    logprobs[0] = torch.where(mask[0], logprobs[0], NAN)
    sampler[1] = torch.where(mask[1], sampler[1], -INF)
    return logprobs.to(dtype), sampler.to(dtype), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1.3, 2.0, 3.0, INF])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_weights_and_sizes_equal_a_reference(kind, bound, dtype):
    logprobs, sampler, mask = batch(dtype)
    weights = importance_weights(logprobs, sampler, mask, kind, bound)
    kl, dropped, largest = 0.0, 0, 0.0
    for row in range(len(mask)):
        pairs = zip(logprobs[row][mask[row]].tolist(), sampler[row][mask[row]].tolist())
        ratios = [math.exp(p - q) for p, q in pairs]
        expected = [weight_by_hand(ratios, at, kind, bound) for at in range(len(ratios))]
        assert weights[row][mask[row]].tolist() == pytest.approx(expected, rel=1e-6 if dtype.itemsize == 4 else 1e-12)
        whole = math.prod(ratios)
        used = [whole] * len(ratios) if kind.startswith("sequence") else ratios
        dropped += sum(weight != pytest.approx(ratio, rel=1e-9) for weight, ratio in zip(expected, used))
        kl += sum(ratio - 1 - math.log(ratio) for ratio in ratios)
        largest = max([largest, *ratios])
    assert weights.dtype == dtype and (weights[~mask] == 0).all()
    found = gap_size(logprobs, sampler, mask, kind, bound).metrics()
    assert found["sampling/kl"] == pytest.approx(kl / int(mask.sum()), rel=1e-9)
    assert found["sampling/ratio_max"] == pytest.approx(largest, rel=1e-12)
    assert found["sampling/dropped"] == dropped / int(mask.sum())
    assert (bound < INF) == (dropped > 0)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_ratio_beyond_floats_is_cut(kind):
    """Three rows: ratios of e^2000 and e^-2000, e^800 with e^-800, and a token that the trainer never samples."""
    sampler = torch.tensor([[-2000.0, -0.5], [-900.0, -0.5], [-0.5, -0.5]])
    logprobs = torch.tensor([[-0.5, -2000.0], [-100.0, -800.5], [-INF, -0.5]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    expected = {
        "token_truncate": [[2, 0], [2, 0], [0, 1]],
        "token_mask": [[0, 0], [0, 0], [0, 1]],
        "sequence_truncate": [[1, 1], [1, 1], [0, 0]],
        "sequence_mask": [[1, 1], [1, 1], [0, 0]],
    }[kind]
    assert importance_weights(logprobs, sampler, mask, kind, 2.0).tolist() == expected
    size = gap_size(logprobs, sampler, mask, kind, 2.0)
    assert size.sums[1] == sum(weight != 1 for row in expected for weight in row) and size.ratio_max == INF
    far = importance_weights(logprobs[:2], logprobs[:2] - 500, mask[:2], kind, INF)
    assert (far == INF).all()  # no bound, no cut; e^500 is beyond float32


def test_without_actions_there_is_no_gap():
    for rows in (0, 2):
        nothing = torch.zeros(rows, 3)
        size = gap_size(nothing, nothing, nothing.bool(), "token_mask", 2.0)
        assert size.sums.tolist() == [0, 0, 0] and size.ratio_max == 0
        assert math.isnan(size.metrics()["sampling/kl"]) and math.isnan(size.metrics()["sampling/dropped"])
        for kind in CORRECTIONS:
            assert torch.equal(importance_weights(nothing, nothing, nothing.bool(), kind, 2.0), nothing)


# -------------------------------------------------------------------------------------------------------- properties
LOGPROBS = st.one_of(st.floats(-5, 0), st.floats(-3000, 0), st.just(0.0))


@st.composite
def batches(draw) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    count = rows * width
    values = [draw(st.lists(LOGPROBS, min_size=count, max_size=count)) for _ in range(2)]
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count))).view(rows, width)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    logprobs, sampler = (torch.tensor(value, dtype=dtype).view(rows, width) for value in values)
    return logprobs, sampler, mask


KINDS, BOUNDS = st.sampled_from(sorted(CORRECTIONS)), st.floats(1.001, 100)


@settings(deadline=None)
@given(batches(), KINDS, BOUNDS)
def test_weights_are_bounded_constants(given_batch, kind, bound):
    logprobs, sampler, mask = given_batch
    weights = importance_weights(logprobs.requires_grad_(), sampler, mask, kind, bound)
    top = torch.tensor(bound, dtype=weights.dtype)
    assert not weights.requires_grad and (weights >= 0).all() and (weights <= top).all()
    if kind.endswith("mask"):
        assert ((weights == 0) | (weights >= (1 - 1e-6) / bound)).all()
    same = importance_weights(logprobs, logprobs.detach(), mask, kind, bound)
    assert torch.equal(same, mask.to(same.dtype))
    assert gap_size(logprobs, logprobs, mask, kind, bound).sums.tolist() == [0, 0, int(mask.sum())]


@settings(deadline=None)
@given(batches(), KINDS, BOUNDS, st.randoms(use_true_random=False), st.sampled_from([NAN, INF, -INF, 7.0]))
def test_padding_order_and_cuts_of_a_batch_do_not_matter(given_batch, kind, bound, random, junk):
    logprobs, sampler, mask = given_batch
    weights = importance_weights(logprobs, sampler, mask, kind, bound)
    order = random.sample(range(len(mask)), len(mask))
    left, right = random.randrange(4), random.randrange(4)

    def padded(values: Tensor, filler: float) -> Tensor:
        return torch.nn.functional.pad(values[order], (left, right), value=filler)

    moved = padded(logprobs, junk), padded(sampler, -junk), padded(mask, False)
    close = {"rtol": 1e-6 if weights.dtype == torch.float32 else 1e-12, "atol": 0.0}  # sums of other widths round apart
    assert torch.allclose(importance_weights(*moved, kind, bound), padded(weights, 0.0), **close)
    if kind.startswith("token"):  # a token's weight depends on nothing else
        alone = [values.reshape(-1, 1) for values in given_batch]
        assert torch.allclose(importance_weights(*alone, kind, bound).view_as(weights), weights, **close)

    whole = gap_size(*given_batch, kind, bound)
    parts = [gap_size(*(values[rows] for values in given_batch), kind, bound) for rows in (slice(0, 1), slice(1, None))]
    together = GapSize(parts[0].sums + parts[1].sums, torch.maximum(parts[0].ratio_max, parts[1].ratio_max))
    assert torch.allclose(whole.sums, together.sums, rtol=1e-12)
    assert torch.allclose(whole.ratio_max, together.ratio_max, rtol=1e-12)
    moved_size = gap_size(*moved, kind, bound)
    assert torch.allclose(moved_size.sums, whole.sums, rtol=1e-12)
    assert torch.allclose(moved_size.ratio_max, whole.ratio_max, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ expected gradients
END, LENGTH, WORDS = 0, 3, 3
LOGITS = torch.tensor(  # of pi_old after each of PREFIXES
    [[0.2, 0.9, -0.4], [-0.5, 0.3, 0.8], [0.7, -0.6, 0.1], [0.0, 1.1, -0.8], [-0.3, 0.4, 0.5], [0.9, -0.2, 0.3]]
    + [[-0.7, 0.6, 0.2]],
    dtype=torch.float64,
)
ERRORS = torch.tensor(
    [[0.4, -0.3, 0.1], [-0.2, 0.5, 0.0], [0.3, 0.2, -0.5], [-0.4, 0.1, 0.3], [0.2, -0.1, -0.3], [0.0, 0.4, -0.2]]
    + [[-0.3, 0.0, 0.5]],
    dtype=torch.float64,
)
UPDATE = torch.tensor([[0.3, -0.4, 0.2], [-0.1, 0.5, -0.3]] * 3 + [[0.4, 0.0, -0.5]], dtype=torch.float64)
SAMPLER_LOGITS = LOGITS / 1.25 + ERRORS
PREFIXES = [prefix for n in range(LENGTH) for prefix in itertools.product((1, 2), repeat=n)]
RESPONSES = [
    (*prefix, *last)
    for prefix in PREFIXES
    for last in ([(END,)] if len(prefix) < LENGTH - 1 else [(word,) for word in range(WORDS)])
]
MASK = torch.tensor([[t < len(response) for t in range(LENGTH)] for response in RESPONSES])
SCORES = torch.tensor(  # A(y)
    [0.5, -1.0, 2.0, 0.3, -0.7, 1.4, -2.0, 0.9, 0.1, -0.4, 1.8, -1.2, 0.6, -0.9, 1.1], dtype=torch.float64
)
NO_BOUND = INF


def token_logprobs(logits: Tensor) -> Tensor:
    """log pi of each token of each response: (15, 3), junk where there is none."""
    tables = logits.log_softmax(1)
    rows = [
        torch.stack([tables[PREFIXES.index(y[:t]), y[t]] if t < len(y) else logits.new_tensor(-9.0) for t in range(3)])
        for y in RESPONSES
    ]
    return torch.stack(rows)


OLD, SAMPLER = token_logprobs(LOGITS), token_logprobs(SAMPLER_LOGITS)  # pi_old and mu


def chances(logprobs: Tensor) -> Tensor:
    """Of each response: (15,)."""
    return torch.where(MASK, logprobs, 0.0).sum(1).exp()


def exact_gradient() -> Tensor:
    """Of E_{y ~ pi}[A(y)] by the logits of pi at pi_old, without any score function."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad((chances(token_logprobs(logits)) * SCORES).sum(), logits)[0]


def learned_gradient(
    kind: str | None, bound: float = NO_BOUND, name: str = "clip", sampler: Tensor = SAMPLER
) -> Tensor:
    """Ascent direction of the library's loss over all responses, each as often as mu samples it (aggregation `sum`)."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = token_logprobs(logits)
    weights = MASK.double() if kind is None else importance_weights(OLD, sampler, MASK, kind, bound)
    losses = make_loss(name, 0.2, 0.28, None)(logprobs, logprobs - OLD, SCORES[:, None].expand_as(OLD), MASK)
    return -torch.autograd.grad((chances(sampler)[:, None] * weights * losses)[MASK].sum(), logits)[0]


def distance(found: Tensor) -> float:
    """Bias relative to the exact gradient, in the Euclidean norm."""
    return float((found - exact_gradient()).norm() / exact_gradient().norm())


def scores_of_tokens(factors: Tensor) -> Tensor:
    """Sum over responses y and tokens t of factors (15, 3) times A(y) grad log pi(y_t), by the logits."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad((factors * SCORES[:, None] * token_logprobs(logits))[MASK].sum(), logits)[0]


def test_both_policies_are_distributions_over_the_responses():
    assert len(RESPONSES) == 15
    for logprobs in (OLD, SAMPLER):
        assert float(chances(logprobs).sum()) == pytest.approx(1, abs=1e-12)
    size = gap_size(OLD, SAMPLER, MASK)
    assert size.ratio_max < 2 < (OLD - SAMPLER).where(MASK, 0.0).sum(1).exp().max()  # a bound of 2 cuts sequences only


@pytest.mark.parametrize("name", LOSSES)
def test_sequence_weights_give_the_exact_gradient(name):
    for kind in ("sequence_truncate", "sequence_mask"):
        assert torch.allclose(learned_gradient(kind, name=name), exact_gradient(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_token_weights_correct_a_token_at_a_time(name):
    """Sum over t of E[A(y)] with only token t from pi: prefixes and continuations are still those of mu."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = token_logprobs(logits)
    ratios = torch.where(MASK, logprobs - SAMPLER, 0.0).exp()  # (15, 3), of one token
    (expected,) = torch.autograd.grad((chances(SAMPLER) * SCORES * ratios.sum(1)).sum(), logits)
    for kind in ("token_truncate", "token_mask"):
        assert torch.allclose(learned_gradient(kind, name=name), expected, atol=1e-12, rtol=0)


BIASES = {  # of this example, relative to the norm of the gradient, by the bound
    "token_truncate": {1.3: 0.3011, 2: 0.3101, INF: 0.3101},
    "token_mask": {1.3: 0.6922, 2: 0.3101, INF: 0.3101},
    "sequence_truncate": {1.3: 0.1394, 2: 0.0071, INF: 0},
    "sequence_mask": {1.3: 0.6935, 2: 0.0494, INF: 0},
}


def test_the_measured_biases():
    assert distance(learned_gradient(None)) == pytest.approx(0.3907, abs=5e-5)  # without weights
    for kind, expected in BIASES.items():
        found = {bound: distance(learned_gradient(kind, bound)) for bound in expected}
        assert found == pytest.approx(expected, abs=5e-5), kind


def test_only_sequence_weights_remove_the_bias_of_first_order():
    """A gap ten times smaller has a tenth of the bias, with token weights and without; sequences have none."""

    def biases(size: float) -> list[float]:
        sampler = token_logprobs(LOGITS + size * (SAMPLER_LOGITS - LOGITS))
        kinds = (None, "token_truncate", "sequence_truncate")
        return [distance(learned_gradient(kind, 2.0, sampler=sampler)) for kind in kinds]

    (none, token, sequence), (small_none, small_token, small_sequence) = biases(1e-3), biases(1e-4)
    assert none / small_none == pytest.approx(10, rel=0.01) and token / small_token == pytest.approx(10, rel=0.01)
    assert max(sequence, small_sequence) < 1e-12 < small_token


def test_the_mean_size_of_the_gap_is_the_kl_of_mu_from_pi():
    """k3 over samples of mu; minus its sum over a response is the mean of log R."""
    rows = [gap_size(*(values[i : i + 1] for values in (OLD, SAMPLER, MASK))).sums[0] for i in range(15)]
    kl = float((chances(SAMPLER) * torch.stack(rows)).sum())
    log_ratio = torch.where(MASK, OLD - SAMPLER, 0.0).sum(1)
    assert kl == pytest.approx(-float((chances(SAMPLER) * log_ratio).sum()), abs=1e-12) and kl > 0.05


@pytest.mark.parametrize("bound", [1.1, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_cut_takes_exactly_the_part_out_of_bounds(kind, bound):
    """The mean of min(r, C) f over mu is that of r f less (r - C)_+ f, for r the ratio of a token or a sequence."""
    ratios = torch.where(MASK, OLD - SAMPLER, 0.0).exp()
    if kind.startswith("sequence"):
        ratios = ratios.prod(1, keepdim=True).expand_as(ratios)
    inside = (ratios >= 1 / bound) & (ratios <= bound)
    lost = (ratios - bound).clamp(min=0) if kind.endswith("truncate") else torch.where(inside, 0.0, ratios)
    expected = scores_of_tokens(chances(SAMPLER)[:, None] * lost)
    found = learned_gradient(kind) - learned_gradient(kind, bound)
    assert torch.allclose(found, expected, atol=1e-12, rtol=0)
    out_of_bounds = ratios > bound if kind.endswith("truncate") else ~inside
    assert bool(expected.norm() > 1e-3) == bool(out_of_bounds[MASK].any())  # nothing is lost within the bounds


def test_what_truncation_may_bias_shrinks_with_the_bound():
    """|bias| <= sum_y (pi - C mu)_+ |A grad log pi|, which falls with C, to 0 at the largest R."""
    largest = float((chances(OLD) / chances(SAMPLER)).max())
    bounds = [1.05, 1.2, 1.5, 2.0, largest + 1e-9]
    slopes = torch.stack([scores_of_tokens(one[:, None].expand_as(OLD)).norm() for one in torch.eye(15).double()])
    limits = [float(((chances(OLD) - c * chances(SAMPLER)).clamp(min=0) * slopes).sum()) for c in bounds]
    biases = [float((learned_gradient("sequence_truncate", c) - exact_gradient()).norm()) for c in bounds]
    assert all(bias <= limit + 1e-12 for bias, limit in zip(biases, limits))
    assert all(later < earlier for earlier, later in itertools.pairwise(limits))
    assert limits[-1] == 0 and biases[-1] < 1e-12 and biases[0] > 1e-2


LOSSES_AND_KL = [*LOSSES, "dual", "sequence ratio", "kl"]


def any_loss(name: str, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """A loss of each token at a policy that has moved from pi_old: (B, 3)."""
    log_ratio = torch.where(MASK, logprobs - OLD, 0.0)
    if name == "kl":
        return kl_loss(logprobs, token_logprobs(ERRORS), log_ratio)
    if name == "sequence ratio":
        return make_loss("clip", 0.2, 0.28, None)(logprobs, sequence_log_ratio(log_ratio, MASK), advantages, MASK)
    loss = make_loss("clip" if name == "dual" else name, 0.2, 0.28, 1.2 if name == "dual" else None)
    return loss(logprobs, log_ratio, advantages, MASK)


ADVANTAGES = torch.tensor([[1.0, -0.5, 0.3], [-2.0, 0.7, 1.2], [0.4, -1.1, 0.9]] * 5, dtype=torch.float64)


@pytest.mark.parametrize("name", LOSSES_AND_KL)
def test_after_updates_sequence_weights_give_the_gradient_on_samples_of_pi_old(name):
    """For each loss, clipped or not, advantages of tokens, and a KL in the loss: the weight multiplies all of it."""
    logits = (LOGITS + UPDATE).requires_grad_()
    losses = any_loss(name, token_logprobs(logits), ADVANTAGES)
    weights = importance_weights(OLD, SAMPLER, MASK, "sequence_truncate", NO_BOUND)

    def gradient(factors: Tensor) -> Tensor:
        return torch.autograd.grad((factors * losses)[MASK].sum(), logits, retain_graph=True)[0]

    expected, found = gradient(chances(OLD)[:, None]), gradient(chances(SAMPLER)[:, None] * weights)
    assert torch.allclose(found, expected, atol=1e-12, rtol=0)
    assert (gradient(chances(SAMPLER)[:, None]) - expected).norm() > 0.05 * expected.norm()


PAIRS = torch.cartesian_prod(torch.arange(15), torch.arange(15))  # (225, 2): all groups of two


def group_gradients(advantage: str, loss: TokenLoss, moved: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Ascent directions of a loss over all groups from pi_old, and over those from mu, of which a row's own loss alone
    is weighted; moved: what was added to the logits of pi_old since."""
    rows, group = PAIRS.flatten(), torch.arange(225).repeat_interleave(2)  # (450,) each
    advantages = group_advantages(SCORES[rows], group_moments(SCORES[rows], group, 225), GROUP_ADVANTAGES[advantage])
    logits = (LOGITS + moved).requires_grad_()
    logprobs = token_logprobs(logits)[rows]
    losses = loss(logprobs, logprobs - OLD[rows], advantages[:, None], MASK[rows])
    weights = torch.ones_like(OLD[rows])
    if kind is not None:
        weights = importance_weights(OLD[rows], SAMPLER[rows], MASK[rows], kind, NO_BOUND)

    def gradient(policy: Tensor, factors: Tensor) -> Tensor:
        chance = chances(policy)[PAIRS].prod(1)[group] / 2  # of the group, over its two rows
        total = (chance[:, None] * factors * losses)[MASK[rows]].sum()
        return -torch.autograd.grad(total, logits, retain_graph=True)[0]

    return gradient(OLD, torch.ones_like(weights)), gradient(SAMPLER, weights)


@pytest.mark.parametrize("name", ["rloo", "mean", "std"])
def test_a_mean_of_a_group_keeps_the_first_gradient_exact_and_a_deviation_does_not(name):
    loss, start = make_loss("clip", 0.2, 0.28, None), torch.zeros_like(LOGITS)
    expected, found = group_gradients(name, loss, start, "sequence_mask")
    if name == "std":
        assert (found - expected).norm() > 0.05 * expected.norm()
        return
    share = 1.0 if name == "rloo" else 0.5  # of two rows, r - mean is half of r - r'
    for gradients in (expected, found):
        assert torch.allclose(gradients, share * exact_gradient(), atol=1e-12, rtol=0)
    assert distance(group_gradients(name, loss, start, None)[1] / share) > 0.05


@pytest.mark.parametrize("name", ["linear", *LOSSES])
def test_after_updates_the_mean_of_others_is_exact_for_losses_linear_in_the_ratio_alone(name):
    """The others' scores come from mu without a weight: their mean drops out where the mean gradient of the loss for
    an advantage of 1 is 0, as that of the ratio is."""
    loss = make_loss("clip", 20.0, 20.0, None) if name == "linear" else make_loss(name, 0.2, 0.28, None)
    expected, found = group_gradients("rloo", loss, UPDATE, "sequence_mask")
    error = float((found - expected).norm() / expected.norm())
    assert error < 1e-12 if name == "linear" else error > 0.005


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", [*LOSSES, "dual"])
def test_weight_times_advantage_is_weight_times_loss(name, kind):
    """Losses are homogeneous in the advantage, so that PPO may scale advantages where GRPO scales losses."""
    weights = importance_weights(OLD, SAMPLER, MASK, kind, 1.3)
    logits = (LOGITS + UPDATE).requires_grad_()
    logprobs = token_logprobs(logits)
    one = (weights * any_loss(name, logprobs, ADVANTAGES))[MASK].sum()
    other = any_loss(name, logprobs, weights * ADVANTAGES)[MASK].sum()
    totals = [one, other]
    if name == "clip":  # PPO's own, whose range is symmetric
        losses = make_loss("clip", 0.2, 0.2, None)(logprobs, logprobs - OLD, ADVANTAGES, MASK)
        totals = [(weights * losses)[MASK].sum(), policy_loss(logprobs, OLD, weights * ADVANTAGES, MASK, 0.2)]
    first, second = (torch.autograd.grad(total, logits, retain_graph=True)[0] for total in totals)
    assert float(totals[0].detach()) == pytest.approx(float(totals[1].detach()), abs=1e-12)
    assert torch.allclose(first, second, atol=1e-12, rtol=0) and first.norm() > 0.1
