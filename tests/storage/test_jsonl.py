"""JSONL files: a kill leaves complete rows, and a restart resumes after them."""

import os
import tracemalloc

import pytest
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import JsonlWriter, open_jsonl, read_jsonl, write_jsonl
from lightrlhf.storage.lazy import map_lazily
from lightrlhf.storage.shards import is_complete

ROWS = [{"prompt": "a\u2028b\n", "n": 1}, {"prompt": "ü", "n": 2}]


def test_rows_come_back_as_they_were(tmp_path):
    write_jsonl(tmp_path / "new" / "rows.jsonl", ROWS)
    assert read_jsonl(tmp_path / "new" / "rows.jsonl", needs=["prompt"]) == ROWS


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_an_incomplete_last_line_is_written_again(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    killed = JsonlWriter(path, {"seed": 1})
    killed.append(*ROWS)
    killed._file.close()
    killed._lock.release()
    path.write_bytes(path.read_bytes()[:-cut])
    with JsonlWriter(path, {"seed": 1}) as writer:
        assert list(writer.rows) == ROWS[:1]
        writer.append(*ROWS[1:])
    assert read_jsonl(path) == ROWS


def test_a_file_of_others_is_left_as_it_is(tmp_path):
    """Also its last line, which has no end."""
    for text in ("my notes", '{"n": 1}\n{"n": 2}'):
        (tmp_path / "rows.jsonl").write_text(text)
        with error_naming(UsageError, "remove it"):
            JsonlWriter(tmp_path / "rows.jsonl", {"seed": 1})
        assert (tmp_path / "rows.jsonl").read_text() == text and len(list(tmp_path.iterdir())) == 1


def test_rows_of_other_settings_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, {"temperature": 1.0, "files": ("a",)}) as writer:
        writer.append(*ROWS)
    JsonlWriter(path, {"temperature": 1.0, "files": ("a",)}).close()
    with error_naming(UsageError, "rows.jsonl", "temperature", "1.0", "0.7"):
        JsonlWriter(path, {"temperature": 0.7, "files": ("a",)})
    path.with_suffix(".args.json").unlink()
    with error_naming(UsageError, "rows.jsonl", "rows.args.json"):
        JsonlWriter(path, {"temperature": 1.0, "files": ("a",)})


def squares(calls: list[list[int]], fail_at: int | None = None):
    """A `work` that notes the items of each call, and fails before one item."""

    def work(items):
        calls.append(list(items))
        for item in items:
            if item == fail_at:
                raise KeyboardInterrupt
            yield {"square": item**2}

    return work


@pytest.mark.parametrize(
    "whole_chunks, again", [(True, [[3, 4, 5], [6, 7]]), (False, [[4, 5, 6], [7]])], ids=["batches", "missing items"]
)
def test_an_interrupted_chunk_is_computed_again_and_only_its_missing_rows_are_written(tmp_path, whole_chunks, again):
    calls: list[list[int]] = []
    with JsonlWriter(tmp_path / "rows.jsonl") as writer, pytest.raises(KeyboardInterrupt):
        writer.extend(range(8), 3, squares(calls, fail_at=4), whole_chunks=whole_chunks)
    assert calls == [[0, 1, 2], [3, 4, 5]]
    calls.clear()
    for _ in range(2):  # the second call has nothing left to compute
        with JsonlWriter(tmp_path / "rows.jsonl") as writer:
            writer.extend(range(8), 3, squares(calls), whole_chunks=whole_chunks)
    assert calls == again
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"square": n**2} for n in range(8)]


def test_work_that_returns_fewer_rows_ends_the_call(tmp_path):
    with JsonlWriter(tmp_path / "rows.jsonl") as writer:
        writer.extend(range(8), 3, lambda items: [{"n": n} for n in items if n < 4])
        assert list(writer.rows) == [{"n": n} for n in range(4)]


def test_two_writers_of_one_file_are_refused(tmp_path):
    with JsonlWriter(tmp_path / "rows.jsonl"), error_naming(UsageError, f"process {os.getpid()}"):
        JsonlWriter(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "text, facts",
    [
        ('{"prompt": "a"}\n{"prompt": \n', ["rows.jsonl:2", "JSON"]),
        ('{"prompt": "a"}\n[1]\n', ["rows.jsonl:2", "list"]),
        ('{"text": "a"}\n', ["row 1", "'prompt'", "text"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, facts):
    (tmp_path / "rows.jsonl").write_text(text)
    with error_naming(UsageError, *facts):
        read_jsonl(tmp_path / "rows.jsonl", needs=["prompt"])


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"PK\x03\x04"])
def test_a_file_that_is_no_data_is_named(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with error_naming(UsageError, "rows.jsonl is a "):
        read_jsonl(tmp_path / "rows.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"prompt": "a"}]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with error_naming(UsageError, "file/rows.jsonl"):
        JsonlWriter(tmp_path / "file" / "rows.jsonl")
    with JsonlWriter(tmp_path / "rows.jsonl") as writer, open("/dev/full", "ab", buffering=0) as full:
        writer._file, opened = full, writer._file
        with error_naming(UsageError, "rows.jsonl", "No space left"):
            writer.append({})
        opened.close()


def test_rows_that_changed_since_they_were_written_are_noticed(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, {"seed": 1}) as writer:
        writer.append({"a": 1})
    with JsonlWriter(path, {"seed": 1}) as writer:
        assert list(writer.rows) == [{"a": 1}]
        writer.append({"a": 2})
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": 3}\n')
    for read in (lambda: read_jsonl(path), lambda: JsonlWriter(path, {"seed": 1})):
        with error_naming(UsageError, "rows.jsonl", "sha256", "rows.args.json"):
            read()


def test_rows_of_a_writer_that_was_killed_have_no_seal(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, {"seed": 1}) as writer:
        writer.append({"a": 1})
    killed = JsonlWriter(path, {"seed": 1})
    killed.append({"a": 2})
    killed._file.close()
    killed._lock.release()
    assert list(JsonlWriter(path, {"seed": 1}).rows) == [{"a": 1}, {"a": 2}]


def test_a_file_whose_writer_was_killed_after_its_last_row_is_sealed_by_the_next_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, {"seed": 1}) as writer:
        writer.append({"a": 1})
    sealed = path.with_suffix(".args.json").read_text()
    path.with_suffix(".args.json").write_text('{"seed": 1}')
    JsonlWriter(path, {"seed": 1}).close()
    assert path.with_suffix(".args.json").read_text() == sealed


def test_rows_of_an_opened_file_are_read_when_they_are_needed(tmp_path):
    """Slices and changed rows, too; blank lines and a byte order mark are no rows."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + b"\n".join(b'{"n": %d}' % n for n in range(5)) + b"\n \n" + b'{"n": 5}')
    rows = open_jsonl(path)
    assert [row["n"] for row in rows] == [rows[n]["n"] for n in range(6)] == list(range(6)) and rows[-1] == {"n": 5}
    squares = map_lazily(rows[1:4], lambda row: row["n"] ** 2)
    assert (len(squares), list(squares), squares[-1], list(squares[::2])) == (3, [1, 4, 9], 9, [1, 9])
    with pytest.raises(IndexError):
        rows[6]
    path.unlink()
    assert list(rows) == read_rows(rows) == [{"n": n} for n in range(6)]


def read_rows(rows):
    return [rows[place] for place in range(len(rows))]


def test_rows_of_a_large_file_take_a_few_bytes_each(tmp_path):
    """Opened, appended to, sealed and merged: what stays in memory grows by their offsets alone."""
    path, text = tmp_path / "rows.jsonl", "x" * 1000
    with JsonlWriter(path, {"seed": 1}) as writer:
        writer.append(*({"n": n, "text": text} for n in range(4000)))
    tracemalloc.start()
    try:
        with JsonlWriter(path, {"seed": 1}) as writer:
            assert len(writer.rows) == 4000 and writer.rows[3999]["n"] == 3999
        rows = open_jsonl(path)
        assert sum(row["n"] for row in rows) == 4000 * 3999 // 2
        assert is_complete(path, {"seed": 1}, 4000)
        assert tracemalloc.get_traced_memory()[1] < 100 * 4000
    finally:
        tracemalloc.stop()
