"""Sample responses to prompts into JSONL, the input of annotation, judging and online preference learning.

One row per prompt: `prompt`, the data's other columns, `responses` (K of them), which of them were `truncated`, and the
ids of both as they were read and sampled. With a reward model also `rewards`, and the best response of the K with its
reward as `response` and `reward`: best of n. The noise of a row depends on the seed and the row's number alone, so an
interrupted or sharded run gives the same responses.

Prompts come from `--data_dir` or a JSONL file, responses from the local engine, from rollout servers, which get the
model's weights and exchange ids, or from OpenAI-compatible servers, which exchange text. Left out: beam search, and
rewards other than by a reward model (`lightrlhf.annotate` has them).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag, random_seed
from lightrlhf.cli.groups import DecodingArgs, DeviceArgs, DryRunArgs, FrozenArgs, SealArgs, ServerArgs
from lightrlhf.cli.groups.rewards import check_reward_model
from lightrlhf.cli.hub import PACKAGE
from lightrlhf.cli.parser import parse
from lightrlhf.cli.paths import check_file
from lightrlhf.data.batch import seeded_noise
from lightrlhf.data.responses import ROW, check_responses, is_prompt, read_responses
from lightrlhf.data.splits import Row, check_data_folder, check_vocabulary, first_answer, load_split
from lightrlhf.data.tokens import adds_bos, decode, encode_prompt, spelled_control
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.generation.samplers import Sampler, ServedSampler, local_sampler
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.names import resolve
from lightrlhf.models.probes import check_room
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.rewards.scorers import GroupScorer, score_rows
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.jsonl import JsonlWriter, check_settings, read_jsonl, seal_rows, write_jsonl
from lightrlhf.storage.results import show_trial
from lightrlhf.training.distributed import leave_at_exit, processes, training_device

# flags that leave rows as they are
NO_EFFECT = {"output_dir", "output_file", "accelerator", "devices", "temperatures", "verify", "dry_run"}
NO_EFFECT |= {one.name for kind in (RemoteArgs, ServerArgs) for one in dataclasses.fields(kind)}
CHUNKS = 8  # batches of the engine between two writes: enough to fill its slots, few enough to lose little
LONGEST_WAIT = timedelta(days=30)  # of a rank that is done for the slowest one


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(DecodingArgs, RemoteArgs, ServerArgs, SealArgs, DryRunArgs):
    """Sample responses to prompts and write them as JSONL."""

    precision: ClassVar[str] = "32-true"  # of the model here, which servers are compared with

    model_name: str
    """Experiment dir, checkpoint, folder or hub name of the model; the model's name at the server for `openai`."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Let a model run the code of its own repository."""
    data_dir: str | None = flag(None, check=check_data_folder, required="prompts", show="first")
    """Folder of the `.pt` splits with the prompts."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of `data_dir`."""
    prompts_from: Literal["prompts", "finetune", "preference"] | None = flag(None, needs="data_dir", show="rarely")
    """Whose prompts of `data_dir`: by default those of `prompts_*.pt` where there are some, else of `finetune_*.pt`."""
    prompts_file: str | None = flag(None, check=check_file, required="prompts", show="first")
    """JSONL file with a column `prompt` (text or messages), instead of `data_dir`; other columns are kept."""
    num_prompts: int | None = at_least(1, 2000)
    """Largest number of prompts, a random subset in the order of the data; `null` takes all."""
    subset_seed: int = random_seed(1234, show="rarely")
    """Seed of that subset."""
    num_generations: int = at_least(1, 1)
    """Responses per prompt (K)."""
    temperatures: list[float] | None = at_least(0, None)
    """Several temperatures instead of `temperature`, one file each; 0 is greedy."""
    rm_experiment_dir: str | None = flag(None, check=check_reward_model)
    """Reward model that scores the responses; the best of each prompt becomes `response`."""
    ref_scores: bool = flag(False, needs={"rm_experiment_dir": ..., "data_dir": ...})
    """Also score the answers that the data has to these prompts: `ref_response, ref_reward`, of pairs `rejected_*`."""
    output_dir: str = "results"
    """Root of the results: `{output_dir}/{data}/temperature={t}/{model}.jsonl`."""
    output_file: str | None = flag(None, check=check_output)
    """File to write instead."""
    rollout_engine: Literal["local", "openai"] = flag("local", needs="base_url", excludes={"rollout_server": ...})
    """Sample by ids in this process, or at `rollout_server` if there is one; or texts at the servers of `base_url`."""
    rollout_mini_batch_size: int = at_least(1, 64)
    """Slots of the generation engine, and the largest number of rows per pass of the reward model."""
    seed: int = random_seed(42)
    """Seed of the sampling noise."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one)."""
    devices: int = at_least(1, 1, excludes={"rollout_server": ...})
    """Processes on this machine, one device each, that share the prompts."""

    def _check(self) -> None:
        if (self.data_dir is None) == (self.prompts_file is None):
            raise ValueError("--data_dir or --prompts_file is required, and not both: the source of the prompts")
        if self.rollout_engine == "openai" and self.eos_ids:
            raise ValueError(f"--eos_ids {self.eos_ids[0]}: servers stop at texts, not at ids; use --stop_strings")
        if self.rollout_engine == "local" and self.base_url:
            raise ValueError(f"--base_url {self.base_url[0]} needs --rollout_engine openai")
        if not self.output_file:
            check_output(Path(self.output_dir) / "any", "--output_dir")
        elif len(self.temperatures or []) > 1:
            raise ValueError(f"--output_file {self.output_file} cannot hold several --temperatures; use --output_dir")
        greedy = not self.do_sample or 0 in (self.temperatures or [])
        if greedy and self.num_generations > 1:
            raise ValueError(f"--num_generations {self.num_generations}: greedy responses are all the same; use 1")


class Shard(NamedTuple):
    """The share of the prompts of one rank."""

    rank: int
    world_size: int

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        """A contiguous part of the rows, of a size as even as possible."""
        start, end = (len(rows) * i // self.world_size for i in (self.rank, self.rank + 1))
        return rows[start:end]


def run(args: GenerateArgs) -> list[str]:
    """Sample responses; returns the files, one per temperature, none in a dry run."""
    check_args(args, GenerateArgs)
    shard, device, barrier = start_ranks(args)
    if args.rollout_server and shard.world_size > 1:
        raise UsageError(
            f"--rollout_server {args.rollout_server[0]}: one process asks all servers, here are {shard.world_size}; "
            "start it without torchrun"
        )
    prompts = load_prompt_rows(args)
    engine = None
    files = []
    try:
        for one in at_each_temperature(args):
            output = output_path(one)
            settings = settings_of(one, prompts)
            if args.dry_run:
                engine = make_engine(one, device)
                try_first(one, engine, prompts, output, shard)
                return []
            if not complete(output, settings, len(prompts)):
                engine = engine or make_engine(one, device)
                write_shard(one, engine, prompts, output, settings, shard)
            barrier()
            if shard.rank == 0:
                print(f"{output}: {describe(output, len(prompts))}")
            files.append(str(output))
    finally:
        if isinstance(engine, Served):
            engine.close()
    return files


def start_ranks(args: GenerateArgs) -> tuple[Shard, torch.device, Callable[[], None]]:
    """This rank's shard, its device and a barrier; ranks are started by `--devices`, torchrun or SLURM."""
    given = DeviceArgs(accelerator=args.accelerator, devices=args.devices)
    device, (devices, num_nodes) = training_device(given), processes(given)
    if devices * num_nodes == 1:
        return Shard(0, 1), device, lambda: None
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(timeout=LONGEST_WAIT)
    fabric = Fabric(accelerator=device.type, devices=devices, num_nodes=num_nodes, strategy=strategy)
    fabric.launch()
    leave_at_exit()
    return Shard(fabric.global_rank, fabric.world_size), fabric.device, fabric.barrier


def at_each_temperature(args: GenerateArgs) -> Iterator[GenerateArgs]:
    """The arguments with one temperature each."""
    for value in args.temperatures or [args.temperature if args.do_sample else 0.0]:
        greedy = value == 0
        yield dataclasses.replace(
            args, temperature=1.0 if greedy else value, do_sample=not greedy, temperatures=[value]
        )


# ---------------------------------------------------------------------------------------------------------- prompts
def load_prompt_rows(args: GenerateArgs) -> list[Row]:
    """Rows with `prompt` or `prompt_ids` and the data's other columns, in the order of the data.

    Raises: UsageError naming file and row when a prompt is neither text nor messages; when answers are to be scored
    and the data has none to these prompts.
    """
    if args.data_dir is None:
        file = args.prompts_file or ""
        rows = [{**row, "prompt": prompt_of(row, f"{file}: row {n}")} for n, row in enumerate(read_jsonl(file), 1)]
        check_responses(rows, file, (), ("prompt_ids",))
        if not rows:
            raise UsageError(f"--prompts_file {file} has no rows")
    else:
        rows = prompts_of_data(args, args.data_dir)
    chosen = subset(len(rows), args.num_prompts, args.subset_seed)
    return [{**rows[i], "index": number} for number, i in enumerate(chosen)]


def prompt_of(row: Row, where: str) -> str | list[dict[str, str]]:
    """The prompt of a row, in the column `prompt`, `context_messages` or `messages`. Raises: UsageError."""
    prompt = next((row[name] for name in ("prompt", "context_messages", "messages") if name in row), None)
    if isinstance(prompt, list) and is_prompt(prompt):
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt  # an answered dialogue
        if prompt:
            return prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    raise UsageError(f"{where} has no prompt; a column `prompt` with a text or a list of {{role, content}} is required")


def ids_of_prompt(tokenizer: Any, row: Row) -> list[int]:
    """Token ids of a prompt. Raises: UsageError for one that is rendered already, or that the template refuses."""
    prompt, where = row["prompt"], f"prompt {row['index'] + 1} of --prompts_file"
    if isinstance(prompt, str) and (found := spelled_control(tokenizer, prompt)):
        raise UsageError(f"{where} spells the control token {found}; give messages, which are rendered here")
    try:
        return encode_prompt(tokenizer, prompt, row.get("tools"))
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None


def prompts_of_data(args: GenerateArgs, data_dir: str) -> list[Row]:
    """The prompts of `--prompts_from`, with `--ref_scores` also the data's answers to them."""
    path = Path(data_dir) / f"prompts_{args.split}.pt"
    source = args.prompts_from or ("prompts" if path.is_file() else "finetune")
    if source != "prompts":
        return answered(data_dir, source, args.split, args.ref_scores, args.verify)
    if args.ref_scores:
        raise UsageError(
            f"--ref_scores True: the prompts of {path} have no answers; add --prompts_from preference or finetune"
        )
    return [
        {**row.get("columns", {}), "prompt_ids": torch.as_tensor(row["input_ids"]).tolist()}
        for row in load_split(data_dir, "prompts", args.split, args.verify)
    ]


def answered(data_dir: str, stage: str, split: str, with_answers: bool, verify: bool = True) -> list[Row]:
    """The prompts of preference pairs or of demonstrations, with or without their answers."""
    sides = {"ref": "input_ids"}
    if stage == "preference":
        sides = {"ref": "chosen_input_ids", "rejected": "rejected_input_ids"}
    results = []
    for row in load_split(data_dir, stage, split, verify):
        start = row["prompt_len"]
        ids = {name: torch.as_tensor(row[key]).tolist() for name, key in sides.items()}
        end = first_answer(row)  # of a dialogue, whose prompt is that of its first turn
        answers = {f"{name}_ids": example[start:end] for name, example in ids.items() if with_answers}
        results.append({**row.get("columns", {}), "prompt_ids": ids["ref"][:start], **answers})
    return results


def subset(count: int, size: int | None, seed: int) -> list[int]:
    """Sorted indices of a random subset; all when there are not more than `size`."""
    if size is None or count <= size:
        return list(range(count))
    return sorted(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist())


# ---------------------------------------------------------------------------------------------------------- engines
class Local:
    """The generation engine of this process."""

    def __init__(self, args: GenerateArgs, device: torch.device) -> None:
        self.tokenizer = load_tokenizer(args.data_dir, args.model_name, verify=args.verify)
        models = FrozenArgs(trust_remote_code=args.trust_remote_code)
        self.policy: Policy = load_policy(args.model_name, models, self.tokenizer).eval().to(device)
        self.scorer = reward_model(args, device)

    def prepared(self, args: GenerateArgs, rows: Sequence[Row]) -> list[Row]:
        """The rows with `prompt_ids`. Raises: UsageError when one exceeds the model's vocabulary or its positions."""
        prompts = [row.get("prompt_ids") or ids_of_prompt(self.tokenizer, row) for row in rows]
        if prompts:
            check_vocabulary([{"input_ids": ids} for ids in prompts], vocabulary_size(self.policy), "the prompts")
            check_room(self.policy.model, prompts, args)
        return [{**row, "prompt_ids": ids} for row, ids in zip(rows, prompts)]

    def respond(self, args: GenerateArgs, rows: Sequence[Row]) -> Iterator[Row]:
        """The prepared rows with their responses, in order."""
        yield from respond(self.sampler(args), self.tokenizer, args, rows)

    def sampler(self, args: GenerateArgs) -> Sampler:
        return local_sampler(self.policy, self.tokenizer, args, args.rollout_mini_batch_size)


class Served(Local):
    """Rollout servers, which are given the weights of the model of this process."""

    def __init__(self, args: GenerateArgs, device: torch.device) -> None:
        super().__init__(args, device)
        self.served = ServedSampler(args, self.policy, self.tokenizer)

    def sampler(self, args: GenerateArgs) -> Sampler:
        return self.served.use(args)

    def close(self) -> None:
        """End what is under way, and remove the exchange folder."""
        self.served.close()


class Remote:
    """OpenAI-compatible servers."""

    def __init__(self, args: GenerateArgs, device: torch.device) -> None:
        needs_text = args.data_dir is not None or args.rm_experiment_dir is not None
        own = args.rm_experiment_dir
        self.tokenizer = load_tokenizer(args.data_dir, own, verify=args.verify) if needs_text else None
        self.scorer = reward_model(args, device)
        self.servers = Servers(args, args.model_name)
        self.servers.wait_until_healthy()

    def prepared(self, args: GenerateArgs, rows: Sequence[Row]) -> list[Row]:
        """The rows with their prompts as text, or messages."""
        return [with_text(row, self.tokenizer) for row in rows]

    def respond(self, args: GenerateArgs, rows: Sequence[Row]) -> Iterator[Row]:
        """The prepared rows with their responses, in order."""
        replies = self.servers.replies(request for row in rows for request in requests(row, args, self.tokenizer))
        for row in rows:
            own = [next(replies) for _ in range(args.num_generations)]
            texts = [reply.text if reply.error is None else None for reply in own]
            results: Row = {"responses": texts, "truncated": [reply.truncated for reply in own]}
            if errors := [reply.error for reply in own if reply.error]:
                results["errors"] = errors
            yield {**row, **results}


def make_engine(args: GenerateArgs, device: torch.device) -> Local | Remote:
    """The engine of `--rollout_engine`, or of `--rollout_server`."""
    if args.rollout_server:
        return Served(args, device)
    return (Local if args.rollout_engine == "local" else Remote)(args, device)


def respond(sample: Sampler, tokenizer: Any, args: GenerateArgs, rows: Sequence[Row]) -> list[Row]:
    """K responses to each row by ids; rows have `index` and `prompt_ids`."""
    k = args.num_generations
    prompts = [row["prompt_ids"] for row in rows for _ in range(k)]
    noise = torch.cat([noise_of(args, row["index"]) for row in rows])  # (N K, max_new_tokens)
    sampled = sample(prompts, noise)
    assert sampled is not None  # there are prompts
    results = []
    for i, row in enumerate(rows):
        ids, truncated = sampled.responses[i * k : (i + 1) * k], sampled.truncated[i * k : (i + 1) * k]
        texts = [decode(tokenizer, response) for response in ids]
        results.append({**with_text(row, tokenizer), "responses": texts, "truncated": truncated, "response_ids": ids})
    return results


def noise_of(args: GenerateArgs, index: int) -> Tensor:
    """(K, max_new_tokens) uniform numbers that depend on the seed and the row's number alone."""
    return seeded_noise((args.seed * 1_000_003 + index) % 2**63, args.num_generations, args.max_new_tokens)


def with_text(row: Row, tokenizer: Any) -> Row:
    """The row with its prompt as text, too."""
    return row if "prompt" in row else {**row, "prompt": decode(tokenizer, row["prompt_ids"])}


def requests(row: Row, args: GenerateArgs, tokenizer: Any) -> Iterator[Row]:
    """K requests for one prompt; text goes to plain completions, messages to chat completions."""
    if isinstance(row["prompt"], list):
        prompt = {"messages": row["prompt"]}
    elif "prompt_ids" in row:  # with its special tokens, except the BOS that the server adds
        ids = row["prompt_ids"]
        prompt = {"prompt": tokenizer.decode(ids[1:] if adds_bos(tokenizer) else ids)}
    else:
        prompt = {"prompt": row["prompt"]}
    options: Row = {"max_tokens": args.max_new_tokens, "temperature": args.temperature if args.do_sample else 0.0}
    defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # sent only when they differ
    options |= {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}
    if args.stop_strings:
        options["stop"] = args.stop_strings
    for k in range(args.num_generations):
        yield {**prompt, **options, "seed": (args.seed + row["index"] * args.num_generations + k) % 2**31}


# ---------------------------------------------------------------------------------------------------------- rewards
def reward_model(args: GenerateArgs, device: torch.device) -> GroupScorer | None:
    """The scorer of `--rm_experiment_dir`."""
    if args.rm_experiment_dir is None:
        return None
    return load_scorer(
        args.rm_experiment_dir,
        device,
        args.rollout_mini_batch_size,
        "--rm_experiment_dir",
        args.trust_remote_code,
    )


def scored(args: GenerateArgs, rows: Sequence[Row], scorer: GroupScorer, tokenizer: Any) -> list[Row]:
    """The rows with `rewards` and the best response; with `--ref_scores` also the rewards of the data's answers."""
    rows = [{**row, "rewards": values} for row, values in zip(rows, score_rows(scorer, rows))]
    rows = [{**row, **best_of(row)} for row in rows]
    for name in ("ref", "rejected") if args.ref_scores else ():
        own = [row for row in rows if f"{name}_ids" in row]
        texts = [decode(tokenizer, row[f"{name}_ids"]) for row in own]
        answers = [
            [Sample(row["prompt"], text, False, row["prompt_ids"], row[f"{name}_ids"])] for row, text in zip(own, texts)
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


def settings_of(args: GenerateArgs, prompts: Sequence[Row]) -> Row:
    """Settings that determine a file's rows; stored to detect files of other ones."""
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in NO_EFFECT}
    if args.rollout_server:
        settings["rollout_engine"] = "rollout_server"  # whose arithmetic is not that of the local engine
    if args.rollout_engine == "local":
        settings["model_name"] = resolve(args.model_name)  # an experiment dir may have a newer checkpoint next time
    content = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    return {**settings, "num_rows": len(prompts), "prompts_sha256": content}


def complete(output: Path, settings: Row, num_rows: int) -> bool:
    """Whether a file has all rows, which then are sealed. Raises: UsageError when its rows have other settings."""
    if not output.is_file() or not output.stat().st_size:
        return False
    check_settings(output, settings)
    if output.read_bytes().count(b"\n") != num_rows:
        return False
    seal_rows(output)
    return True


def write_shard(
    args: GenerateArgs, engine: Local | Remote, prompts: list[Row], output: Path, settings: Row, shard: Shard
) -> None:
    """Write this rank's shard, resuming after its complete rows, and merge all shards when they are complete.

    Until then a shard is `{output}.part-0-of-4.jsonl`; a single one is the output itself.
    """

    def work(rows: Sequence[Row]) -> Iterable[Row]:
        return answer(args, engine, rows)

    path = output if shard.world_size == 1 else shard_path(output, shard)
    chunk = max(1, CHUNKS * args.rollout_mini_batch_size // args.num_generations)
    label = "generate" if shard.rank == 0 else ""
    rows = engine.prepared(args, shard.of(prompts))  # before the progress bar, which an error would tear
    with JsonlWriter(path, settings) as writer:
        writer.extend(rows, chunk, work, label, whole_chunks=args.rollout_engine == "local")
    if shard.world_size > 1:
        merge(output, settings, shard, len(prompts))


def answer(args: GenerateArgs, engine: Local | Remote, rows: Sequence[Row]) -> Iterable[Row]:
    """The prepared rows with their responses, and rewards if there is a reward model, as they are written."""
    results: Iterable[Row] = engine.respond(args, rows)
    if engine.scorer is not None:
        results = scored(args, list(results), engine.scorer, engine.tokenizer)
    return map(in_order, results)


def try_first(args: GenerateArgs, engine: Local | Remote, prompts: list[Row], output: Path, shard: Shard) -> None:
    """Answer as many prompts as the engine has slots for, and print the first one; all ranks do the same."""
    rows = engine.prepared(args, prompts[: max(1, args.rollout_mini_batch_size // args.num_generations)])
    started = time.perf_counter()
    results = list(answer(args, engine, rows))
    seconds = (time.perf_counter() - started) / shard.world_size  # of ranks that share the prompts
    if shard.rank == 0:
        show_trial(results[0], len(rows), len(prompts), "prompts", seconds, output)


def in_order(row: Row) -> Row:
    """The row with its columns in the order of `ROW`, then the data's."""
    first = {name: row[name] for name in ROW if name in row}
    return {**first, **{name: value for name, value in row.items() if name not in first}}


def shard_path(output: Path, shard: Shard) -> Path:
    return output.with_name(f"{output.stem}.part-{shard.rank}-of-{shard.world_size}.jsonl")


def merge(output: Path, settings: Row, shard: Shard, num_rows: int) -> None:
    """Concatenate the shards once all of them are complete.

    The last rank does it; two at the same time write the same. Raises: RunFailure for a missing or duplicate row.
    """
    paths = [shard_path(output, Shard(rank, shard.world_size)) for rank in range(shard.world_size)]
    if not all(path.is_file() for path in paths):
        return
    rows = [row for path in paths for row in read_jsonl(path)]
    if len(rows) < num_rows:
        return
    if [row.get("index") for row in rows] != list(range(num_rows)):
        raise RunFailure(f"{paths[0]} and the other parts do not have each prompt once; remove them and start again")
    write_jsonl(output, rows, settings)


def describe(output: Path, num_rows: int) -> str:
    """A line on the contents of a file."""
    if not output.is_file():
        return "other parts are not complete yet"
    rows = read_responses(output, ("responses", "truncated"), ("errors", "reward"))
    responses = [response for row in rows for response in row["responses"]]
    truncated = sum(flag for row in rows for flag in row["truncated"])
    failed = sum(len(row.get("errors", [])) for row in rows)
    text = f"{len(rows):,} of {num_rows:,} prompts, {len(responses):,} responses, {truncated:,} of them truncated"
    if failed:
        text += f", {failed:,} refused by the server"
    valid = [row["reward"] for row in rows if row.get("reward") is not None]
    if valid:
        text += f", mean reward of the best {sum(valid) / len(valid):.3f}"
    same = sum(len(set(row["responses"])) == 1 for row in rows if len(row["responses"]) > 1)
    if same:
        text += f"; {same:,} prompts with {len(rows[0]['responses'])} equal responses"
    return text


@one_line_errors
def main(argv: list[str] | None = None) -> list[str]:
    """Run the program; returns the files, one per temperature."""
    return run(parse(GenerateArgs, argv))


if __name__ == "__main__":
    main()
