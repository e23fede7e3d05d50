"""Speed on the device, shortest rows first: decoding, then training steps, with their shares of the card's own rates.

The card's rates are measured first: operations a second of a bfloat16 matrix product, bytes a second of a copy. A share
is the least time at these rates over the time taken; the model-FLOPs utilisation (MFU) is the operations of the forward
and the backward pass alone over what the product's rate would do in that time. Weights are random, in float32 under
`--precision bf16-mixed`. Runs end by an exception after their last step: nothing is saved.
"""

import functools
import hashlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.inputs import even_lengths
from lightrlhf import dpo, grpo, ppo, rm, sft
from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.generation import graphs
from lightrlhf.generation.engine import generate
from lightrlhf.models import roles
from lightrlhf.models.roles import Policy
from lightrlhf.training import start
from lightrlhf.training.roofline import Ceilings, Shape, backward, best_time, forward, measure_ceilings, shared_lengths
from lightrlhf.training.roofline import generate as generate_work
from tests.gpu.setting import Figures, LeftOut, Row, Setting, free, model, needs, needs_memory, tokenizer

PROGRAMS = {"sft": (sft.train, sft.SFTArgs), "rm": (rm.train, rm.RMArgs), "dpo": (dpo.train, dpo.DPOArgs)}
PROGRAMS |= {"grpo": (grpo.train, grpo.GRPOArgs), "ppo": (ppo.train, ppo.PPOArgs)}
HASH = "hash_weights"  # of `models/saving.py`, which other modules import
STEPS = 5  # of a run, of which the first two are a warm-up


class Measured(Exception):
    """Ends a run that has done its steps, before it saves."""


@functools.cache
def ceilings(device: str) -> Ceilings:
    """The rates of the device in bfloat16."""
    return measure_ceilings(torch.device(device), torch.bfloat16, megabytes=2048 if device == "cuda" else 256)


def rates(at: Setting) -> Figures:
    """Operations and bytes a second, as products and copies reach them."""
    found = ceilings(at.device)
    shown = f"{found.flops / 1e12:,.1f} TFLOP/s in bfloat16, {found.bandwidth / 1e9:,.0f} GB/s"
    return {"flops": found.flops, "bandwidth": found.bandwidth, "shown": shown}


# --------------------------------------------------------------------------------------------------------- decoding
def decode(size: str, way: str) -> Callable[[Setting], Figures]:
    """New tokens a second of 64 rows at once: by captured steps, plain ones, or `generate` of transformers."""

    def row(at: Setting) -> Figures:
        rows, length, new = (4, 8, 8) if at.is_tiny else (64, 64, 128)
        policy = Policy(model(at, size)).eval()
        shape, vocabulary = Shape.of(policy.model), policy.model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(2, vocabulary, (rows, length), generator=generator)
        before = set(graphs.DEVICES)
        graphs.DEVICES.clear()
        if way == "captured":
            graphs.DEVICES.add(at.device)  # on a CPU the same steps without a capture
        try:
            if way == "generate":
                policy.model.to(torch.bfloat16)
                work = functools.partial(by_transformers, policy.model, prompts.to(at.device), new)
            else:
                uniforms = torch.rand(rows, new, generator=generator)
                args = DecodingArgs(max_new_tokens=new)
                work = functools.partial(by_engine, at, policy, prompts.tolist(), args, uniforms)
            seconds = best_time(work, torch.device(at.device), 1 if at.is_tiny else 2)
            assert way != "captured" or at.device in graphs.DEVICES, "a capture failed: see the log"
        finally:
            graphs.DEVICES.clear()
            graphs.DEVICES.update(before)
        floor = ceilings(at.device).seconds(generate_work(shape, [length] * rows, [new] * rows, rows, 2))
        speed, share = rows * new / seconds, floor / seconds
        shown = f"{speed:,.0f} tokens/s, {share:.0%} of the limit"
        return {"tokens_per_second": speed, "limit_share": share, "seconds": seconds, "shown": shown}

    return row


def by_engine(at: Setting, policy: Policy, prompts: Any, args: Any, uniforms: Any) -> None:
    with torch.autocast(at.device, torch.bfloat16):
        generate(policy, prompts, args, [], uniforms, len(prompts))


@torch.no_grad()
def by_transformers(whole: Any, prompts: Any, new: int) -> None:
    mask, options = torch.ones_like(prompts), {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    whole.generate(prompts, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, **options)


# --------------------------------------------------------------------------------------------------- training steps
def train(at: Setting, program: str, whole: Any, rows: list[dict[str, Any]], **flags: Any) -> list[dict[str, float]]:
    """The metrics of the steps of a run, without the warm-up's."""
    logged: list[dict[str, float]] = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if any(name.startswith("time/") and name != "time/logging" for name in metrics):
            logged.append(metrics)
        if len(logged) == STEPS:
            raise Measured

    function, kind = PROGRAMS[program]
    given = "prompts" if program in ("grpo", "ppo") else "rows"
    options: dict[str, Any] = {given: rows, "on_step": on_step}
    if given == "prompts":
        options["reward"] = letters
        flags = {"rollout_mini_batch_size": 64, **flags}
    common = {"accelerator": at.device, "precision": "bf16-mixed", "log_interval": 1, "eval_interval": 0}
    common |= {"log_dir": str(at.folder / "logs"), "logger": "csv", "max_steps": STEPS + 1, "lr_warmup_steps": 0}
    hashing = [
        module for name, module in sys.modules.items() if name.startswith("lightrlhf.") and hasattr(module, HASH)
    ]
    before = getattr(hashing[0], HASH)
    for module in hashing:
        setattr(module, HASH, lambda model, digest=None: digest or hashlib.sha256())  # of 15 GB it takes half a minute
    try:
        function(kind(**common, **flags), policy=whole, tokenizer=tokenizer(whole.config.vocab_size), **options)
    except Measured:
        return logged[2:]
    finally:
        for module in hashing:
            setattr(module, HASH, before)
    raise AssertionError(f"the run logged {len(logged)} steps of {STEPS}")


def letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that takes no time."""
    return [float(len(text) % 7) for text in completions]


def texts(vocabulary: int, count: int, mean: int) -> list[dict[str, Any]]:
    """Demonstrations of log-normal lengths, as real ones roughly have."""
    generator, found = torch.Generator().manual_seed(1), []
    for length in even_lengths(count, mean):
        ids = torch.randint(2, vocabulary, (max(length, 4),), generator=generator)
        found.append({"prompt_len": 2, "input_ids": ids, "targets": ids.clone()})
    return found


def pairs(vocabulary: int, count: int, mean: int) -> list[dict[str, Any]]:
    """Pairs whose prompt is half of a text."""
    generator, found = torch.Generator().manual_seed(1), []
    for length in even_lengths(count, mean):
        sides = [torch.randint(2, vocabulary, (max(length, 4),), generator=generator) for _ in range(2)]
        prompt = len(sides[0]) // 2
        sides[1][:prompt] = sides[0][:prompt]
        row = {"prompt_len": prompt, "chosen_input_ids": sides[0], "rejected_input_ids": sides[1], "columns": {}}
        found.append(row)
    return found


def prompts(vocabulary: int, count: int, length: int) -> list[dict[str, Any]]:
    ids = torch.randint(2, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"prompt_len": length, "input_ids": row, "columns": {}} for row in ids]


def supervised(program: str, size: str, way: str = "packed") -> Callable[[Setting], Figures]:
    """Tokens a second and MFU of SFT's or DPO's steps, with texts laid out in a `way` of `layout`."""

    def row(at: Setting) -> Figures:
        needs_memory(at, {"0.5B": 14, "1B": 30}[size])
        count, mean = (4, 12) if at.is_tiny else (32 if program == "sft" else 16, 384)
        whole = model(at, size)
        make = texts if program == "sft" else pairs
        rows = make(whole.config.vocab_size, count, mean)
        micro = 2 if at.is_tiny else pass_rows(at, size, count)
        with layout(way):
            steps = train(at, program, whole, rows, mini_batch_size=count, micro_batch_size=micro)
        keys = [key for key in rows[0] if key.endswith("input_ids")]
        lengths = [len(one[key]) for one in rows for key in keys]
        logits = sum(len(one[key]) - one["prompt_len"] for one in rows for key in keys)
        return of_steps(at, whole, steps, lengths, logits, shared_lengths(rows)) | {"micro_batch_size": micro}

    return row


def pass_rows(at: Setting, size: str, most: int) -> int:
    """Rows of a pass, in powers of two by the card's memory: short passes leave a large card waiting for the host."""
    rows, needed = {"0.5B": (8, 14), "1B": (4, 30)}[size]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if at.is_cuda else needed
    while needed * 2 <= memory and rows < most:
        rows, needed = rows * 2, needed * 2
    return rows


@contextmanager
def layout(way: str) -> Iterator[None]:
    """Context manager: packed, as the library chooses; padded, every text has a row of its own; by text, a prefix that
    texts share is computed for each."""
    before = start.enable_packing, roles.packed_texts

    def by_text(model: Any, ids: Any, mask: Any, group: Any, takes_texts: bool) -> Any:
        return before[1](model, ids, mask, None, takes_texts)

    if way == "padded":
        start.enable_packing = lambda role: None
    if way == "by text":
        roles.packed_texts = by_text
    try:
        yield
    finally:
        start.enable_packing, roles.packed_texts = before


def of_steps(
    at: Setting, whole: Any, steps: list[dict[str, float]], lengths: list[int], logits: int, shared: Any
) -> Figures:
    """Median tokens a second of updates, and their MFU."""
    shape = Shape.of(whole)
    seconds = statistics.median(step["time/update"] for step in steps)
    flops = sum(work(shape, lengths, logits).flops - work(shape, shared, 0).flops for work in (forward, backward))
    mfu, speed = flops / seconds / ceilings(at.device).flops, sum(lengths) / seconds
    shown = f"{speed:,.0f} tokens/s, MFU {mfu:.0%}, {seconds:.3f} s a step"
    return {"tokens_per_second": speed, "mfu": mfu, "update_seconds": seconds, "shown": shown}


def rollouts(program: str, size: str, way: str = "packed", **flags: Any) -> Callable[[Setting], Figures]:
    """Seconds of the phases of GRPO's or PPO's steps, 64 responses each."""

    def row(at: Setting) -> Figures:
        needs_memory(at, {"0.5B": 14, "1B": 30}[size])
        whole = model(at, size)
        groups, length, new = (2, 6, 6) if at.is_tiny else (8, 128, 128)
        of_program = {"max_new_tokens": new, "micro_batch_size": 2 if at.is_tiny else 8}
        if program == "grpo":
            of_program |= {"rollout_size": groups, "num_generations": 8, "mini_batch_size": groups * 8}
        else:
            of_program |= {"rollout_size": groups * 8, "mini_batch_size": groups * 8}
        number = groups * (8 if program == "ppo" else 1)
        given = prompts(whole.config.vocab_size, number, length)
        with layout(way):
            steps = train(at, program, whole, given, **of_program, **flags)
        medians = {name: statistics.median(one[f"time/{name}"] for one in steps) for name in ("rollout", "update")}
        whole_step = sum(medians.values())
        speed = groups * 8 * new / whole_step
        shown = f"rollout {medians['rollout']:.2f} s, update {medians['update']:.2f} s, {speed:,.0f} new tokens/s"
        return {**medians, "tokens_per_second": speed, "shown": shown}

    return row


# -------------------------------------------------------------------------------------------------------- attention
def attention(at: Setting) -> Figures:
    """Forward and backward attention of 0.5B's heads over texts of log-normal lengths, in bfloat16.

    padded: a causal kernel over padded rows; dense: packed into rows of the longest text's length with a mask, as the
    library packs; varlen: the kernel of torch that takes packed texts without a mask, where there is one.
    """
    lengths = even_lengths(*((4, 12) if at.is_tiny else (32, 384)))
    heads, size, longest = (2, 16, max(lengths)) if at.is_tiny else (14, 64, max(lengths))
    bins = first_fit(lengths, longest)
    padded = [torch.randn(len(lengths), heads, longest, size) for _ in range(3)]
    dense = [torch.randn(len(bins), heads, longest, size) for _ in range(3)]
    text = torch.full((len(bins), longest), -1)
    for row, bin_ in enumerate(bins):
        for number, (first, end) in enumerate(bin_):
            text[row, first:end] = number
    visible = ((text[:, None] == text[:, :, None]).tril() | torch.eye(longest, dtype=torch.bool)).to(at.device)
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16, device=at.device).masked_fill(~visible, -3e38)[:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ways = {
        "padded": (lambda q, k, v: sdpa(q, k, v, is_causal=True), padded),
        "dense": (lambda q, k, v: sdpa(q, k, v, attn_mask=mask), dense),
    }
    problem = ""
    try:
        ways["varlen"] = varlen(at, lengths), [torch.randn(sum(lengths), heads, size) for _ in range(3)]
    except (ImportError, LeftOut) as missing:
        problem = f"; varlen left out: {missing}"
    found = {}
    for name, (function, tensors) in ways.items():
        inputs = [tensor.to(at.device, torch.bfloat16).requires_grad_(True) for tensor in tensors]
        try:
            found[name] = best_time(functools.partial(back_and_forth, function, inputs), torch.device(at.device), 5)
        except (RuntimeError, TypeError) as refused:  # a kernel that this card or release of torch has not
            problem += f"; {name} failed: {str(refused).splitlines()[0][:100]}"
    shown = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found.items()) + problem
    return {**found, "texts": len(lengths), "shown": shown}


def back_and_forth(function: Callable[..., Any], inputs: list[Any]) -> None:
    function(*inputs).sum().backward()


def first_fit(lengths: list[int], width: int) -> list[list[tuple[int, int]]]:
    """Texts in rows of this width: the columns of each text of each row, longest texts first."""
    bins: list[list[tuple[int, int]]] = []
    for length in sorted(lengths, reverse=True):
        place = next((one for one in bins if one[-1][1] + length <= width), None)
        if place is None:
            bins.append([(0, length)])
        else:
            place.append((place[-1][1], place[-1][1] + length))
    return bins


def varlen(at: Setting, lengths: list[int]) -> Callable[..., Any]:
    """Causal attention of packed texts. Raises: ImportError, or LeftOut where the device has no such kernel."""
    from torch.nn.attention.varlen import varlen_attn

    if not at.is_cuda:
        raise LeftOut("it is a kernel of CUDA")
    ends = torch.tensor([0, *lengths], device=at.device).cumsum(0).int()
    is_causal = {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {}
    causal = is_causal or {"window_size": (-1, 0)}
    return lambda q, k, v: varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), **causal)


# ------------------------------------------------------------------------------------------------------------- peers
def beside(peer: str, name: str) -> Callable[[Setting], Figures]:
    """A row of `benchmarks.run` in this environment: ours over the peer's, both sides in turns."""

    def row(at: Setting) -> Figures:
        needs(peer)
        import os
        from dataclasses import replace

        from benchmarks.cases import Bench, all_cases
        from benchmarks.run import compare

        if not at.is_cuda:
            raise LeftOut("its settings are those of CUDA")
        free()
        bench = Bench(Path(at.folder, "bench"), "gpu", quick=False)
        case = all_cases(bench, None)[name]()
        others = [replace(side, command=[sys.executable, *side.command[1:]]) for side in case.peers[:2]]
        case = replace(case, ours=case.ours[-1:], peers=others, together=False)
        result = compare(case, at.folder, os.cpu_count() or 1, 3)
        if "ratio" not in result:
            raise LeftOut(json.dumps(result.get("not_measured", "no ratio")))
        ratio = result["ratio"]
        shown = f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}] of {peer}"
        return {"ratio": ratio, "versions": result["versions"], "shown": shown}

    return row


def freed(row: Callable[[Setting], Figures]) -> Callable[[Setting], Figures]:
    """The row, after which the device's memory is free again."""

    def run(at: Setting) -> Figures:
        free()
        started = time.perf_counter()
        try:
            return row(at) | {"row_seconds": round(time.perf_counter() - started, 1)}
        finally:
            free()

    return run


ROWS = {"rates": rates, "attention": attention}
ROWS |= {f"decode 0.5B {way}": decode("0.5B", way) for way in ("captured", "plain", "generate")}
for way in ("packed", "padded", "by text"):  # texts of SFT share no prefix
    named = "" if way == "packed" else f", {way}"
    ROWS |= {f"sft 0.5B{named}": supervised("sft", "0.5B", way)} if way != "by text" else {}
    ROWS |= {f"dpo 0.5B{named}": supervised("dpo", "0.5B", way), f"grpo 0.5B{named}": rollouts("grpo", "0.5B", way)}
ROWS |= {"ppo 0.5B, LoRA": rollouts("ppo", "0.5B", finetune_mode="lora")}
ROWS |= {f"decode 1B {way}": decode("1B", way) for way in ("captured", "plain", "generate")}
ROWS |= {"sft 1B": supervised("sft", "1B"), "dpo 1B": supervised("dpo", "1B"), "grpo 1B": rollouts("grpo", "1B")}
ROWS |= {"ppo 1B, LoRA": rollouts("ppo", "1B", finetune_mode="lora")}
LATE = {"beside vLLM, 1B": beside("vllm", "vllm-equal-1B-bf16"), "beside TRL, 1B": beside("trl", "sft-1B")}
ROWS = {name: Row("speed", freed(row)) for name, row in ROWS.items()}
LATE = {name: Row("speed", freed(row), 90) for name, row in LATE.items()}
