"""Diagnoses of curves: the known ends are named, and a run that learns has none."""

import json
import random
from pathlib import Path

import pytest

from lightrlhf import check_run
from lightrlhf.checks.curves import NAMES, change, diagnose, read_curves

ROWS = 40


def curve(start: float, end: float, noise: float = 0.02) -> list[float]:
    rng = random.Random(f"{start} {end}")
    return [start + (end - start) * i / (ROWS - 1) + rng.gauss(0, noise) for i in range(ROWS)]


CLEAN = {"score": curve(0, 1), "kl": curve(0, 3), "equal": curve(0.2, 0.3), "truncated": curve(0.5, 0.1)}
CLEAN |= {"length": curve(20, 30), "audit": curve(0, 0.8), "entropy": curve(3, 1), "loss": curve(0, 0)}
CLEAN |= {"gradient": curve(1, 0.5), "rate": curve(1e-3, 1e-3, 0)}
OF_OUR_RUNS = {"ratio"}  # only they say that a rollout has one update
FAULTS = {
    "all groups equal": {"equal": [0.5] * 20 + [1.0] * 20},
    "everything truncated": {"truncated": [1] * ROWS},
    "KL rises and the reward falls": {"score": curve(0.5, 0.1), "audit": curve(0.5, 0.9)},
    "reward up and audit down": {"audit": curve(0.5, 0.1), "length": curve(20, 20)},
    "length rises and the audit falls": {"score": curve(0.5, 0.5), "kl": curve(1, 2), "audit": curve(0.5, 0.1)},
    "KL runs away": {"kl": [0.01 * 1.25**i * (1 + 0.02 * (-1) ** i) for i in range(ROWS)], "score": curve(0.5, 0.5)},
    "entropy gone": {"entropy": [3 * 0.8**i * (1 + 0.02 * (-1) ** i) for i in range(ROWS)], "score": curve(0.5, 0.5)},
    "the policy does not move": {"kl": curve(0, 0, 1e-5), "score": curve(0.5, 0.5)},
    "no gradient": {"gradient": curve(0, 0, 0)},
    "numbers are not finite": {"gradient": [1.0] * 39 + [float("inf")]},
}
KEPT = [json.loads(line) for line in Path(__file__).with_name("curves.jsonl").read_text().splitlines()]


UNSEEN = ("hacked", "hacked, another seed")  # whose reward did not rise in so few steps: two of ten ends are missed


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
    assert {one.name for one in found if one.says == "cannot tell"} <= OF_OUR_RUNS | ({"kl"} if fault else set())


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


def test_a_reward_that_rises_in_few_rows_is_not_said_to_stay():
    for number in range(12, 32):
        score = [i / number + 0.02 * (i * 7 % 5 - 2) for i in range(number)]
        kl = [2 ** (8 * i / number) + 1e-3 * (i % 2) for i in range(number)]
        found = {one.name: one for one in diagnose({"kl": kl, "score": score})}
        assert found["growth"].says == "cannot tell" and "32 rows" in found["growth"].evidence


def test_a_loss_of_0_is_said_to_be_right(tmp_path):
    found = {one.name: one for one in write(tmp_path / "run", CLEAN, 0)}
    assert found["loss"].says == "right" and "look at the reward" in found["loss"].evidence


def test_margins_that_stay_at_0_and_adapters_that_do_not_learn_are_named(tmp_path):
    still = write(tmp_path / "dpo", {"margins": curve(0, 0, 1e-5), "rate": curve(1e-6, 1e-6, 0)}, 1)
    assert {one.fault for one in still if one.says == "wrong"} == {"the policy does not move"}
    assert not [one for one in write(tmp_path / "learns", {"margins": curve(0, 1)}, 1) if one.says == "wrong"]
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "args.json").write_text(json.dumps({"finetune_mode": "lora"}))
    found = write(tmp_path / "lora", CLEAN | FAULTS["the policy does not move"], 0)
    assert {one.fault for one in found if one.says == "wrong"} == {"learning rate too low for LoRA"}


@pytest.mark.parametrize(
    "ratio, fault",
    [
        ([1.0] * ROWS, set()),
        ([1.0, *curve(1.01, 1.01, 1e-3)[1:]], set()),  # some are exact
        ([1.01, 0.99] * (ROWS // 2), set()),  # of either sign
        (curve(1.01, 1.01, 1e-3), {"ratio not 1 at the first pass"}),
    ],
)
def test_the_ratio_of_only_updates_is_1(tmp_path, ratio, fault):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text(json.dumps({"disable_dropout": True}))
    found = write(tmp_path / "run", CLEAN | {"ratio": ratio}, 0)
    assert {one.fault for one in found if one.says == "wrong"} == fault


def test_files_of_tensorboard_are_read_by_their_tags(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs" / "one")) as writer:
        for i in range(ROWS):
            for name, values in {"train/reward": CLEAN["score"], "train/kl": CLEAN["kl"]}.items():
                writer.add_scalar(name, values[i], i)
    found = read_curves(str(tmp_path))
    assert found["kl"] == pytest.approx(CLEAN["kl"], abs=1e-6) and len(found["score"]) == ROWS
    says = {one.name: one.says for one in check_run.run(check_run.CheckRunArgs(run=str(tmp_path), follow=True))}
    assert says["kl"] == "right" and says["entropy"] == "cannot tell"


@pytest.mark.parametrize("number", range(len(KEPT)))
def test_a_kept_run_has_the_end_that_it_was_given(number):
    kept = KEPT[number]
    found = {one.fault for one in diagnose(kept["curves"]) if one.says == "wrong"}
    is_seen = kept["end"] and kept["name"] not in UNSEEN
    assert found == ({kept["end"]} if is_seen else set()), kept["name"]
