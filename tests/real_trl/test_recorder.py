"""Real runs of four releases of TRL: a recorded clean run has no fault, and a planted one is named."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lightrlhf.check_run import check_steps
from lightrlhf.checks.step import read_steps

FOLDER = "LIGHTRLHF_TRL"
if not os.environ.get(FOLDER):
    pytest.skip(f"needs releases of TRL: make test-trl installs them and sets {FOLDER}", allow_module_level=True)
HERE = Path(__file__).resolve().parent
RIGHT = {"sft": {"mask", "passes", "loss", "update", "rate"}, "dpo": {"pairs", "passes", "loss", "update"}}
RIGHT["grpo"] = {"texts", "mask", "members", "passes", "samples", "advantages", "loss", "update"}
SETTINGS = ["sft/prompt", "sft/chat", "sft/text-packed", "sft/lora", "dpo/pair", "dpo/chat-ipo", "dpo/lora"]
SETTINGS += ["dpo/precomputed", "grpo/dapo", "grpo/kl", "grpo/warm", "grpo/lora"]


def ends_of(folder, release, jobs):
    """{name: hash of the end} of jobs with a release of TRL."""
    (folder / "jobs").write_text("\n".join(map(json.dumps, jobs)))
    python = Path(os.environ[FOLDER], release, "bin", "python").absolute()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([python, HERE / "lab.py", folder, folder / "jobs"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith('{"name"')]
    return {row["name"]: row["end"] for row in rows}


@pytest.mark.parametrize("release", ["0.24.0", "1.16.0"])
def test_a_recorded_run_trains_as_one_without_a_recorder(tmp_path, release):
    settings = {"sft/prompt": {"dropout": 0.1}, "dpo/lora": {}, "grpo/kl": {"gradient_checkpointing": True}}
    one = [
        {"name": name.replace("/", "-"), "setting": name, "options": more, "seed": 1} for name, more in settings.items()
    ]
    recorded = ends_of(tmp_path, release, one)
    assert len(recorded) == 3
    assert recorded == ends_of(tmp_path, release, [job | {"unrecorded": True} for job in one])


@pytest.mark.parametrize("release", ["0.24.0", "1.9.2", "1.12.0", "1.16.0"])
def test_clean_runs_of_all_trainers_are_right(tmp_path, release):
    jobs = [{"name": one.replace("/", "-"), "setting": one, "seed": 1, "most": 4} for one in SETTINGS]
    ends_of(tmp_path, release, jobs)
    for job in jobs:
        says = {one.name: one.says for one in check_steps(read_steps(str(tmp_path / job["name"])))}
        assert "wrong" not in says.values(), (job["name"], says)
        assert all(says[name] == "right" for name in RIGHT[job["setting"].split("/")[0]]), (job["name"], says)
