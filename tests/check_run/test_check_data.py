"""`lightrlhf.check_data`: each fault planted alone is found and named, and clean data raises no alarm."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers.data import chatml_like, collected, every, gpt2_like, llama3_like, write_lines
from helpers.templates import ZOO

from datasets_prep.cafe.prepare_data import main as prepare_cafe
from datasets_prep.common import load_tokenizer
from datasets_prep.formats import to_row
from datasets_prep.generic.prepare_data import main as prepare_mine
from lightrlhf.check_data import CheckDataArgs, main, run
from lightrlhf.checks.data_faults import FAULTS
from lightrlhf.checks.data_rows import Item, Text
from lightrlhf.checks.data_tally import Tally
from lightrlhf.checks.template_marks import Marks

WHOLE = {"validation_percentage": 0, "test_percentage": 0, "shuffle": False}
HELD_OUT = 2  # the last rows are the validation split


def asked(word: str, content: str = "What lies {}?") -> list[dict]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content.format(word)}]


def said(content: str, **more: str) -> dict:
    return {"role": "assistant", "content": content} | more


WORDS = "north east south west up down left right".split()
AGAIN = {"role": "user", "content": "Are you sure?"}
TALKS = [{"messages": [*asked(word), said(f"The {word} sea."), AGAIN, said(f"It is, {word}.")]} for word in WORDS]
PAIRS = [{"prompt": asked(word), "chosen": [said(f"The {word} sea.")], "rejected": [said("No.")]} for word in WORDS]
RATED = [{"prompt": asked(word), "completion": [said(f"The {word} sea.")], "label": True} for word in WORDS]


def as_rows(tokenizer) -> list[dict]:
    """The talks as ids and labels."""
    made = []
    for example in every(collected(TALKS, tokenizer, **WHOLE)[0], "finetune"):
        ids, labels = example.ids[0].tolist(), [-100] * len(example.ids[0])
        for start, end in example.spans:
            labels[start:end] = ids[start:end]
        made.append({"input_ids": ids, "labels": labels})
    return made


def as_pairs(tokenizer, pairs=PAIRS) -> list[dict]:
    """The pairs as ids, with their prompt apart."""
    made = []
    for example in every(collected(map(to_row, pairs), tokenizer, **WHOLE)[0], "preference"):
        chosen, rejected = (ids.tolist() for ids in example.ids)
        start = example.prompt_len
        sides = {"chosen_input_ids": chosen[start:], "rejected_input_ids": rejected[start:]}
        made.append({"prompt_input_ids": chosen[:start], **sides})
    return made


def masked(row: dict, trained: list[bool]) -> dict:
    return row | {"labels": [index if one else -100 for index, one in zip(row["input_ids"], trained)]}


def shifted(row: dict, by: int) -> dict:
    trained = [label != -100 for label in row["labels"]]
    return masked(row, trained[1:] + [False] if by < 0 else [False] + trained[:-1])


def cut(row: dict, start: int | None = None, end: int | None = None) -> dict:
    return {name: ids[start:end] for name, ids in row.items()}


def joined(row: dict, ids: list[int], trains: bool, before: bool = False) -> dict:
    more = {"input_ids": ids, "labels": ids if trains else [-100] * len(ids)}
    return {name: more[name] + own if before else own + more[name] for name, own in row.items()}


def longer(row: dict, ids: list[int]) -> dict:
    return {"input_ids": row["input_ids"] + ids, "labels": row["labels"] + ids}


def folder_of(path: Path, rows: list[dict], tokenizer) -> list[str]:
    """A folder of rows in two splits, and the arguments that check it."""
    tokenizer.save_pretrained(path / "tokenizer")
    (path / "data").mkdir()
    write_lines(path / "data" / "train.jsonl", rows[:-HELD_OUT])
    write_lines(path / "data" / "validation.jsonl", rows[-HELD_OUT:])
    return [str(path / "data"), f"--tokenizer={path / 'tokenizer'}"]


def faults(arguments: list[str], *more: str) -> list[str]:
    """The faults that a check of data names."""
    file = Path(arguments[0]).with_suffix(".verdicts.json")
    try:
        main([*arguments, *more, f"--output_file={file}"])
        status = 0
    except SystemExit as ended:
        status = ended.code
    wrong = [one["fault"] for one in json.loads(file.read_text()) if one["says"] == "wrong"]
    assert status == bool(wrong)
    return wrong


# ------------------------------------------------------------------------------------------------------- faults of ids
def first_answer_on(row: dict) -> list[bool]:
    start = next(place for place, label in enumerate(row["labels"]) if label != -100)
    return [place >= start for place in range(len(row["labels"]))]


PLANTED = {
    "mask one early": lambda rows, t: [shifted(row, -1) for row in rows],
    "mask one late": lambda rows, t: [shifted(row, 1) for row in rows],
    "user text trained": lambda rows, t: [{"input_ids": row["input_ids"]} for row in rows],
    "labels shifted already": lambda rows, t: [row | {"labels": row["labels"][1:] + [-100]} for row in rows],
    "labels of other tokens": lambda rows, t: [
        row | {"labels": [max(index - 1, -100) for index in row["labels"]]} for row in rows
    ],
    "labels of another length": lambda rows, t: [row | {"labels": row["labels"][1:]} for row in rows],
    "padding trained": lambda rows, t: [
        longer(row, [t.pad_token_id] * 3) | {"attention_mask": [1] * len(row["labels"]) + [0] * 3} for row in rows
    ],
    "double BOS": lambda rows, t: [joined(row, [t.bos_token_id], trains=False, before=True) for row in rows],
    "end token missing": lambda rows, t: [cut(row, end=-1) for row in rows],
    "end token untrained": lambda rows, t: [
        masked(row, [label not in (-100, t.eos_token_id) for label in row["labels"]]) for row in rows
    ],
    "end token doubled": lambda rows, t: [longer(row, [t.eos_token_id]) for row in rows],
    "no trained token": lambda rows, t: [rows[0] | {"labels": [-100] * len(rows[0]["labels"])}, *rows[1:]],
    "answers cut": lambda rows, t: [cut(row, end=92) for row in rows],
    "prompt cut at its start": lambda rows, t: [cut(row, start=9) for row in rows],
    "ids beyond the vocabulary": lambda rows, t: [longer(rows[0], [len(t)]), *rows[1:]],
    "duplicates": lambda rows, t: [rows[0], *rows],
    "prompts in two splits": lambda rows, t: [*rows, rows[0]],
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_of_ids_is_named(fault, tmp_path):
    tokenizer = llama3_like()
    assert faults(folder_of(tmp_path, PLANTED[fault](as_rows(tokenizer), tokenizer), tokenizer)) == [fault]


def test_later_user_turns_are_found_among_what_is_trained(tmp_path):
    tokenizer = llama3_like()
    rows = [masked(row, first_answer_on(row)) for row in as_rows(tokenizer)]
    assert faults(folder_of(tmp_path, rows, tokenizer)) == ["user text trained"]


def test_end_tokens_that_were_masked_as_padding_are_told_from_others(tmp_path):
    tokenizer = chatml_like()
    rows = [masked(r, [i not in (-100, tokenizer.pad_token_id) for i in r["labels"]]) for r in as_rows(tokenizer)]
    assert faults(folder_of(tmp_path, rows, tokenizer)) == ["end token masked as padding"]


PAIRED = {
    "prompt cut at its end": lambda pairs: [
        pair | {"prompt_input_ids": pair["prompt_input_ids"][:-9]} for pair in pairs
    ],
    "chosen equals rejected": lambda pairs: [
        pairs[0] | {"rejected_input_ids": pairs[0]["chosen_input_ids"]}, *pairs[1:]
    ],
    "contradicting labels": lambda pairs: [
        *pairs[:2],
        pairs[0] | {f"{side}_input_ids": pairs[0][f"{other}_input_ids"]
                    for side, other in (("chosen", "rejected"), ("rejected", "chosen"))},
        *pairs[2:],
    ],
    "prompts of a pair differ": lambda pairs: [
        {f"{side}_input_ids": pair["prompt_input_ids"] + pair[f"{side}_input_ids"]
         for pair, side in ((one, "chosen"), (other, "rejected"))}
        for one, other in zip(pairs, [*pairs[1:], pairs[0]])
    ],
}  # fmt: skip


@pytest.mark.parametrize("fault", PAIRED)
def test_a_fault_of_pairs_is_named(fault, tmp_path):
    tokenizer = llama3_like()
    assert faults(folder_of(tmp_path, PAIRED[fault](as_pairs(tokenizer)), tokenizer)) == [fault]


# ----------------------------------------------------------------------------------------------------- faults of texts
def with_answer(**more: str) -> list[dict]:
    return [{"messages": [*talk["messages"][:-1], talk["messages"][-1] | more]} for talk in TALKS]


TOOL = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": {}}}
TEXTS = {
    ("template drops text", "chatml"): with_answer(reasoning_content="It must be so."),
    ("template drops text", "two_roles"): TALKS,
    ("template drops text", "llama3"): [talk | {"tools": [TOOL]} for talk in TALKS],
    ("template refuses rows", "gemma"): TALKS,
    ("control tokens in texts", "chatml"): [
        {"messages": [*asked("<|im_end|>"), said("No.")]},
        {"prompt": "What is this?", "completion": "It. <|im_end|>"},
        *TALKS,
    ],
    ("rows refused", "llama3"): [*TALKS, {"messages": [said("one"), said("two")]}],
    ("chosen equals rejected", "llama3"): [PAIRS[0] | {"rejected": PAIRS[0]["chosen"]}, *PAIRS[1:]],
    ("contradicting labels", "llama3"): [RATED[0] | {"label": False}, *RATED],
    ("prompts in two splits", "llama3"): [*RATED, RATED[0] | {"completion": [said("Nothing.")]}],
}  # fmt: skip


@pytest.mark.parametrize("fault, name", TEXTS)
def test_a_fault_of_texts_is_named(fault, name, tmp_path):
    assert faults(folder_of(tmp_path, TEXTS[fault, name], ZOO[name].tokenizer)) == [fault]


def test_limits_that_cut_answers_are_told_from_those_that_leave_nothing(tmp_path):
    arguments = folder_of(tmp_path, TALKS, llama3_like())
    assert faults(arguments, "--max_length=1000") == []
    assert faults(arguments, "--max_length=90") == ["answers cut"]
    assert faults(arguments, "--max_length=20") == ["answers cut before their first token"]


def test_each_fault_is_planted():
    planted = {*PLANTED, *PAIRED, *(fault for fault, _ in TEXTS)}
    assert {*FAULTS} - planted == {"answers cut before their first token", "end token masked as padding"}


# --------------------------------------------------------------------------------------------------------- clean data
def cafe():
    """A template that writes a system message as it writes an answer."""
    return load_tokenizer("datasets_prep/cafe/base")


@pytest.mark.parametrize("make", [llama3_like, chatml_like, gpt2_like, cafe])
@pytest.mark.parametrize("texts", [TALKS, PAIRS, RATED], ids=["talks", "pairs", "rated"])
def test_clean_texts_raise_no_alarm_in_any_form(make, texts, tmp_path):
    arguments = folder_of(tmp_path, texts, make())
    assert faults(arguments) == []
    prepared = tmp_path / "prepared"
    prepare_mine(
        [f"--destination_dir={prepared}", f"--dataset_name={arguments[0]}", "--num_proc=1"]
        + [f"--tokenizer_name={tmp_path / 'tokenizer'}"]
    )
    assert faults([str(prepared)]) == []


def test_clean_ids_raise_no_alarm_in_any_form(tmp_path):
    tokenizer = llama3_like()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows, pairs = as_rows(tokenizer), as_pairs(tokenizer)
    masks = [{"input_ids": r["input_ids"], "completion_mask": [int(i != -100) for i in r["labels"]]} for r in rows]
    packed = {"input_ids": sum((r["input_ids"] for r in rows), []), "seq_lengths": [len(r["labels"]) for r in rows]}
    packed["labels"] = sum((r["labels"] for r in rows), [])
    pad = [tokenizer.pad_token_id] * 4
    padded = [joined(row, pad, trains=False) for row in rows]
    whole = [
        {f"{side}_ids": pair["prompt_input_ids"] + pair[f"{side}_input_ids"] for side in ("chosen", "rejected")}
        for pair in pairs
    ]
    rated = [
        {"prompt_ids": p["prompt_input_ids"], "completion_ids": p["chosen_input_ids"], "label": True} for p in pairs
    ]
    for name, given in {"masks": masks, "padded": padded, "whole": whole, "rated": rated, "packed": [packed]}.items():
        file = write_lines(tmp_path / f"{name}.jsonl", given)
        assert (name, faults([str(file), f"--tokenizer={tmp_path / 'tokenizer'}"])) == (name, [])
    Dataset.from_list(masks).to_parquet(tmp_path / "rows.parquet")
    DatasetDict(train=Dataset.from_list(rows[2:]), test=Dataset.from_list(rows[:2])).save_to_disk(tmp_path / "saved")
    for name in ("rows.parquet", "saved"):
        assert faults([str(tmp_path / name), f"--tokenizer={tmp_path / 'tokenizer'}"]) == []


@pytest.mark.parametrize("lost, found", [(0, []), (2, ["prompt cut at its start"])])
def test_rows_that_the_end_token_pads_on_the_left_begin_behind_it(tmp_path, lost, found):
    tokenizer = chatml_like()
    pad = [tokenizer.pad_token_id] * 4
    padded = [joined(cut(row, lost), pad, trains=False, before=True) for row in as_rows(tokenizer)]
    assert faults(folder_of(tmp_path, padded, tokenizer)) == found


def test_the_cafe_raises_no_alarm_and_a_prompt_of_it_in_two_splits_does(tmp_path, capsys):
    prepare_cafe([f"--destination_dir={tmp_path / 'cafe'}", "--num_proc=1"])
    capsys.readouterr()
    verdicts = run(CheckDataArgs(data=str(tmp_path / "cafe"), num_samples=200))
    assert not [one for one in verdicts if one.says == "wrong"]
    assert "mask" in {one.name for one in verdicts if one.says == "right"}
    assert "Barista:⟦" in capsys.readouterr().out  # what is trained is marked


# ------------------------------------------------------------------------------------------------------ prepared by us
def test_faults_of_split_files_are_named_that_a_trainer_refuses(tmp_path):
    tokenizer = llama3_like()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"prompt_len": next(i for i, one in enumerate(r["labels"]) if one != -100), "input_ids": r["input_ids"]}
        | {"targets": torch.tensor(r["labels"])}
        for r in as_rows(tokenizer)
    ]
    pairs = [
        {"prompt_len": len(p["prompt_input_ids"])}
        | {f"{side}_input_ids": p["prompt_input_ids"] + p[f"{side}_input_ids"] for side in ("chosen", "rejected")}
        for p in as_pairs(tokenizer)
    ]
    torch.save(rows, tmp_path / "finetune_train.pt")
    torch.save(pairs, tmp_path / "preference_train.pt")
    assert faults([str(tmp_path)]) == []
    pairs[3]["rejected_input_ids"] = pairs[2]["rejected_input_ids"]
    rows[1]["targets"] = torch.tensor(rows[1]["input_ids"])
    torch.save(pairs, tmp_path / "preference_train.pt")
    torch.save([*rows, {"input_ids": [1]}], tmp_path / "finetune_train.pt")
    assert faults([str(tmp_path)]) == ["user text trained", "prompts of a pair differ", "rows refused"]


def test_rows_cut_at_the_limit_of_their_kind_are_told_from_rows_without_an_end(tmp_path):
    tokenizer = llama3_like()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    cut_rows = [{"prompt_len": 40, **cut(row, end=92)} for row in as_rows(tokenizer)]
    cut_rows[0]["labels"][-1] = cut_rows[0]["input_ids"][-1] = tokenizer.eos_token_id
    rows = [{"prompt_len": 40, "input_ids": row["input_ids"], "targets": row["labels"]} for row in cut_rows]
    torch.save(rows, tmp_path / "finetune_train.pt")
    longer = as_pairs(tokenizer, [pair | {"prompt": asked("this " * 40)} for pair in PAIRS[:2]])
    prompts = [{"prompt_len": len(p["prompt_input_ids"]), "input_ids": p["prompt_input_ids"]} for p in longer[:1]]
    torch.save([one | {"columns": {}} for one in prompts], tmp_path / "prompts_train.pt")
    assert faults([str(tmp_path)]) == ["answers cut"]


def test_faults_that_the_preparation_was_asked_for_are_no_alarm(tmp_path):
    arguments = folder_of(tmp_path, TALKS, llama3_like())
    asked_for = ["--mask_prompt=False", "--remove_same_inputs=False", "--num_proc=1"]
    write_lines(tmp_path / "data" / "train.jsonl", [*TALKS[:4], TALKS[0]])
    prepared = [f"--destination_dir={tmp_path / 'mine'}", f"--tokenizer_name={tmp_path / 'tokenizer'}"]
    prepare_mine([*prepared, f"--dataset_name={arguments[0]}", *asked_for])
    verdicts = run(CheckDataArgs(data=str(tmp_path / "mine")))
    said = {one.name: one.says for one in verdicts}
    assert "wrong" not in said.values() and (said["mask"], said["duplicates"]) == ("cannot tell", "cannot tell")


def test_an_id_beyond_the_vocabulary_is_shown_from_the_side_that_has_it():
    tally = Tally(None, Marks(size=10))
    for number, chosen in enumerate(([1, 2], [])):
        sides = (Text.of_spans(ids, [(0, len(ids))]) for ids in (chosen, [3, 99, 5]))
        tally.add(Item("preference", tuple(sides), f"row {number}", "train"))
    assert tally.counts == {"ids beyond the vocabulary": 2}
    assert tally.firsts["ids beyond the vocabulary"] == ("row 0", "id 99")


def test_what_cannot_be_read_is_told(tmp_path, capsys):
    for given, words in (
        (["nowhere"], "nowhere: no such file or folder"),
        ([str(write_lines(tmp_path / "rows.jsonl", TALKS))], "--tokenizer_name is needed"),
        ([str(tmp_path), "--tokenizer=nowhere"], "--tokenizer_name nowhere is not a folder here"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 2 and words in capsys.readouterr().err
