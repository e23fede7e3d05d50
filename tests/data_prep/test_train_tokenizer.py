"""datasets_prep.train_tokenizer: a small tokenizer of a set's own language, which the data preparation takes."""

import gzip
import json

import pytest
from helpers.flat import stored_rows
from transformers import AutoTokenizer

from datasets_prep import train_tokenizer
from datasets_prep.helpful_harmless import prepare_data
from lightrlhf.data.tokens import encode_prompt

TALK = "\n\nHuman: What grows in a garden in {month}?\n\nAssistant:"
MONTHS = ("March", "April", "May", "June", "July", "August")
ODD = "naïve café, \t 東京, 🙂, \u202eright to left\u202c, x\u0301"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Sixty dialogues in Anthropic's format."""
    path = tmp_path_factory.mktemp("raw") / "pairs.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(60):
            start = TALK.format(month=f"{MONTHS[number % 6]} {number}")
            good, bad = f"{start} Peas and beans, {number} of each.", f"{start} Nothing at all."
            file.write(json.dumps({"chosen": good, "rejected": bad}) + "\n")
    return path


def trained(pairs, folder, *flags):
    train_tokenizer.main(["--dataset_name", str(pairs), "--destination_dir", str(folder), *flags])
    return AutoTokenizer.from_pretrained(folder)


def test_it_is_small_reads_everything_and_prepares_data(pairs, tmp_path):
    tokenizer = trained(pairs, tmp_path / "bpe", "--vocab_size", "400")
    assert 258 < len(tokenizer) <= 400
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for text in (ODD, TALK):
        assert tokenizer.decode(encode_prompt(tokenizer, text)) == text
    assert len(tokenizer(" Peas and beans")["input_ids"]) <= 4  # merges of the set's own words
    data = tmp_path / "data"
    flags = ["--destination_dir", str(data), "--tokenizer_name", str(tmp_path / "bpe"), "--split", "null"]
    prepare_data.main(["--dataset_name", str(pairs), *flags])
    rows = stored_rows(data / "preference_train.pt")
    for row in rows:
        ids = row["chosen_input_ids"].tolist()
        assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id


def test_the_same_dataset_gives_the_same_tokenizer_and_num_samples_bounds_it(pairs, tmp_path):
    one, two = (trained(pairs, tmp_path / name, "--vocab_size", "300") for name in "ab")
    assert one.get_vocab() == two.get_vocab()
    few = trained(pairs, tmp_path / "few", "--num_samples", "1", "--vocab_size", "1000")
    assert len(few) < len(trained(pairs, tmp_path / "all", "--vocab_size", "1000"))


def test_every_text_of_a_row_is_read_and_half_characters_are_left_out():
    row = {"prompt": [{"role": "user", "content": "hello"}], "score": 3, "none": None, "bad": "\ud83d", "empty": ""}
    assert list(train_tokenizer.texts_of(row)) == ["user", "hello"]


@pytest.mark.parametrize(("flags", "status", "words"), [(["--dataset_name", "nowhere.jsonl"], 2, "nowhere.jsonl")])
def test_bad_calls_are_one_line(pairs, tmp_path, capsys, flags, status, words):
    with pytest.raises(SystemExit) as stop:
        train_tokenizer.main(["--dataset_name", str(pairs), "--destination_dir", str(tmp_path / "bpe"), *flags])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == status
    assert len(lines) == 1 and words in lines[0], lines
    assert not (tmp_path / "bpe").exists()


def test_a_destination_that_is_a_file_is_refused(pairs, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit) as stop:
        trained(pairs, tmp_path / "file")
    assert stop.value.code == 2
    assert "--destination_dir" in capsys.readouterr().err


def test_a_dataset_without_text_is_refused(tmp_path, capsys):
    (tmp_path / "numbers.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(SystemExit) as stop:
        trained(tmp_path / "numbers.jsonl", tmp_path / "bpe")
    assert stop.value.code == 1
    assert "--dataset_name" in capsys.readouterr().err
