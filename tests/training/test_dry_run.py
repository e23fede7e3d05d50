"""`--dry_run` of the training programs: a step whose texts are shown as they are trained, and no file changed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from helpers.killed import main_of
from helpers.tiny_runs import PROGRAMS, TinyRuns


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    return TinyRuns(tmp_path_factory.mktemp("dry"), cafe_data, talk_data, tokenizer)


def tree(*folders: Path) -> dict[str, str]:
    """Every file, folder and link below some folders, with the hash of its bytes."""
    found = {}
    for path in (path for folder in folders for path in (folder, *folder.rglob("*"))):
        is_file = path.is_file() and not path.is_symlink()
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else str(path.is_symlink())
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_dry_run_shows_its_first_batch_and_writes_nothing(program, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path, runs.folder, runs.cafe, runs.talk)
    main_of(program)(runs.flags(program, tmp_path / "logs", "--dry_run", "True"))
    out = capsys.readouterr().out
    print(out)
    assert tree(tmp_path, runs.folder, runs.cafe, runs.talk) == before
    assert "⟦" in out and re.search(r"the first micro-batch has \d+ rows, .* trained", out)
    assert out.endswith("nothing was written; leave --dry_run out to start this run\n")
