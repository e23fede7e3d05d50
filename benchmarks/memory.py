"""Peak memory of LoRA on a base held in bfloat16, measured on a CPU and estimated: a Markdown table.

Each case is a process of its own: one program on random weights of a published shape, one micro-batch an update.
Measured is the largest resident size minus that before the model is loaded, after the same program has run on a tiny
model, so without libraries. glibc is told to give every freed block of 64 KiB or more back to the system, so resident
means allocated. Loading has a column of its own: its peak is on the host whatever the device. The estimate is that of
`lightrlhf.estimate` for the same flags. Finished cases are kept in `--results_file`, and not run again.

    python benchmarks/memory.py --sizes 135M --lengths 512
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse

SHAPES = {  # width, width of the MLP, layers, heads, heads of keys and values
    "tiny": (64, 128, 2, 4, 2),
    "135M": (576, 1536, 30, 9, 3),  # SmolLM2-135M
    "1B": (2048, 5632, 22, 32, 4),  # TinyLlama-1.1B
}
VOCABULARY = 49152  # SmolLM2's; all shapes have it, and one matrix for embedding and head
PROGRAMS = ("sft", "rm", "dpo", "grpo", "ppo")
NEW_TOKENS = 8  # of a rollout: a step of decoding is slow here


@dataclass(frozen=True, kw_only=True)
class MemoryArgs(Args):
    """Peak memory of LoRA on a base held in bfloat16, measured and estimated."""

    sizes: list[str] = flag(["135M", "1B"], choices=SHAPES)
    """Shapes of the models."""
    lengths: list[int] = at_least(1, [512, 2048])
    """Tokens of an example, prompt and response."""
    programs: list[str] = flag(list(PROGRAMS), choices=PROGRAMS)
    """Programs to measure."""
    micro_batch_size: int = at_least(1, 1)
    """Examples per forward and backward pass; a pair counts as one."""
    updates: int = at_least(1, 1)
    """Updates of a run; the optimiser has its state from the second on."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    precision: str = "32-true"
    """Precision of the runs."""
    extra: list[str] = flag([])
    """More flags of program and estimate, as NAME=VALUE."""
    results_file: str = "benchmarks/results/memory.jsonl"
    """Finished cases, one a line."""
    output_file: str | None = None
    """Markdown table of all finished cases."""


@dataclass(frozen=True)
class Case:
    """One process: a program, the size of its model, and its flags."""

    size: str
    program: str
    length: int
    micro_batch_size: int
    updates: int
    flags: dict[str, Any]


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(MemoryArgs, argv)
    results = Path(args.results_file)
    done = read(results)
    flags: dict[str, Any] = {"finetune_mode": "lora", "base_dtype": "bfloat16", "precision": args.precision}
    flags |= {"activation_checkpointing": args.activation_checkpointing}
    flags |= dict(one.split("=", 1) for one in args.extra)
    if flags["finetune_mode"] != "lora":
        del flags["base_dtype"]
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            for length in args.lengths:
                for program in args.programs:
                    case = Case(size, program, length, args.micro_batch_size, args.updates, flags)
                    if any(row["case"] == asdict(case) for row in done):
                        continue
                    started = time.perf_counter()
                    row = {"case": asdict(case), **child(case, folder)}
                    row["seconds"] = round(time.perf_counter() - started)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    done.append(row)
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    text = table(done)
    print(text)
    if args.output_file:
        Path(args.output_file).write_text(text, encoding="utf-8")


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Measured and estimated gigabytes, and how far the estimate is off."""
    lines = ["| model | program | tokens | micro-batch | flags | measured | estimated | off | loading |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    plain = {"finetune_mode": "lora", "base_dtype": "bfloat16", "precision": "32-true"}
    for row in rows:
        case, measured = row["case"], row["training"]
        estimated = estimate(Case(**case))
        given = {name: value for name, value in case["flags"].items() if value and plain.get(name) != value}
        flags = ", ".join("checkpointing" if value is True else f"`{value}`" for value in given.values())
        columns = [case["size"], f"`{case['program']}`", case["length"], case["micro_batch_size"], flags]
        columns += [f"{measured / 1e9:.2f} GB", f"{estimated / 1e9:.2f} GB", f"{estimated / measured - 1:+.1%}"]
        lines.append("| " + " | ".join(map(str, [*columns, f"{row['loading'] / 1e9:.2f} GB"])) + " |")
    return "\n".join(lines) + "\n"


def child(case: Case, folder: str) -> dict[str, Any]:
    """Measure a case in a separate process; returns its result, the last line it prints."""
    root = Path(__file__).resolve().parents[1]
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--measure", json.dumps(asdict(case)), folder]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------ in the separate process
def measure(case: Case, folder: str) -> dict[str, float]:
    """Largest resident bytes of a run, while it loads and while it trains, beyond those before it."""
    from lightrlhf.training.phases import Phases

    peaks: dict[str, float] = {}
    original = Phases.phase

    @contextmanager
    def phase(self: Phases, name: str, rows: Iterable[int] = ()) -> Iterator[None]:
        note("between" if peaks else "loading")
        with original(self, name, rows):
            yield
        note(name)

    def note(name: str) -> None:
        peaks[name] = max(peaks.get(name, 0), resident("VmHWM") - before)
        reset_peak()

    tiny = Case("tiny", case.program, 64, case.micro_batch_size, 1, case.flags)
    make(case, folder)
    train(tiny, folder)
    Phases.phase = phase  # type: ignore[method-assign]
    before = resident("VmRSS")
    reset_peak()
    train(case, folder)
    note("end")
    loading = peaks.pop("loading")
    return {"training": max(peaks.values()), "loading": loading, "phases": peaks, "libraries": before}


def resident(name: str) -> float:
    """Resident bytes of this process: VmRSS now, VmHWM the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def config_of(size: str) -> Any:
    """The Llama of a shape."""
    from transformers import LlamaConfig

    width, mlp, layers, heads, kv_heads = SHAPES[size]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


def make(case: Case, folder: str) -> None:
    """Write random Llamas in bfloat16, and reward models that are adapters on them."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrlhf.cli.groups import ModelArgs
    from lightrlhf.models.loading import load_scalar
    from lightrlhf.models.saving import export
    from lightrlhf.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(None, "datasets_prep/cafe/base")
    for size in ("tiny", case.size):
        base, reward = Path(folder, size, "base"), Path(folder, size, "reward")
        if not base.is_dir():
            torch.set_default_dtype(torch.bfloat16)
            model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
            torch.set_default_dtype(torch.float32)
            model.config.pad_token_id = tokenizer.pad_token_id
            model.save_pretrained(base)
            tokenizer.save_pretrained(base)
            del model
        if case.program in ("grpo", "ppo") and not reward.is_dir():
            reward.mkdir()
            args = ModelArgs(finetune_mode="lora", base_dtype="bfloat16")
            export(load_scalar(str(base), args, tokenizer, seed=0), reward, reward.parent)
            tokenizer.save_pretrained(reward)


def train(case: Case, folder: str) -> None:
    """Run a program for some updates, each of one micro-batch, two where all weights are trained."""
    import importlib

    import torch

    from lightrlhf.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(None, f"{folder}/{case.size}/base")
    module = importlib.import_module(f"lightrlhf.{case.program}")
    passes = 1 if case.flags["finetune_mode"] == "lora" else 2  # an update; the second finds all gradients in memory
    size, samples = case.micro_batch_size * passes, case.program in ("grpo", "ppo")
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(100, 200, (count,), generator=draw).tolist()

    rows: list[dict[str, Any]] = []
    for index in range(size * case.updates):
        length = case.length - index % case.micro_batch_size  # several rows are padded
        if case.program == "sft":
            text = ids(length)
            rows.append({"prompt_len": 1, "input_ids": text, "targets": [-100, *text[1:]]})
        elif samples:
            rows.append({"prompt_len": length - NEW_TOKENS, "input_ids": ids(length - NEW_TOKENS), "columns": {}})
        else:
            sides = {"chosen_input_ids": [5, *ids(length - 1)], "rejected_input_ids": [5, *ids(length - 2)]}
            rows.append({"prompt_len": 1, **sides})
    flags: dict[str, Any] = {"model_name": f"{folder}/{case.size}/base", "log_dir": f"{folder}/logs"}
    flags |= {"micro_batch_size": case.micro_batch_size, "mini_batch_size": size}
    flags |= {"max_steps": case.updates, "eval_interval": 0, "accelerator": "cpu", "log_interval": 1, **case.flags}
    if samples:
        flags |= {"rm_experiment_dir": f"{folder}/{case.size}/reward", "max_new_tokens": NEW_TOKENS}
        flags |= {"rollout_size": case.micro_batch_size, "rollout_mini_batch_size": 2 * case.micro_batch_size}
        flags |= {"eos_ids": []}
    if case.program == "grpo":
        flags |= {"rollout_size": 1, "num_generations": max(case.micro_batch_size, 2)}
    rows_name = "prompts" if samples else "rows"
    kinds = {"sft": "SFTArgs", "rm": "RMArgs", "dpo": "DPOArgs", "grpo": "GRPOArgs", "ppo": "PPOArgs"}
    module.train(getattr(module, kinds[case.program])(**flags), tokenizer=tokenizer, **{rows_name: rows})


def estimate(case: Case) -> float:
    """Bytes estimated by `lightrlhf.estimate`."""
    from lightrlhf.estimate import EstimateArgs
    from lightrlhf.estimate import estimate as parts_of

    slots = 2 * case.micro_batch_size if case.program == "ppo" else max(case.micro_batch_size, 2)
    sizes: dict[str, Any] = {"micro_batch_size": case.micro_batch_size, "sequence_length": case.length}
    sizes |= {"rollout_mini_batch_size": slots, "max_new_tokens": NEW_TOKENS, "num_generations": slots}
    args = EstimateArgs(algorithm=case.program, model_name=case.size, accelerator="cpu", **sizes, **case.flags)
    return parts_of(args, config_of(case.size))["peak"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Case(**json.loads(sys.argv[2])), sys.argv[3])))
    else:
        main()
