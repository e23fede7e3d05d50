"""Peak memory of PPO by fine-tuning mode, measured and estimated: a Markdown table.

Each case is a separate process with one rollout and two updates of PPO on a random Llama large enough for its weights
to dominate. Measured is the largest resident size, minus the size after importing the libraries. The estimate is that
of `lightrlhf.estimate` for the same flags.

    python benchmarks/memory.py --sizes 30M 50M 100M
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse

CASES = {
    "`all`": [],
    "`lora`, four models": ["--finetune_mode", "lora", "--share_backbone", "False"],
    "`lora`, one backbone": ["--finetune_mode", "lora"],
    "`lora`, one backbone in 4 bits": ["--finetune_mode", "lora", "--load_in_4bit", "True"],
}
SHAPE = ["--micro_batch_size", "2", "--rollout_mini_batch_size", "8", "--max_new_tokens", "32"]
SEQUENCE_LENGTH = 64  # the café's prompts are about 20 tokens long


@dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Peak memory of PPO by fine-tuning mode, measured and estimated."""

    sizes: list[str] = field(default_factory=lambda: ["30M", "50M", "100M"])
    """Parameters of the models, such as 30M."""
    output_file: str | None = None
    """Markdown file to write in addition to printing."""

    def __post_init__(self) -> None:
        if wrong := [size for size in self.sizes if not re.fullmatch(r"\d+(\.\d+)?[KMB]", size)]:
            raise ValueError(f"--sizes {wrong[0]} must be a size such as 30M or 1.5B")


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(MemoryArgs, argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        call("datasets_prep.cafe.prepare_data", ["--destination_dir", f"{folder}/data", "--num_proc", "1"])
        for size in args.sizes:
            models = Path(folder) / size
            child("make", str(models), f"{folder}/data", size)
            for name, flags in CASES.items():
                reward = models / ("adapter" if "lora" in flags else "whole")
                where = ["--data_dir", f"{folder}/data", "--log_dir", f"{folder}/logs"]
                where += ["--model_name", str(models / "base"), "--rm_experiment_dir", str(reward)]
                measured = child("measure", *where, *SHAPE, *flags)["bytes"]
                estimated = child("estimate", "--model_name", str(models / "base"), *SHAPE, *flags)["bytes"]
                rows.append((size, name, estimated, measured))
                print(rows[-1], file=sys.stderr)
    text = table(rows)
    print(text)
    if args.output_file:
        Path(args.output_file).write_text(text, encoding="utf-8")


def table(rows: list[tuple[str, str, float, float]]) -> str:
    """Measured and estimated gigabytes, and the share of `all`."""
    lines = ["| parameters | PPO | measured | estimated | of `all` |", "|---|---|---|---|---|"]
    full = {size: measured for size, name, _, measured in rows if name == "`all`"}
    for size, name, estimated, measured in rows:
        share = measured / full[size]
        lines.append(f"| {size} | {name} | {measured / 1e9:.2f} GB | {estimated / 1e9:.2f} GB | {share:.0%} |")
    return "\n".join(lines) + "\n"


def call(module: str, flags: list[str]) -> None:
    subprocess.run([sys.executable, "-m", module, *flags], check=True, stdout=subprocess.DEVNULL)


def child(task: str, *words: str) -> dict:
    """Run one task in a separate process; returns its result, the last line it prints."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, __file__, "--task", task, *words]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------ in the separate process
def make(folder: str, data: str, size: str) -> dict:
    """Write a random Llama, a full reward model of its size, and a LoRA reward model."""
    from transformers import AutoModelForCausalLM

    from lightrlhf.cli.args import ModelArgs
    from lightrlhf.estimate import UNITS, llama_of
    from lightrlhf.models.loading import load_scalar
    from lightrlhf.models.saving import export
    from lightrlhf.models.tokenizer import load_tokenizer

    tokenizer, path = load_tokenizer(data), Path(folder)
    model = AutoModelForCausalLM.from_config(llama_of(float(size[:-1]) * UNITS[size[-1]]))
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path / "base")
    for name, args in (("whole", ModelArgs()), ("adapter", ModelArgs(finetune_mode="lora"))):
        (path / name).mkdir()
        export(load_scalar(str(path / "base"), args, tokenizer, seed=0), path / name, path)
        tokenizer.save_pretrained(path / name)
    return {}


def measure(*flags: str) -> dict:
    """Bytes of one rollout and two updates, without the libraries."""
    import bitsandbytes  # noqa: F401
    import lightning.fabric  # noqa: F401
    import peft  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from lightrlhf import ppo

    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    steps = ["--max_steps", "1", "--rollout_size", "8", "--mini_batch_size", "4", "--eval_interval", "0"]
    ppo.main([*steps, *flags, "--accelerator", "cpu"])
    return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before}


def estimate(*flags: str) -> dict:
    """Bytes estimated by `lightrlhf.estimate`."""
    from lightrlhf.estimate import main as parts_of

    return {"bytes": parts_of(["--algorithm", "ppo", "--sequence_length", str(SEQUENCE_LENGTH), *flags])["peak"]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        print(json.dumps({"make": make, "measure": measure, "estimate": estimate}[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
