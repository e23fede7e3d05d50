"""Mistakes of a first hour: each is answered in one line whose remedy works."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from helpers import last_checkpoint
from helpers.errors import refused
from helpers.killed import main_of
from helpers.tiny_runs import TRAINED, experiment_of

EVALUATED = {  # flags of an evaluation, which needs a validation split
    "iterative_refuel": ("--iterations", 1, "--eval_dialogues", 2),
    "online_refuel": ("--eval_interval", 1, "--eval_dialogues", 2),
}
IN_PLACE = ("refuel", "reflect_rl")  # refuel evaluates where there is such a split, reflect_rl has no data


@pytest.mark.parametrize("program", [one for one in (*TRAINED, "iterative_refuel") if one not in IN_PLACE])
def test_a_run_without_a_validation_split_goes_on_as_the_error_says(program, runs, tmp_path, capsys):
    flags = runs.flags(program, tmp_path / "logs", *EVALUATED.get(program, ("--eval_interval", 1)), steps=1)
    place = flags.index("--data_dir") + 1
    data = Path(shutil.copytree(flags[place], tmp_path / "data"))
    for split in data.glob("*_validation.pt"):
        split.unlink()
    flags[place] = str(data)
    line = refused(capsys, main_of(program), *flags)
    remedy = re.search(r"give (--\w+ 0)", line)
    assert "validation.pt" in line and remedy
    main_of(program)([*flags, *remedy[1].split()])
    assert last_checkpoint(experiment_of(tmp_path / "logs"))
