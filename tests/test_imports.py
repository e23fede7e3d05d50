"""Who may import whom, and what no program imports before it must."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from helpers import ROOT, environment

COMMON = [
    "args",
    "checkpoint",
    "experiments",
    "jsonl",
    "remote",
    "batch",
    "ops",
    "votes",
    "segments",
    "parsing",
    "adapters",
    "prefix_sharing",
    "model",
    "loading",
    "ranks",
    "prefix_cache",
    "rollout",
    "episodes",
    "rewards",
    "scoring",
    "chat",
    "desk",
    "dialogue",
    "futures",
    "roofline",
    "run",
    "iterations",
]  # earlier ones only
EDGES = {  # beside `common`
    "online_dpo": {"dpo", "sft", "generate", "annotate"},
    "refuel": {"generate", "annotate"},
    "reflect_rl": {"envs"},
    "evaluate": {"envs"},
}
SHARED_WITH_DATA = {"lightrlhf.common.args", "lightrlhf.common.batch", "lightrlhf.common.votes", "lightrlhf.envs"}
FILES = sorted(path for folder in ("lightrlhf", "datasets_prep") for path in (ROOT / folder).rglob("*.py"))


def module_name(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path, nested: bool = True) -> set[str]:
    """The modules of this project that a file imports; without `nested` only at its top."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if (ROOT / (name.replace(".", "/") + ".py")).is_file()}
            found |= modules or {node.module}
    return {name for name in found if name.split(".")[0] in ("lightrlhf", "datasets_prep")}


@pytest.mark.parametrize("path", sorted((ROOT / "lightrlhf" / "common").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_a_common_file_imports_only_earlier_ones(path):
    assert path.stem in COMMON, f"{path.stem} has no place in the order yet"
    earlier = {f"lightrlhf.common.{name}" for name in COMMON[: COMMON.index(path.stem)]}
    assert imported(path) <= earlier


@pytest.mark.parametrize("path", sorted((ROOT / "lightrlhf").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_a_program_imports_common_and_its_named_edges(path):
    others = {name for name in imported(path) if not name.startswith("lightrlhf.common")}
    allowed = EDGES.get(path.stem, set())
    assert {name.removeprefix("lightrlhf.").split(".")[0] for name in others} <= allowed


@pytest.mark.parametrize("path", [p for p in FILES if "datasets_prep" in p.parts], ids=module_name)
def test_data_preparation_imports_args_and_batch_only(path):
    """But for `pretrain_base.py`, which trains a model, and `text_envs`, which makes one and asks servers."""
    allowed = set(SHARED_WITH_DATA)
    if path.stem == "pretrain_base":
        allowed.add("lightrlhf.common.loading")
    if path.parent.name == "text_envs":
        allowed |= {f"lightrlhf.common.{name}" for name in ("checkpoint", "jsonl", "remote", "loading")}
        allowed |= {"lightrlhf.envs.prompts", "lightrlhf.envs.tree"}
    assert {name for name in imported(path) if name.startswith("lightrlhf")} <= allowed


def test_the_library_never_imports_data_preparation():
    for path in FILES:
        if "lightrlhf" == path.relative_to(ROOT).parts[0]:
            assert not {name for name in imported(path) if name.startswith("datasets_prep")}, path


def test_no_two_files_import_each_other_in_a_circle():
    edges = {module_name(path): imported(path) for path in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for other in edges.get(name, ()):
                visit(other, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


PROGRAMS = sorted(path.stem for path in (ROOT / "lightrlhf").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", sorted((ROOT / "lightrlhf" / "envs").glob("*.py")), ids=lambda p: p.stem)
def test_an_environment_imports_arguments_batches_and_its_neighbours(path):
    allowed = {"lightrlhf.common.args", "lightrlhf.common.batch", "lightrlhf.common.jsonl", "lightrlhf.common.remote"}
    assert {name for name in imported(path) if not name.startswith("lightrlhf.envs")} <= allowed


OPTIONAL = {"gymnasium", "gradio", "pandas", "textblob", "bitsandbytes", "stanza", "benepar"}  # extras of programs
OPTIONAL |= {"alfworld", "textworld"}
OF_ALFWORLD = {"fast_downward": "alfworld"}


@pytest.mark.parametrize("folder", ["lightrlhf", "datasets_prep", "examples", "tests"])
def test_what_is_imported_is_declared(folder):
    """Each package that a file of the folder imports is a requirement of setup.py, not only one of another package."""
    extras, core = (
        {name.lower().replace("_", "-") for name in re.findall(r'"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?>=', part)}
        for part in (ROOT / "setup.py").read_text().split("install_requires")
    )
    assert OPTIONAL <= extras
    allowed = core | (extras if folder == "tests" else OPTIONAL)
    distributions = packages_distributions()
    ours = {path.stem for path in (ROOT / "tests").glob("*.py")}
    ours |= {"lightrlhf", "datasets_prep", "examples", "benchmarks", "tests"}
    missing = {}
    for path in (ROOT / folder).rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        for name in {name.partition(".")[0] for name in names} - ours - set(sys.stdlib_module_names):
            found = distributions.get(name) or [OF_ALFWORLD.get(name, name)]
            if not {package.lower().replace("_", "-") for package in found} & allowed:
                missing[name] = str(path)
    assert not missing


def test_importing_the_programs_loads_no_heavy_library_and_prints_nothing():
    heavy = ["lightning", "transformers", "peft", "bitsandbytes", "datasets", "gradio", "matplotlib", "torchmetrics"]
    heavy += ["gymnasium"]
    code = f"""
import importlib, sys
for name in {[*PROGRAMS, "envs", "envs.prompts"]}:
    importlib.import_module("lightrlhf." + name)
    found = [heavy for heavy in {heavy} if heavy in sys.modules]
    assert not found, (name, found)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_importing_the_programs_leaves_seeds_and_threads_alone():
    code = f"""
import torch
torch.manual_seed(5); torch.set_num_threads(1)
before = torch.get_rng_state()
import importlib
for name in {PROGRAMS}:
    importlib.import_module("lightrlhf." + name)
assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)
