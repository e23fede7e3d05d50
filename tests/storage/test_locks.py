"""Locks: a second process is refused and told who holds the lock; the end of the holder releases it."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import CAFE_SIZES, environment
from helpers.errors import error_naming
from helpers.faulty_disk import WarmProcess

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl, write_jsonl
from lightrlhf.storage.locks import LOCK, lock_file, lock_folder
from lightrlhf.storage.results import write_results

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks are flock's")
HOLDER = """
import os, sys, time, signal
from pathlib import Path
from lightrlhf.storage.locks import lock_file, lock_folder
place, way = Path(sys.argv[1]), sys.argv[2]
lock = lock_folder(place) if place.is_dir() else lock_file(place)
child = 0
if "fork" in way:
    ready, said = os.pipe()
    child = os.fork()
    if not child:
        os.write(said, b"1")  # a child that runs has let go of the lock
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    print("child", child, flush=True)
if "exec" in way:
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
    print("child", child, flush=True)
if "raise" in way:
    print("held", flush=True); sys.stdin.readline(); raise RuntimeError("as a program ends by an error")
print("held", flush=True)
sys.stdin.readline()
if "release" in way:
    lock.release()
    print("released", flush=True)
    sys.stdin.readline()
if "os._exit" in way:
    os._exit(3)
"""
HELD = re.compile(
    r"is being written by process (\d+) on (\S+) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait for it or end it"
)


class Holder:
    """A process that holds the lock of a place."""

    def __init__(self, place: Path, way: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(place), way],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout
        self.child = 0
        while (line := self.process.stdout.readline().split())[0] != "held":
            self.child = int(line[1])
        self.pid = self.process.pid

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for pid in filter(None, (self.pid if self.process.poll() is None else 0, self.child)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()


def take(place: Path):
    return lock_folder(place) if place.is_dir() else lock_file(place)


def refusal(place: Path) -> str:
    """The line with which a place is refused; empty if it is not."""
    try:
        take(place).release()
    except UsageError as problem:
        return str(problem)
    return ""


def names(line: str, pid: int) -> bool:
    found = HELD.search(line)
    return bool(found) and found[1] == str(pid) and found[2] == socket.gethostname()


@pytest.fixture(params=["folder", "file"])
def place(request, tmp_path):
    if request.param == "file":
        write_jsonl(tmp_path / "rows.jsonl", [{}])
        return tmp_path / "rows.jsonl"
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_second_process_is_refused_by_name_until_the_first_dies_even_if_its_child_lives(tmp_path):
    holder = Holder(tmp_path, "fork")
    try:
        assert names(refusal(tmp_path), holder.pid)
        holder.process.kill()
        holder.process.wait()
        assert not refusal(tmp_path)
        os.kill(holder.child, 0)
    finally:
        holder.end()
    assert not list(tmp_path.iterdir())


def test_a_file_is_locked_once_and_a_folder_as_often_as_the_process_likes(tmp_path):
    lock = lock_file(tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        lock_file(tmp_path / "rows.jsonl")
    lock.release()
    outer, inner = lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run")
    inner.release()
    assert (tmp_path / "run" / LOCK).exists()
    outer.release()
    assert not (tmp_path / "run").exists()  # it was made for the lock alone


@pytest.mark.parametrize("kind", ["link", "link to nothing", "second name", "pipe"])
def test_what_somebody_planted_is_neither_followed_nor_emptied(kind, tmp_path):
    theirs, folder = tmp_path / "theirs.txt", tmp_path / "shared"
    folder.mkdir()
    for path, take in (
        (folder / LOCK, lambda: lock_folder(folder)),
        (folder / ".a.lock", lambda: lock_file(folder / "a")),
    ):
        if kind != "link to nothing":
            theirs.write_text("theirs")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "second name":
            os.link(theirs, path)
        else:
            path.symlink_to(theirs)
        with error_naming(UsageError, str(path), "remove it"):
            take()
        assert theirs.read_text() == "theirs" if kind != "link to nothing" else not theirs.exists()
        assert os.path.lexists(path)


def test_a_stale_lock_file_locks_nothing(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on elsewhere since 2020-01-01 00:00:00")
    lock_folder(tmp_path).release()
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- attacks
WAYS = {
    "SIGKILL": ("", signal.SIGKILL),
    "SIGTERM": ("", signal.SIGTERM),
    "SIGINT": ("", signal.SIGINT),
    "SIGSEGV": ("", signal.SIGSEGV),
    "SIGKILL, a forked child lives on": ("fork", signal.SIGKILL),
    "SIGKILL, a started child lives on": ("exec", signal.SIGKILL),
    "SIGKILL while stopped": ("stop", signal.SIGKILL),
    "os._exit": ("os._exit", None),
    "an exception": ("raise", None),
    "the end": ("", None),
    "a release": ("release", None),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_holder_is_named_and_its_death_frees_the_place(case, place, name):
    way, number = WAYS[name]
    holder = Holder(place, way)
    kind = "folder" if place.is_dir() else "file"
    try:
        if way == "stop":
            os.kill(holder.pid, signal.SIGSTOP)
        line = refusal(place)
        case(f"{kind} held, holder to end by {name}: the second is refused", names(line, holder.pid), line[-110:])
        if number:
            os.kill(holder.pid, number)
        else:
            holder.go_on()
        if way == "release":
            assert holder.process.stdout and holder.process.stdout.readline() == "released\n"
        else:
            holder.process.wait(20)
        case(f"{kind} free after {name}", refusal(place) == "")
        left = [path.name for path in (place if place.is_dir() else place.parent).iterdir() if path.name.endswith(LOCK)]
        case(f"{kind}: no lock file is left after {name} and the next", not left, str(left))
    finally:
        holder.end()


@pytest.mark.parametrize("content", [b"", b"process 1 on elsewhere since 2020-01-01", b"\xff\x00garbage", b"x" * 5000])
def test_no_stale_lock_file_locks_anything(case, place, content):
    file = place / LOCK if place.is_dir() else place.with_name(f".{place.name}{LOCK}")
    file.write_bytes(content)
    kind = "folder" if place.is_dir() else "file"
    case(f"{kind} with a stale lock file {content[:20]!r}", refusal(place) == "" and not file.exists())


def test_a_child_that_is_forked_neither_holds_nor_releases(case, place):
    lock = take(place)
    kind = "folder" if place.is_dir() else "file"
    child = os.fork()
    if not child:
        try:
            line = refusal(place)
            lock.release()  # the parent's, not the child's
            os._exit(0 if names(line, os.getppid()) else 1)
        except BaseException:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    case(f"{kind}: a forked child is refused", status == 0, str(status))
    holder = subprocess.run([sys.executable, "-c", HOLDER, str(place), ""], env=environment(), capture_output=True)
    case(f"{kind}: still held after the child's release", b"is being written by" in holder.stderr)
    lock.release()
    case(f"{kind}: free after the parent's", refusal(place) == "")


def test_within_one_process_a_folder_is_shared_and_a_file_is_not(case, tmp_path):
    (tmp_path / "run").mkdir()
    outer, inner = lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run" / ".." / "run")
    inner.release()
    case("an inner release keeps the outer lock", (tmp_path / "run" / LOCK).exists())
    outer.release()
    case("the outer one ends it", not (tmp_path / "run" / LOCK).exists())
    with JsonlWriter(tmp_path / "rows.jsonl"):
        case("a second writer of a file", "is being written by" in refusal(tmp_path / "rows.jsonl"))
    del outer, inner
    lock_folder(tmp_path / "run")
    case("a lock that nobody keeps is free", not (tmp_path / "run" / LOCK).exists())
    lock_folder(tmp_path / "new" / "run").release()
    case("a folder that was made for the lock alone is gone", not (tmp_path / "new" / "run").exists())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_without_flock_a_note_and_on_but_not_at_other_errors(case, place, number, monkeypatch, capsys):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    line = refusal(place)
    noted = "without locks" in capsys.readouterr().err
    held = (line != "" and not noted) if number == errno.EIO else (line == "" and noted)
    case(f"{'folder' if place.is_dir() else 'file'}, flock says {os.strerror(number)}", held, line)


def test_only_one_of_many_at_once_gets_it(case, tmp_path):
    """Threads and processes that take and release a lock thousands of times: never two at a time."""
    script = f"""
import os, sys, time
from pathlib import Path
from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.locks import lock_folder
folder, got = Path({str(tmp_path / "run")!r}), 0
until = time.monotonic() + 3
while time.monotonic() < until:
    try:
        lock = lock_folder(folder)
    except UsageError:
        continue
    mark = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)  # fails if another one is inside
    os.close(mark)
    os.unlink(folder / "inside")
    lock.release()
    got += 1
print(got)
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    counts = [process.communicate()[0] for process in started]
    case(
        "four processes in turn, never two at a time",
        all(process.returncode == 0 for process in started) and sum(map(int, counts)) > 100,
        ", ".join(count.strip() for count in counts),
    )


def test_two_evaluations_write_one_after_the_other(case, tmp_path):
    (tmp_path / "eval").mkdir()
    holder = Holder(tmp_path / "eval")
    writer = threading.Thread(target=write_results, args=(tmp_path, "test", {"n": 1}, [{"a": 1}], {}))
    try:
        writer.start()
        time.sleep(0.5)
        case("an evaluation waits for another", not (tmp_path / "eval" / "test.json").exists())
        holder.go_on()
        writer.join(20)
        case("and writes after it", json.loads((tmp_path / "eval" / "test.json").read_text()) == {"n": 1})
    finally:
        holder.end()


# ----------------------------------------------------------------------------------------------------------- programs
@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    process = WarmProcess(tmp_path_factory.mktemp("warm"), environment(), fails=False)
    yield process
    process.close()


@pytest.fixture
def writers(tmp_path, cafe_data, sft_dir, rm_dir, base_model):
    """Programs by name that write to a place that exists, the place, and readers of a run that is written."""
    run, reward = tmp_path / "sft", tmp_path / "rm"
    shutil.copytree(sft_dir, run, symlinks=True)
    shutil.copytree(rm_dir, reward, symlinks=True)
    responses = tmp_path / "given.jsonl"
    write_jsonl(responses, [{"prompt": f"Guest: {n}\n", "responses": [" Sure.", " No, no."]} for n in "ab"])
    (tmp_path / "pairs").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "tokens").mkdir()
    write_jsonl(tmp_path / "texts.jsonl", [{"prompt": f"one {n}", "completion": f"two {n} three"} for n in range(60)])
    device, length = ["--accelerator", "cpu"], ["--reward_function", "helpers.rewards:length"]
    more = ["--max_steps", "3"]
    return {
        "sft": ("lightrlhf.sft", ["--resume_from", run, *more], run),
        "rm": ("lightrlhf.rm", ["--resume_from", reward, *more], reward),
        "generate": (
            "lightrlhf.generate",
            [
                "--data_dir",
                cafe_data,
                "--model_name",
                base_model,
                "--num_prompts",
                "2",
                "--max_new_tokens",
                "2",
                *device,
            ]
            + ["--output_file", tmp_path / "responses.jsonl"],
            tmp_path / "responses.jsonl",
        ),
        "annotate": (
            "lightrlhf.annotate",
            ["--responses_file", responses, *length, *device, "--output_file", tmp_path / "rewards.jsonl"],
            tmp_path / "rewards.jsonl",
        ),
        "annotate's pairs": (
            "lightrlhf.annotate",
            ["--responses_file", responses, *length, *device, "--output_file", tmp_path / "own.jsonl"]
            + ["--choose_type", "max_min", "--output_dir", tmp_path / "pairs", "--data_dir", cafe_data],
            tmp_path / "pairs",
        ),
        "judge": (
            "lightrlhf.judge",
            ["--responses_file", f"{responses},{responses}", "--judge", "helpers.rewards:length", *device]
            + ["--output_file", tmp_path / "judged.jsonl"],
            tmp_path / "judged.jsonl",
        ),
        "cafe": (
            "datasets_prep.cafe.prepare_data",
            ["--destination_dir", tmp_path / "data", *CAFE_SIZES],
            tmp_path / "data",
        ),
        "generic": (
            "datasets_prep.generic.prepare_data",
            ["--destination_dir", tmp_path / "data", "--num_proc", "1", "--dataset_name", tmp_path / "texts.jsonl"]
            + ["--tokenizer_name", cafe_data / "tokenizer"],
            tmp_path / "data",
        ),
        "tokenizer": (
            "datasets_prep.train_tokenizer",
            [
                "--destination_dir",
                tmp_path / "tokens",
                "--dataset_name",
                tmp_path / "texts.jsonl",
                "--vocab_size",
                "300",
            ],
            tmp_path / "tokens",
        ),
    }


def test_every_program_is_refused_where_another_process_writes_and_readers_are_not(case, warm, writers, sft_dir):
    for name, (program, argv, place) in writers.items():
        before = {path: path.stat().st_mtime_ns for path in place.parent.rglob("*") if path.is_file()}
        holder = Holder(place)
        try:
            ended = warm.run(program, *argv)
            lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
            held = (
                ended.status != 0 and len(lines) == 1 and names(lines[0], holder.pid) and "Traceback" not in ended.err
            )
            case(f"{name} is refused", held, f"{ended.status} {lines} {'' if held else ended.err[-300:]}"[:300])
            changed = [
                path.name
                for path, then in before.items()
                if path.is_relative_to(place) and path.exists() and path.stat().st_mtime_ns != then
            ]
            case(f"{name} has changed nothing there", not changed, str(changed))
            if name == "sft":
                for reader, words in {
                    "plot": ("lightrlhf.plot", "--experiment_dir", place),
                    "evaluate": ("lightrlhf.evaluate", "--model_name", place, "--accelerator", "cpu"),
                    "generate from it": ("lightrlhf.generate", *writers["generate"][1][:2], "--model_name", place)
                    + (*writers["generate"][1][4:-1], place.parent / "read.jsonl"),
                }.items():
                    ended = warm.run(*words)
                    case(
                        f"{reader} of a run that is written",
                        ended.status == 0,
                        ended.err[-200:] if ended.status else "",
                    )
        finally:
            holder.end()
        ended = warm.run(program, *argv)
        case(f"{name} goes on once the holder is gone", ended.status == 0, ended.err[-300:] if ended.status else "")
        left = [str(path) for path in place.parent.rglob("*") if path.name.endswith(LOCK) and path.is_file()]
        left = [path for path in left if Path(path).parent in (place, place.parent)]
        case(f"{name} leaves no lock file", not left, str(left))


def test_two_real_runs_of_one_directory(case, warm, tmp_path, cafe_data, base_model, sft_dir):
    """A run that is going on is not resumed, with one rank and with two, and ends as if nothing had happened."""
    for ranks in (1, 2):
        logs = tmp_path / f"logs{ranks}"
        words = ["--data_dir", cafe_data, "--model_name", base_model, "--log_dir", logs, "--accelerator", "cpu"]
        words += ["--devices", ranks, "--max_steps", "400", "--save_interval", "1", "--log_interval", "1"]
        command = [sys.executable, "-m", "lightrlhf.sft", *map(str, words)]
        first = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            until = time.monotonic() + 120
            while not (found := list(logs.glob("*/*/*/*/checkpoint-*"))) and time.monotonic() < until:
                time.sleep(0.2)
            run = found[0].parent
            ended = warm.run("lightrlhf.sft", "--resume_from", run, "--devices", 1)
            held = bool(HELD.search(ended.err)) and ended.status == 2 and first.poll() is None
            case(f"a run of {ranks} ranks is not resumed while it goes on", held, ended.err[-200:])
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
        rows = ["--mini_batch_size", 8 * ranks]  # a rank's; a step keeps its number of rows
        ended = warm.run("lightrlhf.sft", "--resume_from", run, "--devices", 1, "--max_steps", "1", *rows)
        case(f"it is once its {ranks} ranks are killed", ended.status == 0, ended.err[-200:] if ended.status else "")


def test_two_writers_never_mix_their_rows(case, tmp_path):
    """Of eight writers that begin at once exactly one writes, and the file has its rows alone."""
    script = f"""
import os, sys, time
from lightrlhf.storage.jsonl import JsonlWriter
with JsonlWriter({str(tmp_path / "rows.jsonl")!r}, {{"a": 1}}) as writer:
    for n in range(200):
        writer.append({{"pid": os.getpid(), "n": n}})
    time.sleep(3)
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment(), stderr=subprocess.PIPE) for _ in range(4)
    ]
    for process in started:
        process.communicate()
    rows = read_jsonl(tmp_path / "rows.jsonl")
    writers = {row["pid"] for row in rows}
    case("one writer's rows in order", [row["n"] for row in rows] == [*range(200)] * len(writers), f"{len(rows)} rows")
