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
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode, encode_prompt, spelled_control
from lightrlhf.evaluation.answers import respond
from lightrlhf.evaluation.subjects import Subject, Written
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.writing import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_THE_REFERENCE = ("output", "generator")  # columns of AlpacaEval's questions that are another model's


def alpaca_eval(subject: Subject) -> Written:
    """Write a response to each instruction, `outputs.json`."""
    said = dialogues(subject, [[row["instruction"]] for row in subject.questions])
    rows = [
        {name: value for name, value in row.items() if name not in OF_THE_REFERENCE}
        | {"output": response, "generator": subject.label}
        for row, (response,) in zip(subject.questions, said)
    ]
    file = subject.folder / "outputs.json"
    write_text(file, json.dumps(rows, indent=1, ensure_ascii=False))
    return Written([file], shlex.join(["alpaca_eval", "--model_outputs", str(file)]), {})


def mt_bench(subject: Subject) -> Written:
    """Write a response to each turn of each question, in the folders that FastChat reads."""
    said = dialogues(subject, [row["turns"] for row in subject.questions])
    rows = [
        {
            "question_id": row["question_id"],
            "answer_id": uuid.uuid4().hex,
            "model_id": subject.label,
            "choices": [{"index": 0, "turns": turns}],
            "tstamp": time.time(),
        }
        for row, turns in zip(subject.questions, said)
    ]
    folder = subject.folder / "data" / "mt_bench"
    files = [folder / "question.jsonl", folder / "model_answer" / f"{subject.label}.jsonl"]
    write_jsonl(files[0], subject.questions)
    write_jsonl(files[1], rows)
    judge = shlex.join(["python", "-m", "fastchat.llm_judge.gen_judgment", "--model-list", subject.label])
    note = f"it needs FastChat's data/judge_prompts.jsonl and data/mt_bench/reference_answer in {subject.folder}"
    return Written(files, f"cd {shlex.quote(str(subject.folder))} && {judge}", {}, note)


def arena_hard(subject: Subject) -> Written:
    """Write a response to each question, in the folders that Arena-Hard-Auto reads."""
    said = dialogues(subject, [[row["prompt"]] for row in subject.questions])
    rows = [
        {
            "uid": row["uid"],
            "ans_id": uuid.uuid4().hex,
            "model": subject.label,
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": {"answer": response}},
            ],
            "tstamp": time.time(),
            "metadata": {},
        }
        for row, (response,) in zip(subject.questions, said)
    ]
    folder = subject.folder / "data" / "arena-hard-v2.0"
    files = [folder / "question.jsonl", folder / "model_answer" / f"{subject.label}.jsonl"]
    write_jsonl(files[0], subject.questions)
    write_jsonl(files[1], rows)
    words = ["python", "gen_judgment.py", "--setting-file", "config/arena-hard-v2.0.yaml"]
    note = f"run it in a clone of arena-hard-auto with these files in its data, and {subject.label} in its config's"
    return Written(files, shlex.join(words), {}, f"{note} model_list")


# -------------------------------------------------------------------------------------------------------- responses
def dialogues(subject: Subject, asked: Sequence[Sequence[str]]) -> list[list[str]]:
    """Responses to the turns of users, turn by turn; turn h is sampled with the noise of `seed` + h.

    Raises: UsageError for a second turn without a chat template, and for a prompt that spells a control token.
    """
    said: list[list[str]] = [[] for _ in asked]
    for turn in range(max(map(len, asked))):
        places = [i for i, turns in enumerate(asked) if len(turns) > turn]
        rows = [prompt_row(subject.tokenizer, asked[i][: turn + 1], said[i], f"question {i + 1}") for i in places]
        policy, seed = subject.model, subject.seed + turn
        rollout = respond(subject.args, policy, policy, rows, subject.tokenizer, seed, subject.batch_size)
        for i, ids in zip(places, rollout.response_ids()):
            said[i].append(decode(subject.tokenizer, ids).strip())
    return said


def prompt_row(tokenizer: PreTrainedTokenizerBase, asked: Sequence[str], said: Sequence[str], where: str) -> Row:
    """The prompt of the last turn of a user, behind the turns before it."""
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
