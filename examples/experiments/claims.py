"""Write the tables of the pages in howto/, between their markers, from the raw rows in the repository.

What is tested is listed in `claim_list`. A verdict is computed from the 95% interval of the paired difference over
seeds and never typed: *held* above 0, *the opposite held* below, *not held* else; where a control with the same horizon
is part of the claim and the difference to it is not above 0, *only at the same lambda*. Fewer than three seeds give no
verdict.

    python -m examples.experiments.claims
    python -m examples.experiments.claims --keep macro_actions --output_dir macro_actions
    python -m examples.experiments.claims --smoke True

The second puts the rows of an experiment's folder into the repository first. The third runs one seed of the cheapest
arm again and compares its row with the one that is kept: bit for bit on the same processor with the same packages, else
the scores of the first rollouts, which differ by rounding alone, within a tolerance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from examples.experiments.claim_list import SECTIONS, Claim, Section, rollouts
from examples.experiments.page_tables import TABLES, markdown, short
from examples.experiments.readings import Gap, compare
from examples.experiments.records import Row, common_seeds, keep, kept_rows
from examples.experiments.stats import log_rank, shown_gap
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import Args
from lightrlhf.cli.parser import parse
from lightrlhf.storage.writing import write_text

HOWTO = Path(__file__).resolve().parents[2] / "howto"
ENOUGH = 3  # seeds of a verdict
HOPELESS = "not measurable here"
VERDICTS = (
    "held",
    "only at the same lambda",
    "not held",
    "the opposite held",
    "fewer than three seeds",
    "no rows yet",
    HOPELESS,
)
CHEAPEST = {"setting": "share", "arm": "n=8", "seed": 1}  # of macro_actions: 10 seconds of a processor
FIRST, TOLERANCE = 5, 0.02  # rollouts, and of their scores, where another processor or release rounds differently


@dataclass(frozen=True, kw_only=True)
class ClaimsArgs(Args):
    """Write the tables of the pages from raw rows."""

    keep: str | None = None
    """Experiment whose rows in `output_dir` are put into the repository first: a name in `results`, or a new one."""
    output_dir: str | None = None
    """Folder of that experiment."""
    tables: bool = False
    """Print every table that is made from rows instead, whether a page has it or not."""
    smoke: bool = False
    """Run one seed of the cheapest arm again instead, and compare it with the row that is kept."""

    def _check(self) -> None:
        if (self.keep is None) is not (self.output_dir is None):
            raise ValueError("--keep and --output_dir go together: an experiment, and the folder of its rows")


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(ClaimsArgs, argv)
    if args.smoke:
        run_again()
        return
    if args.tables:
        for name, table in tables().items():
            print(f"{name}\n\n{table()}")
        return
    if args.keep and args.output_dir:
        keep(args.keep, Path(args.output_dir))
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            print(f"written: {path}")


def tables() -> dict[str, Callable[[], str]]:
    """Every table that is made from rows, by name."""
    of_claims = {f"claims, {section.title}": partial(claim_table, section) for section in SECTIONS}
    return {"verdicts": verdicts, **of_claims, **TABLES}


def pages() -> dict[Path, str]:
    """The text of every page that has tables made from rows."""
    made = {}
    for path in sorted(HOWTO.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        for name, table in tables().items():
            start, end = f"<!-- rows: {name} -->", f"<!-- end of rows: {name} -->"
            before, marker, rest = text.partition(start)
            if marker:
                text = f"{before}{start}\n\n{table()}\n{end}{rest.partition(end)[2]}"
                made[path] = text
    return made


# ------------------------------------------------------------------------------------------------------- what is found
class Finding(NamedTuple):
    """What rows say of a claim."""

    n: int
    gap: Gap
    matched: Gap | None
    rows: Sequence[Row] = ()


def find(claim: Claim, rows: Sequence[Row]) -> Finding | None:
    """A claim's differences by an experiment's rows; None where there are none.

    Rows of seed 0 are those of trials and of bases, and left out.
    """
    arms = [claim.arm, claim.control, *([claim.matched] if claim.matched else [])]
    own = [row for row in rows if row["seed"] and claim.where.items() <= row.items()]
    seeds = common_seeds(own, arms)
    own = [row for row in own if row["arm"] in arms and row["seed"] in seeds]
    gaps = [compare(own, claim.arm, other, claim.read, claim.less_is_better) for other in arms[1:]]
    found = [one.gap for one in gaps if one]
    return Finding(len(seeds), found[0], found[1] if claim.matched else None, own) if found else None


def verdict(finding: Finding | None) -> str:
    """What the intervals say of a claim."""
    if finding is None:
        return "no rows yet"
    if finding.n < ENOUGH:
        return "fewer than three seeds"
    if finding.gap[1] <= 0:
        return "not held" if finding.gap[2] >= 0 else "the opposite held"
    return "only at the same lambda" if finding.matched and finding.matched[1] <= 0 else "held"


# ---------------------------------------------------------------------------------------------------------- the tables
def findings(section: Section) -> list[Finding | None]:
    """What the rows say of each claim of a section."""
    return [find(claim, kept_rows(claim.experiment)) for claim in section.claims]


def verdicts() -> str:
    """A table of how many claims have each verdict, and the number of comparisons."""
    found = [one for section in SECTIONS for one in findings(section)]
    counts = Counter(verdict(one) for one in found)
    counts[HOPELESS] = sum(len(section.not_measurable) for section in SECTIONS)
    comparisons = sum(1 + bool(one.matched) for one in found if one)
    rows = [(name, str(counts[name])) for name in VERDICTS if counts[name]]
    return (
        f"{markdown(('verdict', 'claims'), rows)}\nThe {comparisons} comparisons are not adjusted for their number.\n"
    )


def claim_table(section: Section) -> str:
    """A row for each claim of a section, and for what cannot be measured here."""
    table = [cells(claim, finding) for claim, finding in zip(section.claims, findings(section))]
    table += [(said, "", "", "", HOPELESS) for said in section.not_measurable]
    return markdown(("claim", "measured", "difference", "n", "verdict"), table)


def cells(claim: Claim, finding: Finding | None) -> tuple[str, ...]:
    """The row of a claim."""
    if finding is None:
        return claim.says, claim.measure, f"`{claim.arm}` minus `{claim.control}`", "", verdict(None)
    gaps = [f"`{claim.arm}` {difference(claim, claim.control, finding.gap, finding.rows)}"]
    if claim.matched and finding.matched:
        gaps.append(difference(claim, claim.matched, finding.matched, finding.rows))
    return claim.says, claim.measure, "<br>".join(gaps), str(finding.n), verdict(finding)


def difference(claim: Claim, control: str, gap: Gap, rows: Sequence[Row]) -> str:
    """A difference to a control with its interval, and p of the log-rank test where times were compared."""
    text = f"minus `{control}`"
    text += f": {short(shown_gap(gap, claim.digits))}" if gap[1] > float("-inf") else ""
    if claim.read is rollouts:
        times = ([row["rollouts"] for row in rows if row["arm"] == arm] for arm in (claim.arm, control))
        text += f", p {short(f'{log_rank(*times)[1]:.2g}')}"
    return text


# ---------------------------------------------------------------------------------------------------------- once again
def run_again() -> None:
    """Run one seed of the cheapest arm and compare its row with the one that is kept. Raises: RunFailure."""
    before = next(row for row in kept_rows("macro_actions") if CHEAPEST.items() <= row.items())
    flags = {"settings": CHEAPEST["setting"], "arms": CHEAPEST["arm"], "seeds": str(CHEAPEST["seed"])}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "results.jsonl").touch()  # so that it does not start from the rows that are kept
        command = [sys.executable, "-m", "examples.experiments.macro_actions", *words, "--output_dir", folder]
        subprocess.run([*command, "--num_workers", "1"], check=True)
        (row,) = map(json.loads, (Path(folder) / "results.jsonl").read_text(encoding="utf-8").splitlines())
    print(f"claims-smoke: {compared(before, row)}")


def compared(before: Row, row: Row) -> str:
    """How two rows of the same run agree. Raises: RunFailure where they do not."""
    if maker(before) == maker(row):
        changed = [name for name in before if name not in UNSTABLE and before[name] != row.get(name)]
        if changed:
            raise RunFailure(
                f"claims-smoke: {changed[0]} was {before[changed[0]]} and is {row.get(changed[0])}; {STALE}"
            )
        return f"the row of {CHEAPEST} is the same, bit for bit"
    gap = max(abs(one - other) for one, other in zip(before["curve"][:FIRST], row["curve"][:FIRST], strict=True))
    if gap > TOLERANCE:
        raise RunFailure(f"claims-smoke: the first {FIRST} scores differ by {gap:.3f}, more than {TOLERANCE}; {STALE}")
    return f"another processor or other packages: the first {FIRST} scores of {CHEAPEST} differ by {gap:.2g}"


UNSTABLE = ("seconds", "cpu_seconds", "versions", "commit", "day")
STALE = "a change of results needs new rows (howto/results.md, Run them again)"


def maker(row: Row) -> Any:
    """What must be the same for the same bits: the processor, and the packages but for this library."""
    return row["processor"], {name: one for name, one in row["versions"].items() if name != "lightrlhf"}


if __name__ == "__main__":
    main()
