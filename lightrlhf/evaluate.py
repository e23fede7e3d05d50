"""Evaluate trained models on a held-out split: language models by what they say, reward models by whom they prefer.

For a language model: perplexity of the demonstrations' responses, ROUGE against them, and of its own responses to the
prompts the mean reward, the KL to a reference, length, truncation, and the gold score where the data has a judge. All
models answer with the same sampling noise. For a DPO policy also how its implicit reward ranks preference pairs.
For a reward model: accuracy with a 95% interval, by group where the data names groups. Prints a table and
writes `eval/{split}.json` and `eval/{split}.jsonl` into each experiment dir.

With `--env` the experiments act in a text environment instead: success, cost and length of sampled and of greedy
episodes from fixed starts, altogether and by level, beside the oracle, random commands and, at an OpenAI-compatible
server, a language model that is told the rules in full.

With `--by_turn` models hold dialogues of several turns with the same user instead, and the score of each dialogue after
each turn, and how often it is above that of the first model's, is told turn by turn.

Left out: benchmark suites (lm-evaluation-harness reads our checkpoints as they are).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf.cli.args import GenerationArgs, ModelArgs, check_at_least
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.lists import PAIRS, PATHS
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Rollout, finetune_batch, micro_batches, preference_batch
from lightrlhf.data.splits import Row, check_vocabulary, load_prompts, load_split
from lightrlhf.data.tokens import decode, pair_rows
from lightrlhf.envs import make_env, prompts, read_options
from lightrlhf.envs.agents import (
    ActingArgs,
    Agent,
    Decision,
    Episode,
    ModelAgent,
    Reflector,
    Seat,
    count,
    num_choices,
    oracle_agent,
    play,
    random_agent,
    rates,
)
from lightrlhf.generation.dialogues import Dialogue, as_row, load_dialogues, roll_out, score_turns
from lightrlhf.generation.openai_client import Servers
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.generation.users import UserArgs, load_user
from lightrlhf.maths.ops import preference_loss, wilson_interval
from lightrlhf.models.loading import find_device, load_policy, load_scalar
from lightrlhf.models.names import holds_reward_model, resolve
from lightrlhf.models.roles import Policy, ScalarModel, last_token, policy_inputs, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_function, load_scorer
from lightrlhf.rewards.scorers import FunctionScorer, GroupScorer, score_rollout
from lightrlhf.storage.checkpoint import write_text
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.run_dir import located, pretrained, short_name, stored


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(GenerationArgs, UserArgs):
    """Evaluate experiments on a held-out split, or in a text environment."""

    experiment_dir: list[str] = field(default_factory=list, metadata=PATHS)
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
    by_turn: bool = False
    """Hold dialogues of `num_turns` turns from the openings of `dialogue_*.pt`, and compare models after each turn."""
    rouge: bool = False
    """Compare responses to the demonstrations' by ROUGE."""
    mini_batch_size: int = 64
    """Rows per forward pass and slots of the generation engine."""
    seed: int = 42
    """Seed of the sampling noise, the same for every model."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    env: str | None = None
    """Text environment to act in instead: dangerous_taxi, auto_explore, alfworld, or `package.module:Class`."""
    env_options: list[str] = field(default_factory=list, metadata=PAIRS)
    """Options of the environment as name=value."""
    levels: list[str] = field(default_factory=list)
    """Names of the environment's levels to start from; all when not given."""
    eval_reps: int = 1
    """Sampled episodes from each start."""
    num_envs: int = 64
    """Environments that are played at once."""
    reflect_experiment_dir: list[str] = field(default_factory=list, metadata=PATHS)
    """Reflector of each experiment in turn, `none` for one without; those of their training when not given."""
    acting: list[str] = field(default_factory=list, metadata=PAIRS)
    """Flags of acting as name=value, such as with_history=True, instead of those an experiment was trained with."""
    agent_model: str | None = None
    """Name of a language model at `base_url` that acts, too."""
    agent_attempts: int = 3
    """Replies the language model may give until one names a command."""

    def __post_init__(self) -> None:
        self.check_generation()
        self.check_user() if self.by_turn else self.check_remote()
        self.check_env()
        check_at_least(self, "mini_batch_size", 1)
        for name in ("user_function", "user_model"):
            if getattr(self, name) and not self.by_turn:
                raise ValueError(f"--{name} {getattr(self, name)} speaks with --by_turn True only")
        if self.num_samples is not None:
            check_at_least(self, "num_samples", 1)
        if not self.experiment_dir and not self.env:
            raise ValueError("--experiment_dir needs at least one experiment dir")
        given = [("experiment_dir", name) for name in self.experiment_dir]
        given += [(flag, getattr(self, flag)) for flag in ("data_dir", "rm_experiment_dir", "reference_dir")]
        for flag, name in given:
            if name is not None and not Path(name).is_dir():
                raise ValueError(f"--{flag} {name} does not exist")
        find_device(self.accelerator)

    def check_env(self) -> None:
        """Raises: ValueError, one line, when a flag of `--env` is out of place."""
        for name in ("eval_reps", "num_envs", "agent_attempts"):
            check_at_least(self, name, 1)
        read_options(self.env_options)
        unknown = set(read_options(self.acting)) - {one.name for one in dataclasses.fields(ActingArgs)}
        if unknown:
            raise ValueError(f"--acting {min(unknown)}=… is no flag of acting")
        if self.reflect_experiment_dir and len(self.reflect_experiment_dir) != len(self.experiment_dir):
            raise ValueError(
                "--reflect_experiment_dir needs an entry for each --experiment_dir, `none` for no reflector"
            )
        if bool(self.base_url) != bool(self.agent_model) and not self.by_turn:
            raise ValueError("--base_url and --agent_model go together: an address and a model's name there")
        missing = [name for name in self.reflect_experiment_dir if name != "none" and not Path(name).is_dir()]
        if missing:
            raise ValueError(f"--reflect_experiment_dir {missing[0]} does not exist")
        if not self.env and (self.agent_model or self.reflect_experiment_dir or self.levels or self.acting):
            raise ValueError("--agent_model, --reflect_experiment_dir, --levels and --acting need --env")


def run(args: EvaluateArgs) -> list[dict[str, Any]]:
    """Evaluate models; returns one row of results per model, in the order of the table."""
    device = find_device(args.accelerator)
    if args.env:
        return evaluate_in_env(args, device)
    data_dir = args.data_dir or stored(args.experiment_dir[0], "data_dir")
    if data_dir is None:
        raise UsageError(f"--data_dir is needed: {args.experiment_dir[0]} does not tell what it was trained on")
    start = [pretrained(args.experiment_dir[0])] if args.use_pretrained else []
    models = [*start, *args.experiment_dir]
    if args.by_turn:
        return evaluate_by_turn(args, models, data_dir, device)
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
        scorer = load_scorer(args.rm_experiment_dir, device, args.mini_batch_size, "--rm_experiment_dir", single=True)
        scores = score_rollout(scorer, rollout, tokenizer).tolist()
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


# ---------------------------------------------------------------------------------------------------- dialogues
def evaluate_by_turn(
    args: EvaluateArgs, models: list[str], data_dir: str, device: torch.device
) -> list[dict[str, Any]]:
    """One row per model: mean score after each turn, and its win rate against the first model with 95% intervals.

    All meet the same openings, noise and user. Beside each model's results stand its dialogues up to each turn as
    `prompt` and `response`, which `lightrlhf.judge` compares.
    """
    scorer, rows, records = turn_scorer(args, data_dir, device), [], []
    user = load_user(args, device, args.mini_batch_size)
    for name in models:
        tokenizer = load_tokenizer(data_dir, name)
        policy = _place(load_policy(name, ModelArgs(), tokenizer, "--experiment_dir"), device)
        openings = [row.before(0) for row in load_dialogues(data_dir, args.split)[: args.num_samples]]
        check_vocabulary([{"input_ids": row.input_ids} for row in openings], vocabulary_size(policy), data_dir)
        rolled = roll_out(policy, tokenizer, openings, args.num_turns, user, args, args.seed, args.mini_batch_size)
        scores = score_turns(scorer, rolled)
        records.append(scores)
        row = {"model": short_name(name)} | results_by_turn(scores, records[0], args.num_turns)
        lengths = [end - start for dialogue in rolled for start, end in dialogue.turn_spans]
        rows.append(row | {"mean_length": sum(lengths) / len(lengths)})
        if Path(name, "args.json").is_file() and not Path(name).name.startswith("checkpoint-"):
            written = [{"scores": turns, **as_row(dialogue)} for turns, dialogue in zip(scores, rolled)]
            write_results(Path(name), f"{args.split}_by_turn", rows[-1], written)
            write_turns(Path(name) / "eval" / args.split, rolled, args.num_turns)
    show_by_turn(rows)
    if Path(args.experiment_dir[0], "args.json").is_file() and len(rows) > 1:
        print(f"picture: {draw_by_turn(rows, Path(args.experiment_dir[0], 'eval', f'{args.split}_by_turn.png'))}")
    return rows


def turn_scorer(args: EvaluateArgs, data_dir: str, device: torch.device) -> GroupScorer:
    """What scores dialogues: the reward model of `--rm_experiment_dir`, else the judge of the data."""
    if args.rm_experiment_dir:
        return load_scorer(args.rm_experiment_dir, device, args.mini_batch_size, "--rm_experiment_dir")
    judge = stored(data_dir, "judge")
    if judge is None:
        raise UsageError(f"--by_turn True needs --rm_experiment_dir: {data_dir} has no judge of its own")
    return FunctionScorer(load_function(judge, "the judge of the data"), f"the judge {judge}")


def results_by_turn(
    scores: list[list[float | None]], others: list[list[float | None]], num_turns: int
) -> dict[str, list[Any]]:
    """Mean score after each turn, share of dialogues above the others' (ties split), its interval, and how many count.

    A dialogue that ended before a turn counts there by its last one; invalid scores count on neither side.
    """
    told: dict[str, list[Any]] = {name: [] for name in ("score_by_turn", "win_rate", "win_rate_interval", "count")}
    for turn in range(num_turns):
        pairs = [(one[min(turn, len(one) - 1)], two[min(turn, len(two) - 1)]) for one, two in zip(scores, others)]
        pairs = [(one, two) for one, two in pairs if one is not None and two is not None]
        wins = sum((one > two) + 0.5 * (one == two) for one, two in pairs)
        told["score_by_turn"].append(sum(one for one, _ in pairs) / max(len(pairs), 1))
        told["win_rate"].append(wins / max(len(pairs), 1))
        told["win_rate_interval"].append(wilson_interval(wins, len(pairs)))
        told["count"].append(len(pairs))
    return told


def write_turns(folder: Path, dialogues: list[Dialogue], num_turns: int) -> None:
    """`turn-{h}.jsonl`: the opening as prompt, and the dialogue from there to turn h as response."""
    for turn in range(num_turns):
        lines = []
        for dialogue in dialogues:
            opening = dialogue.before(0).messages
            said = dialogue.through(min(turn, dialogue.num_turns - 1))[len(opening) :]
            text = "\n\n".join(f"{message['role']}: {message['content']}" for message in said)
            lines.append({"index": dialogue.index, "prompt": opening, "response": text})
        write_jsonl(folder / f"turn-{turn + 1}.jsonl", lines)


def show_by_turn(rows: list[dict[str, Any]]) -> None:
    """Print mean scores and win rates turn by turn."""
    from rich.console import Console
    from rich.table import Table

    for key, title in (("score_by_turn", "score after each turn"), ("win_rate", f"win rate over {rows[0]['model']}")):
        table = Table(title=title)
        table.add_column("")
        for turn in range(len(rows[0][key])):
            table.add_column(f"h = {turn + 1}", justify="right")
        table.add_column("mean", justify="right")
        for row in rows if key == "score_by_turn" else rows[1:]:
            cells = [f"{value:.3f}" for value in row[key]]
            if key == "win_rate":
                cells = [f"{c} [{low:.3f}, {high:.3f}]" for c, (low, high) in zip(cells, row["win_rate_interval"])]
            table.add_row(row["model"], *cells, f"{sum(row[key]) / len(row[key]):.3f}")
        if table.row_count:
            Console().print(table)


def draw_by_turn(rows: list[dict[str, Any]], output: Path) -> Path:
    """Win rates over the first model by turn, with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.4))
    for row in rows[1:]:
        turns = range(1, len(row["win_rate"]) + 1)
        errors = [[abs(w - side[i]) for w, side in zip(row["win_rate"], row["win_rate_interval"])] for i in (0, 1)]
        axis.errorbar(turns, row["win_rate"], yerr=errors, fmt="o-", ms=3, capsize=2, label=row["model"])
    axis.axhline(0.5, color="grey", lw=0.8)
    axis.set_xlabel("turn")
    axis.set_ylabel(f"win rate over {rows[0]['model']}, 95%", fontsize=8)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)
    return output


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


# ------------------------------------------------------------------------------------------------ text environments
def evaluate_in_env(args: EvaluateArgs, device: torch.device) -> list[dict[str, Any]]:
    """A row of results for the oracle, random commands, each experiment, and the language model if there is one."""
    envs = [make_env(args.env, **read_options(args.env_options)) for _ in range(args.num_envs)]
    unknown = [name for name in args.levels if name not in envs[0].levels]
    if unknown:
        raise UsageError(f"--levels {unknown[0]} is none of the environment's: {', '.join(envs[0].levels)}")
    levels = [number for number, name in enumerate(envs[0].levels) if not args.levels or name in args.levels]
    starts = [start for level in levels for start in envs[0].starts(args.split, level)[: args.num_samples]]
    if not starts:
        raise UsageError(f"--env {args.env} has no starts of the {args.split} split")

    def played(name: str, sampled: Agent, greedy: Agent | None) -> tuple[dict[str, Any], list[Episode]]:
        repeated = [start for start in starts for _ in range(args.eval_reps)]
        episodes = play(envs, repeated, sampled, f"{args.seed}/{args.split}")
        row = {"model": name} | episode_results(episodes, envs[0].levels, "")
        if greedy is not None:
            row |= episode_results(play(envs, starts, greedy, str(args.seed)), envs[0].levels, "greedy_")
        return row, episodes

    rows = [played("oracle", oracle_agent, oracle_agent)[0], played("random", random_agent, None)[0]]
    for number, name in enumerate(args.experiment_dir):
        row, episodes = played(short_name(name), *model_agents(args, number, envs[0], device))
        rows.append(row)
        if Path(name, "args.json").is_file() and not Path(name).name.startswith("checkpoint-"):
            told = [{"start": e.start, "success": e.success, "cost": e.cost, "story": e.story()} for e in episodes]
            write_results(Path(name), f"{args.env.rpartition(':')[2]}_{args.split}", row, told)
    if args.agent_model:
        with Servers(args, args.agent_model) as servers:
            servers.wait_until_healthy()
            rows.append(played(args.agent_model, remote_agent(servers, args), None)[0])
    show_env(rows, f"{args.env}, {args.split}: {len(starts)} starts, sampled {args.eval_reps} times each")
    return rows


def show_env(rows: list[dict[str, Any]], title: str) -> None:
    """Print a line for each agent, success with its 95% interval; below the same by level where there are several."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row if not name.endswith("_interval")))
    for by_level in (False, True):
        columns = [name for name in names[1:] if (", " in name) is by_level]
        table = Table(title="by level" if by_level else title)
        table.add_column("")
        for name in columns:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(row["model"], *(_cell(row, name) for name in columns))
        if columns:
            Console(width=max(80, 30 + 23 * len(columns))).print(table)


def episode_results(episodes: Sequence[Episode], levels: Sequence[str], prefix: str) -> dict[str, Any]:
    """Rates of episodes, and success by level, each with the 95% interval for these starts."""
    overall = rates(count(episodes))
    found = {f"{prefix}{name}": overall[name] for name in ("success", "cost", "length", "invalid_ratio")}
    for level, name in [(None, "success"), *((n, f"success, {level}") for n, level in enumerate(levels))]:
        members = [one.success for one in episodes if level is None or one.level == level]
        if members and (level is None or len(members) < len(episodes)):
            found[f"{prefix}{name}"] = sum(members) / len(members)
            found[f"{prefix}{name}_interval"] = wilson_interval(sum(members), len(members))
    return found


def model_agents(args: EvaluateArgs, number: int, env: Any, device: torch.device) -> tuple[ModelAgent, ModelAgent]:
    """An experiment that samples, and one that does not, with the reflector of its training or of the flag."""
    name, flag = args.experiment_dir[number], "--reflect_experiment_dir"
    given = args.reflect_experiment_dir
    reflector_dir = given[number] if given else located(name, "reflect_experiment_dir")
    tokenizer = load_tokenizer(None, resolve(name, "--experiment_dir"))
    policy = _place(load_policy(name, ModelArgs(), tokenizer, "--experiment_dir"), device)
    reflects = reflector_dir not in (None, "none")
    if reflects:
        other = load_tokenizer(None, resolve(reflector_dir, flag))
        frozen = _place(load_policy(reflector_dir, ModelArgs(), other, flag), device)

    def agent(acting: ActingArgs) -> ModelAgent:
        reflector = Reflector(frozen, other, prompts, acting, args.mini_batch_size) if reflects else None
        labels = num_choices(env, acting)
        return ModelAgent(policy, tokenizer, prompts, acting, labels, args.mini_batch_size, reflector)

    sampled = acting_args(name, read_options(args.acting))
    return agent(sampled), agent(dataclasses.replace(sampled, do_sample=False, reflect_do_sample=False))


LONGEST_COMMAND = 32  # tokens of one that is written out, where no run has said otherwise


def acting_args(name: str, given: dict[str, Any]) -> ActingArgs:
    """How an experiment acts: as its run did, else as its data was made, less what is given."""
    told = {}
    data_dir = located(name, "data_dir")
    for one in dataclasses.fields(ActingArgs):
        if stored(name, "program") == "reflect_rl":
            told[one.name] = stored(name, one.name)
        elif data_dir and one.name in ("with_history", "shuffle_action"):
            told[one.name] = stored(data_dir, one.name)
        elif data_dir and one.name == "max_new_tokens" and stored(data_dir, "written"):
            told[one.name] = LONGEST_COMMAND
    try:
        acting = ActingArgs(**({key: value for key, value in told.items() if value is not None} | given))
        acting.check_acting()
    except (TypeError, ValueError) as problem:
        raise UsageError(f"--acting: {problem}") from None
    return acting


ASK = """\
{instructions}

You play move by move. End your reply with one line: `Command: ` and one of the offered commands, word for word."""
AGAIN = "That names none of the offered commands. Reply with one line: `Command: ` and a command of the list."


def remote_agent(servers: Servers, args: EvaluateArgs) -> Agent:
    """A language model behind a server, told the rules, the history and the commands; it may correct itself."""
    sampling = {"max_tokens": args.max_new_tokens, "temperature": args.temperature if args.do_sample else 0.0}

    def act(seats: Sequence[Seat]) -> list[Decision]:
        talks = []
        for seat in seats:
            state = prompts.state_prompt(seat.text, seat.info, with_history=True)
            offered = "\n".join(f"- {command}" for command in seat.info["admissible"])
            rules = {"role": "system", "content": ASK.format(instructions=seat.env.instructions)}
            talks.append([rules, {"role": "user", "content": f"{state}\nCommands:\n{offered}"}])
        decisions = [Decision("", seat.text) for seat in seats]
        silent = list(range(len(seats)))  # those who have named no command yet
        for _ in range(args.agent_attempts):
            bodies = [{"messages": list(talks[i]), **sampling} for i in silent]
            for i, reply in zip(silent, servers.replies(bodies)):
                decisions[i].reflection = reply.text
                decisions[i].action = named_command(reply.text, seats[i].info["admissible"]) or ""
                talks[i] += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": AGAIN}]
            silent = [i for i in silent if not decisions[i].action]
        return decisions

    return act


def named_command(text: str, offered: Sequence[str]) -> str | None:
    """The command on the last line that is one, with or without the word before it."""
    for line in reversed(text.splitlines()):
        said = line.strip(" `*\"'.").removeprefix("Command:").strip(" `*\"'.")
        for command in offered:
            if said in (command, command.strip(" .")):
                return command
    return None


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


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; returns one row of results per model, in the order of the table."""
    return run(parse(EvaluateArgs, argv))


if __name__ == "__main__":
    main()
