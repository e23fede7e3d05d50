"""JSON lines: what a kill leaves is whole, and a second start goes on behind it."""

from __future__ import annotations

import pytest

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl, write_jsonl

ROWS = [{"prompt": "a\u2028b\n", "n": 1}, {"prompt": "ü", "n": 2}]


def test_rows_come_back_as_they_were(tmp_path):
    write_jsonl(tmp_path / "new" / "rows.jsonl", ROWS)
    assert read_jsonl(tmp_path / "new" / "rows.jsonl", needs=["prompt"]) == ROWS


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_a_kill_cut_is_written_again(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, {"seed": 1}) as writer:
        writer.append(*ROWS)
    path.write_bytes(path.read_bytes()[:-cut])
    with JsonlWriter(path, {"seed": 1}) as writer:
        assert writer.rows == ROWS[:1]
        writer.append(*ROWS[1:])
    assert read_jsonl(path) == ROWS


def test_rows_of_other_settings_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, {"temperature": 1.0, "files": ("a",)}) as writer:
        writer.append(*ROWS)
    JsonlWriter(path, {"temperature": 1.0, "files": ("a",)}).close()
    with pytest.raises(UsageError, match=r"temperature was 1.0, now 0.7; remove it or write elsewhere"):
        JsonlWriter(path, {"temperature": 0.7, "files": ("a",)})
    path.with_suffix(".args.json").unlink()
    with pytest.raises(UsageError, match="holds rows already, and no rows.args.json tells of what"):
        JsonlWriter(path, {"temperature": 1.0, "files": ("a",)})


def test_two_writers_of_one_file_are_refused(tmp_path):
    with JsonlWriter(tmp_path / "rows.jsonl"), pytest.raises(UsageError, match="written by another process"):
        JsonlWriter(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"rows.jsonl:2 is no JSON"),
        ('{"prompt": "a"}\n[1]\n', r"rows.jsonl:2 is no JSON object but a list"),
        ('{"text": "a"}\n', r"row 1 has no 'prompt'; it has text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_jsonl(tmp_path / "rows.jsonl", needs=["prompt"])


def test_what_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/rows.jsonl cannot be written"):
        JsonlWriter(tmp_path / "file" / "rows.jsonl")
    with JsonlWriter(tmp_path / "rows.jsonl") as writer, open("/dev/full", "ab", buffering=0) as full:
        writer._file, opened = full, writer._file
        with pytest.raises(UsageError, match="No space left on device; the rows before are kept"):
            writer.append({})
        opened.close()
