"""Verdicts of `lightrlhf.check_run` and `lightrlhf.check_data`, one for each check, printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lightrlhf.storage.jsonl import to_json
from lightrlhf.storage.results import print_table
from lightrlhf.storage.writing import make_folder, write_text

RIGHT: Literal["right"] = "right"
WRONG: Literal["wrong"] = "wrong"
CANNOT_TELL: Literal["cannot tell"] = "cannot tell"


class Verdict(NamedTuple):
    """What one check says."""

    name: str  # of the check, the same in each version, such as "mask"
    says: Literal["right", "wrong", "cannot tell"]
    fault: str = ""  # name of the fault, the same in each version, such as "baseline of the batch"; "" if none
    evidence: str = ""  # rows and numbers, the expected and the found; for "cannot tell" what is missing
    causes: tuple[str, ...] = ()  # probable ones, several where several fit
    look_at: str = ""  # line of the config, flag or page


def is_wrong(verdicts: Sequence[Verdict]) -> bool:
    """Whether a fault was found, for the exit status."""
    return any(one.says == WRONG for one in verdicts)


def show(title: str, verdicts: Sequence[Verdict]) -> None:
    """Print a table of the checks, then each fault: evidence, causes and where to look."""
    rows = [[one.name, one.says, one.fault or (one.evidence if one.says == CANNOT_TELL else "")] for one in verdicts]
    print_table(title, ("check", "says", "fault, or what is missing"), rows)
    for one in verdicts:
        if one.says == WRONG:
            print(f"{one.name}: {one.fault}: {one.evidence}")
            for cause in one.causes:
                print(f"  cause: {cause}")
            if one.look_at:
                print(f"  look at: {one.look_at}")


def write(path: str, verdicts: Sequence[Verdict]) -> None:
    """Write verdicts as a JSON list of objects."""
    make_folder(Path(path).parent)
    write_text(Path(path), to_json([one._asdict() for one in verdicts], indent=1))
    print(f"wrote {path}")
