"""Flags of the demo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightrlhf.cli.fields import between, flag, random_seed
from lightrlhf.cli.groups import DecodingArgs, SealArgs
from lightrlhf.cli.lists import paths
from lightrlhf.cli.packages import check_package
from lightrlhf.cli.paths import check_folder
from lightrlhf.gguf.files import check_model_exists
from lightrlhf.models.loading import find_device
from lightrlhf.storage.destinations import check_output

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
MAX_NAME = 100  # characters of a user's name


def check_host(name: str, flag: str) -> None:
    """Check the name of a host. Raises: ValueError."""
    if not HOST.fullmatch(name) or ":" in name:
        raise ValueError(f"{flag} {name} must be a host name, without scheme and port")


def check_password(path: str, flag: str) -> None:
    """Check a file with a password. Raises: ValueError."""
    if not read_password(path):
        raise ValueError(f"{flag} {path} has no password in its first line; write one there")


@dataclass(frozen=True, kw_only=True)
class DemoArgs(DecodingArgs, SealArgs):
    """Chat with trained models in the browser, compare them and collect votes."""

    model_name: list[str] = flag([], split=paths, required="a model", show="first", positional=True)
    """Experiment dirs, checkpoints, folders, hub names or GGUF files; the models that runs started from are added."""
    rm_experiment_dir: str | None = flag(None, check=check_folder)
    """Reward model that scores answers; by default the one that an experiment was trained with."""
    reference_dir: str | None = flag(None, check=check_model_exists)
    """Reference model of KL and log-ratios; by default the model that each experiment started from."""
    data_dir: str | None = flag(None, check=check_folder)
    """Folder of the `.pt` splits with test prompts and tokenizer; by default each experiment's."""
    votes_file: str | None = flag(None, check=check_output)
    """JSONL file to append votes to; by default `votes.jsonl` in the last experiment dir."""
    split: Literal["train", "validation", "test"] = "train"
    """Split of the prompts to vote on; train keeps the test split clean for evaluation."""
    overlap: float = between(0, 1, 0.25)
    """Share of pairs shown to every rater, to measure agreement; each other pair is shown to one rater."""
    host: str = "127.0.0.1"
    """Address to serve on; a non-local one requires `password_file`."""
    port: int = between(1, 65535, 7860)
    """Port to serve on."""
    password_file: str | None = flag(None, check=check_password)
    """File whose first line is the password; users log in with any name, which becomes their rater name."""
    trusted_hosts: list[str] = flag([], check=check_host, show="rarely")
    """Further names under which browsers reach the demo, such as a reverse proxy's; others are refused."""
    load_in_8bit: bool = flag(False, excludes={"load_in_4bit": True}, packages={True: "bitsandbytes"})
    """Load the models' weights in 8 bits (bitsandbytes)."""
    load_in_4bit: bool = flag(False, packages={True: "bitsandbytes"})
    """Load the models' weights in 4 bits (nf4, bitsandbytes)."""
    trust_remote_code: bool = False
    """Run the code that a model's repository contains."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one)."""
    seed: int = random_seed(42)
    """Seed of sampling, of the order of pairs and of the order of the two answers."""

    def _check(self) -> None:
        if self.host not in LOCAL_HOSTS and self.password_file is None:
            raise ValueError(
                f"--host {self.host} makes the demo accessible to others; add --password_file, or use 127.0.0.1"
            )
        check_package("the demo", "gradio")


def read_password(file: str) -> str:
    """First line of a file; empty if it cannot be read."""
    try:
        return next(iter(Path(file).read_text(encoding="utf-8").splitlines()), "").strip()
    except (OSError, UnicodeDecodeError):
        return ""
