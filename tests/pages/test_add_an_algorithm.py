"""Whoever follows `howto/design.md` in a copy of the tree has a whole program, and touches nothing else."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment

pytestmark = pytest.mark.slow

PAGE = (ROOT / "howto" / "design.md").read_text(encoding="utf-8")
FILES = ["lightrlhf/reinforce.py", "tests/programs/test_reinforce.py", "howto/algorithms/reinforce.md"]
TABLE = "lightrlhf/programs.py"
LINE = re.compile(r'^Program\("reinforce".*\)$', re.MULTILINE)
TESTS = [  # of the program, of limits, imports and lists, and those of all programs that concern it
    "tests/programs/test_reinforce.py",
    "tests/test_limits.py",
    "tests/test_imports.py::test_a_program_imports_rooms_and_the_programs_that_it_uses[reinforce]",
    "tests/test_imports.py::test_importing_the_programs_and_their_help_loads_no_heavy_library_and_prints_nothing_else",
    "tests/test_imports.py::test_each_name_that_the_library_exports_resolves[ReinforceArgs]",
    "tests/pages/test_lists.py::test_a_list_is_as_make_lists_writes_it",
    "tests/pages/test_howto.py::test_the_commands_of_a_page[howto/algorithms/reinforce.md]",
    "tests/pages/test_howto.py::test_every_logged_metric_is_explained_and_no_other[reinforce]",
    "tests/pages/test_howto.py::test_every_flag_of_its_own_is_explained[reinforce]",
    "tests/cli/test_parser.py::test_every_field_is_read_by_its_program[lightrlhf.reinforce]",
    "tests/training/test_dry_run.py::test_a_dry_run_shows_its_first_batch_and_writes_nothing[reinforce]",
    "tests/test_benchmarks.py::test_profile_is_written[reinforce]",
    "tests/training/test_signals.py::test_a_run_that_is_stopped_anywhere_and_resumed_equals_one_that_was_not[reinforce]",
]


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A copy of the tree in which the page was followed."""
    folder = tmp_path_factory.mktemp("tree")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    copies = dict(re.findall(r"^cp (\S+) (\S+)$", PAGE, re.MULTILINE))
    assert [f"{to}{Path(name).name}" for name, to in copies.items()] == FILES, "the page names other places"
    for name, to in copies.items():
        shutil.copy2(folder / name, folder / to)
    table = (folder / TABLE).read_text(encoding="utf-8")
    line = f"    {LINE.search(PAGE)[0]},\n"
    (folder / TABLE).write_text(table.replace("\n)\nTRAINING", f"\n{line})\nTRAINING", 1), encoding="utf-8")
    call(folder, "howto/lists.py")  # make lists
    return folder


def call(folder: Path, *words: str) -> str:
    """Run Python in the copy, whose files it imports; returns what it prints."""
    env = environment() | {"PYTHONPATH": f"{folder}:{folder / 'tests'}"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_lists_the_new_program_and_shows_its_flags(followed):
    assert "reinforce" in call(followed, "-m", "lightrlhf")
    assert "--momentum" in call(followed, "-m", "lightrlhf", "reinforce", "--help")
    assert "algorithms/reinforce.md" in (followed / "README.md").read_text(encoding="utf-8")


def test_the_new_program_trains_and_passes_the_tests_of_all_programs(followed):
    call(followed, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)


def test_the_files_of_the_page_pass_the_linter(followed):
    call(followed, "-m", "ruff", "check", *FILES[:2])
    call(followed, "-m", "ruff", "format", "--check", *FILES[:2])
