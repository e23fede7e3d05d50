"""Other harnesses, each in an environment of its own in the folder that $LIGHTRLHF_HARNESSES names.

Test files that import this are skipped where there is none.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = "LIGHTRLHF_HARNESSES"
if not os.environ.get(FOLDER):
    pytest.skip(f"needs other harnesses: make test-harness installs them and sets {FOLDER}", allow_module_level=True)
OF = {"mt_bench": "rewardbench"}  # the environment of a harness that has none of its own


def environment_of(harness: str) -> Path:
    """Folder of a harness's programs. Skips the test when it is not installed."""
    programs = Path(os.environ[FOLDER], OF.get(harness, harness), "bin").resolve()
    if not programs.is_dir():
        pytest.skip(f"needs {harness} in {programs.parent}: tests/real_harness/setup.sh installs it")
    return programs


def offline(harness: str, home: Path) -> dict[str, str]:
    """Variables of a process that finds the harness's programs and reaches no hub; caches are in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = f"{environment_of(harness)}:{os.environ['PATH']}"
    hub = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    return kept | hub | {"PATH": path, "OPENAI_API_KEY": "none", "INSPECT_DISPLAY": "plain"}


def run_command(harness: str, command: str, home: Path) -> str:
    """Run a printed command in the harness's environment; returns what it printed."""
    options = {"capture_output": True, "text": True, "cwd": home, "env": offline(harness, home)}
    done = subprocess.run(["bash", "-c", command], **options)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def ask_harness(harness: str, home: Path, **asked: Any) -> Any:
    """What a harness's own functions make of our files; see `harness_reader.py`."""
    command = [str(environment_of(harness) / "python"), str(Path(__file__).with_name("harness_reader.py"))]
    options = {"capture_output": True, "text": True, "cwd": home, "env": offline(harness, home)}
    done = subprocess.run(command, input=json.dumps({"harness": harness, **asked}), **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
