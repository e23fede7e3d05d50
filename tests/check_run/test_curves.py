"""Diagnoses of curves: the known ends are named, and a run that learns has none."""

import json
import random

import pytest

from lightrlhf import check_run
from lightrlhf.checks.curves import NAMES, change

ROWS = 40


def curve(start: float, end: float, noise: float = 0.02) -> list[float]:
    rng = random.Random(f"{start} {end}")
    return [start + (end - start) * i / (ROWS - 1) + rng.gauss(0, noise) for i in range(ROWS)]


CLEAN = {"score": curve(0, 1), "kl": curve(0, 3), "equal": curve(0.2, 0.3), "truncated": curve(0.5, 0.1)}
CLEAN |= {"length": curve(20, 30), "audit": curve(0, 0.8)}
FAULTS = {
    "all groups equal": {"equal": [0.5] * 20 + [1.0] * 20},
    "everything truncated": {"truncated": [1] * ROWS},
    "KL rises and the reward falls": {"score": curve(0.5, 0.1), "audit": curve(0.5, 0.9)},
    "reward up and audit down": {"audit": curve(0.5, 0.1), "length": curve(20, 20)},
    "length rises and the audit falls": {"score": curve(0.5, 0.5), "kl": curve(1, 1), "audit": curve(0.5, 0.1)},
}


def write(folder, curves, column: int):
    """Curves as our metrics (column 0), or as the state of another trainer, by its names where it has some."""
    names = {name: columns[min(column, len(columns) - 1)] for name, columns in NAMES.items()}
    rows = [{"step": i + 1} | {names[name]: values[i] for name, values in curves.items()} for i in range(ROWS)]
    folder.mkdir(exist_ok=True)
    if column:
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    else:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return check_run.run(check_run.CheckRunArgs(run=str(folder), follow=True))


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_known_end_is_named(tmp_path, fault, column):
    found = write(tmp_path / "run", CLEAN | FAULTS.get(fault, {}), column)
    assert {one.fault for one in found if one.says == "wrong"} == ({fault} if fault else set())
    assert all(one.says != "cannot tell" for one in found)


@pytest.mark.parametrize("name, other", [("kl", "score"), ("length", "audit"), ("audit", "audit")])
def test_a_reward_that_stays_at_its_best_is_not_wrong(tmp_path, name, other):
    found = {one.name: one for one in write(tmp_path / "run", CLEAN | {other: curve(1, 1)}, 0)}
    assert found[name].says == "cannot tell" and found[name].fault == ""


def test_groups_of_one_member_are_not_compared(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text(json.dumps({"num_generations": 1}))
    found = {one.name: one for one in write(tmp_path / "run", CLEAN | {"equal": [1.0] * ROWS}, 0)}
    assert found["groups"].says == "cannot tell"


def test_curves_that_are_missing_or_short_are_named(tmp_path):
    found = {one.name: one for one in write(tmp_path / "run", {"score": CLEAN["score"]}, 0)}
    assert found["kl"].says == "cannot tell" and found["kl"].evidence == "needs objective/kl or kl"
    assert change([0, 0.1, 0] * 4)[0] == 0
