"""pass@1 of programs that `lightrlhf.generate` wrote: the share of them that pass every test of their problem."""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets_prep.apps.reward import adaptive_score
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.lists import PATHS
from lightrlhf.cli.parser import parse
from lightrlhf.maths.ops import wilson_interval
from lightrlhf.storage.jsonl import read_jsonl


@dataclass(frozen=True, kw_only=True)
class PassAt1Args:
    """Run generated programs against their tests."""

    responses_file: list[str] = field(metadata=PATHS)
    """JSONL files of `lightrlhf.generate` whose rows have the column `tests`."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(PassAt1Args, argv)
    for name in args.responses_file:
        rows = read_jsonl(name, needs=["responses", "tests"])
        tests = [row["tests"] for row in rows for _ in row["responses"]]
        scores = adaptive_score([], [text for row in rows for text in row["responses"]], tests)
        judged = [score for score in scores if score == score]  # NaN: nothing can be said
        passed, runs = (sum(score >= least for score in judged) for least in (1.0, -0.3))
        low, high = wilson_interval(passed, len(judged))
        print(
            f"{name}: pass@1 {passed / len(judged):.3f} [{low:.3f}, {high:.3f}] of {len(judged)} programs, "
            f"{runs / len(judged):.3f} run to the end, mean reward {sum(judged) / len(judged):.3f}"
        )


if __name__ == "__main__":
    main()
