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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import Row, check_vocabulary, load_prompts
from lightrlhf.data.types import Tokenizer
from lightrlhf.evaluation.answers import perplexity, respond
from lightrlhf.evaluation.pairs import likelihoods
from lightrlhf.evaluation.subjects import Subject, Written
from lightrlhf.evaluation.texts import split_text, target_spans, text_of
from lightrlhf.models.forward import device_of
from lightrlhf.models.lora import ADAPTER_CONFIG
from lightrlhf.models.names import base_name
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.rewards.functions import ANSWERS
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.writing import write_text

LM_EVAL_TASK = """\
task: lightrlhf_{task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: prompt
target_delimiter: ""
metadata: {{version: 1}}
{scoring}"""
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


# ------------------------------------------------------------------------------------------------------------ tasks
def demonstration_documents(tokenizer: Tokenizer, row: Row) -> list[Row] | None:
    """A document for each answer of a demonstration; None when the text of one has other ids."""
    ids = torch.as_tensor(row["input_ids"]).tolist()
    documents: list[Row] = []
    for start, end in target_spans(row):
        text = split_text(tokenizer, ids[:end], start)
        if text is None:
            return None
        responses = [text.response, *([text.space] if text.space else [])]  # see LM_EVAL_SCORES
        documents.append({"prompt": text.prompt, "responses": responses, "num_tokens": end - start})
    return documents


def pair_documents(tokenizer: Tokenizer, row: Row) -> list[Row] | None:
    """A document of a preference pair, the chosen response first; None when a text has other ids."""
    sides = [torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected")]
    chosen, rejected = (split_text(tokenizer, ids, row["prompt_len"]) for ids in sides)
    return (
        [{"prompt": chosen.prompt, "responses": [chosen.response, rejected.response]}] if chosen and rejected else None
    )


def answer_documents(tokenizer: Tokenizer, row: Row) -> list[Row] | None:
    """A document of a prompt and its answer; None when the prompt's text has other ids."""
    prompt = text_of(tokenizer, torch.as_tensor(row["input_ids"]).tolist())
    return [{"prompt": prompt, "answer": answer_of(row)}] if prompt else None


def rows_with_answer(subject: Subject) -> list[Row]:
    """The prompts that have an answer, at most `--num_samples`."""
    prompts = load_prompts(subject.data_dir, subject.args.split, subject.args.verify)
    return [row for row in prompts if answer_of(row)][: subject.args.num_samples]


def answer_of(row: Row) -> str:
    """The right answer of a prompt, without white space at its ends; empty without one."""
    answers = (row["columns"].get(name) for name in ANSWERS)
    return next((str(one).strip() for one in answers if isinstance(one, str | int | float)), "")


def pair_accuracy(subject: Subject, rows: list[Row]) -> float:
    """Share of pairs whose chosen response is the likelier one."""
    size = subject.args.rollout_mini_batch_size
    values = likelihoods(subject.model, rows, subject.tokenizer.pad_token_id, size)
    return sum(chosen > rejected for chosen, rejected in values) / len(values)


def exact_match(subject: Subject, rows: list[Row]) -> float:
    """Share of prompts whose greedy response is the answer, up to white space at its ends."""
    args, policy = dataclasses.replace(subject.args, do_sample=False), subject.model
    rollout = respond(args, policy, policy, rows, subject.tokenizer, args.seed, args.rollout_mini_batch_size)
    return sum(response.strip() == answer_of(row) for (_, response), row in zip(rollout.texts, rows)) / len(rows)


class Task(NamedTuple):
    """A task of lm-eval, and the figure it should find."""

    rows: Callable[[Subject], list[Row]]
    documents: Callable[[Tokenizer, Row], list[Row] | None]  # of a row; None leaves it out
    scoring: str  # the part of the YAML file that is the task's own
    measure: Callable[[Subject, list[Row]], float]

    def select(self, subject: Subject) -> tuple[list[Row], list[Row], str]:
        """(documents, the rows that they are made of, a note on the rows that are left out)."""
        rows = self.rows(subject)
        found = [(row, self.documents(subject.tokenizer, row)) for row in rows]
        kept = [row for row, documents in found if documents is not None]
        left_out = f"{len(rows) - len(kept)} of {len(rows)} rows are left out, whose text has other token ids"
        if kept:
            check_vocabulary(kept, vocabulary_size(subject.model), subject.data_dir)
        return [d for _, documents in found for d in documents or ()], kept, left_out if len(kept) < len(rows) else ""


LIKELIHOOD = """\
output_type: multiple_choice
doc_to_choice: responses
doc_to_target: 0
"""
WEIGHTED = """\
process_results: !function lightrlhf_scores.likelihood
metric_list: [{metric: perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
GREEDY = """\
output_type: generate_until
doc_to_target: answer
generation_kwargs: {do_sample: false, max_gen_toks: MAX_NEW_TOKENS, until: []}
process_results: !function lightrlhf_scores.exact_match
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
ACCURACY = "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
TASKS = {
    "perplexity": Task(
        lambda subject: subject.rows("finetune"),
        demonstration_documents,
        LIKELIHOOD + WEIGHTED,
        lambda one, rows: perplexity(one.model, rows, one.tokenizer.pad_token_id, one.args.rollout_mini_batch_size),
    ),
    "pairs": Task(lambda subject: subject.rows("preference"), pair_documents, LIKELIHOOD + ACCURACY, pair_accuracy),
    "answers": Task(rows_with_answer, answer_documents, GREEDY, exact_match),
}
RESULTS = {"perplexity": "perplexity", "pairs": "pair_accuracy", "answers": "exact_match"}


# -------------------------------------------------------------------------------------------------------- harnesses
def lm_eval(subject: Subject) -> Written:
    """Write a task for each stage of the split, and compute the figures they should find.

    Raises: UsageError when the split has neither demonstrations, pairs nor answers whose ids a harness reads back.
    """
    results: dict[str, float] = {}
    files, notes, tasks = [], [], []
    for name, task in TASKS.items():
        documents, kept, note = task.select(subject)
        notes += [f"{name}: {note}"] if note else []
        if not kept:
            continue
        data, settings = subject.folder / f"{name}.jsonl", subject.folder / f"lightrlhf_{name}.yaml"
        write_jsonl(data, documents)
        scoring = task.scoring.replace("MAX_NEW_TOKENS", str(subject.args.max_new_tokens))
        write_text(settings, LM_EVAL_TASK.format(task=name, file=json.dumps(str(data.resolve())), scoring=scoring))
        files += [settings, data]
        tasks.append(f"lightrlhf_{name}")
        results[RESULTS[name]] = task.measure(subject, kept)
    if not tasks:
        raise UsageError(
            f"--harness lm_eval: {subject.data_dir} has no demonstrations, pairs or answers in its "
            f"{subject.args.split} split whose text has the same token ids" + "".join(f"; {note}" for note in notes)
        )
    files.append(subject.folder / "lightrlhf_scores.py")
    write_text(files[-1], LM_EVAL_SCORES)
    model = ",".join(f"{key}={value}" for key, value in {**weights(subject), "dtype": "float32"}.items())
    words = ["lm_eval", "run", "--model", "hf", "--model_args", f"{model},add_bos_token=False"]
    words += ["--include_path", str(subject.folder), "--tasks", ",".join(tasks)]
    words += ["--batch_size", str(subject.args.rollout_mini_batch_size), "--device", device_of(subject.model).type]
    words += ["--output_path", str(subject.folder / "results")]
    return Written(files, shlex.join(words), results, "; ".join(notes))


def inspect(subject: Subject) -> Written:
    """Write a task of greedy responses with exact match, and compute the share it should find.

    Raises: UsageError when no prompt of the split has an answer, or for an adapter, which inspect-ai does not load.
    """
    found = weights(subject)
    if "peft" in found:
        raise UsageError(
            f"--harness inspect: {subject.name} holds an adapter, which inspect-ai does not load; "
            f"merge it first: python -m lightrlhf.export {subject.name} --to merged"
        )
    documents, kept, note = TASKS["answers"].select(subject)
    if not kept:
        raise UsageError(
            f"--harness inspect: {subject.data_dir} has no prompts with {', '.join(ANSWERS)} in its "
            f"{subject.args.split} split; prepare it with such a column, or run a task of inspect-ai on the checkpoint"
        )
    files = [subject.folder / "answers.jsonl", subject.folder / "lightrlhf_answers.py", subject.folder / "model.json"]
    write_jsonl(files[0], documents)
    write_text(files[1], INSPECT_TASK.replace("{max_new_tokens}", str(subject.args.max_new_tokens)))
    write_text(files[2], json.dumps(INSPECT_MODEL, indent=1))
    words = ["inspect", "eval", files[1].name, "--model", f"hf/{subject.label}", "--model-config", files[2].name]
    words += ["-M", f"model_path={found['pretrained']}"]
    words += ["-M", f"tokenizer_path={found.get('tokenizer', found['pretrained'])}"]
    words += ["-M", f"device={device_of(subject.model).type}", "--log-dir", "logs"]
    words += ["--max-connections", str(subject.args.rollout_mini_batch_size)]
    command = f"cd {shlex.quote(str(subject.folder))} && {shlex.join(words)}"  # it takes no absolute path of a task
    return Written(files, command, {"exact_match": exact_match(subject, kept)}, note)


def weights(subject: Subject) -> dict[str, str]:
    """Where a harness finds the model: `pretrained`, `peft` for an adapter, and the data's `tokenizer`."""
    found = {"pretrained": subject.source}
    if Path(subject.source, ADAPTER_CONFIG).is_file():
        found = {"pretrained": str(base_name(subject.source, "--model_name")), "peft": subject.source}
    tokenizer = Path(subject.data_dir, "tokenizer")
    return found | ({"tokenizer": str(tokenizer.resolve())} if tokenizer.is_dir() else {})
