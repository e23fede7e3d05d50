"""The exchange folder: versions that are never used twice, other trainers' folders, and disks that fail."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, environment, tiny_policy
from helpers.errors import error_naming

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.generation import exchange
from lightrlhf.generation.exchange import Exchange, choose_root
from lightrlhf.models.roles import Policy
from lightrlhf.storage import locks
from lightrlhf.storage.temporary import host

KILLED = """
import os, signal, sys
from pathlib import Path
from lightrlhf.generation.exchange import Exchange
made = Exchange(Path(sys.argv[1]))
(made.folder / "version-1").mkdir()
(made.folder / "partial").mkdir()
print(made.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
STARTED = """
import sys
from pathlib import Path
from lightrlhf.generation.exchange import Exchange
Exchange(Path(sys.argv[1]))
"""


@pytest.fixture
def policy() -> Policy:
    return tiny_policy("llama")


def killed_in(folder: Path) -> Path:
    """The folder that a killed trainer left."""
    command = [sys.executable, "-c", KILLED, str(folder)]
    ended = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode < 0, ended.stderr
    return Path(ended.stdout.strip())


def test_versions_appear_whole_are_new_and_only_two_are_kept(policy, tmp_path):
    made = Exchange(tmp_path)
    targets = [made.write(policy, step, tmp_path / "base") for step in (0, 1, 5)]
    assert [target.folder.name for target in targets] == ["version-0", "version-1", "version-5"]
    assert sorted(path.name for path in made.folder.glob("[!.]*")) == ["version-1", "version-5"]
    assert {path.name for path in targets[-1].folder.iterdir()} >= {"config.json", "model.safetensors"}
    made.close()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_uses_no_name_again(policy, tmp_path):
    first, second = Exchange(tmp_path), Exchange(tmp_path)
    one, other = (made.write(policy, 3, tmp_path / "base") for made in (first, second))
    assert one.folder != other.folder and one.version != other.version


@pytest.mark.slow
def test_a_killed_trainer_leaves_nothing_after_the_next_start(tmp_path):
    left = killed_in(tmp_path)
    assert (left / "version-1").is_dir()
    made = Exchange(tmp_path)
    assert list(tmp_path.iterdir()) == [made.folder]


@pytest.mark.slow
def test_living_trainers_keep_their_folders(policy, tmp_path):
    """One of this process, and one of another process."""
    mine = Exchange(tmp_path)
    target = mine.write(policy, 1, tmp_path / "base")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", STARTED, str(tmp_path)], env=environment(), cwd=ROOT, check=True)
    again = Exchange(tmp_path)
    again.close()
    assert (target.folder / "model.safetensors").is_file() and list(tmp_path.iterdir()) == [mine.folder]


STARTS = """
import sys, time
from pathlib import Path
from lightrlhf.generation.exchange import Exchange
print("ready", flush=True)
for line in sys.stdin:
    time.sleep(max(0.0, float(line) - time.time()))
    made = Exchange(Path(sys.argv[1]))
    print(made.folder, flush=True)
    sys.stdin.readline()
    print(made.folder.is_dir(), flush=True)
    made.close()
"""


@pytest.mark.slow
def test_trainers_that_start_at_once_keep_their_folders(tmp_path):
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    options = {"env": environment(), "cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    trainers = [subprocess.Popen(command, **options) for _ in range(3)]

    def say(text: str) -> list[str]:
        for one in trainers:
            one.stdin.write(f"{text}\n")
            one.stdin.flush()
        return [one.stdout.readline().strip() for one in trainers]

    try:
        assert [one.stdout.readline() for one in trainers] == ["ready\n"] * 3
        for _ in range(50):
            assert len(set(say(str(time.time() + 0.01)))) == 3
            assert say("") == ["True"] * 3
    finally:
        for one in trainers:
            one.kill()
            one.communicate()


@pytest.mark.slow
def test_a_folder_that_is_not_locked_yet_is_left_to_its_living_trainer(tmp_path, monkeypatch):
    """Another trainer starts between the moments in which this one makes its folder and locks it."""
    acquired = locks._acquire

    def slowly(path: Path, what: str, wait: bool) -> int | None:
        path.touch()
        monkeypatch.undo()
        subprocess.run([sys.executable, "-c", STARTED, str(tmp_path)], env=environment(), cwd=ROOT, check=True)
        return acquired(path, what, wait)

    monkeypatch.setattr(locks, "_acquire", slowly)
    made = Exchange(tmp_path)
    assert made.folder.is_dir() and (made.folder / locks.LOCK).is_file()


@pytest.mark.slow
def test_nothing_is_removed_where_there_are_no_locks(tmp_path, monkeypatch, capsys):
    left = killed_in(tmp_path)

    def no_lock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_lock)
    made = Exchange(tmp_path)
    assert left.is_dir() and made.folder.is_dir()
    assert "without locks" in capsys.readouterr().err


@pytest.mark.slow
def test_what_others_own_is_left_alone(tmp_path, monkeypatch):
    left = killed_in(tmp_path)
    (tmp_path / "mine.txt").write_text("a")
    name, token = left.name.rsplit("-", 1)
    (tmp_path / f"{name}-00000000").write_text("a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / locks.LOCK).touch()
    (tmp_path / f"{name}-00000001").symlink_to(elsewhere)
    (tmp_path / f"{exchange.PREFIX}-{host()}-{os.getppid()}-{token}").mkdir()  # of one that lives, and will lock it
    (tmp_path / f"{exchange.PREFIX}-{host()}-2-{name.rsplit('-', 1)[1]}-{token}").mkdir()  # of the host `{host}-2`
    (tmp_path / f"{exchange.PREFIX}-{host()}-mine").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr("os.getuid", lambda: os.stat(left).st_uid + 1)
    made = Exchange(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before | {made.folder.name}
    made.close()
    monkeypatch.undo()
    Exchange(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == before - {left.name} and (elsewhere / locks.LOCK).exists()


def test_weights_lie_in_the_named_folder_or_in_memory_with_room_or_the_temporary_folder(tmp_path, monkeypatch):
    for name in ("memory", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(exchange, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert choose_root(100) == tmp_path / "memory"
    assert choose_root(10**18) == tmp_path / "temporary"  # two versions do not fit
    monkeypatch.setenv(exchange.FOLDER, str(tmp_path / "shared"))
    assert choose_root(10**18) == tmp_path / "shared"
    monkeypatch.delenv(exchange.FOLDER)
    monkeypatch.setattr(exchange, "MEMORY", tmp_path / "missing")
    assert choose_root(1) == tmp_path / "temporary"


def test_no_room_is_one_line(policy, tmp_path, monkeypatch):
    made = Exchange(tmp_path)
    usage = exchange.shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with error_naming(UsageError, f"{tmp_path} has", "0.0 GiB") as problem:
        made.write(policy, 1, tmp_path / "base")
    assert "\n" not in str(problem.value)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("a")
    with error_naming(UsageError, f"{tmp_path}/file/in cannot be written") as problem:
        Exchange(tmp_path / "file" / "in")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_while_weights_are_written_is_one_line(number, policy, tmp_path, monkeypatch):
    made = Exchange(tmp_path)
    made.write(policy, 1, tmp_path / "base")

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("transformers.modeling_utils.safe_save_file", fails)
        with error_naming(RunFailure, f"{tmp_path} cannot be written") as problem:
            made.write(policy, 2, tmp_path / "base")
    assert os.strerror(number) in str(problem.value) and "\n" not in str(problem.value)
    assert not (made.folder / "version-2").exists()  # never half of one
    assert made.write(policy, 3, tmp_path / "base").folder.is_dir()
    assert not (made.folder / "partial").exists()
