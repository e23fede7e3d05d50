"""Kills of voting processes at random moments: no confirmed vote is lost, none is stored twice, the file stays whole.

The voters are forked from this process, which has imported everything, so that a kill costs milliseconds. A vote is
confirmed, as in the demo, once `append_vote` has returned.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
from helpers.votes import vote

from lightrlhf.demo.votes import append_vote, read_votes

ROW = "votes"
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
