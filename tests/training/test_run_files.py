"""Files of a run: folders, arguments, uploads."""

import json
import time
from pathlib import Path

import pytest
from helpers import CPU

from lightrlhf import sft


def test_two_runs_of_one_second_have_folders_of_their_own(run, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *a: "2030-01-01_00-00-00")
    folders = [run().files.directory for _ in range(3)]
    assert len(set(folders)) == 3 and all(folder.is_dir() for folder in folders)


def test_arguments_are_stored_with_versions_and_commit(run):
    stored = json.loads((run(seed=7).files.directory / "args.json").read_text())
    assert stored["seed"] == 7 and stored["program"] == "test"
    assert {"python", "torch", "transformers", "lightning"} <= stored["versions"].keys() and "git_commit" in stored


def test_the_last_checkpoint_goes_to_the_hub_without_resume_state(cafe_data, tmp_path, monkeypatch):
    import huggingface_hub

    sent = {}

    class Hub:
        def create_repo(self, repository, **options):
            sent.update(options, repository=repository)

        def upload_folder(self, **options):
            sent.update(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    where = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name=tiny", *CPU]
    folder = sft.main([*where, "--max_steps=1", "--eval_interval=0", "--push_to_hub=somebody/cafe"])
    assert sent["repository"] == sent["repo_id"] == "somebody/cafe" and sent["private"]
    assert sent["folder_path"] == Path(folder) / "checkpoint-000001"
    assert "resume.pt" in sent["ignore_patterns"]


def test_a_failed_upload_is_one_line_and_keeps_the_checkpoint(cafe_data, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    class Hub:
        def create_repo(self, repository, **options):
            raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    where = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name=tiny", *CPU]
    with pytest.raises(SystemExit) as stop:
        sft.main([*where, "--max_steps=1", "--eval_interval=0", "--push_to_hub=somebody/cafe"])
    assert stop.value.code == 1
    assert "error: --push_to_hub somebody/cafe failed: no network; the checkpoint is" in capsys.readouterr().err
    assert len(list(tmp_path.rglob("checkpoint-000001"))) == 1
