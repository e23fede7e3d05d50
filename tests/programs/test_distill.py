"""Distillation: float64 gradients of each objective, cuts of a batch, shared backbones, steps on demonstrations."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from helpers import (
    RunOfOneStep,
    assert_same_gradients,
    last_checkpoint,
    metrics,
    mixed_batch,
    rows_of,
    run_program,
    save_model,
)
from helpers.errors import error_naming, refused
from helpers.rollouts import rollout_of
from helpers.serving import serving
from helpers.tokenizers import byte_tokenizer

from lightrlhf import distill, sft
from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.groups import FrozenArgs, ModelArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.distill import DistillArgs, main, update_minibatch
from lightrlhf.models.loading import load_policy
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import policy_inputs
from lightrlhf.teachers.lesson import Lesson, TaughtBatch, teach
from lightrlhf.teachers.teacher import load_teacher, seen_by_teacher

EOS = 1
SERVED = {"rollout_server": ["http://localhost:1"]}
PROMPT_ROWS = rows_of(6, 9, 3)
PROMPTS = [PROMPT_ROWS[i] for i in (0, 0, 0, 1, 1, 2)]
GROUP = torch.tensor([0, 0, 0, 1, 1, 2])
RESPONSES = [[*row, EOS] for row in rows_of(6, 2, 4, 1, 3, 5)]


def distill_args(**changes) -> DistillArgs:
    sizes = {"num_generations": 3, "rollout_size": 2, "mini_batch_size": 6, "micro_batch_size": 6, "max_new_tokens": 12}
    return DistillArgs(**({"data_dir": "x", "model_name": "tiny", "teacher": "y"} | sizes | changes))


def load(name, tokenizer):
    policy = load_policy(str(name), ModelArgs(model_name=str(name), disable_dropout=True), tokenizer, "--model_name")
    enable_packing(policy)
    return policy


@pytest.fixture(scope="module")
def student(base_model, tokenizer):
    return load(base_model, tokenizer)


@pytest.fixture(scope="module")
def teacher(base_model, tokenizer):
    """The student with other weights."""
    policy = load(base_model, tokenizer).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    return policy


def lesson_of(student, teacher, args) -> tuple[Lesson, TaughtBatch]:
    rollout = dataclasses.replace(rollout_of(PROMPTS, RESPONSES), group=GROUP, num_groups=3)
    with torch.no_grad():
        inputs = {"attention_mask": rollout.attention_mask, "action_mask": rollout.action_mask}
        rollout.logprobs = student(input_ids=rollout.input_ids, **inputs).logprobs
    learned = rollout.extend(TaughtBatch)
    return teach(RunOfOneStep(args, policy=student), student, teacher, rollout, learned), learned


def gradients_of(student, teacher, args: DistillArgs) -> dict[str, torch.Tensor]:
    lesson, learned = lesson_of(student, teacher, args)
    run = lesson.run
    student.zero_grad()
    update_minibatch(run, student, lesson, learned)
    student.zero_grad()
    return run.gradients["policy"]


def exact_loss(student, teacher, args: DistillArgs) -> torch.Tensor:
    """The objective from its formula, with logits of whole rows."""
    kls, logprobs, losses = [], [], []
    for prompt, response in zip(PROMPTS, RESPONSES):
        ids = torch.tensor([prompt + response])
        p, q = (model.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (student, teacher))
        m = torch.logaddexp(p + torch.log(torch.tensor(1 - args.beta)), q + torch.log(torch.tensor(args.beta)))
        reverse, forward = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
        mixed = args.beta * (q.exp() * (q - m)).sum(-1) + (1 - args.beta) * (p.exp() * (p - m)).sum(-1)
        losses.append({0.0: forward, 1.0: reverse}.get(args.beta, mixed))
        kls.append(reverse)
        logprobs.append(p[torch.arange(len(response)), torch.tensor(response)])
    total = sum(row.sum() for row in losses)
    if args.objective == "sequence":
        later = [(row.sum() - row.cumsum(0)).detach() for row in kls]
        for i, row in enumerate(logprobs):
            others = [j for j in range(len(GROUP)) if j != i and GROUP[j] == GROUP[i]]
            for t in range(len(row)):
                baseline = [later[j][t] if t < len(later[j]) else torch.zeros(()) for j in others]
                total = total + row[t] * (later[i][t] - (sum(baseline) / len(baseline) if baseline else 0.0))
    return total / sum(map(len, RESPONSES))


SETTINGS = [{"beta": 1.0}, {"beta": 0.0}, {"beta": 0.3}, {"objective": "sequence"}]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_gradient_is_that_of_the_formula_however_a_batch_is_cut(changes, student, teacher, monkeypatch):
    args = distill_args(**changes)
    student.zero_grad()
    exact_loss(student, teacher, args).backward()
    expected = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    assert_same_gradients(gradients_of(student, teacher, args), expected, atol=2e-6)
    for size in (1, 2):
        cut = dataclasses.replace(args, micro_batch_size=size)
        assert_same_gradients(gradients_of(student, teacher, cut), expected, atol=2e-6)
    monkeypatch.setattr("lightrlhf.models.roles.logit_rows", lambda size, device: 3)  # rows of logits at a time
    assert_same_gradients(gradients_of(student, teacher, args), expected, atol=2e-6)


def test_a_teacher_that_is_the_student_gives_no_gradient(student):
    for changes in SETTINGS:
        args = distill_args(**changes)
        gradients = gradients_of(student, student, args)
        assert max(float(gradient.abs().max()) for gradient in gradients.values()) < 1e-7


@pytest.mark.parametrize("changes", [{}, {"objective": "position", "beta": 0.5, "student_share": 0.5}], ids=str)
def test_a_run_comes_nearer_to_its_teacher(changes, runs, tmp_path):
    """Also on its own responses in every other step alone."""
    flags = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    run = main(runs.flags("distill", tmp_path, "--eval_interval", 2, *flags))
    rows = metrics(run)
    first, *_, last = [row["objective/kl"] for row in rows if "objective/kl" in row]
    assert last < first
    names = {name for row in rows for name in row}
    assert {"val/kl", "val/kl_of_response", "teacher/entropy", "completions/repetition"} <= names
    sampled = [row["step"] for row in rows if "completions/repetition" in row]
    assert sampled == ([1, 3, 5] if changes else [1, 2, 3, 4, 5, 6])


def test_a_teacher_of_adapters_on_the_students_base_shares_its_backbone(runs, tmp_path, tokenizer):
    start = ["--finetune_mode", "lora", "--learning_rate", "1e-1"]
    teacher = last_checkpoint(sft.main(runs.flags("sft", tmp_path / "teacher", *start)))
    flags = runs.flags("distill", tmp_path / "student", *start, "--teacher", teacher)
    args = parse(DistillArgs, flags)
    student = distill.load_student(None, args, tokenizer)
    shared = load_teacher(None, args, student, tokenizer, str(teacher))
    assert shared.model is student.model and shared.adapters and shared.adapters != student.adapters
    whole = load_policy(str(teacher), FrozenArgs(), tokenizer, "--teacher").eval()
    batch = mixed_batch()
    inputs = policy_inputs(batch)
    with torch.no_grad():
        assert torch.allclose(shared.eval()(**inputs).logprobs, whole(**inputs).logprobs, atol=1e-5)
    rows = metrics(main(flags))
    assert rows[-1]["objective/kl"] < rows[0]["objective/kl"]


def test_a_policy_teaches_itself_by_what_its_start_says_behind_other_words(runs, tmp_path, tokenizer):
    prompts = [{"prompt": "Do you have tea?", "seen": "Do you have tea? Say yes."}, {"prompt": "Hi", "seen": "Hello"}]
    args = parse(DistillArgs, runs.flags("distill", tmp_path, "--privileged_column", "seen"))
    args = dataclasses.replace(args, teacher=None)
    start = load_policy(args.model_name, ModelArgs(), tokenizer, "--model_name").eval()
    rows = []
    distill.train(args, tokenizer=tokenizer, prompts=prompts, on_step=lambda step, metrics: rows.append(metrics))
    assert rows[0]["objective/kl"] > 0 and rows[-1]["objective/kl"] < rows[0]["objective/kl"]
    batch = rollout_of([encode_prompt(tokenizer, prompts[0]["prompt"])], [[5, 6, EOS]], tokenizer=tokenizer)
    batch = dataclasses.replace(batch, columns=[prompts[0]], row=torch.tensor([0]))
    seen = seen_by_teacher(args, batch)
    expected = [*encode_prompt(tokenizer, prompts[0]["seen"]), 5, 6, EOS]
    assert seen.input_ids[0].tolist() == expected and seen.action_mask.sum() == 3
    logits = start.logits_of(seen)(slice(None)).log_softmax(-1)
    whole = start.model(torch.tensor([expected])).logits[0, -4:-1].log_softmax(-1)
    assert torch.allclose(logits, whole, atol=1e-5)
    with pytest.raises(RunFailure, match="--privileged_column"):
        seen_by_teacher(args, dataclasses.replace(batch, columns=[{}]))


def test_wrong_settings_are_refused():
    for changes, name in (
        ({"temperature": 0.7}, "--temperature"),
        ({"top_p": 0.9}, "--top_p"),
        ({"objective": "sequence", "beta": 0.5}, "--beta"),
        ({"objective": "sequence", "student_share": 0.5}, "--student_share"),
        ({"estimator": "k1", "student_share": 0.5}, "--student_share"),
        ({"mini_batch_size": 64}, "--mini_batch_size"),
        ({"teacher": None, "teacher_server": "http://localhost:1"}, "--estimator exact"),
        ({"teacher_server": "http://localhost:1"}, "--teacher_server"),
        ({"teacher_column": "of"}, "--teacher_column"),
        ({"own_teacher": "average"}, "--own_teacher"),
        ({"teacher_decay": 0.5}, "--teacher_decay"),
        ({"estimator": "k1", "beta": 0.5}, "--beta"),
        (SERVED | {"sampling_correction": "token_mask"}, "--sampling_correction"),
        (SERVED | {"sampling_bound": 3.0}, "--sampling_bound"),
        ({"estimator": "k1_loss"}, "gradient of mean 0"),
        ({"estimator": "k3_loss"}, "gradient of the forward KL"),
        ({"estimator": "k2_reward"}, "gradient of no divergence"),
        ({"estimator": "k3_reward"}, "less the forward one"),
    ):
        with error_naming(ValueError, name):
            distill_args(**changes)


def test_responses_of_servers_are_weighed(student, teacher):
    """Whole ones by sequence kinds; by token kinds the gradient of what was sampled, not of a position's divergence."""
    rollout = dataclasses.replace(rollout_of(PROMPTS, RESPONSES), group=GROUP, num_groups=3)
    rollout.sampling_gap = torch.where(rollout.action_mask, 0.1 * torch.randn(rollout.action_mask.shape), 0.0)
    found = {}
    for kind in ("sequence_truncate", "token_truncate", "none"):
        args = distill_args(**SERVED, objective="sequence", sampling_correction=kind, sampling_bound=9.0)
        found[kind] = teach(RunOfOneStep(args, policy=student), student, teacher, rollout, rollout.extend(TaughtBatch))
    whole, token, none = found.values()
    assert torch.allclose(whole.weights, rollout.sampling_gap.sum(1).exp()) and whole.corrections is None
    assert torch.allclose(token.corrections, rollout.sampling_gap.exp() * rollout.action_mask) and token.weights is None
    assert none.weights is None and none.corrections is None


def test_a_micro_batch_without_rows_has_no_gradient(student, teacher):
    """A rank has one where others have more rows."""
    for changes in SETTINGS:
        lesson, learned = lesson_of(student, teacher, distill_args(**changes))
        empty = learned.select(torch.arange(0))
        total, values = student(**policy_inputs(empty), function=lesson.function(empty), with_stats=False)
        total.backward()
        assert float(total.detach()) == 0 and values.shape == (0, 5)
        assert all(p.grad is not None and not p.grad.any() for p in student.parameters())
        student.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "objective", "split"),
    [("ddp", "position", 1), ("ddp", "sequence", 1), ("fsdp", "sequence", 1), ("fsdp", "sequence", 2)],
)
def test_two_ranks_equal_one_at_the_same_global_batch(strategy, objective, split, runs, tmp_path):
    """A group of three responses lies on both ranks, whose rows are of other widths."""
    more = ["--objective", objective, "--num_generations", "3", "--max_new_tokens", "8", "--optimizer_eps", "1e-2"]
    more += ["--micro_batch_size", "1", "--lr_warmup_steps", "0", "--max_steps", "3", "--disable_dropout", "True"]
    one = main(runs.flags("distill", tmp_path / "one", *more, "--rollout_size", "2", "--mini_batch_size", "6"))
    ranks = ["--rollout_size", split, "--mini_batch_size", 3 * split, "--devices", 2, "--strategy", strategy]
    ranks += ["--tensor_parallel", split]
    run_program("lightrlhf.distill", *runs.flags("distill", tmp_path / "two", *more, *ranks))
    (args,) = (tmp_path / "two").rglob("args.json")
    for row, other in zip(metrics(one), metrics(args.parent), strict=True):
        assert row.keys() == other.keys()
        for name in row:
            assert name.startswith("time/") or other[name] == pytest.approx(row[name], abs=1e-4, rel=1e-4), name


# ------------------------------------------------------------------------------------------- estimators and teachers
def kl_of(args: list[object]) -> list[float]:
    rows = []
    main_args = parse(DistillArgs, list(map(str, args)))
    distill.train(main_args, on_step=lambda step, metrics: rows.append(metrics["objective/kl"]))
    return rows


@pytest.mark.slow
def test_a_teacher_on_a_server_tells_what_one_here_does(runs, tmp_path):
    """The likeliest tokens, and the sampled ones alone."""
    with serving(runs.teacher) as (url, _):
        for name in ("top_k", "k1"):
            more = ["--estimator", name, "--max_steps", 2, "--objective", "sequence"]
            flags = [*runs.flags("distill", tmp_path, *more)]
            here = kl_of(flags)
            at = flags.index("--teacher")
            there = kl_of([*flags[:at], *flags[at + 2 :], "--teacher_server", url])
            assert there == pytest.approx(here, abs=1e-4)


def test_several_teachers_are_named_by_a_column(runs, tmp_path, tokenizer):
    flags = runs.flags("distill", tmp_path, "--teacher_column", "of")
    args = parse(DistillArgs, [*flags, "--teacher", f"one={runs.teacher},two={runs.model}"])
    prompts = [{"prompt": "Do you have tea?", "of": "one"}, {"prompt": "Hi", "of": "two"}]
    rows = []
    distill.train(args, tokenizer=tokenizer, prompts=prompts, on_step=lambda step, metrics: rows.append(metrics))
    alone = []
    one = dataclasses.replace(args, teacher=str(runs.teacher), teacher_column=None)
    distill.train(one, tokenizer=tokenizer, prompts=prompts, on_step=lambda step, metrics: alone.append(metrics))
    assert 0 < rows[0]["objective/kl"] < alone[0]["objective/kl"]  # half of the rows are the start's own
    with pytest.raises(RunFailure, match="--teacher_column"):
        distill.train(args, tokenizer=tokenizer, prompts=[prompts[0], {"prompt": "Hi", "of": "three"}])


@pytest.mark.slow
def test_a_run_with_an_averaged_teacher_resumes_bit_by_bit(runs, tmp_path, tokenizer):
    prompts = [{"prompt": f"Do you have tea number {i}?", "seen": f"Say yes, {i}."} for i in range(6)]
    flags = runs.flags("distill", tmp_path, "--privileged_column", "seen", "--own_teacher", "average")
    at = flags.index("--teacher")
    args = parse(DistillArgs, flags[:at] + flags[at + 2 :])
    given = {"tokenizer": tokenizer, "prompts": prompts}
    run = distill.train(dataclasses.replace(args, teacher_decay=0.5), **given)
    expected = [row["objective/kl"] for row in metrics(run) if "objective/kl" in row]
    for later in sorted(run.glob("checkpoint-*"))[1:]:
        shutil.rmtree(later)
    distill.train(dataclasses.replace(args, teacher_decay=0.5, resume_from=str(run)), **given)
    assert [row["objective/kl"] for row in metrics(run) if "objective/kl" in row] == expected


def test_a_teacher_with_another_tokenizer_needs_the_judgement_of_whole_responses(runs, tmp_path, capsys):
    other = save_model("llama", tmp_path / "other", byte_tokenizer())
    byte_tokenizer().save_pretrained(other)
    flags = runs.flags("distill", tmp_path, "--teacher", other, "--num_generations", 2, "--mini_batch_size", 4)
    with pytest.raises(SystemExit):
        main([*flags, "--objective", "position"])
    rows = metrics(main([*flags, "--objective", "sequence", "--estimator", "k1"]))
    assert {"teacher/noncanonical", "teacher/unreadable"} <= rows[-1].keys()
    k1 = ["--objective", "sequence", "--estimator", "k1", "--text_return", "to_go"]
    later = metrics(main([*flags, *k1]))
    assert later[0]["objective/kl"] == pytest.approx(rows[0]["objective/kl"], rel=0.01)  # a mean over two updates
    assert later[0]["policy/grad_norm"] != rows[0]["policy/grad_norm"]
    assert "--text_return" in refused(capsys, main, *runs.flags("distill", tmp_path, *k1))
