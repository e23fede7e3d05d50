"""Verdicts as they are printed and written."""

import json

from lightrlhf.checks.verdicts import Verdict, is_wrong, show, write

FOUND = (
    Verdict("mask", "right"),
    Verdict("loss", "cannot tell", evidence="needs new_logprobs"),
    Verdict("advantages", "wrong", "baseline of the batch", "row 3: 0.5, not 1.0", ("groups unknown",), "--n"),
)


def test_what_is_wrong_is_printed_with_its_evidence_and_cause(capsys):
    show("run", FOUND)
    shown = capsys.readouterr().out
    for text in ("needs new_logprobs", "advantages: baseline of the batch: row 3", "cause: groups unknown", "at: --n"):
        assert text in shown
    assert is_wrong(FOUND) and not is_wrong(FOUND[:2])


def test_verdicts_are_written_as_objects(tmp_path):
    write(str(tmp_path / "found.json"), FOUND)
    read = json.loads((tmp_path / "found.json").read_text())
    assert [(one["name"], one["says"], one["fault"]) for one in read] == [one[:3] for one in FOUND]
