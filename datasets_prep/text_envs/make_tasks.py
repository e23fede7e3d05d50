"""Questions about the files of any source tree, for the environment `auto_explore`.

Every file that passes the filter of names, kinds and content may be asked about. Templates take their words from what
the file says of itself: the docstrings and definitions of code, the headings of documents, the columns of data; or a
model behind an OpenAI-compatible server reads each file and writes the questions (`--base_url`, `--task_model`). A
question is kept only if it answers to one file (or to several with the same content) and does not give the name away.

Files are split 7:2:1 into training, validation and test, level by level, so no file has questions in two splits; nor
has a file and its copy. `tree.json` lists the files that an agent may see, `tasks_{split}.jsonl` the questions.

    python -m datasets_prep.text_envs.make_tasks --repo_dir=my/project --destination_dir=data/auto_explore

Left out: a copy of the tree (the environment reads the original), and questions whose answer is a folder.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import SPLITS
from lightrlhf.envs.tree import Entry, Refused, Tree, as_text, is_plain_name
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.storage.checkpoint import write_text
from lightrlhf.storage.jsonl import JsonlWriter, write_jsonl

MAX_DEPTH = 2  # folders between the root and a file
MAX_BYTES = 500_000  # larger files are no reading matter
SHARES = {"validation": 0.2, "test": 0.1}  # of the files; the rest is for training
CODE = {"c", "cc", "cpp", "go", "h", "hpp", "java", "js", "py", "rs", "ts"}
PROSE, DATA = {"md", "rst", "txt"}, {"csv", "json", "jsonl", "tsv"}
# Names, without suffix, of what is not the project's own matter, or looks the same in all projects.
SKIPPED = {"authors", "benchmark", "benchmarks", "build", "changelog", "contributors", "copying", "dist"}
SKIPPED |= {"dist-packages", "example", "examples", "licence", "license", "node_modules", "notice", "site-packages"}
SKIPPED |= {"test", "testing", "tests", "third_party", "vendor", "venv"}
DEFINITION = re.compile(
    r"^(?:export |pub |public |static |async |default )*(?:class|struct|interface|enum|trait|func|function|fn)\s+(\w+)",
    re.MULTILINE,
)
HEADING = re.compile(r"^#{1,3} +(\S.*?) *#*$|^(\w.*)\n(?:={4,}|-{4,}|~{4,}|\^{4,}|\*{4,})$", re.MULTILINE)
READ_CHARACTERS = 4000  # of a file that are shown to a model
REQUEST = """Below is the file {path} of a source tree. Write {count} different questions, one a line and without \
numbers, that a person could ask who needs this file but does not know it exists. Each must be answered by this file \
and hardly by any other. Speak of what is in it or what it is for; do not mention its name or path.

<file>
{text}
</file>"""
Row = dict[str, Any]
Candidate = tuple[str, str]  # kind of a question, and the question


@dataclass(frozen=True, kw_only=True)
class TaskArgs(RemoteArgs):
    """Write questions about the files of a source tree, and the list of the files themselves."""

    repo_dir: str
    """The tree; it is only read."""
    destination_dir: str
    """Folder to write."""
    tasks_per_file: int = 2
    """Most questions about one file."""
    num_samples: int | None = None
    """Ask about so many files only, drawn at random; the others are there to get lost among."""
    task_model: str | None = None
    """Name of the model at the servers that writes the questions, instead of templates."""
    max_new_tokens: int = 256
    """Longest reply of that model."""
    seed: int = 42
    """Seed of the choice of files and questions, and of the splits."""

    def __post_init__(self) -> None:
        self.check_remote()
        for name in ("tasks_per_file", "max_new_tokens"):
            check_at_least(self, name, 1)
        if self.num_samples is not None:
            check_at_least(self, "num_samples", 3)
        if not Path(self.repo_dir).is_dir():
            raise ValueError(f"--repo_dir {self.repo_dir} is no folder; name the root of a source tree")
        if bool(self.base_url) != bool(self.task_model):
            raise ValueError("--base_url and --task_model belong together; give both, or none for templates")


class File(NamedTuple):
    """A file of the tree that passed the filter."""

    path: str
    text: str


@one_line_errors
def main(argv: list[str] | None = None) -> Row:
    """Run the program; returns what it reports."""
    args = parse(TaskArgs, argv)
    dropped: Counter[str] = Counter()
    tree = Tree(args.repo_dir)
    texts = dict(readable_files(tree, dropped))
    copies = same_content(texts)
    files = [File(path, texts[path]) for path in sorted(copies)]
    asked = files
    if args.num_samples is not None and args.num_samples < len(files):
        asked = sorted(random.Random(args.seed).sample(files, args.num_samples))
    if args.base_url:
        found = from_model(args, asked)
    else:  # of all files, to see which questions several of them answer
        found = {file.path: list(templates(file)) for file in files}
    kept = filtered(found, copies, dropped)
    tasks = [row for path, _ in asked for row in chosen(args, copies[path], kept[path])]
    if not tasks:
        raise RunFailure(f"--repo_dir {args.repo_dir}: no question came of its {len(texts)} files; {told(dropped)}")
    report = write(args, tree, split_by_file(tasks, args.seed), sorted(texts), dropped)
    show(args, report, dropped)
    return report


# ------------------------------------------------------------------------------------------------------------- files
def readable_files(tree: Tree, dropped: Counter[str], folder: str = "") -> Iterator[File]:
    """The files at most `MAX_DEPTH` folders down that pass the filter; the others are counted by reason."""
    try:
        entries = tree.entries(folder)
    except Refused as problem:
        dropped[f"folder: {problem}"] += 1
        return
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        reason = unwanted_name(entry.name)
        if not reason and entry.kind == "folder":
            reason = "folder: too deep" if path.count("/") == MAX_DEPTH else ""
            if not reason:
                yield from readable_files(tree, dropped, path)
        elif not reason:
            file, reason = read(tree, path, entry)
            if file:
                yield file
        if reason:
            dropped[reason] += 1


def unwanted_name(name: str) -> str:
    """Why a file or folder of this name is left out; "" when it is not."""
    if not is_plain_name(name):
        return "name: characters that cannot be shown"
    if name[0] in "._":
        return "name: begins with . or _"
    return "name: not the project's own matter" if name.partition(".")[0].casefold() in SKIPPED else ""


def read(tree: Tree, path: str, entry: Entry) -> tuple[File | None, str]:
    """A file, or why it is left out."""
    if entry.kind != "file":
        return None, "file: a link, device, pipe or socket"
    if suffix_of(path) not in CODE | PROSE | DATA:
        return None, "file: of another kind"
    if entry.size > MAX_BYTES:
        return None, "file: too large"
    try:
        text = as_text(tree.read(path, MAX_BYTES))
    except Refused as problem:
        return None, f"file: {problem}"
    if len(text.strip()) < 10:
        return None, "content: fewer than 10 characters"
    if sum(map(str.isascii, text)) < 0.9 * len(text):
        return None, "content: less than 90% ASCII"
    return File(path, text), ""


def suffix_of(path: str) -> str:
    return PurePosixPath(path).suffix[1:].lower()


def same_content(texts: dict[str, str]) -> dict[str, list[str]]:
    """Paths of equal content, by the first and least deep of them."""
    copies: dict[str, list[str]] = defaultdict(list)
    for path in sorted(texts, key=lambda path: (path.count("/"), path)):
        copies[texts[path]].append(path)
    return {paths[0]: paths for paths in copies.values()}


# --------------------------------------------------------------------------------------------------------- questions
def templates(file: File) -> Iterator[Candidate]:
    """Questions in the file's own words."""
    suffix = suffix_of(file.path)
    if suffix == "py":
        yield from of_python(file.text)
    elif suffix in CODE:
        yield from map(definition, DEFINITION.findall(file.text))
    elif suffix in PROSE:
        for heading in HEADING.findall(file.text):
            yield "heading", f'Which document has a section "{"".join(heading).strip()}"?'
    elif names := columns_of(suffix, file.text):
        *first, last = names
        yield "columns", f"Which data file has the columns {', '.join(first)} and {last}?"


def of_python(text: str) -> Iterator[Candidate]:
    """Questions from the docstrings and the names of a module's classes and functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful escapes in other people's code
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deep for the parser
        return
    if summary := summary_of(module):
        yield "docstring", f"Which file is described so: {summary}?"
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
            yield definition(node.name)
            if summary := summary_of(node):
                yield "docstring", f"Which file has code for this: {summary}?"


def definition(name: str) -> Candidate:
    return "definition", f"Which file defines {name}?"


def summary_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first sentence of a docstring, "" when there is none."""
    paragraph = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
    return re.split(r"[.!?](?:\s|$)", " ".join(paragraph.split()))[0].strip(" .:;-")


def columns_of(suffix: str, text: str) -> list[str]:
    """Names of a table's columns, or the keys of a JSON object or of the first one in a list; at most six."""
    names: list[str] = []
    if suffix in ("csv", "tsv"):
        try:
            names = next(csv.reader(text.splitlines()[:1], delimiter="\t" if suffix == "tsv" else ","), [])
        except csv.Error:
            return []
        if any(re.fullmatch(r"[-+\d.,%\s]*", name) for name in names):  # a table without a header
            return []
    else:
        try:
            value = json.loads(text.split("\n")[0] if suffix == "jsonl" else text)
        except (ValueError, RecursionError):
            return []
        value = value[0] if isinstance(value, list) and value else value
        names = list(value) if isinstance(value, dict) else []
    names = [name.strip() for name in names][:6]
    return names if len(names) > 1 and all(names) else []


def from_model(args: TaskArgs, files: Sequence[File]) -> dict[str, list[Candidate]]:
    """Questions that the model at the servers writes, by path; those of an earlier start are not asked for again."""
    shown = [(file.path, file.text[:READ_CHARACTERS]) for file in files]
    settings = {name: getattr(args, name) for name in ("task_model", "tasks_per_file", "max_new_tokens")}
    settings["files_sha256"] = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
    with JsonlWriter(Path(args.destination_dir) / "replies.jsonl", settings) as writer:
        left = shown[len(writer.rows) :]
        if left:
            with Servers(args, args.task_model) as servers:
                servers.wait_until_healthy()
                replies = servers.replies(request(args, *file) for file in left)
                for (path, _), reply in zip(left, replies):
                    writer.append({"path": path, "reply": reply.text, "error": reply.error})
        return {row["path"]: [("model", line) for line in lines_of(row["reply"])] for row in writer.rows}


def request(args: TaskArgs, path: str, text: str) -> Row:
    content = REQUEST.format(path=path, count=args.tasks_per_file, text=text)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": args.max_new_tokens, "temperature": 0.0}


def lines_of(reply: str) -> list[str]:
    """The questions of a reply, one a line, without bullets, numbers and quotes around them."""
    lines = (re.sub(r"^[\s\-*•]*(?:\d+[.)]\s*)?", "", line).strip(" \"'*") for line in reply.splitlines())
    return [line for line in lines if line.endswith("?")]


# ------------------------------------------------------------------------------------------------------------ choice
def filtered(
    found: dict[str, list[Candidate]], copies: dict[str, list[str]], dropped: Counter[str]
) -> dict[str, list[Candidate]]:
    """The questions that are clear, short, no give-away, and asked of one file (and its copies) only."""
    asked_of: dict[str, set[str]] = defaultdict(set)
    for path, candidates in found.items():
        for _, question in candidates:
            asked_of[normalised(question)].add(path)
    kept: dict[str, list[Candidate]] = defaultdict(list)
    for path, candidates in found.items():
        for kind, question in dict.fromkeys(candidates):
            several = len(asked_of[normalised(question)]) > 1
            reason = "question: several files answer it" if several else unwanted_question(kind, question, copies[path])
            if reason:
                dropped[reason] += 1
            else:
                kept[path].append((kind, question))
    return kept


def unwanted_question(kind: str, question: str, paths: Sequence[str]) -> str:
    """Why a question is left out; "" when it is not."""
    if not question.isprintable() or not question.isascii():
        return "question: characters that not every model knows"
    words = re.findall(r"\w+", question)
    if len(question) > 200 or len(words) > 35:
        return "question: too long"
    if kind == "definition":
        name = words[-1]
        return "question: a name that says little" if len(name) < 4 or name == "main" else ""
    if len(words) < 7:
        return "question: too short"
    given_away = any(PurePosixPath(path).name.casefold() in question.casefold() for path in paths)
    return "question: names its file" if given_away else ""


def normalised(question: str) -> str:
    return " ".join(question.split()).casefold()


def chosen(args: TaskArgs, paths: list[str], candidates: Sequence[Candidate]) -> list[Row]:
    """Tasks of one file and its copies: at most `--tasks_per_file` of its questions, drawn by the seed."""
    few = random.Random(f"{args.seed} {paths[0]}").sample(candidates, min(args.tasks_per_file, len(candidates)))
    return [{"task": question, "targets": paths, "level": paths[0].count("/"), "kind": kind} for kind, question in few]


def split_by_file(tasks: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """The tasks of each split: 7:2:1 of the files, level by level; a level of three files has one in each split."""
    by_file: dict[str, list[Row]] = defaultdict(list)
    for row in tasks:
        by_file[row["targets"][0]].append(row)
    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for level in range(MAX_DEPTH + 1):
        paths = [path for path in sorted(by_file) if path.count("/") == level]
        random.Random(f"{seed} {level}").shuffle(paths)
        held_out = {split: max(round(share * len(paths)), int(len(paths) >= 3)) for split, share in SHARES.items()}
        remaining = iter(paths)
        for split in ("validation", "test", "train"):
            part = sorted(islice(remaining, held_out.get(split, len(paths))))
            splits[split] += [row for path in part for row in by_file[path]]
    return splits


# ------------------------------------------------------------------------------------------------------------- write
def write(args: TaskArgs, tree: Tree, splits: dict[str, list[Row]], files: list[str], dropped: Counter[str]) -> Row:
    """All files, `tree.json` last: without it the environment takes the folder for unfinished."""
    folder = Path(args.destination_dir)
    report = {
        "repo_dir": tree.root,
        "seed": args.seed,
        "task_model": args.task_model,
        "tasks": {split: [sum(row["level"] == n for row in rows) for n in range(3)] for split, rows in splits.items()},
        "kinds": dict(Counter(row["kind"] for rows in splits.values() for row in rows).most_common()),
        "dropped": dict(dropped.most_common()),
        "files": files,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tree.json").unlink(missing_ok=True)
        for split, rows in splits.items():
            write_jsonl(folder / f"tasks_{split}.jsonl", rows)
        write_text(folder / "tree.json", json.dumps(report, indent=1) + "\n")
    except OSError as problem:
        raise RunFailure(f"--destination_dir {folder} cannot be written: {problem.strerror}") from None
    return report


def show(args: TaskArgs, report: Row, dropped: Counter[str]) -> None:
    """The report, on the terminal."""
    print(f"{args.destination_dir}: {len(report['files'])} files to see; questions by the depth of their file, 0 to 2:")
    for split, counts in report["tasks"].items():
        print(f"  {split:12s}" + "".join(f"{count:6d}" for count in counts))
    print(f"  of kinds: {', '.join(f'{count} {kind}' for kind, count in report['kinds'].items())}")
    print(f"  {told(dropped)}")


def told(dropped: Counter[str]) -> str:
    """What was left out and why, the most frequent reasons first."""
    reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common(8))
    return f"left out: {reasons}" if reasons else "nothing was left out"


if __name__ == "__main__":
    main()
