"""What is written for another harness: the model, the held-out data and the folder, and what was written there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightrlhf.data.splits import Row, load_split
from lightrlhf.data.types import Tokenizer
from lightrlhf.evaluation.frame import PolicyEvaluationArgs
from lightrlhf.storage.run_dir import short_name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be evaluated by another harness."""

    args: PolicyEvaluationArgs
    name: str  # experiment dir, checkpoint or model folder, as given
    source: str  # folder of the checkpoint, or hub id
    model: Any  # Policy, or ScalarModel for rewardbench
    tokenizer: Tokenizer
    data_dir: str
    folder: Path  # of the files that are written
    questions: list[Row]  # of the user's own file; empty without one

    @property
    def label(self) -> str:
        """The model's name in the files, and the stem of their names."""
        return short_name(self.name)

    def rows(self, stage: str) -> list[Row]:
        """Rows of the split, at most `--num_samples`; empty where the data has none of this stage."""
        if not Path(self.data_dir, f"{stage}_{self.args.split}.pt").is_file():
            return []
        return load_split(self.data_dir, stage, self.args.split, self.args.verify)[: self.args.num_samples]


class Written(NamedTuple):
    """What was written for a harness."""

    files: list[Path]
    command: str  # that runs the harness on the files, empty where it cannot run this model by itself
    results: dict[str, float]  # of the same rows, computed here
    note: str = ""  # what the user must know of them
