"""Whether runs of all programs are bit by bit as in an earlier commit: `python -m tests.freeze --base REV`.

Each case of `cases.py` runs in a copy of the base and in this tree, on this machine with one thread. Compared are all
metrics but times, kept samples, and the tensors of checkpoints and of `resume.pt`. What differs is named with its first
difference, and the exit status is 1 then. The results of the base are kept, by commit, case and machine.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.freeze import cases, compare, records

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = arguments(argv)
    chosen = [case for case in cases.CASES if not (args.fast and case.slow)]
    chosen = [case for case in chosen if any(part in case.name for part in args.only)] if args.only else chosen
    if args.list:
        print("\n".join(f"{case.name}{' (slow)' * case.slow}" for case in chosen))
        return 0
    if not chosen:
        print(f"--only {' '.join(args.only)}: no such case; --list shows all")
        return 2
    commit = git("rev-parse", f"{args.base}^{{commit}}")
    store = Path(args.cache) / commit[:12]
    base = exported(commit, store / "tree")
    inputs = made_inputs(base, store)
    kept = {case.name: store / machine() / f"{key(case, base, inputs)}.pt" for case in chosen}
    missing = [case for case in chosen if not kept[case.name].exists()]
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        made = {case.name: Path(args.keep or folder) / case.name.replace("/", "-") for case in chosen}
        errors = {}
        for tree, todo, places in ((base, missing, kept), (ROOT, chosen if not args.fill else [], made)):
            given = [described(case, tree, places[case.name], bool(args.keep)) for case in todo]
            errors |= run(tree, given, inputs, args.jobs, Path(folder))
        compared = [case for case in chosen if not args.fill or case.name in errors]
        bad = sum(shown(case, errors, kept[case.name], made[case.name]) for case in compared)
    print(f"{len(compared)} cases against {commit[:12]}: {bad} differ or failed")
    return 1 if bad else 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.freeze", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases with one of these in their names")
    parser.add_argument("--fast", action="store_true", help="without cases of servers and of two ranks")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--fill", action="store_true", help="run the base alone, whose results are kept")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    parser.add_argument("--keep", metavar="FOLDER", help="leave this tree's runs and records there")
    parser.add_argument("--cache", default="/tmp/freeze-cache", help="where results of the base are kept")
    return parser.parse_args(argv)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """What results depend on besides the code: the processor's instructions, torch and the number of threads."""
    parts = [torch.backends.cpu.get_cpu_capability(), platform.machine(), torch.__version__, "1"]
    return "-".join(parts).replace("+", "_")


def exported(commit: str, folder: Path) -> Path:
    """The files of a commit."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent))
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(part)], input=archive, check=True)
        publish(part, folder)
    return folder


def made_inputs(base: Path, store: Path) -> Path:
    """Models and data of the runs, made by the base's code."""
    text = (HERE / "inputs.py").read_bytes()
    folder = store / f"inputs-{hashlib.sha256(text).hexdigest()[:8]}"
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=store))
        command = [sys.executable, str(HERE / "inputs.py"), str(part)]
        subprocess.run(command, cwd=base, env=environment(base), check=True, capture_output=True)
        publish(part, folder)
    return folder


def publish(part: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another process was first."""
    try:
        part.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def key(case: cases.Case, base: Path, inputs: Path) -> str:
    """A name for the case's results in the base, which changes with all that they depend on."""
    functions = (HERE / "freeze_functions.py").read_text(encoding="utf-8")
    text = json.dumps([described(case, base, Path(), False), inputs.name, functions, records.VERSION])
    return f"{case.name.replace('/', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def described(case: cases.Case, tree: Path, record: Path, keep: bool) -> dict[str, Any]:
    """A case as a worker reads it."""
    steps = [dataclasses.asdict(cases.in_tree(step, tree != ROOT)) for step in case.steps]
    return {
        "name": case.name,
        "steps": steps,
        "servers": case.servers,
        "served": case.served,
        "record": str(record),
        "keep": keep,
    }


def environment(tree: Path) -> dict[str, str]:
    fixed = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "freeze",
    }
    return {**os.environ, **fixed, "PYTHONPATH": os.pathsep.join([str(tree), str(HERE)])}


def run(tree: Path, given: list[dict[str, Any]], inputs: Path, jobs: int, folder: Path) -> dict[str, str]:
    """Run cases in a tree, telling of each; returns what went wrong, by case."""
    if not given:
        return {}
    job = Path(tempfile.mkstemp(".json", dir=folder)[1])
    job.write_text(json.dumps({"cases": given, "inputs": str(inputs), "jobs": jobs}))
    command, errors = [sys.executable, str(HERE / "worker.py"), str(job)], {}
    with subprocess.Popen(command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            told = json.loads(line)
            where = "tree" if tree == ROOT else "base"
            print(f"{where} {told['name']:32} {told['seconds']:6.1f} s{'  FAILED' * bool(told['error'])}", flush=True)
            if told["error"]:
                errors[told["name"]] = f"in the {where}: {told['error']}"
    return errors


def shown(case: cases.Case, errors: dict[str, str], base: Path, tree: Path) -> bool:
    """Print how a case differs; returns whether it does."""
    if case.name in errors:
        print(f"\n{case.name} failed {errors[case.name]}")
        return True
    found = compare.differences(records.load(base), records.load(tree))
    if found:
        print(f"\n{case.name} differs:\n  " + "\n  ".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
