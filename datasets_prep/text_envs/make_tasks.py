"""Questions about the files of any source tree, for the environment `auto_explore`.

Questions are about files that pass filters of name, type and content. Templates use the file's own words: docstrings
and definitions of code, headings of documents, columns of data; or a model at an OpenAI-compatible server reads each
file and writes the questions (`--base_url`, `--task_model`). A question is kept only if exactly one file answers it (or
several with the same content) and it does not contain the file's name.

Files are split 7:2:1 into training, validation and test, level by level, so no file has questions in two splits, and
neither do two copies of a file. `tree.json` lists the files visible to an agent, `tasks_{split}.jsonl` the questions.

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
from typing import NamedTuple

from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import at_least, flag, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.cli.paths import check_folder
from lightrlhf.data.splits import SPLITS
from lightrlhf.envs.tree import Entry, Refused, Tree, as_text, is_plain_name
from lightrlhf.generation.openai_client import RemoteArgs, Servers
from lightrlhf.storage.destinations import check_destination
from lightrlhf.storage.jsonl import JsonlWriter, Row, write_jsonl
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.writing import write_text, writing

MAX_DEPTH = 2  # folders between the root and a file
MAX_BYTES = 500_000  # of a file
SHARES = {"validation": 0.2, "test": 0.1}  # of the files; the rest is for training
CODE = {"c", "cc", "cpp", "go", "h", "hpp", "java", "js", "py", "rs", "ts"}
PROSE, DATA = {"md", "rst", "txt"}, {"csv", "json", "jsonl", "tsv"}
# Names, without suffix, of files and folders that are not specific to the project.
SKIPPED = {"authors", "benchmark", "benchmarks", "build", "changelog", "contributors", "copying", "dist"}
SKIPPED |= {"dist-packages", "example", "examples", "licence", "license", "node_modules", "notice", "site-packages"}
SKIPPED |= {"test", "testing", "tests", "third_party", "vendor", "venv"}
DEFINITION = re.compile(
    r"^(?:export |pub |public |static |async |default )*(?:class|struct|interface|enum|trait|func|function|fn)\s+(\w+)",
    re.MULTILINE,
)
HEADING = re.compile(r"^#{1,3} +(\S.*?) *#*$|^(\w.*)\n(?:={4,}|-{4,}|~{4,}|\^{4,}|\*{4,})$", re.MULTILINE)
READ_CHARACTERS = 4000  # of a file in a model's prompt
REQUEST = """Below is the file {path} of a source tree. Write {count} different questions, one a line and without \
numbers, that a person could ask who needs this file but does not know it exists. Each must be answered by this file \
and hardly by any other. Speak of what is in it or what it is for; do not mention its name or path.

<file>
{text}
</file>"""
Candidate = tuple[str, str]  # kind of a question, and the question


@dataclass(frozen=True, kw_only=True)
class TaskArgs(RemoteArgs):
    """Write questions about the files of a source tree, and a list of these files."""

    repo_dir: str = flag(check=check_folder)
    """Root of the tree, which is only read."""
    destination_dir: str
    """Folder to write."""
    tasks_per_file: int = at_least(1, 2)
    """Maximum questions about one file."""
    num_samples: int | None = at_least(3, None)
    """Number of files to ask about, drawn at random; the others are distractors. All when not given."""
    task_model: str | None = None
    """Name of the model at `base_url` that writes the questions, instead of templates."""
    max_new_tokens: int = at_least(1, 256)
    """Maximum tokens of that model's reply."""
    seed: int = random_seed(42)
    """Seed of the sampled files and questions, and of the splits."""

    def _check(self) -> None:
        if bool(self.base_url) != bool(self.task_model):
            raise ValueError("--base_url and --task_model require each other; give both, or neither for templates")


class File(NamedTuple):
    """A file of the tree that passed the filter."""

    path: str
    text: str


@one_line_errors
def main(argv: list[str] | None = None) -> Row:
    """Run the program; returns its report."""
    args = parse(TaskArgs, argv)
    check_destination(Path(args.destination_dir), "--destination_dir")
    dropped: Counter[str] = Counter()
    tree = Tree(args.repo_dir)
    texts = dict(readable_files(tree, dropped))
    copies = same_content(texts)
    files = [File(path, texts[path]) for path in sorted(copies)]
    targets = files
    if args.num_samples is not None and args.num_samples < len(files):
        targets = sorted(random.Random(args.seed).sample(files, args.num_samples))
    if args.base_url:
        candidates = from_model(args, targets, dropped)
    else:  # of all files, to find questions that several of them answer
        candidates = {file.path: list(templates(file)) for file in files}
    valid = filtered(candidates, copies, dropped)
    tasks = [row for path, _ in targets for row in sample_tasks(args, copies[path], valid[path])]
    if not tasks:
        reasons = summarize_counts(dropped)
        raise RunFailure(f"--repo_dir {args.repo_dir}: no valid question about its {len(texts)} files; {reasons}")
    report = write(args, tree, split_by_file(tasks, args.seed), sorted(texts), dropped)
    show(args, report, dropped)
    return report


# ------------------------------------------------------------------------------------------------------------- files
def readable_files(tree: Tree, dropped: Counter[str], folder: str = "") -> Iterator[File]:
    """The files at most `MAX_DEPTH` folders deep that pass the filter; the others are counted by reason."""
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
    """Why a file or folder of this name is dropped; "" if it is kept."""
    if not is_plain_name(name):
        return "name: characters that cannot be shown"
    if name[0] in "._":
        return "name: begins with . or _"
    return "name: not the project's own matter" if name.partition(".")[0].casefold() in SKIPPED else ""


def read(tree: Tree, path: str, entry: Entry) -> tuple[File | None, str]:
    """A file, or the reason why it is dropped."""
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
    """Groups of paths with equal content, by the least deep path of each."""
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
            warnings.simplefilter("ignore")  # invalid escape sequences in the tree's code
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply for the parser
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
    """Column names of a table, or keys of a JSON object or of the first object in a list; at most six."""
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


def from_model(args: TaskArgs, files: Sequence[File], dropped: Counter[str]) -> dict[str, list[Candidate]]:
    """Questions written by the model at the servers, by path; stored replies are not requested again.

    Replies without a question, and lines that are none beside some, are counted.
    """
    shown = [(file.path, file.text[:READ_CHARACTERS]) for file in files]
    settings = {name: getattr(args, name) for name in ("task_model", "tasks_per_file", "max_new_tokens")}
    settings["files_sha256"] = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
    with JsonlWriter(Path(args.destination_dir) / "replies.jsonl", settings) as writer:
        remaining = shown[len(writer.rows) :]
        if remaining:
            with Servers(args, args.task_model or "") as servers:
                servers.wait_until_healthy()
                replies = servers.replies(request(args, *file) for file in remaining)
                for (path, _), reply in zip(remaining, replies):
                    writer.append({"path": path, "reply": reply.text, "error": reply.error})
        return {row["path"]: [("model", line) for line in questions_of(row, dropped)] for row in writer.rows}


def request(args: TaskArgs, path: str, text: str) -> Row:
    content = REQUEST.format(path=path, count=args.tasks_per_file, text=text)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": args.max_new_tokens, "temperature": 0.0}


def questions_of(row: Row, dropped: Counter[str]) -> list[str]:
    """The questions of a stored reply, one a line, stripped of bullets, numbers and quotes; counts what is none."""
    lines = [re.sub(r"^[\s\-*•]*(?:\d+[.)]\s*)?", "", line).strip(" \"'*") for line in row["reply"].splitlines()]
    questions = [line for line in lines if line.endswith("?")]
    if not questions:
        dropped["reply: an error of the server" if row["error"] else "reply: no question"] += 1
    elif others := sum(map(bool, lines)) - len(questions):
        dropped["line of a reply: no question"] += others
    return questions


# ------------------------------------------------------------------------------------------------------------ choice
def filtered(
    by_path: dict[str, list[Candidate]], copies: dict[str, list[str]], dropped: Counter[str]
) -> dict[str, list[Candidate]]:
    """The questions that are clear, short, do not contain the file's name, and are about one file (and its copies)."""
    answers: dict[str, set[str]] = defaultdict(set)
    for path, candidates in by_path.items():
        for _, question in candidates:
            answers[normalised(question)].add(path)
    valid: dict[str, list[Candidate]] = defaultdict(list)
    for path, candidates in by_path.items():
        for kind, question in dict.fromkeys(candidates):
            several = len(answers[normalised(question)]) > 1
            reason = "question: several files answer it" if several else unwanted_question(kind, question, copies[path])
            if reason:
                dropped[reason] += 1
            else:
                valid[path].append((kind, question))
    return valid


def unwanted_question(kind: str, question: str, paths: Sequence[str]) -> str:
    """Why a question is dropped; "" if it is kept."""
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


def sample_tasks(args: TaskArgs, paths: list[str], candidates: Sequence[Candidate]) -> list[Row]:
    """Tasks of one file and its copies: at most `--tasks_per_file` of its questions, sampled by the seed."""
    sample = random.Random(f"{args.seed} {paths[0]}").sample(candidates, min(args.tasks_per_file, len(candidates)))
    level = paths[0].count("/")
    return [{"task": question, "targets": paths, "level": level, "kind": kind} for kind, question in sample]


def split_by_file(tasks: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """The tasks of each split: 7:2:1 of the files, level by level; three files of a level give one to each split."""
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
    """Write all files, `tree.json` last: the environment refuses a folder without it as incomplete."""
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
    with writing(f"--destination_dir {folder}"), lock_folder(folder, "--destination_dir"):
        (folder / "tree.json").unlink(missing_ok=True)
        for split, rows in splits.items():
            write_jsonl(folder / f"tasks_{split}.jsonl", rows)
        write_text(folder / "tree.json", json.dumps(report, indent=1) + "\n")
    return report


def show(args: TaskArgs, report: Row, dropped: Counter[str]) -> None:
    """Print the report."""
    print(
        f"{args.destination_dir}: {len(report['files'])} visible files; questions by the depth of their file, 0 to 2:"
    )
    for split, counts in report["tasks"].items():
        print(f"  {split:12s}" + "".join(f"{count:6d}" for count in counts))
    print(f"  by kind: {', '.join(f'{count} {kind}' for kind, count in report['kinds'].items())}")
    print(f"  {summarize_counts(dropped)}")


def summarize_counts(dropped: Counter[str]) -> str:
    """Dropped files and questions by reason, the most frequent first."""
    reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common(8))
    return f"dropped: {reasons}" if reasons else "nothing was dropped"


if __name__ == "__main__":
    main()
