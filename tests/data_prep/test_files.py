"""Files as they come: every format, folders with splits, and damage told in one line that names file and line."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers.data import gpt2_like, write_lines
from helpers.errors import error_naming

from datasets_prep.common import rows_of
from datasets_prep.generic import prepare_data as generic
from datasets_prep.reading import Source
from datasets_prep.webgpt import prepare_data as webgpt
from lightrlhf.cli.errors import RunFailure, UsageError

ROWS = [{"prompt": f"prompt {n}", "completion": f" answer {n}"} for n in range(40)]
LINES = [json.dumps(row).encode() for row in ROWS]


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def values(name: Path | str) -> list[dict]:
    return [raw.values for raw in Source(str(name))]


# --------------------------------------------------------------------------------------------------------- good files
def test_every_format_gives_the_same_rows(tmp_path):
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        assert values(write_lines(tmp_path / name, ROWS)) == ROWS
    assert values(write_parquet(tmp_path / "a.parquet", ROWS)) == ROWS


def test_rows_name_their_file_and_line(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", ROWS)
    assert [raw.source for raw in Source(str(file))][:2] == [f"{file}:1", f"{file}:2"]


def test_byte_order_mark_blank_lines_and_windows_line_ends(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + LINES[0] + b"\r\n\r\n" + LINES[1])
    assert values(file) == ROWS[:2]


@pytest.mark.parametrize(
    "names, splits, given",
    [
        (["train.jsonl", "test.jsonl"], {"train", "test"}, {"test"}),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], {None}, set()),
        (["base/train.jsonl.gz", "online/train.jsonl.gz", "base/test.jsonl.gz"], {"train", "test"}, {"test"}),
        (["d/train.jsonl", "d/valid.jsonl", "d/test.jsonl"], {"train", "validation", "test"}, {"validation", "test"}),
        (["test/part1.jsonl", "train/part1.jsonl"], {"train", "test"}, {"test"}),
        (["mine.jsonl"], {None}, set()),
    ],
)  # fmt: skip
def test_folders_with_splits(tmp_path, names, splits, given):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, ROWS[:1])
    source = Source(str(tmp_path))
    assert {raw.split for raw in source} == splits and source.given == given


def test_held_out_files_stay_held_out(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS[:30])
    write_lines(tmp_path / "test.jsonl", ROWS[30:])
    rows = list(rows_of(Source(str(tmp_path)), generic.to_row, None))
    assert [row["split"] for row in rows] == ["test"] * 10 + [None] * 30  # of train, validation is still carved
    assert rows[0]["source"] == f"{tmp_path / 'test.jsonl'}:1"


def test_hub_datasets(monkeypatch):
    import datasets

    asked = []
    splits = {"train_sft": ROWS[:2], "test_sft": ROWS[2:3]}

    def load(*names, **options):
        asked.append((names, options))
        return {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = list(Source("someone/set", "main", "refs/convert/parquet"))
    assert asked == [(("someone/set", "main"), {"revision": "refs/convert/parquet"})]
    assert [(raw.source, raw.split) for raw in rows] == [
        ("someone/set/train_sft:0", "train"), ("someone/set/train_sft:1", "train"), ("someone/set/test_sft:0", "test"),
    ]  # fmt: skip
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: 1 / 0)
    with error_naming(UsageError, "--dataset_name someone/set", "division"):
        Source("someone/set")


# ---------------------------------------------------------------------------------------------------------- bad files
def lines(*more: bytes) -> bytes:
    return b"\n".join([*LINES[:2], *more, *LINES[2:]]) + b"\n"


BAD_JSON = {  # name: (content, line in the error, words of the error)
    "not UTF-8": (lines(b'{"prompt": "caf\xe9", "completion": "a"}'), 3, "byte 16 is not UTF-8"),
    "UTF-16": ("\n".join(map(json.dumps, ROWS)).encode("utf-16"), None, "UTF-16"),
    "a line cut short": (lines(b'{"prompt": "a", "comple'), 3, "not a JSON object"),
    "the last line cut short": (b"\n".join(LINES)[:-5], 40, "not a JSON object"),
    "two objects on a line": (lines(LINES[0] + LINES[1]), 3, "several objects"),
    "single quotes": (lines(b"{'prompt': 'a'}"), 3, "not JSON"),
    "trailing comma": (lines(b'{"prompt": "a",}'), 3, "comma"),
    "a comment": (lines(b"# mine"), 3, "comment"),
    "a list": (lines(b'["prompt", "completion"]'), 3, "a JSON list"),
    "an object over several lines, cut short": (json.dumps(ROWS[0], indent=1).encode()[:-2], 3, "not JSON"),
    "a number": (lines(b"7"), 3, "a JSON int"),
    "null": (lines(b"null"), 3, "a JSON NoneType"),
    "a string": (lines(b'"prompt"'), 3, "a text"),
    "a key twice": (lines(b'{"prompt": "a", "completion": "b", "prompt": "c"}'), 3, "'prompt' occurs twice"),
    "a key twice inside": (lines(b'{"prompt": [{"role": "user", "role": "system"}]}'), 3, "'role' occurs twice"),
    "endless nesting": (lines(b'{"prompt": ' + b"[" * 100_000), 3, "not a JSON object"),
    "control character": (lines(b'{"prompt": "a\x01b"}'), 3, "not a JSON object"),
    "a number of 5000 digits": (lines(b'{"prompt": ' + b"9" * 5000 + b"}"), 3, "not a JSON object"),
    "comma-separated values": (b"prompt,completion\na,b\n", 1, ".csv"),
    "a web page": (b"<!DOCTYPE html>\n<html>", None, "a web page"),
    "zero bytes": (b"\0" * 100, 1, "not a JSON object"),
}
GZIPPED = gzip.compress(lines())
BAD_GZIP = {
    "truncated": (GZIPPED[:-12], None, "stream is damaged"),
    "truncated in the header": (GZIPPED[:5], 1, "stream is damaged"),
    "a wrong check sum": (GZIPPED[:-8] + b"12345678", None, "stream is damaged"),
    "damaged in the middle": (GZIPPED[:60] + b"\xff\x00" * 20 + GZIPPED[100:], None, "stream is damaged"),
    "followed by rubbish": (GZIPPED + b"rubbish", None, "stream is damaged"),
}  # fmt: skip
BAD_GZIP |= {name: (gzip.compress(content), *rest) for name, (content, *rest) in BAD_JSON.items()}


def parquet_of(rows: list[dict]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


PARQUET = parquet_of(ROWS)
BAD_PARQUET = {
    "empty": b"", "text": lines(), "truncated": PARQUET[:-30], "half": PARQUET[: len(PARQUET) // 2],
    "without its head": PARQUET[20:], "magic only": b"PAR1", "magic twice": b"PAR1PAR1",
    "gzipped": gzip.compress(PARQUET),
    "zero bytes": b"\0" * 500, "footer of a wrong size": PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1",
    "footer of no size": PARQUET[:-8] + b"\0\0\0\0PAR1",
    "scrambled footer": PARQUET[:-60] + b"\x55" * 52 + PARQUET[-8:],
    "scrambled pages": PARQUET[:4] + b"\xaa" * 300 + PARQUET[304:],
}  # fmt: skip


def fails(capsys, tmp_path, file: Path) -> str:
    """The one-line error of preparing `file`, which writes nothing."""
    tokenizer = tmp_path / "tokenizer"
    gpt2_like().save_pretrained(tokenizer)
    flags = {"destination_dir": tmp_path / "out", "dataset_name": file, "tokenizer_name": tokenizer, "num_proc": 1}
    with pytest.raises(SystemExit) as stop:
        generic.main([f"--{name}={value}" for name, value in flags.items()])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 1 and len(error.splitlines()) == 1 and str(file) in error
    assert not list(tmp_path.glob("out/**/*.pt")) and not list(tmp_path.glob("out/.*"))
    return error


@pytest.mark.parametrize("suffix, name", [("", n) for n in BAD_JSON] + [(".gz", n) for n in BAD_GZIP])
def test_damaged_lines_are_refused(capsys, tmp_path, suffix, name):
    content, line, words = (BAD_GZIP if suffix else BAD_JSON)[name]
    file = tmp_path / f"bad.jsonl{suffix}"
    file.write_bytes(content)
    error = fails(capsys, tmp_path, file)
    assert words in error and (line is None or f"{file}:{line}:" in error)


def test_damage_is_found_before_the_tokenizer_is_loaded(capsys, tmp_path):
    for name, run in (("bad.jsonl", generic.main), ("bad.csv", webgpt.main)):
        file = tmp_path / name
        file.write_bytes(lines() + b"{" if name == "bad.jsonl" else b"a,b\n1,2\n1,2,3\n")
        with pytest.raises(SystemExit) as stop:
            run([f"--destination_dir={tmp_path / 'out'}", f"--dataset_name={file}", "--tokenizer_name=none/such"])
        error = capsys.readouterr().err
        assert stop.value.code == 1 and str(file) in error and "--skip_bad_lines" in error


def skipping(tmp_path, file: Path, *flags: str) -> dict:
    """The report of preparing a file whose bad lines are skipped."""
    gpt2_like().save_pretrained(tmp_path / "tokenizer")
    names = {"destination_dir": tmp_path / "out", "dataset_name": file, "tokenizer_name": tmp_path / "tokenizer"}
    generic.main([*(f"--{name}={value}" for name, value in names.items()), "--skip_bad_lines=True", *flags])
    return json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "csv"])
def test_bad_lines_are_skipped_counted_and_named(capsys, tmp_path, suffix):
    good = [b'{"prompt": "a %d", "completion": "b c"}' % n for n in range(8)]
    bad = [b"{", b'{"prompt": "a"', b"\xff", b"[1]", b'{"a": 1, "a": 2}', b"x"]
    if suffix == "csv":
        good, bad = [b"prompt,completion", *(b"a %d,b c" % n for n in range(8))], [b"a", b"a,b,c"]
    mixed = [line for pair in zip(good, bad) for line in pair] + good[len(bad) :]
    content = b"\n".join(mixed) + b"\n"
    file = tmp_path / f"mixed.{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    report = skipping(tmp_path, file, "--validation_percentage=0", "--test_percentage=0")
    skipped = {entry["reason"]: (entry["rows"], entry["first"]) for entry in report["dropped"]}
    if suffix == "csv":
        assert skipped == {"bad_line (too many or too few cells)": (2, f"{file}:2, 4")}
    else:
        assert skipped["bad_line (not JSON)"] == (3, f"{file}:2, 4, 12")
        assert skipped["bad_line (not UTF-8)"][1] == f"{file}:6"
        assert sum(count for count, _ in skipped.values()) == len(bad)
    assert report["files"]["finetune_train"]["rows"] == 8
    shown = capsys.readouterr().out
    assert all(f"{reason}" in shown and first in shown for reason, (_, first) in skipped.items())
    assert all(first in (tmp_path / "out" / "report.md").read_text() for _, first in skipped.values())


@pytest.mark.parametrize(
    "name, content",
    [
        ("cut.jsonl.gz", gzip.compress(lines())[:-12]),
        ("open.csv", b'prompt,completion\na,b\na,"b\n'),
        ("bytes.csv", b"prompt,completion\na,b\n\xff,b\n"),
        ("array.json", b'[{"prompt": "a"}, {"prompt": ]'),
    ],
)
def test_damage_that_makes_the_rest_unsure_is_never_skipped(capsys, tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        skipping(tmp_path, file)
    assert stop.value.code == 1 and str(file) in capsys.readouterr().err and not list(tmp_path.glob("out/*.pt"))


@pytest.mark.parametrize("name", BAD_PARQUET)
def test_damaged_parquet_is_refused(capsys, tmp_path, name):
    file = tmp_path / "bad.parquet"
    file.write_bytes(BAD_PARQUET[name])
    assert fails(capsys, tmp_path, file)


STRANGE = {  # well-formed but unusable rows, of types that parquet also has
    "wrong columns": {"question": "a", "answer": "b"}, "null prompt": {"prompt": None, "completion": "b"},
    "null completion only": {"prompt": None, "completion": None}, "numbers": {"prompt": 1, "completion": 2},
    "empty texts": {"prompt": "", "completion": ""}, "a list of numbers": {"prompt": [1, 2], "completion": "b"},
    "an object": {"prompt": {"text": "a"}, "completion": "b"}, "bare roles": {"messages": [{"role": "user"}]},
    "empty messages": {"messages": [{"role": "user", "content": ""}]}, "bytes or no text": {"prompt": 1.5},
    "one side": {"prompt": "a", "chosen": "b"}, "a pair of numbers": {"prompt": "a", "chosen": 1, "rejected": 2},
    "a short pair": {"chosen": "x", "rejected": "y"},
    "prompt too long": {"prompt": "word " * 2000, "completion": "b c"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", STRANGE)
def test_files_without_a_usable_row_are_refused(capsys, tmp_path, kind, name):
    rows = [STRANGE[name]] * 3
    writer = write_lines if kind == "jsonl" else write_parquet
    file = writer(tmp_path / f"strange.{kind}", rows)
    error = fails(capsys, tmp_path, file)
    assert f"--dataset_name {file}" in error and " x " in error and f"first {file}:1" in error


def test_an_empty_file_and_an_empty_folder(capsys, tmp_path):
    assert "no rows" in fails(capsys, tmp_path, write_lines(tmp_path / "empty.jsonl", []))
    (tmp_path / "folder").mkdir()
    with error_naming(UsageError, "--dataset_name", "folder"):
        Source(str(tmp_path / "folder"))
    (tmp_path / "notes.txt").write_text("hello")
    with error_naming(UsageError, "--dataset_name", "notes.txt", ".jsonl", ".gz"):
        Source(str(tmp_path / "notes.txt"))


def test_a_folder_in_place_of_a_file_and_a_file_without_permission(tmp_path):
    (tmp_path / "data.jsonl").mkdir()
    with error_naming(UsageError, "--dataset_name", "data.jsonl"):
        Source(str(tmp_path / "data.jsonl"))
    file = write_lines(tmp_path / "closed.jsonl", ROWS)
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user can read every file")
    with error_naming(RunFailure, os.strerror(13)):
        values(file)
