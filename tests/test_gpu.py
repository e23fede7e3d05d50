"""`python -m tests.gpu` on a CPU and on the second device: every row runs, and a file of results is never damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment
from helpers.processes import PATIENCE

from lightrlhf.storage.writing import write_text


def gpu(file: Path, *flags: str, device: str = "cpu") -> subprocess.CompletedProcess:
    dry = ["--device", device, "--size", "tiny"]
    command = [sys.executable, "-m", "tests.gpu", *dry, "--output_file", str(file), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=4 * PATIENCE)


@pytest.mark.nightly
def test_a_dry_run_goes_through_every_row(tmp_path):
    """On the second device, where nothing may cross to the CPU and back."""
    done = gpu(tmp_path / "gpu.json", "--minutes", "20", device="second")
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    failed = {name: row["shown"] for name, row in rows.items() if row["status"] == "failed"}
    assert done.returncode == 0 and not failed, (failed, done.stderr[-2000:])
    left_out = {name for name, row in rows.items() if row["status"] == "left out"}
    assert left_out <= {"flash attention", "4-bit", "beside vLLM, 1B", "beside TRL, 1B"}
    assert len(rows) == 82 and (tmp_path / "gpu.json").stat().st_size < 30_000


@pytest.mark.slow
def test_rows_that_are_known_are_kept_and_failed_ones_run_again(tmp_path):
    file = tmp_path / "gpu.json"
    first = gpu(file, "--only", "noise")
    assert first.returncode == 0 and "1 passed" in first.stdout
    results = json.loads(file.read_text())
    results["rows"]["noise"]["shown"] = "kept"
    results["rows"]["packed passes"] = {"section": "correctness", "status": "failed", "shown": "of another day"}
    write_text(file, json.dumps(results))
    second = gpu(file, "--only", "pa")  # of "packed passes", and of no other row but those with a padded one
    rows = json.loads(file.read_text())["rows"]
    assert rows["noise"]["shown"] == "kept" and rows["packed passes"]["status"] == "passed", second.stdout


@pytest.mark.slow
def test_results_of_another_machine_and_unknown_rows_are_refused(tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"device": "cuda", "size": "full", "machine": {}, "rows": {}}))
    before = file.read_bytes()
    other, unknown = gpu(file), gpu(tmp_path / "none.json", "--only", "no such row")
    assert other.returncode == unknown.returncode == 2
    assert "--output_file" in other.stderr and file.read_bytes() == before
    assert "--only" in unknown.stderr and "noise" in unknown.stderr
