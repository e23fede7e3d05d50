"""How time and memory grow with the length of texts, the vocabulary and the samples of a prompt, beside counted work.

    python -m benchmarks.growth

A model of 4M parameters (other vocabularies have more), float32. Each cell is a process of its own: a program as users
run it, or the generation engine. Texts have one length each: half prompt, half response in training; in rollouts 64
tokens are sampled after a prompt that fills the rest. A training pass has 16,384 tokens whatever their length, for
vocabularies 2,048.

Printed is the median of the turns; *time* is seconds over the floor of the counted work (`training/roofline.py`, each
prompt and each common prefix once), relative to that of the first value: 1 is proportional to the work. *Memory* is
the peak above the loaded model, relative to the first value, over what it may grow by: nothing in a training pass of
equally many tokens; in rollouts the length; else the vocabulary, or the samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import LEARNING_RATE, Side
from benchmarks.inputs import EOS, SIZES, make_tokenizer, write_models
from benchmarks.roofline import shape_of
from benchmarks.run import Worker, instructions
from lightrlhf.cpu import enable
from lightrlhf.storage.writing import write_text
from lightrlhf.training.roofline import Ceilings, Shape, Work, forward, generate, measure_ceilings, update_work

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLED = 64  # tokens of a response of a rollout
LONGEST = 8192
SERIES: dict[str, dict[str, Sequence[int]]] = {
    "text": {work: (128, 512, 2048, LONGEST) for work in ("sft", "dpo", "rollout")},
    "vocabulary": {work: (4096, 32768, 131072) for work in ("sft", "dpo", "rollout")},
    "samples": {"rollout": (1, 4, 8, 32), "grpo": (2, 8, 32)},
}


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    work: str
    text: int = 256  # tokens of a text
    vocabulary: int = 4096
    samples: int = 1  # of each prompt, in rollouts
    tokens: int = 0  # of a training pass
    prompts: int = 16  # of a rollout

    @property
    def rows(self) -> int:
        """Texts of a pass, or pairs; prompts of a rollout."""
        if self.work in ("sft", "dpo"):
            return max(self.tokens // (self.text * (2 if self.work == "dpo" else 1)), 1)
        return self.prompts

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.text // 2 if self.work in ("sft", "dpo") else self.text - SAMPLED


def cells(series: str, work: str) -> list[Cell]:
    """The cells of a line of the table."""
    fixed: dict[str, dict[str, int]] = {
        "text": {"tokens": 2 * LONGEST},  # of the two longest texts of a pair
        "vocabulary": {"tokens": 2048},
        "samples": {"prompts": 2},
    }
    return [Cell(work, **fixed[series], **{series: value}) for value in SERIES[series][work]]


def write_rows(folder: Path, cell: Cell) -> None:
    """Write random texts of the cell's lengths as the splits that the programs read."""
    folder.mkdir(parents=True)
    make_tokenizer(cell.vocabulary).save_pretrained(folder / "tokenizer")
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(2, cell.vocabulary, (length,), generator=generator)

    def text(start: torch.Tensor) -> torch.Tensor:
        return torch.cat([start, ids(cell.text - len(start) - 1), torch.tensor([EOS])])

    starts = [ids(cell.prompt) for _ in range(cell.rows)]
    texts = [text(start) for start in starts]
    splits: dict[str, list[dict[str, Any]]] = {
        "finetune": [{"input_ids": one, "targets": one.clone()} for one in texts],
        "preference": [{"chosen_input_ids": one, "rejected_input_ids": text(one[: cell.prompt])} for one in texts],
        "prompts": [{"input_ids": start, "columns": {}} for start in starts],
    }
    for name, rows in splits.items():
        for split in ("train", "validation"):
            torch.save([row | {"prompt_len": cell.prompt} for row in rows], folder / f"{name}_{split}.pt")


def side(cell: Cell, model: Path, data: Path, logs: Path) -> Side:
    """The process that measures a cell."""
    command, rows = [sys.executable, "-m", "benchmarks.ours"], cell.rows * cell.samples
    job: dict[str, Any]
    if cell.work == "rollout":
        job = {"kind": "generate", "model": str(model), "data": str(data), "samples": cell.samples}
        job |= {"slots": rows, "max_new_tokens": SAMPLED, "bf16": False, "device": "cpu", "cuda": False, "steps": 1}
        job["forgets_loading"] = True
        return Side(str(cell), command, job)
    flags = {"data_dir": data, "log_dir": logs, "epochs": 100_000, "log_interval": 10**9, "save_interval": 10**9}
    flags |= {"eval_interval": 0, "logger": "csv", "accelerator": "cpu", "learning_rate": LEARNING_RATE}
    flags |= {"mini_batch_size": rows, "micro_batch_size": rows}
    flags |= {"sft_experiment_dir" if cell.work == "grpo" else "model_name": model}
    if cell.work == "grpo":
        flags |= {"reward_function": "benchmarks.inputs:even_words", "num_generations": cell.samples}
        flags |= {"rollout_size": cell.rows, "rollout_mini_batch_size": rows, "max_new_tokens": SAMPLED}
    if cell.work == "sft":
        flags["use_targets"] = False  # every token counts
    words = {name: str(value) for name, value in flags.items()}
    job = {"kind": "train", "program": f"lightrlhf.{cell.work}", "flags": words, "steps": 1, "cuda": False}
    job["forgets_loading"] = True
    return Side(str(cell), command, job)


def floor(cell: Cell, shape: Shape, ceilings: Ceilings) -> float:
    """Least seconds of a cell's work."""
    if cell.work == "sft":
        return ceilings.seconds(*update_work(shape, [cell.text] * cell.rows, cell.text * cell.rows))
    if cell.work == "dpo":
        answers = 2 * cell.rows
        counted = answers * (cell.text - cell.prompt)
        shared = [cell.prompt] * cell.rows
        return ceilings.seconds(*update_work(shape, [cell.text] * answers, counted, shared))
    rows = cell.rows * cell.samples
    sampling = generate(shape, [cell.prompt] * rows, [SAMPLED] * rows, rows, bytes_per_number=4)
    repeated = [cell.prompt] * (rows - cell.rows)
    seconds = ceilings.seconds(Work(sampling.flops - forward(shape, repeated, 0).flops, sampling.bytes))
    if cell.work == "grpo":
        seconds += ceilings.seconds(*update_work(shape, [cell.text] * rows, SAMPLED * rows, repeated))
    return seconds


def measure(cell: Cell, folder: Path, turns: int, threads: int, ceilings: Ceilings) -> dict[str, float]:
    """Seconds (median, smallest, largest), their floor, and the peak memory above the loaded model."""
    models, data = folder / f"models-{cell.vocabulary}", folder / f"data-{len(list(folder.iterdir()))}"
    if not models.is_dir():
        write_models(models, replace(SIZES["4M"], vocab_size=cell.vocabulary, max_position_embeddings=LONGEST), None)
    write_rows(data, cell)
    worker = Worker(side(cell, models / "policy", data, folder / "logs"), folder / "worker.log", threads)
    try:
        loaded = worker.ready()["resident_bytes"]
        runs = [worker.repetition() for _ in range(1 + turns)]
    finally:
        worker.stop()
    seconds = [run["seconds"] for run in runs[1:]]
    return {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "floor": floor(cell, shape_of(models / "policy"), ceilings),
        "bytes": runs[-1]["peak_bytes"] - loaded,
    }


def growth(series: str, work: str, found: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    """Time and memory of each value over what they may be, relative to the first value."""
    values, first = SERIES[series][work], found[0]
    grows = series != "text" or work == "rollout"
    return [
        (
            one["seconds"] / one["floor"] / (first["seconds"] / first["floor"]),
            one["bytes"] / first["bytes"] / (value / values[0] if grows else 1),
        )
        for value, one in zip(values, found, strict=True)
    ]


def table(found: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        f"{found['processor']}, {found['threads']} threads, torch {found['torch']}, {found['turns']} turns.",
        "",
        "| grows | work | value | seconds | time | memory | time, to the first | memory, to the first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for series, of_work in found["series"].items():
        for work, measured in of_work.items():
            relative = growth(series, work, measured)
            for value, one, (time, memory) in zip(SERIES[series][work], measured, relative, strict=True):
                spread = f"{one['seconds']:.2f} ({one['least']:.2f} to {one['most']:.2f})"
                share = f"{one['seconds'] / one['floor']:.1f} floors | {one['bytes'] / 2**20:,.0f} MiB"
                lines.append(f"| {series} | {work} | {value:,} | {spread} | {share} | {time:.2f} | {memory:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen lines, keep the others of an earlier run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", nargs="+", choices=SERIES, default=list(SERIES))
    parser.add_argument("--work", nargs="+", choices=("sft", "dpo", "rollout", "grpo"))
    parser.add_argument("--turns", type=int, default=3, help="repetitions of a cell, after a warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_dir", default=str(RESULTS), help="folder of growth-KIND.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    enable()
    file = Path(args.output_dir) / f"growth-{instructions()}.json"
    found = {"processor": instructions(), "threads": args.threads, "torch": torch.__version__, "turns": args.turns}
    found |= {"series": {}}
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else found
    if (earlier["threads"], earlier["turns"]) == (args.threads, args.turns):
        found["series"] = earlier["series"]
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        for series in args.series:
            for work in args.work or SERIES[series]:
                if work in SERIES[series]:
                    measured = [
                        measure(cell, Path(folder), args.turns, args.threads, ceilings) for cell in cells(series, work)
                    ]
                    found["series"].setdefault(series, {})[work] = measured
                    shown = " ".join(f"{time:.2f}/{memory:.2f}" for time, memory in growth(series, work, measured))
                    print(f"{series}, {work}: time/memory {shown}", flush=True)
    write_text(file, json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
