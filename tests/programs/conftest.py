"""Data that tests of several programs use."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def talk_data(tmp_path_factory, tokenizer):
    """The café's conversations with a few dozen rows, in the tokens of the other tests."""
    from datasets_prep.cafe_talk.prepare_data import main as prepare

    folder = tmp_path_factory.mktemp("talk")
    tokenizer.save_pretrained(folder / "tokenizer")
    flags = ["--tokenizer_name", str(folder / "tokenizer"), "--num_dialogues", "40", "--num_held_out", "8"]
    prepare(["--destination_dir", str(folder / "data"), *flags, "--num_proc", "1"])
    return folder / "data"
