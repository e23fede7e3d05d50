"""Consistency of a resumed run with its beginning: its sources, and the rows that each step reads.

The number of a step determines its rows, in an order that follows from the seed. With other rows, another seed or
another number of rows per step, some rows would be trained on twice and others never. With another number of optimiser
steps per step, the learning-rate schedule would continue at another position. The number of ranks may change as long
as its product with the rows per rank stays the same.

Left out: flags that change what is learned from a row; a resumed run may change them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import StartArgs, TrainArgs
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.flat import Rows
from lightrlhf.storage.curves import NO_SETTINGS
from lightrlhf.training.sources import RESTORE, find_changed_source, sources_of

PER_RANK = ("mini_batch_size", "rollout_size")  # flags that count rows of a step on each rank
LIMITS = ("max_turns", "max_episode_tokens", "max_observation_tokens")
ACTING = ("env", "env_options", "tools", "mcp", "agent", "credit", *LIMITS)
SAME = ("seed", "data_weights", "curriculum_score", "num_generations", "levels", "stages", *ACTING)
FREE = {*NO_SETTINGS, "max_steps", "epochs", "devices", "num_nodes", "log_interval"} - {"seed"}  # never the cause


class Beginning:
    """The values of `began` in `args.json`; each is compared with the resumed run's when it is fixed.

    ranks: the number of data-parallel ranks; given: objects that the program was called with, as `describe_given`
    describes them; before: `args.json` of the run that is resumed.
    Raises: UsageError naming the flag and the remedy, when a value differs.
    """

    def __init__(
        self, args: TrainArgs, ranks: int, given: Mapping[str, str], before: Mapping[str, Any] | None = None
    ) -> None:
        self.args, self.ranks, self.given, self.before = args, ranks, given, before or {}
        self.values: dict[str, Any] = {}
        self.sources = sources_of(args, given)
        if before and (changed := find_changed_source(before["began"]["sources"], self.sources)):
            raise UsageError(self.refusal(*changed))
        flags = to_dict(args)
        for name in PER_RANK:
            if (value := flags.get(name)) is not None:
                words = f"--{name} {value} on {ranks} rank{'s' * (ranks > 1)} is"
                self.fix(name, value * ranks, words, self._find_remedy(name))
        for name in SAME:
            if name in flags:
                self.fix(name, flags[name], f"--{name} is")

    def fix(self, name: str, value: Any, words: str, remedy: str = "") -> None:
        """Fix a named value; words: its description and a verb, for the error; remedy: replaces the default remedy."""
        before = self.before.get("began", {}).get(name, value)
        if before != value:
            is_flag = name in (*PER_RANK, *SAME)
            changed = "" if is_flag else self._list_changes()
            remedy = remedy or ("" if is_flag or changed else RESTORE)
            raise UsageError(self.refusal(f"{words} {value}, and was {before} when the run began{changed}", remedy))
        self.values[name] = value

    def fix_rows(self, rows: Sequence[Any], batch_size: int, source: str) -> None:
        """Fix the rows of the run and the number of rows per step on each rank."""
        before = str(self.before.get("began", {}).get("rows"))
        is_given = bool({"rows", "prompts", "dialogues"} & self.given.keys())  # then `check_given` has compared them
        self.fix(
            "rows", f"{len(rows)} rows" if is_given else describe_rows(rows, before), f"the content of {source} is"
        )
        self.fix("rows_of_a_step", batch_size * self.ranks, "the number of rows of a step is")

    def as_stored(self) -> dict[str, Any]:
        """The values for `args.json`, once all models are loaded and the hub's are in its cache."""
        now = self.sources if all(one["files"] for one in self.sources.values()) else sources_of(self.args, self.given)
        sources = {flag: one if one["files"] else now[flag] for flag, one in self.sources.items()}
        return {**self.values, "sources": sources}

    def refusal(self, problem: str, remedy: str = "") -> str:
        """The text of an error: the run, what has changed, and the remedies."""
        run = self.args.resume_from
        flag = "--sft_experiment_dir" if isinstance(self.args, StartArgs) else "--model_name"
        remedy = remedy or f"go on as it began by --resume_from {run} alone"
        return f"--resume_from {run}: {problem}; {remedy}, or begin a new run from its weights by {flag} {run}"

    def _find_remedy(self, name: str) -> str:
        before = self.before.get("began", {}).get(name)
        return f"give --{name} {before // self.ranks}" if before and before % self.ranks == 0 else ""

    def _list_changes(self) -> str:
        """The flags that have changed, one of which may be the reason."""
        now, known = to_dict(self.args), self.before.keys() - {*FREE, *PER_RANK}
        names = [one for one in now if one in known and self.before[one] != now[one]]
        changed = ", ".join(f"--{one} {now[one]} (was {self.before[one]})" for one in names)
        return f"; changed: {changed}" if changed else ""


def describe_rows(rows: Sequence[Any], before: str = "") -> str:
    """The number of rows and their hash, for errors and `args.json`.

    before: what is compared with it; rows that a file holds were hashed one by one in earlier versions.
    """
    if isinstance(rows, Rows) and ", sha256 " not in before:
        return f"{len(rows)} rows, digest {rows.digest()[:16]}"
    return f"{len(rows)} rows, sha256 {hash_rows(rows)}"


def hash_rows(rows: Iterable[Any]) -> str:
    """The beginning of the SHA-256 of rows: dicts of tensors and plain values, objects with such fields, or values."""
    digest = hashlib.sha256()
    for row in rows:
        fields = row if isinstance(row, Mapping) else getattr(row, "__dict__", {"": row})
        for name, value in fields.items():
            if name == "columns" and isinstance(value, Mapping):  # a column without a value may be another split's
                value = sorted((key, repr(one)) for key, one in value.items() if one is not None)
            digest.update(name.encode())
            digest.update(value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()[:16]
