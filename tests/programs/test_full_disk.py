"""A full, read-only, over-quota or broken disk, at every kind of write of every program.

A preloaded C library fails the nth call that changes a folder (helpers/faulty_disk.py), so the writers in Rust and C++
meet it, too. A run without a fault lists its calls; each kind of call on each kind of file (numbers left out) is failed
in the first program that has it, once by each errno.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import CAFE_SIZES, CPU, environment, unmarked
from helpers.faulty_disk import ERRNOS, WarmProcess

from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import write_jsonl

EVENTS = 68
RESUMED = 12  # every so many cases are gone on with, once the fault is gone, and compared bit by bit
DEVICE = ["--accelerator", "cpu"]
STEPS = ["--max_steps", "2", "--log_interval", "1", "--save_interval", "1", "--lr_warmup_steps", "0", "--seed", "3"]
SMALL = ["--rollout_size", "4", "--rollout_mini_batch_size", "4", "--mini_batch_size", "4", "--micro_batch_size", "4"]

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads a library, as Linux does"),
    pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="no C compiler on this machine"),
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    process = WarmProcess(tmp_path_factory.mktemp("warm"), environment())
    yield process
    process.close()


@pytest.fixture(scope="module")
def commands(tmp_path_factory, cafe_data, base_model, sft_dir, rm_dir, tokenizer):
    """Commands by name; `{out}` is the folder that may fail, made anew for each case from what `start` copies there."""
    given = tmp_path_factory.mktemp("given")
    rows = [{"prompt": f"Guest: a tea, {name}!\n", "responses": [" Sure.", " No, no."]} for name in "abcd"]
    for side in "ab":
        write_jsonl(given / f"{side}.jsonl", [{**row, "response": row["responses"][side == "a"]} for row in rows])
    write_jsonl(given / "texts.jsonl", [{"prompt": f"one {n}", "completion": f"two {n} three"} for n in range(60)])
    data, logs = ["--data_dir", cafe_data], ["--log_dir", "{out}/logs"]
    trained = [*data, *logs, *CPU, *STEPS]
    responses = ["--responses_file", given / "a.jsonl"]
    prepared = ["--destination_dir", "{out}/data", "--num_proc", "1"]
    return {
        "sft": ("lightrlhf.sft", [*trained, "--model_name", base_model, "--eval_interval", "1", "--eval_iters", "1"]),
        "dpo": (
            "lightrlhf.dpo",
            [*trained, "--sft_experiment_dir", sft_dir, "--finetune_mode", "lora", "--logger", "csv"]
            + ["--keep_best", "val/loss", "--eval_interval", "1", "--eval_iters", "1"],
        ),
        "rm": ("lightrlhf.rm", [*trained, "--sft_experiment_dir", sft_dir, "--keep_last", "1"]),
        "ppo": (
            "lightrlhf.ppo",
            [*trained, "--sft_experiment_dir", sft_dir, "--rm_experiment_dir", rm_dir, *SMALL]
            + ["--max_new_tokens", "4", "--profile", "True"],
        ),
        "grpo": (
            "lightrlhf.grpo",
            [*trained, "--sft_experiment_dir", sft_dir, "--reward_function", "helpers.rewards:length", *SMALL]
            + ["--rollout_size", "2", "--num_generations", "2", "--resample_rounds", "1", "--max_new_tokens", "4"],
        ),
        "online_dpo": (
            "lightrlhf.online_dpo",
            [*data, *logs, *CPU, "--sft_experiment_dir", sft_dir, "--reward_function", "helpers.rewards:length"]
            + ["--iterations", "1", "--prompts_per_iteration", "8", "--num_generations", "2", "--max_new_tokens", "4"]
            + ["--eval_prompts", "2", "--mini_batch_size", "4", "--micro_batch_size", "4"],
        ),
        "generate": (
            "lightrlhf.generate",
            [*data, *DEVICE, "--model_name", sft_dir, "--num_prompts", "4", "--max_new_tokens", "4"]
            + ["--output_file", "{out}/responses.jsonl"],
        ),
        "annotate": (
            "lightrlhf.annotate",
            [*responses, *DEVICE, "--reward_function", "helpers.rewards:length", "--output_file", "{out}/a.jsonl"]
            + ["--choose_type", "max_min", "--output_dir", "{out}/pairs", *data],
        ),
        "judge": (
            "lightrlhf.judge",
            ["--responses_file", f"{given}/a.jsonl,{given}/b.jsonl", "--judge", "helpers.rewards:length"]
            + ["--output_file", "{out}/judged.jsonl", *DEVICE],
        ),
        "evaluate": ("lightrlhf.evaluate", ["--model_name", "{out}/run", *data, *DEVICE]),
        "plot": ("lightrlhf.plot", ["--experiment_dir", "{out}/run"]),
        "cafe": ("datasets_prep.cafe.prepare_data", ["--destination_dir", "{out}/data", *CAFE_SIZES]),
        "generic": (
            "datasets_prep.generic.prepare_data",
            [*prepared, "--dataset_name", given / "texts.jsonl", "--tokenizer_name", cafe_data / "tokenizer"]
            + ["--save_skipped_examples", "True", "--minimum_response_length", "11"],
        ),
        "tokenizer": (
            "datasets_prep.train_tokenizer",
            ["--destination_dir", "{out}/tokenizer", "--dataset_name", given / "texts.jsonl", "--vocab_size", "300"],
        ),
        "votes": ("helpers.votes:append_one", ["{out}/votes/votes.jsonl"]),
    }, {"evaluate": sft_dir, "plot": sft_dir}


def kind_of(call: str, path: str, out: Path) -> tuple[str, str]:
    """A call and its file without numbers, names of temporary files and the program that wrote it."""
    inside = os.path.relpath(path, out)
    inside = re.sub(r"events\.out\.\S+", "events", unmarked(inside))
    inside = re.sub(r"[a-z]+_(train|validation|test)\.pt", "split.pt", inside)  # one line of code writes them all
    parts = re.sub(r"\d+", "0", inside).split("/")
    if parts[0] == "logs" and len(parts) < 6:  # the folders of --log_dir above a run, then that of the run
        return call, "the run" if len(parts) == 5 else "above the run"
    if len(parts) > 1 and ".partial" in parts[-2]:
        return call, "/".join([parts[-2], "each file" if call == "fsync" else parts[-1]])
    return call, parts[-1]


def contents(out: Path) -> dict[str, bytes | list]:
    """Tensors and rows below a folder, by path without times; what differs by clock or path is left out."""
    found: dict[str, bytes | list] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name in ("resume.pt", "model.safetensors", "adapter_model.safetensors"):
            name = re.sub(r"\d{4}-\d\d-\d\d_[\d-]+x*", "time", str(path.relative_to(out)))
            found[name] = plain(torch.load(path)) if path.suffix == ".pt" else path.read_bytes()
        elif path.is_file() and (path.suffix == ".pt" or path.name in ("responses.jsonl", "a.jsonl", "judged.jsonl")):
            found[str(path.relative_to(out))] = path.read_bytes()
    return found


def plain(value) -> list:
    """All values of a state in order; its file also says which of them are one object, which resuming changes."""
    if isinstance(value, torch.Tensor):
        return [value.dtype, value.shape, value.cpu().numpy().tobytes()]
    if isinstance(value, dict):
        return [[key, plain(part)] for key, part in value.items()]
    return [plain(part) for part in value] if isinstance(value, list | tuple) else [repr(value)]  # NaN is not NaN


def test_every_write_of_every_program(case, warm, commands, tmp_path):
    programs, starts = commands
    done: set[tuple[str, str]] = set()
    counter = 0

    def fresh(name: str) -> Path:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if name in starts:
            shutil.copytree(starts[name], out / "run", symlinks=True)
        return out

    def run(name: str, out: Path, **fault):
        program, argv = programs[name]
        return warm.run(program, *(str(word).replace("{out}", str(out)) for word in argv), under=out, **fault)

    order = ["votes", "judge", "annotate", "plot", "tokenizer", "generic", "generate", "evaluate"]  # the quick ones
    for name in [*order, *(name for name in programs if name not in order)]:
        program = programs[name][0]
        out = fresh(name)
        whole = run(name, out)
        assert whole.status == 0, f"{name}: {whole.err[-2000:]}"
        expected = contents(out)
        sites = {}
        for number, (call, path) in enumerate(whole.events, start=1):
            kind = kind_of(call, path, out)
            if kind not in done:
                sites.setdefault(kind, number)
        done |= sites.keys()
        for kind, number in sites.items():
            for error in ERRNOS:
                out = fresh(name)
                before = {path for path in out.rglob("*")}
                ended = run(name, out, at=number, number=error)
                counter += 1
                lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
                left = [path for path in out.rglob("*") if ".partial" in path.name and path not in before]
                unnamed = [str(p) for p in left if not any(str(part) in ended.err for part in (p, *p.parents[:3]))]
                reasons = {
                    "not reached": not ended.reached,
                    "status 0": ended.status == 0,
                    "killed": ended.status < 0 or ended.status == 99,
                    "traceback": "Traceback" in ended.err or "Exception ignored" in ended.err,
                    f"{len(lines)} lines": len(lines) != 1,
                    "no reason": os.strerror(error) not in "".join(lines),
                    f"left {unnamed}": bool(unnamed),
                }
                good = [path for path in out.rglob("checkpoint-*") if path.is_dir() and not path.is_symlink()]
                if program.startswith("lightrlhf.") and good and "/logs/" in str(good[0]) and name != "online_dpo":
                    folder = good[0].parent
                    reasons["no checkpoint named"] = checkpoints(folder)[-1].name not in ended.err
                if counter % RESUMED == 0:
                    reasons["goes on differently"] = not goes_on(warm, name, programs[name], out, good, expected)
                wrong = ", ".join(reason for reason, holds in reasons.items() if holds)
                seen = f"{wrong}: {ended.err[-300:]!r}" if wrong else "".join(lines)[:160]
                case(f"{name} {' '.join(kind)} {os.strerror(error)}", not wrong, seen)
    print(f"{len(done)} kinds of writes")
    assert len(done) >= EVENTS


def goes_on(warm, name, command, out: Path, good: list[Path], expected: dict[str, bytes | list]) -> bool:
    """Whether the program, run again or resumed without the fault, ends with what it would have written."""
    program, argv = command
    words = [str(word).replace("{out}", str(out)) for word in argv]
    runs = sorted(out.glob("logs/*/*/*/*/args.json"))
    if runs and (good or name == "online_dpo"):
        words = ["--resume_from", str(runs[0].parent)]
    else:
        shutil.rmtree(out / "logs", ignore_errors=True)
    ended = warm.run(program, *words)
    if ended.status:
        print(f"could not go on: {ended.err[-500:]}")
        return False
    now = contents(out)
    differing = sorted(key for key in expected.keys() | now.keys() if expected.get(key) != now.get(key))
    if differing:
        print(f"differs after going on: {differing}")
    return not differing
