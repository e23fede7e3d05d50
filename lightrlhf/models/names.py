"""Model names: which folder or hub id a name refers to, and what kind of model is stored there.

A name is a hub id, a Hugging Face folder, an adapter folder, an experiment dir (its newest checkpoint), a single
checkpoint or `best`, or `tiny`: a Llama of under 1M parameters built from its config.

Left out: revisions of hub repositories.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.models import lora
from lightrlhf.storage.checkpoint import follow_best, is_sealed, newest_checkpoint, verify_checkpoint


def quiet_libraries() -> None:
    """Disable progress bars, hints and telemetry of other libraries, so a program's own output stays readable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def starting_model(args: Any) -> tuple[str, str]:
    """Name of the model that a later stage starts from, and its flag: `--sft_experiment_dir`, else `--model_name`."""
    if getattr(args, "sft_experiment_dir", None):
        return args.sft_experiment_dir, "--sft_experiment_dir"
    return args.model_name, "--model_name"


def resolve(name: str, flag: str = "--model_name") -> str:
    """Folder or hub id of a name; an experiment dir resolves to its newest checkpoint.

    Raises: UsageError when a folder is neither a model nor an experiment dir, or the checkpoint is missing or damaged.
    """
    path = follow_best(Path(name))
    if not path.is_dir():
        if flag != "--model_name" or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UsageError(f"{flag} {name} does not exist")
        return name
    is_model = (path / "config.json").is_file() or (path / lora.ADAPTER_CONFIG).is_file()
    if is_sealed(path) and (is_model or not (path / "args.json").is_file()):
        verify_checkpoint(path)
        return str(path)
    if is_model:
        return name
    if (path / "args.json").is_file():
        return str(newest_checkpoint(path, flag))
    raise UsageError(f"{flag} {name} is neither a model folder (config.json) nor an experiment dir (args.json)")


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
    config = saved_config(source)
    return config.get("task_type") == "SEQ_CLS" or "ForSequenceClassification" in str(config.get("architectures"))


def saved_config(source: str) -> dict[str, Any]:
    """Config of the adapter or else of the model in a local folder; empty if missing or unreadable."""
    for name in (lora.ADAPTER_CONFIG, "config.json"):
        if (path := Path(source) / name).is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                return {}  # loading reports the error
    return {}
