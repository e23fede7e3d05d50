"""Our side as a worker: a program's own `main` with a gate between its steps, or the generation engine."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.worker import Gate, count_tokens, job, versions
from lightrlhf.training.run import Run

PACKAGES = ("torch", "transformers", "lightning")


def main() -> None:
    work = job()
    peak = torch.cuda.max_memory_allocated if work["cuda"] else None
    gate = Gate(work["steps"], versions(*PACKAGES), peak, work.get("forgets_loading", False))
    count_tokens(gate)
    if work["kind"] == "generate":
        generate(work, gate)
    else:
        train(work, gate)


def train(work: dict[str, Any], gate: Gate) -> None:
    """Run the program as users do; a step is one iteration of its loop."""
    steps = Run.steps

    def gated(run: Run, num_steps: int):
        for step in steps(run, num_steps):
            gate()
            yield step

    Run.steps = gated
    program = importlib.import_module(work["program"])
    program.main([word for flag, value in work["flags"].items() for word in (f"--{flag}", str(value))])


def generate(work: dict[str, Any], gate: Gate) -> None:
    """Run the generation engine on all prompts, `samples` times each."""
    from lightrlhf.cli.groups import DecodingArgs, FrozenArgs
    from lightrlhf.data.splits import load_prompts
    from lightrlhf.generation.engine import generate
    from lightrlhf.models.loading import load_policy
    from lightrlhf.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(work["data"])
    policy = load_policy(work["model"], FrozenArgs(), tokenizer).to(work["device"])
    prompts = [row["input_ids"].tolist() for row in load_prompts(work["data"], "train")]
    prompts = [prompt for prompt in prompts for _ in range(work["samples"])]
    args = DecodingArgs(max_new_tokens=work["max_new_tokens"])
    precision = torch.autocast(work["device"], torch.bfloat16, enabled=work["bf16"])
    generator = torch.Generator().manual_seed(0)
    sampled = 0
    while True:
        gate(sampled)
        uniforms = torch.rand(len(prompts), args.max_new_tokens, generator=generator)
        with precision:
            done = generate(policy, prompts, args, [tokenizer.eos_token_id], uniforms, work["slots"])
        sampled = sum(map(len, done.responses))


if __name__ == "__main__":
    main()
