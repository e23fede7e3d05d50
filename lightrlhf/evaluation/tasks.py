"""Tasks of the held-out split for lm-evaluation-harness (0.4) and inspect-ai (0.3), and what they should find.

    perplexity  log-likelihood of the demonstrations' responses, each token counting once
    pairs       share of preference pairs whose chosen response is the likelier one (log pi summed over its tokens)
    answers     share of prompts whose greedy response is the column `answer`, `solution` or `ground_truth`, up to
                white space at its ends

The harnesses read the checkpoint themselves, on the ids of the data (see `texts.py`), in float32. The same figures are
computed here, so that both can be compared.

Left out: few-shot examples, and stop strings and end ids beyond the checkpoint's own, which harnesses handle otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import Row, check_vocabulary, load_prompts
from lightrlhf.data.tokens import decode
from lightrlhf.evaluation.answers import perplexity, respond
from lightrlhf.evaluation.pairs import likelihoods
from lightrlhf.evaluation.subjects import Subject, Written
from lightrlhf.evaluation.texts import split_text, target_spans, text_of
from lightrlhf.models.lora import ADAPTER_CONFIG
from lightrlhf.models.names import base_name
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.rewards.functions import ANSWERS
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.writing import write_text

LM_EVAL_TASK = """\
task: lightrlhf_{task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: prompt
target_delimiter: ""
{scoring}
metadata:
  version: 1
"""
LIKELIHOOD = """\
output_type: multiple_choice
doc_to_choice: responses
doc_to_target: 0
"""
LM_EVAL_SCORING = {
    "perplexity": f"""\
{LIKELIHOOD}process_results: !function lightrlhf_scores.likelihood
metric_list:
  - metric: perplexity
    aggregation: weighted_perplexity
    higher_is_better: false""",
    "pairs": f"""\
{LIKELIHOOD}metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true""",
    "answers": """\
output_type: generate_until
doc_to_target: answer
generation_kwargs:
  do_sample: false
  max_gen_toks: {max_new_tokens}
  until: []
process_results: !function lightrlhf_scores.exact_match
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true""",
}
LM_EVAL_SCORES = '''\
"""Scores of the tasks in this folder, called by lm-evaluation-harness."""


def likelihood(doc, results):
    """Log-likelihood of the response and its number of tokens.

    lm-eval counts white space at the end of a prompt as part of the response; where there is some, a second response
    is that alone, and its log-likelihood is subtracted.
    """
    response, *space = [value for value, _ in results]
    return {"perplexity": (response - sum(space), doc["num_tokens"])}


def exact_match(doc, results):
    """1 where the response is the answer, up to white space at its ends."""
    return {"exact_match": float(results[0].strip() == doc["answer"])}
'''
INSPECT_TASK = '''\
"""Greedy responses to the prompts of a held-out split, for inspect-ai."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr
from inspect_ai.solver import generate


@scorer(metrics=[accuracy(), stderr()])
def exact_match():
    """Correct where the response is the answer, up to white space at its ends."""

    async def score(state, target):
        response = state.output.completion
        return Score(value=CORRECT if response.strip() == target.text else INCORRECT, answer=response)

    return score


@task
def lightrlhf_answers():
    data = str(Path(__file__).with_name("answers.jsonl"))
    return Task(
        dataset=json_dataset(data, FieldSpec(input="prompt", target="answer")),
        solver=generate(),
        scorer=exact_match(),
        config=GenerateConfig(max_tokens={max_new_tokens}),
    )
'''
# The prompts are rendered already: inspect-ai passes them through this template, and adds no special tokens.
INSPECT_MODEL = {
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "tokenizer_call_args": {"add_special_tokens": False},
    "do_sample": False,
    "dtype": "float32",
}


def lm_eval(subject: Subject) -> Written:
    """Write a task for each stage that the split has, and what they should find.

    Raises: UsageError when the split has neither demonstrations, pairs nor answers whose ids a harness reads back.
    """
    documents = {
        "perplexity": demonstration_documents(subject),
        "pairs": pair_documents(subject),
        "answers": answer_documents(subject),
    }
    results: dict[str, float] = {}
    files, notes, tasks = [], [], []
    for task, (rows, kept, of) in documents.items():
        if of and len(kept) < of:
            notes.append(f"{task}: {of - len(kept)} of {of} rows are left out, whose text has other token ids")
        if not kept:
            continue
        data = subject.folder / f"{task}.jsonl"
        write_jsonl(data, rows)
        scoring = LM_EVAL_SCORING[task].replace("{max_new_tokens}", str(subject.args.max_new_tokens))
        text = LM_EVAL_TASK.format(task=task, file=json.dumps(str(data.resolve())), scoring=scoring)
        write_text(data.with_name(f"lightrlhf_{task}.yaml"), text)
        files += [data.with_name(f"lightrlhf_{task}.yaml"), data]
        tasks.append(f"lightrlhf_{task}")
        results |= RESULTS[task](subject, kept)
    if not tasks:
        raise UsageError(
            f"--harness lm_eval: {subject.data_dir} has no demonstrations, pairs or answers in its {subject.split} "
            "split whose text has the same token ids" + "".join(f"; {note}" for note in notes)
        )
    files.append(subject.folder / "lightrlhf_scores.py")
    write_text(files[-1], LM_EVAL_SCORES)
    model = ",".join(f"{key}={value}" for key, value in {**weights(subject), "dtype": "float32"}.items())
    words = ["lm_eval", "run", "--model", "hf", "--model_args", f"{model},add_bos_token=False"]
    words += ["--include_path", str(subject.folder), "--tasks", ",".join(tasks)]
    words += ["--batch_size", str(subject.batch_size), "--device", device_of(subject)]
    words += ["--output_path", str(subject.folder / "results")]
    return Written(files, shlex.join(words), results, "; ".join(notes))


def inspect(subject: Subject) -> Written:
    """Write a task of greedy responses with exact match, and what it should find.

    Raises: UsageError when no prompt of the split has an answer, or for an adapter, which inspect-ai does not load.
    """
    found = weights(subject)
    if "peft" in found:
        raise UsageError(
            f"--harness inspect: {subject.name} holds an adapter, which inspect-ai does not load; "
            f"merge it first: python -m lightrlhf.export {subject.name} --to merged"
        )
    rows, kept, of = answer_documents(subject)
    if not kept:
        raise UsageError(
            f"--harness inspect: {subject.data_dir} has no prompts with {', '.join(ANSWERS)} in its {subject.split} "
            "split; prepare it with such a column, or run a task of inspect-ai on the checkpoint"
        )
    files = [subject.folder / "answers.jsonl", subject.folder / "lightrlhf_answers.py", subject.folder / "model.json"]
    write_jsonl(files[0], rows)
    write_text(files[1], INSPECT_TASK.replace("{max_new_tokens}", str(subject.args.max_new_tokens)))
    write_text(files[2], json.dumps(INSPECT_MODEL, indent=1))
    words = ["inspect", "eval", files[1].name, "--model", f"hf/{subject.label}", "--model-config", files[2].name]
    words += ["-M", f"model_path={found['pretrained']}"]
    words += [
        "-M",
        f"tokenizer_path={found.get('tokenizer', found['pretrained'])}",
        "-M",
        f"device={device_of(subject)}",
    ]
    words += ["--max-connections", str(subject.batch_size), "--log-dir", "logs"]
    command = f"cd {shlex.quote(str(subject.folder))} && {shlex.join(words)}"  # it takes no absolute path of a task
    note = f"{of - len(kept)} of {of} prompts are left out, whose text has other token ids" if len(kept) < of else ""
    return Written(files, command, exact_match(subject, kept), note)


# -------------------------------------------------------------------------------------------------------- documents
Documents = tuple[list[Row], list[Row], int]  # documents of a task, the rows they are made of, and how many there were


def demonstration_documents(subject: Subject) -> Documents:
    """A document for each answer of a demonstration; a row is kept when all of its answers are."""
    documents, kept, rows = [], [], subject.rows("finetune")
    for row in rows:
        ids = torch.as_tensor(row["input_ids"]).tolist()
        spans = list(target_spans(row))
        texts = [split_text(subject.tokenizer, ids[:end], start) for start, end in spans]
        if None in texts:
            continue
        kept.append(row)
        for (start, end), text in zip(spans, filter(None, texts)):
            responses = [text.response, *([text.space] if text.space else [])]  # see LM_EVAL_SCORES
            documents.append({"prompt": text.prompt, "responses": responses, "num_tokens": end - start})
    return documents, kept, len(rows)


def pair_documents(subject: Subject) -> Documents:
    """A document for each preference pair, the chosen response first."""
    documents, kept, rows = [], [], subject.rows("preference")
    for row in rows:
        sides = [torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected")]
        chosen, rejected = (split_text(subject.tokenizer, ids, row["prompt_len"]) for ids in sides)
        if chosen and rejected:
            kept.append(row)
            documents.append({"prompt": chosen.prompt, "responses": [chosen.response, rejected.response]})
    return documents, kept, len(rows)


def answer_documents(subject: Subject) -> Documents:
    """A document for each prompt that has an answer."""
    documents, kept = [], []
    answered = [row for row in load_prompts(subject.data_dir, subject.split, subject.verify) if answer_of(row)]
    answered = answered[: subject.num_samples]
    for row in answered:
        prompt = text_of(subject.tokenizer, torch.as_tensor(row["input_ids"]).tolist())
        if prompt:
            kept.append(row)
            documents.append({"prompt": prompt, "answer": answer_of(row)})
    return documents, kept, len(answered)


def answer_of(row: Row) -> str:
    """The right answer of a prompt, without white space at its ends; empty where there is none."""
    answers = (row["columns"].get(name) for name in ANSWERS)
    return next((str(one).strip() for one in answers if isinstance(one, str | int | float)), "")


# ---------------------------------------------------------------------------------------------------------- results
def perplexity_of(subject: Subject, rows: Sequence[Row]) -> dict[str, float]:
    """Perplexity of demonstrations."""
    check_vocabulary(list(rows), vocabulary_size(subject.model), subject.data_dir)
    pad_id = subject.tokenizer.pad_token_id
    return {"perplexity": perplexity(subject.model, list(rows), pad_id, subject.batch_size)}


def pair_accuracy(subject: Subject, rows: Sequence[Row]) -> dict[str, float]:
    """Share of pairs whose chosen response is the likelier one."""
    check_vocabulary(list(rows), vocabulary_size(subject.model), subject.data_dir)
    values = likelihoods(subject.model, list(rows), subject.tokenizer.pad_token_id, subject.batch_size)
    return {"pair_accuracy": sum(chosen > rejected for chosen, rejected in values) / len(values)}


def exact_match(subject: Subject, rows: Sequence[Row]) -> dict[str, float]:
    """Share of prompts whose greedy response is the answer, up to white space at its ends."""
    greedy = dataclasses.replace(subject.args, do_sample=False)
    policy = subject.model
    rollout = respond(greedy, policy, policy, list(rows), subject.tokenizer, subject.seed, subject.batch_size)
    responses = [decode(subject.tokenizer, ids).strip() for ids in rollout.response_ids()]
    return {"exact_match": sum(r == answer_of(row) for r, row in zip(responses, rows)) / len(responses)}


RESULTS = {"perplexity": perplexity_of, "pairs": pair_accuracy, "answers": exact_match}


# ------------------------------------------------------------------------------------------------------------ model
def weights(subject: Subject) -> dict[str, str]:
    """Where a harness finds the model: `pretrained`, `peft` for an adapter, and the data's `tokenizer`."""
    found = {"pretrained": subject.source}
    if Path(subject.source, ADAPTER_CONFIG).is_file():
        found = {"pretrained": str(base_name(subject.source, "--model_name")), "peft": subject.source}
    tokenizer = Path(subject.data_dir, "tokenizer")
    return found | ({"tokenizer": str(tokenizer.resolve())} if tokenizer.is_dir() else {})


def device_of(subject: Subject) -> str:
    """Type of the device that the model is on."""
    return str(next(subject.model.parameters()).device.type)
