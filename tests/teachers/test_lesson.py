"""Lessons of teachers: the estimators by enumeration in float64, averages, several teachers, other tokenizers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import mixed_batch, rows_of, tiny_policy
from helpers.rollouts import rollout_of
from helpers.tables import Table, V, texts
from helpers.tokenizers import byte_tokenizer

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TeacherArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.distill import DistillArgs, load_student
from lightrlhf.generation.rollout import score_logprobs
from lightrlhf.maths.distillation import FLOOR, divergence, in_buckets, kl, later_sum, with_tail
from lightrlhf.teachers.drift import Drift
from lightrlhf.teachers.lesson import Lesson, TaughtBatch
from lightrlhf.teachers.teacher import ForeignTeacher, Seen, Teachers, Told, load_teacher, tell, tell_texts


def run_of(**flags) -> SimpleNamespace:
    args = TeacherArgs(teacher="x", **flags)
    return SimpleNamespace(args=args, device=torch.device("cpu"), autocast=nullcontext)


def told_by(teacher: Table, text: tuple[int, ...], count: int) -> Told:
    """What a teacher tells of a text behind a prompt of one token."""
    logprobs = teacher.logprobs(text).detach()
    top = logprobs.topk(count) if count else None
    own = logprobs[torch.arange(len(text)), torch.tensor(text)][None]
    return Told(logprobs=own, ids=top and top.indices[None], top=top and top.values[None])


def reached(table: Table, prefix: tuple[int, ...]) -> torch.Tensor:
    """The probability of a prefix."""
    whole = table.logprobs((*prefix, 0)).detach()
    return torch.stack(
        [torch.ones((), dtype=torch.float64), *(whole[t, token].exp() for t, token in enumerate(prefix))]
    ).prod()


def divergence_at(student: Table, teacher: Table, prefix, args: TeacherArgs) -> torch.Tensor:
    """The divergence behind a prefix, of the whole vocabulary or of the teacher's likeliest tokens and the others."""
    row = student.prefixes.index(prefix)
    own, other = student.logits[row].log_softmax(-1)[None], teacher.logits[row].log_softmax(-1)[None].detach()
    if args.estimator == "top_k":
        ids = other.topk(args.teacher_top_k).indices[0].tolist()
        rest = [token for token in range(V) if token not in ids]
        own, other = (torch.cat([one[:, ids], one[:, rest].logsumexp(-1, keepdim=True)], 1) for one in (own, other))
    return divergence(own, other, args.beta)[0]


def objective(student: Table, teacher: Table, old: Table, args: TeacherArgs) -> torch.Tensor:
    """The sum over prefixes of p_old(prefix) [D(p, q) + sum_a p(a) (later KL under p_old)]; the last of sequences."""
    behind: dict[tuple[int, ...], float] = {}
    for prefix in sorted(student.prefixes, key=len, reverse=True):
        own = old.logits[student.prefixes.index(prefix)].log_softmax(-1).detach().exp()
        later = sum(float(own[a]) * behind.get((*prefix, a), 0.0) for a in range(V))
        behind[prefix] = float(divergence_at(old, teacher, prefix, args).detach()) + later
    total = torch.zeros((), dtype=torch.float64)
    for row, prefix in enumerate(student.prefixes):
        term = divergence_at(student, teacher, prefix, args)
        if args.objective == "sequence":
            p = student.logits[row].log_softmax(-1).exp()
            term = term + sum(p[a] * behind.get((*prefix, a), 0.0) for a in range(V))
        total = total + reached(old, prefix) * term
    return total


def loss_of(
    student: Table, teacher: Table, old: Table, text, args: TeacherArgs, whole: bool = False, **weights: torch.Tensor
) -> torch.Tensor:
    """The loss of one response by a `Lesson`; whole: its cost is of the response, as for other tokenizers."""
    batch = response_batch([[9]], [list(text)], 0)
    at = torch.arange(len(text)), torch.tensor(text)
    before = old.logprobs(text).detach()
    told, here = told_by(teacher, text, args.teacher_top_k if args.estimator == "top_k" else 0), None
    mask = batch.action_mask
    if args.estimator == "k1":
        cost = before[at][None] - told.logprobs
        costs = cost + later_sum(cost, mask) * (args.objective == "sequence")
        costs = cost.sum().expand_as(cost) if whole else costs
    else:
        found = [divergence_at(old, teacher, text[:t], args).detach() for t in range(len(text))]
        costs = later_sum(torch.stack(found)[None], mask) if args.objective == "sequence" else None
    learned = batch.extend(TaughtBatch, logprobs=before[at][None], place=torch.arange(1))
    if args.estimator == "exact":
        own = teacher.logprobs(text).detach()
        told, here = None, SimpleNamespace(logits_of=lambda seen: lambda rows: own[rows])
    lesson = Lesson(run_of(**{name: getattr(args, name) for name in FLAGS}), here, batch, told, costs=costs, **weights)
    total, _ = lesson.function(learned)(student.logprobs(text), slice(0, len(text)))
    return total


FLAGS = ("estimator", "objective", "beta", "teacher_top_k")
TOP = {"estimator": "top_k", "teacher_top_k": 1}
SETTINGS = [
    {},
    {"beta": 0.0},
    {"beta": 0.3},
    {"objective": "sequence"},
    {"estimator": "k1"},
    {"estimator": "k1", "objective": "sequence"},
    TOP,
    TOP | {"beta": 0.0},
    TOP | {"beta": 0.3},
    TOP | {"objective": "sequence"},
]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("flags", SETTINGS, ids=str)
def test_the_expected_gradient_of_an_estimator_is_that_of_its_objective(flags, on_policy):
    args = TeacherArgs(teacher="x", **flags)
    student, teacher, old = Table(1), Table(2), Table(1 if on_policy else 3)
    (expected,) = torch.autograd.grad(objective(student, teacher, old, args), student.logits)
    wholes = [False, True] if args.estimator == "k1" and args.objective == "sequence" else [False]
    for whole in wholes:
        found = torch.zeros_like(expected)
        for text in texts():
            loss = loss_of(student, teacher, old, text, args, whole)
            found += float(old.logprob(text).detach().exp()) * torch.autograd.grad(loss, student.logits)[0]
        assert torch.allclose(found, expected, atol=1e-12)
    if on_policy and args.objective == "sequence" and args.estimator == "k1":  # the KL of whole responses itself
        exact = sum(
            s.exp() * (s - teacher.logprob(text).detach())
            for text in texts()
            if (s := student.logprob(text)) is not None
        )
        assert torch.allclose(torch.autograd.grad(exact, student.logits)[0], expected, atol=1e-12)


@pytest.mark.parametrize("flags", SETTINGS, ids=str)
def test_weights_between_sampler_and_trainer_give_the_trainer_s_gradient(flags):
    """Weights of responses give the whole gradient; weights of tokens keep the sampler's prefixes. First update."""
    args = TeacherArgs(teacher="x", **flags)
    student, teacher, old, sampler = Table(1), Table(2), Table(3), Table(4)
    by_response, by_token = torch.zeros_like(student.logits), torch.zeros_like(student.logits)
    for text in texts():
        at = torch.arange(len(text)), torch.tensor(text)
        gaps = [(one.logprobs(text) - sampler.logprobs(text))[at].detach().exp()[None] for one in (old, student)]
        losses = (
            loss_of(student, teacher, old, text, args, weights=gaps[0].prod(1)),
            loss_of(student, teacher, student, text, args, corrections=gaps[1]),
        )
        for total, loss in zip((by_response, by_token), losses):
            total += sampler.logprob(text).detach().exp() * torch.autograd.grad(loss, student.logits)[0]
    (expected,) = torch.autograd.grad(objective(student, teacher, old, args), student.logits)
    assert torch.allclose(by_response, expected, atol=1e-12)
    if args.objective == "position":
        (expected,) = torch.autograd.grad(objective(student, teacher, sampler, args), student.logits)
        assert torch.allclose(by_token, expected, atol=1e-12)


def test_a_teacher_that_is_the_student_has_no_expected_gradient():
    for flags in SETTINGS:
        args, student = TeacherArgs(teacher="x", **flags), Table(4)
        found = sum(
            float(student.logprob(text).detach().exp())
            * torch.autograd.grad(loss_of(student, Table(4), Table(4), text, args), student.logits)[0]
            for text in texts()
        )
        assert float(found.abs().max()) < 1e-12, flags


def test_buckets_are_a_lower_bound_and_rounding_above_1_is_a_small_tail():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    top = teacher.topk(4)
    ours, theirs = in_buckets(student, top.indices), with_tail(top.values)
    assert torch.allclose(ours.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.allclose(theirs[:, -1].exp(), 1 - top.values.exp().sum(-1))
    assert bool((kl(ours, theirs) <= kl(student, teacher) + 1e-12).all() and (kl(ours, theirs) > 0).all())
    rounded = with_tail(torch.tensor([[0.7, 0.4]]).log())
    assert float(rounded.exp().sum()) == pytest.approx(1) and float(rounded[0, -1].exp()) == pytest.approx(
        FLOOR / 1.1, rel=1e-3
    )


# ---------------------------------------------------------------------------------------------------------- teachers
def test_each_row_has_its_own_of_several_teachers():
    teachers = [tiny_policy("llama"), tiny_policy("gpt2")]
    prompts, responses = rows_of(3, 5, 4, 2), rows_of(4, 2, 5, 3)
    seen = response_batch(prompts, responses, 1).extend(Seen, teacher=torch.tensor([1, 0, 1, 0]))
    with torch.no_grad():
        logits = Teachers(teachers).logits_of(seen)
        found = torch.cat([logits(slice(start, start + 3)) for start in range(0, 14, 3)]).log_softmax(-1)
        expected = []
        for row, number in enumerate((1, 0, 1, 0)):
            ids = torch.tensor([prompts[row] + responses[row]])
            whole = teachers[number].model(ids).logits[0, len(prompts[row]) - 1 : -1]
            expected.append(whole.log_softmax(-1))
        silent = seen.extend(Seen, teacher=seen.teacher, action_mask=torch.zeros_like(seen.action_mask))
        for one in (silent, seen.select(torch.arange(0))):  # as where no response has a score, or on a rank with less
            assert Teachers(teachers).logits_of(one)(slice(0, 9)).shape == (0, found.shape[1])
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    run = run_of(estimator="top_k", teacher_top_k=2)
    run.args.__dict__["rollout_mini_batch_size"] = 3
    told = tell(run, Teachers(teachers), seen, seen)
    top = torch.cat(expected).topk(2)
    assert torch.allclose(told.top[seen.action_mask], top.values, atol=1e-5)
    assert torch.equal(told.ids[seen.action_mask], top.indices)


@pytest.mark.parametrize("mode", ["all", "lora"])
def test_an_average_follows_the_students_weights(mode, base_model, tokenizer):
    flags = {"own_teacher": "average", "teacher_decay": 0.9, "privileged_column": "x", "finetune_mode": mode}
    args = DistillArgs(model_name=str(base_model), **flags)
    student = load_student(None, args, tokenizer)
    batch = mixed_batch()
    teacher = load_teacher(None, args, student, tokenizer)
    weights = [p for p in student.parameters() if p.requires_grad]
    first = [p.detach().clone() for p in weights]
    with torch.no_grad():
        before = teacher.logits_of(batch)(slice(None))
        for weight in weights:
            weight.add_(0.1)
        assert torch.equal(teacher.logits_of(batch)(slice(None)), before)  # it is no part of the student
        teacher.follow()
    for start, average in zip(first, teacher.state()["teacher"], strict=True):
        assert torch.allclose(average, start + 0.01, atol=1e-6)
    assert not torch.equal(teacher.logits_of(batch)(slice(None)), before)
    assert [p.requires_grad for p in weights] == [True] * len(weights)


# -------------------------------------------------------------------------------------------------- other tokenizers
def policy_of(tokenizer, seed: int = 0):
    return tiny_policy("llama", vocab_size=len(tokenizer), eos_token_id=0, bos_token_id=0, pad_token_id=0)


def told_of_texts(student, teacher, policy, responses: list[list[int]], truncated: list[bool]):
    prompts = [student.encode("Hi") for _ in responses]
    rollout = rollout_of(prompts, responses, truncated=truncated, tokenizer=student)
    foreign = ForeignTeacher(policy, teacher, student)
    return tell_texts(foreign, rollout, None, 4), rollout


def test_the_same_tokenizer_twice_is_the_plain_one_on_canonical_rows():
    tokenizer = byte_tokenizer([("a", "b"), ("ab", "c")])
    policy = policy_of(tokenizer)
    rows = [[*tokenizer.encode(text), 0] for text in ("abc abd", "b", "\u00e9abc")]
    told, rollout = told_of_texts(tokenizer, tokenizer, policy, [*rows, rows[0][:-1]], [False] * 3 + [True])
    plain = score_logprobs(policy, rollout, 1.0, 4)
    assert bool(told.readable.all()) and told.noncanonical == 0
    assert torch.allclose(told.logprobs.sum(1), plain.sum(1), atol=1e-4)


def test_a_text_is_read_in_the_teachers_tokens_and_odd_rows_are_counted():
    student, teacher = byte_tokenizer([("a", "b")]), byte_tokenizer([("b", "c"), ("a", "bc")])
    policy = policy_of(teacher)
    parts = student.encode("a") + student.encode("b")
    half = student.encode("\u00e9")[:1]
    rows = [[*student.encode("abc"), 0], [*parts, *student.encode("c"), 0], [*student.encode("abc"), *half], [*half, 0]]
    told, rollout = told_of_texts(student, teacher, policy, rows, [False, False, True, False])
    assert told.readable.tolist() == [True, True, True, False] and told.noncanonical == 2

    def whole(response: list[int]) -> float:
        batch = response_batch([teacher.encode("Hi")], [response], 0)
        return float(score_logprobs(policy, batch, 1.0, 1).sum())

    totals = told.logprobs.sum(1)
    assert totals[:2].tolist() == pytest.approx([whole([*teacher.encode("abc"), 0])] * 2, abs=1e-4)
    tail = rollout.logprobs[2][rollout.action_mask[2]][-1]  # half a character costs nothing
    assert float(totals[2] - tail) == pytest.approx(whole(teacher.encode("abc")), abs=1e-4)
    assert torch.allclose(told.logprobs[3], rollout.logprobs[3] * rollout.action_mask[3])


def test_a_tokenizer_that_normalises_texts_is_refused():
    from tokenizers import normalizers

    plain = byte_tokenizer()
    for normalizer in (normalizers.NFKC(), normalizers.Lowercase(), normalizers.NFC()):
        with pytest.raises(UsageError, match="--teacher"):
            ForeignTeacher(policy_of(plain), byte_tokenizer(normalizer=normalizer), plain)


def test_drift_from_the_first_step_is_told_once():
    lines: list[str] = []
    run = SimpleNamespace(resumed=None, checkpoints=SimpleNamespace(others=[]), print0=lines.append, step=6)
    drift = Drift(run)
    names = ("completions/mean_length", "completions/truncated_ratio", "completions/repetition", "teacher/surprise")
    first = dict(zip(names, (10.0, 0.1, 0.05, 0.2)))
    assert drift.watch(first) == {"drift/warning": 0.0} and not lines
    assert drift.watch({**first, "completions/mean_length": 16.0}) == {"drift/warning": 0.0}  # none is cut
    far = dict(zip(names, (16.0, 0.5, 0.2, 1.5)))
    for _ in range(2):
        assert drift.watch(far) == {"drift/warning": 3.0}
    assert len(lines) == 3 and all(line.startswith("warning: step 7: ") for line in lines)
    assert run.checkpoints.others[0]() == {"drift": first}
    again = SimpleNamespace(**vars(run) | {"resumed": {"extra": {"drift": first}}})
    assert Drift(again).watch(far) == {"drift/warning": 3.0}
    assert drift.watch({"train/loss": 1.0, "teacher/surprise": 9.0}) == {}  # a step on demonstrations
    shrinking = Drift(run)
    for length, warnings in ((10.0, 0.0), (5.0, 0.0), (4.0, 1.0)):  # half of the first is not told
        assert shrinking.watch({"completions/mean_length": length}) == {"drift/warning": warnings}
    assert "shrunk to 4 tokens" in lines[-1]
