"""Flags of the evaluations during training, and which value of a metric is the best."""

from __future__ import annotations

from dataclasses import dataclass

from lightrlhf.cli.fields import Args, at_least, flag

LOWER_IS_BETTER = {"loss", "preference_loss", "nll", "perplexity", "kl"}  # last parts of metrics' names
HIGHER_IS_BETTER = {"accuracies", "margins", "score", "reward", "gold", "win_rate", "success"}


def best_metric(keep_best: str, flag: str = "--keep_best") -> tuple[str, bool]:
    """The metric of `--keep_best` and whether lower is better. Raises: ValueError when the name does not say which."""
    side, prefixed, name = keep_best.partition(":")
    if prefixed and side in ("min", "max"):
        return name, side == "min"
    last = keep_best.rpartition("/")[2]
    if last not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
        raise ValueError(f"{flag} {keep_best}: say which value is better, {flag} min:{keep_best} or max:{keep_best}")
    return keep_best, last in LOWER_IS_BETTER


@dataclass(frozen=True, kw_only=True)
class EvalIntervalArgs(Args):
    """Evaluation during training."""

    eval_interval: int = at_least(0, 100, show="rarely")
    """Steps between evaluations on validation data; 0 disables them."""


@dataclass(frozen=True, kw_only=True)
class EvalArgs(EvalIntervalArgs):
    """Evaluation during training."""

    eval_iters: int | None = at_least(1, None, show="rarely")
    """Micro-batches per evaluation; all data when not given."""
    keep_best: str | None = flag(None, check=best_metric, show="rarely")
    """Keep the best checkpoint by this metric, such as val/loss, as `best`; min:NAME or max:NAME sets the direction."""
    early_stop_patience: int | None = at_least(1, None, needs="keep_best", show="rarely")
    """Stop after this many evaluations in a row without a better value of `keep_best`."""

    def _check(self) -> None:
        if self.keep_best is not None and best_metric(self.keep_best)[0].startswith("val/") and not self.eval_interval:
            raise ValueError(f"--keep_best {self.keep_best} is measured in evaluations; give --eval_interval above 0")
