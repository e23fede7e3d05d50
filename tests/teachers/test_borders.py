"""Borders of words: a token judged by what follows the last one has the gradient of the whole response's judgement."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import tables, tiny_policy
from helpers.rollouts import rollout_of
from helpers.tokenizers import byte_tokenizer

from lightrlhf.cli.errors import UsageError
from lightrlhf.rewards.encoding import samples_of
from lightrlhf.teachers.borders import crosses_words, last_borders, sum_from, token_starts
from lightrlhf.teachers.teacher import ForeignTeacher, later_gap, tell_texts


def test_a_border_is_known_with_the_next_words_first_character():
    assert last_borders("ab c  d e", torch.arange(10)).tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2, 7]
    assert last_borders("\u00e9 a", torch.tensor([5])).tolist() == [0]  # another letter than ASCII's
    assert sum_from(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]), torch.tensor([0, 2, 3, 5])).tolist() == [
        7.0,
        6.0,
        4.0,
        0.0,
    ]


def test_tokens_begin_at_bytes():
    tokenizer = byte_tokenizer([("a", "b")])
    ids = [*tokenizer.encode("ab \u00e9"), 0, 0]
    assert token_starts(tokenizer, ids, "ab \u00e9").tolist() == [0, 2, 3, 4, 5, 5]
    assert token_starts(tokenizer, ids, "other words").tolist() == [0] * 6
    names = ["\u2581ab", "\u2581", "<0xC3>", "<0xA9>", "</s>"]  # as of SentencePiece, which begins with a space
    piece = SimpleNamespace(get_vocab=lambda: {}, convert_ids_to_tokens=lambda ids: [names[i] for i in ids])
    assert token_starts(piece, [0, 1, 2, 3, 4], "ab \u00e9").tolist() == [0, 2, 3, 4, 5]
    assert token_starts(piece, [1, 2, 3, 4], " \u00e9").tolist() == [0, 1, 2, 3]


def test_a_tokenizer_with_tokens_of_several_words_is_refused():
    student, teacher = byte_tokenizer(), byte_tokenizer([("a", "\u0120")])
    assert crosses_words(teacher) and not crosses_words(byte_tokenizer([("\u0120", "a"), ("\u010a", "\u0120")]))
    with pytest.raises(UsageError, match="--text_return"):
        ForeignTeacher(tiny_policy("llama", vocab_size=len(teacher)), teacher, student, by_word=True)


def test_the_expected_gradient_is_that_of_whole_responses(monkeypatch):
    """Of all texts of letters and spaces, whose letters the teacher joins."""
    monkeypatch.setattr(tables, "LENGTH", 6)
    student, teacher = byte_tokenizer(), byte_tokenizer([("a", "a"), ("\u0120", "a")])
    policy = tiny_policy("llama", vocab_size=len(teacher), eos_token_id=0, bos_token_id=0, pad_token_id=0)
    words = [0, *student.encode("a"), *student.encode(" ")]
    table, texts = tables.Table(1), tables.texts()
    rows = [[words[token] for token in text] for text in texts]
    rollout = rollout_of(
        [student.encode("Hi")] * len(rows), rows, truncated=[row[-1] != 0 for row in rows], tokenizer=student
    )
    by_token = [table.logprobs(text)[torch.arange(len(text)), torch.tensor(text)] for text in texts]
    logprobs = torch.zeros_like(rollout.logprobs)
    logprobs[rollout.action_mask] = torch.cat(by_token).detach().float()
    rollout = dataclasses.replace(rollout, logprobs=logprobs)
    told = tell_texts(ForeignTeacher(policy, teacher, student, by_word=True), rollout, None, 64)
    whole = (logprobs - told.logprobs).sum(1, keepdim=True).expand_as(logprobs) * rollout.action_mask
    gradients, spread = [], []
    for costs in (whole, told.to_go):
        found = [costs[i][rollout.action_mask[i]].double() for i in range(len(rows))]
        chance = [own.sum().detach().exp() for own in by_token]
        loss = sum(p * (own * cost).sum() for p, own, cost in zip(chance, by_token, found))
        gradients.append(torch.autograd.grad(loss, table.logits, retain_graph=True)[0])
        spread.append(float(sum(p * cost.square().sum() for p, cost in zip(chance, found))))
    assert torch.allclose(*gradients, atol=1e-5) and float(gradients[0].abs().max()) > 0.01
    assert spread[1] < spread[0] and not torch.equal(told.to_go, whole)


@pytest.mark.parametrize("written", ["ab ", "a b a", "ab cd, ab cd"])
def test_a_text_that_the_teacher_writes_otherwise_is_judged_as_a_whole(written):
    """One with other bytes, as many bytes, or a token that ends where the text does."""
    student, teacher = byte_tokenizer(), byte_tokenizer([("a", "b")])
    foreign = ForeignTeacher(tiny_policy("llama", vocab_size=len(teacher)), teacher, student, by_word=True)
    rollout = rollout_of([student.encode("Hi")], [student.encode("ab cd")], tokenizer=student)
    (sample,), logprobs = samples_of(rollout), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    ids = teacher.encode(written)
    values = torch.full([len(ids)], -10.0)
    gaps = later_gap(foreign, sample, logprobs, ids, values)
    assert gaps.tolist() == [15.0 + 10 * len(ids)] * 5
