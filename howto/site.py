"""Hooks of mkdocs: README as the first page, a page for each module, and links into the code that lead there."""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import lightrlhf  # noqa: E402, the package alone, which imports nothing
from lightrlhf.programs import TRAINING  # noqa: E402

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
MODULES = [
    path
    for path in sorted((ROOT / "lightrlhf").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py") or path.parent.name == "envs"
]


def page_of(module: Path) -> str:
    """The API page of a module, from the site's root."""
    parts = module.relative_to(ROOT / "lightrlhf").with_suffix("").parts
    return f"api/{'.'.join(part for part in parts if part != '__init__')}.md"


def on_config(config: Any) -> Any:
    """Fill the menu: the pages of algorithms, and the API pages, a group for each room."""
    pages = dict.fromkeys(f"algorithms/{one.page or one.name}.md" for one in TRAINING.values())
    next(group for group in config.nav if "Algorithms" in group)["Algorithms"] = [*pages]
    rooms: dict[str, list[str]] = {}
    for module in MODULES:
        parts = module.relative_to(ROOT / "lightrlhf").parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "programs", []).append(page_of(module))
    config.nav.append({"API": ["api/index.md", *({room: pages} for room, pages in rooms.items())]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README and the API pages."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, "api/index.md", content=public_names()))
    for module in MODULES:
        name = ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        files.append(File.generated(config, page_of(module), content=f"# {name}\n\n::: {name}\n"))
    return files


def public_names() -> str:
    """A page of what `import lightrlhf` offers: the programs with their `train` or `run`, and the other names."""
    lines = ["# API", "", "How to use it: [from Python](../python.md). What `import lightrlhf` offers, by name:", ""]
    lines += ["| name | |", "|---|---|"]
    modules = {name: f"lightrlhf.{name}" for name in TRAINING} | lightrlhf.NAMES
    for name, module in modules.items():
        path = ROOT / Path(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if name in TRAINING:
            said, anchor = ast.get_docstring(tree), f"{module}.train"
        else:
            found = (node for node in ast.walk(tree) if getattr(node, "name", "") == name)
            said, anchor = ast.get_docstring(next(found)), f"{module}.{name}"  # type: ignore[arg-type]
        page = posixpath.relpath(page_of(path), "api")
        lines.append(f"| [`{name}`]({page}#{anchor}) | {(said or '').partition(chr(10))[0]} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Lead links that leave the folder of pages to the module's API page, or leave their words alone without a link."""
    here = "" if page.file.src_uri == "index.md" else posixpath.join("howto", posixpath.dirname(page.file.src_uri))

    def lead(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or page.file.src_uri.startswith("api/"):
            return found[0]
        whole = posixpath.normpath(posixpath.join(here, path))
        if whole.startswith("howto/"):
            to = posixpath.relpath(whole.removeprefix("howto/"), posixpath.dirname(page.file.src_uri) or ".")
        elif whole == "README.md":
            to = posixpath.relpath("index.md", posixpath.dirname(page.file.src_uri) or ".")
        elif ROOT / whole in MODULES:
            to = posixpath.relpath(page_of(ROOT / whole), posixpath.dirname(page.file.src_uri) or ".")
        else:
            return words
        return f"{image}[{words}]({to}{'#' + anchor if anchor else ''})"

    return LINK.sub(lead, markdown)
