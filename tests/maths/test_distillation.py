"""Divergences and the gradients of both objectives against enumeration over all texts of a tiny vocabulary, float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.tables import LENGTH, Table, V, texts

from lightrlhf.maths.distillation import divergence, kl, later_sum, other_rows_mean, span_logprobs


def by_hand(student: list[float], teacher: list[float], beta: float) -> float:
    def plain(first: list[float], second: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second) if a)

    if beta in (0.0, 1.0):
        return plain(student, teacher) if beta else plain(teacher, student)
    mixture = [beta * q + (1 - beta) * p for p, q in zip(student, teacher)]
    return beta * plain(teacher, mixture) + (1 - beta) * plain(student, mixture)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_a_divergence_equals_its_formula_and_is_zero_at_the_teacher(beta):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    found = divergence(student, teacher, beta)
    for row in range(4):
        expected = by_hand(student[row].exp().tolist(), teacher[row].exp().tolist(), beta)
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    same = student.clone().requires_grad_()
    (value := divergence(same.log_softmax(-1), student, beta).sum()).backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-12) and float(same.grad.abs().max()) < 1e-12


def test_a_token_without_probability_adds_nothing_to_a_kl():
    first = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    second = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log()
    assert float(kl(first, second)) == pytest.approx(0.5 * math.log(2))
    assert float(kl(second, first)) == math.inf


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_objective_by_position_holds_prefixes_fixed(beta):
    student, teacher = Table(1), Table(2)
    expected = torch.zeros((), dtype=torch.float64)
    for text in texts():  # the sum over prefixes: how likely each is, held fixed, times the divergence behind it
        by_position = divergence(student.logprobs(text), teacher.logprobs(text).detach(), beta)
        expected = expected + student.logprob(text).exp().detach() * by_position.sum()
    (gradient,) = torch.autograd.grad(expected, student.logits)
    found = torch.zeros_like(student.logits)
    for row, prefix in enumerate(student.prefixes):
        reached = math.prod(
            float(student.logprobs(prefix + (0,)).detach()[t, token].exp()) for t, token in enumerate(prefix)
        )
        logits = student.logits[row].detach().clone().requires_grad_()
        divergence(
            logits.log_softmax(-1)[None], teacher.logits[row].log_softmax(-1)[None].detach(), beta
        ).sum().backward()
        found[row] = reached * logits.grad
    assert torch.allclose(gradient, found, atol=1e-12)


def enumerated_sequence_kl(student: Table, teacher: Table) -> torch.Tensor:
    """sum_y p(y) (log p(y) - log q(y)), as it stands."""
    return sum(
        student.logprob(text).exp() * (student.logprob(text) - teacher.logprob(text).detach()) for text in texts()
    )


def sequence_loss(student: Table, teacher: Table, text: tuple[int, ...], baseline: float = 0.0) -> torch.Tensor:
    """The loss of one response as the program has it: sum_t KL_t + log p(y_t) (sum of the later ones - baseline)."""
    own = student.logprobs(text)
    exact = kl(own, teacher.logprobs(text).detach())[None]  # (1, T)
    mask = torch.ones(1, len(text), dtype=torch.bool)
    later = later_sum(exact.detach(), mask) - baseline
    taken = own[torch.arange(len(text)), torch.tensor(text)][None]
    return (exact + taken * later).sum()


def test_the_objective_of_sequences_is_the_kl_of_whole_responses():
    student, teacher = Table(3), Table(4)
    (expected,) = torch.autograd.grad(enumerated_sequence_kl(student, teacher), student.logits)
    for baseline in (0.0, 0.7):  # a baseline changes nothing
        total = sum(
            student.logprob(text).exp().detach() * sequence_loss(student, teacher, text, baseline) for text in texts()
        )
        (found,) = torch.autograd.grad(total, student.logits)
        assert torch.allclose(found, expected, atol=1e-12)
    by_position = sum(
        student.logprob(text).exp().detach() * kl(student.logprobs(text), teacher.logprobs(text).detach()).sum()
        for text in texts()
    )
    (other,) = torch.autograd.grad(by_position, student.logits)
    assert not torch.allclose(other, expected, atol=1e-3)  # the objectives differ


def test_the_exact_terms_have_less_variance_than_k1_with_return_to_go():
    student, teacher = Table(5), Table(6)
    moments = {}
    for name in ("exact", "sampled"):
        first, second = torch.zeros_like(student.logits), torch.zeros_like(student.logits)
        for text in texts():
            weight = float(student.logprob(text).detach().exp())
            if name == "exact":
                loss = sequence_loss(student, teacher, text)
            else:
                own, other = student.logprobs(text), teacher.logprobs(text).detach()
                taken = torch.arange(len(text)), torch.tensor(text)
                cost = (own - other)[taken].detach()
                loss = (own[taken] * cost.flip(0).cumsum(0).flip(0)).sum()
            (gradient,) = torch.autograd.grad(loss, student.logits)
            first, second = first + weight * gradient, second + weight * gradient**2
        moments[name] = first, float((second - first**2).sum())
    assert torch.allclose(moments["exact"][0], moments["sampled"][0], atol=1e-12)
    assert moments["exact"][1] < moments["sampled"][1]


def test_later_values_are_summed_over_actions_alone():
    mask = torch.tensor([[False, True, True, False, True]])
    values = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0]])
    assert later_sum(values, mask).tolist() == [[0.0, 6.0, 4.0, 0.0, 0.0]]


def test_the_baseline_is_of_the_other_rows_at_the_same_action():
    mask = torch.tensor([[False, True, True, True], [True, True, False, False], [True, False, False, False]])
    values = torch.tensor([[9.0, 1.0, 2.0, 3.0], [4.0, 6.0, 9.0, 9.0], [5.0, 9.0, 9.0, 9.0]])
    found = other_rows_mean(values, mask, torch.tensor([0, 0, 1]), 2, 5)
    assert found.tolist() == [[0, 4, 6, 0], [1, 2, 0, 0], [0, 0, 0, 0]]


def test_a_baseline_of_the_group_leaves_the_expected_gradient():
    """Over all pairs of responses, weighted by how likely they are."""
    student, teacher = Table(7), Table(8)
    (expected,) = torch.autograd.grad(enumerated_sequence_kl(student, teacher), student.logits)
    found = torch.zeros_like(expected)
    for pair in itertools.product(texts(), repeat=2):
        width = max(map(len, pair))
        mask = torch.zeros(2, width, dtype=torch.bool)
        exact, taken = (torch.zeros(2, width, dtype=torch.float64) for _ in range(2))
        for row, text in enumerate(pair):
            own = student.logprobs(text)
            exact[row, : len(text)] = kl(own, teacher.logprobs(text).detach())
            taken[row, : len(text)] = own[torch.arange(len(text)), torch.tensor(text)]
            mask[row, : len(text)] = True
        later = later_sum(exact.detach(), mask)
        later = later - other_rows_mean(later, mask, torch.zeros(2, dtype=torch.int64), 1, LENGTH)
        weight = math.prod(float(student.logprob(text).detach().exp()) for text in pair)
        (gradient,) = torch.autograd.grad((exact + taken * later).sum() / 2, student.logits)
        found += weight * gradient
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("objective", ["position", "sequence"])
def test_off_policy_the_objective_is_the_one_at_the_states_of_the_policy_that_sampled(objective):
    """The sum over prefixes of p_old(prefix) [KL(p, q) + sum_a p(a) (later KL under p_old)], as in 1502.05477."""
    student, teacher, old = Table(9), Table(10), Table(11)
    later = dict.fromkeys(student.prefixes, 0.0)  # KL of the positions behind a prefix, its own included, by p_old
    for prefix in sorted(student.prefixes, key=len, reverse=True):
        own, other = (table.logits[student.prefixes.index(prefix)].log_softmax(-1).detach() for table in (old, teacher))
        children = [later.get((*prefix, token), 0.0) for token in range(V)]
        later[prefix] = float(kl(own[None], other[None])) + sum(float(own[a].exp()) * children[a] for a in range(V))
    expected = torch.zeros((), dtype=torch.float64)
    for row, prefix in enumerate(student.prefixes):
        reached = float(old.logprob((*prefix, 0)).detach().exp() / old.logprobs((*prefix, 0))[-1, 0].detach().exp())
        own, other = student.logits[row].log_softmax(-1), teacher.logits[row].log_softmax(-1).detach()
        term = kl(own[None], other[None])[0]
        if objective == "sequence":
            term = term + sum(own[a].exp() * later.get((*prefix, a), 0.0) for a in range(V))
        expected = expected + reached * term
    (expected,) = torch.autograd.grad(expected, student.logits)
    found = torch.zeros_like(expected)
    for text in texts():
        own, before, other = (table.logprobs(text) for table in (student, old, teacher))
        mask, at = torch.ones(1, len(text), dtype=torch.bool), (torch.arange(len(text)), torch.tensor(text))
        costs = (
            later_sum(kl(before, other).detach()[None], mask)[0] if objective == "sequence" else torch.zeros(len(text))
        )
        ratio = (own[at] - before[at]).exp().detach()
        loss = (kl(own, other.detach()) + ratio * costs * own[at]).sum()
        (gradient,) = torch.autograd.grad(loss, student.logits)
        found += float(old.logprob(text).detach().exp()) * gradient
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("span", [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)], ids=str)
def test_the_chain_rule_for_merged_tokens_is_a_share_of_all_texts(span):
    """With values and gradients: the texts that begin with a span and its prefix, among those with the prefix."""
    table, text = Table(12), (1, 2, 1)

    def beginning(prefix: tuple[int, ...]) -> torch.Tensor:
        return sum(table.logprob(one).exp() for one in texts() if one[: len(prefix)] == prefix)

    found = span_logprobs(table.logprobs(text), torch.tensor(text), torch.tensor(span))
    assert found.shape == (span[-1] + 1, V)
    starts = [span.index(number) for number in range(len(found))]
    rows = [
        [(beginning((*text[: stop - 1], v)) / beginning(text[:start])).log() for v in range(V)]
        for start, stop in zip(starts, [*starts[1:], len(text)])
    ]
    expected = torch.stack([torch.stack(row) for row in rows])
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.arange(float(found.numel()), dtype=torch.float64).view_as(found)
    gradients = [torch.autograd.grad((one * weights).sum(), table.logits)[0] for one in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-12)
    if span == (0, 1, 2):  # nothing is merged
        assert torch.equal(found, table.logprobs(text))
