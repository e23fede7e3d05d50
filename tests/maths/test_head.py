"""Log-probabilities of a head: by hand in float64, and in chunks of each kind."""

import math

import pytest
import torch
from torch import nn

from lightrlhf.maths import head as heads


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_logprobs_equal_a_log_softmax_by_hand(temperature):
    hidden = torch.randn(7, 5, dtype=torch.float64)
    weight = torch.randn(11, 5, dtype=torch.float64)
    targets = torch.randint(11, (7,))
    logprobs, entropy, mean = heads.head_logprobs(
        hidden.float(), lambda h: h @ weight.float().T, targets, temperature, with_entropy=True, with_mean=True
    )
    for n in range(7):
        logits = [sum(float(hidden[n, i] * weight[v, i]) for i in range(5)) / temperature for v in range(11)]
        log_sum = math.log(sum(math.exp(x) for x in logits))
        by_hand = [x - log_sum for x in logits]
        assert float(logprobs[n]) == pytest.approx(by_hand[targets[n]], abs=1e-5)
        assert float(entropy[n]) == pytest.approx(-sum(math.exp(x) * x for x in by_hand), abs=1e-5)
        assert float(mean[n]) == pytest.approx(sum(by_hand) / 11, abs=1e-5)


def test_head_logprobs_in_chunks_have_the_same_values_and_gradients():
    """Also with entropies, for which no logits of all rows are made, forward or backward."""
    targets = torch.randint(11, (9,))
    weight = torch.randn(11, 5)
    results, sizes = [], {2: [], 4096: []}
    for chunk_size in (2, 4096):
        hidden = torch.randn(9, 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
        head = weight.clone().requires_grad_()

        def logits(h: torch.Tensor, head=head, counts=sizes[chunk_size]) -> torch.Tensor:
            counts.append(len(h))
            return h @ head.T

        rows = heads.head_logprobs(hidden, logits, targets, 1.0, True, True, chunk_size)
        sum(row.sum() for row in rows).backward()
        results.append([*rows, hidden.grad, head.grad])
    assert sizes == {2: [8, 1, 1, 8], 4096: [9]}  # computed again in the backward pass
    for one, other in zip(*results):
        assert torch.allclose(one, other, atol=1e-6)


def test_head_logprobs_are_the_same_whatever_else_is_asked():
    hidden, weight, targets = torch.randn(9, 5), torch.randn(11, 5), torch.randint(11, (9,))
    plain = heads.head_logprobs(hidden, lambda h: h @ weight.T, targets, 0.7)
    assert plain[1] is None and plain[2] is None
    for asked in ({"with_entropy": True}, {"with_mean": True}):
        assert torch.allclose(plain[0], heads.head_logprobs(hidden, lambda h: h @ weight.T, targets, 0.7, **asked)[0])


def test_head_logprobs_of_no_actions_are_empty():
    none = torch.zeros(0).long()
    logprobs, entropy, mean = heads.head_logprobs(torch.zeros(0, 5), lambda h: h, none, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,) and mean is None
    logprobs, entropy, mean = heads.head_logprobs(torch.zeros(0, 5), lambda h: h, none, with_mean=True)
    assert logprobs.shape == mean.shape == (0,) and entropy is None


def trained(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(6, 50, bias=bias, dtype=dtype)


def frozen() -> nn.Module:
    return trained(bias=True).requires_grad_(False)


KINDS = {"trained": trained, "frozen": frozen}


def gradients(head: nn.Module, chunk_size: int, temperature: float, likely: float = 0.0) -> list[torch.Tensor]:
    """Log-probabilities of 23 rows, and the gradients of a weighted sum of them; likely: how much targets are."""
    torch.manual_seed(6)
    hidden = torch.randn(23, 6).to(head.weight.dtype)
    targets, weights = torch.randint(50, (23,)), torch.randn(23)
    towards = head.weight.detach()[targets]
    hidden = (hidden + likely * 12 * towards / towards.norm(dim=1, keepdim=True)).requires_grad_()
    head.zero_grad()
    logprobs, *others = heads.head_logprobs(hidden, head, targets, temperature, chunk_size=chunk_size)
    assert others == [None, None]
    (logprobs * weights).sum().backward()
    return [logprobs.detach(), hidden.grad, *([] if head.weight.grad is None else [head.weight.grad])]


@pytest.mark.parametrize("most_rows", [4096, 10])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_in_parts_have_the_values_and_gradients_of_autograd(kind, temperature, most_rows, monkeypatch):
    """Of all rows, ten columns of the vocabulary of 50 at a time; of ten rows, 25."""
    monkeypatch.setattr(heads, "MOST_ROWS", most_rows)
    used, apply = [], heads.LinearHead.apply
    monkeypatch.setattr(heads.LinearHead, "apply", lambda *args: used.append(args) or apply(*args))
    whole, parts = (gradients(KINDS[kind](), rows, temperature) for rows in (23, 5))
    assert len(used) == 1 and len(whole) == (3 if kind == "trained" else 2)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, atol=1e-6), kind


def test_the_gradient_of_a_trained_head_is_that_of_float64():
    exact = gradients(trained(dtype=torch.float64), 5, 0.7)
    for one, other in zip(exact, gradients(trained(dtype=torch.float64), 23, 0.7), strict=True):
        assert torch.allclose(one, other, atol=1e-6)  # logits are float32 in both


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_under_autocast_are_as_exact_as_autograd(kind, dtype, monkeypatch):
    """Also where a target has nearly all of the probability, and the gradient is small."""
    for likely in (0.0, 3.0):
        with torch.autocast("cpu", dtype):
            whole, parts = (gradients(KINDS[kind](), rows, 0.7, likely) for rows in (23, 5))
        exact = gradients(KINDS[kind]().double(), 23, 0.7, likely)
        assert not torch.equal(parts[0].double(), exact[0].double())
        for one, other, true in zip(whole, parts, exact, strict=True):
            error, own_error = (float((found - true).abs().max() / true.abs().max()) for found in (one, other))
            assert own_error <= 3 * error + 1e-3, (kind, likely)  # 30 times as large where p is rounded first


@pytest.mark.parametrize("kind", KINDS)
def test_heads_in_parts_have_the_same_values_without_gradients(kind, monkeypatch):
    used, apply = [], heads.LinearHead.apply
    monkeypatch.setattr(heads.LinearHead, "apply", lambda *args: used.append(args) or apply(*args))
    head = KINDS[kind]()
    hidden, targets = torch.randn(23, 6), torch.randint(50, (23,))
    with torch.inference_mode():
        whole, parts = (heads.head_logprobs(hidden, head, targets, chunk_size=rows)[0] for rows in (23, 5))
    assert torch.allclose(whole, parts, atol=1e-6) and len(used) == 1


@pytest.mark.parametrize("target", [-100, 50])
def test_a_target_outside_of_the_vocabulary_has_no_log_probability(target):
    targets = torch.randint(50, (23,))
    targets[7] = target
    logprobs = heads.head_logprobs(torch.randn(23, 6), trained(), targets, chunk_size=5)[0]
    assert logprobs.isnan().nonzero().tolist() == [[7]]


def test_parts_are_whole_and_have_so_many_logits():
    targets = torch.randint(1000, (4100,))
    for count, width in ((2**20, 2**20 // 4096), (300_000, 64), (250_000, 61), (7, 1)):
        parts = [(rows, part) for rows, part, *_ in heads._parts(targets[:4096], 1000, count)]
        assert {rows.stop for rows, _ in parts} == {4096} and parts[0][1] == slice(0, width)
        assert [part.start for _, part in parts[1:]] == [part.stop for _, part in parts[:-1]]
        assert parts[-1][1].stop == 1000
    rows = [rows for rows, part, *_ in heads._parts(targets, 1000, 2**30)]
    assert rows == [slice(0, 4096), slice(4096, 8192)]


def test_heads_of_other_kinds_are_left_to_autograd():
    """A bias that is trained, adapters, and logits that are no product of weights."""
    others = (trained(bias=True), nn.Sequential(trained()), nn.Identity(), lambda h: h)
    assert heads.is_linear(trained()) and heads.is_linear(frozen()) and not any(map(heads.is_linear, others))
    whole, parts = (gradients(trained(bias=True), rows, 1.0) for rows in (23, 5))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(whole, parts, strict=True))


def test_rows_at_a_time_follow_from_the_vocabulary():
    assert [heads.logit_rows(size) for size in (50, 4096, 49152, 2**17, 2**30)] == [4096, 1024, 85, 32, 1]
    assert [heads.logit_rows(size, "cuda") for size in (50, 49152, 2**17)] == [4096, 1365, 512]
