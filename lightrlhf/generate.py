"""Sample responses to prompts into JSONL, the input of annotation, judging and online preference learning.

One row per prompt: `prompt`, the data's other columns, `responses` (K of them), which of them were `truncated`, and the
ids of both as they were read and sampled. With a reward model also `rewards`, and the best response of the K with its
reward as `response` and `reward`: best of n. The noise of a row depends on the seed and the row's number alone, so an
interrupted or sharded run gives the same responses.

Prompts come from `--data_dir` or a JSONL file, responses from the local engine, from rollout servers, which get the
model's weights and exchange ids, or from OpenAI-compatible servers, which exchange text.

`--env`, `--tools` or `--mcp` call `lightrlhf.generate_episodes` (episodes of several turns) with the other flags.

Left out: beam search, and rewards other than by a reward model (`lightrlhf.annotate` has them).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from lightrlhf import generate_episodes
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag
from lightrlhf.cli.groups import DeviceArgs, DryRunArgs, ServerArgs, names_episodes
from lightrlhf.cli.groups.rewards import check_reward_model
from lightrlhf.cli.hub import PACKAGE
from lightrlhf.cli.parser import parse
from lightrlhf.data import prompts, responses
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation import engines, openai_client
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards import encoding, loading, scorers
from lightrlhf.storage import destinations, jsonl, results, shards
from lightrlhf.storage.jsonl import Row
from lightrlhf.training import distributed

# flags that leave rows as they are
NO_EFFECT = {"output_dir", "output_file", "accelerator", "devices", "temperatures", "verify", "dry_run"}
NO_EFFECT |= {one.name for kind in (openai_client.RemoteArgs, ServerArgs) for one in dataclasses.fields(kind)}
CHUNKS = 8  # batches of the engine between two writes: enough to fill its slots, few enough to lose little
LONGEST_WAIT = timedelta(days=30)  # of a rank that is done for the slowest one


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(prompts.PromptArgs, engines.EngineArgs, DryRunArgs):
    """Sample responses to prompts and write them as JSONL (see also generate_episodes)."""

    temperatures: list[float] | None = at_least(0, None)
    """Several temperatures instead of `temperature`, one output file each; 0 is greedy."""
    rm_experiment_dir: str | None = flag(None, check=check_reward_model)
    """Reward model that scores the responses; the best of each prompt becomes `response`."""
    ref_scores: bool = flag(False, needs={"rm_experiment_dir": ..., "data_dir": ...})
    """Also score the data's own answers: `ref_response, ref_reward`, and `rejected_*` for pairs."""
    output_dir: str = "results"
    """Root folder of the results, `{output_dir}/{data}/temperature={t}/{model}.jsonl`."""
    output_file: str | None = flag(None, check=destinations.check_output)
    """Output file, instead of one below `output_dir`."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one)."""
    devices: int = at_least(1, 1, excludes={"rollout_server": ...})
    """Number of processes on this machine, one device each, that share the prompts."""

    def _check(self) -> None:
        if not self.output_file:
            destinations.check_output(Path(self.output_dir) / "any", "--output_dir")
        elif len(self.temperatures or []) > 1:
            raise ValueError(f"--output_file {self.output_file} cannot hold several --temperatures; use --output_dir")
        greedy = not self.do_sample or 0 in (self.temperatures or [])
        if greedy and self.num_generations > 1:
            raise ValueError(f"--num_generations {self.num_generations}: greedy responses are identical; use 1")


def run(args: GenerateArgs) -> list[str]:
    """Sample responses; returns the files, one per temperature, none in a dry run."""
    check_args(args, GenerateArgs)
    shard, device, barrier = start_ranks(args)
    if args.rollout_server and shard.world_size > 1:
        raise UsageError(
            f"--rollout_server {args.rollout_server[0]}: only one process may query servers, not "
            f"{shard.world_size}; start it without torchrun"
        )
    rows = prompts.load_prompt_rows(args, args.ref_scores)
    models = None
    files = []
    try:
        for one in at_each_temperature(args):
            output = output_path(one)
            if args.dry_run:
                models = load_models(one, device)
                tried = models.engine.prepare(one, rows[: max(1, one.rollout_mini_batch_size // one.num_generations)])
                results.try_first(partial(answer, one, models), tried, len(rows), "prompts", output, shard)
                return []
            settings = settings_of(one, rows)
            if not shards.is_complete(output, settings, len(rows)):
                models = models or load_models(one, device)
                write_shard(one, models, rows, output, settings, shard)
            barrier()
            if shard.rank == 0:
                print(f"{output}: {describe(output, len(rows))}")
            files.append(str(output))
    finally:
        if models:
            models.engine.close()
    return files


def start_ranks(args: GenerateArgs) -> tuple[shards.Shard, torch.device, Callable[[], None]]:
    """This rank's shard, its device and a barrier; ranks are started by `--devices`, torchrun or SLURM."""
    given = DeviceArgs(accelerator=args.accelerator, devices=args.devices)
    device, (devices, num_nodes) = distributed.training_device(given), distributed.processes(given)
    if devices * num_nodes == 1:
        return shards.WHOLE, device, lambda: None
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(timeout=LONGEST_WAIT)
    fabric = Fabric(accelerator=device.type, devices=devices, num_nodes=num_nodes, strategy=strategy)
    fabric.launch()
    distributed.leave_at_exit()
    return shards.Shard(fabric.global_rank, fabric.world_size), fabric.device, fabric.barrier


def at_each_temperature(args: GenerateArgs) -> Iterator[GenerateArgs]:
    """The arguments with one temperature each."""
    for value in args.temperatures or [args.temperature if args.do_sample else 0.0]:
        greedy = value == 0
        yield dataclasses.replace(
            args, temperature=1.0 if greedy else value, do_sample=not greedy, temperatures=[value]
        )


# -------------------------------------------------------------------------------------------------------- responses
class Models(NamedTuple):
    """The sampler and the scorer."""

    engine: engines.Local | engines.Remote
    tokenizer: Tokenizer | None  # None where servers take and give texts alone
    scorer: scorers.GroupScorer | None


def load_models(args: GenerateArgs, device: torch.device) -> Models:
    """Load what the flags name. Raises: UsageError."""
    own = args.model_name if args.rollout_engine == "local" else args.rm_experiment_dir
    tokenizer = load_tokenizer(args.data_dir, own, verify=args.verify) if args.data_dir or own else None
    engine, scorer = engines.make_engine(args, tokenizer, device), None
    if name := args.rm_experiment_dir:
        size, trust = args.rollout_mini_batch_size, args.trust_remote_code
        scorer = loading.load_scorer(name, device, size, "--rm_experiment_dir", trust)
    return Models(engine, tokenizer, scorer)


def answer(args: GenerateArgs, models: Models, rows: Sequence[Row]) -> Iterable[Row]:
    """The prepared rows with their responses, and rewards if there is a reward model, as they are written."""
    answered: Iterable[Row] = models.engine.respond(args, rows)
    if models.scorer is not None:
        answered = score_rows(args, list(answered), models.scorer, models.tokenizer)
    return map(in_order, answered)


def score_rows(
    args: GenerateArgs, rows: Sequence[Row], scorer: scorers.GroupScorer, tokenizer: Tokenizer | None
) -> list[Row]:
    """The rows with `rewards` and the best response; with `--ref_scores` also the rewards of the data's answers."""
    rows = [{**row, **best_of(row)} for row in scorers.with_rewards(rows, scorer)]
    for name in ("ref", "rejected") if args.ref_scores else ():
        own = [row for row in rows if f"{name}_ids" in row]
        assert tokenizer is not None
        texts = [decode(tokenizer, row[f"{name}_ids"]) for row in own]
        answers = [
            [encoding.Sample(row["prompt"], text, False, row["prompt_ids"], row[f"{name}_ids"])]
            for row, text in zip(own, texts)
        ]
        for row, text, values in zip(own, texts, scorer(answers)):
            row |= {f"{name}_response": text, f"{name}_reward": values[0]}
            del row[f"{name}_ids"]
    return rows


def best_of(row: Row) -> Row:
    """The response with the highest reward, and that reward."""
    valid = [(reward, -k) for k, reward in enumerate(row["rewards"]) if reward is not None]
    reward, k = max(valid, default=(None, 0))
    return {"response": row["responses"][-k], "reward": reward}


# ------------------------------------------------------------------------------------------------------------ files
def output_path(args: GenerateArgs) -> Path:
    """`{output_dir}/{data}/temperature={t}/{model}.jsonl`, or `--output_file`."""
    if args.output_file:
        return Path(args.output_file)
    if args.data_dir:
        data = Path(args.data_dir).resolve()
        name = f"{data.parent.name}-{data.name}"
    else:
        name = Path(args.prompts_file or "").name.partition(".")[0]
    model = Path(args.model_name.removeprefix(PACKAGE).rstrip("/"))  # a file with a colon has no name on Windows
    parts = model.resolve().parts if model.is_dir() else model.parts
    is_run = (model / "args.json").is_file() and len(parts) > 4  # {experiment}/{data}/{data}/{time}
    label = f"{parts[-4]}_{parts[-1]}" if is_run else "_".join(parts[-2:])
    (temperature,) = args.temperatures or [args.temperature]
    return Path(args.output_dir) / name / f"temperature={temperature:g}" / f"{label.strip('/')}.jsonl"


def settings_of(args: GenerateArgs, rows: Sequence[Row]) -> Row:
    """Settings that determine a file's rows, stored to detect files made with different ones."""
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in NO_EFFECT}
    if args.rollout_server:
        settings["rollout_engine"] = "rollout_server"  # whose arithmetic differs from the local engine's
    if args.rollout_engine == "local":
        settings["model_name"] = resolve(args.model_name)  # an experiment dir may have a newer checkpoint next time
    if args.rm_experiment_dir:
        settings["rm_experiment_dir"] = resolve(args.rm_experiment_dir, "--rm_experiment_dir")
    return {**settings, "num_rows": len(rows), "prompts_sha256": prompts.digest(rows)}


def write_shard(
    args: GenerateArgs, models: Models, rows: Sequence[Row], output: Path, settings: Row, shard: shards.Shard
) -> None:
    """Write this rank's shard, resuming after its complete rows, and merge all shards when they are complete."""
    chunk = max(1, CHUNKS * args.rollout_mini_batch_size // args.num_generations)
    label, is_local = "generate" if shard.rank == 0 else "", args.rollout_engine == "local"
    own = models.engine.prepare(args, shard.of(rows))  # before the progress bar, which an error would tear
    with jsonl.JsonlWriter(shard.path(output), settings) as writer:
        writer.extend(own, chunk, partial(answer, args, models), label, whole_chunks=is_local)
    shards.merge(output, settings, shard, len(rows))


def in_order(row: Row) -> Row:
    """The row with its columns in the order of `ROW`, then the data's."""
    first = {name: row[name] for name in responses.ROW if name in row}
    return {**first, **{name: value for name, value in row.items() if name not in first}}


def describe(output: Path, num_rows: int) -> str:
    """A line on the contents of a file."""
    if not output.is_file():
        return "other parts are not complete yet"
    rows = responses.read_responses(output, ("responses", "truncated"), ("errors", "reward"))
    texts = truncated = failed = same = scored = 0
    total = 0.0
    for row in rows:
        texts, truncated = texts + len(row["responses"]), truncated + sum(row["truncated"])
        failed += len(row.get("errors", []))
        same += len(row["responses"]) > 1 and len(set(row["responses"])) == 1
        if row.get("reward") is not None:
            scored, total = scored + 1, total + row["reward"]
    text = f"{len(rows):,} of {num_rows:,} prompts, {texts:,} responses, {truncated:,} of them truncated"
    if failed:
        text += f", {failed:,} refused by the server"
    if scored:
        text += f", mean reward of the best {total / scored:.3f}"
    if same:
        text += f"; {same:,} prompts with {len(rows[0]['responses'])} equal responses"
    return text


def program_for(words: list[str]) -> tuple[Callable[[list[str]], str] | None, list[str]]:
    """`main` of the program that plays episodes where words name an environment or tools, else None; and the words."""
    return generate_episodes.main if names_episodes(words) else None, words


@one_line_errors
def main(argv: list[str] | None = None) -> list[str]:
    """Run the program; returns the files, one per temperature, or the folder of episodes."""
    program, words = program_for(sys.argv[1:] if argv is None else argv)
    return [program(words)] if program else run(parse(GenerateArgs, words))


if __name__ == "__main__":
    main()
