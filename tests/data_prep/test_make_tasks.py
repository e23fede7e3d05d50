"""Questions about the files of a tree: splits, templates, filters, and a model that writes them."""

import json
from collections import Counter
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.explore import TEXTS, grow, tasks_of
from helpers.servers import Handler, answering

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from datasets_prep.text_envs import make_tasks
from lightrlhf.envs import make_env


def rows_of(folder: str | Path) -> dict[str, list[dict]]:
    return {
        split: [json.loads(line) for line in Path(folder, f"tasks_{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation", "test")
    }


def a_library(folder: Path, files: int = 100) -> Path:
    """A tree in which each file has several questions, and every tenth file a copy elsewhere."""
    for n in range(files):
        text = f'"""Everything that room number {n} is known to be used for."""\n\n'
        text += f"def clean_room_{n}(): ...\ndef enter_room_{n}(): ...\ndef helper(): ...\n"
        place = ["", "east/", "east/attic/"][n % 3]
        grow(folder, {f"{place}room_{n}.py": text})
        if n % 10 == 0:
            grow(folder, {f"west/copy_{n}.py": text})
    return folder


def test_splits_are_seven_to_two_to_one_by_file_and_nothing_crosses(tmp_path):
    a_library(tmp_path / "tree")
    rows = rows_of(tasks_of(tmp_path))
    files = {split: {path for row in rows[split] for path in row["targets"]} for split in rows}
    texts = {split: {(tmp_path / "tree" / path).read_text() for path in files[split]} for split in rows}
    questions = {split: {row["task"].casefold() for row in rows[split]} for split in rows}
    for kind in (files, texts, questions):
        assert not kind["train"] & kind["validation"] | kind["train"] & kind["test"] | kind["validation"] & kind["test"]
    assert [len(texts[split]) for split in rows] == [70, 20, 10] and all(
        len(rows[s]) == 2 * len(texts[s]) for s in rows
    )
    copied = [row for split in rows for row in rows[split] if len(row["targets"]) > 1]
    assert len(copied) == 20 and all(row["level"] == row["targets"][0].count("/") for row in copied)
    assert not any("helper" in row["task"] for split in rows for row in rows[split])  # which a hundred files define
    assert {row["level"] for row in rows["test"]} == {0, 1, 2}


def test_tasks_depend_on_the_seed_and_nothing_else(tmp_path):
    for name in ("one", "two"):
        a_library(tmp_path / name / "tree", 30)
    first = rows_of(tasks_of(tmp_path / "one"))
    assert rows_of(tasks_of(tmp_path / "two")) == first == rows_of(tasks_of(tmp_path / "one"))
    assert rows_of(tasks_of(tmp_path / "one", "--seed", "7")) != first
    few = rows_of(tasks_of(tmp_path / "one", "--num_samples", "9", "--tasks_per_file", "1"))
    assert sum(map(len, few.values())) == 9
    assert len(json.loads((tmp_path / "one" / "tasks" / "tree.json").read_text())["files"]) == 33


def test_a_copy_of_the_answer_answers_too(tmp_path):
    a_library(tmp_path / "tree", 30)
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path))
    row = next(row for s in ("train", "validation", "test") for row in env.starts(s) if len(row["targets"]) > 1)
    env.reset(options=row)
    for command in ("cd west", f"id {row['targets'][1].split('/')[1]}"):
        *_, info = env.step(command)
    assert info["success"]


QUESTIONS = {  # a file's name and text, and what is asked about it
    (
        "a.py",
        '"""Bread and cake for all. More."""\nasync def knead_dough(): "Turn and fold the dough until it is smooth."',
    ): [
        "Which file is described so: Bread and cake for all?",
        "Which file defines knead_dough?",
        "Which file has code for this: Turn and fold the dough until it is smooth?",
    ],
    ("a.rs", "use x;\npub struct Oven;\nimpl Oven {}\nfn heat_up() {}\n"): [
        "Which file defines Oven?",
        "Which file defines heat_up?",
    ],
    ("a.js", "export default class Shop {}\nexport async function sellRolls() {}"): [
        "Which file defines Shop?",
        "Which file defines sellRolls?",
    ],
    ("a.md", "# One #\ntext\n### Two\n#### Four\n"): [
        'Which document has a section "One"?',
        'Which document has a section "Two"?',
    ],
    ("a.rst", "Title\n=====\n\nPart\n----\n"): [
        'Which document has a section "Title"?',
        'Which document has a section "Part"?',
    ],
    ("a.csv", "name, price ,day\n1,2,3\n"): ["Which data file has the columns name, price and day?"],
    ("b.csv", "1,2,3\n4,5,6\n"): [],
    ("a.tsv", "name\tprice\n"): ["Which data file has the columns name and price?"],
    ("a.jsonl", '{"x": 1, "y": 2}\n{"z": 3}\n'): ["Which data file has the columns x and y?"],
    ("a.json", '["x", "y"]'): [],
    ("b.json", "not JSON at all"): [],
}


@pytest.mark.parametrize("file", QUESTIONS, ids=lambda file: file[0])
def test_questions_are_in_the_files_own_words(file):
    assert [question for _, question in make_tasks.templates(make_tasks.File(*file))] == QUESTIONS[file]


def test_names_that_are_common_to_many_projects_are_left_out():
    left_out = [
        ".git", "_private.py", "LICENSE", "license.txt", "tests", "Examples", "CHANGELOG.md", "node_modules", "",
    ]  # fmt: skip
    assert all(make_tasks.unwanted_name(name) for name in left_out)
    assert not any(make_tasks.unwanted_name(name) for name in ("main.py", "docs", "testament.txt", "licensing.py"))


def test_invalid_questions_are_left_out():
    def why(kind, question):
        return make_tasks.unwanted_question(kind, question, ["shop/ovens.py"])

    assert not why("docstring", "Which file is described so: the heat of all?")
    assert "names its file" in why("model", "What is written in Ovens.py about the heat of bread?")
    assert "too short" in why("docstring", "Which file is described so: x?")
    assert "too long" in why("docstring", "Which " + "very " * 40 + "long one?")
    assert "characters" in why("docstring", "Which file is described so: пироги и хлеб and more?")
    assert "says little" in why("definition", "Which file defines main?") and not why(
        "definition", "Which file defines oven?"
    )


class QuestionWriter(Handler):
    """Writes two questions about each file, one of them invalid; refuses after `server.stops_after` files."""

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        path = prompt.split("Below is the file ")[1].split(" of a source")[0]
        self.server.requests[path] += 1
        if len(self.server.requests) > self.server.stops_after:
            return self.send(401, {"error": "no more"})
        name = path.split("/")[-1]
        if name in self.server.says:
            status, text = self.server.says[name]
            return self.send(status, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})
        good, bad = f"Where is the matter of {path[0]} and {name[:-3]} settled now?", f"What is {name} for?"
        text = f'Here they are:\n1. "{good}"\n- {bad}'
        self.send(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


@pytest.fixture
def serve_questions():
    server = ThreadingHTTPServer(("127.0.0.1", 0), QuestionWriter)
    server.requests, server.stops_after, server.says = Counter(), 100, {}
    with answering(server) as address:
        server.flags = ["--base_url", address, "--task_model", "m", "--max_workers", "1"]
        yield server


def test_a_model_at_a_server_writes_the_questions_by_one_request_per_file(tmp_path, serve_questions):
    a_library(tmp_path / "tree", 12)
    server = serve_questions
    server.stops_after = 5
    with pytest.raises(SystemExit) as stopped:
        tasks_of(tmp_path, *server.flags)
    assert stopped.value.code == 1 and not (tmp_path / "tasks" / "tree.json").exists()
    paid = len((tmp_path / "tasks" / "replies.jsonl").read_text().splitlines())
    server.stops_after = 100
    rows = rows_of(tasks_of(tmp_path, *server.flags))
    assert paid > 0 and sum(server.requests.values()) <= 12 + 4  # requests in flight when it stopped are repeated
    tasks = [row for split in rows for row in rows[split]]
    assert len(tasks) == 12 and all(row["kind"] == "model" for row in tasks)
    assert all(row["task"].startswith("Where is the matter") for row in tasks)  # other questions name their file


def test_replies_without_a_question_are_counted(tmp_path, serve_questions):
    """Of room 3 the model says nothing of use, of room 4 the server does not answer; before each question is a line."""
    a_library(tmp_path / "tree", 9)
    serve_questions.says = {"room_3.py": (200, "I cannot tell."), "room_4.py": (400, "")}
    folder = Path(tasks_of(tmp_path, *serve_questions.flags))
    dropped = json.loads((folder / "tree.json").read_text())["dropped"]
    assert dropped["reply: no question"] == dropped["reply: an error of the server"] == 1
    assert dropped["line of a reply: no question"] == 7


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--repo_dir", "nowhere"], "--repo_dir nowhere"),
        (["--task_model", "m"], "--task_model"),
        (["--base_url", "localhost"], "--base_url localhost"),
        (["--destination_dir", "/dev/null/tasks"], "--destination_dir /dev/null/tasks cannot be written"),
        (["--repo_dir", "empty"], "--repo_dir empty"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grow(tmp_path / "tree", TEXTS)
    (tmp_path / "empty").mkdir()
    given = {"--repo_dir": "tree", "--destination_dir": "tasks"} | dict(zip(flags[::2], flags[1::2]))
    with pytest.raises(SystemExit) as stopped:
        make_tasks.main([word for pair in given.items() for word in pair])
    assert stopped.value.code in (1, 2) and line in capsys.readouterr().err
    assert not (tmp_path / "tasks").exists()
