"""Restarts: which run to continue when `torchrun --max-restarts` starts the ranks again.

An agent of torchrun keeps one folder of logs for all of its attempts, and names it in the environment of its ranks. The
first rank notes there which run it began, so a restarted command finds its own run, never one of another torchrun; a
script that trains several times finds each by its number.

Left out: machines that come or go (`--nnodes 1:4`), and restarts of torchrun itself by a batch system, after which the
run is resumed by `--resume_from`.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.run_dir import discard_runs
from lightrlhf.storage.writing import write_text

AnyArgs = TypeVar("AnyArgs", bound=TrainArgs)
NOTE = "lightrlhf_run"  # file in torchrun's folder that names a run, and its number in the process
_runs = itertools.count()
_number = 0  # of the latest run of this process


def check_restarts() -> None:
    """Raises: UsageError when ranks that torchrun restarts would not find each other, or their run.

    They read the addresses of those before them where torchrun shares its own store with its ranks: always with the
    static rendezvous, else unless the variable below is set (torch 2.13).
    """
    flag = f"torchrun --max-restarts {_max_restarts()}"
    if _max_restarts() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(
            f"{flag}: ranks that it restarts would wait for the ones before them; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun --standalone or --rdzv_backend c10d"
        )
    if _max_restarts() and not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        raise UsageError(f"{flag}: a restart finds its run by torchrun's folder of logs; leave out --log-dir /dev/null")


def _max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def _note() -> Path:
    """The file with the name of the run that this torchrun began as the one of this number."""
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2]  # FOLDER/attempt_N/RANK/error.json
    return folder / f"{NOTE}_{_number}"


def note_run(directory: Path) -> None:
    """Note on the first rank which run begins, if torchrun restarts ranks."""
    if _max_restarts():
        write_text(_note(), str(directory))


def as_restarted(fabric: Any, args: AnyArgs) -> AnyArgs:
    """The arguments; after a restart, those that resume the run which an earlier attempt began.

    A run without a checkpoint starts anew and is removed, unless it holds other files.
    """
    global _number
    _number = next(_runs)
    if not _max_restarts() or args.resume_from:
        return args
    begun: str | None = None
    if fabric.is_global_zero and _note().is_file():
        begun = _note().read_text(encoding="utf-8")
        if checkpoints(Path(begun)):
            print(f"restarted by torchrun: this run goes on in {begun}", flush=True)
        else:
            print(f"restarted by torchrun: {begun} had no checkpoint yet, so this run starts anew", flush=True)
            discard_runs(Path(begun))
            begun = None
    begun = fabric.broadcast(begun)
    return replace(args, resume_from=begun) if begun else args
