"""Kills by SIGKILL: at random steps, at every event of a save, of two ranks, and at 12 points of every algorithm.

Each killed run is resumed and compared bitwise with one that was left alone: weights, metrics, optimisers, schedules,
random states. `LIGHTRLHF_KILL_SEED` repeats a choice of random events.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers import kill_seed
from helpers.killed import differs, forked, pair, state_of, wait_for_pair, with_events
from helpers.programs import main_of
from helpers.tiny_runs import ITERATED, PROGRAMS, TRAINED, TinyRuns, experiment_of

EPISODES = ["--env", "guess_number", "--env_options", "turns=3", "--env_workers", "2", "--max_turns", "2"]
RANKS = ["--devices", "2", "--mini_batch_size", "2", "--micro_batch_size", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    for program in PROGRAMS:
        main_of(program)  # imported once, before any fork
    folder = tmp_path_factory.mktemp("runs")
    made = TinyRuns(folder, cafe_data, talk_data, tokenizer)
    main_of("sft")(made.flags("sft", folder / "warm", steps=1))
    main_of("refuel")(made.flags("refuel", folder / "warm", steps=1))  # stores log-probabilities next to its data
    return made


class Whole:
    """A run that was left alone, and its events."""

    def __init__(self, runs: TinyRuns, program: str, folder: Path, *more: str) -> None:
        self.runs, self.program, self.folder, self.more = runs, program, folder, more
        self.output = folder / "output"
        status = forked(self.call(folder / "whole", 0, folder / "events"), self.output)
        assert status == 0, self.output.read_text()[-3000:]
        self.end = state_of(experiment_of(folder / "whole"), program)
        self.events = json.loads((folder / "events").read_text())

    def call(self, log_dir: Path, at: int, tell: Path | None = None):
        flags = self.runs.flags(self.program, log_dir, *self.more)
        return with_events(lambda: main_of(self.program)(flags), log_dir, at, tell)

    def killed_and_resumed(self, at: int) -> str:
        """What differs after a kill at an event and resuming; empty if nothing."""
        log_dir = self.folder / f"killed-{at}"
        status = forked(self.call(log_dir, at), self.output)
        assert status == -9, (self.program, at, self.events[at - 1], status, self.output.read_text()[-2000:])
        run = experiment_of(log_dir)
        status = forked(lambda: main_of(self.program)(["--resume_from", str(run)]), self.output)
        if status:
            return f"resuming ended with {status}: {self.output.read_text()[-300:]}"
        difference = differs(self.end, state_of(run, self.program))
        shutil.rmtree(log_dir)
        return difference


def first_checkpoint(events: list[str]) -> int:
    """Number of the event after the first save."""
    return events.index("has saved") + 1


def spread(first: int, last: int, number: int) -> list[int]:
    """Events at equal distances."""
    return [first + round(i * (last - first) / (number - 1)) for i in range(number)]


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    """Makes, once, the run of a program that is left alone."""
    made: dict[str, Whole] = {}

    def make(program: str) -> Whole:
        if program not in made:
            made[program] = Whole(runs, program, tmp_path_factory.mktemp(program))
        return made[program]

    return make


# ------------------------------------------------------------------------------------------------------------ one rank
@pytest.mark.parametrize("program", TRAINED)
def test_killed_at_random_steps_after_the_first_checkpoint(program, whole, case):
    one, rng = whole(program), random.Random(f"{kill_seed()} {program}")
    first = first_checkpoint(one.events)
    steps = [n for n, name in enumerate(one.events, 1) if n > first and not name.startswith("save ")]
    for at in rng.sample(steps, 8):
        difference = one.killed_and_resumed(at)
        name = f"{program} at event {at} of {len(one.events)}, {one.events[at - 1]}"
        case(name, not difference, difference)


@pytest.mark.parametrize("program", ["sft", "ppo"])
def test_killed_at_every_event_of_a_save(program, whole, case):
    one = whole(program)
    first = first_checkpoint(one.events)
    begins = one.events.index("begins saving", first)
    ends = one.events.index("has saved", first)
    for at in range(begins + 1, ends + 2):
        difference = one.killed_and_resumed(at)
        case(f"{program} at {one.events[at - 1]}", not difference, difference)


@pytest.mark.parametrize("program", PROGRAMS)
def test_twelve_points_of_every_algorithm(program, whole, case):
    one = whole(program)
    begun = "os.rename .args.json.partial"
    first = one.events.index(begun) + 2 if program in ITERATED else first_checkpoint(one.events)
    for at in spread(first, len(one.events), 12):
        difference = one.killed_and_resumed(at)
        name = f"{program} at event {at} of {len(one.events)}, {one.events[at - 1]}"
        case(name, not difference, difference)


@pytest.mark.parametrize("program", ["ppo", "grpo"])
def test_six_points_of_episodes(program, runs, tmp_path, case):
    """Turns move in lock-step, and environments are reseeded at `reset`: a resumed run needs no state of them."""
    one = Whole(runs, program, tmp_path, *EPISODES)
    assert (experiment_of(tmp_path / "whole") / "rollouts.jsonl").read_text().count("Guess my number") > 6
    for at in spread(first_checkpoint(one.events), len(one.events), 6):
        difference = one.killed_and_resumed(at)
        name = f"{program} at event {at} of {len(one.events)}, {one.events[at - 1]}"
        case(name, not difference, difference)


# ----------------------------------------------------------------------------------------------------------- two ranks
class Pair:
    """A run of two ranks that was left alone, and the events of each rank."""

    def __init__(self, runs: TinyRuns, folder: Path, program: str, strategy: str) -> None:
        self.runs, self.folder, self.output, self.program = runs, folder, folder / "output", program
        self.more = [*RANKS, "--strategy", strategy, *(["--rollout_size", "2"] if program in ("ppo", "grpo") else [])]
        tell = [folder / f"events-{rank}" for rank in range(2)]
        statuses = wait_for_pair(pair(self.calls(folder / "whole", [0, 0], tell), self.output))
        assert statuses == [0, 0], self.output.read_text()[-3000:]
        self.end = state_of(experiment_of(folder / "whole"), program)
        self.events = [json.loads(path.read_text()) for path in tell]

    def calls(self, log_dir: Path, at: list[int], tell: list[Path | None]):
        flags = self.runs.flags(self.program, log_dir, *self.more)
        return [with_events(lambda: main_of(self.program)(flags), log_dir, *one) for one in zip(at, tell)]

    def killed_and_resumed(self, rank: int, at: int, alone: bool) -> str:
        """What differs after a kill of one rank at an event, or of both (`alone` False), and resuming."""
        log_dir = self.folder / f"killed-{rank}-{at}"
        at_rank = [at if rank == one else 0 for one in range(2)]
        statuses = wait_for_pair(pair(self.calls(log_dir, at_rank, [None, None]), self.output), ends_both=not alone)
        assert statuses[rank] == -9, (rank, at, self.events[rank][at - 1], statuses)
        if alone and statuses[1 - rank] == 0:
            return "the other rank went on as if nothing had happened"
        flags = ["--resume_from", str(experiment_of(log_dir))]
        statuses = wait_for_pair(pair([lambda: main_of(self.program)(flags)] * 2, self.output))
        if statuses != [0, 0]:
            return f"resuming ended with {statuses}: {self.output.read_text()[-300:]}"
        difference = differs(self.end, state_of(experiment_of(log_dir), self.program))
        shutil.rmtree(log_dir)
        return difference


@pytest.fixture(scope="module")
def pairs(runs, tmp_path_factory):
    import torch.distributed.fsdp  # noqa: F401

    return {
        (program, strategy): Pair(runs, tmp_path_factory.mktemp(f"{program}-{strategy}"), program, strategy)
        for program, strategy in (("sft", "ddp"), ("sft", "fsdp"), ("ppo", "ddp"), ("grpo", "ddp"))
    }


def test_one_of_two_ranks_is_killed(pairs, case):
    rng = random.Random(kill_seed())
    for (program, strategy), one in pairs.items():
        for number in range(10):
            rank = number % 2
            events = one.events[rank]
            at, alone = rng.randrange(first_checkpoint(events) + 1, len(events)), number == 9
            difference = one.killed_and_resumed(rank, at, alone)
            who = f"rank {rank} alone" if alone else f"rank {rank}, then the other"
            name = f"{program} {strategy}: {who} at event {at} of {len(events)}, {events[at - 1]}"
            case(name, not difference, difference)


def test_a_rank_of_fsdp_is_killed_in_a_save(pairs, case):
    one = pairs["sft", "fsdp"]
    for rank in range(2):
        events = one.events[rank]
        first = first_checkpoint(events)
        begins, ends = events.index("begins saving", first) + 1, events.index("has saved", first) + 1
        for number, at in enumerate(spread(begins, ends, 12)):
            difference = one.killed_and_resumed(rank, at, alone=number == 6)
            name = f"rank {rank} at event {at - begins} of {ends - begins}, {events[at - 1]}"
            case(name, not difference, difference)
