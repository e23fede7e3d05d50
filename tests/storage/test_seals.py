"""Seals of prepared data, runs and checkpoints: what changed since it was written is named, and how to go on."""

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.errors import error_naming, refused

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import load_split, save_split
from lightrlhf.demo.models import example_prompt
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage import seals
from lightrlhf.storage.checkpoint import final_checkpoint, is_sealed, save_checkpoint, verify_checkpoint
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl
from lightrlhf.storage.run_dir import read_arg
from lightrlhf.storage.seals import write_folder

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


def test_a_large_file_is_compared_by_size_and_date_and_by_content_where_they_differ(data, capsys, monkeypatch):
    monkeypatch.setattr(seals, "LARGE", 1)
    path, hashed = data / "finetune_train.pt", []
    content, dates = path.read_bytes(), path.stat()
    whole = seals.sha256
    monkeypatch.setattr(seals, "sha256", lambda file: hashed.append(file.name) or whole(file))
    load_split(data, "finetune", "train")
    assert hashed == [] and seals.content_hash(path) == whole(path) and hashed == []
    path.touch()
    load_split(data, "finetune", "train")
    assert hashed == [path.name]
    path.write_bytes(content.replace(b"layout", b"layuot"))
    with error_naming(UsageError, path.name, "--verify False"):
        load_split(data, "finetune", "train")
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))  # as a disk that flips bits leaves it
    seals.check_sealed(data, [path.name])
    with pytest.raises(SystemExit) as stop:
        seals.main(["--verify", str(data)])
    assert stop.value.code == 2 and f"{path.name} is not what was written" in capsys.readouterr().err
    path.write_bytes(content)
    seals.main(["--verify", str(data)])
    assert "2 files are as they were written" in capsys.readouterr().out
    path.write_bytes(content + b"0")
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    with error_naming(UsageError, path.name):
        seals.check_sealed(data, [path.name])


def test_only_folders_of_ours_are_sealed_by_hand(tmp_path, capsys):
    for folder, line in (("none", "is not a folder"), (".", "is neither prepared data nor a run")):
        assert line in refused(capsys, seals.main, tmp_path / folder)
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
    save_split(
        data, "preference", "train", [{"prompt_len": 1, "chosen_input_ids": [1, 2], "rejected_input_ids": [1, 3]}]
    )
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
    assert read_arg(str(tmp_path), "beta") == 0.1
    seals.seal(tmp_path, ["args.json"])
    (tmp_path / "args.json").write_text(json.dumps({"program": "dpo", "beta": 0.3}))
    with error_naming(UsageError, "args.json", "python -m"):
        read_arg(str(tmp_path), "beta")


# -------------------------------------------------------------------------------------------------------------- attacks

STAGES = ("finetune", "preference", "prompts")


def said(read) -> str:
    """The one line of the error of a call, empty without one."""
    try:
        read()
    except UsageError as problem:
        return str(problem)
    return ""


def flip(file: Path, offset: int, bit: int) -> bytes:
    """Flip a bit; returns the content before."""
    before = file.read_bytes()
    changed = bytearray(before)
    changed[offset % len(before)] ^= 1 << bit
    file.write_bytes(changed)
    return before


@pytest.fixture
def cafe(cafe_data, tmp_path):
    return shutil.copytree(cafe_data, tmp_path / "cafe")


def readers(data: Path) -> dict[str, object]:
    """What reads each file of a prepared folder that a run reads."""
    found: dict[str, object] = {}
    for stage in STAGES:
        for split in ("train", "validation", "test"):
            if (data / f"{stage}_{split}.pt").is_file():
                found[f"{stage}_{split}.pt"] = partial(load_split, data, stage, split)
    for file in sorted((data / "tokenizer").iterdir()):
        found[f"tokenizer/{file.name}"] = partial(load_tokenizer, str(data))
    found["args.json"] = partial(load_split, data, "finetune", "train")
    found["example_prompt.pt"] = partial(example_prompt, str(data))
    return found


def test_flips_in_prepared_data(cafe, case):
    rng, reading = random.Random(0), readers(cafe)
    splits = [name for name in reading if name.endswith(".pt")]
    for name, times in [(name, 18 if name in splits else 6) for name in reading]:
        for _ in range(times):
            place, bit = rng.randrange((cafe / name).stat().st_size), rng.randrange(8)
            before = flip(cafe / name, place, bit)
            line = said(reading[name])
            (cafe / name).write_bytes(before)
            case(f"{name} byte {place} bit {bit}", name in line and "\n" not in line, line[:0])
    for place in range(0, (cafe / "manifest.json").stat().st_size, 97):
        before = flip(cafe / "manifest.json", place, rng.randrange(8))
        values = [said(read) or list(read()) for read in list(reading.values())[:3]]
        (cafe / "manifest.json").write_bytes(before)
        whole = [list(read()) for read in list(reading.values())[:3]]
        held = all(isinstance(value, str) or repr(value) == repr(one) for value, one in zip(values, whole))
        case(f"manifest.json byte {place}: refused, or the same rows", held)


def test_moved_splits(cafe, case):
    reading = readers(cafe)
    splits = [name for name in reading if name.endswith(".pt") and name != "example_prompt.pt"]
    for name in splits:
        content = (cafe / name).read_bytes()
        for other in splits:
            if other != name:
                shutil.copy(cafe / other, cafe / name)
                line = said(reading[name])
                (cafe / name).write_bytes(content)
                case(f"{other} copied over {name}", f"{name} is not what was written" in line)
        for kind, changed in {
            "cut by one byte": content[:-1],
            "cut to half": content[: len(content) // 2],
            "empty": b"",
            "longer by a byte": content + b"\0",
            "twice": content * 2,
        }.items():
            (cafe / name).write_bytes(changed)
            line = said(reading[name])
            (cafe / name).write_bytes(content)
            case(f"{name} {kind}", f"{name} is not what was written" in line)
        (cafe / name).rename(cafe / "away")
        case(f"{name} missing", "does not exist" in said(reading[name]) or "missing" in said(reading[name]))
        (cafe / "away").rename(cafe / name)
    for split in ("validation", "test"):
        for stage in ("unpaired", "dialogue", "refuel"):
            shutil.copy(cafe / "finetune_train.pt", cafe / f"{stage}_{split}.pt")
            line = said(partial(load_split, cafe, stage, split))
            case(f"{stage}_{split}.pt added", f"{stage}_{split}.pt was added" in line)
    for name in ("chat_template.jinja2", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "x.py"):
        (cafe / "tokenizer" / name).write_text("{}")
        case(f"tokenizer/{name} added", f"{name} was added" in said(partial(load_tokenizer, str(cafe))))
        (cafe / "tokenizer" / name).unlink()
    (cafe / "tokenizer").rename(cafe / "elsewhere")
    (cafe / "tokenizer").symlink_to(cafe / "elsewhere")
    case("a linked tokenizer that is the same loads", said(partial(load_tokenizer, str(cafe))) == "")
    flip(cafe / "elsewhere" / "tokenizer.json", 99, 1)
    case("a linked tokenizer that differs", "tokenizer.json" in said(partial(load_tokenizer, str(cafe))))
    case("--verify False reads it", "what was written" not in said(partial(load_tokenizer, str(cafe), verify=False)))


def test_checkpoints(sft_dir, rm_dir, tmp_path, case):
    rng = random.Random(1)
    for run in (sft_dir, rm_dir):
        mine = shutil.copytree(run, tmp_path / Path(run).parts[-4])
        saved = final_checkpoint(mine)
        (tmp_path / f"link {mine.name}").symlink_to(saved)
        ways = [str(saved), str(mine), str(tmp_path / f"link {mine.name}")]
        files = sorted(path for path in saved.rglob("*") if path.is_file())
        for file in files:
            for _ in range(12):
                place, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
                before = flip(file, place, bit)
                name = rng.choice(ways)
                line = said(partial(resolve, name))
                file.write_bytes(before)
                # a manifest that says another hash names that file; one that cannot be read, itself
                case(f"{mine.name}/{file.name} byte {place} bit {bit}", "is damaged" in line and "\n" not in line)
        for added in (
            "model.safetensors.index.json", "adapter_config.json", "modeling.py", "pytorch_model.bin", "tokenizer.model",  # noqa: E501
            "chat_template.jinja2", "additional_chat_templates/tool_use.jinja", "custom_generate/generate.py",
            "model-00001-of-00002.safetensors", "vocab.json", "preprocessor_config.json", "deep/manifest.json",
        ):  # fmt: skip
            (saved / added).parent.mkdir(exist_ok=True)
            (saved / added).write_text("{}")
            for name in ways:
                case(f"{mine.name}: {added} added", f"{added} was added" in said(partial(resolve, name)))
            (saved / added).unlink()
        renamed = shutil.copytree(saved, tmp_path / f"mine {mine.name}")
        case(f"{mine.name}: renamed loads", said(partial(resolve, str(renamed))) == "")
        for file in sorted(path for path in renamed.rglob("*") if path.is_file() and path.name != "manifest.json"):
            before = flip(file, 5, 2)
            case(f"{mine.name}: renamed, {file.name}", file.name in said(partial(resolve, str(renamed))))
            file.write_bytes(before)
        before = (mine / "args.json").read_bytes()
        for _ in range(12):
            flip(mine / "args.json", rng.randrange(len(before)), rng.randrange(8))
            line = said(partial(read_arg, str(mine), "program"))
            case(f"{mine.name}/args.json", "args.json is not what" in line or "args.json cannot be read" in line, line)
            (mine / "args.json").write_bytes(before)
    base = tmp_path / "run" / "base"
    base.parent.mkdir()
    write_folder(base, lambda folder: (folder / "config.json").write_text("{}") and None)
    for changed in (b"[]", b"{} ", b""):
        (base / "config.json").write_bytes(changed)
        case("base/config.json", "config.json" in said(partial(resolve, str(base))))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    case("a foreign folder without a manifest loads", said(partial(resolve, str(foreign))) == "")


def test_stage_files(tmp_path, case):
    rng = random.Random(2)
    for name in ("responses.jsonl", "rewards.jsonl", "dialogues.jsonl"):
        path = tmp_path / name
        rows = [{"index": i, "responses": ["a text", "b"], "rewards": [0.5, i]} for i in range(9)]
        with JsonlWriter(path, {"seed": 1}) as writer:
            writer.append(*rows)
        content = path.read_bytes()
        for place in rng.sample(range(len(content)), 20):
            flip(path, place, rng.randrange(8))
            line = said(partial(read_jsonl, path))
            resumed = said(partial(JsonlWriter, path, {"seed": 1}))
            path.write_bytes(content)
            case(f"{name} byte {place}", name in line and name in resumed)
        for kind, changed in {"cut": content[:-9], "a row less": content[: content.rfind(b"\n{") + 1],
                              "a row more": content + b'{"index": 9}\n', "in another order": content[::-1]}.items():  # fmt: skip  # noqa: E501
            path.write_bytes(changed)
            case(f"{name} {kind}", name in said(partial(read_jsonl, path)))
            path.write_bytes(content)
        case(f"{name} as it was", read_jsonl(path) == rows)


@pytest.mark.attack
def test_what_a_seal_costs(tmp_path, capsys):
    """A line for the page: seconds for a gigabyte, of a split that is in the page cache."""
    import time

    from lightrlhf.storage.seals import sha256

    torch.save(torch.zeros(2**28, dtype=torch.uint8), tmp_path / "big.pt")
    start = time.perf_counter()
    sha256(tmp_path / "big.pt")
    with capsys.disabled():
        print(f"seal: {4 * (time.perf_counter() - start):.2f} s per GB")
