"""The shared pipeline: splits by prompt, filters that are counted, files that are whole, runs that repeat."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers import environment
from helpers.data import arguments, collect, collected, every, gpt2_like, targets_of, write_lines
from helpers.errors import error_naming
from helpers.flat import stored_rows
from helpers.processes import PATIENCE, started
from transformers import AutoTokenizer

from datasets_prep import common, stream
from datasets_prep.common import PrepareArgs, prepare
from datasets_prep.encoding import Encoder
from datasets_prep.generic import prepare_data as generic
from datasets_prep.helpful_harmless import prepare_data as helpful_harmless
from datasets_prep.selection import are_among
from datasets_prep.splits import Placement, shares_of
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import preference_batch
from lightrlhf.data.schema import COLUMNS, IGNORE_INDEX
from lightrlhf.data.splits import SPLITS, load_split

ROOT = Path(__file__).resolve().parents[2]
WORDS = "latte muffin bread please large small order coffee".split()


def pairs(count: int, seed: int = 0) -> list[dict]:
    """Rows of which every third shares its prompt with another, in another spelling."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        prompt = f"Human: {number - number % 3} {rng.choice(['a  latte', 'A latte'])}\n\nAssistant:"
        answers = [" " + " ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(2)]
        rows.append({"prompt": prompt, "chosen": answers[0] + " yes", "rejected": answers[1] + " no"})
    return rows


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    gpt2_like().save_pretrained(folder)
    return folder


@pytest.fixture
def write(tmp_path, tokenizer_dir):
    """Writes a data folder from rows; returns (folder, report)."""

    def write(rows, name="data", args_class=PrepareArgs, given=frozenset(), **flags):
        folder = tmp_path / name
        args = arguments(args_class, destination_dir=str(folder), tokenizer_name=str(tokenizer_dir), **flags)
        return folder, prepare(args, rows, given=given, example_prompt="Human: hello\n\nAssistant:")

    return write


def prompts_by_split(examples: dict, stage: str) -> dict[str, set[str]]:
    """The prompts of each split, without regard to case and spacing."""
    decode = gpt2_like().decode
    return {
        split: {" ".join(decode(e.ids[0][: e.prompt_len].tolist()).split()).casefold() for e in members}
        for split, members in examples[stage].items()
    }


# ------------------------------------------------------------------------------------------------------------- splits
def test_no_prompt_crosses_splits():
    examples, _ = collected(pairs(300), remove_same_inputs=False, validation_percentage=0.2, test_percentage=0.2)
    for stage in ("finetune", "preference", "prompts"):
        train, validation, test = (prompts_by_split(examples, stage)[split] for split in SPLITS)
        assert train and validation and test
        assert not train & validation and not train & test and not validation & test


def test_no_prompt_crosses_stages():
    examples, _ = collected(pairs(300), remove_same_inputs=False, split="2,4,4", seed=1234)
    sft, rm, rl = (set().union(*prompts_by_split(examples, s).values()) for s in ("finetune", "preference", "prompts"))
    assert not sft & rm and not sft & rl and not rm & rl
    assert len(sft | rm | rl) == 100 and 10 <= len(sft) <= 32 and 25 <= len(rm) <= 55 and 25 <= len(rl) <= 55


def test_split_shares():
    examples, _ = collected(({"prompt": f"p{n}"} for n in range(4000)), validation_percentage=0.05, test_percentage=0.1)
    sizes = {split: len(members) for split, members in examples["prompts"].items()}
    assert abs(sizes["validation"] - 200) < 50 and abs(sizes["test"] - 400) < 70 and sum(sizes.values()) == 4000


def test_stages_one_after_the_other_are_the_stages_of_one_run(write):
    rows = pairs(300)
    together, _ = write(rows, "together", split="2,4,4")
    for stage in ("finetune", "preference"):
        apart, report = write(rows, "apart", split="2,4,4", stage=stage)
    assert set(report["files"]) == {f"{stage}_{split}" for stage in ("finetune", "preference") for split in SPLITS}
    for name in report["files"]:
        assert plain(stored_rows(apart / f"{name}.pt")) == plain(stored_rows(together / f"{name}.pt"))


def plain(rows: list[dict]) -> list[dict]:
    return [{key: value.tolist() if torch.is_tensor(value) else value for key, value in row.items()} for row in rows]


def test_order_and_number_of_rows_move_no_prompt():
    rows = pairs(200)
    whole, _ = collected(rows, remove_same_inputs=False)
    part, _ = collected(rows[150:] + rows[:40], remove_same_inputs=False)
    for split in SPLITS:
        assert prompts_by_split(part, "prompts")[split] <= prompts_by_split(whole, "prompts")[split]


def test_another_seed_gives_another_split():
    first, second = (prompts_by_split(collected(pairs(300), seed=seed)[0], "prompts")["test"] for seed in (1, 2))
    assert first != second


def test_given_splits_are_kept_and_win_over_train():
    rows = [{"prompt": f"p{n}", "split": "test"} for n in range(10)] + [{"prompt": f"p{n}"} for n in range(5, 40)]
    args = arguments()
    tokenizer = common.complete(gpt2_like(), None)
    encoder = Encoder(args, tokenizer, Placement(args, given=frozenset({"test"})))
    examples, dropped = collect(arguments(remove_same_inputs=False), rows, encoder)
    assert len(examples["prompts"]["test"]) == 10  # nothing more is carved out
    assert [row.reason for row in dropped] == ["prompt_also_in_test"] * 5
    texts = prompts_by_split(examples, "prompts")
    assert not texts["test"] & (texts["train"] | texts["validation"])


def test_values_are_looked_up_among_few():
    values = np.random.default_rng(0).integers(0, 2**63, 1000, dtype=np.uint64)
    for few in (values[:0], np.unique(values[::9]), np.unique(np.append(values[::9], values.max() + np.uint64(1)))):
        assert (are_among(values, few) == np.isin(values, few)).all()


def test_a_row_may_name_its_stage():
    row = {"prompt": "p", "chosen": " good", "rejected": " bad", "split": "train"}
    examples, _ = collected([row | {"stage": stage} for stage in ("finetune", "preference")], split="1,1,1")
    assert {stage: list(splits) for stage, splits in examples.items()} == {
        "finetune": ["train"],
        "preference": ["train"],
    }


def test_group_keeps_rows_together():
    rows = [{"prompt": f"p{n}", "group": "one"} for n in range(60)]
    assert len(collected(rows)[0]["prompts"]) == 1


@pytest.mark.parametrize("split", ["", "1", "1,2", "1,2,3,4", "0,0,0", "-1,1,1", "a,b,c", "inf,1,1", "nan,1,1"])
def test_bad_shares_are_refused(split):
    with pytest.raises(ValueError, match="--split"):
        shares_of(split)


# ------------------------------------------------------------------------------------------------------------ filters
def reasons(rows, **given) -> list[str]:
    return sorted(row.reason for row in collected(rows, stage=given.pop("stage", "preference"), **given)[1])


def test_filters_count_what_they_drop():
    row = {"prompt": "Human: hello", "chosen": " good", "rejected": " bad"}
    assert reasons([row, row]) == ["same_input"]
    assert reasons([row, row], remove_same_inputs=False) == []
    assert reasons([row | {"rejected": " good"}]) == ["same_responses"]
    assert reasons([row | {"rejected": " good"}], remove_same_responses=False) == []
    assert reasons([row | {"chosen": " " * 9 + "a"}]) == []
    assert reasons([row | {"chosen": " a"}], minimum_response_length=2) == ["response_too_short"]
    assert reasons([row | {"prompt": "word " * 300}]) == ["prompt_too_long"]
    assert reasons([row], max_prompt_length=3) == ["prompt_too_long"]
    assert reasons([row], max_length=8, max_prompt_length=8) == ["no_trained_tokens"]
    assert reasons([row | {"chosen": " <|endoftext|> and more"}]) == ["special_token_in_text"]
    (reason,) = reasons([row], stage="dialogue")
    assert all(word in reason for word in ("finetune, preference, prompts", "dialogue", "messages"))


def test_a_pair_that_is_the_same_after_the_cut_is_dropped():
    row = {"prompt": "hello", "chosen": " the very same beginning good", "rejected": " the very same beginning bad"}
    assert reasons([row], max_length=16) == ["same_responses_after_cut"]


def dialogue(turns: int, user: str = "hello", answer: str = "fine") -> list[dict]:
    return [m for n in range(turns) for m in ({"role": "user", "content": f"{user} {n}"}, {"role": "assistant", "content": answer})]  # fmt: skip # noqa: E501


def test_dialogue_limits():
    def why(messages, **given):
        return reasons([{"messages": messages}], stage="dialogue", **given)

    assert why(dialogue(5)) == [] and why(dialogue(6)) == ["too_many_turns"]
    assert why(dialogue(2), turn_prompt_length="10") == ["prompt_too_long"]
    assert why(dialogue(2), turn_prompt_length="10,60") == []  # the limit depends on the number of turns
    assert why(dialogue(1), turn_prompt_length="10,60") == ["prompt_too_long"]
    assert why(dialogue(2, answer="fine words " * 9), turn_response_length="10") == ["response_too_long"]
    assert why(dialogue(4), max_dialogue_length=40) == ["dialogue_too_long"]
    redundant = [{"messages": dialogue(2)}, {"messages": dialogue(2, answer="other")}]
    assert reasons(redundant, stage="dialogue", remove_same_inputs=False) == ["same_dialogue"]


@pytest.mark.parametrize(
    ("row", "flag", "value"),
    [
        ({"prompt": "p", "completion": " B"}, "minimum_response_length", 3),
        ({"prompt": "word " * 9, "completion": " yes"}, "max_prompt_length", 4),
        ({"prompt": "p", "completion": " yes"}, "max_length", 1),
        ({"messages": dialogue(3)}, "max_turns", 2),
        ({"messages": dialogue(1)}, "turn_prompt_length", "2"),
        ({"messages": dialogue(1)}, "turn_response_length", "1"),
        ({"messages": dialogue(1)}, "max_dialogue_length", 3),
    ],
)
def test_rows_dropped_by_a_length_name_its_flag(write, capsys, row, flag, value):
    """Where some rows are left, and where none is."""
    stage = "dialogue" if "messages" in row else "finetune"
    with error_naming(RunFailure, f"--{flag} ({value})"):
        write([row], stage=stage, **{flag: value})
    capsys.readouterr()
    write([row, {"prompt": "q", "completion": " never too long", "split": "train"}], **{flag: value})
    assert f"--{flag} ({value})" in capsys.readouterr().out


def test_a_cut_row_has_no_end_token():
    row = {"prompt": "hello", "chosen": " word" * 50, "rejected": " short"}
    examples, dropped = collected([row], max_length=20)
    assert not dropped
    eos = gpt2_like().eos_token_id
    (finetune,), (pair,) = every(examples, "finetune"), every(examples, "preference")
    assert len(finetune.ids[0]) == 20 and finetune.cut and eos not in finetune.ids[0]
    assert pair.cut and eos not in pair.ids[0] and pair.ids[1].tolist().count(eos) == 1


def test_skipped_examples_are_kept(write):
    rows = [*pairs(60), {"prompt": "Human: x", "chosen": " same", "rejected": " same", "source": "mine:61"}]
    folder, _ = write(rows, save_skipped_examples=True, stage="preference", remove_same_inputs=False)
    (skipped,) = [json.loads(line) for line in (folder / "skipped_preference.jsonl").read_text().splitlines()]
    assert skipped["reason"] == "same_responses" and skipped["source"] == "mine:61" and skipped["row"] == rows[-1]
    assert not (write(rows, "other")[0] / "skipped_all.jsonl").exists()


# -------------------------------------------------------------------------------------------------------------- files
def test_files_hold_the_contract(write):
    rows = [row | {"columns": {"n": number}} for number, row in enumerate(pairs(150))]
    rows += [{"messages": dialogue(2, user=f"talk {n}")} for n in range(60)]
    folder, report = write(rows)
    names = {f"{stage}_{split}" for stage in ("finetune", "preference", "prompts", "dialogue") for split in SPLITS}
    assert {path.stem for path in folder.glob("*.pt")} == names | {"example_prompt"} and set(report["files"]) == names
    for stage in ("finetune", "preference", "prompts", "dialogue"):
        for row in load_split(folder, stage, "train"):
            assert COLUMNS[stage] <= row.keys() and row.get("prompt_len", 1) > 0
    row = next(row for row in load_split(folder, "prompts", "train") if row["columns"])
    assert isinstance(row["columns"]["n"], int) and len(row["input_ids"]) == row["prompt_len"]
    row = load_split(folder, "finetune", "train")[0]
    n = row["prompt_len"]
    assert row["targets"][:n].tolist() == [IGNORE_INDEX] * n and (row["targets"][n:] != IGNORE_INDEX).all()
    talk = stored_rows(folder / "dialogue_train.pt")[0]
    assert set(talk) == {"messages", "input_ids", "turn_spans"} and len(talk["turn_spans"]) == 2
    example = torch.load(folder / "example_prompt.pt", weights_only=True)
    assert set(example) == {"prompt", "input_ids", "attention_mask"} and example["prompt"].startswith("Human: hello")
    batch = preference_batch(load_split(folder, "preference", "train")[:4], pad_id=0)
    assert len(batch) == 8 and batch.input_ids.dtype == torch.int64


def test_args_report_and_tokenizer_are_stored(write, tokenizer_dir):
    folder, _ = write(pairs(90))
    stored = json.loads((folder / "args.json").read_text())
    assert stored["max_length"] == 1024 and stored["tokenizer_name"] == str(tokenizer_dir)
    assert {"python", "torch", "transformers"} <= stored["versions"].keys() and stored["judge"] is None

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer.chat_template and tokenizer.pad_token_id == tokenizer.eos_token_id
    report = json.loads((folder / "report.json").read_text())
    file = report["files"]["preference_train"]
    assert file["rows"] == len(load_split(folder, "preference", "train")) and len(file["sha256"]) == 64
    assert file["special_tokens"]["eos"] == 2 * file["rows"] and sum(file["histogram"]["counts"]) == 2 * file["rows"]
    text = (folder / "report.md").read_text()
    assert "same_input" in text and "⟦" in text and file["sha256"] in text
    assert (folder / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_masked_sample_shows_the_response(write):
    row = {"prompt": "Human: hi\n\nAssistant:", "completion": " hello you", "split": "train"}
    _, report = write([row])
    assert report["files"]["finetune_train"]["sample"] == "Human: hi\n\nAssistant:⟦ hello you<|endoftext|>⟧"


def test_unmasked_prompt_has_targets():
    (example,) = every(collected([{"prompt": "hello", "completion": " you"}], stage="finetune")[0], "finetune")
    assert (targets_of(example, mask_prompt=False) == example.ids[0]).all()


def test_two_runs_and_any_num_proc_give_the_same_hashes(write, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK", 16)
    rows = pairs(130)
    reports = [write(rows, f"run{n}", num_proc=n)[1] for n in (1, 2)]
    hashes = [{name: file["sha256"] for name, file in report["files"].items()} for report in reports]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 9
    assert reports[0]["dropped"] == reports[1]["dropped"]
    other = write(rows, "other", seed=7)[1]
    assert other["files"]["prompts_train"]["sha256"] != hashes[0]["prompts_train"]


def test_shuffle_is_a_choice():
    rows = [{"prompt": f"p{n}"} for n in range(50)]
    ordered, shuffled = (
        [e.ids[0].tolist() for e in collected(rows, shuffle=shuffle)[0]["prompts"]["train"]]
        for shuffle in (False, True)
    )
    assert ordered != shuffled and sorted(ordered) == sorted(shuffled)


def test_an_error_leaves_the_folder_as_it_was(write, monkeypatch):
    folder, _ = write(pairs(90))
    before = digest(folder)

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common.report, "write", fails)
    with error_naming(RunFailure, "--destination_dir", "No space left"):
        write(pairs(90, seed=1))
    assert digest(folder) == before
    monkeypatch.undo()
    with pytest.raises(RunFailure, match="--dataset_name"):
        write([{"prompt": "x", "chosen": "", "rejected": "b"}], "new")
    assert not (folder.parent / "new").exists() or not any((folder.parent / "new").iterdir())


def test_a_full_disk_is_a_one_line_error(write, monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("[enforce fail] PytorchStreamWriter failed writing file\nand more")

    monkeypatch.setattr(torch, "save", full)
    with error_naming(RunFailure, "--destination_dir", "disk"):
        write(pairs(90))


def test_a_killed_worker_is_a_one_line_error(write, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK", 16)
    monkeypatch.setattr(stream, "work", die)
    with error_naming(RunFailure, "--num_proc"):
        write(pairs(90), num_proc=2)


def die(rows):
    os._exit(9)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers outlive a killed parent")
def test_a_killed_parent_leaves_no_worker(tmp_path, tokenizer_dir):
    file = write_lines(tmp_path / "long.jsonl", ({"prompt": f"prompt {n}"} for n in range(200_000)))
    flags = {"destination_dir": tmp_path / "out", "dataset_name": file, "tokenizer_name": tokenizer_dir, "num_proc": 2}
    command = [sys.executable, "-m", "datasets_prep.generic.prepare_data"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    with started(command, cwd=ROOT, env=environment()) as parent:
        program = psutil.Process(parent.pid)
        while len(workers := program.children()) < 2 and parent.poll() is None:
            time.sleep(0.001)
        assert len(workers) == 2
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert not alive


def test_destination_that_is_a_file(write, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(UsageError, match="--destination_dir"):
        write(pairs(9), "taken")


def test_messages_that_end_with_the_user_are_prompts():
    messages = [*dialogue(1), {"role": "user", "content": "and now?"}]
    examples, dropped = collected([{"messages": messages}])
    assert set(examples) == {"prompts"} and not dropped
    assert gpt2_like().decode(every(examples, "prompts")[0].ids[0].tolist()).endswith("Human: and now?\n\nAssistant:")


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_old_splits_of_the_stage_are_removed(write):
    folder, _ = write(pairs(90))
    write([{"prompt": f"p{n}"} for n in range(60)])
    assert {path.name.split("_")[0] for path in folder.glob("*_t*.pt")} == {"prompts"}


def test_two_stages_in_one_folder_must_agree(write):
    write(pairs(90), stage="finetune")
    with error_naming(UsageError, "--seed 42", "7"):
        write(pairs(90), stage="preference", seed=7)
    with error_naming(UsageError, "--test_percentage 0.1", "0.3"):  # a prompt would be in train and in test
        write(pairs(90), stage="preference", test_percentage=0.3)
    write(pairs(90), seed=7)  # everything anew


def test_a_dataset_names_the_stages_it_supports(tmp_path, tokenizer_dir):
    args = arguments(destination_dir=str(tmp_path), tokenizer_name=str(tokenizer_dir), stage="dialogue")
    with error_naming(UsageError, "--stage", "finetune, prompts"):
        prepare(args, [], stages=("finetune", "prompts"))


# -------------------------------------------------------------------------------------------------------- command line
SHEEPRL = """--destination_dir=data/rlhf-helpful_harmless/mini-opt --tokenizer_name=facebook/opt-350m --max_length=256
 --max_prompt_length=128 --remove_same_inputs=True --remove_same_responses=True --shuffle=True
 --validation_percentage=0.1"""


def test_sheeprl_command_lines(tmp_path, tokenizer_dir):
    raw = [
        {side: f"\n\nHuman: question {n}\n\nAssistant: {side} answer" for side in ("chosen", "rejected")}
        for n in range(90)
    ]
    file = write_lines(tmp_path / "hh.jsonl.gz", raw)
    flags = [word.replace("data/", f"{tmp_path}/").replace("facebook/opt-350m", str(tokenizer_dir)) for word in SHEEPRL.split()]  # fmt: skip # noqa: E501
    for stage in ("finetune", "preference"):
        helpful_harmless.main([*flags, f"--dataset_name={file}", f"--stage={stage}"])
    folder = tmp_path / "rlhf-helpful_harmless" / "mini-opt"
    assert {path.name for path in folder.glob("*_train.pt")} == {"finetune_train.pt", "preference_train.pt"}


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [True, False])
def test_script_runs_as_module_and_as_path(tmp_path, tokenizer_dir, as_module):
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": f"p{n}", "completion": " answer"} for n in range(40)])
    start = ["-m", "datasets_prep.generic.prepare_data"] if as_module else ["datasets_prep/generic/prepare_data.py"]
    flags = ["--destination_dir", tmp_path / "out", "--dataset_name", file, "--tokenizer_name", tokenizer_dir]
    done = subprocess.run(
        [sys.executable, *start, *map(str, flags)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "finetune_train.pt" in done.stdout and (tmp_path / "out" / "prompts_train.pt").is_file()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--max_lenght=3"], "did you mean --max_length"),
        (["--max_length=many"], "max_length"),
        (
            ["--validation_percentage=0.7", "--test_percentage=0.4"],
            "--validation_percentage 0.7 and --test_percentage 0.4",
        ),
        (["--split=2,4"], "--split 2,4"),
        (["--stage=pretraining"], "stage"),
        (["--turn_prompt_length=long"], "--turn_prompt_length long"),
        (["--dataset_name=missing.jsonl"], "--dataset_name missing.jsonl"),
        (["--dataset_name=/nowhere"], "--dataset_name /nowhere"),
        (["--tokenizer_name=./nowhere"], "--tokenizer_name ./nowhere"),
        (["--tokenizer_name=tests"], "tokenizer.json"),
        (["--chat_template=no/such/file"], "--chat_template no/such/file"),
        (["--stage=dialogue"], "not of dialogue"),
    ],
)
def test_invalid_arguments_are_one_line(tmp_path, tokenizer_dir, capsys, flags, words):
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": "p", "completion": " answer"}])
    given = {"--destination_dir": tmp_path / "out", "--dataset_name": file, "--tokenizer_name": tokenizer_dir}
    with pytest.raises(SystemExit) as stop:
        generic.main([*(f"{flag}={value}" for flag, value in given.items()), *flags])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == (1 if flags == ["--stage=dialogue"] else 2)
    assert words in error and len(error.splitlines()) == 1
    assert not list(tmp_path.glob("out/*"))


def test_one_row_says_which_splits_have_none(tmp_path, tokenizer_dir, capsys):
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": "Hi", "completion": " answer"}])
    generic.main(
        [f"--destination_dir={tmp_path / 'out'}", f"--dataset_name={file}", f"--tokenizer_name={tokenizer_dir}"]
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "no validation rows" in line]
    assert said == ["  no validation rows for finetune, prompts: dropped, or too few rows for --validation_percentage"]


def test_every_flag_has_one_sentence_of_help(capsys):
    import dataclasses

    with pytest.raises(SystemExit):
        parse(PrepareArgs, ["--help_all"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(PrepareArgs):
        assert f"--{field.name}" in text.replace("_ ", "_")
    assert "Maximum tokens of a prompt" in text


@pytest.mark.parametrize("name", ["datasets_prep/cafe/bas", "./nowhere", "nowhere", "org/nowhere"])
def test_the_name_of_no_tokenizer_is_told(name):
    with error_naming(UsageError, f"--tokenizer_name {name} ") as told:
        common.load_tokenizer(name)
    assert "huggingface.co" not in str(told.value)


def test_the_folder_above_a_tokenizer_is_told(tmp_path, tokenizer_dir):
    shutil.copytree(tokenizer_dir, tmp_path / "data" / "tokenizer")
    with error_naming(UsageError, f"--tokenizer_name {tmp_path / 'data'}: ", tmp_path / "data" / "tokenizer"):
        common.load_tokenizer(str(tmp_path / "data"))
