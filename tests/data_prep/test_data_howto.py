"""The page on datasets, followed to the letter by somebody with a tokenizer of their own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.data import gpt2_like
from helpers.flat import stored_rows
from helpers.pages import blocks, commands_of

from lightrlhf.cli.parser import parse
from lightrlhf.sft import SFTArgs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "howto" / "datasets.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_page_prepare_data(tmp_path):
    files = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    for name, content in [*files, *re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END\n", PAGE, re.DOTALL | re.MULTILINE)]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    votes = tmp_path / "datasets_prep" / "votes"
    assert len((votes / "prepare_data.py").read_text().splitlines()) <= 45
    (votes / "__init__.py").touch()
    for source in ROOT.glob("datasets_prep/*"):
        (votes.parent / source.name).symlink_to(source)
    gpt2_like().save_pretrained(tmp_path / "tokenizer")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    bodies = [body for body, parse_only in blocks(PAGE, "bash") if not parse_only]
    commands = [one.line for body in bodies for one in commands_of(body) if one.module]
    (training,) = [command for command in commands if "datasets_prep" not in command]
    assert len(commands) == 5 and parse(SFTArgs, shlex.split(training)[3:]).data_dir == "data/mine"
    for command in commands:
        if command == training:
            continue
        words = shlex.split(command.replace("datasets_prep/cafe/base", "tokenizer"))
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for name in ("mine", "questions"):
        assert stored_rows(tmp_path / "data" / name / "finetune_train.pt")
    assert "⟦" in (tmp_path / "data" / "votes" / "report.md").read_text()
