"""Seals of prepared data, runs and checkpoints: what changed since it was written is named, and how to go on."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import load_split, save_split
from lightrlhf.models.names import resolve
from lightrlhf.storage import seals
from lightrlhf.storage.checkpoint import is_sealed, save_checkpoint, verify_checkpoint
from lightrlhf.storage.run_dir import stored_arg

ROWS = [{"prompt_len": 1, "input_ids": [5, 6, 7], "targets": torch.tensor([-100, 6, 7])}]


@pytest.fixture
def data(tmp_path):
    for split in ("train", "test"):
        save_split(tmp_path / "data", "finetune", split, ROWS * (2 if split == "train" else 3))
    return tmp_path / "data"


def test_a_split_copied_over_another_is_noticed_and_can_be_accepted(data, capsys):
    shutil.copy(data / "finetune_test.pt", data / "finetune_train.pt")
    with error_naming(UsageError, "finetune_train.pt", "--verify False"):
        load_split(data, "finetune", "train")
    assert len(load_split(data, "finetune", "train", verify=False)) == 3
    seals.main([str(data)])
    assert capsys.readouterr().out.endswith("manifest.json: 2 files; new or changed: finetune_train.pt\n")
    assert len(load_split(data, "finetune", "train")) == 3


def test_only_folders_of_ours_are_sealed_by_hand(tmp_path, capsys):
    for folder, line in (("none", "is no folder"), (".", "is neither prepared data nor a run")):
        with pytest.raises(SystemExit) as stop:
            seals.main([str(tmp_path / folder)])
        assert stop.value.code == 2 and line in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        seals.main(["--help"])
    assert stop.value.code == 0 and not list(tmp_path.iterdir())


def test_an_added_split_and_a_damaged_manifest_are_refused(data):
    shutil.copy(data / "finetune_test.pt", data / "finetune_validation.pt")
    with error_naming(UsageError, "finetune_validation.pt", "added"):
        load_split(data, "finetune", "validation")
    (data / "manifest.json").write_text("{")
    with error_naming(UsageError, "manifest.json", "damaged"):
        load_split(data, "finetune", "train")


def test_a_folder_without_a_seal_is_read_with_one_note(data, capsys):
    (data / "manifest.json").unlink()
    for _ in range(2):
        load_split(data, "finetune", "train")
    assert capsys.readouterr().out.count("has no manifest.json") == 1


def test_sealing_new_files_keeps_the_hashes_of_the_others(data):
    (data / "finetune_test.pt").write_bytes(b"changed")
    save_split(data, "preference", "train", [{"prompt_len": 1, "chosen_input_ids": [1, 2], "rejected_input_ids": [1]}])
    with error_naming(UsageError, "finetune_test.pt"):
        load_split(data, "finetune", "test")


def write_model(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 99)
    (folder / "resume.pt").write_bytes(b"r" * 9)


@pytest.mark.parametrize("name", ["chat_template.jinja", "adapter_config.json", "additional_chat_templates/tool.jinja"])
def test_a_file_beside_a_good_checkpoint_is_noticed_also_behind_a_link(tmp_path, name):
    saved = save_checkpoint(tmp_path, 1, write_model)
    elsewhere = tmp_path / "elsewhere" / name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_text("{}")
    added = saved / name.split("/")[0]
    added.symlink_to(tmp_path / "elsewhere" / added.name)
    with error_naming(UsageError, name, "added"):
        verify_checkpoint(saved)
    seals.main([str(saved)])
    verify_checkpoint(saved)


def test_a_linked_or_renamed_checkpoint_is_checked_and_a_foreign_folder_is_not(tmp_path):
    saved = save_checkpoint(tmp_path / "run", 1, write_model) if (tmp_path / "run").mkdir() is None else None
    (tmp_path / "link").symlink_to(saved)
    assert resolve(str(tmp_path / "link")) == str(tmp_path / "link")
    (saved / "model.safetensors").write_bytes(b"x" * 99)
    with error_naming(UsageError, "model.safetensors"):
        resolve(str(tmp_path / "link"))
    saved.rename(tmp_path / "mine")
    with error_naming(UsageError, "model.safetensors"):
        resolve(str(tmp_path / "mine"))
    (tmp_path / "mine" / "manifest.json").unlink()
    with error_naming(UsageError, "manifest.json"):
        resolve(str(tmp_path / "mine"))
    (tmp_path / "mine" / "resume.pt").unlink()  # as any model folder now
    assert resolve(str(tmp_path / "mine")) == str(tmp_path / "mine")
    (tmp_path / "mine" / "manifest.json").write_text(json.dumps({"version": 3}))  # somebody else's
    assert not is_sealed(tmp_path / "mine")


def test_changed_arguments_of_a_run_are_noticed(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"program": "dpo", "beta": 0.1}))
    assert stored_arg(str(tmp_path), "beta") == 0.1
    seals.seal(tmp_path, ["args.json"])
    (tmp_path / "args.json").write_text(json.dumps({"program": "dpo", "beta": 0.3}))
    with error_naming(UsageError, "args.json", "python -m"):
        stored_arg(str(tmp_path), "beta")
