"""SIGTERM and SIGUSR1: the run is saved, ends with status 143, and resumed it is the run that never was stopped.

Signals are real ones, sent to forks of this process at their own events.
"""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from helpers.killed import At, differs, forked, pair, state_of, wait_for_pair, with_events
from helpers.programs import main_of
from helpers.tiny_runs import ITERATED, TRAINED, TinyRuns, experiment_of

from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.training.signals import StopSignals, Terminated

RARELY = ["--save_interval", 100, "--log_interval", 4]  # so that a stop falls between two rows
KINDS = ("in setup", "in reference", "in old log-probabilities", "in rollout", "in score", "in resample", "in update")
KINDS += ("in evaluation", "begins saving", "before log")


def saved(log_dir: Path) -> list[str]:
    return [path.name for path in checkpoints(experiment_of(log_dir))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    made = TinyRuns(tmp_path_factory.mktemp("runs"), cafe_data, talk_data, tokenizer)
    main_of("refuel")(made.flags("refuel", made.folder / "warm", steps=1))  # stores log-probabilities next to its data
    return made


class Whole:
    """A run that gets no signal, and its events; of two ranks the second one's, which alone gets signals."""

    def __init__(self, runs: TinyRuns, program: str, folder: Path, *more: object, ranks: int = 1) -> None:
        self.runs, self.program, self.folder, self.more, self.ranks = runs, program, folder, more, ranks
        self.output = folder / "output"
        assert set(self.run(folder / "whole")) == {0}, self.output.read_text()
        self.end = state_of(experiment_of(folder / "whole"), program)
        self.events = json.loads((folder / "events-whole").read_text())

    def run(self, log_dir: Path, at: At = 0, number: int = signal.SIGTERM) -> list[int]:
        """Exit statuses of the ranks of a run that gets a signal at an event and at all that follow it."""
        flags, tell = self.runs.flags(self.program, log_dir, *self.more), log_dir.with_name(f"events-{log_dir.name}")
        call = partial(main_of(self.program), flags)
        last = with_events(call, log_dir, at, tell, number)
        self.output.write_text("")
        return self.statuses([*[with_events(call, log_dir)] * (self.ranks - 1), last])

    def statuses(self, calls: list) -> list[int]:
        if self.ranks == 1:
            return [forked(calls[0], self.output)]
        return wait_for_pair(pair(calls, self.output), ends_both=False)

    def stopped(self, at: At, number: int = signal.SIGTERM) -> Path:
        """The log dir of a run that got a signal, and ended with status 143."""
        log_dir = self.folder / f"stopped-{len(list(self.folder.iterdir()))}"
        assert set(self.run(log_dir, at, number)) == {143}, self.output.read_text()
        told = [line for line in self.output.read_text().splitlines() if line.startswith("stopped by ")]
        assert told, self.output.read_text()
        if self.ranks == 1:
            assert signal.Signals(number).name in told[0]
        return log_dir

    def difference(self, log_dir: Path) -> str:
        """What differs between the resumed run and the whole one; empty if nothing."""
        run = experiment_of(log_dir)
        call = partial(main_of(self.program), ["--resume_from", str(run)])
        assert set(self.statuses([call] * self.ranks)) == {0}, self.output.read_text()
        return self.compared(run)

    def compared(self, run: Path) -> str:
        """What differs between a finished run and the whole one but the checkpoints that are kept."""
        states = self.end, state_of(run, self.program)
        return differs(*({name: value for name, value in one.items() if name != "names"} for one in states))


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    """Makes, once, the run of a program that gets no signal, and is saved at its end alone."""
    made: dict[str, Whole] = {}

    def make(program: str) -> Whole:
        more = [] if program in ITERATED else [*RARELY, "--eval_interval", 2]
        if program in ("ppo", "grpo"):
            more += ["--audit_function", "helpers.rewards:length"]
        if program == "grpo":
            more += ["--reward_function", "helpers.rewards:noisy"]
        if program not in made:
            made[program] = Whole(runs, program, tmp_path_factory.mktemp(program), *more)
        return made[program]

    return make


@pytest.mark.slow
def test_an_update_is_finished_and_saved(whole):
    one = whole("sft")
    run = one.stopped(("in update", 3))
    assert saved(run) == ["checkpoint-000003"]
    assert one.difference(run) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, phase, number",
    [("ppo", "in rollout", signal.SIGTERM), ("grpo", "in resample", signal.SIGUSR1)],  # whose score draws numbers
)
def test_what_changes_no_weight_is_interrupted_and_the_step_before_is_saved(program, phase, number, whole):
    one = whole(program)
    run = one.stopped((phase, 3), number)
    assert saved(run) == ["checkpoint-000002"]
    assert one.difference(run) == ""


@pytest.mark.slow
def test_before_the_first_step_there_is_nothing_to_save(whole):
    one = whole("sft")
    for event in ("in setup", "open .args.json.partial", "in update"):
        log_dir = one.stopped((event, 1))
        if event == "in update":
            assert saved(log_dir) == ["checkpoint-000001"]
        else:
            assert not list(log_dir.rglob("checkpoint-*")) and "there is nothing to save" in one.output.read_text()


@pytest.mark.slow
def test_saves_by_time_change_nothing_but_what_is_kept(whole, capsys):
    one = whole("sft")
    flags = one.runs.flags("sft", one.folder / "often", *one.more, "--save_minutes", 1e-9, "--keep_last", 0)
    run = Path(main_of("sft")(flags))
    assert len(checkpoints(run)) == 6 and capsys.readouterr().out.count(" s\n") >= 6
    assert one.compared(run) == ""
    for later in checkpoints(run)[3:]:
        shutil.rmtree(later)
    assert one.difference(one.folder / "often") == ""


@pytest.mark.slow
@pytest.mark.parametrize("program", TRAINED)
def test_a_run_that_is_stopped_anywhere_and_resumed_equals_one_that_was_not(program, whole):
    one = whole(program)
    for kind in KINDS:
        if times := min(one.events.count(kind), 3):
            log_dir = one.stopped((kind, times))
            if list(log_dir.rglob("checkpoint-*")):  # else it starts again
                assert one.difference(log_dir) == "", kind


@pytest.mark.slow
@pytest.mark.parametrize("program", ITERATED)
def test_so_does_a_run_in_iterations_in_any_stage(program, whole):
    one = whole(program)
    part = len(one.events) // 8
    for at in range(part, len(one.events) - part, part):
        assert one.difference(one.stopped(at)) == "", one.events[at - 1]


# --------------------------------------------------------------------------------------------------------- the handlers
def test_handlers_of_others_and_ignored_signals_are_left_alone():
    """Schedulers' clients queue a job again in a handler of their own."""
    got: list[int] = []
    before = [signal.signal(signal.SIGTERM, lambda number, _: got.append(number)), signal.getsignal(signal.SIGUSR1)]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        signals = StopSignals(" early")
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM] and not signals.received
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_the_handler_of_an_enclosing_run_comes_back():
    before, outer = signal.getsignal(signal.SIGTERM), StopSignals(" outer")
    try:
        inner = StopSignals(" early")
        with pytest.raises(Terminated) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.value.code == 143 and inner.received == "SIGTERM" and not outer.received
        inner.close()
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received
    finally:
        outer.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_part_that_may_not_be_interrupted_is_not_nor_are_those_in_it():
    signals = StopSignals("")
    try:
        with pytest.raises(Terminated), signals.phase(True):
            with signals.phase(False), signals.phase(True) as may_stop:
                os.kill(os.getpid(), signal.SIGTERM)
                assert signals.received and not may_stop
            with signals.phase(True):
                pytest.fail("a signal that came before it")
    finally:
        signals.close()


def test_a_thread_changes_no_handler_and_a_fork_ends_as_before(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(StopSignals, "").result()
    assert signal.getsignal(signal.SIGTERM) == before
    signals = StopSignals("")
    try:
        assert forked(lambda: os.kill(os.getpid(), signal.SIGTERM), tmp_path / "output") == -signal.SIGTERM
    finally:
        signals.close()


# ----------------------------------------------------------------------------------------------------------- two ranks
RANKS = ["--devices", "2", "--strategy", "ddp", "--mini_batch_size", 2, "--micro_batch_size", 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, kind, step", [("sft", "in update", 3), ("ppo", "in rollout", 2), ("grpo", "in score", 2)]
)
def test_a_signal_to_one_of_two_ranks_saves_the_same_step_on_both(program, kind, step, runs, tmp_path):
    one = Whole(runs, program, tmp_path, *RARELY, *RANKS, *(["--rollout_size", 2] if program != "sft" else []), ranks=2)
    log_dir = one.stopped((kind, 3))
    assert saved(log_dir) == [f"checkpoint-{step:06d}"] and one.difference(log_dir) == ""
