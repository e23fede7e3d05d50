"""How preparation and the start of training grow with the rows, beside TRL's `SFTTrainer` on the same file.

    python -m benchmarks.scale --rows 1000 100000 --folder /tmp/scale
    python -m benchmarks.scale --parts trl --trl_python benchmarks/.venvs/trl/bin/python --folder /tmp/scale

Sets are chats of one to four turns, of the café's words, made by a seed. Everything runs in processes of its own, as
users start it; `--folder` keeps the sets and what was prepared, so that parts can be measured at different times. The
model is the café's, of 1M parameters. Parts:

- `prepare`: processor seconds of the generic preparation, over those of the tokenizer on the same texts and over those
  of rendering the chats by the template and the tokenizer; peak memory of all of its processes.
- `start`: seconds from the command to the row of metrics of the first step of `sft --max_steps 2`; each turn measures
  all sizes, ours and, with `trl`, TRL's; the median counts.
- `ranks`: memory of each of two ranks at its peak that no file has: what grows if a rank copies the rows.
- `order`: whether the first epoch's rows equal a list's of dicts with the same rows, in order and content, and
  whether 20 steps on both end in the same bits. Up to 100,000 rows, since the list has to fit.
- `trl`: TRL's `SFTTrainer` on the same file, two preparing processes: the first start, with an empty cache of datasets,
  and later ones.

Memory of a process is what is anonymous in /proc/PID/smaps_rollup, polled; pages of files are not counted. In the sum
over processes a page that several share, as those that are forked do, counts once.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.storage.writing import write_text

PARTS = ("prepare", "start", "ranks", "order", "trl")
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "datasets_prep" / "cafe" / "base"
EVERY = 0.1  # seconds between looks at the memory
MOST_LISTED = 100_000  # rows of the list of dicts
STEPS = 20  # of the runs whose weights are compared
TRAIN = {"max_steps": 2, "log_interval": 1, "eval_interval": 0, "save_interval": 10**9, "mini_batch_size": 8}


@dataclass(frozen=True, kw_only=True)
class ScaleArgs(Args):
    """How preparation and the start of training grow with the rows, beside TRL."""

    rows: list[int] = at_least(1, [1000, 100_000, 1_000_000])
    """Sizes of the sets, in chats."""
    parts: list[str] = flag([part for part in PARTS if part != "trl"], choices=PARTS)
    """What to measure."""
    folder: str = "benchmarks/.scale"
    """Folder of the sets and what is made of them; kept."""
    turns: int = at_least(1, 3)
    """Repetitions of starts."""
    trl_python: str = str(ROOT / "benchmarks" / ".venvs" / "trl" / "bin" / "python")
    """Interpreter with TRL, as `python -m benchmarks.peers.install --only trl` makes it."""
    results_file: str = str(ROOT / "benchmarks" / "results" / "scale.json")
    """Results by number of rows; measured parts replace earlier ones."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    from benchmarks.run import machine

    args = parse(ScaleArgs, argv)
    results = Path(args.results_file)
    found = json.loads(results.read_text()) if results.is_file() else {}

    def note(part: str, rows: int, measured: dict[str, Any]) -> None:
        print(f"{rows:,} rows, {part}: {json.dumps(measured)}", flush=True)
        found.setdefault("rows", {}).setdefault(str(rows), {}).setdefault(part, {}).update(measured)
        found["machine"] = machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), cuda=False)
        write_text(results, json.dumps(found, indent=1) + "\n")

    sets = [Set(Path(args.folder).resolve() / str(rows), rows) for rows in args.rows]
    for one in sets:
        one.write()
        if "prepare" in args.parts:
            note("prepare", one.rows, prepare(one))
        elif {"start", "ranks", "order"} & set(args.parts) and not (one.data / "manifest.json").is_file():
            observe(prepare_command(one, one.data))
        if "trl" in args.parts:
            shutil.rmtree(one.folder / "cache", ignore_errors=True)
            note("trl", one.rows, {"first": trl_start(one, args.trl_python)})
    starts: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(args.turns if {"start", "trl"} & set(args.parts) else 0):
        for one in sets:
            for part in ("start", "trl"):
                if part in args.parts:
                    measured = start(one) if part == "start" else trl_start(one, args.trl_python)
                    starts.setdefault((part, one.rows), []).append(measured)
    for (part, rows), turns in starts.items():
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        note(part, rows, medians if part == "start" else {"later": medians})
    for one in sets:
        if "ranks" in args.parts:
            note("ranks", one.rows, ranks(one))
        if "order" in args.parts and one.rows <= MOST_LISTED:
            note("order", one.rows, order(one))
    print(table(found))


# -------------------------------------------------------------------------------------------------------------- sets
@dataclass(frozen=True)
class Set:
    """Some chats in a file, and what was prepared of them."""

    folder: Path
    rows: int

    @property
    def file(self) -> Path:
        return self.folder / "chats.jsonl"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def write(self) -> None:
        """Write the file, unless that was done."""
        if not self.file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.file.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({"messages": chat}) + "\n" for chat in chats(self.rows))
            partial.rename(self.file)


def chats(count: int) -> Iterator[list[dict[str, str]]]:
    """Chats of one to four turns, of the café's words."""
    from datasets_prep.cafe import world

    rng = random.Random(0)
    tables = [table for name, table in sorted(vars(world).items()) if name.isupper() and isinstance(table, tuple)]
    words = sorted({word for table in tables for text in table for word in re.findall(r"[a-zA-Z']+", str(text))})
    for _ in range(count):
        yield [
            {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(4, most)))}
            for _ in range(rng.randint(1, 4))
            for role, most in (("user", 25), ("assistant", 40))
        ]


def prepare_command(one: Set, folder: Path) -> list[str]:
    flags = {"destination_dir": folder, "dataset_name": one.file, "tokenizer_name": MODEL}
    return program("datasets_prep.generic.prepare_data", flags)


def program(module: str, flags: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", module, *(f"--{name}={value}" for name, value in flags.items())]


# ---------------------------------------------------------------------------------------------------------- measures
def prepare(one: Set) -> dict[str, float]:
    """Processor seconds, ours and the tokenizer's, and peak memory."""
    shutil.rmtree(one.data, ignore_errors=True)
    ours = observe(prepare_command(one, one.data))
    alone = json.loads(child("tokenize", str(one.file)))
    return {
        "seconds": ours["seconds"],
        "busy": ours["busy"],
        "peak_bytes": ours["peak_bytes"],
        **alone,
        "over_tokenizer": ours["busy"] / alone["tokenizer"],
        "over_both": ours["busy"] / (alone["rendering"] + alone["tokenizer"]),
    }


def tokenize(file: str) -> dict[str, float]:
    """Processor seconds of rendering all chats and of the tokenizer on the texts, and the number of tokens."""
    from lightrlhf.models.tokenizer import load_tokenizer

    tokenizer, spent, tokens = load_tokenizer(None, str(MODEL)), [0.0, 0.0], 0
    tokenizer("a first text loads what is loaded late")
    with open(file, encoding="utf-8") as lines:
        for chunk in iter(lambda: [json.loads(line)["messages"] for _, line in zip(range(1000), lines)], []):
            started = time.process_time()
            texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chunk]
            rendered = time.process_time()
            tokens += sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
            spent = [spent[0] + rendered - started, spent[1] + time.process_time() - rendered]
    return {"rendering": spent[0], "tokenizer": spent[1], "tokens": tokens}


def start(one: Set, devices: int = 1) -> dict[str, float]:
    """Seconds to the first step of `sft`, all seconds, and memory of the process that has most and of the next."""
    logs = one.folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    flags = {"data_dir": one.data, "model_name": MODEL, "log_dir": logs, "accelerator": "cpu", "devices": devices}
    found = observe(program("lightrlhf.sft", {**flags, **TRAIN}), lambda: any(map(size, logs.rglob("metrics.jsonl"))))
    return {
        "first_step": found["happened"],
        "seconds": found["seconds"],
        "first": found["first"],
        "next": found["next"],
    }


def ranks(one: Set) -> dict[str, float]:
    """Memory of each of two ranks."""
    found = start(one, devices=2)
    return {"first": found["first"], "second": found["next"]}


def trl_start(one: Set, python: str) -> dict[str, float]:
    """Seconds of TRL's trainer until it can train and to its first step, processor seconds, and peak memory."""
    job = {"file": str(one.file), "model": str(MODEL), "cache": str(one.folder / "cache")}
    job |= {"output_dir": str(one.folder / "trl"), "batch": TRAIN["mini_batch_size"]}
    marks = one.folder / "trl.json"
    marks.unlink(missing_ok=True)
    found = observe([python, str(ROOT / "benchmarks" / "peers" / "trl_start.py"), json.dumps(job), str(marks)])
    clock = json.loads(marks.read_text())
    seconds = {name: clock[name] - found["began"] for name in ("trainer", "first_step")}
    return {**seconds, **{name: found[name] for name in ("busy", "peak_bytes", "first")}}


def order(one: Set) -> dict[str, Any]:
    """Whether a list of dicts with the same rows gives the same rows and training."""
    listed = one.folder / "listed"
    shutil.rmtree(listed, ignore_errors=True)
    same = json.loads(child("compare", str(one.data), str(listed)))
    weights = []
    for data in (one.data, listed):
        logs = one.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        flags = {"data_dir": data, "model_name": MODEL, "log_dir": logs, "accelerator": "cpu", "verify": False}
        observe(program("lightrlhf.sft", {**flags, **TRAIN, "max_steps": STEPS}))
        weights.append([file.read_bytes() for file in sorted(logs.rglob("model.safetensors"))])
    return {**same, "same_weights": bool(weights[0]) and weights[0] == weights[1]}


def compare(data: str, listed: str) -> dict[str, Any]:
    """Write the rows as a list of dicts, and compare the first epoch of both, value by value."""
    import torch

    from lightrlhf.data.batch import epoch_order
    from lightrlhf.data.splits import load_split

    rows = load_split(data, "finetune", "train")
    shutil.copytree(data, listed, ignore=shutil.ignore_patterns("*.pt", "manifest.json"))
    torch.save([dict(row) for row in rows], Path(listed, "finetune_train.pt"))
    plain = torch.load(Path(listed, "finetune_train.pt"), weights_only=True)

    def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return list(one) == list(other) and all(
            torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            for name, value in one.items()
        )

    again = load_split(listed, "finetune", "train", verify=False)
    places = list(map(int, epoch_order(len(rows), 42, 0)))
    same = len(rows) == len(plain) == len(again)
    same = same and all(equal(rows[i], plain[i]) and equal(again[i], plain[i]) for i in places)
    return {"rows": len(rows), "same_rows": same}


# --------------------------------------------------------------------------------------------------------- processes
def observe(command: Sequence[str], happens: Any = None) -> dict[str, float]:
    """Run a command: its seconds, processor seconds, when something happened, and memory of all and of two processes.

    Raises: RunFailure with the end of its output when it fails.
    """
    before, began, started = os.times(), time.time(), time.perf_counter()
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **settings}
    peak, happened, looked, by_process = 0, 0.0, 0.0, dict[int, int]()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        while process.poll() is None:
            if happens and not happened and happens():
                happened = time.perf_counter() - started
            if time.perf_counter() >= looked + EVERY:  # which costs the processor up to 20 ms
                now = {pid: anonymous(pid) for pid in family(process.pid)}
                peak = max(peak, sum(share for _, share in now.values()))
                by_process |= {pid: max(size, by_process.get(pid, 0)) for pid, (size, _) in now.items()}
                looked = time.perf_counter()
            time.sleep(0.02)
        output.seek(0)
        text = output.read()[-4000:]
    seconds, after = time.perf_counter() - started, os.times()
    if process.returncode:
        raise RunFailure(f"{' '.join(command)} failed: {text}")
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    first, second, *_ = [*sorted(by_process.values(), reverse=True), 0, 0]
    return {
        "began": began,
        "seconds": seconds,
        "busy": busy,
        "happened": happened,
        "peak_bytes": peak,
        "first": first,
        "next": second,
    }


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def anonymous(pid: int) -> tuple[int, int]:
    """Bytes of a process that no file has, and its share of them: a page of n processes counts as an nth."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0, 0
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): *(\d+) kB", rollup, re.M)}
    return sizes.get("Anonymous", 0), sizes.get("Pss_Anon", sizes.get("Anonymous", 0))  # absent from old kernels


def size(path: Path) -> int:
    return path.stat().st_size


def child(name: str, *words: str) -> str:
    """The last line that one of the functions below `CHILDREN` prints in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", f"_{name}", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]


CHILDREN = {"_tokenize": tokenize, "_compare": compare}


# ------------------------------------------------------------------------------------------------------------- table
def table(found: dict[str, Any]) -> str:
    """The results as Markdown, a column per number of rows."""
    sizes = sorted(map(int, found["rows"]))

    def line(label: str, part: str, *names: str, unit: str = " s", scale: float = 1.0) -> str:
        cells = []
        for rows in sizes:
            value = found["rows"][str(rows)].get(part, {})
            for name in names:
                value = value.get(name, {}) if isinstance(value, dict) else {}
            is_number = isinstance(value, float | int) and not isinstance(value, bool)
            cells.append(f"{value / scale:,.1f}{unit}" if is_number else "" if value == {} else str(value))
        return f"| {label} | {' | '.join(cells)} |"

    mib = {"unit": " MiB", "scale": 2.0**20}
    lines = [
        f"| rows | {' | '.join(f'{rows:,}' for rows in sizes)} |",
        f"|---{'|---' * len(sizes)}|",
        line("preparation, processor", "prepare", "busy"),
        line("over the tokenizer", "prepare", "over_tokenizer", unit="x"),
        line("over rendering and the tokenizer", "prepare", "over_both", unit="x"),
        line("its peak memory, all processes", "prepare", "peak_bytes", **mib),
        line("start to first step", "start", "first_step"),
        line("memory of the first of two ranks", "ranks", "first", **mib),
        line("memory of the second", "ranks", "second", **mib),
        line("first epoch's rows equal a list's", "order", "same_rows"),
        line(f"weights after {STEPS} steps equal", "order", "same_weights"),
        line("TRL: first start to first step", "trl", "first", "first_step"),
        line("its processor seconds", "trl", "first", "busy"),
        line("its peak memory, all processes", "trl", "first", "peak_bytes", **mib),
        line("TRL: later starts to first step", "trl", "later", "first_step"),
        line("its memory", "trl", "later", "first", **mib),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CHILDREN:
        print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))
    else:
        main()
