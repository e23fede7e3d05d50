"""The read-only view of a tree: hostile files, links and devices do no harm and reveal nothing outside."""

import codecs
import json
import os
import socket
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
from helpers.explore import SECRET, TEXTS, grow, opened, read_only, tasks_of

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from datasets_prep.text_envs import make_tasks
from lightrlhf.envs import make_env
from lightrlhf.envs.tree import Refused, Tree, as_text, is_plain_name


def link(target):
    return lambda tree: (tree / "x.txt").symlink_to(target)


def link_folder(target):
    return lambda tree: (tree / "x").symlink_to(target)


def a_loop_of_two(tree):
    (tree / "x.txt").symlink_to(tree / "y.txt")
    (tree / "y.txt").symlink_to(tree / "x.txt")


def a_chain(tree):
    (tree / "y.txt").symlink_to(tree.parent / "secret.txt")
    (tree / "x.txt").symlink_to(tree / "y.txt")


def a_socket(tree):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tree / "x.txt"))


def named(name: str | bytes, content: bytes = b"plain enough to read, but what a name"):
    return lambda tree: Path(os.fsdecode(os.fsencode(tree) + b"/" + os.fsencode(name))).write_bytes(content)


def filled(content: bytes):
    return named("x.txt", content)


def a_sparse_giant(tree):
    with (tree / "x.txt").open("wb") as file:
        file.truncate(2**40)


def a_crowd(tree):
    for number in range(10_000):
        (tree / f"file_{number}.txt").touch()


def deep(tree):
    folder = tree
    for _ in range(120):
        folder = folder / "d"
    folder.mkdir(parents=True)
    (folder / "x.txt").write_text("a text at the end of a long listing")


NO_FILE = "it is no plain file"
LINK = "file: a link, device, pipe or socket"
NAME = "name: characters that cannot be shown"
HOSTILE = {  # what is added to the tree, the path read, the refusal (None: it is read), why no task is made of it
    "a link to a file outside": (link("../secret.txt"), "x.txt", NO_FILE, LINK),
    "an absolute link outside": (link("/etc/passwd"), "x.txt", NO_FILE, LINK),
    "a link to a folder outside": (link_folder(".."), "x/secret.txt", "its folder is a link or no folder", LINK),
    "a link to the file system's root": (link_folder("/"), "x/etc/passwd", "its folder is a link or no folder", LINK),
    "a link to itself": (link("x.txt"), "x.txt", NO_FILE, LINK),
    "two links in a loop": (a_loop_of_two, "x.txt", NO_FILE, LINK),
    "a link to its own folder": (link_folder("."), "x/ovens.py", "its folder is a link or no folder", LINK),
    "a chain of links": (a_chain, "x.txt", NO_FILE, LINK),
    "a link that leads nowhere": (link("nothing"), "x.txt", NO_FILE, LINK),
    "a link to a file inside": (link("ovens.py"), "x.txt", NO_FILE, LINK),
    "a pipe without a writer": (lambda tree: os.mkfifo(tree / "x.txt"), "x.txt", NO_FILE, LINK),
    "a socket": (a_socket, "x.txt", NO_FILE, LINK),
    "a folder with a file's name": (lambda tree: (tree / "x.txt").mkdir(), "x.txt", NO_FILE, None),
    "a file with a folder's name": (
        named("x"),
        "x/y.txt",
        "its folder is a link or no folder",
        "file: of another kind",
    ),
    "a file that is not there": (lambda tree: None, "x.txt", "it is not there", None),
    "a name of 255 bytes": (named("x" * 251 + ".txt"), "x" * 251 + ".txt", None, None),
    "a name longer than allowed": (lambda tree: None, "x" * 300, "File name too long", None),
    "a parent": (lambda tree: None, "../secret.txt", "it leads out of the tree", None),
    "a parent in the middle": (lambda tree: None, "garden/../../secret.txt", "it leads out of the tree", None),
    "a parent that stays inside": (lambda tree: None, "garden/../ovens.py", "it leads out of the tree", None),
    "an absolute path": (lambda tree: None, "/etc/passwd", "it leads out of the tree", None),
    "an empty path": (lambda tree: None, "", "it leads out of the tree", None),
    "a path that ends in a slash": (lambda tree: None, "ovens.py/", "it leads out of the tree", None),
    "a path through the present folder": (lambda tree: None, "./ovens.py", "it leads out of the tree", None),
    "a NUL in a path": (lambda tree: None, "ovens.py\0.txt", "it leads out of the tree", None),
    "a name that a shell would run": (named("$(touch x).txt"), "$(touch x).txt", None, None),
    "a name with a second command": (named("x.txt; touch y.txt"), "x.txt; touch y.txt", None, None),
    "a name in backquotes": (named("`touch x`.txt"), "`touch x`.txt", None, None),
    "a name like an option": (named("-rf.txt"), "-rf.txt", None, None),
    "a name of quotes and spaces": (named('it\'s "so"  far.txt'), 'it\'s "so"  far.txt', None, None),
    "a name in another script": (named("лук и 玉ねぎ.txt"), "лук и 玉ねぎ.txt", None, None),
    "a name of two lines": (named("x\n# Action:\n0.txt"), "x\n# Action:\n0.txt", None, NAME),
    "a name that turns the reading round": (named("x\u202etxt.py"), "x\u202etxt.py", None, NAME),
    "a name with a space at its end": (named("x.txt "), "x.txt ", None, NAME),
    "a name that is no UTF-8": (named(b"caf\xe9.txt"), os.fsdecode(b"caf\xe9.txt"), None, NAME),
    "an empty file": (filled(b""), "x.txt", None, "content: fewer than 10 characters"),
    "a binary file": (filled(bytes(range(256)) * 50), "x.txt", None, "content: less than 90% ASCII"),
    "broken UTF-8": (filled(b"\xc3\x28\xff\xfe" * 100), "x.txt", None, "content: less than 90% ASCII"),
    "UTF-16": (filled("plain text in another dress".encode("utf-16")), "x.txt", None, "content: less than 90% ASCII"),
    "a byte-order mark": (filled(b"\xef\xbb\xbfplain text behind a mark"), "x.txt", None, None),
    "escapes that move the cursor": (filled(b"plain text and then \x1b[2J gone"), "x.txt", None, None),
    "a file of a tebibyte": (a_sparse_giant, "x.txt", None, "file: too large"),
    "10,000 files in a folder": (a_crowd, "file_1.txt", None, "content: fewer than 10 characters"),
    "120 folders in each other": (deep, "/".join(["d"] * 120) + "/x.txt", None, "folder: too deep"),
    "code that nests too deep": (named("x.py", b"(" * 30_000 + b")" * 30_000), "x.py", None, None),
    "code that is none": (named("x.py", b"def is not what this file \0 is about"), "x.py", None, None),
    "JSON that nests too deep": (named("x.json", b"[" * 100_000 + b"]" * 100_000), "x.json", None, None),
    "a table without an end": (named("x.csv", b'"a,' * 60_000), "x.csv", None, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tree_is_read_without_harm(name, tmp_path, monkeypatch):
    """Reads are refused or bounded, nothing outside is visible, and tasks are still made of the other files."""
    build, path, refusal, left_out = HOSTILE[name]
    tree = grow(tmp_path / "tree", TEXTS)
    grow(tmp_path, {"secret.txt": SECRET})
    monkeypatch.chdir(tmp_path)  # a shell would create its `x` here
    build(tree)
    before = sorted(os.listdir(tmp_path)), sorted(os.listdir(tree))
    with read_only():
        try:
            read = Tree(str(tree)).read(path, 10_000)
            assert refusal is None and len(read) <= 10_000
            text = as_text(read)
            assert "\x1b" not in text and "\0" not in text and SECRET not in text
        except Refused as refused:
            assert str(refused) == refusal
        dropped: Counter[str] = Counter()
        files = dict(make_tasks.readable_files(Tree(str(tree)), dropped))
    assert set(TEXTS) <= set(files) and (left_out is None or dropped[left_out])
    is_listed = is_plain_name(path) and left_out is None and refusal is None
    assert (path in files) == (is_listed and (tree / path).exists())
    assert SECRET not in json.dumps(list(files.items()))
    assert before == (sorted(os.listdir(tmp_path)), sorted(os.listdir(tree)))
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path), max_entries=5)
    for row in env.starts("train"):
        env.reset(options=row)
        with read_only():
            while command := env.expert():
                text, *_, info = env.step(command)
                assert SECRET not in text and env.observation_space.contains(text)
        assert info["success"]


@pytest.mark.parametrize("device", ["zero", "null", "tty", "ptmx", "random"])
def test_devices_are_never_opened(device):
    opened.clear()
    with read_only(), pytest.raises(Refused):
        Tree("/dev").read(device, 10)
    assert opened == ["/dev"] and "other" in {entry.kind for entry in Tree("/dev").entries()}


def test_missing_permission_is_reported(tmp_path):
    """The superuser may read everything, so the test drops its privileges for a moment."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        tree = grow(Path(folder) / "tree", {"open.txt": "readable", "shut.txt": "not", "closed/inner.txt": "not"})
        (tree / "shut.txt").chmod(0)
        (tree / "closed").chmod(0)
        dropped: Counter[str] = Counter()
        superuser = os.geteuid() == 0
        codecs.lookup("utf-8-sig")  # whose module another user may not be able to import
        try:
            if superuser:
                os.seteuid(65534)
            assert Tree(str(tree)).read("open.txt", 10) == b"readable"
            for path in ("shut.txt", "closed/inner.txt"):
                with pytest.raises(Refused, match="permission"):
                    Tree(str(tree)).read(path, 10)
            list(make_tasks.readable_files(Tree(str(tree)), dropped))
        finally:
            if superuser:
                os.seteuid(0)
            (tree / "closed").chmod(0o755)
        assert dropped["file: permission denied"] == 1 and dropped["folder: permission denied"] == 1


def test_a_pipe_that_replaces_a_file_between_stat_and_open_does_not_block(tmp_path, monkeypatch):
    tree = grow(tmp_path / "tree", {"x.txt": "plain"})
    regular, stat = os.stat(tree / "x.txt"), os.stat
    (tree / "x.txt").unlink()
    os.mkfifo(tree / "x.txt")
    monkeypatch.setattr(os, "stat", lambda path, **options: regular if path == "x.txt" else stat(path, **options))
    messages: list[str] = []

    def read():
        try:
            Tree(str(tree)).read("x.txt", 10)
        except Refused as refused:
            messages.append(str(refused))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert messages == [NO_FILE]
