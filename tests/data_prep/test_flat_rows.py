"""Files of flat arrays equal those that are written row by row."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.data import arguments, chatml_like, rows_of_file
from helpers.errors import error_naming

from datasets_prep.common import complete, encoded
from datasets_prep.encoding import Encoder, Example, Place
from datasets_prep.flat_rows import content, write_part
from datasets_prep.formats import to_row
from datasets_prep.splits import Placement
from datasets_prep.spool import Encoded, Spool, pack
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.packing import FlatWriter

GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content[:4] }}{% endgeneration %}{% generation %}{{ m.content[4:8] }}{% endgeneration %}"
    "{{ m.content[8:] }}{% generation %}{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def raw_rows() -> list[dict]:
    """Rows for every stage, with and without columns."""
    rows: list[dict] = []
    for n in range(30):
        more = {"answer": f"é\ud800 {n}", "tests": [[n, None], {"b": 2.5, "a": float("nan")}]} if n % 3 else {}
        said = [(("user", "assistant")[i % 2], f"say {n} and {i}, then more") for i in range(2 + 2 * (n % 3))]
        messages = [{"role": role, "content": text} for role, text in said]
        if n % 4 == 1:
            messages[-1]["reasoning_content"] = "because"
        rows.append({"messages": messages, **more})
        rows.append({"prompt": f"ask {n}", "chosen": f"yes {n}", "rejected": f"no {n * 3}", **more})
        rows.append({"prompt": f"rate {n}", "completion": f"fine {n}", "label": bool(n % 2), **more})
        rows.append({"prompt": f"only {n}", **more})
        rows.append({"text": f"a document {n}"})
    return rows


@pytest.mark.parametrize("mask_prompt", [True, False])
@pytest.mark.parametrize("template", [None, GENERATION], ids=["own", "generation"])
def test_the_files_and_content_hashes_are_those_of_single_rows(tmp_path, template, mask_prompt):
    args = arguments(mask_prompt=mask_prompt, max_length=40)
    tokenizer = complete(chatml_like(), template)
    encoder = Encoder(args, tokenizer, Placement(args, wraps=True), wraps=True)
    rows = [to_row(raw) | {"source": f"file:{n}"} for n, raw in enumerate(raw_rows())]
    stages = set()
    with encoded(args, rows, encoder, tmp_path / "spool") as selection:
        for stage, splits in selection.splits.items():
            for split, numbers in splits.items():
                stages.add(stage)
                examples = [selection.encoded.example(number) for number in numbers.tolist()]
                parts = [selection.encoded.part(own) for own in np.array_split(numbers, 2) if len(own)]
                one, other = (tmp_path / name / f"{stage}_{split}.pt" for name in ("one", "other"))
                with FlatWriter(one, stage) as file:
                    file.extend(rows_of_file(stage, examples, mask_prompt))
                with FlatWriter(other, stage) as file:
                    for part in parts:
                        write_part(file, part, mask_prompt)
                assert one.read_bytes() == other.read_bytes()
                assert b"".join(map(content, parts)) == b"".join(map(content_of, examples))
    assert stages == {"finetune", "preference", "unpaired", "prompts", "dialogue"}


def content_of(example) -> bytes:
    """What the content hash covers, by the definition that earlier reports have."""
    values = [example.prompt_len, example.spans, example.extra]
    values += [] if example.label is None else [example.label]
    ids = [len(one).to_bytes(8, "big") + one.astype("<i4").tobytes() for one in example.ids]
    return json.dumps(values, sort_keys=True, default=str).encode() + b"".join(ids)


def test_spans_that_touch_are_one(tmp_path):
    place = Place(0, "train", frozenset({"finetune"}), "file:1")
    ids = np.arange(1, 10, dtype=np.int32)
    examples = [Example("finetune", 1, place, [ids], spans) for spans in ([(1, 3), (3, 5), (6, 8)], [(8, 9)])]
    spool = Spool(tmp_path / "spool", None)
    spool.append(pack(examples, []), 2)
    spool.note()
    part = Encoded(spool).part([0, 1])
    for name in ("one", "other"):
        with FlatWriter(tmp_path / name / "finetune_train.pt", "finetune") as file:
            write_part(file, part, True) if name == "one" else file.extend(rows_of_file("finetune", examples))
    spool.remove()
    one, other = (tmp_path / name / "finetune_train.pt" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_rows_that_no_file_may_hold_are_refused(tmp_path):
    args = arguments()
    tokenizer = complete(chatml_like(), None)
    deep: list = []
    for _ in range(40):
        deep = [deep]
    rows = [{"prompt": [{"role": "user", "content": "hello"}], "columns": {"deep": deep}}]
    with encoded(args, rows, Encoder(args, tokenizer, Placement(args)), tmp_path / "spool") as selection:
        (numbers,) = selection.splits["prompts"].values()
        part = selection.encoded.part(numbers)
    for wrong, words in (({}, "row 0"), ({"prompt_len": 1}, "lengths")):
        changed = part._replace(records=part.records.copy())
        for name, value in wrong.items():
            changed.records[name], changed.records["columns"] = value, 0
        with error_naming(UsageError, words), FlatWriter(tmp_path / "prompts_train.pt", "prompts") as file:
            write_part(file, changed, True)
