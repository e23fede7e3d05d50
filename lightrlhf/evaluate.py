"""Evaluate trained models on a held-out split: language models by what they say, reward models by whom they prefer.

For a language model: perplexity of the demonstrations' responses, ROUGE against them, and of its own responses to the
prompts the mean reward, the KL to a reference, length, truncation, and the gold score where the data has a judge. All
models answer with the same sampling noise. For a DPO policy also how its implicit reward ranks preference pairs.
For a reward model: accuracy with a 95% interval, by group where the data names groups. Prints a table and
writes `eval/{split}.json` and `eval/{split}.jsonl` into each experiment dir.

Left out: benchmark suites (lm-evaluation-harness reads our checkpoints as they are).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf.common.args import (
    GenerationArgs,
    ModelArgs,
    UsageError,
    check_at_least,
    one_line_errors,
    parse,
)
from lightrlhf.common.batch import (
    Rollout,
    Row,
    check_vocabulary,
    decode,
    finetune_batch,
    load_prompts,
    load_split,
    micro_batches,
    pair_rows,
    preference_batch,
)
from lightrlhf.common.checkpoint import write_text
from lightrlhf.common.experiments import pretrained, short_name, stored
from lightrlhf.common.model import (
    Policy,
    ScalarModel,
    holds_reward_model,
    last_token,
    load_policy,
    load_scalar,
    load_tokenizer,
    policy_inputs,
    resolve,
    vocabulary_size,
)
from lightrlhf.common.ops import preference_loss, wilson_interval
from lightrlhf.common.rewards import RewardModelScorer, Scorer, load_function, reward_statistics
from lightrlhf.common.rollout import generate_rollout
from lightrlhf.common.scoring import find_device


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(GenerationArgs):
    """Evaluate experiments on a held-out split."""

    experiment_dir: list[str]
    """Experiment dirs or checkpoints; the others' win rates are against the first."""
    data_dir: str | None = None
    """Folder of the `.pt` splits; the one the first experiment was trained on when not given."""
    split: Literal["train", "validation", "test"] = "test"
    """Split to evaluate on."""
    rm_experiment_dir: str | None = None
    """Reward model that scores the responses."""
    reference_dir: str | None = None
    """Model that KL and implicit rewards are taken to; when not given what each PPO or DPO experiment started from."""
    use_pretrained: bool = False
    """Evaluate the model the first experiment started from, too, as row zero."""
    num_samples: int | None = None
    """Rows of the split to use; all when not given."""
    rouge: bool = False
    """Compare responses to the demonstrations' by ROUGE."""
    mini_batch_size: int = 64
    """Rows per forward pass and slots of the generation engine."""
    seed: int = 42
    """Seed of the sampling noise, the same for every model."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""

    def __post_init__(self) -> None:
        self.check_generation()
        check_at_least(self, "mini_batch_size", 1)
        if self.num_samples is not None:
            check_at_least(self, "num_samples", 1)
        if not self.experiment_dir:
            raise ValueError("--experiment_dir needs at least one experiment dir")
        given = [("experiment_dir", name) for name in self.experiment_dir]
        given += [(flag, getattr(self, flag)) for flag in ("data_dir", "rm_experiment_dir", "reference_dir")]
        for flag, name in given:
            if name is not None and not Path(name).is_dir():
                raise ValueError(f"--{flag} {name} does not exist")
        find_device(self.accelerator)


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; returns one row of results per model, in the order of the table."""
    args = parse(EvaluateArgs, argv)
    device = find_device(args.accelerator)
    data_dir = args.data_dir or stored(args.experiment_dir[0], "data_dir")
    if data_dir is None:
        raise UsageError(f"--data_dir is needed: {args.experiment_dir[0]} does not tell what it was trained on")
    start = [pretrained(args.experiment_dir[0])] if args.use_pretrained else []
    models = [*start, *args.experiment_dir]
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []  # records of the first experiment
    for name in models:
        is_reward_model = holds_reward_model(resolve(name, "--experiment_dir"))
        result, records = (evaluate_reward_model if is_reward_model else evaluate_policy)(args, name, data_dir, device)
        rows.append({"model": short_name(name), **result})
        if compared and "gold" in records[0] and "gold" in compared[0]:
            rows[-1]["win_rate"], rows[-1]["win_rate_interval"] = win_rate(records, compared)
        if len(rows) == len(start) + 1:
            compared = records
        if Path(name, "args.json").is_file() and not Path(name).name.startswith("checkpoint-"):
            write_results(Path(name), args.split, rows[-1], records)
    show(rows)
    return rows


# -------------------------------------------------------------------------------------------------- language models
def evaluate_policy(
    args: EvaluateArgs, name: str, data_dir: str, device: torch.device
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results of a language model and one record per prompt (prompt, response, scores)."""
    tokenizer = load_tokenizer(data_dir, name)
    policy = _place(load_policy(name, ModelArgs(), tokenizer, "--experiment_dir"), device)
    results: dict[str, Any] = {}
    if Path(data_dir, f"finetune_{args.split}.pt").is_file():
        demonstrations = load_split(data_dir, "finetune", args.split)[: args.num_samples]
        check_vocabulary(demonstrations, vocabulary_size(policy), data_dir)
        results["perplexity"] = perplexity(policy, demonstrations, tokenizer.pad_token_id, args.mini_batch_size)
        if args.rouge:
            results |= rouge(args, policy, demonstrations, tokenizer)
    prompts = load_prompts(data_dir, args.split)[: args.num_samples]
    reference_dir, flag = reference_of(args, name)
    same = reference_dir is None
    reference = policy if same else _place(load_policy(reference_dir, ModelArgs(), tokenizer, flag), device)
    if stored(name, "program") == "dpo" and not same and Path(data_dir, f"preference_{args.split}.pt").is_file():
        pairs = load_split(data_dir, "preference", args.split)[: args.num_samples]
        check_vocabulary(pairs, min(vocabulary_size(policy), vocabulary_size(reference)), data_dir)
        results |= implicit_rewards(
            policy, reference, pairs, stored(name, "beta"), tokenizer.pad_token_id, args.mini_batch_size
        )
    rollout = respond(args, policy, reference, prompts, tokenizer)
    length = (rollout.attention_mask.sum(1) - rollout.prompt_len).float()
    truncated = float(rollout.truncated.float().mean())
    if not same:
        kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1)
        results["kl"] = float(kl.mean())
    results |= {"mean_length": float(length.mean()), "truncated_ratio": truncated, "eos_ratio": 1 - truncated}
    records = [
        {"prompt": decode(tokenizer, p), "response": decode(tokenizer, r), **row.get("columns", {})}
        for p, r, row in zip(rollout.prompt_ids(), rollout.response_ids(), prompts)
    ]
    if args.rm_experiment_dir:
        scores = load_scorer(args, tokenizer, device)(rollout).tolist()
        results["reward"] = sum(scores) / len(scores)
        records = [{**record, "reward": value} for record, value in zip(records, scores)]
    judge = stored(data_dir, "judge")
    if judge:
        records = judged(judge, records)
        parts = [key for key in records[0]["gold"] if key != "score"]
        results["gold"] = sum(r["gold"]["score"] for r in records) / len(records)
        results |= {part: sum(r["gold"][part] for r in records) / len(records) for part in parts}
    return results, records


@torch.no_grad()
def perplexity(policy: Policy, rows: list[Row], pad_id: int, batch_size: int) -> float:
    """exp of the mean cross-entropy of the rows' response tokens, each token counting once."""
    total, count = 0.0, 0
    for micro in micro_batches(rows, batch_size):
        batch = finetune_batch(micro, pad_id, use_targets=True).to(policy.model.device)
        total -= float(policy(**policy_inputs(batch)).logprobs.sum())
        count += batch.num_actions
    return math.exp(min(total / max(count, 1), 50.0))


def reference_of(args: EvaluateArgs, name: str) -> tuple[str | None, str]:
    """What the KL and the implicit rewards of an experiment are taken to, None if nothing, and the flag to blame."""
    given = args.reference_dir or stored(name, "ref_model") or stored(name, "sft_experiment_dir")
    started = stored(name, "model_name") if stored(name, "program") == "dpo" else None
    if given is None and started not in (None, "tiny"):
        return started, "--model_name"
    return given, "--reference_dir"


@torch.no_grad()
def implicit_rewards(
    policy: Policy, reference: Policy, rows: list[Row], beta: float, pad_id: int, batch_size: int
) -> dict[str, Any]:
    """How a DPO policy ranks pairs by its implicit reward, beta (log pi - log pi_ref); a tie is half right."""
    right, margin = 0.0, 0.0
    for micro in micro_batches(rows, batch_size):
        inputs = policy_inputs(preference_batch(micro, pad_id).to(policy.model.device))
        rewards = beta * (policy(**inputs).logprobs - reference(**inputs).logprobs).sum(1)  # (2B,)
        chosen, rejected = rewards.chunk(2)
        right += float((chosen > rejected).float().sum() + 0.5 * (chosen == rejected).float().sum())
        margin += float((chosen - rejected).sum())
    return {
        "implicit_accuracy": right / len(rows),
        "implicit_accuracy_interval": wilson_interval(right, len(rows)),
        "implicit_margin": margin / len(rows),
    }


def respond(args: EvaluateArgs, policy: Policy, reference: Policy, rows: list[Row], tokenizer: Any) -> Rollout:
    """One response per row; the noise depends on the seed alone, so all models are compared on the same draw."""
    check_vocabulary(rows, vocabulary_size(policy), "the prompts")
    noise = torch.rand(len(rows), args.max_new_tokens, generator=torch.Generator().manual_seed(args.seed))
    return generate_rollout(policy, reference, rows, args, tokenizer, noise, args.mini_batch_size)


def rouge(args: EvaluateArgs, policy: Policy, rows: list[Row], tokenizer: Any) -> dict[str, float]:
    """ROUGE-1, -2 and -L (F1, torchmetrics) of responses against the demonstrations' own."""
    from torchmetrics.text.rouge import ROUGEScore

    prompts = [{"input_ids": row["input_ids"][: row["prompt_len"]]} for row in rows]
    rollout = respond(args, policy, policy, prompts, tokenizer)
    ours = [decode(tokenizer, ids) for ids in rollout.response_ids()]
    theirs = [decode(tokenizer, row["input_ids"][row["prompt_len"] :]) for row in rows]
    scores = ROUGEScore(rouge_keys=("rouge1", "rouge2", "rougeL"))(ours, theirs)
    return {key: float(scores[f"{key}_fmeasure"]) for key in ("rouge1", "rouge2", "rougeL")}


def load_scorer(args: EvaluateArgs, tokenizer: Any, device: torch.device) -> Scorer:
    """The reward model of `--rm_experiment_dir`, its scores standardised by the statistics stored with it."""
    source = resolve(args.rm_experiment_dir, "--rm_experiment_dir")
    model = load_scalar(source, ModelArgs(), tokenizer, args.seed, "--rm_experiment_dir", needs_head=True)
    scorer = RewardModelScorer(_place(model, device), load_tokenizer(None, source), tokenizer, args.mini_batch_size)
    mean, std = reward_statistics(source)
    return lambda rollout: (scorer(rollout) - mean) / std


def judged(judge: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with the data's own judge applied: a dict `score` and its parts under `gold`."""
    function = load_function(judge, "the judge of the data")
    prompts, responses = ([record[key] for record in records] for key in ("prompt", "response"))
    return [{**record, "gold": verdict} for record, verdict in zip(records, function(prompts, responses))]


def win_rate(records: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[float, tuple[float, float]]:
    """Share of prompts on which `records` have the higher gold score, ties split, with its 95% Wilson interval."""
    pairs = [(one["gold"]["score"], two["gold"]["score"]) for one, two in zip(records, others)]
    wins = sum((one > two) + 0.5 * (one == two) for one, two in pairs)
    return wins / len(pairs), wilson_interval(wins, len(pairs))


# ---------------------------------------------------------------------------------------------------- reward models
@torch.no_grad()
def evaluate_reward_model(
    args: EvaluateArgs, name: str, data_dir: str, device: torch.device
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Accuracy, loss and margin of a reward model on pairs, and one record per pair; a tie is half right."""
    tokenizer = load_tokenizer(data_dir, name)
    source = resolve(name, "--experiment_dir")
    model: ScalarModel = _place(load_scalar(source, ModelArgs(), tokenizer, args.seed, "--experiment_dir"), device)
    pairs = load_split(data_dir, "preference", args.split)[: args.num_samples]
    if getattr(model.model.config, "compares_pairs", False):
        pairs = pair_rows(tokenizer, pairs)
    check_vocabulary(pairs, vocabulary_size(model), data_dir)
    records: list[dict[str, Any]] = []
    for micro in micro_batches(pairs, args.mini_batch_size):
        batch = preference_batch(micro, tokenizer.pad_token_id).to(device)
        chosen, rejected = last_token(model(batch.input_ids, batch.attention_mask), batch.attention_mask).chunk(2)
        losses = preference_loss(chosen, rejected).tolist()
        for row, good, bad, loss in zip(micro, chosen.tolist(), rejected.tolist(), losses):
            right = 0.5 if good == bad else float(good > bad)
            records.append({**row.get("columns", {}), "chosen": good, "rejected": bad, "loss": loss, "right": right})
    right, count = sum(r["right"] for r in records), len(records)
    results = {
        "accuracy": right / count,
        "accuracy_interval": wilson_interval(right, count),
        "loss": sum(r["loss"] for r in records) / count,
        "margin": sum(r["chosen"] - r["rejected"] for r in records) / count,
    }
    groups = sorted({r["group"] for r in records if "group" in r})
    members = {group: [r["right"] for r in records if r.get("group") == group] for group in groups}
    if groups:
        results["by_group"] = {group: sum(values) / len(values) for group, values in members.items()}
    return results, records


# ---------------------------------------------------------------------------------------------------------- results
def write_results(experiment_dir: Path, split: str, row: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """`eval/{split}.json` with the results and `eval/{split}.jsonl` with one record a line."""
    folder = experiment_dir / "eval"
    try:
        folder.mkdir(exist_ok=True)
        write_text(folder / f"{split}.json", json.dumps(row, indent=1))
        write_text(folder / f"{split}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    except OSError as problem:
        raise UsageError(f"results cannot be written to {folder}: {problem.strerror}") from None


def show(rows: list[dict[str, Any]]) -> None:
    """Print the results as a table, and accuracies by group below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    keys = dict.fromkeys(key for row in rows for key in row)
    table = Table(title="evaluation")
    table.add_column("")
    for row in rows:
        table.add_column(row["model"], justify="right")
    for name in keys:
        if name not in ("model", "by_group") and not name.endswith("_interval"):
            table.add_row(name.replace("_", " "), *(_cell(row, name) for row in rows))
    console.print(table)
    for row in rows:
        if "by_group" in row:
            groups = Table(title=f"accuracy of {row['model']} by group")
            groups.add_column("group")
            groups.add_column("accuracy", justify="right")
            for group, value in row["by_group"].items():
                groups.add_row(group, f"{value:.3f}")
            console.print(groups)


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    interval = row.get(f"{name}_interval")
    return f"{row[name]:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _place(module: Any, device: torch.device) -> Any:
    return module.requires_grad_(False).eval().to(device)


if __name__ == "__main__":
    main()
