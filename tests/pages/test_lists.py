"""What lists programs is written from the one table of them, `lightrlhf/programs.py`."""

import runpy
import subprocess
import sys

import pytest
from helpers import ROOT, environment

from lightrlhf.programs import TRAINING

LISTS = runpy.run_path(str(ROOT / "howto" / "lists.py"))


@pytest.mark.parametrize("name", LISTS["LISTS"])
def test_a_list_is_as_make_lists_writes_it(name):
    assert LISTS["written"](name) == (ROOT / name).read_text(encoding="utf-8")


def test_each_algorithm_has_a_page_and_trains():
    trains = {path.stem for path in (ROOT / "lightrlhf").glob("*.py") if "\ndef train(" in path.read_text()}
    assert trains == {*TRAINING}
    assert all((ROOT / "howto" / "algorithms" / f"{page}.md").is_file() for page in LISTS["pages"]())


@pytest.mark.slow
def test_an_editor_knows_the_types_of_what_the_library_exports(tmp_path):
    (tmp_path / "user.py").write_text(
        "from lightrlhf import PPOArgs, ppo\nreveal_type(PPOArgs)\nreveal_type(ppo.train)\n"
    )
    command = [sys.executable, "-m", "mypy", tmp_path / "user.py"]  # with the cache of make lint, where it ran
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert "lightrlhf.ppo.PPOArgs" in done.stdout and "-> pathlib.Path" in done.stdout, done.stdout
