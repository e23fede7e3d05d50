"""howto/design.md agrees with the code where it lists files, rooms and columns."""

import ast
import dataclasses
import re

from helpers import ROOT

from lightrlhf.data.batch import Batch, Rollout
from lightrlhf.data.schema import COLUMNS

PAGE = (ROOT / "howto" / "design.md").read_text(encoding="utf-8").partition("\n## Add an algorithm\n")[0]


def test_every_room_has_a_row_and_no_other():
    rooms = {path.parent.name for path in (ROOT / "lightrlhf").glob("*/__init__.py")}
    assert set(re.findall(r"^\| \d+ \| `(\w+)/` \|", PAGE, re.MULTILINE)) == rooms


def test_every_field_of_a_batch_has_a_row():
    listed = set(re.findall(r"^\| `(\w+)` \| (?:\(|bool|int|list|float|tokenizer)", PAGE, re.MULTILINE))
    given, of_both = ({one.name for one in dataclasses.fields(kind) if one.init} for kind in (Rollout, Batch))
    assert listed == given >= of_both


def test_every_stage_has_its_columns():
    for stage, columns in COLUMNS.items():
        (row,) = re.findall(rf"^\| `{stage}` \| (.*)$", PAGE, re.MULTILINE)
        names = set(re.findall(r"`(\w+)`", row))
        if stage == "refuel":
            names = {f"{side}{name}" for side in ("chosen_", "rejected_") for name in names}
        assert columns <= names, stage


def test_the_named_files_exist():
    names = re.findall(r"`((?:tests|lightrlhf)/\S+\.py)`", PAGE)
    assert len(names) > 5 and not [name for name in names if not (ROOT / name).is_file()]


def test_the_header_of_every_program_says_what_is_left_out():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "lightrlhf").rglob("*.py")}
    programs = [
        path
        for path, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    ]
    assert len(programs) > 20
    assert not [path.name for path in programs if "Left out:" not in " ".join(ast.get_docstring(trees[path]).split())]
