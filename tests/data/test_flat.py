"""Flat rows: what is written comes back as it was, views read the rows they name, and damage is one line."""

import os
import pickle
import resource
import signal
import subprocess
import sys

import pytest
import torch
from helpers import environment
from helpers.errors import error_naming
from helpers.flat import made, plain, write

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.flat import View, chained, share_columns
from lightrlhf.data.packing import CHUNK, FlatWriter, pack
from lightrlhf.data.plain_json import decode, encode
from lightrlhf.data.schema import FIELDS, IGNORE_INDEX
from lightrlhf.data.splits import read_rows


@pytest.mark.parametrize("stage", FIELDS)
@pytest.mark.parametrize("count", [1, 37, CHUNK, 2 * CHUNK + 1])
def test_rows_come_back_as_they_were(stage, count, tmp_path):
    rows = made(stage, count)
    stored = write(tmp_path / "split.pt", stage, rows)
    assert len(stored) == count and plain(stored.to_list()) == plain(rows)
    packed = pack(rows, stage)
    assert plain(packed.to_list()) == plain(rows) and packed.digest() == stored.digest()
    assert packed.facts() == stored.facts()
    texts = [row[name] for row in rows for name in stored.texts]
    assert stored.facts()[:2] == (min(int(one.min()) for one in texts), max(int(one.max()) for one in texts))
    for name in stored.texts:
        assert stored.column(name).tolist() == [len(row[name]) for row in rows]
    if stage == "finetune":
        counted = sum(int((row["targets"][1:] != IGNORE_INDEX).sum()) for row in rows)
        assert stored.facts().counted == packed.facts().counted == counted
    if stage == "preference":
        equal = [row["chosen_input_ids"].tolist() == row["rejected_input_ids"].tolist() for row in rows]
        longest = torch.stack([stored.column(name) for name in stored.texts]).amax(0)
        assert (stored.column("differ_at") >= longest).tolist() == equal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split.pt"]


def test_views_read_the_rows_that_they_name(tmp_path):
    one, two = (made("preference", count, seed=count) for count in (50, 9))
    parts = [write(tmp_path / "one.pt", "preference", one), pack(two, "preference")]
    whole, listed = chained(parts), one + two
    assert plain(list(whole)) == plain(listed)
    for cut in (slice(3, 55), slice(None, None, -7), slice(60, 70), slice(-4, None)):
        assert plain(whole[cut].to_list()) == plain(listed[cut])
    chosen = torch.tensor([55, 0, 49, 50, 55])
    view = whole.select(chosen)[1:]
    assert plain(view.to_list()) == plain([listed[i] for i in chosen[1:]])
    assert view.column("prompt_len").tolist() == [listed[i]["prompt_len"] for i in chosen[1:]]
    assert plain(whole[-1]) == plain(listed[-1])
    with pytest.raises(IndexError):
        whole[59]
    scores, lengths = torch.arange(59).double() / 3, torch.full((59,), 2)
    cut = View([whole], change=lambda row: {**row, "chosen_input_ids": row["chosen_input_ids"][:2]}, key="cut",
               columns={"score": scores, "chosen_input_ids": lengths})  # fmt: skip
    assert cut[52:].to_list()[1]["score"] == 53 / 3 and len(cut[53]["chosen_input_ids"]) == 2
    assert cut[52:].column("chosen_input_ids").tolist() == [2] * 7 and len(cut[53]["rejected_input_ids"]) > 2
    views = (whole, whole[:50], whole[::-1], cut, chained(parts[::-1]))
    assert len({one.digest() for one in views}) == len(views)


def test_columns_are_shared_by_all_sets(tmp_path):
    one, two = made("prompts", 4), [{**row, "columns": {"other": 1}} for row in made("prompts", 2)]
    sets = [write(tmp_path / "one.pt", "prompts", one), pack(two, "prompts")]
    share_columns(sets)
    assert sets[0][0]["columns"] == dict.fromkeys(["answer", "number", "tests", "other"])
    assert sets[0][1]["columns"] == {**one[1]["columns"], "other": None} and sets[1][0]["columns"]["other"] == 1
    assert sets[0].facts().columns == {"answer": 0, "number": 2, "tests": 0}


@pytest.mark.parametrize("value", [
    {}, {"a": (1, (2, [3, ()]))}, {"a": {1: "x", None: 2, 2.5: ()}}, {"__python__": ["tuple", [1]]},
    {"a": [1e-300, 0.1, -0.0, float("inf"), 2**200, True, None]}, {"a": "\ud83d\ude00 \ud800 é\0\u2028"},
])  # fmt: skip
def test_plain_values_come_back_exactly(value):
    assert repr(decode(encode(value))) == repr(value)
    assert repr(decode(encode({"a": float("nan")}))) == repr({"a": float("nan")})


def test_a_bad_row_or_a_kill_leaves_the_earlier_file(tmp_path):
    path, rows = tmp_path / "finetune_train.pt", made("finetune", 3)
    write(path, "finetune", rows)
    before = path.read_bytes()
    bad = [*made("finetune", CHUNK), {**rows[0], "prompt_len": -1}]
    with error_naming(UsageError, str(path), f"row {CHUNK}"):
        write(path, "finetune", bad)
    with error_naming(UsageError, str(path), "row 1"):
        write(path, "finetune", [rows[0], {**rows[1], "columns": {"a": 2 + 0j}}])
    with pytest.raises(KeyboardInterrupt), FlatWriter(path, "finetune") as file:
        file.extend(rows)
        raise KeyboardInterrupt
    with error_naming(UsageError, str(path)):
        write(path, "finetune", [])
    (tmp_path / "file").touch()
    with error_naming(RunFailure, "file"):
        write(tmp_path / "file" / "split.pt", "finetune", rows)
    (tmp_path / "file").unlink()
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_full_disk_is_one_error_and_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "finetune_train.pt"
    write(path, "finetune", made("finetune", 3))
    before, rows = path.read_bytes(), made("finetune", 3 * CHUNK)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (1000, 100_000, 300_000):  # in a chunk, in a later one, and in the whole file
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with error_naming(RunFailure, str(path)):
                write(path, "finetune", rows)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == [path.name]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path, earlier, later = tmp_path / "finetune_train.pt", made("finetune", 3), made("finetune", 3000)
    write(path, "finetune", earlier)
    before, whole, status = path.read_bytes(), 0, 1
    for at in range(1, 40):
        child = os.fork()
        if child == 0:
            seen = iter(range(1, 1000))

            def kill(event, args, at=at, seen=seen):
                if event in EVENTS and ".partial" in str(args) and next(seen) == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(kill)
            write(path, "finetune", later)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        whole += path.read_bytes() == before
        assert len(read_rows(path, "finetune")) in (3, 3000)
    assert status == 0 and at > 12 and whole > 10 and len(read_rows(path, "finetune")) == 3000
    write(path, "finetune", earlier)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]  # what the killed ones left is gone


EVENTS = ("open", "os.mkdir", "os.rename", "os.replace", "os.remove", "os.rmdir", "shutil.rmtree")


DAMAGE = {
    "offsets backwards": lambda stored: stored["ragged"]["input_ids"][1].__setitem__(2, 0),
    "offsets beyond the values": lambda stored: stored["ragged"]["input_ids"][1].__setitem__(-1, 10**6),
    "offsets that begin late": lambda stored: stored["ragged"]["targets"][1].__setitem__(0, 2),
    "a negative span": lambda stored: stored["ragged"]["targets"][0].__setitem__(0, -3),
    "a span beyond its row": lambda stored: stored["ragged"]["targets"][0].__setitem__(-1, 99),
    "an empty span": lambda stored: stored["ragged"]["targets"][0].__setitem__(1, 0),
    "a prompt longer than its row": lambda stored: stored["numbers"]["prompt_len"].__setitem__(1, 99),
    "a negative prompt": lambda stored: stored["numbers"]["prompt_len"].__setitem__(1, -1),
    "fewer numbers": lambda stored: stored["numbers"].update(prompt_len=stored["numbers"]["prompt_len"][1:]),
    "ids of another type": lambda stored: stored["ragged"].update(
        input_ids=(stored["ragged"]["input_ids"][0].long(), stored["ragged"]["input_ids"][1])
    ),
    "one number for all": lambda stored: stored["numbers"].update(
        prompt_len=torch.zeros(1, dtype=torch.int32).expand(5)
    ),
    "no rows": lambda stored: stored["ragged"].update(input_ids=(torch.empty(0).int(), torch.zeros(1).long())),
    "no facts": lambda stored: stored.pop("facts"),
    "facts of another kind": lambda stored: stored["facts"].update(ids=3),
    "no ids": lambda stored: stored["ragged"].pop("input_ids"),
    "ragged is a list": lambda stored: stored.update(ragged=[]),
    "another layout": lambda stored: stored.update(layout=2),
    "another stage": lambda stored: stored.update(stage="preference"),
    "an id beyond the vocabulary": lambda stored: stored["facts"].update(ids=[0, 600]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind, tmp_path):
    path = tmp_path / "finetune_train.pt"
    write(path, "finetune", made("finetune", 5))
    stored = torch.load(path, weights_only=True)
    DAMAGE[kind](stored)
    torch.save(stored, path)
    with error_naming(UsageError, str(path), "prepare it again") as problem:
        read_rows(path, "finetune", vocab_size=500)
    assert "\n" not in str(problem.value)


def test_json_that_is_damaged_names_its_row(tmp_path):
    path = tmp_path / "prompts_train.pt"
    write(path, "prompts", made("prompts", 5))
    for text in (b"[", b"[]", b"{}", b'{"columns":3}', b"\xff"):
        stored = torch.load(path, weights_only=True)
        values, offsets = stored["ragged"]["rest"]
        begin, end = offsets[1:3].tolist()
        values[begin:end] = torch.tensor(list(text.ljust(end - begin)), dtype=torch.uint8)
        torch.save(stored, tmp_path / "damaged.pt")
        with error_naming(UsageError, "damaged.pt", "row 1"):
            read_rows(tmp_path / "damaged.pt", "prompts")[1]


def test_rows_travel_to_another_process_by_name(tmp_path):
    rows = write(tmp_path / "split.pt", "finetune", made("finetune", 3000))
    for one in (rows, rows[5:], chained([rows, rows])):
        sent = pickle.dumps(one)
        assert len(sent) < 30_000 and plain(pickle.loads(sent).to_list()) == plain(one.to_list())
    given = pack(made("finetune", 3), "finetune")
    assert plain(pickle.loads(pickle.dumps(given)).to_list()) == plain(given.to_list())


MEASURED = """
import sys, torch
from pathlib import Path
from lightrlhf.data.splits import read_rows
def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))  # KiB
before = private()
rows = read_rows(Path(sys.argv[1]), "finetune")
total = int(sum(row["input_ids"].sum() for row in rows))
print(total, flush=True)
input()  # until the other one has read them, too
print(private() - before, flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_processes_share_the_pages_of_a_file(tmp_path):
    path, size = tmp_path / "finetune_train.pt", 16_000_000
    ids = torch.arange(size, dtype=torch.int32).remainder(500).split(4000)
    write(path, "finetune", [{"prompt_len": 1, "input_ids": one, "targets": one} for one in ids])
    command = [sys.executable, "-c", MEASURED, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]

    def answers() -> list[int]:
        return [int(process.stdout.readline()) for process in both]

    assert answers() == [int(sum(one.sum() for one in ids))] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    private = answers()
    for process in both:
        process.communicate("\n")
    assert max(private) < 20_000, private  # KiB, of a file of 62 MiB that was read as a whole
