"""Correctness on the device: each program's tiny run beside the CPU's figures, and what only a GPU takes.

Figures are the rows of `metrics.jsonl` without times. In float32 all of them are compared. Lower precisions round a
response's noise to another token now and then, and all later figures follow the text, so there the first row alone is
compared: all of it in programs that train on given texts, and of those that sample what does not depend on the text.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from helpers import CAFE_SIZES, environment, rows_of, tiny_policy
from helpers.tiny_runs import ITERATED, PROGRAMS, SAMPLING, TinyRuns, experiment_of
from helpers.varlen import attend_alone
from torch import Tensor

from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.generation import engine, graphs
from lightrlhf.generation.engine import decode_all, generate, no_gradients
from lightrlhf.generation.scheduler import Scheduler
from lightrlhf.generation.slots import Slots
from lightrlhf.generation.tickets import Ask
from lightrlhf.models import varlen
from lightrlhf.models.loading import switch_off_dropout
from lightrlhf.models.probes import enable_packing
from lightrlhf.storage.checkpoint import checkpoints
from tests.gpu.setting import Figures, LeftOut, Row, Setting, needs

BOUNDS = {"32-true": 1e-4, "bf16-mixed": 0.05, "16-mixed": 0.02}  # of a figure, relative where it is above 1
STEPS = 4
# A division by the root of a second moment near 0 would turn rounding into steps of full size.
STABLE = ("--optimizer_eps", "1e-2", "--lr_warmup_steps", "0")
OF_THE_POLICY = ("policy/ratio", "policy/approxkl", "policy/clipfrac")  # do not depend on the sampled text
ARCHITECTURES = ("llama", "gpt2", "qwen2", "qwen3", "gemma2", "mistral")


# ------------------------------------------------------------------------------------------------------- tiny runs
def tiny_runs(at: Setting) -> TinyRuns:
    """Models and data of the tiny runs, made once."""
    from datasets_prep.cafe.prepare_data import main as cafe
    from datasets_prep.cafe_talk.prepare_data import main as talk
    from lightrlhf.models.tokenizer import load_tokenizer

    folder, cafe_data, talk_data = at.folder / "tiny", at.folder / "tiny" / "cafe", at.folder / "tiny" / "talk"
    if not cafe_data.is_dir():
        cafe.__wrapped__(["--destination_dir", str(cafe_data), *CAFE_SIZES])
        flags = ["--tokenizer_name", str(cafe_data / "tokenizer"), "--num_dialogues", "40", "--num_held_out", "8"]
        talk.__wrapped__(["--destination_dir", str(talk_data), *flags, "--num_proc", "1"])
    return TinyRuns(folder / "models", cafe_data, talk_data, load_tokenizer(cafe_data))


def flags_of(at: Setting, program: str, logs: Path, *more: str) -> list[str]:
    """The flags of a tiny run whose figures depend on rounding as little as can be."""
    dropout = [] if program in (*ITERATED, "reflect_rl") else ["--disable_dropout", "True"]
    return tiny_runs(at).flags(program, logs, *STABLE, *dropout, *more, steps=STEPS)


def run(at: Setting, name: str, program: str, *more: str) -> Path:
    """The experiment dir of a tiny run, which is done once."""
    logs = at.folder / "runs" / name
    if (logs / "done").exists():
        return experiment_of(logs)
    shutil.rmtree(logs, ignore_errors=True)
    importlib.import_module(f"lightrlhf.{program}").main.__wrapped__(flags_of(at, program, logs, *more))
    (logs / "done").touch()
    return experiment_of(logs)


def figures(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics, without times and what exists on a GPU alone."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("time/", "memory/", "train/loss_scale", "train/skipped_steps")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows]


def without_signs(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows without shares of margins above 0, which are 0 before the first step but for rounding."""
    return [{name: row[name] for name in row if not name.endswith(("accuracies", "sign_align"))} for row in rows]


def compared(found: list[dict[str, float]], expected: list[dict[str, float]], bound: float) -> Figures:
    """The largest difference of two runs' figures. Raises: AssertionError where it is above the bound."""
    assert len(found) == len(expected), f"{len(found)} rows of metrics, not {len(expected)}"
    largest, where = 0.0, ""
    for one, other in zip(found, expected):
        assert one.keys() == other.keys(), f"metrics differ: {sorted(one.keys() ^ other.keys())}"
        for name in one:
            off = abs(one[name] - other[name]) / max(1.0, abs(other[name]))
            if not off <= largest:  # NaN counts as above
                largest, where = off, f"{name} of step {one['step']}: {one[name]:.6g}, not {other[name]:.6g}"
    shown = f"largest difference {largest:.2g}, bound {bound:g}"
    assert largest <= bound, f"{shown}; {where}"
    return {"difference": largest, "bound": bound, "shown": shown}


def on_the_cpu(at: Setting, program: str, *more: str) -> list[dict[str, float]]:
    """The figures of a program's tiny run on the CPU in float32."""
    name = "-".join(("cpu", program, *more)).replace("--", "")
    return figures(run(at, name, program, *more))


def train(program: str, precision: str) -> Any:
    def row(at: Setting) -> Figures:
        chosen = at.half if precision == "16-mixed" else precision
        flags = [*at.where(), "--precision", chosen]
        found = figures(run(at, f"{at.device}-{program}-{precision}", program, *flags))
        expected = on_the_cpu(at, program)
        found, expected = (without_signs(rows) for rows in (found, expected))
        if precision != "32-true":
            names = set(expected[0]) & set(found[0])  # the norm of a step whose loss scale overflowed is left out
            names &= {"step", *OF_THE_POLICY} if program in SAMPLING else names
            found, expected = ([{name: rows[0][name] for name in names}] for rows in (found, expected))
        return compared(found, expected, BOUNDS[chosen])

    return row


def lora(program: str) -> Any:
    def row(at: Setting) -> Figures:
        flags = ["--finetune_mode", "lora"]
        found = figures(run(at, f"{at.device}-{program}-lora", program, *flags, *at.where()))
        return compared(found, on_the_cpu(at, program, *flags), BOUNDS["32-true"])

    return row


def resume(program: str) -> Any:
    """Figures and weights of a run that is killed after its second step and resumed: those of one that is not."""

    def row(at: Setting) -> Figures:
        whole = run(at, f"{at.device}-{program}-32-true", program, *at.where(), "--precision", "32-true")
        logs = at.folder / "runs" / f"{at.device}-{program}-killed"
        shutil.rmtree(logs, ignore_errors=True)
        flags = flags_of(at, program, logs, *at.where())
        command = [sys.executable, "-m", "helpers.killed", str(logs), "**/checkpoint-000002/resume.pt", "-1", "0"]
        here = {"PYTHONPATH": os.pathsep.join(sys.path)}  # with what `run.sh` has unpacked
        call = [f"lightrlhf.{program}", flags]
        on_second = ["helpers.on_second", json.dumps({"calls": {program: call}})]
        command += on_second if at.device == "second" else [call[0], *flags]
        done = subprocess.run(command, env=environment() | here, capture_output=True, text=True)
        assert done.returncode == -9, f"the run ended with status {done.returncode}: {done.stderr[-300:]}"
        killed = experiment_of(logs)
        before = int(checkpoints(killed)[-1].name.rpartition("-")[2])
        importlib.import_module(f"lightrlhf.{program}").main.__wrapped__(["--resume_from", str(killed), *flags])
        result = compared(figures(killed), figures(whole), BOUNDS["32-true"])
        ours, theirs = (weights(checkpoints(folder)[-1]) for folder in (killed, whole))
        same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
        result["bitwise"] = same
        result["shown"] += f", weights {'equal bit by bit' if same else 'not equal bit by bit'}, from step {before}"
        return result

    return row


def weights(checkpoint: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


# ---------------------------------------------------------------------------------------------- what a GPU alone takes
def on_device(at: Setting, architecture: str = "llama", **changes: Any) -> Any:
    """A tiny policy on the device, and the prompts to answer."""
    return tiny_policy(architecture, **changes).to(at.device), rows_of(5, 1, 12, 3, 8, 2, 7, 7, 4, 6, 11, 3, 9, 5, 2)


def captured(at: Setting) -> Figures:
    """Captured decoding steps beside plain ones, and the log-probabilities of both beside those of a pass."""
    args = DecodingArgs(max_new_tokens=48, temperature=1.3)
    counts = {}
    for architecture in ("llama", "qwen2", "gpt2"):
        policy, prompts = on_device(at, architecture)
        uniforms = torch.rand(len(prompts), 48, generator=torch.Generator().manual_seed(0))
        made = {}
        for kind in (Slots, graphs.BucketedSlots):
            with no_gradients(policy.model):
                made[kind] = decode_all(kind(policy.model, prompts, args, [2, 9], uniforms, 6), None)
        plain, fast = made[Slots], made[graphs.BucketedSlots]
        assert torch.equal(plain.tokens[:-1], fast.tokens[:-1]), f"{architecture}: other tokens"
        torch.testing.assert_close(fast.logprobs[:-1], plain.logprobs[:-1], atol=1e-4, rtol=1e-4)
        counts[architecture] = len(fast.graphs)
        assert not at.is_cuda or fast.captures and fast.graphs, f"{architecture}: no step was captured"
        completions = engine.completions_of(fast, [2, 9], None)
        check_logprobs(at, policy, prompts, completions, args.temperature)
    return {"graphs": counts, "shown": "graphs " + ", ".join(f"{name} {count}" for name, count in counts.items())}


def captured_open_batch(at: Setting) -> Figures:
    """The captured steps of a server's batch: each row is what it would be alone."""
    args, counts = DecodingArgs(max_new_tokens=48, temperature=1.3), {}
    for architecture in ("llama", "qwen2", "gpt2"):
        policy, prompts = on_device(at, architecture)
        uniforms = torch.rand(len(prompts), 48, generator=torch.Generator().manual_seed(0))
        scheduler, found = Scheduler(None, 6, 2**22), {}
        for number, (prompt, noise) in enumerate(zip(prompts, uniforms)):
            row = found.setdefault(number, [])
            emit = lambda part, row=row: row.extend(part if isinstance(part, list) else [part])  # tokens or a failure
            scheduler.submit(lambda policy=policy: policy, "weights", [Ask(prompt, args, [2, 9], noise, None)], emit)
        while any(not row or getattr(row[-1], "finish", "failed") is None for row in found.values()):
            time.sleep(0.01)
        scheduler.close()
        responses = [[token.token for token in found[number]] for number in range(len(prompts))]
        alone = generate(policy, prompts, args, [2, 9], uniforms, 6)
        assert responses == alone.responses, f"{architecture}: other tokens"
        (runner,) = scheduler.memory.runners.values()
        assert not at.is_cuda or runner.captures and runner.graphs, f"{architecture}: no step was captured"
        counts[architecture] = len(getattr(runner, "graphs", ()))
    return {"graphs": counts, "shown": "graphs " + ", ".join(f"{name} {count}" for name, count in counts.items())}


def check_logprobs(at: Setting, policy: Any, prompts: Any, completions: Any, temperature: float) -> None:
    """Compare the log-probabilities that came with responses with those of a pass. Raises: AssertionError."""
    batch = response_batch(prompts, completions.responses, 0).to(torch.device(at.device))
    with torch.no_grad():
        passed = policy(batch.input_ids, batch.attention_mask, batch.action_mask, temperature).logprobs  # (B, T-1)
    sampled = torch.cat([torch.tensor(row) for row in completions.logprobs])
    torch.testing.assert_close(passed[batch.action_mask].cpu(), sampled, atol=2e-4, rtol=2e-4)


def noise(at: Setting) -> Figures:
    """The same noise gives the same responses on both devices, up to draws that lie on the border of two tokens."""
    args, same = DecodingArgs(max_new_tokens=32), []
    for architecture in ("llama", "qwen2"):
        policy, prompts = on_device(at, architecture)
        uniforms = torch.rand(len(prompts), 32, generator=torch.Generator().manual_seed(1))
        found = generate(policy, prompts, args, [2], uniforms, 6).responses
        expected = generate(policy.to("cpu"), prompts, args, [2], uniforms, 6).responses
        same += [one == other for one, other in zip(found, expected)]
    share = sum(same) / len(same)
    assert share >= 0.9, f"{share:.0%} of the responses are the same"
    return {"same": share, "shown": f"{sum(same)} of {len(same)} responses are the same"}


def packed(at: Setting) -> Figures:
    """Packed passes beside padded ones: log-probabilities and the gradient, of each architecture that packs."""
    largest, packs = 0.0, []
    for architecture in ARCHITECTURES:
        policy = tiny_policy(architecture).to(at.device)
        enable_packing(policy)
        if not policy.packs:
            continue
        packs.append(architecture)
        prompts, responses = [[5, 6, 7, 8]] * 3 + [[9, 10]] * 3, rows_of(3, 5, 2, 6, 1, 4)
        batch = response_batch(prompts, responses, 0).to(torch.device(at.device))
        group = torch.tensor([0, 0, 0, 1, 1, 1], device=at.device)
        found = []
        for policy.packs in (False, True):
            policy.zero_grad()
            logprobs = policy(batch.input_ids, batch.attention_mask, batch.action_mask, group=group).logprobs
            logprobs[batch.action_mask].sum().backward()
            grad = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
            found.append((logprobs.detach(), grad))
        (logprobs, grad), (other, other_grad) = found
        off = float((other - logprobs).abs().max()), float((other_grad - grad).norm() / grad.norm())
        assert max(off) <= 1e-4, f"{architecture}: log-probabilities differ by {off[0]:.2g}, gradients by {off[1]:.2g}"
        largest = max(largest, *off)
    assert "llama" in packs, f"only {packs} pack"
    return {"packs": packs, "difference": largest, "shown": f"{', '.join(packs)}; largest difference {largest:.2g}"}


def texts_in_a_row(at: Setting) -> Figures:
    """Texts that follow one another in a row in bfloat16: log-probabilities and the gradient are no farther from those
    of float32 than twice what padded texts are.

    A Llama with Qwen2.5-0.5B's heads, and every other architecture that takes such a row.
    """
    wide = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 512}
    lengths = (3, 9, 1, 17, 4) if at.is_tiny else (30, 211, 1, 200, 77, 128)
    most: dict[str, float] = {}
    with row_of_texts(at):
        for architecture in ARCHITECTURES:
            policy = tiny_policy(architecture, **wide if architecture == "llama" else {})
            switch_off_dropout(policy.model)
            enable_packing(policy)
            policy.to(at.device)
            counts = lengths if architecture == "llama" else [min(length, 60) for length in lengths]
            batch = response_batch(rows_of(*counts), rows_of(*reversed(counts)), 0).to(torch.device(at.device))
            rounded = passed(at, policy, batch)
            if not policy.attends_by_text:
                continue
            policy.packs = False
            padded, exact = passed(at, policy, batch), passed(at, policy, batch, is_rounded=False)
            off = [float((one - right).norm() / right.norm()) for one, right in zip(rounded, exact)]
            allowed = [2 * float((one - right).norm() / right.norm()) for one, right in zip(padded, exact)]
            assert all(one <= most for one, most in zip(off, allowed)), f"{architecture}: {off} above {allowed}"
            most[architecture] = max(off)
    assert "llama" in most, f"only {[*most]} take a row of texts"
    return {"off": most, "shown": f"{', '.join(most)}; {max(most.values()):.2g} from float32"}


def passed(at: Setting, policy: Any, batch: Any, is_rounded: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a batch in bfloat16 or float32, and the gradient of their mean."""
    policy.zero_grad()
    with torch.autocast(at.device, torch.bfloat16, enabled=is_rounded):
        logprobs = policy(batch.input_ids, batch.attention_mask, batch.action_mask).logprobs[batch.action_mask]
    logprobs.mean().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@contextmanager
def row_of_texts(at: Setting) -> Iterator[None]:
    """Context manager: on a CPU a stand-in takes the place of CUDA's kernel."""
    before = varlen.DEVICES, varlen.kernel
    if not at.is_cuda:
        varlen.DEVICES, varlen.kernel = {at.device}, lambda: attend_alone
    try:
        yield
    finally:
        varlen.DEVICES, varlen.kernel = before


def flash(at: Setting) -> Figures:
    """Flash attention beside sdpa, in bfloat16."""
    needs("flash_attn")
    policy, prompts = on_device(at, "llama", hidden_size=128, num_attention_heads=4)
    batch = response_batch(prompts, rows_of(*range(1, len(prompts) + 1)), 0).to(torch.device(at.device))
    found = []
    for attention in ("sdpa", "flash_attention_2"):
        policy.model.set_attn_implementation(attention)
        with torch.no_grad(), torch.autocast(at.device, torch.bfloat16):
            found.append(policy(batch.input_ids, batch.attention_mask, batch.action_mask).logprobs)
    off = float((found[0] - found[1]).abs().max())
    assert off <= 0.1, f"log-probabilities differ by {off:.2g}"
    return {"difference": off, "shown": f"largest difference {off:.2g}, bound 0.1"}


def four_bit(at: Setting) -> Figures:
    """LoRA on weights of 4 bits: the first loss is near the one of the weights before rounding."""
    needs("bitsandbytes")
    if at.device == "second":
        raise LeftOut("bitsandbytes has kernels of CUDA and of the CPU")
    from helpers import save_model

    from lightrlhf.models.tokenizer import load_tokenizer

    runs = tiny_runs(at)
    tokenizer, folder = load_tokenizer(runs.cafe), at.folder / "wide"
    if not (folder / "model.safetensors").exists():
        save_model("llama", folder, tokenizer, hidden_size=64, intermediate_size=128, num_attention_heads=4)
        tokenizer.save_pretrained(folder)
    losses = {}
    for bits in ("False", "True"):
        flags = ["--model_name", str(folder), "--load_in_4bit", bits, "--finetune_mode", "lora", *at.where()]
        rows = figures(run(at, f"{at.device}-4bit-{bits}", "sft", *flags))
        losses[bits] = [row["train/loss"] for row in rows if "train/loss" in row]
    off = abs(losses["True"][0] / losses["False"][0] - 1)
    assert off <= 0.1, f"the first loss is off by {off:.1%}"
    return {"losses": losses["True"], "shown": f"the first loss is off by {off:.1%}, bound 10%"}


def devices(at: Setting) -> Figures:
    """What torch sees."""
    if not at.is_cuda:
        return {"shown": f"{at.device}, for tests: nothing is measured"}
    card = torch.cuda.get_device_properties(0)
    bits = {"bf16": torch.cuda.is_bf16_supported(), "capability": f"{card.major}.{card.minor}"}
    memory = round(card.total_memory / 2**30, 1)
    return {"name": card.name, "memory": memory, **bits, "shown": f"{card.name}, {memory} GiB, {bits['capability']}"}


ROWS = {"device": Row("correctness", devices, 5)}
ROWS |= {f"train {program} 32-true": Row("correctness", train(program, "32-true")) for program in PROGRAMS}
ROWS |= {"captured open batch": Row("correctness", captured_open_batch)}
ROWS |= {"captured steps": Row("correctness", captured), "noise": Row("correctness", noise)}
ROWS |= {"packed passes": Row("correctness", packed), "texts in a row": Row("correctness", texts_in_a_row)}
ROWS |= {"flash attention": Row("correctness", flash)}
ROWS |= {f"resume {program}": Row("correctness", resume(program)) for program in ("sft", "ppo")}
ROWS |= {f"lora {program}": Row("correctness", lora(program)) for program in ("sft", "ppo", "grpo")}
ROWS |= {"4-bit": Row("correctness", four_bit)}
ROWS |= {
    f"train {program} {precision}": Row("correctness", train(program, precision))
    for precision in ("bf16-mixed", "16-mixed")
    for program in PROGRAMS
}
