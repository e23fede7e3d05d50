"""Kills by SIGKILL of servers of rollouts, one of two or all, and of the trainer beside a server that lives.

Which prompts make a request does not depend on which server answers, so every run ends bit by bit as one that was left
alone. One kill of each kind, then the attacks with many; `LIGHTRLHF_KILL_SEED` repeats their random times.
"""

import json
import os
import random
import time

import pytest
from helpers import kill_seed
from helpers.killed import differs, forked, wait
from helpers.programs import main_of
from helpers.served_runs import KEY, ForkedServer, ServedRuns, error_of
from helpers.tiny_runs import TinyRuns

from lightrlhf.storage.checkpoint import checkpoints

PROGRAMS = ("grpo", "ppo")
KILLS = 10  # of a server, by each program
GONE = 5  # times that all servers are killed, by each program
POINTS = 12  # of the trainer's own kills, by each program


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    for program in (*PROGRAMS, "serve"):
        main_of(program)  # imported once, before any fork
    import lightrlhf.serving.app
    import lightrlhf.serving.listening  # noqa: F401

    before = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = KEY
    yield TinyRuns(tmp_path_factory.mktemp("runs"), cafe_data, talk_data, tokenizer)
    os.environ.pop("OPENAI_API_KEY")
    if before is not None:
        os.environ["OPENAI_API_KEY"] = before


@pytest.fixture
def servers(runs, tmp_path):
    """Makes so many servers, which end with the test."""
    made: list[ForkedServer] = []

    def make(number: int) -> list[ForkedServer]:
        made.extend(ForkedServer(runs.model, tmp_path / f"server-{len(made)}") for _ in range(number))
        return made

    yield make
    for server in made:
        server.kill()


def wait_for_answers(server: ForkedServer, number: int) -> None:
    while server.notes.read_bytes().count(b"\n") < number:
        time.sleep(0.002)


@pytest.mark.slow
def test_servers_and_trainer_are_killed_and_every_run_ends_as_the_one_left_alone(runs, servers, tmp_path):
    served = ServedRuns(runs, "grpo", tmp_path, servers(2), patience=60.0)
    status = forked(served.call("whole", tell=tmp_path / "events"), served.output)
    assert status == 0, served.output.read_text()[-3000:]
    whole, events = served.state("whole"), json.loads((tmp_path / "events").read_text())
    assert len(served.learned("whole")) >= 6 and not served.unknown("whole")

    one = served.servers[0]  # killed after some answers, and started again
    before = one.notes.read_bytes().count(b"\n")
    pid = served.start("server")
    wait_for_answers(one, before + 8)
    one.kill()
    one.start()
    assert wait(pid) == 0, served.output.read_text()[-3000:]
    assert not differs(whole, served.state("server")) and not served.unknown("server")
    assert "is left out, 1 go on" in served.output.read_text()

    at = events.index("has saved") + (len(events) - events.index("has saved")) // 2
    assert forked(served.call("trainer", at), served.output) == -9
    assert len(list(served.exchange.iterdir())) == 1
    assert served.resume("trainer") == 0, served.output.read_text()[-3000:]
    assert not differs(whole, served.state("trainer")) and not list(served.exchange.iterdir())


@pytest.mark.slow
def test_all_servers_gone_is_one_line_a_checkpoint_and_a_run_that_goes_on(runs, servers, tmp_path):
    (server,) = servers(1)
    more = ("--save_interval", 100, "--eval_interval", 0)
    served = ServedRuns(runs, "grpo", tmp_path, [server], *more, patience=0.5)
    assert wait(served.start("whole")) == 0, served.output.read_text()[-3000:]
    of_whole = len(server.answered())
    pid = served.start("gone")
    wait_for_answers(server, of_whole + of_whole // 2)
    server.kill()
    assert wait(pid) == 1, served.output.read_text()[-3000:]
    line = error_of(served.output)
    assert f"no --rollout_server has answered for 0.5 s ({server.url}" in line
    run = served.experiment("gone")
    assert line.endswith(f"resume with --resume_from {run}") and len(checkpoints(run)) == 1
    server.start()
    assert served.resume("gone") == 0, served.output.read_text()[-3000:]
    assert not differs(served.state("whole"), served.state("gone"))


# -------------------------------------------------------------------------------------------------------------- attacks
def left_alone(served: ServedRuns) -> tuple[dict, float]:
    """The state of a run that nobody disturbs, and its seconds from the first answer to the end."""
    pid = served.start("whole")
    began = first_answer(served, 0)
    assert wait(pid) == 0, served.output.read_text()[-3000:]
    return served.state("whole"), time.monotonic() - began


def first_answer(served: ServedRuns, before: int) -> float:
    """Wait until servers have answered more rows than before; returns the time."""
    while sum(server.notes.read_bytes().count(b"\n") for server in served.servers) <= before:
        time.sleep(0.002)
    return time.monotonic()


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_of_two_servers_is_killed_at_a_random_time(program, runs, servers, tmp_path, case):
    served = ServedRuns(runs, program, tmp_path, servers(2), patience=60.0)
    whole, seconds = left_alone(served)
    rng = random.Random(f"{kill_seed()} {program}")
    for number in range(KILLS):
        name, server, delay, comes_back = (
            f"run-{number}",
            rng.choice(served.servers),
            rng.random() * seconds,
            number % 2,
        )
        before = sum(len(one.answered()) for one in served.servers)
        pid = served.start(name)
        first_answer(served, before)
        time.sleep(delay)
        server.kill()
        if comes_back:
            time.sleep(rng.random() * seconds / 4)
            server.start()
        status = wait(pid)
        if not comes_back:
            server.start()
        problems = [f"status {status}: {served.output.read_text()[-300:]}"] if status else []
        if not status:
            difference = differs(whole, served.state(name))
            problems += [f"{difference} differ"] if difference else []
            problems += served.unknown(name)[:3]
            calls, others = served.learned(name), served.learned("whole")
            if [call["prompts"] for call in calls] != [call["prompts"] for call in others]:
                problems.append("rows are lost or doubled")
        seen = "; ".join(problems) or "bit-equal"
        kind = f"{program}, server {served.servers.index(server)} after {delay:.2f} of {seconds:.2f} s"
        case(f"{kind}, {'started again' if comes_back else 'for good'}", not problems, seen)


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_servers_are_killed_and_the_run_goes_on_when_they_are_back(program, runs, servers, tmp_path, case):
    served = ServedRuns(runs, program, tmp_path, servers(1), patience=0.5)
    whole, seconds = left_alone(served)
    rng = random.Random(f"{kill_seed()} {program} all")
    for number in range(GONE):
        name, delay, (server,) = f"run-{number}", rng.random() * seconds * 0.9, served.servers
        before = len(server.answered())
        pid = served.start(name)
        first_answer(served, before)
        time.sleep(delay)
        server.kill()
        status = wait(pid)
        server.start()
        seen, problems = error_of(served.output), []
        if status:  # else it was done before
            finished = checkpoints(served.experiment(name))
            if status != 1 or not seen or (finished and f"--resume_from {served.experiment(name)}" not in seen):
                problems.append(f"status {status}")
            if finished:
                status = served.resume(name)
                problems += [f"resuming ended with {status}: {error_of(served.output)}"] if status else []
        if not status:
            state = served.state(name)
            if "evaluations" in differs(whole, state) and all(
                row in whole["evaluations"] for row in state["evaluations"]
            ):
                state["evaluations"] = whole["evaluations"]  # one that was under way is not made up for
            difference = differs(whole, state)
            problems += [f"{difference} differ"] if difference else []
        text = "; ".join([*problems, seen.replace(str(tmp_path), "")[:120]])
        case(f"{program}, all after {delay:.2f} of {seconds:.2f} s", not problems, text)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_trainer_is_killed_beside_a_living_server(program, runs, servers, tmp_path, case):
    served = ServedRuns(runs, program, tmp_path, servers(1))
    tell = tmp_path / "events"
    assert forked(served.call("whole", tell=tell), served.output) == 0, served.output.read_text()[-3000:]
    whole, events = served.state("whole"), json.loads(tell.read_text())
    rng = random.Random(f"{kill_seed()} {program} trainer")
    first = events.index("has saved") + 1
    for at in sorted(rng.sample(range(first + 1, len(events)), POINTS)):
        name = f"run-{at}"
        status = forked(served.call(name, at), served.output)
        left = list(served.exchange.iterdir())
        problems = [] if status == -9 and len(left) <= 1 else [f"status {status}, {len(left)} folders are left"]
        status = served.resume(name)
        if status:
            problems.append(f"resuming ended with {status}: {error_of(served.output)}")
        else:
            difference = differs(whole, served.state(name))
            problems += [f"{difference} differ"] if difference else []
        left = [folder for folder in served.exchange.iterdir() if any(folder.iterdir())]
        problems += [f"left in the exchange folder: {left}"] if left else []
        kind = f"{program} at event {at} of {len(events)}, {events[at - 1]}"
        case(kind, not problems, "; ".join(problems))
