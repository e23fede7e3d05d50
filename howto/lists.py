"""Write the lists of programs that stand in other files, from `lightrlhf/programs.py`: `make lists`.

They are README's table, the objects that each `train` takes in python.md, and the imports for editors of
`lightrlhf/__init__.py`, each between two marks. The site's menu is filled by `site.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import lightrlhf  # noqa: E402, the package alone, which imports nothing
from lightrlhf.programs import TRAINING, Program  # noqa: E402


def pages() -> dict[str, list[Program]]:
    """The pages below howto/algorithms, in order, each with its programs."""
    found: dict[str, list[Program]] = {}
    for one in TRAINING.values():
        found.setdefault(one.page or one.name, []).append(one)
    return found


def algorithms() -> str:
    """README's table: programs, method and papers of each page."""
    lines = ["| program | method | paper |", "|---|---|---|"]
    for page, programs in pages().items():
        papers = [paper.split(": ") for paper in programs[0].papers]
        links = ", ".join(f"[{name}]({urljoin('https://arxiv.org/abs/', place)})" for name, place in papers)
        names = ", ".join(f"`{one.name}`" for one in programs)
        lines.append(f"| [{names}](howto/algorithms/{page}.md) | {programs[0].method} | {links} |")
    return "\n".join(lines)


def objects() -> str:
    """The table of python.md: what each `train` takes besides its arguments."""
    taken: dict[tuple[str, ...], list[str]] = {}
    for name in TRAINING:
        tree = ast.parse((ROOT / "lightrlhf" / f"{name}.py").read_text(encoding="utf-8"))
        (train,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
        taken.setdefault(tuple(one.arg for one in train.args.kwonlyargs), []).append(name)
    rows = [
        f"| {', '.join(f'`{name}.train`' for name in programs)} | {', '.join(f'`{one}`' for one in names)} |"
        for names, programs in taken.items()
    ]
    return "\n".join(["| function | objects |", "|---|---|", *rows])


def imports() -> str:
    """The imports of what `import lightrlhf` offers by `NAMES`."""
    lines = [f"    from {module} import {name} as {name}" for name, module in lightrlhf.NAMES.items()]
    return "\n".join(["if TYPE_CHECKING:", *sorted(lines)])


LISTS: dict[str, Callable[[], str]] = {
    "README.md": algorithms,
    "howto/python.md": objects,
    "lightrlhf/__init__.py": imports,
}
MARKS = re.compile(r"(?<=by make lists)((?: -->)?\n).*?(?=\n(?:<!-- |# )end of the list)", re.DOTALL)


def written(name: str) -> str:
    """The text of a file with its list as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return MARKS.sub(lambda found: found[1] + LISTS[name](), text, count=1)


if __name__ == "__main__":
    for file in LISTS:
        (ROOT / file).write_text(written(file), encoding="utf-8")
