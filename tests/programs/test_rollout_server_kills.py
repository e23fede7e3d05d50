"""One kill of each kind: a server of two, all servers, the trainer. The nightly attacks have many."""

from __future__ import annotations

import json
import os
import time

import pytest
from helpers.killed import forked, main_of, wait
from helpers.served_runs import KEY, ForkedServer, ServedRuns, differs, error_of
from helpers.tiny_runs import TinyRuns

from lightrlhf.storage.checkpoint import checkpoints


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    for program in ("grpo", "serve"):
        main_of(program)  # imported once, before any fork
    before = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = KEY
    yield TinyRuns(tmp_path_factory.mktemp("runs"), cafe_data, talk_data, tokenizer)
    os.environ.pop("OPENAI_API_KEY")
    if before is not None:
        os.environ["OPENAI_API_KEY"] = before


@pytest.fixture
def servers(runs, tmp_path):
    made = [ForkedServer(runs.model, tmp_path / f"server-{number}") for number in range(2)]
    yield made
    for server in made:
        server.kill()


def wait_for_answers(server: ForkedServer, number: int) -> None:
    while server.notes.read_bytes().count(b"\n") < number:
        time.sleep(0.002)


def test_servers_and_trainer_are_killed_and_every_run_ends_as_the_one_left_alone(runs, servers, tmp_path):
    served = ServedRuns(runs, "grpo", tmp_path, servers, patience=60.0)
    status = forked(served.call("whole", tell=tmp_path / "events"), served.output)
    assert status == 0, served.output.read_text()[-3000:]
    whole, events = served.state("whole"), json.loads((tmp_path / "events").read_text())
    assert len(served.learned("whole")) >= 6 and not served.unknown("whole")

    one = servers[0]  # killed after some answers, and started again
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


def test_all_servers_gone_is_one_line_a_checkpoint_and_a_run_that_goes_on(runs, servers, tmp_path):
    server = servers[0]
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
