"""Random rows of every stage, and how they are written and compared."""

import copy
from pathlib import Path

import torch

from lightrlhf.data.flat import FlatRows
from lightrlhf.data.packing import FlatWriter
from lightrlhf.data.schema import FIELDS, IGNORE_INDEX
from lightrlhf.data.splits import read_rows


def made(stage: str, count: int, seed: int = 0) -> list[dict]:
    """Random rows of a stage."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, 500, (length,), generator=draw, dtype=torch.int32)

    rows = []
    for i in range(count):
        length = number(4, 40)
        prompt_len, one = number(1, length - 2), ids(length)
        columns = {"answer": str(i), "number": i / 7, "tests": [[i, None], {"a": (1, 2.5)}]} if i % 3 else {}
        if stage == "finetune":
            counted = torch.rand(length, generator=draw) < 0.6
            counted[1] = True
            targets = torch.where(counted, one, IGNORE_INDEX)
            rows.append({"prompt_len": prompt_len, "input_ids": one, "targets": targets})
        elif stage == "preference":
            other = torch.cat([one[: number(prompt_len, length)], ids(number(1, 9))])
            sides = {"chosen_input_ids": one, "rejected_input_ids": one.clone() if i % 5 == 0 else other}
            rows.append({"prompt_len": prompt_len, **sides} | ({"columns": columns} if columns else {}))
        elif stage == "unpaired":
            rows.append({"prompt_len": prompt_len, "input_ids": one, "label": bool(i % 2), "columns": columns})
        elif stage == "prompts":
            rows.append({"prompt_len": length, "input_ids": one, "columns": columns})
        elif stage == "dialogue":
            messages = [{"role": "user", "content": "é\ud800"}, {"role": "assistant", "content": [{"text": "b"}]}] * 2
            rows.append({"messages": messages, "input_ids": one, "turn_spans": [(1, 2), (2, length)]})
        else:
            mask = torch.rand(length - 1, generator=draw) < 0.5
            mask[0] = True
            side = {"input_ids": one, "action_mask": mask, "reward": i / 3}
            rows.append({f"{name}_{key}": value for name in ("chosen", "rejected") for key, value in side.items()})
            rows[-1] = {name: rows[-1][name] for name in FIELDS["refuel"]} | {"columns": {"turn": i}}
    return rows


def plain(row):
    """A row by its values, their types and their order."""
    if isinstance(row, torch.Tensor):
        return row.dtype, row.tolist()
    if isinstance(row, dict):
        return [(key, plain(value)) for key, value in row.items()]
    return (type(row), [plain(one) for one in row]) if isinstance(row, list | tuple) else (type(row), row)


def write(path, stage, rows) -> FlatRows:
    """Write a file and read it."""
    with FlatWriter(path, stage) as file:
        file.extend(rows)
    return read_rows(path, stage)


def stored_rows(path) -> list[dict]:
    """Copies of the rows of a split's file, of any layout, which a test may change and write over it."""
    return copy.deepcopy(read_rows(Path(path), Path(path).name.rpartition("_")[0]).to_list())
