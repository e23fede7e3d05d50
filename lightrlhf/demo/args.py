"""Flags of the demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightrlhf.cli.args import RARE, GenerationArgs, SealArgs, check_at_least, check_types
from lightrlhf.cli.latest import why_missing
from lightrlhf.cli.lists import PATHS
from lightrlhf.cli.packages import check_package
from lightrlhf.demo.guard import HOST, LOCAL_HOSTS
from lightrlhf.models.loading import find_device
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.gguf_files import check_model_exists


@dataclass(frozen=True, kw_only=True)
class DemoArgs(GenerationArgs, SealArgs):
    """Chat with trained models in the browser, compare them and collect votes."""

    experiment_dir: list[str] = field(default_factory=list, metadata=PATHS)
    """Experiment dirs, checkpoints or model folders to load; the models they started from are available too."""
    model_name: str | None = None
    """One model to talk to, without a run: hub id, folder, GGUF file or `package:NAME`; not with `experiment_dir`."""
    rm_experiment_dir: str | None = None
    """Reward model that scores answers; by default the one that an experiment was trained with."""
    reference_dir: str | None = None
    """Reference model of KL and log-ratios; by default the model that each experiment started from."""
    data_dir: str | None = None
    """Folder of the `.pt` splits with test prompts and tokenizer; by default that of each experiment."""
    votes_file: str | None = None
    """JSONL file to append votes to; by default `votes.jsonl` in the last experiment dir."""
    split: Literal["train", "validation", "test"] = "train"
    """Split of the prompts to vote on; train keeps the test split clean for evaluation."""
    overlap: float = 0.25
    """Share of pairs shown to every rater, to measure agreement; each other pair is shown to one rater."""
    host: str = "127.0.0.1"
    """Address to serve on; a non-local one requires `password_file`."""
    port: int = 7860
    """Port to serve on."""
    password_file: str | None = None
    """File whose first line is the password; users log in with any name, which becomes their rater name."""
    trusted_hosts: list[str] = field(default_factory=list, metadata=RARE)
    """Further names under which browsers reach the demo, such as that of a reverse proxy; others are refused."""
    max_models: int = 4
    """Models kept in memory; the least recently used one is unloaded first."""
    load_in_8bit: bool = False
    """Load the models' weights in 8 bits (bitsandbytes)."""
    load_in_4bit: bool = False
    """Load the models' weights in 4 bits (nf4, bitsandbytes)."""
    trust_remote_code: bool = False
    """Let a model run the code of its own repository."""
    accelerator: str = "auto"
    """cpu, cuda, mps, or auto (a GPU if there is one)."""
    seed: int = 42
    """Seed of sampling, of the order of pairs and of the order of the two answers."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_generation()
        check_at_least(self, "max_models", 1)
        check_at_least(self, "seed", 0)
        if bool(self.experiment_dir) == bool(self.model_name):
            raise ValueError("either --experiment_dir (at least one run) or --model_name (one model) is required")
        for name in self.experiment_dir:
            check_model_exists(name, "--experiment_dir")
        if self.reference_dir is not None:
            check_model_exists(self.reference_dir, "--reference_dir")
        for flag in ("rm_experiment_dir", "data_dir"):
            if getattr(self, flag) is not None and not Path(getattr(self, flag)).is_dir():
                raise ValueError(f"--{flag} {getattr(self, flag)} {why_missing(getattr(self, flag))}")
        if self.votes_file is not None:
            check_output(Path(self.votes_file), "--votes_file")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"--overlap {self.overlap} must lie in [0, 1]")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--port {self.port} must lie in 1 to 65535")
        if self.host not in LOCAL_HOSTS and self.password_file is None:
            raise ValueError(
                f"--host {self.host} makes the demo accessible to others; add --password_file, or use 127.0.0.1"
            )
        for name in self.trusted_hosts:
            if not HOST.fullmatch(name) or ":" in name:
                raise ValueError(f"--trusted_hosts {name} must be a host name, without scheme and port")
        if self.password_file is not None and not read_password(self.password_file):
            raise ValueError(f"--password_file {self.password_file} must be a file with the password in its first line")
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("--load_in_8bit True and --load_in_4bit True are mutually exclusive")
        check_package("the demo", "gradio")
        for name in ("load_in_8bit", "load_in_4bit"):
            if getattr(self, name):
                check_package(f"--{name} True", "bitsandbytes")
        find_device(self.accelerator)

    @property
    def models(self) -> list[str]:
        """What to load: experiment dirs, or the one model."""
        return self.experiment_dir or [str(self.model_name)]


def read_password(file: str) -> str:
    """First line of a file; empty if it cannot be read."""
    try:
        return next(iter(Path(file).read_text(encoding="utf-8").splitlines()), "").strip()
    except (OSError, UnicodeDecodeError):
        return ""
