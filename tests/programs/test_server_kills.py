"""Kills by SIGKILL at 12 points of every program that asks a server, which outlives them.

Each is started again by the same command. Its files must end as those of a run that was left alone; what a kill leaves
must be the beginning of these, each question must be answered once in them, and nothing is asked again whose row is
there. Events are changes of files, rows (before, in the midst of and after each) and requests (before and after each);
as several requests are under way, the event of a number differs a little from run to run.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import last_checkpoint, metrics, weights
from helpers.killed import Events, fork, forked, wait
from helpers.programs import main_of
from helpers.servers import Handler
from helpers.tiny_runs import TinyRuns, experiment_of

ITEMS = 16
POINTS = 12
DIALOGUES = 8  # of an iteration, in chunks of 3
TIMES_AND_PATHS = ("metrics.jsonl", "manifest.json")  # the second has the hash of args.json, which names the folder
ITEM = re.compile(r"item \d+")


# -------------------------------------------------------------------------------------------------------------- server
class Answers(Handler):
    """Answers that depend on the request alone, after a time that does, too: later questions may be answered first."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][-1]["content"] if "messages" in request else request["prompt"]
        with self.server.notes.open("a") as file:
            file.write(json.dumps(text) + "\n")
        number = number_of(text, request.get("seed"))
        time.sleep(number % 5 / 1000)
        answer = f"Question: May I have tea number {number % 1000}?"
        if "Verdict" in text:
            answer = ("Verdict: A", "Verdict: B", "Verdict: tie", "I cannot say.")[number % 4]
        said = {"message": {"content": answer}} if "messages" in request else {"text": answer}
        self.send(200, {"choices": [{**said, "finish_reason": "stop"}]})


class Server(ThreadingHTTPServer):
    """Ends with the process that started it, so that it does not outlive a killed session of tests."""

    daemon_threads = True

    def __init__(self, notes: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.notes, self.starter = notes, os.getpid()

    def service_actions(self) -> None:
        if os.getppid() != self.starter:
            os._exit(0)

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that was killed."""


def number_of(text: str, seed: int | None) -> int:
    return int(hashlib.sha256(f"{text} {seed}".encode()).hexdigest()[:8], 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a server in a process of its own, and the file with the questions that it was asked."""
    folder = tmp_path_factory.mktemp("server")
    made = Server(folder / "asked.jsonl")
    made.notes.touch()
    pid = fork(made.serve_forever, folder / "output")
    made.server_close()
    yield f"http://127.0.0.1:{made.server_address[1]}/v1", made.notes
    os.kill(pid, signal.SIGKILL)
    wait(pid)


# ------------------------------------------------------------------------------------------------------------ programs
class ServedEvents(Events):
    """Events of rows and requests, too; for a fork only."""

    def __init__(self, folder: str, at: int) -> None:
        self.lock = threading.Lock()
        super().__init__(folder, at)
        from lightrlhf.generation.openai_client import Servers
        from lightrlhf.storage import jsonl

        append, ask = jsonl.append_whole, Servers._ask_once

        def appended(file, content: bytes) -> None:
            self.happens("before a row")
            if len(self.seen) + 1 == self.at:
                file.write(content[: len(content) // 2])
            self.happens("in the midst of a row")
            append(file, content)
            self.happens("after a row")

        async def asked(*arguments, **options):
            self.happens("before a request")
            reply = await ask(*arguments, **options)
            self.happens("after a request")
            return reply

        jsonl.append_whole, Servers._ask_once = appended, asked

    def happens(self, name: str) -> None:
        with self.lock:  # requests are sent and answered by a thread of their own
            super().happens(name)


class Program:
    """A program with its flags, the files that it leaves and the rows that must be complete in them."""

    def __init__(self, name: str, flags: Callable[[Path], list], rows: str, prepare: Callable = Path.mkdir) -> None:
        self.name, self.flags, self.rows, self.prepare = name, flags, rows, prepare

    def call(self, folder: Path, at: int = 0, tell: Path | None = None) -> Callable[[], None]:
        """A run in a folder that dies at its event number `at`; with 0 it writes its events to `tell`."""

        def call() -> None:
            if self.name == "iterative_refuel":
                from lightrlhf import iterative_refuel

                iterative_refuel.CHUNK = 3
            events = ServedEvents(str(folder), at) if at or tell else None
            main_of(self.name)([str(flag) for flag in self.flags(folder)])
            if tell and events:
                tell.write_text(json.dumps(events.seen))

        return call

    def files(self, folder: Path) -> dict[str, object]:
        """All that must be the same after a kill, by name."""
        kinds = [path for path in folder.rglob("*") if path.suffix in (".jsonl", ".json") and path.is_file()]
        found: dict[str, object] = {
            str(path.relative_to(folder)): path.read_text().replace(str(folder), "")
            for path in kinds
            if path.name not in TIMES_AND_PATHS and not {"policy", "base"} & set(path.relative_to(folder).parts)
        }
        for policy in folder.glob("run/iteration-*/policy"):
            found[f"{policy} weights".replace(str(folder), "")] = weights(last_checkpoint(policy))
            found[f"{policy} metrics".replace(str(folder), "")] = metrics(policy)
        return found

    def kept(self, folder: Path) -> list[str]:
        """The complete rows of each file of rows, as lines."""
        return [line for path in sorted(folder.glob(self.rows)) for line in path.read_text().split("\n")[:-1]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory, cafe_data, talk_data, tokenizer, server):
    url, _ = server
    for name in ("sft", "generate", "judge", "evaluate_dialogues", "iterative_refuel"):
        main_of(name)  # imported once, before any fork
    folder = tmp_path_factory.mktemp("served")
    runs = TinyRuns(folder, cafe_data, talk_data, tokenizer)
    main_of("sft")(runs.flags("sft", folder / "warm", steps=2))
    sft = experiment_of(folder / "warm")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"item {n}", "n": n}) + "\n" for n in range(ITEMS)))
    for side in ("a", "b"):
        rows = [{"prompt": f"item {n}", "response": f"{side} {n}"} for n in range(ITEMS)]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    at_server = ["--base_url", url, "--max_workers", 4]
    user = [*at_server, "--user_model", "m", "--user_max_new_tokens", 8]

    def generate(folder_of_run: Path) -> list:
        flags = ["--prompts_file", prompts, "--model_name", "m", "--rollout_engine", "openai", *at_server]
        return [*flags, "--num_generations", 2, "--output_file", folder_of_run / "rows.jsonl"]

    def judge(folder_of_run: Path) -> list:
        flags = ["--responses_file", folder / "a.jsonl", folder / "b.jsonl", "--judge_model", "m", *at_server]
        return [*flags, "--output_file", folder_of_run / "rows.jsonl"]

    def evaluate(folder_of_run: Path) -> list:
        flags = ["--experiment_dir", folder_of_run / "run", "--data_dir", talk_data, *user, "--accelerator", "cpu"]
        return [*flags, "--num_turns", 3, "--max_new_tokens", 4, "--num_samples", DIALOGUES]

    def refuel(folder_of_run: Path) -> list:
        flags = runs.flags("iterative_refuel", folder / "unused")
        at = flags.index("--user_function")
        flags = [*flags[:at], *flags[at + 2 :], *user, "--num_data", DIALOGUES, "--max_steps", 2]
        return [*flags, "--output_dir", folder_of_run / "run"]

    def with_experiment(folder_of_run: Path) -> None:
        shutil.copytree(sft, folder_of_run / "run")

    made = (
        Program("generate", generate, "rows.jsonl"),
        Program("judge", judge, "rows.jsonl"),
        Program("evaluate_dialogues", evaluate, "run/eval/test/turn-3.jsonl", with_experiment),
        Program("iterative_refuel", refuel, "run/iteration-01/dialogues.jsonl"),
    )
    return {program.name: program for program in made}


# --------------------------------------------------------------------------------------------------------------- kills
def asked_since(notes: Path, start: int) -> set[str]:
    """The items of the questions after so many bytes of the server's notes."""
    return set(ITEM.findall(notes.read_bytes()[start:].decode()))


def spread(numbers: list[int], count: int) -> set[int]:
    """So many of the numbers, at equal distances."""
    return {numbers[round(i * (len(numbers) - 1) / (count - 1))] for i in range(count)}


def points_of(events: list[str]) -> list[int]:
    """Numbers of events: the ends of the first row and of the last, four of all, the rest of rows and requests."""
    ends = [number for number, kind in enumerate(events, 1) if kind == "after a row"]
    points = {*ends[:1], *ends[-1:], *spread(list(range(1, len(events) + 1)), 4)}
    others = [n for n, kind in enumerate(events, 1) if kind.endswith((" row", " request")) and n not in points]
    return sorted(points | spread(others, POINTS - len(points)))


@pytest.mark.parametrize("name", ["generate", "judge", "evaluate_dialogues", "iterative_refuel"])
def test_twelve_points_of_every_program_over_a_server(name, programs, server, tmp_path, case):
    program, output, (_, notes) = programs[name], tmp_path / "output", server
    program.prepare(tmp_path / "whole")
    status = forked(program.call(tmp_path / "whole", tell=tmp_path / "events"), output)
    assert status == 0, output.read_text()[-3000:]
    whole, rows = program.files(tmp_path / "whole"), program.kept(tmp_path / "whole")
    events = json.loads((tmp_path / "events").read_text())
    numbers = [json.loads(row)["index"] for row in rows]
    assert sorted(set(numbers)) == sorted(numbers), "each question is answered once"
    assert len(rows) == (ITEMS if name in ("generate", "judge") else DIALOGUES), "none is lost"
    assert "after a request" in events
    for at in points_of(events):
        folder = tmp_path / f"killed-{at}"
        program.prepare(folder)
        status = forked(program.call(folder, at), output)
        assert status == -9, (at, status, output.read_text()[-2000:])
        kept, start = program.kept(folder), notes.stat().st_size
        problems = [] if kept == rows[: len(kept)] else ["what the kill left is not the beginning of the file"]
        status = forked(program.call(folder), output)
        if status:
            problems.append(f"the second start ended with {status}: {output.read_text()[-300:]}")
        else:
            found = program.files(folder)
            problems += [f"{key} differs" for key in {**whole, **found} if whole.get(key) != found.get(key)]
            again = asked_since(notes, start) & set(ITEM.findall("\n".join(kept)))
            problems += [f"asked again: {', '.join(sorted(again))}"] if again else []
        seen = "; ".join(problems) or f"{len(kept)} of {len(rows)} rows were there"
        kind = events[at - 1]
        case(f"{name} at event {at} of {len(events)}, {kind}", not problems, seen)
        shutil.rmtree(folder)
