"""The best checkpoint of a run (`--keep_best`), and early stopping (`--early_stop_patience`).

All of it is in `resume.pt`, so a resumed run decides the same.

Left out: improvements that must exceed a margin, several metrics at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import EvalArgs, TrainArgs
from lightrlhf.cli.groups.evaluation import best_metric


class Best:
    """The best value so far of the metric of `--keep_best`; state: a checkpoint's, which counts if it is of the
    same metric."""

    def __init__(self, args: TrainArgs, state: dict[str, Any] | None) -> None:
        flags = (args.keep_best, args.early_stop_patience) if isinstance(args, EvalArgs) else (None, None)
        self.flag, self.patience = flags
        self.metric, self.lower_is_better = best_metric(self.flag) if self.flag else ("", False)
        self.value = math.nan
        self.step: int | None = None
        self.unsaved = False  # no checkpoint has the best value yet
        self.since = 0  # values in a row, after the best one, that were no better
        if state and state["metric"] == self.metric:
            self.value, self.step, self.since = state["value"], state["step"], state["since"]

    def update(self, value: float, step: int) -> bool:
        """Compare a value of a step; returns whether it is the best so far, which one that is not finite never is."""
        gain = self.value - value if self.lower_is_better else value - self.value
        is_better = math.isfinite(value) and (self.step is None or gain > 0)
        if is_better:
            self.value, self.step, self.unsaved = value, step, True
        self.since = 0 if is_better else self.since + 1
        return is_better

    @property
    def out_of_patience(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step, "since": self.since}

    def check_logged(self, names: Iterable[str]) -> None:
        """Raises: UsageError when the metric is not among the names of all that a run logs."""
        known = [name for name in names if not name.startswith("time/")]
        if self.flag and self.metric not in known:
            raise UsageError(
                f"--keep_best {self.flag} is not a metric of this run; it logs {', '.join(known) or 'none'}"
            )

    def __str__(self) -> str:
        return f"the best {self.metric} is {self.value:.4g} of step {self.step}" if self.step is not None else ""
