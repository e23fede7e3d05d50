"""Prepared data on a hub: what is uploaded, that it is read back, and what is refused before any work."""

import json
import re
import shutil
from inspect import signature
from pathlib import Path

import huggingface_hub
import pytest
from helpers import CPU
from helpers.data import gpt2_like, write_lines
from helpers.errors import refused
from huggingface_hub import DatasetCard

from datasets_prep.generic import prepare_data as generic
from datasets_prep.text_envs import prepare_data as text_envs
from lightrlhf import sft
from lightrlhf.data.splits import load_split
from lightrlhf.storage.seals import read_manifest

ROWS = [{"prompt": f"p{n}", "completion": f" answer {n}"} for n in range(40)] + [{"prompt": None, "completion": "x"}]


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """A stand-in for the hub, of folders, which takes what the client takes; the token is that of nobody."""
    client = huggingface_hub.HfApi

    class Hub:
        folder = tmp_path_factory.mktemp("hub")
        calls: list[tuple[str, dict]] = []

        def create_repo(self, repository, **options):
            signature(client.create_repo).bind(self, repository, **options)
            self.calls.append((repository, options))

        def upload_folder(self, **options):
            signature(client.upload_folder).bind(self, **options)
            there = self.folder / options["repo_id"]
            for path in (path for pattern in options["delete_patterns"] for path in there.glob(pattern)):
                path.unlink()
            shutil.copytree(options["folder_path"], there, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    return Hub


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Flags of absolute paths."""
    gpt2_like().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "private" / "raw").mkdir(parents=True)
    file = write_lines(tmp_path / "private" / "raw" / "mine.jsonl", ROWS)
    names = {"dataset_name": file, "destination_dir": tmp_path / "data", "tokenizer_name": tmp_path / "tokenizer"}
    return [*(f"--{name}={value}" for name, value in names.items()), "--push_to_hub=somebody/mine"]


def test_what_is_uploaded_is_private_without_absolute_paths_and_read_back(hub, flags, tmp_path, capsys):
    generic.main([*flags, "--save_skipped_examples"])
    assert hub.calls == [("somebody/mine", {"repo_type": "dataset", "private": True, "exist_ok": True})]
    assert "uploaded to somebody/mine" in capsys.readouterr().out
    there, here = hub.folder / "somebody" / "mine", tmp_path / "data"
    for path in (path for path in there.rglob("*") if path.suffix in (".json", ".md")):
        assert str(tmp_path) not in path.read_text(), path
    assert json.loads((there / "args.json").read_text())["dataset_name"] == "raw/mine.jsonl"
    assert str(tmp_path) in (here / "args.json").read_text()  # the folder itself is as it was
    names = [{path.name for path in folder.iterdir() if not path.name.startswith(".")} for folder in (here, there)]
    assert names[0] - names[1] == {"skipped_all.jsonl"} and names[1] - names[0] == {"README.md"}
    for split in ("train", "validation", "test"):
        ours, theirs = (load_split(folder, "finetune", split) for folder in (here, there))
        assert [row["input_ids"].tolist() for row in ours] == [row["input_ids"].tolist() for row in theirs]
    run = ["--model_name", "tiny", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    sft.main(["--data_dir", str(there), *run, *CPU])  # which compares what it reads with the seal
    assert "goes unnoticed" not in capsys.readouterr().out


def test_the_card_says_where_the_data_is_from_and_how_to_get_it(hub, flags):
    generic.main(flags)
    card = DatasetCard.load(hub.folder / "somebody" / "mine" / "README.md")
    assert card.data.tags == ["lightrlhf", "finetune", "prompts"] and card.data.viewer is False
    assert "from `raw/mine.jsonl` with the tokenizer of `" in card.text
    assert "hf download somebody/mine --repo-type dataset --local-dir data/mine\n" in card.text
    rows = json.loads((hub.folder / "somebody" / "mine" / "report.json").read_text())["files"]["finetune_train"]["rows"]
    assert re.search(rf"^\| `finetune_train.pt` \| {rows} \| \d+ \|$", card.text, re.MULTILINE)


def test_only_what_was_written_is_there_and_earlier_splits_are_not(hub, flags, tmp_path):
    generic.main(flags)
    there = hub.folder / "somebody" / "mine"
    assert (there / "finetune_test.pt").is_file() and (there / "prompts_train.pt").is_file()
    (tmp_path / "data" / "notes.txt").write_text("of nobody else")
    (there / "licence.txt").write_text("added on the hub")
    generic.main([*flags, "--test_percentage=0"])
    assert "finetune_test.pt" not in read_manifest(tmp_path / "data")
    assert not (there / "finetune_test.pt").exists() and not (there / "notes.txt").exists()
    assert (there / "finetune_train.pt").is_file() and (there / "licence.txt").is_file()


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("somebody/mine", "", "--push_to_hub somebody/mine"),
        ("mine", "hf_of_nobody", "--push_to_hub mine is not a name of the form OWNER/NAME"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_any_work(
    name, token, message, hub, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token or None)
    for main, words in ((generic.main, flags), (sft.main, ["--data_dir", "data", "--model_name", "tiny"])):
        assert message in refused(capsys, main, *words, "--push_to_hub", name)
    assert not hub.calls and not (tmp_path / "data").exists()


def test_a_failed_upload_is_one_line_and_keeps_the_data(hub, flags, tmp_path, monkeypatch, capsys):
    def fail(self, **options):
        raise OSError("no network\nand more")

    monkeypatch.setattr(hub, "upload_folder", fail)
    with pytest.raises(SystemExit) as stop:
        generic.main(flags)
    error = f"--push_to_hub somebody/mine failed: no network; the data is {tmp_path / 'data'}\n"
    assert stop.value.code == 1 and capsys.readouterr().err.endswith(error)
    assert load_split(tmp_path / "data", "finetune", "train")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".upload")]


def test_a_dry_run_uploads_nothing(hub, flags):
    generic.main([*flags, "--dry_run"])
    assert not hub.calls


def test_each_dataset_of_an_environment_has_a_repository(hub, tmp_path):
    pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")
    sizes = ["--num_samples", "6", "--num_held_out", "2", "--num_proc", "1"]
    where = ["--env", "helpers.corridor:Corridor", "--destination_dir", str(tmp_path / "data")]
    text_envs.main([*where, *sizes, "--push_to_hub", "somebody/corridor"])
    assert sorted(Path(name).name for name, _ in hub.calls) == sorted(f"corridor-{name}" for name in text_envs.SETS)
    assert (hub.folder / "somebody" / "corridor-sft_policy" / "finetune_train.pt").is_file()
