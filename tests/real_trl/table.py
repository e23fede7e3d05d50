"""Runs planted and clean jobs of TRL and writes what `check_run` says of them: `python tests/real_trl/table.py PYTHON`.

PYTHON is of an environment with TRL, see `setup.sh`. Rows of faults and alarms go to `results.json` beside
this file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightrlhf.check_run import check_steps
from lightrlhf.checks.step import read_steps

HERE = Path(__file__).resolve().parent
CLEAN = ["sft/prompt", "sft/chat", "sft/text-packed", "sft/lora", "dpo/pair", "dpo/chat-ipo", "dpo/lora"]
CLEAN += ["dpo/precomputed", "grpo/dapo", "grpo/kl", "grpo/warm", "grpo/lora"]
SEEDS = range(500, 550)
LIST = "import json, plants; print(json.dumps([[n, p.setting, p.report, p.names] for n, p in plants.PLANTS.items()]))"


def planted(python: str) -> list[dict[str, Any]]:
    """Jobs of the faults, each with its report and the names that are right."""
    listed = subprocess.run([python, "-c", LIST], cwd=HERE, capture_output=True, text=True, check=True).stdout
    return [
        {
            "name": f"fault-{i}",
            "setting": setting,
            "fault": fault,
            "seed": 11,
            "most": 4,
            "report": report,
            "names": names,
        }
        for i, (fault, setting, report, names) in enumerate(json.loads(listed.splitlines()[-1]))
    ]


def clean() -> list[dict[str, Any]]:
    """Jobs without a fault, of one to three steps."""
    return [
        {"name": f"clean-{setting}-{seed}".replace("/", "-"), "setting": setting, "seed": seed}
        | {"options": {"max_steps": 1 + seed % 3}}
        for seed in SEEDS
        for setting in CLEAN
    ]


def row_of(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What was called wrong in a job's steps."""
    wrong = [f"{one.name}: {one.fault}" for one in check_steps(read_steps(str(folder))) if one.says == "wrong"]
    found = {one.partition(": ")[2] for one in wrong}
    row = {"setting": job["setting"], "seed": job["seed"], "wrong": wrong}
    if "fault" in job:
        row |= {"fault": job["fault"], "report": job["report"], "named": bool(found & set(job["names"]))}
    return row


def main() -> None:
    python, jobs = sys.argv[1], [*planted(sys.argv[1]), *clean()]
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        (out / "jobs.jsonl").write_text("\n".join(map(json.dumps, jobs)))
        subprocess.run([python, HERE / "lab.py", out, out / "jobs.jsonl"], stdout=subprocess.DEVNULL, check=True)
        rows = [row_of(job, out / job["name"]) for job in jobs]
    faults = [row for row in rows if "fault" in row]
    alarms = [row for row in rows if "fault" not in row and row["wrong"]]
    kept = [*faults, *alarms, {"clean_runs": len(rows) - len(faults), "settings": CLEAN}]
    (HERE / "results.json").write_text("[\n " + ",\n ".join(map(json.dumps, kept)) + "\n]\n")
    found, named = sum(bool(row["wrong"]) for row in faults), sum(row["named"] for row in faults)
    print(f"{found} of {len(faults)} found, {named} named")
    print(f"{len(alarms)} alarms in {len(rows) - len(faults)} clean runs")


if __name__ == "__main__":
    main()
