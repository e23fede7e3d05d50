"""Rows of splits that are wrong in every field and every way: one line that names file, row and field.

They go through the one function that reads splits; rows from Python through that for given rows; a sample through
the programs themselves.
"""

import copy
import shutil
from datetime import date
from functools import partial

import numpy as np
import pytest
import torch
from helpers.flat import stored_rows
from helpers.programs import main_of

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.rows import load_rows
from lightrlhf.data.splits import load_split

T = torch.tensor
GOOD = {
    "finetune": {"prompt_len": 2, "input_ids": T([5, 6, 7, 8]), "targets": T([-100, -100, 7, 8])},
    "preference": {"prompt_len": 2, "chosen_input_ids": T([5, 6, 7]), "rejected_input_ids": T([5, 6, 8])},
    "unpaired": {"prompt_len": 2, "input_ids": T([5, 6, 7]), "label": True, "columns": {}},
    "prompts": {"prompt_len": 2, "input_ids": T([5, 6]), "columns": {"answer": "4"}},
    "dialogue": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "input_ids": T([5, 6, 7, 8]),
        "turn_spans": [(2, 4)],
    },
    "refuel": {
        "chosen_input_ids": T([5, 6, 7]), "chosen_action_mask": T([False, True]), "chosen_reward": 1.0,
        "rejected_input_ids": T([5, 6, 8]), "rejected_action_mask": T([False, True]), "rejected_reward": 0.5,
    },
}  # fmt: skip
NO_IDS = {
    "None": None, "text": "5 6", "number": 5, "dict": {0: 5}, "floats": T([5.0, 6.0, 7.0, 8.0]), "bools": T([True] * 4),
    "2-D": T([[5, 6], [7, 8]]), "0-D": T(5), "empty": T([], dtype=torch.int32), "negative": T([5, -1, 7, 8]),
    "huge": T([5, 2**40, 7, 8]), "beyond the vocabulary": T([5, 6, 7, 999]), "list of texts": ["a", "b"],
    "list with None": [5, None], "list of lists": [[5], [6, 7]], "list of floats": [5.5, 6.0], "bytes": b"56",
    "complex": T([5j, 6j]), "sparse": T([5, 0, 0, 6]).to_sparse(), "beyond int64": [2**70], "empty list": [],
}  # fmt: skip
NO_LENGTH = {
    "None": None, "text": "2", "float": 2.0, "bool": True, "tensor": T([2]), "list": [2], "negative": -1,
    "beyond the row": 99, "the whole row and more": 5, "huge": 2**70,
}  # fmt: skip
NO_MASK = {
    "None": None, "numbers": T([0, 1]), "floats": T([0.0, 1.0]), "too short": T([True]), "too long": T([True] * 3),
    "all False": T([False, False]), "2-D": T([[True, True]]), "text": "01", "number": 1,
}  # fmt: skip
NO_REWARD = {"None": None, "text": "1", "NaN": float("nan"), "infinite": float("inf"), "bool": True, "tensor": T(1.0)}
NO_COLUMNS = {
    "None": None, "list": [1], "text": "a", "number keys": {1: "a"}, "tensor inside": {"a": T([1])},
    "set inside": {"a": {1}}, "bytes inside": {"a": b"1"}, "deep": {"a": [[[[]]]]}, "complex inside": {"a": [{"b": 1j}]},  # noqa: E501
}  # fmt: skip
for _ in range(40):
    NO_COLUMNS["deep"] = {"a": [NO_COLUMNS["deep"]]}
WRONG = {
    "prompt_len": NO_LENGTH, "input_ids": NO_IDS, "chosen_input_ids": NO_IDS, "rejected_input_ids": NO_IDS,
    "targets": {
        **{name: NO_IDS[name] for name in ("None", "text", "number", "floats", "bools", "2-D", "empty", "list of texts")},  # noqa: E501
        "-1": T([-1, -1, 7, 8]), "another token": T([-100, -100, 7, 9]), "beyond the vocabulary": T([-100, -100, 7, 999]),  # noqa: E501
        "too short": T([-100, 7, 8]), "too long": T([-100, -100, 7, 8, 9]),
    },
    "label": {"None": None, "1": 1, "0": 0, "text": "true", "float": 1.0, "tensor": T(True), "list": [True]},
    "columns": NO_COLUMNS, "chosen_action_mask": NO_MASK, "rejected_action_mask": NO_MASK,
    "chosen_reward": NO_REWARD, "rejected_reward": NO_REWARD,
    "messages": {
        "None": None, "text": "a", "empty": [], "list of texts": ["a"], "no role": [{"content": "a"}],
        "no content": [{"role": "user"}], "role None": [{"role": None, "content": "a"}], "dict": {"role": "user"},
        "an answer more": [{"role": "assistant", "content": "b"}] * 2,
    },
    "turn_spans": {
        "None": None, "number": 1, "text": "2 4", "flat": [2, 4], "triples": [(2, 3, 4)], "floats": [(2.0, 4.0)],
        "backwards": [(4, 2)], "empty span": [(2, 2)], "beyond the row": [(2, 9)], "negative": [(-2, 3)],
        "overlapping": [(1, 3), (2, 4)], "out of order": [(3, 4), (1, 2)], "one too many": [(1, 2), (3, 4)], "none": [],
    },
}  # fmt: skip


def bad_rows():
    """(stage, name, rows, the bad row)"""
    for stage, good in GOOD.items():
        for field, kinds in WRONG.items():
            if field not in good and field != "columns":
                continue
            for kind, value in kinds.items():
                if stage == "prompts" and field == "prompt_len" and kind == "the whole row and more":
                    value = 1
                for place in (0, 2):
                    rows = [copy.copy(good) for _ in range(4)]
                    rows[place] = {**good, field: value}
                    yield stage, f"{field} {kind} in row {place}", rows, place, field
            if field in good:
                rows = [dict(good), {name: value for name, value in good.items() if name != field}]
                yield stage, f"without {field}", rows, 1, field
        for kind, row in {"None": None, "list": [1], "text": "a", "tensor": T([1]), "empty dict": {}}.items():
            yield stage, f"a row that is {kind}", [dict(good), row], 1, ""


def said(read) -> str:
    try:
        read()
    except UsageError as problem:
        return str(problem)
    except Exception as problem:  # a traceback to the user
        return f"\n{type(problem).__name__}: {problem}"
    return ""


class Vocabulary:
    """Enough of a tokenizer for prepared rows."""

    def get_vocab(self):
        return {str(i): i for i in range(100)}


def test_rows_of_files(tmp_path, case):
    for stage, name, rows, place, field in bad_rows():
        try:
            torch.save(rows, tmp_path / f"{stage}_train.pt")
            line = said(partial(load_split, tmp_path, stage, "train", vocab_size=100))
        except Exception as problem:
            line = f"\n{problem}"
        held = f"{stage}_train.pt: row {place}" in line and field.split("_")[-1] in line and "\n" not in line
        case(f"{stage}: {name}", held and line.endswith("prepare it again"), line)


def test_rows_from_python(case):
    for stage, name, rows, place, field in bad_rows():
        if name == "without columns" or (stage == "prompts" and name == "a row that is text"):
            continue  # which may be given so from Python
        line = said(partial(load_rows, stage, "train", "", rows, Vocabulary()))
        held = f"given row {place}" in line and "\n" not in line
        if (
            field == "columns"
            and isinstance(columns := rows[place]["columns"], dict)
            and all(isinstance(k, str) for k in columns)
        ):
            held = line == ""  # objects for a reward function
        case(f"given {stage}: {name}", held, line)
    for value in (date.today(), np.array([{}], dtype=object), object()):
        rows = [{**GOOD["prompts"], "columns": {"a": value}}]
        line = said(partial(load_rows, "prompts", "train", "", rows, Vocabulary()))
        case(f"given prompts: a {type(value).__name__} in columns is passed on", line == "", line)


def test_splits_with_nothing_to_learn(tmp_path, case):
    silent = {**GOOD["finetune"], "targets": torch.full((4,), -100)}
    first = {**GOOD["finetune"], "targets": T([5, -100, -100, -100])}
    equal = {**GOOD["preference"], "rejected_input_ids": T([5, 6, 7])}
    other = {**GOOD["preference"], "rejected_input_ids": T([5, 9, 8])}
    for stage, name, rows in (
        ("finetune", "no targets", [silent] * 3), ("finetune", "targets on first tokens alone", [first] * 3),
        ("preference", "equal responses", [equal] * 3), ("preference", "other prompts", [GOOD["preference"], other]),
        *((stage, kind, value) for stage in GOOD for kind, value in (
            ("no rows", []), ("a dict", {"a": 1}), ("a tensor", T([1, 2])), ("None", None), ("a text", "rows"))),
    ):  # fmt: skip
        torch.save(rows, tmp_path / f"{stage}_train.pt")
        line = said(partial(load_split, tmp_path, stage, "train"))
        case(f"{stage}: {name}", f"{stage}_train.pt" in line and "\n" not in line, line)
    torch.save([equal, GOOD["preference"]], tmp_path / "preference_train.pt")
    case("preference: one equal pair is left out", len(load_split(tmp_path, "preference", "train")) == 1)
    for stage, good in GOOD.items():
        torch.save([good] * 3, tmp_path / f"{stage}_train.pt")
        line = said(partial(load_split, tmp_path, stage, "train", vocab_size=100))
        case(f"{stage}: good rows load", line == "", line)


PROGRAMS = {
    "sft": ("finetune", {"targets": torch.tensor([-1])}),
    "rm": ("preference", {"prompt_len": 99}),
    "dpo": ("preference", {"chosen_input_ids": None}),
    "ppo": ("prompts", {"columns": [1]}),
    "grpo": ("prompts", {"input_ids": None}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program, cafe_data, base_model, tmp_path, case, capsys):
    stage, wrong = PROGRAMS[program]
    for verify in (True, False):
        data = shutil.copytree(cafe_data, tmp_path / str(verify))
        rows = stored_rows(data / f"{stage}_train.pt")
        rows[1] = {**rows[1], **wrong}
        torch.save(rows, data / f"{stage}_train.pt")
        flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_dir", str(tmp_path / "logs")]
        flags += ["--verify", str(verify), "--accelerator", "cpu", "--max_steps", "1"]
        flags += ["--reward_function", "helpers.rewards:length"] if stage == "prompts" else []
        with pytest.raises(SystemExit) as stop:
            main_of(program)(flags)
        line = capsys.readouterr().err.strip()
        expected = "is not what was written" if verify else "row 1"
        case(f"{program} --verify {verify}", stop.value.code == 2 and expected in line and "\n" not in line, line)
