"""lightrlhf.sweep: which runs are trained, resumed, tried again or refused; the table, the picture, and signals."""

import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import CPU, ROOT, environment
from helpers.processes import PATIENCE, started
from helpers.swept import losses

from lightrlhf import sweep

FILE = {
    "program": "sft",
    "flags": {"model_name": "tiny", "max_steps": 2},
    "grid": {"learning_rate": [0.002, 0.001]},
    "seeds": [1, 2],
    "metric": "val/loss",
}
NAMES = [f"learning_rate={rate}/seed-{seed}" for rate in (0.002, 0.001) for seed in (1, 2)]
SWEPT = [sys.executable, str(ROOT / "tests" / "helpers" / "swept.py")]
PROCESS = f"from lightrlhf import sweep; sweep.program_command = lambda program: {SWEPT}; sweep.main()"


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """A function that runs a sweep of the stand-in program in this process, after changes to its file."""
    for name in ("SWEPT_FAILS", "SWEPT_WAITS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sweep, "program_command", lambda program: SWEPT)

    def call(**changes) -> list[dict]:
        return sweep.main([write(tmp_path, **changes), "--output_dir", str(tmp_path / "out")])

    return call


def write(folder: Path, **changes) -> str:
    path = folder / "rates.yaml"
    path.write_text(json.dumps({name: value for name, value in (FILE | changes).items() if value is not None}))
    return str(path)


def rows(folder: Path) -> dict[str, dict]:
    return {row["run"]: row for row in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}


def starts(folder: Path, name: str) -> list[str]:
    """The commands of a run, one for each start."""
    log = folder / f"{name}.log"
    return [line for line in log.read_text().splitlines() if line.startswith("$ ")] if log.exists() else []


def refusal(capsys, call) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code and len(lines) == 1
    return lines[0]


# --------------------------------------------------------------------------------------------------------- whole sweeps
def test_every_combination_is_trained_with_every_seed_and_the_best_is_first(swept, tmp_path, capsys):
    best, worst = swept()
    assert [best["combination"], worst["combination"]] == ["learning_rate=0.001", "learning_rate=0.002"]
    finals = [losses(0.001, seed)[1] for seed in (1, 2)]
    assert best["final"] == pytest.approx(sum(finals) / 2)
    half = 12.706 * abs(finals[0] - finals[1]) / 2
    assert best["final_interval"] == pytest.approx([best["final"] - half, best["final"] + half])
    assert best["best"] == pytest.approx(best["final"] - 0.05)  # of the first step
    gaps = [losses(0.002, seed)[1] - losses(0.001, seed)[1] for seed in (1, 2)]
    half, middle = 12.706 * abs(gaps[0] - gaps[1]) / 2, sum(gaps) / 2
    assert worst["to_first"] == pytest.approx(middle) and "to_first" not in best
    assert worst["to_first_interval"] == pytest.approx([middle - half, middle + half])
    written = rows(tmp_path / "out")
    assert list(written) == NAMES
    assert all(
        row["status"] == "finished" and row["best_step"] == 1 and row["final_step"] == 2 for row in written.values()
    )
    shown = capsys.readouterr().out
    for words in (
        "final val/loss",
        "minus the first, by seed",
        "lowest val/loss",
        "chosen by the values shown",
        "1.2 [",
    ):
        assert words in shown
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_the_same_command_keeps_what_is_finished_and_adds_new_values_and_seeds(swept, tmp_path):
    first = swept()
    assert swept() == first
    swept(grid={"learning_rate": [0.002, 0.001, 0.004]}, seeds=[1, 2, 3])
    assert all(len(starts(tmp_path / "out", name)) == 1 for name in NAMES)
    assert len(rows(tmp_path / "out")) == 9


@pytest.mark.slow
def test_values_that_left_the_file_leave_the_table_and_not_the_folder(swept, tmp_path, capsys):
    swept()
    (only,) = swept(grid={"learning_rate": [0.001]})
    assert only["seeds"] == 2 and "note: 2 runs in" in capsys.readouterr().out
    assert len(rows(tmp_path / "out")) == 4
    swept()
    assert all(len(starts(tmp_path / "out", name)) == 1 for name in NAMES)


@pytest.mark.slow
def test_a_finished_run_whose_folder_was_removed_is_trained_again(swept, tmp_path):
    swept()
    shutil.rmtree(tmp_path / "out" / NAMES[2])
    swept()
    assert [len(starts(tmp_path / "out", name)) for name in NAMES] == [1, 1, 2, 1]


@pytest.mark.slow
def test_seeds_alone_are_one_combination(swept, tmp_path):
    (row,) = swept(grid=None, flags=FILE["flags"] | {"learning_rate": 0.001})
    assert row["combination"] == "sft" and row["seeds"] == 2
    assert (tmp_path / "out" / "sft" / "seed-2" / "metrics.jsonl").is_file()


@pytest.mark.slow
def test_the_highest_is_first_where_the_file_says_so(swept):
    best, _ = swept(metric="max:val/loss")
    assert best["combination"] == "learning_rate=0.002" and best["best"] == best["final"]


# ------------------------------------------------------------------------------------------------ failed and begun runs
@pytest.mark.slow
def test_a_failed_run_ends_no_other_and_is_tried_again(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SWEPT_FAILS", "learning_rate=0.002/seed-1")
    told = refusal(capsys, swept)
    assert told.startswith(f"error: 1 of 4 runs failed: {NAMES[0]};")
    written = rows(tmp_path / "out")
    assert written[NAMES[0]]["status"] == "failed" and written[NAMES[0]]["error"] == "no luck today"
    assert [written[name]["status"] for name in NAMES[1:]] == ["finished"] * 3
    monkeypatch.delenv("SWEPT_FAILS")
    swept()
    assert [len(starts(tmp_path / "out", name)) for name in NAMES] == [2, 1, 1, 1]
    again = rows(tmp_path / "out")[NAMES[0]]
    assert again["status"] == "finished" and again["error"] is None
    metrics = (tmp_path / "out" / NAMES[0] / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2  # what had no checkpoint was removed, not gone on with


@pytest.mark.slow
def test_a_failed_run_with_notes_of_the_user_is_kept_beside(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SWEPT_FAILS", NAMES[0])
    refusal(capsys, swept)
    failed = tmp_path / "out" / NAMES[0]
    (failed / "notes.txt").write_text("why?")
    monkeypatch.delenv("SWEPT_FAILS")
    swept()
    assert rows(tmp_path / "out")[NAMES[0]]["status"] == "finished" and not (failed / "notes.txt").exists()
    kept = failed.with_name("failed-seed-1")
    assert (kept / "notes.txt").read_text() == "why?" and (kept / "metrics.jsonl").is_file()
    assert swept()[1]["seeds"] == 2  # it is no run of the sweep


@pytest.mark.slow
def test_when_all_fail_there_is_no_picture(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SWEPT_FAILS", "learning_rate")
    assert "4 of 4 runs failed" in refusal(capsys, swept)
    assert not (tmp_path / "out" / "sweep.png").exists()


def test_a_run_that_a_signal_ended_says_which(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    status = sweep.run_child([sys.executable, "-c", code], tmp_path / "a.log")
    assert sweep.why_failed(status, tmp_path / "a.log") == "ended by SIGKILL"
    status = sweep.run_child([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "b.log")
    assert sweep.why_failed(status, tmp_path / "b.log") == "exit status 3"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_sweep_that_is_stopped_goes_on_from_the_checkpoint(number, status, swept, tmp_path, monkeypatch):
    folder, gate, printed = tmp_path / "out", tmp_path / "gate", tmp_path / "printed"
    monkeypatch.setenv("SWEPT_WAITS", NAMES[1])
    monkeypatch.setenv("SWEPT_GATE", str(gate))
    with printed.open("w") as output, start(tmp_path, output) as process:
        until(lambda: (folder / NAMES[1] / "checkpoint-000001").is_dir())
        process.send_signal(number)
        assert process.wait(PATIENCE) == status
    assert ("interrupted" in (folder / f"{NAMES[1]}.log").read_text()) == (number == signal.SIGINT)
    if number != signal.SIGKILL:
        assert "the same command continues it" in printed.read_text()
        assert rows(folder)[NAMES[1]]["status"] == "interrupted"
        gate.touch()
        swept()
    else:  # its last run goes on, and the next sweep waits for it
        with printed.open("w") as output, start(tmp_path, output) as process:
            until(lambda: "waiting for process" in printed.read_text())
            gate.touch()
            assert process.wait(PATIENCE) == 0, printed.read_text()
    written = rows(folder)
    assert all(row["status"] == "finished" for row in written.values())
    assert [len(starts(folder, name)) for name in NAMES] == [1, 2, 1, 1]
    assert "--resume_from" in starts(folder, NAMES[1])[1]
    assert len((folder / NAMES[1] / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_run_that_a_signal_stopped_has_not_failed(swept, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SWEPT_ENDS", NAMES[1])
    with pytest.raises(SystemExit) as stop:
        swept()
    assert stop.value.code == 143 and "error" not in capsys.readouterr().err
    assert [row["status"] for row in rows(tmp_path / "out").values()] == ["finished", "interrupted", *["finished"] * 2]
    monkeypatch.delenv("SWEPT_ENDS")
    swept()
    assert "--resume_from" in starts(tmp_path / "out", NAMES[1])[1]


def start(folder: Path, output):
    command = [sys.executable, "-c", PROCESS, write(folder), "--output_dir", str(folder / "out")]
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # else as a script's jobs, which ignore it
    return started(command, env=environment(), stdout=output, stderr=subprocess.STDOUT, preexec_fn=interruptible)


def until(holds) -> None:
    limit = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.slow
def test_other_fixed_flags_are_refused_before_anything_is_trained(swept, tmp_path, capsys):
    swept()
    before = (tmp_path / "out" / "results.jsonl").read_text()
    changed = {"flags": FILE["flags"] | {"max_steps": 3}}
    told = refusal(capsys, lambda: swept(**changed))
    assert "max_steps 2, now it is 3; name another --output_dir" in told
    told = refusal(capsys, lambda: swept(**changed, grid={"learning_rate": [0.5]}, seeds=[9]))  # shares no run with it
    assert "max_steps 2, now it is 3" in told
    assert (tmp_path / "out" / "results.jsonl").read_text() == before


def test_a_metric_that_is_not_logged_ends_the_sweep_after_the_first_run(swept, tmp_path, capsys):
    told = refusal(capsys, lambda: swept(metric="val/nll"))
    assert "metric val/nll is not logged by lightrlhf.sft" in told and told.endswith("; it logs val/loss")
    assert [row["status"] for row in rows(tmp_path / "out").values()] == ["finished", "new", "new", "new"]
    refusal(capsys, lambda: swept(metric="val/nll"))
    assert len(starts(tmp_path / "out", NAMES[0])) == 1
    swept()
    assert len(starts(tmp_path / "out", NAMES[0])) == 1


def test_a_folder_of_something_else_is_refused(swept, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert "contains thesis.tex, not a sweep" in refusal(capsys, swept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"run": 1},
        {"run": ["a"]},
        {"combination": "other"},
        {"combination": None},
        {"status": 3},
        {"seconds": "1"},
        {"final": None},
        {"best": 10**400},
        {"final": float("nan")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_state_with_rows_of_other_shapes_is_refused(changes, swept, tmp_path, capsys):
    one = {"grid": {"learning_rate": [0.001]}, "seeds": [1]}
    swept(**one)
    file = tmp_path / "out" / "results.jsonl"
    before = json.dumps(json.loads(file.read_text()) | changes) + "\n"
    file.write_text(before)
    line = refusal(capsys, lambda: swept(**one))
    assert f"{file}: row 1 has {next(iter(changes))}" in line and "restore" in line
    assert file.read_text() == before


@pytest.mark.slow
def test_a_sweep_locks_its_folder(swept, tmp_path, capsys):
    holder = f"""
import sys, time
from pathlib import Path
from lightrlhf.storage.locks import lock_folder
with lock_folder(Path({str(tmp_path / "out")!r})):
    print("held", flush=True)
    time.sleep({PATIENCE})
"""
    with started([sys.executable, "-c", holder], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert "out is being written by process" in refusal(capsys, swept)
    shutil.rmtree(tmp_path / "out")


# ------------------------------------------------------------------------------------------------------------- for real
@pytest.mark.slow
def test_a_sweep_of_sft(cafe_data, base_model, tmp_path, capsys):
    flags = {
        "data_dir": str(cafe_data),
        "model_name": str(base_model),
        "max_steps": 2,
        "eval_interval": 1,
        "eval_iters": 1,
    }
    flags |= dict(zip(("accelerator", "devices"), CPU[1::2]))
    file = write(
        tmp_path, flags=flags, grid={"learning_rate": [1e-3], "lora_rank": [2], "finetune_mode": ["lora"]}, seeds=[1]
    )
    out = tmp_path / "out"
    (row,) = sweep.main([file, "--output_dir", str(out)])
    folder = out / "learning_rate=0.001+lora_rank=2+finetune_mode=lora" / "seed-1"
    assert json.loads((folder / "args.json").read_text())["lora_rank"] == 2
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert row["final"] == [one["val/loss"] for one in metrics if "val/loss" in one][-1]
    before = folder.stat().st_mtime_ns
    (again,) = sweep.main([file, "--output_dir", str(out)])
    assert again["final"] == row["final"] and folder.stat().st_mtime_ns == before
