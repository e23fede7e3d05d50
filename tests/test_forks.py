"""Programs that run in forks are as those that run in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers import ROOT, environment, run_program
from helpers.forks import Fork, started_program

PROGRAM = """
import json, os, random, sys, torch
facts = {"argv": sys.argv[1:], "name": __name__, "cwd": os.getcwd(), "variable": os.environ.get("LIGHTRLHF_TEST")}
facts |= {"threads": torch.get_num_threads(), "path": sys.path[0], "leads": os.getsid(0) == os.getpid()}
print(json.dumps(facts))
sys.exit(sys.argv[1])
"""


def test_a_fork_runs_a_module_as_a_process_of_its_own_does(tmp_path):
    (tmp_path / "told.py").write_text(PROGRAM)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = {"cwd": tmp_path, "env": environment() | {"LIGHTRLHF_TEST": "1"}, **pipes}
    new = subprocess.Popen([sys.executable, "-m", "told", "why"], start_new_session=True, **given)
    with started_program("told", "why", **given) as fork:
        assert isinstance(fork, Fork)
        (out, err), (expected, problem) = fork.communicate(60), new.communicate(60)
    facts = [json.loads(text) for text in (out, expected)]
    for one in facts:
        one["path"] = str(Path(one["path"] or tmp_path).resolve())
    assert facts[0] == facts[1] and err == problem == "why\n" and fork.returncode == new.returncode == 1


def test_a_fork_can_be_killed_and_what_it_started_ends_with_the_block(tmp_path):
    code = (
        "import subprocess, sys, time\nsubprocess.Popen(['sleep', '999'])\nprint('ready', flush=True)\ntime.sleep(999)"
    )
    (tmp_path / "hangs.py").write_text(code)
    with started_program("hangs", cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as fork:
        assert fork.stdout.readline() == "ready\n" and fork.poll() is None
        fork.send_signal(signal.SIGTERM)
        assert fork.wait(60) == -signal.SIGTERM


def test_an_environment_that_libraries_read_once_is_that_of_a_new_interpreter(monkeypatch):
    assert run_program("helpers.killed", check=False).returncode == 1
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    with started_program("this", cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as process:
        assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
    assert os.environ["HF_HOME"] == "/elsewhere"
