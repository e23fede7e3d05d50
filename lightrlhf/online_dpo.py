"""Online preference learning: respond, score, choose pairs, train, again (Dong et al. 2024, 2405.07863).

Each iteration takes prompts it has not seen, lets the policy of the iteration before answer each K times, scores the
answers, chooses a pair a prompt and trains on the pairs from that policy on, by DPO or any other loss of
`lightrlhf.dpo`, against the initial policy as reference (`--reference moving`: against the last one, which is mirror
descent and less stable). `--training_step raft` instead learns the best answer of each prompt by cross-entropy (Dong et
al. 2023, 2304.06767). With `--responder initial` the same program is its own control: offline learning from answers of
the initial policy, at equal prompts, pairs and reward queries.

Every stage is a program of its own (`generate`, `annotate`, `dpo` or `sft`) and leaves its files:

    iteration-02/prompts.jsonl  responses.jsonl  rewards.jsonl  pairs/  policy/  evaluation.json  evaluation.jsonl

What is there is not done again, so `--resume_from DIR` goes on after a kill with the same result. Left out: data of
earlier iterations (pairs are used once), and optimiser states carried over from one iteration to the next.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf import annotate, dpo, generate, sft
from lightrlhf.cli.args import GenerationArgs, ModelArgs, RewardArgs, SamplingArgs, check_at_least, check_data_dir
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import epoch_order
from lightrlhf.data.splits import IGNORE_INDEX, Row, check_vocabulary, load_prompts, save_split
from lightrlhf.data.tokens import decode
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.names import resolve
from lightrlhf.models.roles import vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_function, make_scorer
from lightrlhf.rewards.scorers import Encoding, Sample
from lightrlhf.storage.checkpoint import checkpoints, write_text
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl
from lightrlhf.training.iterate import keep_policy, link_checkpoint, mean, open_directory, run_begun

STAGES = {"generate": generate, "annotate": annotate, "dpo": dpo, "sft": sft}


@dataclass(frozen=True, kw_only=True)
class OnlineDPOArgs(dpo.DPOLossArgs, RewardArgs, SamplingArgs):
    """Online preference learning: respond, score, choose pairs, train, in iterations."""

    experiment_name: str = "rlhf-online-dpo"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    iterations: int = 3
    """How often responses are sampled anew and learned from."""
    prompts_per_iteration: int | None = None
    """Fresh prompts of each iteration; when not given the training prompts are divided evenly."""
    num_responses: int = 8
    """Responses per prompt."""
    rm_chat_template: bool = False
    """Show a prompt that is plain text to the reward model as a user message of its chat template."""
    choose_type: Literal["max_random", "max_min", "max_max", "random", "max_min_p"] = "max_min"
    """Pair of a prompt: the best against a random other, the worst, the second; any two; `max_min` after a penalty."""
    length_penalty: float = 0.0
    """Reward taken off per token or character of length, for `max_min_p`."""
    length_unit: Literal["tokens", "characters"] = "tokens"
    """What the length penalty counts."""
    training_step: Literal["dpo", "raft"] = "dpo"
    """Learn from pairs, or (raft) the best response of each prompt by cross-entropy."""
    reference: Literal["initial", "moving"] = "initial"
    """What the policy is held at: always the initial policy (or `ref_model`), or that of the iteration before."""
    responder: str = "last"
    """Who responds: `last` (online), `initial` (offline, from the initial policy), or the directory of another one."""
    rollout_mini_batch_size: int = 64
    """Slots of the generation engine."""
    eval_prompts: int = 200
    """Held-out prompts of the evaluation after each iteration; the validation split's first ones."""
    epochs: int = 1
    """Passes over the pairs of an iteration."""
    lr_warmup_steps: int = 5
    """Steps of linear warm-up from 0, in each iteration: a fresh Adam at the full rate can throw a policy far off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_generation()
        find_device(self.accelerator)
        for name in ("iterations", "rollout_mini_batch_size", "eval_prompts"):
            check_at_least(self, name, 1)
        check_at_least(self, "num_responses", 2)
        if self.prompts_per_iteration is not None:
            check_at_least(self, "prompts_per_iteration", 1)
        if self.responder not in ("last", "initial") and not Path(self.responder).is_dir():
            raise ValueError(f"--responder {self.responder} must be last, initial or an existing directory")
        if self.reference == "moving" and self.ref_model:
            raise ValueError(f"--ref_model {self.ref_model} is fixed, so --reference must be initial")
        if self.length_penalty and self.choose_type != "max_min_p":
            raise ValueError(f"--length_penalty {self.length_penalty} is read by --choose_type max_min_p only")


def train(args: OnlineDPOArgs) -> Path:
    """Online preference learning in iterations; returns the experiment dir."""
    check_data_dir(args)
    args.check_start()
    args.check_reward()
    shards = prompt_shards(args)
    held_out = load_prompts(args.data_dir, "validation")[: args.eval_prompts]
    directory, initial = open_directory(args, "online_dpo")
    policy = initial
    evaluate_iteration(args, directory / "iteration-00", initial, initial, held_out)
    for number, prompts in enumerate(shards, start=1):
        folder = directory / f"iteration-{number:02d}"
        if not (folder / "policy").is_dir():
            print(f"\niteration {number} of {args.iterations}", flush=True)
            respond(args, folder, prompts, number, {"last": policy, "initial": initial}.get(args.responder))
            score_and_choose(args, folder)
            learn(args, folder, number, policy, initial)
        policy = str(checkpoints(folder / "policy")[-1])
        link_checkpoint(directory, number, policy)
        evaluate_iteration(args, folder, policy, initial, held_out)
        report(args, directory)
    print(f"finished: {directory}")
    return directory


# ----------------------------------------------------------------------------------------------------------- stages
def prompt_shards(args: OnlineDPOArgs) -> list[list[Row]]:
    """The prompts of each iteration: parts of one seeded order, none used twice. Raises: UsageError when too few."""
    rows = load_prompts(args.data_dir, "train")
    size = args.prompts_per_iteration or len(rows) // args.iterations
    if not size or size * args.iterations > len(rows):
        raise UsageError(
            f"--iterations {args.iterations} of --prompts_per_iteration {max(size, 1)} need "
            f"{max(size, 1) * args.iterations} prompts, but {args.data_dir} has {len(rows)}; "
            f"try --prompts_per_iteration {max(len(rows) // args.iterations, 1)}"
        )
    order = epoch_order(len(rows), args.seed, 0)
    return [[rows[i] for i in order[t * size : (t + 1) * size]] for t in range(args.iterations)]


def respond(args: OnlineDPOArgs, folder: Path, prompts: Sequence[Row], number: int, responder: str | None) -> None:
    """Write `prompts.jsonl` and `responses.jsonl`; `responder` None is the model of `--responder`."""
    model = responder or resolve(args.responder, "--responder")
    tokenizer = load_tokenizer(args.data_dir, model)
    rows = []
    for row in prompts:
        ids = torch.as_tensor(row["input_ids"]).tolist()
        rows.append({**row["columns"], "prompt": decode(tokenizer, ids), "prompt_ids": ids})
    write_jsonl(folder / "prompts.jsonl", rows)
    run_stage(
        "generate",
        args,
        {
            **values_of(args, GenerationArgs),
            "model_name": model,
            "trust_remote_code": args.trust_remote_code,
            "prompts_file": folder / "prompts.jsonl",
            "num_prompts": len(rows),
            "num_generations": args.num_responses,
            "output_file": folder / "responses.jsonl",
            "rollout_mini_batch_size": args.rollout_mini_batch_size,
            "seed": args.seed * 1000 + number,
            "accelerator": args.accelerator,
            "devices": args.devices,
        },
    )


def score_and_choose(args: OnlineDPOArgs, folder: Path) -> None:
    """Write `rewards.jsonl`, and the pairs into `pairs/`."""
    names = ("rm_experiment_dir", "rm_chat_template", "reward_function", "trust_remote_code", "choose_type")
    names += ("length_penalty", "data_dir", "seed", "accelerator")
    run_stage(
        "annotate",
        args,
        {
            **{name: getattr(args, name) for name in names},
            "responses_file": folder / "responses.jsonl",
            "output_file": folder / "rewards.jsonl",
            "output_dir": folder / "pairs",
            "rollout_mini_batch_size": args.rollout_mini_batch_size,
        },
    )


def learn(args: OnlineDPOArgs, folder: Path, number: int, policy: str, initial: str) -> None:
    """Train from `policy` on what was chosen; the run is `training/…` until it is done, then `policy/`."""
    resume = run_begun(folder)
    shared = {
        "data_dir": folder / "pairs",
        "log_dir": folder,
        "experiment_name": "training",
        "seed": args.seed * 1000 + number,
        "resume_from": resume,
        "push_to_hub": None,
    }
    if args.training_step == "raft":
        write_best(args, folder)
        run_stage(
            "sft",
            args,
            {**values_of(args, sft.SFTArgs), "eval_interval": 0, **shared, "model_name": policy, "use_targets": True},
        )
    else:
        fixed = args.ref_model or initial
        models = {"sft_experiment_dir": policy, "model_name": None}
        models["ref_model"] = fixed if args.reference == "initial" else None
        run_stage("dpo", args, {**values_of(args, dpo.DPOArgs), "eval_interval": 0, **shared, **models})
    keep_policy(folder)


def write_best(args: OnlineDPOArgs, folder: Path) -> None:
    """The best response of each prompt as demonstrations, `pairs/finetune_train.pt`."""
    encoding = Encoding(load_tokenizer(args.data_dir))
    rows = []
    for row in read_jsonl(folder / "rewards.jsonl"):
        valid = [k for k, reward in enumerate(row["rewards"]) if reward is not None]
        if not valid:
            continue
        best = max(valid, key=lambda k: row["rewards"][k])
        prompt, response = encoding.prompt_and_response(annotate.samples_of(row)[best])
        targets = torch.tensor([IGNORE_INDEX] * len(prompt) + response)
        rows.append({"prompt_len": len(prompt), "input_ids": [*prompt, *response], "targets": targets})
    save_split(folder / "pairs", "finetune", "train", rows)


def run_stage(name: str, args: OnlineDPOArgs, values: dict[str, Any]) -> None:
    """Run a program with these flags: in this process, or with several devices in processes of its own."""
    flags: list[str] = []
    for flag, value in values.items():
        if value is not None and value != []:
            flags += [f"--{flag}", json.dumps([str(item) for item in value]) if isinstance(value, list) else str(value)]
    if args.devices == 1 and args.num_nodes == 1:
        STAGES[name].main(flags)
        return
    done = subprocess.run([sys.executable, "-m", STAGES[name].__name__, *flags])
    if done.returncode:
        sys.exit(done.returncode)


def values_of(args: OnlineDPOArgs, args_class: type) -> dict[str, Any]:
    """The values of those arguments that another program has, too."""
    names = {field.name for field in dataclasses.fields(args_class)}
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.name in names}


# ------------------------------------------------------------------------------------------------------- evaluation
def evaluate_iteration(args: OnlineDPOArgs, folder: Path, policy: str, initial: str, rows: Sequence[Row]) -> None:
    """Write `evaluation.json` and a record a prompt to `evaluation.jsonl`, unless they are there.

    Responses are scored beside those of the initial policy to the same prompts, by the training's own scorer and by the
    judge of the data where it has one; all policies answer with the same sampling noise.
    """
    if (folder / "evaluation.json").is_file():
        return
    device = find_device(args.accelerator)
    tokenizer = load_tokenizer(args.data_dir, policy)
    models = ModelArgs(trust_remote_code=args.trust_remote_code)
    current, start = (load_policy(name, models, tokenizer).eval().to(device) for name in (policy, initial))
    check_vocabulary(list(rows), vocabulary_size(current), args.data_dir)
    noise = torch.rand(len(rows), args.max_new_tokens, generator=torch.Generator().manual_seed(args.seed))
    rollout = generate_rollout(current, start, rows, args, tokenizer, noise, args.rollout_mini_batch_size)
    kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1).tolist()  # (B,) nats a response
    truncated = rollout.truncated.tolist()
    records = [
        {
            **columns,
            "prompt": decode(tokenizer, prompt),
            "response": decode(tokenizer, response),
            "truncated": truncated[i],
            "kl": kl[i],
            "prompt_ids": prompt,
            "response_ids": response,
        }
        for i, (columns, prompt, response) in enumerate(
            zip(rollout.columns, rollout.prompt_ids(), rollout.response_ids())
        )
    ]
    first = folder.parent / "iteration-00" / "evaluation.jsonl"
    before = read_jsonl(first) if first.is_file() and folder.name != "iteration-00" else records
    add_scores(args, records, before)
    write_jsonl(folder / "evaluation.jsonl", records)
    write_text(folder / "evaluation.json", json.dumps(summary(records, before), indent=1))


def add_scores(args: OnlineDPOArgs, records: list[Row], before: list[Row]) -> None:
    """Put `reward`, and with a judge `gold`, into the records."""
    scorer = make_scorer(args, find_device(args.accelerator), args.rollout_mini_batch_size)
    groups = [[as_sample(record), as_sample(other)] for record, other in zip(records, before)]
    for record, rewards in zip(records, scorer(groups)):
        record["reward"] = rewards[0]
    judge = judge_of(args.data_dir)
    if judge:
        texts = ([record[key] for record in records] for key in ("prompt", "response"))
        for record, gold in zip(records, load_function(judge, "the judge of the data")(*texts)):
            record["gold"] = gold["score"]


def as_sample(record: Row) -> Sample:
    own = ("prompt", "response", "truncated", "kl", "prompt_ids", "response_ids", "reward", "gold")
    columns = {name: value for name, value in record.items() if name not in own}
    names = ("prompt", "response", "truncated", "prompt_ids", "response_ids")
    return Sample(*(record[name] for name in names), columns)


def judge_of(data_dir: str) -> str | None:
    path = Path(data_dir) / "args.json"
    return json.loads(path.read_text(encoding="utf-8")).get("judge") if path.is_file() else None


def summary(records: list[Row], before: list[Row]) -> dict[str, float]:
    """Means over prompts; win rates are against the initial policy's responses, ties split."""
    results = {"kl": mean(record["kl"] for record in records)}
    for name, rate in (("reward", "win_rate"), ("gold", "gold_win_rate")):
        pairs = [
            (one[name], other[name])
            for one, other in zip(records, before)
            if one.get(name) is not None and other.get(name) is not None
        ]
        if pairs:
            results[name] = mean(one for one, _ in pairs)
            results[rate] = mean((one > other) + 0.5 * (one == other) for one, other in pairs)
    results["mean_length"] = mean(len(record["response_ids"]) for record in records)
    results["truncated_ratio"] = mean(record["truncated"] for record in records)
    return results


# ------------------------------------------------------------------------------------------------------------ files
def results_of(directory: Path) -> list[dict[str, float]]:
    """One row per evaluated iteration, with its pairs, reward queries and both summed up."""
    rows: list[dict[str, float]] = []
    pairs = queries = 0
    for folder in sorted(directory.glob("iteration-*")):
        if not (folder / "evaluation.json").is_file():
            continue
        row = {"iteration": int(folder.name.partition("-")[2])}
        if (folder / "pairs" / "report.json").is_file():
            report = json.loads((folder / "pairs" / "report.json").read_text(encoding="utf-8"))
            pairs += report["counts"]["pairs"]
            queries += sum(len(line["rewards"]) for line in read_jsonl(folder / "rewards.jsonl"))
        row |= json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        rows.append(row | {"pairs": pairs, "reward_queries": queries})
    return rows


def report(args: OnlineDPOArgs, directory: Path) -> None:
    """Write `results.json`, `metrics.jsonl` and the picture, and print the table."""
    rows = results_of(directory)
    write_text(directory / "results.json", json.dumps(rows, indent=1))
    names = {"reward": "val/score", "gold": "val/gold", "kl": "objective/kl", "mean_length": "completions/mean_length"}
    names |= {"truncated_ratio": "completions/truncated_ratio", "win_rate": "val/win_rate"}
    logged = [{"step": row["iteration"], **{names[k]: v for k, v in row.items() if k in names}} for row in rows]
    write_jsonl(directory / "metrics.jsonl", logged)
    if len(rows) <= args.iterations:
        return
    draw(rows, directory / "curves.png")
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.experiment_name}, on held-out prompts")
    for name in rows[-1]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        cells = (row.get(name, "") for name in rows[-1])
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)


def draw(rows: list[dict[str, float]], output: Path) -> None:
    """Reward, KL and length by iteration, and reward by KL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [name for name in ("reward", "gold") if name in rows[-1]]
    panels = [("iteration", shown), ("iteration", ["kl"]), ("iteration", ["mean_length"]), ("kl", shown)]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2))
    for axis, (across, names) in zip(axes, panels):
        for name in names:
            points = [(row[across], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points), "o-", ms=3, label=name.replace("_", " "))
        axis.set_xlabel("KL to the initial policy, nats" if across == "kl" else across, fontsize=8)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(OnlineDPOArgs, argv)))


if __name__ == "__main__":
    main()
