"""Policy losses, weights of tokens and KL terms against the papers' formulas in float64; KL gradients enumerated."""

import itertools
import math

import pytest
import torch

from lightrlhf.maths.groups import group_advantages, group_moments, leave_one_out
from lightrlhf.maths.ops import gae, kl_k1, kl_k2, kl_k3
from lightrlhf.maths.policy_losses import (
    AGGREGATIONS,
    SAPO_TEMPERATURES,
    entropy_bonus,
    kl_loss,
    make_loss,
    sequence_log_ratio,
    token_weights,
)

LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def by_hand(name: str, logprob: float, old: float, advantage: float) -> float:
    """The loss of one token, from its paper."""
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    if name == "clip":
        return max(-ratio * advantage, -clipped * advantage)
    if name == "dual":
        loss = max(-ratio * advantage, -clipped * advantage)
        return min(loss, -DUAL * advantage) if advantage < 0 else loss
    if name == "cispo":
        return -clipped * advantage * logprob
    if name == "sapo":
        tau = SAPO_TEMPERATURES[0] if advantage > 0 else SAPO_TEMPERATURES[1]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    return -advantage * logprob


def slope_by_hand(name: str, logprob: float, old: float, advantage: float) -> float:
    """Its derivative by log pi; the ratio that weighs cispo is a constant."""
    if name == "cispo":
        return by_hand(name, logprob, old, advantage) / logprob
    step = 1e-6
    return (by_hand(name, logprob + step, old, advantage) - by_hand(name, logprob - step, old, advantage)) / (2 * step)


@pytest.mark.parametrize("name", ["clip", "dual", "cispo", "sapo", "reinforce"])
def test_losses_and_gradients_equal_a_float64_reference(name):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, generator=generator, dtype=torch.float64) - 0.2
    logprobs = (old + torch.randn(6, 9, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    loss = make_loss("clip" if name == "dual" else name, LOW, HIGH, DUAL if name == "dual" else None)
    losses = loss(logprobs, logprobs - old, advantages, torch.ones(6, 9, dtype=torch.bool))
    losses.sum().backward()
    for row, column in itertools.product(range(6), range(9)):
        given = [float(part[row, column]) for part in (logprobs.detach(), old, advantages)]
        assert float(losses[row, column].detach()) == pytest.approx(by_hand(name, *given), abs=1e-12)
        assert float(logprobs.grad[row, column]) == pytest.approx(slope_by_hand(name, *given), abs=1e-7)


def test_at_ratio_one_all_losses_have_the_gradient_of_reinforce():
    logprobs = -torch.rand(3, 4, dtype=torch.float64) - 0.1
    advantages = torch.randn(3, 4, dtype=torch.float64)
    for name in ("clip", "cispo", "sapo", "reinforce"):
        values = logprobs.clone().requires_grad_()
        loss = make_loss(name, LOW, HIGH, None)(
            values, values - logprobs, advantages, torch.ones(3, 4, dtype=torch.bool)
        )
        loss.sum().backward()
        assert torch.allclose(values.grad, -advantages, atol=1e-12), name


def test_a_ratio_of_sequences_is_the_geometric_mean_over_actions():
    """GSPO (2507.18071, eq. 5-7): the gradient of the loss of a response is A s / T at each of its tokens."""
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    log_ratio = torch.tensor([[0.1, 9.0, -0.2, 0.4], [9.0, 0.01, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    of_rows = sequence_log_ratio(log_ratio, mask)
    assert of_rows[mask].tolist() == pytest.approx([0.1, 0.1, 0.1, 0.01]) and of_rows[~mask].abs().max() == 0
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64)
    losses = make_loss("clip", LOW, HIGH, None)(log_ratio, of_rows, advantages, mask)
    weights = token_weights(mask, torch.tensor([0, 1]), 2, "sequence", 4)
    (weights * losses)[mask].sum().backward()
    first, second = -2 * math.exp(0.1) / 3 / 2, math.exp(0.01) / 2
    assert log_ratio.grad.flatten().tolist() == pytest.approx([first, 0, first, first, 0, second, 0, 0])


# ----------------------------------------------------------------------------------------------------------- weights
LENGTHS, MATES = [3, 1, 0, 4, 2, 2], [0, 0, 1, 1, 3, 3]  # group 2 has no row, row 2 no action


def rows(lengths: list[int], width: int) -> torch.Tensor:
    """Action masks with a gap after the first action."""
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, [1, *range(3, width)][:length]] = True
    return mask


def weight_by_hand(name: str, row: int) -> float:
    """Of a token of this row: frontier papers' 1/N, 1/(B T_i), 1/B, 1/(B H) and 1/(P N_p)."""
    tokens, sequences, prompts = sum(LENGTHS), sum(length > 0 for length in LENGTHS), 3
    of_prompt = sum(length for length, group in zip(LENGTHS, MATES) if group == MATES[row])
    longest = 9
    return {
        "token": 1 / tokens,
        "sequence": 1 / sequences / max(LENGTHS[row], 1),
        "sum": 1 / sequences,
        "constant": 1 / sequences / longest,
        "prompt": 1 / prompts / of_prompt,
    }[name]


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("width", [7, 12])
def test_weights_equal_a_reference_whatever_the_padding(name, width):
    mask = rows(LENGTHS, width)
    weights = token_weights(mask, torch.tensor(MATES), 4, name, 9)
    for row in range(len(LENGTHS)):
        assert weights[row][mask[row]].tolist() == pytest.approx([weight_by_hand(name, row)] * LENGTHS[row], rel=1e-6)
    assert weights[~mask].abs().max() == 0 and weights.isfinite().all()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_of_ranks_are_those_of_one(name):
    mask, group = rows(LENGTHS, 8), torch.tensor(MATES)
    whole = token_weights(mask, group, 4, name, 9)
    parts = [slice(0, 1), slice(1, 5), slice(5, 6)]
    sums: list[torch.Tensor] = []
    for part in parts:
        token_weights(mask[part], group[part], 4, name, 9, lambda local: sums.append(local) or local)
    for part in parts:
        found = token_weights(mask[part], group[part], 4, name, 9, lambda local: sum(sums[1:], sums[0]))
        assert torch.equal(found, whole[part])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_episode_of_several_rows_weighs_as_one_row(name):
    """Cut into rows with 2, 0 and 1, and with 3 and 1 of its actions, which do not lie side by side."""
    whole = token_weights(rows([3, 1, 0, 4], 12), torch.tensor([0, 0, 1, 1]), 3, name, 9)
    mask, group = rows([2, 3, 0, 1, 0, 1, 1], 7), torch.tensor([0, 1, 0, 0, 1, 1, 0])
    episode = torch.tensor([7, 2, 7, 5, 4, 2, 7])
    weights = token_weights(mask, group, 3, name, 9, episode=episode)
    for number, row in ((7, 0), (5, 1), (2, 3)):
        found = weights[episode == number][mask[episode == number]]
        assert found.tolist() == pytest.approx(whole[row][whole[row] > 0].tolist())
    assert weights[~mask].abs().max() == 0


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_no_action_at_all_has_no_weight(name):
    weights = token_weights(torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1]), 2, name, 9)
    assert weights.abs().max() == 0


# ---------------------------------------------------------------------------------------------------------------- KL
POLICY = torch.tensor([0.9, -0.3, 0.2, -1.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.4, -0.5, 0.3], dtype=torch.float64).log_softmax(0)
OTHER = torch.tensor([-0.2, 0.5, 0.3, 0.1], dtype=torch.float64).log_softmax(0)  # pi_old when it is not pi


def kl_gradients(reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by the logits of KL(pi || ref) and KL(ref || pi)."""
    logits = POLICY.clone().requires_grad_()
    policy = logits.log_softmax(0)
    reverse = (policy.exp() * (policy - reference)).sum()
    forward = (reference.exp() * (reference - policy)).sum()
    return tuple(torch.autograd.grad(term, logits, retain_graph=True)[0] for term in (reverse, forward))


def expected_gradient(term, old: torch.Tensor | None) -> torch.Tensor:
    """Mean over samples of pi_old, all of them with their probabilities, of a term's gradient by the logits."""
    logits = POLICY.clone().requires_grad_()
    policy = logits.log_softmax(0)
    sampler = policy.detach() if old is None else old
    (sampler.exp() * term(policy, policy - sampler)).sum().backward()
    return logits.grad


REVERSE, FORWARD = kl_gradients(REFERENCE)
TERMS = {  # name: term, gradient on samples of pi, gradient on samples of pi_old; None: of neither divergence
    "k1": (lambda p, r: kl_k1(p, REFERENCE), torch.zeros(4, dtype=torch.float64), None),
    "k2": (lambda p, r: kl_k2(p, REFERENCE), REVERSE, None),
    "k3": (lambda p, r: kl_k3(p, REFERENCE), FORWARD, None),
    "ours: rho k2, rho constant": (lambda p, r: kl_loss(p, REFERENCE, r), REVERSE, REVERSE),
    "rho k3, rho constant": (lambda p, r: r.detach().exp() * kl_k3(p, REFERENCE), FORWARD, FORWARD),
    "rho k1": (lambda p, r: r.exp() * kl_k1(p, REFERENCE), REVERSE, REVERSE),
    "rho k2": (lambda p, r: r.exp() * kl_k2(p, REFERENCE), None, None),
    "rho k3": (lambda p, r: r.exp() * kl_k3(p, REFERENCE), REVERSE, REVERSE),
    "k1 in the reward, of pi_old": (
        lambda p, r: r.exp() * kl_k1((p - r).detach(), REFERENCE),
        REVERSE,
        REVERSE - kl_gradients(OTHER)[0],
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_table_of_kl_terms_in_the_loss(name):
    term, on_policy, off_policy = TERMS[name]
    for old, expected in ((None, on_policy), (OTHER, off_policy)):
        found = expected_gradient(term, old)
        if expected is None:
            assert all((found - right).abs().max() > 1e-3 for right in (REVERSE, FORWARD))
        else:
            assert torch.allclose(found, expected, atol=1e-12)


LENGTH, WORDS = 2, 3


def sequences() -> list[tuple[int, int]]:
    return list(itertools.product(range(WORDS), repeat=LENGTH))


def sequence_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Of each token of each sequence, the second depending on the first: (9, 2)."""
    first, second = logits[0].log_softmax(0), logits[1:].log_softmax(1)
    return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in sequences()])


def test_a_kl_in_the_reward_to_go_has_the_gradient_of_the_sequence_kl():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1 + WORDS, WORDS, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = sequence_logprobs(torch.randn(1 + WORDS, WORDS, generator=generator, dtype=torch.float64))
    logprobs = sequence_logprobs(logits)  # (9, 2)
    chance = logprobs.sum(1).exp()
    (expected,) = torch.autograd.grad((chance * (logprobs - reference).sum(1)).sum(), logits, retain_graph=True)

    penalty = -kl_k1(logprobs.detach(), reference)  # the reward of each token
    mask = torch.ones(9, 2, dtype=torch.bool)
    to_go = gae(penalty, torch.zeros_like(penalty), mask, 1.0, 1.0)[0]
    loss = (chance.detach()[:, None] * -to_go * logprobs).sum()
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.allclose(found, expected, atol=1e-12)

    pairs = torch.zeros_like(expected)  # a group of two, each the other's baseline
    total = penalty.sum(1)
    for i, j in itertools.product(range(9), repeat=2):
        returns = torch.stack([total[i], total[j]])
        advantages = group_advantages(returns, group_moments(returns, torch.tensor([0, 0]), 1), leave_one_out)
        loss = -(advantages * torch.stack([logprobs[i].sum(), logprobs[j].sum()])).mean()
        pairs += chance[i].detach() * chance[j].detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(pairs, expected, atol=1e-12)


def test_rewards_to_go_pass_over_tokens_that_are_no_actions():
    """A response of two turns with an observation of two tokens between them."""
    mask = torch.tensor([[False, True, True, False, False, True, True]])
    rewards = torch.tensor([[0.0, -0.1, -0.2, 0.0, 0.0, -0.3, 1.0]], dtype=torch.float64)
    to_go = gae(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)[0]
    assert to_go[0].tolist() == pytest.approx([0, 0.4, 0.5, 0, 0, 0.7, 1.0])


def test_the_entropy_bonus_and_its_gradient_equal_a_float64_reference():
    """dH / dz_v = -p_v (log p_v + H) by a logit, times the weight of the state; off actions there is none."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)  # (B, T-1, V)
    weights, mask = torch.rand(2, 3, dtype=torch.float64), torch.tensor([[True, True, False], [False, True, True]])
    logprobs = logits.log_softmax(-1)
    bonus = entropy_bonus(-(logprobs.exp() * logprobs).sum(-1), weights, mask)
    bonus.backward()
    expected = 0.0
    for b, t in mask.nonzero().tolist():
        total = sum(math.exp(z) for z in logits[b, t].tolist())
        shares = [math.exp(z) / total for z in logits[b, t].tolist()]
        entropy = -sum(p * math.log(p) for p in shares)
        expected += float(weights[b, t]) * entropy
        slopes = [-float(weights[b, t]) * p * (math.log(p) + entropy) for p in shares]
        assert logits.grad[b, t].tolist() == pytest.approx(slopes, abs=1e-12)
    assert bonus.item() == pytest.approx(expected, abs=1e-12)
    assert not logits.grad[~mask].any()
