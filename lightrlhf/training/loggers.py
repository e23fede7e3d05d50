"""Loggers: metrics, texts and arguments of a run for TensorBoard, CSV or Weights & Biases (`--logger`).

All of it is in `metrics.jsonl`, `samples.jsonl`, `rollouts.jsonl` and `args.json` of the experiment dir as well; these
are what other programs read. Loggers of the first rank only.

Left out: histograms, weights as artifacts, and texts as CSV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.data.splits import Row

SHOWN_TEXTS = 4  # of those that are kept in a step
LONGEST_TEXT = 10_000  # characters of a text that is shown; the files have all of it


class Logger(Protocol):
    """A destination of logs, besides the files of the experiment dir."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log finite metrics of a step."""

    def log_texts(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Log the first samples of a step: rows of `rollouts.jsonl` or `samples.jsonl`."""

    def close(self) -> None:
        """Finish the log of a run that has ended well."""


def make_logger(args: TrainArgs, directory: Path, described: Mapping[str, Any], step: int) -> Logger:
    """The logger of `--logger` for a run that begins, or goes on, after this step.

    described: the content of `args.json`. Raises: UsageError when W&B refuses the run.
    """
    if args.logger == "wandb":
        return WandbLogger(args.wandb_project or args.experiment_name, directory, described)
    return TensorBoardLogger(directory, described, step) if args.logger == "tensorboard" else CSVLogger(directory)


class CSVLogger:
    """Metrics in `logs/metrics.csv`."""

    def __init__(self, directory: Path) -> None:
        from lightning.fabric.loggers import CSVLogger as FabricLogger

        self._logger = FabricLogger(root_dir=str(directory), name="logs", version="")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(dict(metrics), step)

    def log_texts(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Texts are in the files of the experiment dir alone."""

    def close(self) -> None:
        self._logger.finalize("success")


class TensorBoardLogger:
    """Scalars, texts and hyper-parameters in an event file in `logs`.

    Hyper-parameters are what `SummaryWriter.add_hparams` writes, less the list of metrics and the separate folder:
    without that list TensorBoard's table has every scalar of all runs, with its last value. Steps that a resumed run
    repeats are marked to be dropped by readers.
    """

    def __init__(self, directory: Path, described: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "logs"), purge_step=step + 1 if step else None)
        self._log_session(flat(described), part=1)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, name: str, rows: Sequence[Row], step: int) -> None:
        for number, row in enumerate(rows[:SHOWN_TEXTS]):
            self._writer.add_text(f"{name}/{number}", markdown(row), step)

    def close(self) -> None:
        self._log_session({}, part=2)
        self._writer.close()

    def _log_session(self, values: Mapping[str, Any], part: int) -> None:
        """Write the start (1) or the end (2) of a session as the plugin `hparams` reads it."""
        from torch.utils.tensorboard.summary import hparams

        self._writer._get_file_writer().add_summary(hparams(dict(values), {})[part])


class WandbLogger:
    """A W&B run with config, curves and a page of texts at each step that has some.

    A resumed run goes on in its W&B run; metrics are drawn over their `step`, so repeated ones lie on each other.
    Raises: UsageError when W&B refuses to start the run.
    """

    def __init__(self, project: str, directory: Path, described: Mapping[str, Any]) -> None:
        import wandb

        earlier = sorted((directory / "wandb").glob("*run-*-*"))  # [offline-]run-TIME-ID, in the order of their times
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                dir=str(directory),
                id=earlier[-1].name.rpartition("-")[2] if earlier else None,
                resume="allow",
                config=dict(described),
                reinit="create_new",
            )
        except wandb.Error as problem:
            raise UsageError(
                f"--logger wandb: {first_line(problem)}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_texts(self, name: str, rows: Sequence[Row], step: int) -> None:
        import wandb

        page = wandb.Html("<hr>".join(map(html, rows[:SHOWN_TEXTS])), inject=False)  # a Table would be an artifact each
        self._run.log({name: page, "step": step})

    def close(self) -> None:
        self._run.finish()


def flat(described: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Nested values as `versions/torch`; what is not a number becomes a text, as True and False."""
    found: dict[str, int | float | str] = {}
    for name, value in described.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": one for key, one in flat(value).items()}
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            found[name] = value if is_number else str(value)
    return found


def markdown(row: Row) -> str:
    """A sample as two quoted blocks of Markdown, which show its texts as they are."""
    return "\n\n".join(f"**{title}**\n\n{indent(text, '    ', lambda line: True)}" for title, text in parts(row))


def html(row: Row) -> str:
    """A sample as two preformatted blocks of HTML."""
    return "".join(
        f"<b>{title}</b><pre style='white-space: pre-wrap'>{escape(text)}</pre>" for title, text in parts(row)
    )


def parts(row: Row) -> list[tuple[str, str]]:
    """Title and text of the prompt and the response of a sample, each of at most `LONGEST_TEXT` characters."""
    texts = []
    for name in ("prompt", "response"):
        text, more = row[name], len(row[name]) - LONGEST_TEXT
        texts.append(text if more <= 0 else f"{text[:LONGEST_TEXT]} [{more} more characters]")
    score = row.get("score")
    return list(zip(("prompt", "response" if score is None else f"response, score {score}"), texts))
