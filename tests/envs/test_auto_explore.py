"""AutoExplore: nothing leads out of the tree or changes it, costs add up, the oracle wins, tasks never cross splits."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import ROOT, environment
from helpers.processes import PATIENCE
from helpers.servers import Handler

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from datasets_prep.text_envs import make_tasks  # noqa: E402
from lightrlhf.cli.errors import UsageError  # noqa: E402
from lightrlhf.envs import make_env  # noqa: E402
from lightrlhf.envs.tree import Refused, Tree, as_text, is_plain_name  # noqa: E402

SECRET = "the moon is a harsh mistress"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = (
    "os.chdir",
    "os.exec",
    "os.fork",
    "os.system",
    "os.posix_spawn",
    "subprocess.",
    "shutil.",
    "pty.",
    "socket.",
)
FORBIDDEN += ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
watched: list[str] | None = None
opened: list[str] = []


def _audit(event: str, arguments: tuple) -> None:
    """Python tells of every file opened and every process started; an audit hook cannot be taken off again."""
    if watched is not None and event.startswith(FORBIDDEN):
        watched.append(event)
    if watched is not None and event == "open":
        opened.append(str(arguments[0]))
        if arguments[2] & WRITING:
            watched.append(f"write {arguments[0]}")


sys.addaudithook(_audit)


@contextmanager
def nothing_but_reading():
    """Fails when what runs inside starts a process, writes, or moves."""
    global watched
    watched, here = [], os.getcwd()
    try:
        yield
        assert watched == [] and os.getcwd() == here
    finally:
        watched = None


def grow(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write files below a folder."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


TEXTS = {  # two or three files at each depth, each with an answer of its own
    "ovens.py": '"""Heat of the ovens in the large bakery hall."""\n\ndef bake_bread(minutes): ...\n',
    "rolls.md": "# How the morning rolls are shaped by hand\n\nSlowly.\n",
    "prices.csv": "article,price,season,baker\nroll,0.5,all,Ada\n",
    "garden/roses.py": '"""Which roses are cut in which weeks of spring."""\n\nclass RoseCutter:\n    pass\n',
    "garden/soil.txt": "What the soil of the garden beds wants\n====\nCompost.\n",
    "garden/tools.json": '[{"tool": "spade", "weight": 2, "handle": "ash"}]',
    "garden/pond/fish.py": '"""Names of all the fish that live in the pond."""\n\ndef feed_fish(name): ...\n',
    "garden/pond/frogs.md": "## When the frogs begin their evening song\n\nLate.\n",
    "garden/pond/depth.go": "package pond\n\nfunc MeasureDepth() int { return 3 }\n",
}


def tasks_of(folder: Path, *flags: str) -> str:
    make_tasks.main(["--repo_dir", str(folder / "tree"), "--destination_dir", str(folder / "tasks"), *flags])
    return str(folder / "tasks")


@pytest.fixture(scope="module")
def explored(tmp_path_factory):
    """A folder with a small tree, a secret beside it, and the tasks."""
    folder = tmp_path_factory.mktemp("explore")
    grow(folder / "tree", TEXTS)
    grow(folder, {"secret.txt": SECRET})
    return folder, tasks_of(folder)


@pytest.fixture
def env(explored):
    return make_env("auto_explore", task_dir=explored[1])


def started(env, target: str, **options):
    """The environment at the start of a task with this answer."""
    rows = [row for split in ("train", "validation", "test") for row in env.starts(split)]
    text, info = env.reset(seed=0, options=next(row for row in rows if row["targets"] == [target]) | options)
    return text, info


# --------------------------------------------------------------------------------------------------- a hostile tree
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
    (folder / "x.txt").write_text("far down there is a text nobody reads")


NO_FILE = "it is no plain file"
LINK = "file: a link, device, pipe or socket"
NAME = "name: characters that cannot be shown"
HOSTILE = {  # what is put into the tree, the path that is read, how reading is refused (None: read), why it is left out
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


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tree_is_read_without_harm(case, tmp_path, monkeypatch):
    """Reading is refused or bounded, nothing of the outside shows, and tasks are made of the rest all the same."""
    build, path, refusal, left_out = HOSTILE[case]
    tree = grow(tmp_path / "tree", TEXTS)
    grow(tmp_path, {"secret.txt": SECRET})
    monkeypatch.chdir(tmp_path)  # where a started shell would leave its `x`
    build(tree)
    before = sorted(os.listdir(tmp_path)), sorted(os.listdir(tree))
    with nothing_but_reading():
        try:
            read = Tree(str(tree)).read(path, 10_000)
            assert refusal is None and len(read) <= 10_000
            text = as_text(read)
            assert "\x1b" not in text and "\0" not in text and SECRET not in text
        except Refused as refused:
            assert str(refused) == refusal
        dropped: Counter[str] = Counter()
        found = dict(make_tasks.readable_files(Tree(str(tree)), dropped))
    assert set(TEXTS) <= set(found) and (left_out is None or dropped[left_out])
    shown_name = is_plain_name(path) and (left_out is None) and refusal is None
    assert (path in found) == (shown_name and (tree / path).exists())
    assert SECRET not in json.dumps(list(found.items())) and before == (
        sorted(os.listdir(tmp_path)),
        sorted(os.listdir(tree)),
    )
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path), max_entries=5)
    for row in env.starts("train"):
        env.reset(options=row)
        with nothing_but_reading():
            while command := env.expert():
                text, *_, info = env.step(command)
                assert SECRET not in text and env.observation_space.contains(text)
        assert info["success"]


@pytest.mark.parametrize("device", ["zero", "null", "tty", "ptmx", "random"])
def test_devices_are_never_opened(device):
    opened.clear()
    with nothing_but_reading(), pytest.raises(Refused, match=f"{NO_FILE}|it is not there"):
        Tree("/dev").read(device, 10)
    assert opened == ["/dev"] and "other" in {entry.kind for entry in Tree("/dev").entries()}


def test_without_permission_a_file_and_a_folder_are_told_so(tmp_path):
    """The superuser may read everything, so the test lays its powers down for a moment."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        tree = grow(Path(folder) / "tree", {"open.txt": "readable", "shut.txt": "not", "closed/inner.txt": "not"})
        (tree / "shut.txt").chmod(0)
        (tree / "closed").chmod(0)
        dropped: Counter[str] = Counter()
        superuser = os.geteuid() == 0
        try:
            if superuser:
                os.seteuid(65534)
            assert Tree(str(tree)).read("open.txt", 10) == b"readable"
            for path in ("shut.txt", "closed/inner.txt"):
                with pytest.raises(Refused, match="permission denied"):
                    Tree(str(tree)).read(path, 10)
            list(make_tasks.readable_files(Tree(str(tree)), dropped))
        finally:
            if superuser:
                os.seteuid(0)
            (tree / "closed").chmod(0o755)
        assert dropped["file: permission denied"] == 1 and dropped["folder: permission denied"] == 1


def test_a_pipe_that_takes_a_files_place_between_two_looks_does_not_block(tmp_path, monkeypatch):
    tree = grow(tmp_path / "tree", {"x.txt": "plain"})
    plain, look = os.stat(tree / "x.txt"), os.stat
    (tree / "x.txt").unlink()
    os.mkfifo(tree / "x.txt")
    monkeypatch.setattr(os, "stat", lambda path, **how: plain if path == "x.txt" else look(path, **how))
    done: list[str] = []

    def read():
        try:
            Tree(str(tree)).read("x.txt", 10)
        except Refused as refused:
            done.append(str(refused))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert done == [NO_FILE]


CHANGES = {  # what happens to garden/roses.py after the episode began, and what `cat` then says
    "it vanishes": (lambda garden: (garden / "roses.py").unlink(), "it is not there"),
    "its folder vanishes": (lambda garden: garden.rename(garden.parent.parent / "away"), "it is not there"),
    "it becomes a link outside": (lambda garden: swap(garden / "roses.py", "../../secret.txt"), NO_FILE),
    "its folder becomes a link": (lambda garden: swap_folder(garden), "its folder is a link or no folder"),
    "it becomes a folder": (lambda garden: [(garden / "roses.py").unlink(), (garden / "roses.py").mkdir()], NO_FILE),
    "it becomes a pipe": (lambda garden: [(garden / "roses.py").unlink(), os.mkfifo(garden / "roses.py")], NO_FILE),
    "it becomes empty": (lambda garden: (garden / "roses.py").write_text(""), "It is empty."),
    "it becomes binary": (lambda garden: (garden / "roses.py").write_bytes(b"\0\x1b\xff" * 99), "�"),
    "it grows": (lambda garden: (garden / "roses.py").write_text("thorns " * 10**6), "thorns"),
}


def swap(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def swap_folder(garden: Path) -> None:
    outside = garden.parent.parent / "outside"
    grow(outside, {"roses.py": SECRET})
    garden.rename(garden.parent.parent / "away")
    garden.symlink_to(outside)


@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_that_changes_during_the_episode(change, tmp_path):
    grow(tmp_path / "tree", TEXTS)
    grow(tmp_path, {"secret.txt": SECRET})
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path))
    started(env, "garden/roses.py")
    env.step("cd garden")
    alter, said = CHANGES[change]
    alter(tmp_path / "tree" / "garden")
    grow(tmp_path / "tree", {"new.txt": SECRET})
    with nothing_but_reading():
        text, reward, *_, info = env.step("cat roses.py")
        assert said in text and SECRET not in text and len(text) < 1000
        assert info["invalid"] == text.count("Error.") == (said.startswith("it")) and reward == -1 - 2 * info["invalid"]
        text, *_ = env.step("cd ..")
        assert "new.txt" not in text  # what nobody listed does not exist
        env.step("cd garden")
        *_, info = env.step("id roses.py")
    assert info["success"]


COMMANDS = ["cat ../secret.txt", "cat /etc/passwd", "cat garden/roses.py", "cat ./ovens.py", "cat ovens.py;ls", "cat"]
COMMANDS += ["cat ovens.py secret.txt", "cat *", "cat $(ls)", "cat 'ovens.py'", "cat ovens.py\0", "cat ~", "cat garden"]
COMMANDS += [
    "cd /",
    "cd ../..",
    "cd garden/..",
    "cd .",
    "cd",
    "cd garden/pond",
    "cd ~",
    "cd ovens.py",
    "cd -",
    "cd  ..",
]
COMMANDS += [
    "id",
    "id garden",
    "id ../secret.txt",
    "ls",
    "exit",
    "head ovens.py",
    "rm ovens.py",
    "python -c 1",
    "",
    " ",
]
COMMANDS += [
    "CAT ovens.py",
    "x" * 100_000,
    "cat " + "x" * 100_000,
    "\n\n",
    "cat ovens.py\ncat rolls.md",
    "\ud800",
    "é🌍",
]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_that_cannot_be_done_costs_more_and_does_nothing(command, env):
    before, _ = started(env, "garden/roses.py")
    with nothing_but_reading():
        text, reward, terminated, truncated, info = env.step(command)
    assert (reward, info["cost"], info["invalid"]) == (-3.0, 3.0, True) and not terminated and not truncated
    assert text.startswith(before) and SECRET not in text and len(text) < len(before) + 300
    assert env.observation_space.contains(text) and len(info["history"]) == 1
    text.encode()


def test_the_lists_of_a_tampered_task_folder_are_refused(explored, tmp_path):
    stored = json.loads(Path(explored[1], "tree.json").read_text())
    cases = ["../secret.txt", "/etc/passwd", "a//b", "", ".", "garden/../ovens.py", "x\ny.txt", "x\0.txt", 3, None]
    for file in cases:
        grow(tmp_path, {"tree.json": json.dumps(stored | {"files": [file]})})
        with pytest.raises(UsageError, match=r"tree\.json"):
            make_env("auto_explore", task_dir=str(tmp_path))
    for content in ("", "{", "[]", "{}", '{"repo_dir": "."}', b"\xff"):
        grow(tmp_path, {"tree.json": content})
        with pytest.raises(UsageError, match=r"tree\.json"):
            make_env("auto_explore", task_dir=str(tmp_path))


# ------------------------------------------------------------------------------------------------------------ episodes
def test_costs_add_up(env):
    started(env, "garden/roses.py", horizon=10)
    rewards = [
        env.step(command)[1] for command in ("cd ..", "cd garden", "cat soil.txt", "cat soil.txt", "cat roses.py")
    ]
    assert rewards == [-2, -1, -1, -2, -1]  # leaving the root and reading again are warned of
    text, reward, terminated, truncated, info = env.step("id roses.py")
    assert (reward, terminated, truncated, info["success"], info["cost"]) == (9, True, False, True, -2)
    assert "Right." in text and info["admissible"] == [] and env.expert() is None and env.reflection() == ""
    with pytest.raises(RuntimeError, match="reset"):
        env.step("cd ..")
    started(env, "garden/roses.py", horizon=10)
    text, reward, terminated, truncated, info = env.step("id ovens.py")
    assert (reward, terminated, info["success"], info["cost"]) == (-11, True, False, 11) and "Wrong." in text


def test_the_horizon_cuts_and_costs_as_much_as_a_wrong_file(env):
    started(env, "ovens.py", horizon=3)
    assert [env.step("cat rolls.md")[3] for _ in range(2)] == [False, False]
    assert env.expert() == "id ovens.py"  # no step is left for reading it
    _, reward, terminated, truncated, info = env.step("cat prices.csv")
    assert (reward, terminated, truncated, info["success"]) == (-4, False, True, False)


def test_what_is_offered_can_be_done_and_is_in_a_fixed_order(env):
    _, info = started(env, "garden/roses.py")
    assert info["admissible"] == ["cd garden", *(f"cat {n}" for n in FILES), *(f"id {n}" for n in FILES)]
    assert (
        info["action_mask"].tolist() == [True] * 7 + [False] * 36 and info["level"] == 1 and info["task"].endswith("?")
    )
    text, *_, info = env.step("cat ovens.py")
    assert "cat ovens.py" not in info["admissible"] and "ovens.py (read)" in text
    assert text.endswith("Last: cat ovens.py\n" + TEXTS["ovens.py"])
    assert info["history"] == [("cat ovens.py", "Read.")] and not info["invalid"]
    *_, info = env.step("cd garden")
    assert info["admissible"][:2] == ["cd ..", "cd pond"]


FILES = ["ovens.py", "prices.csv", "rolls.md"]


def test_language_models_may_also_list_look_at_both_ends_and_give_up(explored):
    env = make_env("auto_explore", task_dir=explored[1], discretize_actions=False)
    assert "`tail NAME`" in env.instructions
    text, info = started(env, "garden/roses.py")
    assert {"ls", "exit", "head ovens.py", "tail ovens.py"} <= set(info["admissible"])
    text, reward, *_ = env.step("ls")
    assert text.endswith("Last: ls\ngarden/\novens.py\nprices.csv\nrolls.md") and reward == -1
    long = "".join(f"line {number}\n" for number in range(200_000))
    original = (explored[0] / "tree" / "rolls.md").read_text()
    try:
        (explored[0] / "tree" / "rolls.md").write_text(long)
        head, tail = env.step("head rolls.md")[0], env.step("tail rolls.md")[0]
    finally:
        (explored[0] / "tree" / "rolls.md").write_text(original)
    assert head.endswith("line 8\nline 9") and "line 10" not in head
    assert tail.endswith("line 199998\nline 199999") and "line 199989" not in tail
    _, reward, terminated, _, info = env.step("exit")
    assert terminated and reward == -16 and not info["success"]


def test_the_oracle_names_every_file_by_a_shortest_way(env):
    lengths = {}
    for split in ("train", "validation", "test"):
        for row in env.starts(split):
            env.reset(options=row)
            while command := env.expert():
                assert env.reflection(command) == "" and command in env.reflection()
                *_, info = env.step(command)
            assert info["success"] and info["cost"] == len(info["history"]) - 15
            lengths[row["targets"][0]] = [command for command, _ in info["history"]]
    assert lengths["garden/pond/fish.py"] == ["cd garden", "cd pond", "cat fish.py", "id fish.py"]
    assert {len(way) - row.count("/") for row, way in lengths.items()} == {2}


def test_reflections_say_what_is_wrong_and_what_to_do(env):
    started(env, "garden/roses.py")
    assert env.reflection("cat ovens.py") == (
        "Not cat ovens.py: ovens.py does not answer the question. The answer is below garden. Instead: cd garden."
    )
    assert "the search would end" in env.reflection("id rolls.md")
    assert "this is the root" in env.reflection("cd ..") and "cannot be done" in env.reflection("rm -rf")
    env.step("cd garden")
    assert "not below pond" in env.reflection("cd pond") and "leads away" in env.reflection("cd ..")
    assert env.reflection("id roses.py") == ""  # bold, but right
    env.step("cd pond")
    assert env.reflection() == "The answer is not below /garden/pond. Next: cd ..."
    env.step("cat fish.py")
    assert env.reflection().startswith("fish.py does not answer the question. ")
    env.step("cd ..")
    env.step("cat roses.py")
    assert env.reflection() == "roses.py answers the question. Next: id roses.py."
    assert "it was read already" in env.reflection("cat roses.py")


def test_the_first_step_alone(env):
    for command, reward, success in (("cd garden", 14, True), ("cat ovens.py", -16, False), ("nonsense", -18, False)):
        started(env, "garden/roses.py", first_step=True)
        _, got, terminated, _, info = env.step(command)
        assert (got, terminated, info["success"]) == (reward, True, success)


def test_leaving_out_hides_what_is_off_the_way_and_nothing_else(explored):
    env = make_env("auto_explore", task_dir=explored[1], leaveout_prob=1.0)
    _, info = started(env, "garden/pond/fish.py")
    assert info["admissible"] == ["cd garden"]
    assert started(env, "garden/pond/fish.py", leaveout_prob=0.0)[1]["admissible"] != ["cd garden"]
    half = make_env("auto_explore", task_dir=explored[1], leaveout_prob=0.5)
    row = half.starts("train", 2)[0]
    seen = {half.reset(seed=seed, options=row)[0] for seed in range(30)}
    assert len(seen) == 8  # three files of the root come and go
    assert "There is no file 'ovens.py'" in [started(env, "garden/pond/fish.py"), env.step("cat ovens.py")][1][0]


def test_a_large_folder_shows_a_fixed_choice_with_the_answer_among_it(tmp_path):
    grow(tmp_path / "tree", TEXTS | {f"other_{n}.txt": f"nothing of use is here, number {n}" for n in range(500)})
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path), max_entries=10)
    _, info = started(env, "ovens.py")
    names = [command[3:] for command in info["admissible"] if command.startswith("id ")]
    assert len(info["admissible"]) <= 20 and len(names) >= 9 and "ovens.py" in names and names == sorted(names)
    env.reset(seed=99)
    assert started(env, "ovens.py")[1]["admissible"] == info["admissible"]
    assert started(env, "rolls.md")[1]["admissible"] != info["admissible"]


def test_gymnasiums_own_checker_accepts_it(env):
    from gymnasium.utils.env_checker import check_env

    check_env(env, skip_render_check=True)


EPISODES = """
import random
from lightrlhf.envs import make_env
env, rng = make_env("auto_explore", task_dir={!r}, leaveout_prob=0.5), random.Random(1)
for seed in range(5):
    text, info = env.reset(seed=seed)
    while info["admissible"]:
        print(text, info, env.reflection(), env.reflection("cat ovens.py"))
        text, *_, info = env.step(rng.choice(info["admissible"]))
"""


def test_equal_seeds_and_actions_give_equal_episodes_in_any_process(explored, capsys):
    code = EPISODES.format(explored[1])
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment() | {"PYTHONHASHSEED": "1"}, cwd=ROOT,
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    ).stdout  # fmt: skip
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out == other and len(other) > 1000


def test_a_copy_goes_on_as_the_original_does(env):
    env.reset(seed=3)
    other = copy.deepcopy(env)
    assert env.step("cd ..")[:2] == other.step("cd ..")[:2] and env.reset()[0] == other.reset()[0]


@pytest.mark.parametrize("kind", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_many_at_once_by_gymnasiums_vector(kind, explored):
    options = {"context": "forkserver", "shared_memory": False} if kind == "AsyncVectorEnv" else {}
    task_dir = explored[1]
    many = getattr(gymnasium.vector, kind)([lambda: make_env("auto_explore", task_dir=task_dir)] * 2, **options)
    try:
        texts, infos = many.reset(seed=7)
        alone = make_env("auto_explore", task_dir=task_dir)
        assert list(texts) == [alone.reset(seed=seed)[0] for seed in (7, 8)]
        texts, rewards, *_ = many.step(["cat ovens.py", "cd .."])
        assert rewards.tolist() == [-1, -2] and "ovens.py (read)" in texts[0]
    finally:
        many.close()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"task_dir": "nowhere"}, "holds no tree.json; make it by python -m datasets_prep.text_envs.make_tasks"),
        ({"repo_dir": "nowhere"}, "repo_dir nowhere is no folder"),
        ({"horizon": 0}, "horizon 0 must be at least 1"),
        ({"leaveout_prob": 2}, "leaveout_prob 2 must lie in"),
        ({"max_entries": 0}, "max_entries 0 must be from 1 to 100"),
        ({"output_limit": -1}, "output_limit -1 must be from 0"),
        ({"error_cost": -1}, "error_cost -1 and warning_cost 1.0 must be at least 0"),
        ({"split": "dev"}, "split dev must be one of train, validation, test"),
        ({"level": 7}, "has no task of level 7 in its split train"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, line, explored):
    with pytest.raises(UsageError) as told:
        make_env("auto_explore", **({"task_dir": explored[1]} | options))
    assert line in str(told.value) and "\n" not in str(told.value)


def test_a_task_whose_answer_is_not_in_the_tree_is_refused(env):
    with pytest.raises(ValueError, match="no file of the tree answers"):
        env.reset(options={"task": "Where?", "targets": ["../secret.txt"], "level": 0})


# --------------------------------------------------------------------------------------------------------------- tasks
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


def test_names_that_are_not_the_projects_own_are_left_out():
    left_out = [
        ".git",
        "_private.py",
        "LICENSE",
        "license.txt",
        "tests",
        "Examples",
        "CHANGELOG.md",
        "node_modules",
        "",
    ]
    assert all(make_tasks.unwanted_name(name) for name in left_out)
    assert not any(make_tasks.unwanted_name(name) for name in ("main.py", "docs", "testament.txt", "licensing.py"))


def test_questions_that_are_no_good_are_left_out():
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


class Asker(Handler):
    """Writes two questions about each file, one of them no good; refuses after `server.stops_after` files."""

    def do_GET(self) -> None:
        self.send(200, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        path = asked.split("Below is the file ")[1].split(" of a source")[0]
        self.server.asked[path] += 1
        if len(self.server.asked) > self.server.stops_after:
            return self.send(401, {"error": "no more"})
        name = path.split("/")[-1]
        good, bad = f"Where is the matter of {path[0]} and {name[:-3]} settled now?", f"What is {name} for?"
        text = f'Here they are:\n1. "{good}"\n- {bad}'
        self.send(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def test_a_model_at_a_server_writes_the_questions_and_is_asked_once_a_file(tmp_path):
    a_library(tmp_path / "tree", 12)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Asker)
    server.asked, server.stops_after = Counter(), 5
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    flags = ["--base_url", f"http://127.0.0.1:{server.server_address[1]}/v1", "--task_model", "m", "--max_workers", "1"]
    try:
        with pytest.raises(SystemExit) as stopped:
            tasks_of(tmp_path, *flags)
        assert stopped.value.code == 1 and not (tmp_path / "tasks" / "tree.json").exists()
        paid = len((tmp_path / "tasks" / "replies.jsonl").read_text().splitlines())
        server.stops_after = 100
        rows = rows_of(tasks_of(tmp_path, *flags))
    finally:
        server.shutdown()
        server.server_close()
    assert paid > 0 and sum(server.asked.values()) <= 12 + 4  # those under way when it stopped are asked again
    tasks = [row for split in rows for row in rows[split]]
    assert len(tasks) == 12 and all(row["kind"] == "model" for row in tasks)
    assert all(row["task"].startswith("Where is the matter") for row in tasks)  # the others name their file


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--repo_dir", "nowhere"], "--repo_dir nowhere is no folder; name the root of a source tree"),
        (["--task_model", "m"], "--base_url and --task_model belong together"),
        (["--base_url", "localhost"], "--base_url localhost is not an address"),
        (["--tasks_per_file", "0"], "--tasks_per_file 0 must be at least 1"),
        (["--num_samples", "2"], "--num_samples 2 must be at least 3"),
        (["--destination_dir", "/dev/null/tasks"], "--destination_dir /dev/null/tasks cannot be written"),
        (["--repo_dir", "empty"], "no question came of its 0 files; nothing was left out"),
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
