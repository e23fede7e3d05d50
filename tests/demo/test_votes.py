"""Votes: stored once per rater and pair, by several writers and across kills; tally and agreement."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import ROOT, environment
from helpers.errors import error_naming
from helpers.processes import PATIENCE, started
from helpers.votes import vote

from lightrlhf.cli.errors import UsageError
from lightrlhf.demo.session import next_index
from lightrlhf.demo.votes import agreement, append_vote, majority, read_votes, tally
from lightrlhf.maths.ops import wilson_interval


# ---------------------------------------------------------------------------------------------------------- the page
@pytest.mark.parametrize("responses, offered", [(["tea", "mate"], "A B tie skip"), (["tea", " tea\n"], "tie skip")])
def test_of_identical_answers_neither_can_be_voted_the_better_one(responses, offered):
    pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")
    from lightrlhf.demo.compare_tab import CAPTIONS, draw_pair

    _, _, *buttons = draw_pair({"prompt": "?", "responses": responses})
    found = [name for name, button in zip(CAPTIONS, buttons, strict=True) if button["interactive"]]
    assert found == offered.split()


# ---------------------------------------------------------------------------------------------------------- the file
def test_a_second_vote_on_a_pair_is_ignored(tmp_path):
    file = tmp_path / "new" / "votes.jsonl"
    assert append_vote(file, vote(verdict="A"))
    assert not append_vote(file, vote(verdict="B"))
    assert append_vote(file, vote(verdict="B", rater="grace"))
    assert [row["verdict"] for row in read_votes(file)] == ["A", "B"]


def test_a_withdrawn_vote_counts_no_more_and_may_be_cast_again(tmp_path):
    file = tmp_path / "votes.jsonl"
    assert not append_vote(file, vote(verdict="withdrawn")) and not read_votes(file)
    append_vote(file, vote(verdict="A"))
    append_vote(file, vote(verdict="A", rater="grace"))
    assert append_vote(file, vote(verdict="withdrawn")) and not append_vote(file, vote(verdict="withdrawn"))
    assert [row["rater"] for row in read_votes(file)] == ["grace"]
    assert append_vote(file, vote(verdict="B")) and not append_vote(file, vote(verdict="tie"))
    assert [(row["rater"], row["verdict"]) for row in read_votes(file)] == [("grace", "A"), ("ada", "B")]
    assert [json.loads(line)["verdict"] for line in file.read_text().splitlines()] == ["A", "A", "withdrawn", "B"]


@pytest.mark.slow
def test_threads_and_processes_append_complete_rows_once_each(tmp_path):
    file = tmp_path / "votes.jsonl"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from helpers.votes import vote
from lightrlhf.demo.votes import append_vote
print("ready", flush=True)
for number in range(30):
    append_vote({str(file)!r}, vote(number, rater="both", comment="x" * 3000))
"""
    with started([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with ThreadPoolExecutor(8) as pool:
            votes = [vote(n // 8, rater=("both", "here")[n // 8 % 2]) for n in range(240)]  # eight at once of each
            written = list(pool.map(lambda row: append_vote(file, row), votes))
        assert child.wait(PATIENCE) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({(row["rater"], row["prompt"]) for row in rows}) == len(rows) == 45
    assert 15 <= sum(written) <= 30 and {row["rater"] for row in rows} == {"both", "here"}


def test_an_incomplete_last_row_is_ignored_and_overwritten(tmp_path):
    file = tmp_path / "votes.jsonl"
    append_vote(file, vote(0))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    assert len(read_votes(file)) == 1
    append_vote(file, vote(1))
    assert file.read_bytes().startswith(whole) and [json.loads(line) for line in file.read_text().splitlines()]
    assert len(read_votes(file)) == 2


def test_a_whole_last_row_without_an_end_of_line_and_a_file_of_others_are_kept(tmp_path):
    file, notes = tmp_path / "votes.jsonl", tmp_path / "notes.txt"
    append_vote(file, vote(0))
    file.write_text(file.read_text().rstrip("\n"))  # as an editor leaves it
    append_vote(file, vote(1))
    assert [json.loads(line)["pair"] for line in file.read_text().splitlines()] == [vote(n)["pair"] for n in (0, 1)]
    notes.write_text("not a vote")
    with error_naming(UsageError, "vote"):
        append_vote(notes, vote(0))
    assert notes.read_text() == "not a vote"


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("{}", ["row 1", "pair"]),
        ("[]", ["row 1"]),
        (json.dumps(vote(verdict="C")), ["row 1", "tie"]),
        ("no\n{}", ["line 1"]),
    ],
)
def test_a_row_that_is_not_a_vote_is_named(tmp_path, line, facts):
    file = tmp_path / "votes.jsonl"
    file.write_text(line + "\n")
    with error_naming(UsageError, *facts):
        read_votes(file)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="votes.jsonl"):
        append_vote(tmp_path / "file" / "votes.jsonl", vote())
    assert read_votes(tmp_path / "none.jsonl") == []


# ---------------------------------------------------------------------------------------------------------- counting
def test_the_tally_counts_models_whatever_their_order(tmp_path):
    votes = [vote(0, "A"), vote(1, "A", swapped=True), vote(2, "B"), vote(3, "tie"), vote(4, "skip")]
    (row,) = tally(votes)
    assert (row["model"], row["against"]) == ("ppo", "sft")
    assert [row[name] for name in ("pairs", "votes", "wins", "ties", "losses")] == [4, 4, 2, 1, 1]
    assert row["win_rate"] == 2.5 / 4 and row["win_rate_interval"] == wilson_interval(2.5, 4)
    assert row["prefers_shown_first"] == 2 / 3


def test_a_pair_counts_once_whatever_its_number_of_raters():
    votes = [vote(0, "B", rater=name) for name in "abc"] + [vote(1, "A", rater="a")]
    (row,) = tally(votes)
    assert row["pairs"] == 2 and row["votes"] == 4 and row["win_rate"] == 0.5
    assert majority(votes[:3]) == 0 and majority(votes[3:]) == 1
    assert majority([vote(0, "A", rater="a"), vote(0, "B", rater="b")]) is None
    assert majority([vote(0, "A", rater="a"), vote(0, "A", swapped=True, rater="b")]) is None
    assert majority([vote(0, "B", rater="a"), vote(0, "tie", rater="b")]) == 0


def test_agreement_is_krippendorffs_alpha():
    """Two raters, binary values, 10 units: alpha is 0.095 in Krippendorff (2011, section A)."""
    verdicts = {"a": "0100000000", "b": "1110010010"}
    votes = [vote(n, "AB"[int(value)], rater=rater) for rater, row in verdicts.items() for n, value in enumerate(row)]
    found = agreement([*votes, vote(99, "A", rater="a"), vote(98, "skip"), vote(98, "skip", rater="b")])
    assert found["pairs"] == 10 and found["equal"] == pytest.approx(0.6)
    assert found["alpha"] == pytest.approx(0.095, abs=5e-4)


def test_alpha_is_one_if_all_agree_and_none_if_all_verdicts_are_equal():
    votes = [vote(n, verdict, rater=rater) for n, verdict in enumerate(["A", "B", "tie"]) for rater in "abc"]
    assert agreement(votes)["alpha"] == 1
    assert agreement([vote(0, "A", rater=rater) for rater in "ab"])["alpha"] is None
    assert agreement([vote(0)]) == {"pairs": 0, "equal": None, "alpha": None}


def test_alpha_of_random_verdicts_is_near_zero():
    rng = random.Random(0)
    votes = [vote(n, rng.choice(["A", "B", "tie"]), rater=rater) for n in range(400) for rater in "abc"]
    assert abs(agreement(votes)["alpha"]) < 0.06


def test_raters_share_the_overlap_and_divide_the_other_pairs():
    models, votes = ["ppo", "sft"], []
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(40):
        for rater, indices in seen.items():
            index = next_index(40, votes, models, rater, overlap=0.25, seed=1)
            if index is not None:
                indices.append(index)
                votes.append(vote(index, "skip", rater=rater, index=index))
    assert len(set(seen["a"]) & set(seen["b"])) == 10
    assert set(seen["a"]) | set(seen["b"]) == set(range(40))
    assert all(len(indices) == len(set(indices)) for indices in seen.values())
    assert next_index(40, votes, ["other", "sft"], "a", 0.25, 1) is not None
    assert next_index(40, votes, models, "c", 0.0, 1) is None


# -------------------------------------------------------------------------------------------------------------- attacks

KILLS = 60  # of each of the three ways to vote
COMMENTS = (0, 3000, 300_000)  # characters: a row within a page, of several, and one that takes a while to write


def voter(file, rater: str, start: int, size: int) -> tuple[int, int]:
    """Fork a process that votes on pair after pair; its id, and the pipe on which it confirms each number."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        for number in range(start, start + 100_000):
            if append_vote(file, vote(number, rater=rater, comment="x" * size)):
                os.write(writing, f"{number}\n".encode())
    finally:
        os._exit(1)


def kill(child: int, reading: int) -> list[int]:
    """Kill a voter; the numbers that it confirmed."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return [int(line) for line in pipe.read().splitlines()]


@pytest.mark.parametrize("voters", [1, 2, 4])
def test_no_vote_is_lost_or_doubled_when_a_voter_is_killed(tmp_path, case, voters):
    draw = random.Random(voters)
    file = tmp_path / "votes.jsonl"
    confirmed: set[tuple[str, str]] = set()
    for number in range(KILLS):
        size = draw.choice(COMMENTS)
        if file.exists() and file.stat().st_size > 4_000_000:
            file.unlink()
            confirmed.clear()
        start = number * 1000
        running = {f"rater {k}": voter(file, f"rater {k}", start, size) for k in range(voters)}
        time.sleep(draw.expovariate(1 / 0.02))
        victims = draw.sample(sorted(running), draw.randint(1, voters))
        for rater in [*victims, *(set(running) - set(victims))]:  # the others vote on after the first kills
            confirmed |= {(vote(done)["pair"], rater) for done in kill(*running[rater])}
        last = f"rater {draw.randrange(voters)}"
        before = {(row["pair"], row["rater"]) for row in read_votes(file)}
        again = [append_vote(file, vote(start + n, rater=last)) for n in range(3)]  # who is unsure votes again
        wanted = [(vote(start + n)["pair"], last) not in before for n in range(3)]
        rows = [json.loads(line) for line in file.read_bytes().splitlines()]
        keys = [(row["pair"], row["rater"]) for row in rows]
        confirmed |= {(vote(start + n)["pair"], last) for n in range(3)}
        lost, doubled = confirmed - set(keys), len(keys) - len(set(keys))
        held = not lost and not doubled and again == wanted and file.read_bytes().endswith(b"\n")
        seen = f"{len(confirmed)} confirmed, {len(keys)} rows, {len(lost)} lost, {doubled} doubled"
        case(f"kill {number + 1} of {voters} voters, rows of {size} more characters", held, seen)
