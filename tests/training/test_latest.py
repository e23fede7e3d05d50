"""`latest` and `--output_dir`: which folder a run has, under which names it is found, and what is refused."""

import errno
import json
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import CPU, metrics
from helpers.errors import error_naming, refused
from helpers.killed import forked

from lightrlhf import sft
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.cli.latest import follow_latest
from lightrlhf.online_dpo import OnlineDPOArgs
from lightrlhf.plot import PlotArgs
from lightrlhf.rm import RMArgs
from lightrlhf.storage.locks import LOCK
from lightrlhf.storage.run_dir import labels, link_latest, locate, read_arg
from lightrlhf.storage.temporary import temporary_path
from lightrlhf.training.iterated_dir import keep_if_started, open_directory
from lightrlhf.training.run import Run

NAMES = ("2030-01-01_00-00-00", "2030-01-01_00-00-00x", "2030-01-01_00-00-01")


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """The folders of three runs, oldest first."""
    made = [tmp_path / name for name in NAMES]
    for folder in made:
        folder.mkdir()
        (folder / "args.json").write_text(json.dumps({"program": "sft", "experiment_name": "one"}))
    return made


@pytest.fixture
def begin(tmp_path):
    """Begins a run of no steps, so that its folder is there."""
    loops = []

    def begun(**changes) -> Path:
        given = {"log_dir": str(tmp_path / "logs"), "accelerator": "cpu"} | changes
        run = Run(TrainArgs(**given), "test")
        loops.append((run, run.steps(9)))
        next(loops[-1][1])
        return run.files.directory

    yield begun
    for _, loop in loops:
        loop.close()


# ------------------------------------------------------------------------------------------------------------ the link
def test_it_follows_the_newest_run_by_a_relative_link(folders):
    for folder in folders:
        link_latest(folder)
        assert os.readlink(folder.parent / "latest") == folder.name
    for folder in folders:
        link_latest(folder, resumed=True)
    assert os.readlink(folders[0].parent / "latest") == NAMES[-1]
    shutil.rmtree(folders[-1])
    link_latest(folders[1])  # the next that begins
    assert os.readlink(folders[0].parent / "latest") == NAMES[1]
    assert sorted(path.name for path in folders[0].parent.iterdir()) == [*NAMES[:2], "latest"]


def test_after_the_clock_went_back_it_is_still_the_run_that_was_begun_last(begin, monkeypatch):
    for name in ("2030-10-27_02-50-00", "2030-10-27_02-10-00", "2030-10-27_02-50-00"):
        monkeypatch.setattr(time, "strftime", lambda *a, name=name: name)
        folder = begin()
        assert os.readlink(folder.with_name("latest")) == folder.name
    assert folder.name == "2030-10-27_02-50-00x"


def test_a_program_in_iterations_that_is_refused_gives_the_link_back(folders):
    from argparse import Namespace

    link, args = folders[0].parent / "latest", Namespace(resume_from=None)
    for before in (None, *folders[1:]):
        if before:
            link_latest(before)
        folders[0].mkdir(exist_ok=True)
        (folders[0] / "args.json").touch()
        with pytest.raises(UsageError), keep_if_started(args, folders[0]):
            assert os.readlink(link) == NAMES[0]
            raise UsageError("no")
        assert not folders[0].exists() and (os.readlink(link) == before.name if before else not link.is_symlink())
    folders[0].mkdir()
    with keep_if_started(args, folders[0]):
        link_latest(folders[1])  # begun meanwhile
    with keep_if_started(Namespace(resume_from="it"), folders[0]):
        pass
    assert os.readlink(link) == NAMES[1]


def test_programs_read_it_as_the_run_s_own_name(folders, monkeypatch):
    link_latest(folders[1])
    link = folders[0].parent / "latest"
    args = RMArgs(data_dir=str(folders[0]), sft_experiment_dir=link / "checkpoint-000002")
    assert args.sft_experiment_dir == str(folders[1] / "checkpoint-000002")
    plotted = PlotArgs(experiment_dir=[str(link), str(folders[0])]).experiment_dir
    link_latest(folders[2])  # changes nothing of what was read
    assert labels(plotted) == {"one": str(folders[1]), f"one {NAMES[0]}": str(folders[0])}
    monkeypatch.chdir(link.parent)
    assert follow_latest("latest") == NAMES[2]
    for text in ("a/latest/b", "the latest", f"{NAMES[0]}/latest", ""):
        assert follow_latest(text) == text
    (folders[0] / "latest").symlink_to(folders[1])  # of someone else: not to a neighbour
    assert follow_latest(f"{NAMES[0]}/latest") == f"{NAMES[0]}/latest"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_link_is_left_alone_and_a_line_says_so(kind, folders, capsys):
    taken = folders[0].parent / "latest"
    taken.mkdir() if kind == "folder" else taken.write_text("mine")
    link_latest(folders[0])
    assert capsys.readouterr().out == f"note: {taken} is not a link and is left alone; it does not stand for this run\n"
    assert not taken.is_symlink() and (kind == "folder" or taken.read_text() == "mine")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_without_links_a_line_says_so_and_the_run_goes_on(number, begin, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = begin()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "has no links" in warnings[0]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("step", ["symlink_to", "replace"])
def test_a_full_disk_is_told_as_at_any_other_write(step, folders, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, step, refuse)
    with error_naming(RunFailure, "latest", "No space left"):
        link_latest(folders[0])
    assert not list(folders[0].parent.glob(".*"))


@pytest.mark.slow
def test_a_kill_between_its_steps_leaves_the_older_or_the_newer_run(folders, tmp_path_factory):
    output, link = tmp_path_factory.mktemp("output") / "text", folders[0].parent / "latest"
    seen, at = [], 0
    while True:
        link_latest(folders[0])
        at += 1
        status = forked(partial(link_killed, folders[1], at), output)
        seen.append(os.readlink(link))
        assert link.is_dir() and seen[-1] in NAMES[:2]
        if status == 0:
            break
        assert status == -signal.SIGKILL
        link_latest(folders[1])
        assert os.readlink(link) == NAMES[1] and not list(link.parent.glob(".*"))
        link.unlink()
    assert seen[0] == NAMES[0] and seen[-1] == NAMES[1] and len(seen) >= 3


def link_killed(folder: Path, at: int) -> None:
    """`link_latest`, in a fork that is killed before its change of that number."""
    number = 0

    def count(kind: str, arguments: tuple) -> None:
        nonlocal number
        changes = kind in ("os.symlink", "os.rename") or (kind == "open" and arguments[0] == folder.parent)
        number += changes
        if changes and number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    link_latest(folder)


@pytest.mark.slow
def test_each_run_and_stage_links_itself_and_a_resumed_one_keeps_the_link(cafe_data, base_model, tmp_path, capsys):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--max_steps", "1", *CPU]
    first = Path(sft.main([*flags, "--model_name", str(base_model)]))
    link = first.with_name("latest")
    assert os.readlink(link) == first.name
    assert sft.main(["--resume_from", str(link), "--max_steps", "2"]) == str(first)
    assert [row["step"] for row in metrics(first)][-1] == 2
    second = Path(sft.main([*flags, "--model_name", str(link)]))
    assert os.readlink(link) == second.name and read_arg(str(second), "model_name") == str(first)
    sft.main(["--resume_from", str(first), "--max_steps", "3"])
    assert os.readlink(link) == second.name
    assert "latest" not in (second / "README.md").read_text()


def test_the_training_of_an_iteration_has_no_link(begin, tmp_path):
    outer = begin()
    inner = begin(log_dir=str(outer / "iteration-01"))
    assert not list(inner.parent.glob("latest")) and os.readlink(outer.with_name("latest")) == outer.name


# ---------------------------------------------------------------------------------------------------------- output_dir
def test_a_run_is_exactly_where_it_was_asked_for(begin, tmp_path):
    assert begin(output_dir=str(tmp_path / "runs" / "mine")) == tmp_path / "runs" / "mine"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert not (tmp_path / "logs").exists()


def test_a_folder_that_holds_a_run_or_files_is_refused(cafe_data, base_model, tmp_path, capsys):
    run, flags = tmp_path / "run", ["--data_dir", str(cafe_data), "--model_name", str(base_model), *CPU]
    flags += ["--max_steps", "1", "--output_dir"]
    sft.main([*flags, str(run)])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    begun, full = tmp_path / "begun", tmp_path / "full"
    for folder, file in ((begun, "args.json"), (full, "notes.txt")):
        folder.mkdir()
        (folder / file).write_text("{}")
    for folder, told in (
        (run, f"holds a run already; continue it by --resume_from {run}, or name another folder"),
        (begun, "holds a run without a checkpoint; remove it, or name another folder"),
        (full, "is not empty, it holds notes.txt; name another folder"),
    ):
        assert refused(capsys, sft.main, *flags, folder).endswith(f"--output_dir {folder} {told}")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_a_kill_left_before_the_arguments_is_no_run(begin, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in (LOCK, temporary_path(folder / "args.json").name):
        (folder / name).touch()
    assert begin(output_dir=str(folder)) == folder and (folder / "args.json").is_file()


@pytest.mark.slow
def test_of_two_that_begin_at_once_the_second_is_refused(tmp_path):
    args = TrainArgs(output_dir=str(tmp_path / "mine"), accelerator="cpu")
    one, other = Run(args, "test"), Run(args, "test")
    loop = one.steps(1)
    next(loop)
    with error_naming(UsageError, "without a checkpoint"):
        next(other.steps(1))
    loop.close()


def test_a_run_that_is_resumed_stays_where_it_is(cafe_data, base_model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--max_steps", "1", *CPU]
    sft.main([*flags, "--output_dir", "mine"])
    assert sft.main(["--resume_from", "mine", "--output_dir", "mine", "--max_steps", "2"]) == "mine"
    with pytest.raises(SystemExit):
        sft.main(["--resume_from", "mine", "--output_dir", "other", "--max_steps", "3"])
    told = "error: --output_dir other: a resumed run goes on in mine; leave it out"
    assert capsys.readouterr().err.strip().endswith(told) and not Path("other").exists()
    Path("mine").rename("moved")
    assert sft.main(["--resume_from", "moved", "--max_steps", "3"]) == "moved"
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_relative_path_is_found_from_where_the_run_began(tmp_path, monkeypatch):
    run = tmp_path / "work" / "runs" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "work" / "data").mkdir()
    (run / "args.json").write_text(json.dumps({"output_dir": "runs/mine", "log_dir": "logs", "data_dir": "data"}))
    monkeypatch.chdir(tmp_path)
    assert locate(str(run), "data_dir") == str(tmp_path / "work" / "data")


def test_programs_in_iterations_refuse_it_too(base_model, tmp_path):
    (tmp_path / "notes.txt").touch()
    flags = {"model_name": str(base_model), "reward_function": ["helpers.rewards:length"], "accelerator": "cpu"}
    with error_naming(UsageError, "notes.txt"):
        open_directory(OnlineDPOArgs(output_dir=str(tmp_path), **flags), "online_dpo", "a/b", "2 prompts")
    args = OnlineDPOArgs(output_dir=str(tmp_path / "new"), **flags)
    assert [open_directory(args, "online_dpo", "a/b", "2 prompts")[0] for _ in range(2)] == [tmp_path / "new"] * 2
    other = OnlineDPOArgs(output_dir=str(tmp_path / "new"), seed=7, **flags)
    with error_naming(UsageError, "--output_dir", "seed was 42"):
        open_directory(other, "online_dpo", "a/b", "2 prompts")


def test_runs_of_one_second_are_in_the_order_in_which_they_began(begin, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *a: NAMES[0])
    folders = [begin() for _ in range(3)]
    assert os.readlink(folders[0].with_name("latest")) == folders[-1].name
