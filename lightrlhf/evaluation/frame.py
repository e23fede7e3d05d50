"""What the programs that evaluate have in common: whom they evaluate and on how many rows, and where results go.

Left out: what is measured, and the table that is printed; each program has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least, flag, random_seed
from lightrlhf.cli.groups import DecodingArgs, DryRunArgs, FrozenArgs, SealArgs
from lightrlhf.cli.lists import paths
from lightrlhf.cli.parser import to_dict
from lightrlhf.cli.paths import check_folder
from lightrlhf.data.types import Tokenizer
from lightrlhf.gguf.files import check_model_exists
from lightrlhf.models.loading import find_device, load_policy, load_scalar
from lightrlhf.models.names import resolve
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.jsonl import Records
from lightrlhf.storage.results import write_results
from lightrlhf.storage.run_dir import data_dir_of, is_experiment_dir, pretrained_model

OwnArgs = TypeVar("OwnArgs", bound="EvaluationArgs")


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs(DryRunArgs):
    """Evaluation."""

    model_name: list[str] = flag([], split=paths, check=check_model_exists, show="first", positional=True)
    """Experiment dirs or checkpoints of the models."""
    split: Literal["train", "validation", "test"] = "test"
    """Split to evaluate on."""
    num_samples: int | None = at_least(1, None)
    """Rows to use, in a text environment starts of each level; all when not given."""
    rollout_mini_batch_size: int = at_least(1, 64)
    """Rows per forward pass and slots of the generation engine."""
    seed: int = random_seed(42)
    """Seed of the sampling noise, the same for every model, and of bootstraps."""
    accelerator: str = flag("auto", check=find_device)
    """cpu, cuda, mps, or auto (a GPU if there is one)."""


@dataclass(frozen=True, kw_only=True)
class PolicyEvaluationArgs(EvaluationArgs, DecodingArgs, SealArgs):
    """Evaluation."""

    data_dir: str | None = flag(None, check=check_folder)
    """Folder of the `.pt` splits; by default the data that the first experiment was trained on."""
    use_pretrained: bool = False
    """Also evaluate the model that the first experiment started from, as row zero."""

    @property
    def model_names(self) -> list[str]:
        """The models in the order of the table. Raises: UsageError when the first began from no pretrained one."""
        first = [pretrained_model(self.model_name[0])] if self.use_pretrained else []
        return first + self.model_name

    @property
    def data_folder(self) -> str:
        """Folder of the splits. Raises: UsageError when neither a flag nor the first experiment names it."""
        folder = self.data_dir or data_dir_of(self.model_name[0])
        if folder is None:
            raise UsageError(f"--data_dir is required: {self.model_name[0]} has no args.json that names its data")
        return folder


def first_rows(args: OwnArgs, size: int) -> OwnArgs:
    """The arguments of a dry run, which takes at most `size` rows; others as they are."""
    return dataclasses.replace(args, num_samples=min(args.num_samples or size, size)) if args.dry_run else args


def load_frozen(name: str, tokenizer: Tokenizer, device: torch.device, flag: str = "--model_name") -> Policy:
    """A language model that is not trained. Raises: UsageError naming `flag`."""
    return load_policy(name, FrozenArgs(), tokenizer, flag).requires_grad_(False).eval().to(device)


def load_reward_model(args: EvaluationArgs, name: str, tokenizer: Tokenizer, device: torch.device) -> ScalarModel:
    """A reward model that is not trained. Raises: UsageError."""
    model = load_scalar(resolve(name), FrozenArgs(), tokenizer, args.seed)
    return model.requires_grad_(False).eval().to(device)


def load_evaluated(
    args: PolicyEvaluationArgs, name: str, data_dir: str, device: torch.device
) -> tuple[Policy, Tokenizer]:
    """A language model and its tokenizer. Raises: UsageError."""
    tokenizer = load_tokenizer(data_dir, name, verify=args.verify)
    return load_frozen(name, tokenizer, device), tokenizer


def records_of(args: EvaluationArgs, model: str) -> Records:
    """Where the records of a model wait for its results; a dry run, and a plain folder of a model, keep the first."""
    return Records(Path(model, "eval") if is_experiment_dir(model) and not args.dry_run else None)


def write(
    args: EvaluationArgs, model: str, name: str, row: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> Path | None:
    """Write a model's row of results and its records into its experiment dir, in a dry run print the first record.

    Returns the path of the files without suffixes, None where none were written, as for a plain folder of a model.
    """
    if not (args.dry_run or is_experiment_dir(model)):
        return None
    chosen = write_results(Path(model), name, row, records, to_dict(args))
    return None if args.dry_run else Path(model, "eval", chosen)
