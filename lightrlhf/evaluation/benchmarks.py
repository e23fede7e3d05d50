"""Files of responses for benchmarks that a judging language model scores: AlpacaEval, MT-Bench and Arena-Hard.

The questions are a file of the benchmark that the user has, since nothing is downloaded. They are user messages of the
model's chat template, plain prompts for a tokenizer without one, and answered with the flags of generation, the same
for all categories.

Formats are as in alpaca_eval 0.6 (a list of instruction, output, generator), of FastChat 0.2 (`model_answer` of two
turns) and of Arena-Hard-Auto 2.0 (messages).

Left out: judging (each benchmark's own command does it), FastChat's temperature by category, and the counts of markdown
that Arena-Hard's style control reads (its `add_markdown_info.py` adds them).
"""

from __future__ import annotations

import json
import shlex
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode, encode_prompt, spelled_control
from lightrlhf.data.types import Tokenizer
from lightrlhf.evaluation.answers import respond
from lightrlhf.evaluation.subjects import Subject, Written
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.writing import write_text


class Benchmark(NamedTuple):
    """The files of a benchmark: {folder} is the harness's folder, {label} the model's name, {answers} their file."""

    turns: Callable[[Row], list[str]]  # of the user, by a question
    answer: Callable[[Row, list[str], str], Row]  # a row of the answers, by a question, its responses and the label
    answers: str
    questions: str  # the copy of the questions that it reads; empty where the answers repeat them
    command: str
    note: str = ""


BENCHMARKS = {
    "alpaca_eval": Benchmark(
        turns=lambda row: [row["instruction"]],
        answer=lambda row, responses, label: {**row, "output": responses[0], "generator": label},
        answers="outputs.json",
        questions="",
        command="alpaca_eval --model_outputs {answers}",
    ),
    "mt_bench": Benchmark(
        turns=lambda row: row["turns"],
        answer=lambda row, responses, label: {
            "question_id": row["question_id"],
            "answer_id": uuid.uuid4().hex,
            "model_id": label,
            "choices": [{"index": 0, "turns": responses}],
            "tstamp": time.time(),
        },
        answers="data/mt_bench/model_answer/{label}.jsonl",
        questions="data/mt_bench/question.jsonl",
        command="cd {folder} && python -m fastchat.llm_judge.gen_judgment --model-list {label}",
        note="it needs FastChat's data/judge_prompts.jsonl and data/mt_bench/reference_answer in {folder}",
    ),
    "arena_hard": Benchmark(
        turns=lambda row: [row["prompt"]],
        answer=lambda row, responses, label: {
            "uid": row["uid"],
            "ans_id": uuid.uuid4().hex,
            "model": label,
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": {"answer": responses[0]}},
            ],
            "tstamp": time.time(),
            "metadata": {},
        },
        answers="data/arena-hard-v2.0/model_answer/{label}.jsonl",
        questions="data/arena-hard-v2.0/question.jsonl",
        command="python gen_judgment.py --setting-file config/arena-hard-v2.0.yaml",
        note="run it in a clone of arena-hard-auto with these files in its data and {label} in its config's model_list",
    ),
}


def write_answers(subject: Subject, name: str) -> Written:
    """Write the model's responses to the questions of the benchmark of this name."""
    benchmark = BENCHMARKS[name]
    names = {"folder": str(subject.folder), "label": subject.label}
    answers = subject.folder / benchmark.answers.format(**names)
    responses = respond_by_turn(subject, [benchmark.turns(row) for row in subject.questions])
    rows = [benchmark.answer(row, said, subject.label) for row, said in zip(subject.questions, responses)]
    if answers.suffix == ".json":
        write_text(answers, json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        write_jsonl(answers, rows)
    files = [answers]
    if benchmark.questions:
        files.insert(0, subject.folder / benchmark.questions)
        write_jsonl(files[0], subject.questions)
    quoted = {key: shlex.quote(value) for key, value in {**names, "answers": str(answers)}.items()}
    return Written(files, benchmark.command.format(**quoted), {}, benchmark.note.format(**names))


# -------------------------------------------------------------------------------------------------------- responses
def respond_by_turn(subject: Subject, asked: Sequence[Sequence[str]]) -> list[list[str]]:
    """Responses to the turns of users, turn by turn; turn h is sampled with the noise of `--seed` + h.

    Raises: UsageError for a second turn without a chat template, and for a prompt that spells a control token.
    """
    said: list[list[str]] = [[] for _ in asked]
    args, policy, tokenizer = subject.args, subject.model, subject.tokenizer
    for turn in range(max(map(len, asked))):
        going = [i for i, turns in enumerate(asked) if len(turns) > turn]
        rows = [prompt_row(tokenizer, asked[i][: turn + 1], said[i], f"question {i + 1}") for i in going]
        rollout = respond(args, policy, policy, rows, tokenizer, args.seed + turn, args.rollout_mini_batch_size)
        for i, ids in zip(going, rollout.response_ids()):
            said[i].append(decode(tokenizer, ids).strip())
    return said


def prompt_row(tokenizer: Tokenizer, asked: Sequence[str], said: Sequence[str], where: str) -> Row:
    """The prompt of a user's last turn, after the turns before it."""
    where = f"--harness_questions: {where}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": asked[0]}]
        for response, question in zip(said, asked[1:]):
            messages += [{"role": "assistant", "content": response}, {"role": "user", "content": question}]
        prompt: str | list[dict[str, str]] = messages
    elif len(asked) > 1:
        raise UsageError(f"{where} has {len(asked)} turns, but the tokenizer has no chat template to render them with")
    elif found := spelled_control(tokenizer, asked[0]):
        raise UsageError(f"{where} spells the control token {found}, and the tokenizer has no chat template")
    else:
        prompt = asked[0]
    try:
        ids = encode_prompt(tokenizer, prompt)
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None
    return {"prompt_len": len(ids), "input_ids": torch.tensor(ids), "columns": {}}
