"""Responses to prompts, as JSON lines: what annotation, judging and online preference learning start from.

One row a prompt: `prompt`, the data's other columns, `responses` (K of them), which of them were `truncated`, and the
ids of both as they were read and sampled. With a reward model also `rewards`, and the best response of the K with its
reward as `response` and `reward`: best of n. The noise of a row follows from the seed and the row's number alone, so a
run that was killed, or cut into shards, says what an undisturbed one says.

Prompts come from `--data_dir` or a JSONL file, responses from the local engine or from OpenAI-compatible servers. Left
out: beam search, and rewards other than by a reward model (`lightrlhf.annotate` has them).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightrlhf.cli.args import GenerationArgs, ModelArgs, check_at_least, check_data_dir
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import Row, check_vocabulary, load_prompts, load_split
from lightrlhf.data.tokens import adds_bos, decode, encode_prompt
from lightrlhf.generation.engine import check_room, generate
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.models.loading import find_device, load_policy
from lightrlhf.models.names import resolve
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.rewards.scorers import ROW, GroupScorer, Sample, score_rows
from lightrlhf.storage.jsonl import JsonlWriter, check_settings, read_jsonl, write_jsonl, write_settings

WITHOUT_EFFECT = {"output_dir", "output_file", "accelerator", "devices", "local_index", "my_world_size", "temperatures"}
WITHOUT_EFFECT |= {field.name for field in dataclasses.fields(RemoteArgs)}
CHUNKS = 8  # passes of the engine between two writes: long enough to fill its slots, short enough to lose little


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(GenerationArgs, RemoteArgs):
    """Sample responses to prompts and write them as JSON lines."""

    model_name: str
    """Experiment dir, checkpoint, folder or hub name of the model; the model's name at the server for `openai`."""
    trust_remote_code: bool = False
    """Let a model run the code of its own repository."""
    data_dir: str | None = None
    """Folder of the `.pt` splits to take prompts from."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of `data_dir` to take prompts from."""
    prompts_file: str | None = None
    """JSONL file with a column `prompt` (text or messages), instead of `data_dir`; other columns are kept."""
    num_prompts: int | None = 2000
    """Take at most this many prompts, a random subset in the order of the data; `null` takes all."""
    subset_seed: int = 1234
    """Seed of that subset."""
    num_responses: int = 1
    """Responses per prompt."""
    temperatures: list[float] | None = None
    """Several temperatures instead of `temperature`, one file each; 0 is greedy."""
    rm_experiment_dir: str | None = None
    """Reward model that scores the responses; the best of each prompt becomes `response`."""
    ref_scores: bool = False
    """Also score the data's own answers: `ref_response, ref_reward`, and `rejected_*` where there are pairs."""
    output_dir: str = "results"
    """Root of the results: `{output_dir}/{data}/temperature={t}/{model}.jsonl`."""
    output_file: str | None = None
    """File to write instead."""
    rollout_engine: Literal["local", "openai"] = "local"
    """Who samples: this process, or the servers at `base_url`."""
    mini_batch_size: int = 64
    """Slots of the generation engine, and at most so many rows per pass of the reward model."""
    seed: int = 42
    """Seed of the sampling noise."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    devices: int = 1
    """Processes on this machine, one device each, that share the prompts."""
    local_index: int = 0
    """Which part of the prompts this process does, when several are started by hand."""
    my_world_size: int = 1
    """How many such parts there are; the one that is done last puts them together."""

    def __post_init__(self) -> None:
        self.check_generation()
        self.check_remote()
        find_device(self.accelerator)
        for name in ("num_responses", "mini_batch_size", "devices", "my_world_size"):
            check_at_least(self, name, 1)
        if self.num_prompts is not None:
            check_at_least(self, "num_prompts", 1)
        if (self.data_dir is None) == (self.prompts_file is None):
            raise ValueError("--data_dir or --prompts_file is needed, and not both: where the prompts come from")
        if self.data_dir is not None:
            check_data_dir(self)
        elif not Path(self.prompts_file).is_file():
            raise ValueError(f"--prompts_file {self.prompts_file} does not exist")
        if self.rm_experiment_dir is not None and not Path(self.rm_experiment_dir).is_dir():
            raise ValueError(f"--rm_experiment_dir {self.rm_experiment_dir} does not exist")
        if self.ref_scores and not (self.rm_experiment_dir and self.data_dir):
            raise ValueError("--ref_scores needs --rm_experiment_dir, to score, and --data_dir, which has the answers")
        if self.rollout_engine == "openai" and not self.base_url:
            raise ValueError("--rollout_engine openai needs --base_url, such as http://localhost:8000/v1")
        if self.rollout_engine == "openai" and self.eos_ids:
            raise ValueError(f"--eos_ids {self.eos_ids[0]}: servers end at texts, not at ids; use --stop_strings")
        if self.rollout_engine == "local" and self.base_url:
            raise ValueError(f"--base_url {self.base_url[0]} is of no use without --rollout_engine openai")
        if not 0 <= self.local_index < self.my_world_size:
            raise ValueError(f"--local_index {self.local_index} must lie in [0, --my_world_size {self.my_world_size})")
        if self.devices > 1 and self.my_world_size > 1:
            raise ValueError(f"--devices {self.devices} and --my_world_size {self.my_world_size}: give one of them")
        for value in self.temperatures or []:
            if not 0 <= value < float("inf"):
                raise ValueError(f"--temperatures {value} must be 0 or more")
        if self.output_file and len(self.temperatures or [1]) > 1:
            raise ValueError(f"--output_file {self.output_file} cannot hold several --temperatures; use --output_dir")
        greedy = not self.do_sample or 0 in (self.temperatures or [])
        if greedy and self.num_responses > 1:
            raise ValueError(f"--num_responses {self.num_responses} would all be the same without sampling; use 1")


class Part(NamedTuple):
    """Which part of the prompts is this process's."""

    index: int
    count: int

    def share(self, rows: Sequence[Any]) -> Sequence[Any]:
        """A contiguous part, as even as can be."""
        start, end = (len(rows) * i // self.count for i in (self.index, self.index + 1))
        return rows[start:end]


def run(args: GenerateArgs) -> list[str]:
    """Sample responses; returns the files, one per temperature."""
    part, device, wait = start_parts(args)
    prompts = load_prompt_rows(args)
    engine = None
    files = []
    for args_now in at_each_temperature(args):
        output = output_path(args_now)
        settings = settings_of(args_now, prompts)
        if not complete(output, settings, len(prompts)):
            engine = engine or make_engine(args, device)
            write_part(args_now, engine, prompts, output, settings, part)
        wait()
        if part.index == 0:
            print(f"{output}: {describe(output, len(prompts))}")
        files.append(str(output))
    return files


def start_parts(args: GenerateArgs) -> tuple[Part, torch.device, Any]:
    """This process's part, its device, and a function that waits for the other ranks."""
    if args.my_world_size > 1 or args.devices == 1:
        return Part(args.local_index, args.my_world_size), find_device(args.accelerator), lambda: None
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy="ddp")
    fabric.launch()
    return Part(fabric.global_rank, fabric.world_size), fabric.device, fabric.barrier


def at_each_temperature(args: GenerateArgs) -> Iterator[GenerateArgs]:
    """The arguments with one temperature each."""
    for value in args.temperatures or [args.temperature if args.do_sample else 0.0]:
        greedy = value == 0
        yield dataclasses.replace(
            args, temperature=1.0 if greedy else value, do_sample=not greedy, temperatures=[value]
        )


# ---------------------------------------------------------------------------------------------------------- prompts
def load_prompt_rows(args: GenerateArgs) -> list[Row]:
    """Rows `prompt` or `prompt_ids`, with the data's other columns, in the order of the data.

    Raises: UsageError naming file and row when a prompt is neither text nor messages.
    """
    if args.prompts_file:
        rows = read_jsonl(args.prompts_file)
        rows = [{**row, "prompt": prompt_of(row, f"{args.prompts_file}: row {n}")} for n, row in enumerate(rows, 1)]
    else:
        rows = [
            {**row.get("columns", {}), "prompt_ids": torch.as_tensor(row["input_ids"]).tolist()}
            for row in load_prompts(args.data_dir, args.split)
        ]
        if args.ref_scores:
            rows = answered(args)
    chosen = subset(len(rows), args.num_prompts, args.subset_seed)
    return [{**rows[i], "index": number} for number, i in enumerate(chosen)]


def prompt_of(row: Row, where: str) -> str | list[dict[str, str]]:
    """The prompt of a row under one of the names in use. Raises: UsageError."""
    prompt = next((row[name] for name in ("prompt", "context_messages", "messages") if name in row), None)
    if isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        prompt = prompt[:-1] if prompt and prompt[-1]["role"] == "assistant" else prompt  # an answered dialogue
        if prompt:
            return prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    raise UsageError(f"{where} has no prompt: a column `prompt` with a text or a list of {{role, content}} is needed")


def answered(args: GenerateArgs) -> list[Row]:
    """Prompts with the data's own answers: of its pairs where it has some, else its demonstrations."""
    if (Path(args.data_dir) / f"preference_{args.split}.pt").is_file():
        sides = {"ref": "chosen_input_ids", "rejected": "rejected_input_ids"}
        rows = load_split(args.data_dir, "preference", args.split)
    else:
        sides = {"ref": "input_ids"}
        rows = load_split(args.data_dir, "finetune", args.split)
    found = []
    for row in rows:
        start = row["prompt_len"]
        ids = {name: torch.as_tensor(row[key]).tolist() for name, key in sides.items()}
        answers = {f"{name}_ids": whole[start:] for name, whole in ids.items()}
        found.append({**row.get("columns", {}), "prompt_ids": ids["ref"][:start], **answers})
    return found


def subset(count: int, size: int | None, seed: int) -> list[int]:
    """Indices of a random subset, in order; all when there are not more than `size`."""
    if size is None or count <= size:
        return list(range(count))
    return sorted(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist())


# ---------------------------------------------------------------------------------------------------------- engines
class Local:
    """Responses by the generation engine of this process."""

    def __init__(self, args: GenerateArgs, device: torch.device) -> None:
        self.tokenizer = load_tokenizer(args.data_dir, args.model_name)
        models = ModelArgs(trust_remote_code=args.trust_remote_code)
        self.policy: Policy = load_policy(args.model_name, models, self.tokenizer).eval().to(device)
        self.scorer = reward_model(args, device)

    def respond(self, args: GenerateArgs, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows with their responses, in order."""
        yield from respond(self.policy, self.tokenizer, args, rows)


class Remote:
    """Responses by OpenAI-compatible servers."""

    def __init__(self, args: GenerateArgs, device: torch.device) -> None:
        needs_text = args.data_dir is not None or args.rm_experiment_dir is not None
        self.tokenizer = load_tokenizer(args.data_dir, args.rm_experiment_dir) if needs_text else None
        self.scorer = reward_model(args, device)
        self.servers = Servers(args, args.model_name)
        self.servers.wait_until_healthy()

    def respond(self, args: GenerateArgs, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows with their responses, in order."""
        rows = [with_text(row, self.tokenizer) for row in rows]
        replies = self.servers.replies(request for row in rows for request in requests(row, args, self.tokenizer))
        for row in rows:
            said = [next(replies) for _ in range(args.num_responses)]
            errors = [reply.error for reply in said if reply.error]
            told = {"errors": errors} if errors else {}
            texts = [reply.text if reply.error is None else None for reply in said]
            yield {**row, "responses": texts, "truncated": [r.truncated for r in said], **told}


def make_engine(args: GenerateArgs, device: torch.device) -> Local | Remote:
    """What `--rollout_engine` names."""
    return (Local if args.rollout_engine == "local" else Remote)(args, device)


def respond(policy: Policy, tokenizer: Any, args: GenerateArgs, rows: Sequence[Row]) -> list[Row]:
    """K responses to each of the rows by a local model; rows need `index` and `prompt_ids` or `prompt`.

    Raises: UsageError when a prompt does not fit the model's vocabulary or its positions.
    """
    rows = [{**row, "prompt_ids": row.get("prompt_ids") or encode_prompt(tokenizer, row["prompt"])} for row in rows]
    check_vocabulary([{"input_ids": row["prompt_ids"]} for row in rows], vocabulary_size(policy), "the prompts")
    prompts = [row["prompt_ids"] for row in rows for _ in range(args.num_responses)]
    check_room(policy.model, prompts, args)
    noise = torch.cat([noise_of(args, row["index"]) for row in rows])  # (N K, max_new_tokens)
    said = generate(policy, prompts, args, [tokenizer.eos_token_id], noise, args.mini_batch_size, tokenizer)
    answered = []
    for i, row in enumerate(rows):
        mine = slice(i * args.num_responses, (i + 1) * args.num_responses)
        ids = said.responses[mine]
        texts = [decode(tokenizer, response) for response in ids]
        told = {"responses": texts, "truncated": said.truncated[mine], "response_ids": ids}
        answered.append({**with_text(row, tokenizer), **told})
    return answered


def noise_of(args: GenerateArgs, index: int) -> Tensor:
    """(K, max_new_tokens) uniform numbers that follow from the seed and the row's number."""
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + index) % 2**63)
    return torch.rand(args.num_responses, args.max_new_tokens, generator=generator)


def with_text(row: Row, tokenizer: Any) -> Row:
    """The row with its prompt as text, too."""
    return row if "prompt" in row else {**row, "prompt": decode(tokenizer, row["prompt_ids"])}


def requests(row: Row, args: GenerateArgs, tokenizer: Any) -> Iterator[Row]:
    """K requests for one prompt; text goes to plain completions, messages to chat completions."""
    if isinstance(row["prompt"], list):
        prompt = {"messages": row["prompt"]}
    elif "prompt_ids" in row:  # with its special tokens, less the BOS that the server puts in front
        ids = row["prompt_ids"]
        prompt = {"prompt": tokenizer.decode(ids[1:] if adds_bos(tokenizer) else ids)}
    else:
        prompt = {"prompt": row["prompt"]}
    options = {"max_tokens": args.max_new_tokens, "temperature": args.temperature if args.do_sample else 0.0}
    beyond = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # asked for only where they matter
    options |= {k: getattr(args, k) for k, off in beyond.items() if getattr(args, k) != off}
    if args.stop_strings:
        options["stop"] = args.stop_strings
    for k in range(args.num_responses):
        yield {**prompt, **options, "seed": (args.seed + row["index"] * args.num_responses + k) % 2**31}


# ---------------------------------------------------------------------------------------------------------- rewards
def reward_model(args: GenerateArgs, device: torch.device) -> GroupScorer | None:
    """The scorer of `--rm_experiment_dir`."""
    if args.rm_experiment_dir is None:
        return None
    return load_scorer(
        args.rm_experiment_dir,
        device,
        args.mini_batch_size,
        "--rm_experiment_dir",
        args.trust_remote_code,
    )


def scored(args: GenerateArgs, rows: Sequence[Row], scorer: GroupScorer, tokenizer: Any) -> list[Row]:
    """The rows with `rewards`, the best response and its reward; with `--ref_scores` those of the data's answers."""
    rows = [{**row, "rewards": values} for row, values in zip(rows, score_rows(scorer, rows))]
    rows = [{**row, **best_of(row)} for row in rows]
    for name in ("ref", "rejected") if args.ref_scores else ():
        known = [row for row in rows if f"{name}_ids" in row]
        texts = [decode(tokenizer, row[f"{name}_ids"]) for row in known]
        answers = [
            [Sample(row["prompt"], text, False, row["prompt_ids"], row[f"{name}_ids"])]
            for row, text in zip(known, texts)
        ]
        for row, text, values in zip(known, texts, scorer(answers)):
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
        name = Path(args.prompts_file).name.partition(".")[0]
    model = Path(args.model_name.rstrip("/"))
    parts = model.resolve().parts if model.is_dir() else model.parts
    stored = model / "args.json"  # an experiment dir: {experiment}/{data}/{data}/{time}
    label = f"{parts[-4]}_{parts[-1]}" if stored.is_file() and len(parts) > 4 else "_".join(parts[-2:])
    return Path(args.output_dir) / name / f"temperature={args.temperatures[0]:g}" / f"{label.strip('/')}.jsonl"


def settings_of(args: GenerateArgs, prompts: Sequence[Row]) -> Row:
    """What the rows of a file depend on."""
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in WITHOUT_EFFECT}
    if args.rollout_engine == "local":
        settings["model_name"] = resolve(args.model_name)  # an experiment dir may have a newer checkpoint next time
    content = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    return {**settings, "num_rows": len(prompts), "prompts_sha256": content}


def complete(output: Path, settings: Row, num_rows: int) -> bool:
    """Whether a file of these settings has all its rows. Raises: UsageError when it is of other settings."""
    if not output.is_file():
        return False
    check_settings(output, settings)
    return output.read_bytes().count(b"\n") == num_rows


def write_part(
    args: GenerateArgs, engine: Local | Remote, prompts: list[Row], output: Path, settings: Row, part: Part
) -> None:
    """Write this process's part, going on behind the rows that are there, and put all parts together if it was last.

    Parts are `{output}.part-0-of-4.jsonl` until then; a single one is the output itself.
    """
    from tqdm import tqdm

    mine = part.share(prompts)
    path = output if part.count == 1 else part_path(output, part)
    size = max(1, CHUNKS * args.mini_batch_size // args.num_responses)
    with JsonlWriter(path, settings) as writer:
        done = len(writer.rows)
        first = done
        if args.rollout_engine == "local":  # a chunk that was cut is done again: batches, and so bits, stay the same
            first = done // size * size
        bar = tqdm(total=len(mine), initial=done, desc="generate", unit=" prompts", disable=part.index > 0)
        for start in range(first, len(mine), size):
            rows: Iterable[Row] = engine.respond(args, mine[start : start + size])
            if engine.scorer is not None:
                rows = scored(args, list(rows), engine.scorer, engine.tokenizer)
            for number, row in enumerate(rows, start):
                if number >= done:
                    writer.append(tidy(row))
                    bar.update()
        bar.close()
    if part.count > 1:
        merge(output, settings, part, len(prompts))


def tidy(row: Row) -> Row:
    """Columns in an order that reads well."""
    first = {name: row[name] for name in ROW if name in row}
    return {**first, **{name: value for name, value in row.items() if name not in first}}


def part_path(output: Path, part: Part) -> Path:
    return output.with_name(f"{output.stem}.part-{part.index}-of-{part.count}.jsonl")


def merge(output: Path, settings: Row, part: Part, num_rows: int) -> None:
    """Put the parts together in the order of the prompts, when all of them are complete.

    Whoever is done last does it; two at once write the same. Raises: RunFailure when a row is missing or double.
    """
    parts = [part_path(output, Part(index, part.count)) for index in range(part.count)]
    if not all(path.is_file() for path in parts):
        return
    rows = [row for path in parts for row in read_jsonl(path)]
    if len(rows) < num_rows:
        return
    if [row["index"] for row in rows] != list(range(num_rows)):
        raise RunFailure(f"{parts[0]} and the other parts do not hold each prompt once; remove them and start again")
    mine = output.with_name(f"{output.stem}.merged-{part.index}.jsonl")
    write_jsonl(mine, rows)
    write_settings(output, settings)
    os.replace(mine, output)


def describe(output: Path, num_rows: int) -> str:
    """A line on what a file holds."""
    if not output.is_file():
        return "the other parts are not done yet"
    rows = read_jsonl(output)
    responses = [response for row in rows for response in row["responses"]]
    cut = sum(flag for row in rows for flag in row["truncated"])
    failed = sum(len(row.get("errors", [])) for row in rows)
    text = f"{len(rows):,} of {num_rows:,} prompts, {len(responses):,} responses, {cut:,} of them truncated"
    if failed:
        text += f", {failed:,} refused by the server"
    valid = [row["reward"] for row in rows if row.get("reward") is not None]
    if valid:
        text += f", mean reward of the best {sum(valid) / len(valid):.3f}"
    same = sum(len(set(row["responses"])) == 1 for row in rows if len(row["responses"]) > 1)
    if same:
        text += f"; {same:,} prompts got the same response each time"
    return text


@one_line_errors
def main(argv: list[str] | None = None) -> list[str]:
    """Run the program; returns the files, one per temperature."""
    return run(parse(GenerateArgs, argv))


if __name__ == "__main__":
    main()
