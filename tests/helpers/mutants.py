"""Mutants: one small fault in the code that trains, against the tests that concern the file.

    PYTHONPATH=.:tests python -m helpers.mutants --count 60 --seed 0
    PYTHONPATH=.:tests python -m helpers.mutants --programs grpo ppo --results build/mutants.jsonl

The first draws faults at random places: operators, comparisons and signs swapped, integers off by one (axes, shifts,
slices), `and` for `or`, True for False, and calls of `clamp`, `detach`, `clone`, `float` and the like left out. A
generator with a seed draws places from the syntax trees of `TESTS`' files, so every file gets its share by the number
of its places. The second tries the written faults of programs, `program_mutants.py`: of all when none is named. What
the file of results has for the same code and tests is not tried again. A mutant lives in a temporary copy of the tree,
and its tests run in a process forked from one that has imported torch.

Left out: random faults in annotations, decorators, docstrings, texts and the arguments of exceptions, which change no
number.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from helpers import program_mutants as written

ROOT = Path(__file__).resolve().parents[2]
TESTS = {  # a file: the tests that concern it, the quick ones first
    "lightrlhf/maths/ops.py": "maths/test_ops.py models/test_roles.py",
    "lightrlhf/maths/head.py": "maths/test_head.py models/test_roles.py",
    "lightrlhf/maths/groups.py": "maths/test_groups.py programs/test_reflect_rl.py",
    "lightrlhf/maths/policy_losses.py": "maths/test_policy_losses.py",
    "lightrlhf/maths/macro_actions.py": "maths/test_macro_actions.py",
    "lightrlhf/maths/preference.py": "maths/test_preference.py programs/test_dpo.py",
    "lightrlhf/maths/unpaired.py": "maths/test_preference.py programs/test_kto.py",
    "lightrlhf/data/batch.py": "data/test_batch.py models/test_roles.py programs/test_refuel.py",
    "lightrlhf/data/rows.py": "data/test_rows.py data/test_batch.py programs/test_bad_input.py",
    "lightrlhf/generation/engine.py": "generation/test_engine.py generation/test_prefix_cache.py",
    "lightrlhf/generation/slots.py": "generation/test_engine.py generation/test_prefix_cache.py",
    "lightrlhf/generation/graphs.py": "generation/test_graphs.py",
    "lightrlhf/generation/sampling.py": "generation/test_engine.py",
    "lightrlhf/generation/prefix_cache.py": "generation/test_prefix_cache.py generation/test_engine.py",
    "lightrlhf/models/packing.py": "models/test_packing.py",
    "lightrlhf/models/saving.py": "models/test_loading.py models/test_lora.py storage/test_checkpoint.py",
    "lightrlhf/storage/checkpoint.py": "storage/test_checkpoint.py training/test_run.py training/test_best.py",
    "lightrlhf/storage/seals.py": "storage/test_checkpoint.py storage/test_seals.py",
}
LIMIT = 600  # seconds that the tests of a mutant may take; one that hangs is killed
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
DROPPED = {"clamp", "detach", "clone", "float", "double", "masked_fill", "cumsum", "flip", "long", "bool", "log", "exp"}


class Mutant(NamedTuple):
    """One fault: the file, the name of the fault, the node where it is and the one that takes its place."""

    file: str
    fault: str
    node: ast.AST
    faulty: ast.AST
    tree: ast.Module

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    @property
    def tests(self) -> str:
        return TESTS[self.file]

    @property
    def name(self) -> str:
        """File, fault and the line without it, with a mark where the fault is."""
        line = (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1]
        column = getattr(self.node, "col_offset", 0)
        return f"{self.file} [{self.fault}] {line[:column].lstrip()}>>{line[column:]}"

    def source(self) -> str:
        """The whole file with the fault."""
        twins: dict[int, ast.AST] = {}
        tree = copy.deepcopy(self.tree, twins)
        faulty = ast.copy_location(copy.deepcopy(self.faulty), self.node)
        return ast.unparse(ast.fix_missing_locations(_Replace(twins[id(self.node)], faulty).visit(tree)))


class ProgramMutant(NamedTuple):
    """A written fault of a program: a text of its file, and what takes its place."""

    program: str
    old: str
    new: str

    @property
    def file(self) -> str:
        return f"lightrlhf/{self.program}.py"

    @property
    def tests(self) -> str:
        return " ".join(f"programs/{name}" for name in written.TESTS[self.program].split())

    @property
    def name(self) -> str:
        return f"{self.file} {self.old} >> {self.new}"

    def source(self) -> str:
        """The whole file with the fault."""
        return (ROOT / self.file).read_text(encoding="utf-8").replace(self.old, self.new)


def program_mutants(programs: Iterable[str] = written.TESTS) -> list[ProgramMutant]:
    """The written faults of these programs."""
    return [ProgramMutant(program, *fault) for program in programs for fault in written.FAULTS[program]]


def places(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that compute something: neither annotations nor decorators, docstrings, texts or raised exceptions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                skipped = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)
                if isinstance(child, ast.AST) and not isinstance(child, skipped) and not _is_typing(child):
                    waiting.append(child)


def faults(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """The faulty versions of one node, each with its name."""
    made: list[tuple[str, ast.AST]] = []

    def changed(name: str, **fields: object) -> None:
        other = copy.deepcopy(node)
        for field, value in fields.items():
            setattr(other, field, value)
        made.append((name, other))

    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        changed(f"{type(node.op).__name__} -> {other.__name__}", op=other())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        changed(f"{type(node.ops[0]).__name__} -> {other.__name__}", ops=[other(), *node.ops[1:]])
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        changed(f"{type(node.op).__name__} -> {other.__name__}", op=other())
    if isinstance(node, ast.UnaryOp):
        made.append((f"{type(node.op).__name__} dropped", node.operand))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        changed(f"{node.value} -> {node.value + 1}", value=node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        changed(f"{node.value} -> {not node.value}", value=not node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "math")):
            made.append((f".{node.func.attr}() dropped", node.func.value))
    return made


def all_mutants(file: str) -> list[Mutant]:
    """Every fault at every place of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return [Mutant(file, name, node, faulty, tree) for node in places(tree) for name, faulty in faults(node)]


def draw(count: int, seed: int) -> list[Mutant]:
    """A random sample of all mutants of all files, ordered by file and line.

    Each mutant's number is drawn by itself, so the sample changes little with the code.
    """
    everything = [mutant for file in TESTS for mutant in all_mutants(file)]
    drawn = {id(mutant): random.Random(f"{seed} {mutant.name}").random() for mutant in everything}
    sample = sorted(everything, key=lambda mutant: drawn[id(mutant)])[:count]
    return sorted(sample, key=lambda mutant: (mutant.file, mutant.line))


def survives(mutant: Mutant | ProgramMutant, tree: Path) -> str:
    """Run the tests in a copy of the tree with the mutant in it; "" if it survives, else what killed it."""
    (tree / mutant.file).write_text(mutant.source(), encoding="utf-8")
    sys.stdout.flush()
    log = tree / "log.txt"
    child = os.fork()
    if not child:
        os.setsid()
        _run_tests(tree, mutant.tests, log)
    end = time.monotonic() + LIMIT
    status = None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also programs that a test has started
    if status is None:
        os.waitpid(child, 0)
    shutil.copyfile(ROOT / mutant.file, tree / mutant.file)
    if status is None:
        return f"no end within {LIMIT} s"
    if status == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if os.waitstatus_to_exitcode(status) in (3, 4, 5):
        raise RuntimeError(f"pytest ran no test of {mutant.tests}: {lines[-3:]}")
    return next((line[:110] for line in lines if line.startswith(("FAILED", "ERROR"))), f"status {status}")


def copy_of_the_tree(folder: Path) -> Path:
    """What the tests read, copied."""
    unneeded = shutil.ignore_patterns("__pycache__", ".git", ".venv*", "logs", "quickstart", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=unneeded))


def main() -> None:
    """Print one line a mutant and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", nargs="*", choices=[*written.TESTS])
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    is_drawn = args.programs is None
    chosen = draw(args.count, args.seed) if is_drawn else program_mutants(args.programs or written.TESTS)
    killed: dict[str, list[bool]] = {}
    for number, mutant, killer in run(chosen, args.results):
        killed.setdefault(mutant.file, []).append(bool(killer))
        print(f"{number:3d} {mutant.name}: {killer or 'SURVIVED'}", flush=True)
    for file, held in killed.items():
        print(f"{file}: {sum(held)} of {len(held)} killed")


def run(
    chosen: Iterable[Mutant | ProgramMutant], results: Path | None = None
) -> Iterator[tuple[int, Mutant | ProgramMutant, str]]:
    """Number, mutant and what killed it, of each; results: a file that keeps them by the code and the tests."""
    import pytest  # noqa: F401  every fork has them, so none pays for the import
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    known: dict[str, str] = {}
    if results is not None and results.is_file():
        known = dict(json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            key = digest(mutant)
            if key not in known:
                known[key] = survives(mutant, tree)
                if results is not None:
                    results.parent.mkdir(parents=True, exist_ok=True)
                    with results.open("a", encoding="utf-8") as file:
                        print(json.dumps([key, known[key]]), file=file)
            yield number, mutant, known[key]


def digest(mutant: Mutant | ProgramMutant) -> str:
    """SHA-256 of the mutant, the library, and the tests that are run with what they import."""
    tests = [ROOT / "tests" / name for name in mutant.tests.split()]
    shared = [*ROOT.glob("lightrlhf/**/*.py"), *ROOT.glob("tests/helpers/*.py"), ROOT / "tests" / "conftest.py"]
    content = hashlib.sha256(mutant.source().encode())
    for path in (*sorted(shared), *tests):
        content.update(path.read_bytes())
    return content.hexdigest()


# -------------------------------------------------------------------------------------------------------------- helpers
class _Replace(ast.NodeTransformer):
    """Puts another node in one node's place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _run_tests(tree: Path, tests: str, log: Path) -> None:
    """In the child: run pytest in the copy, and exit with its status."""
    import pytest

    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path[:] = [
        str(tree),
        str(tree / "tests"),
        *(p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "tests"))),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "tests")])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] in ("lightrlhf", "datasets_prep", "helpers")]:
        del sys.modules[name]
    options = ["-x", "-q", "-m", "not thorough and not attack and not browser", "-p", "no:cacheprovider", "--tb=no"]
    options += ["-rfE", f"--basetemp={tree.parent / 'pytest'}"]
    status = pytest.main([*options, *(f"tests/{name}" for name in tests.split())])
    sys.stdout.flush()
    os._exit(int(status))


if __name__ == "__main__":
    main()
