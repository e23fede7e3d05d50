"""Tests assert the facts of an error (flag, value, file, status), never its sentence, which may change."""

import ast
import re

from helpers import ROOT

PROSE = re.compile(r"(?<![-\w/.{}])[A-Za-z']{2,} [a-z']{2,}")  # two plain words that stand side by side


def test_no_error_is_matched_by_its_sentence():
    """What `raises(match=…)` gets is a literal without prose; facts from a table go to `error_naming`."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "raises":
                continue
            for pattern in (keyword.value for keyword in node.keywords if keyword.arg == "match"):
                parts = [part.value for part in ast.walk(pattern) if isinstance(part, ast.Constant)]
                if isinstance(pattern, ast.Name) or any(PROSE.search(str(part)) for part in parts):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(pattern)}")
    assert not found
