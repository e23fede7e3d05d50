"""How the start of each program grows with the rows of its data: from the command to the end of the first step.

    python -m benchmarks.starts --rows 1000 100000 1000000 --folder /tmp/starts

Rows are the café's, a few thousand that are prepared and repeated as flat tensors, so that a million of them are
written in seconds; labelled responses, dialogues and REFUEL's pairs are made of them. With one device a start is a
copy of a process that has imported the programs, so that imports, which do not grow with the rows, are not counted;
with two it is a process of its own. `--max_steps 1`, without evaluation; `estimate` and `doctor` read no rows. What is
printed:

- `busy`: processor seconds. Wall time on a machine that does other things says little.
- `private`: memory at the peak that no file has, of the process that has most; with `--devices 2` of both.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale import MODEL, ROOT, anonymous, family, program
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.storage.writing import save_tensors, write_text

REWARD = {"reward_function": "datasets_prep.cafe.judge:gold"}
ROLLOUT = {"max_new_tokens": 8, "rollout_size": 8}
STARTS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "rm": {},
    "rm_pair": {"loss_type": "pair"},
    "kto": {},
    "ppo": REWARD | ROLLOUT,
    "grpo": REWARD | ROLLOUT | {"num_generations": 2},
    "refuel": {},
    "online_refuel": REWARD | ROLLOUT,
    "dry_run": {"dry_run": True},
}
PROGRAMS = {"rm_pair": "rm", "dry_run": "sft"}
SMALL = 2000  # rows that are repeated
OUTPUT = Path(tempfile.gettempdir()) / f"starts-{os.getpid()}.log"  # of the last start


@dataclass(frozen=True, kw_only=True)
class StartsArgs(Args):
    """How the start of each program grows with the rows of its data."""

    rows: list[int] = at_least(1, [1000, 100_000, 1_000_000])
    """Numbers of rows."""
    programs: list[str] = flag(list(STARTS), choices=tuple(STARTS))
    """Programs to start."""
    devices: int = at_least(1, 1)
    """Ranks of a program that trains."""
    turns: int = at_least(1, 3)
    """Repetitions; the median counts."""
    folder: str = "benchmarks/.starts"
    """Folder of the data; kept."""
    results_file: str = str(ROOT / "benchmarks" / "results" / "starts.json")
    """Results; measured ones replace earlier ones."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    from benchmarks.run import machine

    args = parse(StartsArgs, argv)
    results = Path(args.results_file)
    found = json.loads(results.read_text()) if results.is_file() else {}
    found["machine"] = machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), cuda=False)
    folders = {rows: make(Path(args.folder).resolve(), rows) for rows in args.rows}
    turns: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(args.turns):
        for name in args.programs:
            for rows, folder in folders.items():
                measured = start(name, folder, args.devices)
                turns.setdefault((name, rows), []).append(measured)
                medians = {key: statistics.median(one[key] for one in turns[name, rows]) for key in measured}
                print(f"{name}, {rows:,} rows: {json.dumps(medians)}", flush=True)
                kind = found.setdefault(f"{args.devices} ranks", {}).setdefault(name, {})
                kind[str(rows)] = medians
                write_text(results, json.dumps(found, indent=1) + "\n")
    print(table(found[f"{args.devices} ranks"]))


def start(name: str, folder: Path, devices: int) -> dict[str, float]:
    """Processor seconds and private memory of a start."""
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    flags = {"data_dir": folder, "model_name": MODEL, "log_dir": logs, "accelerator": "cpu", "devices": devices}
    flags |= {"max_steps": 1, "mini_batch_size": 8, "save_interval": 10**9, "eval_interval": 0}
    command = program(f"lightrlhf.{PROGRAMS.get(name, name)}", flags | STARTS[name])[2:]
    return watch(fork(command) if devices == 1 else spawn(command))


def fork(command: list[str]) -> int:
    """Run a program in a copy of this process, which has imported it; returns its number."""
    module, *flags = command
    run = importlib.import_module(module).main
    for late in ("lightning.fabric", "transformers.models.llama.modeling_llama", "transformers.models.auto", "peft"):
        importlib.import_module(late)
    if pid := os.fork():
        return pid
    with OUTPUT.open("w") as output:  # nothing of the copy may come back here
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            run(flags)
            os._exit(0)
        except BaseException as problem:
            print(problem, file=sys.stderr, flush=True)
            os._exit(1)


def spawn(command: list[str]) -> int:
    """Run a program in a new process; returns its number."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with OUTPUT.open("w") as output:
        words = [sys.executable, "-m", *command]
        return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment).pid


def watch(pid: int) -> dict[str, float]:
    """Processor seconds of a process and its children, and private memory at the peak of the two largest of them.

    Raises: RunFailure with the end of its output when it fails.
    """
    most = dict[int, int]()
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        for one in family(pid):
            most[one] = max(anonymous(one), most.get(one, 0))
        time.sleep(0.05)
    if ended[1]:
        raise RunFailure(f"a start failed: {OUTPUT.read_text()[-2000:]}")
    first, second, *_ = [*sorted(most.values(), reverse=True), 0, 0]
    return {"busy": ended[2].ru_utime + ended[2].ru_stime, "private": first, "second": second}


# -------------------------------------------------------------------------------------------------------------- data
def make(folder: Path, rows: int) -> Path:
    """The folder with a training split of each stage of so many rows, made when it is missing."""
    from lightrlhf.storage.seals import seal

    small, made = folder / "small", folder / str(rows)
    if not (small / "refuel_train.pt").is_file():
        make_small(small)
    if not (made / "manifest.json").is_file():
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(small, made, ignore=shutil.ignore_patterns("*.pt", "manifest.json"))
        for path in sorted(small.glob("*_train.pt")):
            save_tensors(made / path.name, repeated(torch.load(path, weights_only=True), rows))
        seal(made, [path.name for path in made.iterdir() if path.name != "logs"])
    return made


def make_small(folder: Path) -> None:
    """Prepare a few thousand rows, and make the other stages' rows of them."""
    from lightrlhf.data.packing import write_rows
    from lightrlhf.data.splits import load_split

    sizes = {f"num_{name}": SMALL for name in ("finetune", "preference", "prompts")}
    flags = {
        "destination_dir": folder,
        **sizes,
        "num_held_out": 8,
        "num_held_out_pairs": 8,
        "num_proc": 1,
        "tokenizer_name": MODEL,
    }
    watch(spawn(program("datasets_prep.cafe.prepare_data", flags)[2:]))
    pairs, demonstrations = (load_split(folder, stage, "train") for stage in ("preference", "finetune"))
    write_rows(folder / "unpaired_train.pt", "unpaired", labelled(pairs))
    write_rows(folder / "refuel_train.pt", "refuel", map(refuel_pair, pairs))
    write_rows(folder / "dialogue_train.pt", "dialogue", map(dialogue, demonstrations))


def labelled(pairs: Any) -> Iterator[dict[str, Any]]:
    for number, pair in enumerate(pairs):
        side, label = ("chosen", True) if number % 2 else ("rejected", False)
        ids = pair[f"{side}_input_ids"]
        yield {"prompt_len": pair["prompt_len"], "input_ids": ids, "label": label, "columns": {}}


def refuel_pair(pair: dict[str, Any]) -> dict[str, Any]:
    row = {"chosen_reward": 1.0, "rejected_reward": 0.0}
    for side in ("chosen", "rejected"):
        ids = pair[f"{side}_input_ids"]
        row |= {f"{side}_input_ids": ids, f"{side}_action_mask": torch.arange(1, len(ids)) >= pair["prompt_len"]}
    return row


def dialogue(row: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": role, "content": "words"} for role in ("user", "assistant")]
    spans = [(row["prompt_len"], len(row["input_ids"]))]
    return {"messages": messages, "input_ids": row["input_ids"], "turn_spans": spans}


def repeated(stored: dict[str, Any], rows: int) -> dict[str, Any]:
    """The content of a file of flat rows, whose rows are repeated in turn."""
    count = len(next(iter(stored["ragged"].values()))[1]) - 1
    times, rest = divmod(rows, count)

    def tile(values: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return torch.cat([*[values] * times, first])

    ragged = {}
    for name, (values, offsets) in stored["ragged"].items():
        lengths = offsets.diff()
        ends = tile(lengths, lengths[:rest]).cumsum(0)
        ragged[name] = tile(values, values[: offsets[rest]]), torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    numbers = {name: tile(values, values[:rest]) for name, values in stored["numbers"].items()}
    facts = stored["facts"] | {"digest": f"{stored['facts']['digest']} {rows}"}
    facts["columns"] = {name: number * times for name, number in facts["columns"].items()}
    return stored | {"numbers": numbers, "ragged": ragged, "facts": facts}


# ------------------------------------------------------------------------------------------------------------- table
def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The results as Markdown: per program the growth from the smallest number of rows to each other one."""
    sizes = sorted({int(rows) for cells in found.values() for rows in cells})
    heads = [f"{rows:,}" for rows in sizes]
    lines = [f"| start of | {' | '.join(heads)} | bytes a row |", f"|---{'|---' * len(sizes)}|---|"]
    for name, cells in found.items():
        shown = [
            f"{one['busy']:.1f} s, {one['private'] / 2**20:.0f} MiB" for _, one in sorted(cells.items(), key=_rows)
        ]
        (first, low), *_, (last, high) = sorted(cells.items(), key=_rows)
        growth = (high["private"] - low["private"]) / max(int(last) - int(first), 1)
        lines.append(f"| {name} | {' | '.join(shown)} | {growth:.1f} |")
    return "\n".join(lines)


def _rows(item: tuple[str, Any]) -> int:
    return int(item[0])


if __name__ == "__main__":
    main()
