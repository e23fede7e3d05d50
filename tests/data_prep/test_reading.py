"""Files in pieces: arrays, separated values and arrow, with the line of each row and of each damage."""

import csv
import json
import os
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers.data import write_lines
from helpers.errors import error_naming

from datasets_prep import json_files
from datasets_prep.reading import Source
from lightrlhf.cli.errors import RunFailure, UsageError

ROWS = [{"prompt": f"prompt {n}", "text": "ä" * n} for n in range(30)]


def sources(path: Path) -> list[str]:
    return [raw.source.removeprefix(f"{path}:") for raw in Source(str(path))]


def values(path: Path) -> list[dict]:
    return [raw.values for raw in Source(str(path))]


# -------------------------------------------------------------------------------------------------------- JSON arrays
@pytest.mark.parametrize("piece", [1, 7, 100, 10_000])
@pytest.mark.parametrize("start, end", [("[", "]"), ('{"data": [', "]}")])
def test_arrays_of_any_piece_size(tmp_path, monkeypatch, piece, start, end):
    monkeypatch.setattr(json_files, "PIECE", piece)
    file = tmp_path / "a.json"
    file.write_text(
        start + "\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n" + end + "\n\n"
    )
    assert values(file) == ROWS and sources(file) == [str(n + 2) for n in range(30)]


def test_objects_over_several_lines_name_their_first(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode())
    assert values(file) == ROWS and sources(file)[:3] == ["3", "7", "11"]


BAD_ARRAYS = {  # name: (text, line, words)
    "empty and more": (b"[\n]\n[]", 3, "text behind the end"),
    "not closed": (b'[\n{"a": 1}\n', 3, "not closed"),
    "two commas": (b'[\n{"a": 1},\n,]', 3, "not JSON"),
    "no comma": (b'[\n{"a": 1}\n{"a": 2}]', 3, "not separated by commas"),
    "number": (b'[{"a": 1},\n7]', 2, "a JSON int, not an object"),
    "wrong inside": (b'[{"a": 1},\n{"a": 2,\n "b": x}]', 3, "not JSON (Expecting value)"),
    "key twice": (b'[{"a": 1},\n{"a": 2, "a": 3}]', 2, "'a' occurs twice"),
    "not UTF-8": (b'[{"a": 1},\n{"a": "caf\xe9"}]', 2, "not UTF-8"),
    "nested too deep": (b'[{"a": 1},\n{"a": ' + b"[" * 100_000, 2, "not JSON"),
    "digits": (b'[{"a": 1},\n{"a": ' + b"9" * 5000 + b"}]", 2, "not JSON"),
    "other keys": (b'{"data": [\n{"a": 1}],\n"n": 1}', 2, "} is expected"),
}


@pytest.mark.parametrize("piece", [3, 10_000])
@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_damaged_arrays_name_the_line(tmp_path, monkeypatch, piece, name):
    monkeypatch.setattr(json_files, "PIECE", piece)
    content, line, words = BAD_ARRAYS[name]
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(RunFailure) as refusal:
        values(file)
    assert str(refusal.value).startswith(f"{file}:{line}: ") and words in str(refusal.value)


def test_an_empty_array_has_no_rows(tmp_path):
    (tmp_path / "a.json").write_text("[\n]\n")
    assert values(tmp_path / "a.json") == []


# -------------------------------------------------------------------------------------------------------------- lines
def test_separated_values_name_the_first_line_of_a_row(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'text,n\n"one\ntwo",1\n\nthree,2\n"four ""x"",",3')
    texts = ["one\ntwo", "three", 'four "x",']
    assert values(file) == [{"text": text, "n": str(n)} for n, text in enumerate(texts, start=1)]
    assert sources(file) == ["2", "5", "6"]


def test_a_cell_of_a_megabyte(tmp_path):
    csv.field_size_limit(131_072)  # Python's own, which an earlier test may have raised
    file = tmp_path / "a.tsv"
    file.write_text("text\tn\n" + "word " * 200_000 + "\t1\n")
    assert len(values(file)[0]["text"]) == 1_000_000


# ------------------------------------------------------------------------------------------------------------ folders
def test_saved_datasets_with_their_splits(tmp_path):
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:5])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "train" / "cache-0123.arrow").write_bytes(b"of an earlier map")
    source = Source(str(tmp_path / "saved"))
    rows = list(source)
    assert source.given == {"test"} and [raw.split for raw in rows] == ["test"] * 5 + ["train"] * 30
    assert rows[-1].values == ROWS[-1] and rows[-1].source == f"{tmp_path / 'saved' / 'train'}:30"
    assert len(list(source)) == 35  # again from the first row


def test_a_saved_dataset_in_shards_and_with_a_selection(tmp_path):
    datasets.Dataset.from_list(ROWS).select([4, 2, 9]).save_to_disk(tmp_path / "saved", num_shards=2)
    assert values(tmp_path / "saved") == [ROWS[4], ROWS[2], ROWS[9]]


def test_a_folder_of_shards_in_several_containers(tmp_path):
    folder = tmp_path / "a [folder] of *"
    (folder / ".hidden").mkdir(parents=True)
    write_lines(folder / "train-00000.jsonl", ROWS[:10])
    write_lines(folder / "._train-00000.jsonl", [{}])
    write_lines(folder / ".hidden" / "train.jsonl", [{}])
    (folder / "train-00001.json").write_text(json.dumps(ROWS[10:20]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[20:]), folder / "train-00002.parquet")
    (folder / "dataset_info.json").write_text("{}")
    assert values(folder) == ROWS


def test_a_folder_with_nothing_to_read(tmp_path):
    (tmp_path / "README.md").write_text("hello")
    with error_naming(UsageError, ".jsonl, .json, .csv"):
        Source(str(tmp_path))


def test_nothing_piles_up_in_the_home_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    before = sorted(tmp_path.rglob("*"))
    assert values(tmp_path / "saved") == values(tmp_path / "a.parquet") == ROWS
    assert sorted(tmp_path.rglob("*")) == before


# -------------------------------------------------------------------------------------------------------------- arrow
def arrow(path: Path, file_format: bool = False) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    new = pyarrow.ipc.new_file if file_format else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)
    return path


@pytest.mark.parametrize("file_format", [False, True])
def test_both_formats_of_arrow(tmp_path, file_format):
    file = arrow(tmp_path / "a.arrow", file_format)
    assert values(file) == ROWS and sources(file)[-1] == "30"


@pytest.mark.parametrize("file_format", [False, True])
@pytest.mark.parametrize("kept", [0, 5, 100, 400, -8, -1])
def test_arrow_cut_short_is_refused(tmp_path, file_format, kept):
    file = arrow(tmp_path / "a.arrow", file_format)
    file.write_bytes(file.read_bytes()[:kept])
    with error_naming(RunFailure, "a.arrow", "row 0"):
        values(file)


def test_arrow_with_text_that_is_not_utf8_is_refused(tmp_path):
    file = arrow(tmp_path / "a.arrow")
    file.write_bytes(file.read_bytes().replace(b"prompt 7", b"prompt \xff"))
    with error_naming(RunFailure, "a.arrow", "row 0", "UTF8"):
        values(file)


def test_a_saved_dataset_with_a_shard_cut_short_is_refused(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (shard,) = (tmp_path / "saved").glob("*.arrow")
    os.truncate(shard, shard.stat().st_size - 8)  # at the end of a batch, where pyarrow sees nothing missing
    assert len(datasets.load_from_disk(str(tmp_path / "saved"))) == 30
    with error_naming(RunFailure, "saved", "save_to_disk", "truncated"):
        values(tmp_path / "saved")
    shard.unlink()
    with error_naming(RunFailure, "saved"):
        values(tmp_path / "saved")


def test_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with error_naming(RunFailure, "a.parquet", "'text'"):
        values(tmp_path / "a.parquet")
