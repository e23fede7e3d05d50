"""Model names: which folder or hub id a name refers to, and what kind of model is stored there.

A name is a hub id, a Hugging Face folder, an adapter folder, an experiment dir (its newest checkpoint), a single
checkpoint or `best`, a GGUF file or `package:NAME` for the one inside an installed package, or `tiny`: a Llama of under
1M parameters built from its config.

Left out: revisions of hub repositories.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.groups import ModelArgs, StartArgs
from lightrlhf.cli.hub import check_hub, is_gguf
from lightrlhf.cli.latest import why_missing
from lightrlhf.gguf.files import from_gguf
from lightrlhf.models import lora
from lightrlhf.storage.checkpoint import checkpoints, follow_best, is_sealed, newest_checkpoint, verify_checkpoint
from lightrlhf.storage.run_dir import why_no_model

LARGEST_SIZE = 2**31  # of a config's sizes and counts
MOST_LAYERS = 10_000


def quiet_libraries() -> None:
    """Disable progress bars, hints and telemetry of other libraries, so a program's own output stays readable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that is refused then
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def starting_model(args: ModelArgs) -> tuple[str, str]:
    """Name of the model that a later stage starts from, and its flag: `--sft_experiment_dir`, else `--model_name`."""
    if isinstance(args, StartArgs) and args.sft_experiment_dir:
        return args.sft_experiment_dir, "--sft_experiment_dir"
    return args.model_name or "", "--model_name"


def resolve(name: str, flag: str = "--model_name") -> str:
    """Folder or hub id of a name: of an experiment dir its newest checkpoint, of a GGUF file its converted folder.

    Raises: UsageError when a folder is neither a model nor an experiment dir, or the checkpoint is missing or damaged.
    """
    if is_gguf(name):
        quiet_libraries()
        return str(from_gguf(name, flag))
    path = follow_best(Path(name))
    if not path.is_dir():
        is_local = os.path.islink(name) or name.startswith((".", "/", "~")) or name.count("/") > 1
        is_local = is_local or ("/" in name and path.parent.is_dir())
        if flag != "--model_name" or is_local:
            raise UsageError(f"{flag} {name} {why_missing(name)}")
        if name != "tiny":
            check_hub(name, flag, ("config.json", lora.ADAPTER_CONFIG))
        return name
    is_model = (path / "config.json").is_file() or (path / lora.ADAPTER_CONFIG).is_file()
    if is_sealed(path) and (is_model or not (path / "args.json").is_file()):
        verify_checkpoint(path)
        return str(path)
    check_config(str(path), flag)
    if is_model:
        return name
    if reason := why_no_model(path):
        raise UsageError(f"{flag} {name} {reason}")
    return str(newest_checkpoint(path, flag))


def model_folder(name: str) -> Path | None:
    """The folder that a local name means, of an experiment dir its newest checkpoint; None where there is no folder.

    Nothing is verified: see `resolve`.
    """
    path = follow_best(Path(name))
    is_model = (path / "config.json").is_file() or (path / lora.ADAPTER_CONFIG).is_file()
    if not path.is_dir() or is_model:
        return path if path.is_dir() else None
    return next(reversed(checkpoints(path)), path)


def base_name(source: str, flag: str) -> str | None:
    """Hub id or absolute folder of the base weights of `source`, which may be an adapter; None for `tiny`."""
    if source == "tiny":
        return None
    quiet_libraries()
    config = lora.adapter_config(source, flag)
    if config is not None:
        return lora.base_of(config, source, flag)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def holds_reward_model(source: str) -> bool:
    """Whether a local folder was saved with a scalar head; False for a hub id."""
    config = read_saved_config(source)
    return config.get("task_type") == "SEQ_CLS" or "ForSequenceClassification" in str(config.get("architectures"))


def read_saved_config(source: str) -> dict[str, Any]:
    """Config of the adapter or else of the model in a local folder; empty if missing or unreadable."""
    for name in (lora.ADAPTER_CONFIG, "config.json"):
        if (path := Path(source) / name).is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                return {}  # loading reports the error
            return stored if isinstance(stored, dict) else {}
    return {}


def check_config(source: str, flag: str) -> None:
    """Refuse a local folder whose JSON files no library should build a model from.

    Raises: UsageError naming the file: no JSON object, or a number of layers or a size that is beyond any model.
    """
    for name in (lora.ADAPTER_CONFIG, "config.json", "generation_config.json", "tokenizer_config.json"):
        path = Path(source) / name
        if not path.is_file():
            continue
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as problem:
            raise UsageError(f"{flag} {source}: {name} is not JSON: {first_line(problem)}; restore it") from None
        if not isinstance(stored, dict):
            raise UsageError(f"{flag} {source}: {name} holds no settings but a {type(stored).__name__}; restore it")
        sizes = {} if name.startswith("tokenizer") else stored
        for key, value in sizes.items():
            counts = key.endswith("_size") or key.startswith(("num_", "n_")) or key == "r"
            if counts and isinstance(value, int | float) and not abs(value) <= LARGEST_SIZE:
                raise UsageError(f"{flag} {source}: {name} has {key} {str(value)[:20]}, which no model has; restore it")
            if "layer" in key and counts and isinstance(value, int | float) and value > MOST_LAYERS:
                raise UsageError(f"{flag} {source}: {name} has {key} {value:g}, which no model has; restore it")
