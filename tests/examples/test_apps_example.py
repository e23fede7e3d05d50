"""examples/apps.sh: its problems are right, and pass@1 counts what passes."""

import json

from datasets_prep.apps.prepare_data import to_row
from examples import pass_at_1, small_problems
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl


def test_the_small_problems_are_of_apps_schema_and_their_solutions_pass(tmp_path, capsys):
    small_problems.main(["--output_file", str(tmp_path / "problems.jsonl"), "--largest", "1"])
    rows = read_jsonl(tmp_path / "problems.jsonl")
    assert len(rows) == len({row["question"] for row in rows}) == 18
    examples = [to_row(row) for row in rows]
    assert all(json.loads(e["columns"]["tests"])["inputs"] for e in examples)
    answers = [
        {"responses": [e["completion"], "print('no')\n", "print("], "tests": e["columns"]["tests"]}
        for e in examples[:4]
    ]
    write_jsonl(tmp_path / "answers.jsonl", answers)
    capsys.readouterr()
    pass_at_1.main(["--responses_file", str(tmp_path / "answers.jsonl")])
    # each problem has one of three programs right: as if 12 were independent, though only 4 problems were
    assert "pass@1 0.333 [0.075, 0.755] of 12 programs for 4 problems, 0 not scored" in capsys.readouterr().out
