"""The cases of the benchmark: settings of both sides, the unit of work and the goal of each.

Both sides get the same models and data (`inputs.py`), the same number of optimiser steps on the same effective batch,
the same precision and the same threads. Each side may split a batch into passes and pad it as it likes: both run in
several settings, of which the fastest counts.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.inputs import SIZES, DataSize, even_lengths, write_data, write_models
from benchmarks.peers.install import interpreter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEARNING_RATE = 1e-7  # so small that the models, and so the lengths of responses, do not change


@dataclass(frozen=True)
class Side:
    """A worker process to start."""

    label: str
    command: list[str]
    job: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    what: str
    unit: str  # of work
    ours: list[Side]  # settings, of which the fastest counts, as of the peer's
    peers: list[Side] = field(default_factory=list)
    goal: float | None = None  # minimum of ours over the peer's; with `less_is_better` the maximum
    limit_goal: float | None = None  # minimum share of the machine's limit
    memory_goal: float | None = None  # maximum of our peak memory over the peer's
    units: float | None = None  # work of a repetition; None if each repetition reports it
    floor: dict[str, Any] | None = None  # inputs of the machine's limit
    less_is_better: bool = False
    unavailable: str | None = None
    kind: Literal["speed", "memory", "start"] = "speed"
    prepare: Callable[[], None] | None = None  # run before it, beyond models and data
    turns: int | None = None  # of each side, however long they take; None: those of the run
    together: bool = True  # the device holds all settings at once; otherwise they are tried one by one


@dataclass(frozen=True)
class Scale:
    """The amount of work in a repetition, for one model size."""

    size: str
    batch: int  # demonstrations per optimiser step; half as many pairs
    steps: int  # optimiser steps of a repetition
    prompts: int  # of a rollout by the engine
    rollout: int  # samples of an iteration of PPO
    slots: int = 32
    max_new_tokens: int = 128
    ppo_new_tokens: int = 64
    samples: int = 8  # per prompt, of the engine and of GRPO
    grpo_prompts: int = 8  # of an iteration
    grpo_tokens: int = 32  # mean tokens of a response
    grpo_ratios: tuple[int, ...] = (1, 4, 16)  # mean tokens of a prompt to those of a response

    def prompts_of(self, ratio: int) -> list[int]:
        """Tokens of the prompts of an iteration of GRPO."""
        return even_lengths(self.grpo_prompts, ratio * self.grpo_tokens)


CPU = [Scale("4M", 32, 2, 128, 64), Scale("30M", 8, 2, 64, 16, grpo_prompts=4, grpo_ratios=(4,))]
GPU = [Scale("1B", 64, 4, 256, 64, slots=64, max_new_tokens=512, ppo_new_tokens=256)]
REAL = Scale("135M", 8, 2, 64, 16, slots=64)  # the size of a small published model (SmolLM2-135M)
MEMORY = Scale("150M", 4, 1, 8, 8, slots=8, ppo_new_tokens=16)
QUICK = [
    Scale("tiny", 4, 1, 8, 8, slots=4, max_new_tokens=12, ppo_new_tokens=8, samples=4, grpo_prompts=2, grpo_tokens=4)
]
DIALOGUES = {"median_prompt": 80, "longest_prompt": 256, "median_text": 113, "spread": 1.0}  # roughly those of HH
MEAN_SHARE = 0.2  # of the longest response, if lengths are skewed


class Bench:
    """Inputs and workers of a suite."""

    def __init__(self, folder: Path, suite: str, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.cuda = suite == "gpu"
        self.scales = QUICK if quick else GPU if self.cuda else CPU
        self.device = "cuda" if self.cuda else "cpu"
        self.small_pass = 16 if self.cuda else 4  # rows of a pass, as howto/speed.md recommends for a CPU

    def models(self, scale: Scale, longest: int | None) -> Path:
        """Folder of `policy` and `reward`; `longest` of skewed lengths, None if all are full."""
        folder = self.folder / "models" / f"{scale.size}-{longest or 'full'}"
        if not folder.is_dir():
            write_models(folder, SIZES[scale.size], longest and max(MEAN_SHARE * longest, 2))
        return folder

    def teacher(self, scale: Scale, longest: int | None) -> Path:
        """A model of the same vocabulary, twice as wide and deep."""
        folder, student = self.models(scale, longest) / "teacher", SIZES[scale.size]
        if not folder.is_dir():
            names = ("hidden_size", "intermediate_size", "num_hidden_layers")
            write_models(folder, replace(student, **{name: 2 * getattr(student, name) for name in names}), None)
        return folder / "policy"

    def data(self, scale: Scale, dialogues: bool = False) -> Path:
        """Folder of the splits; with `dialogues` prompts are conversations, longer than their responses."""
        folder = self.folder / "data" / f"{scale.size}{'-dialogues' * dialogues}"
        if not folder.is_dir():
            rows = scale.batch * scale.steps
            lengths = DIALOGUES if dialogues else {}
            size = DataSize(rows, rows // 2, max(scale.prompts, scale.rollout), **lengths)
            write_data(folder, size, SIZES[scale.size].vocab_size)
        return folder

    def subset(self, scale: Scale, prompts: int) -> Path:
        """The same data with fewer prompts."""
        import torch

        folder = self.folder / "data" / f"{scale.size}-{prompts}"
        if not folder.is_dir():
            shutil.copytree(self.data(scale), folder)
            rows = torch.load(folder / "prompts_train.pt", weights_only=True)
            torch.save(rows[:prompts], folder / "prompts_train.pt")
        return folder

    def long_prompts(self, scale: Scale, ratio: int) -> Path:
        """The prompts of an iteration of GRPO, on average `ratio` times as long as its responses."""
        folder = self.folder / "data" / f"{scale.size}-{ratio}-to-1"
        if not folder.is_dir():
            write_data(folder, DataSize(2, 2, 0), SIZES[scale.size].vocab_size, scale.prompts_of(ratio))
        return folder

    def train_adapters(self, scale: Scale, folder: Path) -> None:
        """Train a reward model of LoRA adapters on the policy: one step of `lightrlhf.rm`."""
        flags = {
            "data_dir": self.data(scale),
            "output_dir": folder,
            "model_name": self.models(scale, None) / "policy",
            "finetune_mode": "lora",
            "max_steps": 1,
            "mini_batch_size": 2,
            "micro_batch_size": 2,
            "eval_iters": 1,
            "accelerator": self.device,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run([sys.executable, "-m", "lightrlhf.rm", *words], check=True, capture_output=True, cwd=ROOT)

    def counts(self, scale: Scale) -> dict[str, int]:
        return json.loads((self.data(scale) / "counts.json").read_text())

    # ------------------------------------------------------------------------------------------------------ sides
    def program(
        self, name: str, label: str, flags: dict[str, Any], bf16: bool, steps: int, data: Path, **more: Any
    ) -> Side:
        """One of our training programs, without logging, evaluation and saving."""
        never = 10**9
        common = {
            "data_dir": data,
            "log_dir": self.folder / "logs",
            "epochs": 100_000,
            "log_interval": never,
            "save_interval": never,
            "eval_interval": 0,
            "logger": "csv",
            "accelerator": self.device,
            "precision": "bf16-mixed" if bf16 else "32-true",
        }
        job = {"kind": "train", "program": name, "flags": {k: str(v) for k, v in (common | flags | more).items()}}
        job |= {"steps": steps, "cuda": self.cuda}
        return Side(label, [sys.executable, "-m", "benchmarks.ours"], job)

    def trl(self, kind: str, label: str, models: Path, data: Path, bf16: bool, **job: Any) -> Side:
        """One of TRL's trainers in one setting."""
        python = interpreter("trl-1.10" if kind == "ppo" else "trl")
        job = {"kind": kind, "models": str(models), "data": str(data), "cuda": self.cuda, "bf16": bf16, **job}
        job |= {"learning_rate": LEARNING_RATE, "output_dir": str(self.folder / "trl")}
        return Side(label, [str(python), str(HERE / "peers" / "trl_worker.py")], job)

    def engine(
        self, scale: Scale, models: Path, data: Path, bf16: bool, samples: int, slots: int
    ) -> tuple[Side, list[Side]]:
        """Our generation engine, and Hugging Face `generate` with each kind of cache, `slots` rows at a time."""
        job = {
            "kind": "generate",
            "model": str(models / "policy"),
            "data": str(data),
            "samples": samples,
            "slots": slots,
            "max_new_tokens": scale.max_new_tokens,
            "bf16": bf16,
            "device": self.device,
            "cuda": self.cuda,
            "steps": 1,
        }
        ours = Side(f"engine, {slots} rows at a time", [sys.executable, "-m", "benchmarks.ours"], job)
        peer = [sys.executable, "-m", "benchmarks.peers.hf_generate"]
        return ours, [
            Side(f"generate, {cache} cache, {slots} rows at a time", peer, job | {"cache": cache})
            for cache in ("dynamic", "static")
        ]

    def vllm(self, ours: Side) -> list[Side]:
        """The sampling of one of our sides by vLLM's engine in its own process, with and without compiling."""
        command = [str(interpreter("vllm")), str(HERE / "peers" / "vllm_worker.py")]
        ways = {"eager": True, "compiled": False}
        return [Side(f"vLLM, {way}", command, ours.job | {"eager": eager}) for way, eager in ways.items()]


# -------------------------------------------------------------------------------------------------------- the cases
def all_cases(bench: Bench, no_bf16: str | None) -> dict[str, Callable[[], Case]]:
    """Builders of a suite's cases by name, in the order of the table; building a case writes its models and data.

    no_bf16: the reason why bf16 cannot be measured on this machine.
    """
    cases: dict[str, Callable[[], Case]] = {}
    bf16 = bench.cuda
    for scale in bench.scales:
        size, kind = scale.size, "-bf16" if bf16 else ""
        cases[f"sft-{size}"] = partial(sft, bench, scale, bf16)
        for dialogues in (False, True):
            for name, build in (("rm", rm), ("dpo", dpo)):
                cases[f"{name}-{size}{'-dialogues' * dialogues}"] = partial(build, bench, scale, bf16, dialogues)
        for lengths, goal in (("skewed", 3), ("equal", 1.3), ("samples", 3.5 if bf16 else 4)):
            cases[f"rollout-{lengths}-{size}{kind}"] = partial(rollout, bench, scale, lengths, bf16, goal)
        for lengths, goal in (("full", 1.8), ("skewed", 3)):
            cases[f"ppo-{lengths}-{size}{kind}"] = partial(ppo, bench, scale, lengths, bf16, goal)
        for lengths, goal in (("full", 2), ("skewed", 3)):
            for ratio in scale.grpo_ratios:
                cases[f"grpo-{lengths}-{ratio}-{size}"] = partial(grpo, bench, scale, lengths, ratio, bf16, goal)
        for lengths in ("full", "skewed"):
            cases[f"distill-{lengths}-{size}"] = partial(distill, bench, scale, lengths, bf16)
    first, largest = bench.scales[0], bench.scales[0] if bench.quick else MEMORY
    if not bench.cuda:
        cases[f"rollout-samples-{first.size}-bf16"] = partial(rollout, bench, first, "samples", True, 3.5, no_bf16)
        cases[f"ppo-skewed-{first.size}-bf16"] = partial(ppo, bench, first, "skewed", True, 3, no_bf16)
    for scale in bench.scales if bench.quick or bench.cuda else (*bench.scales, REAL):
        for bf16 in (True,) if bench.cuda else (False, True):
            for lengths in ("equal", "skewed", "samples"):
                name = f"vllm-{lengths}-{scale.size}{'-bf16' * bf16}"
                cases[name] = partial(beside_vllm, bench, scale, lengths, bf16, no_bf16 if bf16 else None)
    if not bench.cuda:
        cases[f"memory-{largest.size}"] = partial(memory, bench, largest)
        cases["start"] = start
    return cases


def sft(bench: Bench, scale: Scale, bf16: bool) -> Case:
    data, models, batch = bench.data(scale), bench.models(scale, None), scale.batch
    micro, larger = min(bench.small_pass, batch), min(2 * bench.small_pass, batch)
    flags = {"model_name": models / "policy", "mini_batch_size": batch, "learning_rate": LEARNING_RATE}
    flags["use_targets"] = False  # as its peers
    tokens = bench.counts(scale)["tokens"]
    packed = {"packing": True, "max_length": 512}
    packed_batch = max(round(tokens / scale.steps / packed["max_length"]), 1)

    def peer(label: str, batch: int, accumulation: int, **options: Any) -> Side:
        cut = {"batch": batch, "accumulation": accumulation, "options": options, "steps": scale.steps}
        return bench.trl("sft", f"SFTTrainer, {label}", models, data, bf16, **cut)

    def own(rows: int) -> Side:
        label = f"passes of {rows} rows"
        return bench.program("lightrlhf.sft", label, flags, bf16, scale.steps, data, micro_batch_size=rows)

    return Case(
        what=f"SFT, {scale.size}",
        unit="tokens",
        units=tokens,
        goal=2,
        limit_goal=0.5 if bench.cuda else None,
        ours=list(map(own, sorted({max(micro // 2, 1), micro, larger}))),
        peers=[
            peer("one batch", batch, 1),
            peer("by length", micro, batch // micro, train_sampling_strategy="group_by_length"),
            peer("by length, larger batches", larger, batch // larger, train_sampling_strategy="group_by_length"),
            peer("packing", packed_batch, 1, **packed),
        ],
        floor={"kind": "sft", "model": str(models / "policy"), "data": str(data), "steps": scale.steps},
    )


def rm(bench: Bench, scale: Scale, bf16: bool, dialogues: bool) -> Case:
    more = {"loss_type": "last_token"}
    return pairs_case(bench, scale, bf16, dialogues, "rm", "reward", "RewardTrainer", 1.7, more)


def dpo(bench: Bench, scale: Scale, bf16: bool, dialogues: bool) -> Case:
    return pairs_case(bench, scale, bf16, dialogues, "dpo", "dpo", "DPOTrainer", 2, {})


def pairs_case(
    bench: Bench,
    scale: Scale,
    bf16: bool,
    dialogues: bool,
    name: str,
    kind: str,
    trainer: str,
    goal: float,
    more: dict[str, Any],
) -> Case:
    """Training on pairs; DPO's reference log-probabilities are computed before the start on both sides."""
    data, models, batch = bench.data(scale, dialogues), bench.models(scale, None), scale.batch // 2
    flags = {"model_name": models / "policy", "mini_batch_size": batch, "learning_rate": LEARNING_RATE, **more}
    small = min(bench.small_pass, batch)
    cuts, steps = sorted({max(small // 4, 1), max(small // 2, 1), small, batch}), scale.steps
    return Case(
        what=f"{name.upper()}, {scale.size}{', prompts are dialogues' * dialogues}",
        unit="pairs",
        units=bench.counts(scale)["pairs"],
        goal=goal,
        ours=[
            bench.program(
                f"lightrlhf.{name}", f"passes of {pairs(cut)}", flags, bf16, steps, data, micro_batch_size=cut
            )
            for cut in cuts
        ],
        peers=[
            bench.trl(
                kind, f"{trainer}, {pairs(cut)}", models, data, bf16, batch=cut, accumulation=batch // cut, steps=steps
            )
            for cut in cuts
        ],
        floor={"kind": name, "model": str(models / "policy"), "data": str(data), "steps": scale.steps},
    )


def pairs(count: int) -> str:
    return f"{count} pair" + "s" * (count > 1)


def rollout(bench: Bench, scale: Scale, lengths: str, bf16: bool, goal: float, unavailable: str | None = None) -> Case:
    samples = scale.samples if lengths == "samples" else 1
    prompts = max(scale.prompts // (2 if lengths == "equal" else samples), 1)
    models = bench.models(scale, None if lengths == "equal" else scale.max_new_tokens)
    data = bench.subset(scale, prompts)
    total = prompts * samples
    rows = sorted({min(scale.slots, total), total})  # at a time
    sides = [bench.engine(scale, models, data, bf16, samples, slots) for slots in rows]
    mean = scale.max_new_tokens if lengths == "equal" else round(MEAN_SHARE * scale.max_new_tokens)
    words = {
        "skewed": f"{prompts} prompts, most stop early (mean {mean} of {scale.max_new_tokens} tokens)",
        "equal": f"{prompts} prompts, all {scale.max_new_tokens} tokens",
        "samples": f"{samples} samples for each of {prompts} prompts, most stop early",
    }
    return Case(
        what=f"Rollout, {scale.size}{', bf16' if bf16 else ''}: {words[lengths]}",
        unit="tokens",
        goal=goal,
        limit_goal=0.6 if bench.cuda and lengths == "equal" else None,
        ours=[ours for ours, _ in sides],
        peers=[peer for _, peers in sides for peer in peers],
        unavailable=unavailable,
        floor={"kind": "rollout", "model": str(models / "policy"), "data": str(data), "samples": samples}
        | {"slots": rows[-1], "bytes_per_number": 2 if bf16 else 4},
    )


def beside_vllm(bench: Bench, scale: Scale, lengths: str, bf16: bool, unavailable: str | None) -> Case:
    """A rollout of 64 responses at once beside vLLM, which takes its turns stopped and continued."""
    few = replace(scale, prompts=2 * 64 if lengths == "equal" else 64, slots=64)
    case = rollout(bench, few, lengths, bf16, 1.3, unavailable)
    ours = case.ours[-1]
    return replace(case, ours=[ours], peers=bench.vllm(ours), limit_goal=case.limit_goal or 0.4, turns=15)


def ppo(bench: Bench, scale: Scale, lengths: str, bf16: bool, goal: float, unavailable: str | None = None) -> Case:
    longest, rows = scale.ppo_new_tokens, scale.rollout
    small = min(2 * bench.small_pass, rows // 2)
    models = bench.models(scale, longest if lengths == "skewed" else None)
    data = bench.subset(scale, rows)
    slots = min(scale.slots, rows)
    flags = {
        "sft_experiment_dir": models / "policy",
        "rm_experiment_dir": models / "reward",
        "rollout_size": rows,
        "rollout_mini_batch_size": rows,
        "mini_batch_size": rows // 2,
        "max_new_tokens": longest,
        "actor_learning_rate": LEARNING_RATE,
        "critic_learning_rate": LEARNING_RATE,
    }
    cuts = {(forward, rows): f"{forward} rows at a time" for forward in (slots, rows)}
    cuts[slots, small] = f"{slots} rows at a time, smaller batches"
    peers = [
        bench.trl(
            "ppo",
            f"PPOTrainer (1.10), {label}",
            models,
            data,
            bf16,
            batch=batch,
            accumulation=rows // batch,
            mini_batches=2,
            max_new_tokens=longest,
            steps=1,
            options={"local_rollout_forward_batch_size": forward},
        )
        for (forward, batch), label in cuts.items()
    ]
    words = f"mean {round(MEAN_SHARE * longest)} of {longest}" if lengths == "skewed" else f"all {longest}"
    return Case(
        what=f"PPO iteration, {scale.size}{', bf16' if bf16 else ''}: {rows} samples, {words} tokens, one epoch",
        unit="samples",
        units=rows,
        goal=5 if bench.cuda else goal,
        limit_goal=0.5 if bench.cuda else None,
        ours=[
            bench.program("lightrlhf.ppo", f"passes of {cut} rows", flags, bf16, 1, data, micro_batch_size=cut)
            for cut in sorted({max(small // 2, 1), small, rows // 2})
        ],
        peers=peers,
        unavailable=unavailable,
        floor={"kind": "ppo", "models": str(models), "data": str(data), "slots": rows}
        | {"mean_length": longest if lengths == "full" else MEAN_SHARE * longest, "optimizer_steps": 2}
        | {"bytes_per_number": 2 if bf16 else 4},
    )


def grpo(bench: Bench, scale: Scale, lengths: str, ratio: int, bf16: bool, goal: float) -> Case:
    """One update for each rollout, with a reward function and without a reference."""
    prompts, k, mean = scale.grpo_prompts, scale.samples, scale.grpo_tokens
    rows, longest = prompts * k, mean if lengths == "full" else round(mean / MEAN_SHARE)
    models, data = bench.models(scale, longest if lengths == "skewed" else None), bench.long_prompts(scale, ratio)
    flags = {
        "sft_experiment_dir": models / "policy",
        "reward_function": "benchmarks.inputs:even_words",
        "num_generations": k,
        "rollout_size": prompts,
        "rollout_mini_batch_size": rows,
        "mini_batch_size": rows,
        "max_new_tokens": longest,
        "learning_rate": LEARNING_RATE,
    }

    def peer(batch: int, cache: str, **options: Any) -> Side:
        cut = {"batch": batch, "accumulation": rows // batch, "samples": k, "options": options, "steps": 1}
        label = f"GRPOTrainer, passes of {batch} rows, {cache}"
        return bench.trl("grpo", label, models, data, bf16, max_new_tokens=longest, **cut)

    page = 32  # tokens; left to itself its cache fills most of the memory
    pages = {"page_size": page, "num_blocks": rows * math.ceil((max(scale.prompts_of(ratio)) + longest) / page)}
    continuous = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": pages | {"max_batch_tokens": 2 * rows},
    }

    words = f"all {longest}" if lengths == "full" else f"mean {mean} of {longest}"
    return Case(
        what=f"GRPO iteration, {scale.size}: {k} samples for each of {prompts} prompts, {words} tokens; "
        f"prompts of {ratio * mean}",
        unit="samples",
        units=rows,
        goal=goal,
        limit_goal=0.5 if bench.cuda else None,
        memory_goal=0.7,
        ours=[
            bench.program("lightrlhf.grpo", f"passes of {cut} rows", flags, bf16, 1, data, micro_batch_size=cut)
            for cut in sorted({bench.small_pass, k, 2 * k})
        ],
        peers=[
            peer(k // 2, "dynamic cache"),
            peer(k // 2, "static cache", cache_implementation="static"),
            peer(k // 4, "continuous batching", **continuous),
            peer(k, "continuous batching", **continuous),
        ],
        floor={"kind": "grpo", "model": str(models / "policy"), "data": str(data), "samples": k}
        | {"mean_length": mean, "bytes_per_number": 2 if bf16 else 4},
    )


def distill(bench: Bench, scale: Scale, lengths: str, bf16: bool) -> Case:
    """One update for each rollout, by the reverse KL of the whole vocabulary, which is the default of both."""
    longest, rows = scale.ppo_new_tokens, scale.rollout
    skewed = longest if lengths == "skewed" else None
    models, data, teacher = bench.models(scale, skewed), bench.subset(scale, rows), bench.teacher(scale, skewed)
    flags = {
        "sft_experiment_dir": models / "policy",
        "teacher": teacher,
        "rollout_size": rows,
        "rollout_mini_batch_size": rows,
        "mini_batch_size": rows,
        "max_new_tokens": longest,
        "learning_rate": LEARNING_RATE,
    }

    def peer(batch: int, cache: str, **options: Any) -> Side:
        cut = {"batch": batch, "accumulation": rows // batch, "options": options, "steps": 1}
        label = f"DistillationTrainer, passes of {batch} rows, {cache} cache"
        return bench.trl("distill", label, models, data, bf16, max_new_tokens=longest, **cut)

    words = f"mean {round(MEAN_SHARE * longest)} of {longest}" if skewed else f"all {longest}"
    return Case(
        what=f"Distillation iteration, {scale.size}: {rows} samples, {words} tokens; a teacher twice as wide and deep",
        unit="samples",
        units=rows,
        goal=1.5,
        memory_goal=1,
        ours=[
            bench.program("lightrlhf.distill", f"passes of {cut} rows", flags, bf16, 1, data, micro_batch_size=cut)
            for cut in sorted({bench.small_pass, min(4 * bench.small_pass, rows)})
        ],
        peers=[
            peer(rows // 8, "dynamic"),
            peer(rows // 2, "dynamic"),
            peer(rows // 8, "static", cache_implementation="static"),
        ],
    )


def memory(bench: Bench, scale: Scale) -> Case:
    """Both sides are ours: with LoRA the four roles share one backbone or have separate models."""
    reward = bench.folder / f"adapters-{scale.size}"

    def side(label: str, share_backbone: bool) -> Side:
        flags = {
            "model_name": bench.models(scale, None) / "policy",
            "rm_experiment_dir": reward,
            "finetune_mode": "lora",
            "share_backbone": share_backbone,
            "rollout_size": scale.rollout,
            "rollout_mini_batch_size": scale.slots,
            "mini_batch_size": scale.rollout,
            "micro_batch_size": max(scale.rollout // 4, 1),
            "max_new_tokens": scale.ppo_new_tokens,
        }
        return bench.program("lightrlhf.ppo", label, flags, False, 1, bench.data(scale))

    return Case(
        what=f"Peak memory of PPO, {scale.size}, LoRA: actor, critic, reference and reward model on one backbone",
        unit="bytes",
        goal=0.5,
        less_is_better=True,
        kind="memory",
        prepare=lambda: bench.train_adapters(scale, reward),
        ours=[side("one backbone", True)],
        peers=[side("four separate models (`--share_backbone False`)", False)],
    )


def start() -> Case:
    """The time until a program's help is printed."""
    command = [sys.executable, "-m", "lightrlhf.ppo", "--help"]
    return Case(
        what="Start: `python -m lightrlhf.ppo --help`",
        unit="s",
        goal=2.5,
        less_is_better=True,
        kind="start",
        ours=[Side("start", command, {})],
    )
