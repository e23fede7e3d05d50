"""A reward model's scores of preference pairs in the format of RewardBench's own output (0.1).

Pairs are the user's file in RewardBench's format (prompt, chosen, rejected, subset), else the split's,
whose column `group` is the subset. `results` is 1 where the chosen response scores higher and 0 elsewhere, as
RewardBench counts ties.

Left out: RewardBench 2, with four responses a prompt (see `ranking`), and the weights of RewardBench's sections, which
are its own.
"""

from __future__ import annotations

import shlex

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rows import load_rows
from lightrlhf.data.splits import Row, check_vocabulary
from lightrlhf.data.tokens import decode
from lightrlhf.evaluation.pairs import score_pairs
from lightrlhf.evaluation.responses import Mean
from lightrlhf.evaluation.subjects import Subject, Written
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.storage.jsonl import write_jsonl


def rewardbench(subject: Subject) -> Written:
    """Write the scores, `{model}_outputs.jsonl`, and where the user gave pairs those as RewardBench reads them.

    Raises: UsageError when there are no pairs, or for a model that compares pairs and has no score of one response.
    """
    tokenizer = subject.tokenizer
    if getattr(subject.model.model.config, "compares_pairs", False):
        raise UsageError(f"--harness rewardbench: {subject.name} compares two responses and has no score of one")
    pairs = load_pairs(subject) if subject.questions else subject.rows("preference")
    if not pairs:
        raise UsageError(
            f"--harness rewardbench: {subject.data_dir} has no pairs in its {subject.args.split} split; "
            "prepare preference data, or give --harness_questions"
        )
    check_vocabulary(pairs, vocabulary_size(subject.model), subject.data_dir)
    size = subject.args.rollout_mini_batch_size
    scores = score_pairs(subject.model, pairs, tokenizer.pad_token_id, size)  # (2, N)
    shares: dict[str, Mean] = {}  # of right pairs, by subset

    def row_of(number: int) -> Row:
        pair, (good, bad) = pairs[number], scores[:, number].tolist()
        columns = pair.get("columns", {})
        chosen, rejected = (torch.as_tensor(pair[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected"))
        subset, right = str(columns.get("subset", columns.get("group", "all"))), int(good > bad)
        shares.setdefault(subset, Mean()).add(right)
        return {
            "id": columns.get("id", number),
            "subset": subset,
            "prompt": decode(tokenizer, chosen[: pair["prompt_len"]]),
            "text_chosen": tokenizer.decode(chosen, clean_up_tokenization_spaces=False),
            "text_rejected": tokenizer.decode(rejected, clean_up_tokenization_spaces=False),
            "scores_chosen": good,
            "scores_rejected": bad,
            "results": right,  # 0 for a tie and for a score that is not a number
        }

    files = [subject.folder / f"{subject.label}_outputs.jsonl"]
    write_jsonl(files[0], map(row_of, range(len(pairs))))
    results = {"accuracy": sum(mean.total for mean in shares.values()) / len(pairs)}
    results |= {f"accuracy, {subset}": mean.total / mean.count for subset, mean in sorted(shares.items())}
    if not (subject.questions and tokenizer.chat_template):
        return Written(files, "", results)
    files.append(subject.folder / "pairs.jsonl")
    write_jsonl(files[1], [as_dialogues(row) for row in subject.questions])
    words = ["rewardbench", "--model", subject.source, "--dataset", str(files[1]), "--load_json", "--not_quantized"]
    words += ["--torch_dtype", "float32", "--output_dir", f"{subject.folder / 'results'}/"]
    note = "rewardbench needs a GPU, and reads what the chat template writes behind the end token, too"
    return Written(files, shlex.join(words), results, note)


def load_pairs(subject: Subject) -> list[Row]:
    """Rows of the user's pairs; prompts are user messages where the tokenizer has a chat template."""
    rows = subject.questions
    if subject.tokenizer.chat_template:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    return load_rows("preference", "train", subject.data_dir, rows, subject.tokenizer).to_list()


def as_dialogues(row: Row) -> Row:
    """A pair as dialogues, which `rewardbench --load_json` reads."""
    question = {"role": "user", "content": row["prompt"]}
    sides = {side: [question, {"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}
    return {name: row[name] for name in ("id", "subset") if name in row} | {"prompt": row["prompt"]} | sides
