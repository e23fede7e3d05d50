"""Tests leave no process behind: not one that fails, not one that detaches itself, not a session that is killed."""

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from helpers import ROOT, environment, kill_seed, processes
from helpers.processes import PATIENCE, end, left_by_a_test, running, started

HANGS = "import time; print('ready', flush=True); time.sleep(999)"
DETACHED = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HANGS!r}], start_new_session=True)"
SESSION = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from helpers import processes
processes.open_session()
subprocess.run([sys.executable, "-c", {DETACHED!r}])
{HANGS}
"""


def test_what_a_failing_test_started_ends_with_it():
    with pytest.raises(ValueError), started([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        raise ValueError
    assert process.returncode is not None and not psutil.pid_exists(process.pid)


def test_a_process_that_detached_itself_is_found_and_one_of_a_kept_program_is_not(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.1)
    before = running()
    subprocess.run([sys.executable, "-c", DETACHED], check=True)
    left = left_by_a_test(before)
    assert [HANGS in command for command in left.values()] == [True]
    assert not left_by_a_test([*before, *left])
    end(list(left))
    assert not left_by_a_test(before)


def test_a_killed_session_leaves_nothing():
    command = [sys.executable, "-c", SESSION]
    with started(command, env=environment(), stdout=subprocess.PIPE) as session:
        assert [session.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2  # of the detached one and its own
        marked = [process for process in psutil.process_iter() if mark_of(process) == str(session.pid)]
        session.kill()
        _, alive = psutil.wait_procs(marked, timeout=PATIENCE)
    assert len(marked) >= 2 and not alive  # the guard and the detached process


def test_a_kill_can_be_repeated_by_the_seed_that_it_printed(monkeypatch, capsys):
    monkeypatch.delenv("LIGHTRLHF_KILL_SEED", raising=False)
    seed, other = kill_seed(), kill_seed()
    assert seed != other
    name, _, printed = capsys.readouterr().out.split()[0].partition("=")
    monkeypatch.setenv(name, printed)
    assert kill_seed() == seed


def mark_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):
        return process.environ().get(processes.MARK)
