"""Does a reflector help RL, and what of it is the reflector? Four arms and their controls, on three tasks.

All arms are `datasets_prep.text_envs.prepare_data`, `lightrlhf.sft` and `lightrlhf.reflect_rl` with other flags,
measured by `lightrlhf.evaluate --env` on held-out starts of the full task, sampled and greedy. They differ in the set
that they are fine-tuned on, all sets having equally many rows, and in who reflects:

    SFT                     state -> command, mostly noise             no RL
    SFT+RL                  the same                                   RL alone
    Reflect-RL, positive    reflection -> command, the same noise      RL beside a reflector
    Reflect-RL              half of the rows are negative examples     RL beside a reflector

A negative example also trains the right command, so Reflect-RL sees more of the oracle than the others do. Controls
say what that means: SFT on the oracle's commands alone; RL from there; Reflect-RL without negative examples, but with
less noise, so that as many commands are the oracle's (of the taxi's six, a random one is right about one time in six:
1/2 + 1/2 (1/10 + 9/10 1/6) = 1 - p + p/6 gives a noise p of 0.45); and Reflect-RL with more noise. Reflections are
matched already: every set of an arm has as many.

Tasks: `taxi`, DangerousTaxi's full ride; `explore`, AutoExplore on the source of Python's own standard library, files
up to two folders down; `household`, small games of ALFWorld's engine, which are **not** the ALFWorld benchmark: put a
thing somewhere, in rooms of four places. There RL is compared with SFT on the planner's commands.

What these two offer differs from state to state, so a policy must read names and look its command up in a list. A fresh
model does not learn that from so few demonstrations. Therefore all their seeds and arms start from one base that has
read random walks: `base_of` says how, and that it learns nothing of the tasks.

Settings were found on seed 100, which is none of the five. Taxi, with the arm Reflect-RL: 6 epochs of fine-tuning left
it at .12 of held-out starts after 50 iterations and .94 after 75; with 8 epochs an earlier trial was at .92 of its
training starts after 25. Household: eight trials, which howto/algorithms/reflect_rl.md lists; one of them was of seed
1. Those of `explore` are the household's, not tried before.

What is finished is kept: call it again after a kill. Prints a table, draws curves, and ends with what held.
"""

from __future__ import annotations

import functools
import multiprocessing
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets_prep.text_envs import make_tasks, prepare_data
from examples import output_to
from examples.hidden_map import finish, interval
from lightrlhf import evaluate, plot, reflect_rl, sft
from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints, write_text
from lightrlhf.storage.jsonl import JsonlWriter


class Arm(NamedTuple):
    """What an arm is fine-tuned on, and whether RL follows."""

    data: str  # one of DATA
    policy: str  # the set of the policy
    reflector: str | None  # the set of the reflector
    learns: bool = True


DATA = {
    "noisy": [],
    "oracle": ["--targets", "oracle"],
    "less noise": ["--noise", "0.45"],
    "more noise": ["--noise", "1.0"],
}
ARMS = {
    "SFT": Arm("noisy", "sft", None, learns=False),
    "SFT+RL": Arm("noisy", "sft", None),
    "Reflect-RL, positive": Arm("noisy", "sft_policy_positive", "sft_reflection_positive"),
    "Reflect-RL": Arm("noisy", "sft_policy", "sft_reflection"),
}
CONTROLS = {
    "SFT, oracle's commands": Arm("oracle", "sft", None, learns=False),
    "SFT+RL, oracle's commands": Arm("oracle", "sft", None),
    "positive, less noise": Arm("less noise", "sft_policy_positive", "sft_reflection_positive"),
    "Reflect-RL, more noise": Arm("more noise", "sft_policy", "sft_reflection"),
}


class Task(NamedTuple):
    """An environment with its sizes and flags; FOLDER in them is that of the task."""

    env: list[str]
    data: list[str]
    base: list[str]  # data and size of the base that all seeds and arms start from; [] starts each from fresh weights
    sft: list[str]
    rl: list[str]
    evaluation: list[str]
    rounds: list[int]  # iterations after which success is measured
    compared: int  # and after which of them arms are compared: early, as all may end at the same place


FINE_TUNING = [
    *("--accelerator", "cpu", "--use_targets", "True", "--mini_batch_size", "32", "--micro_batch_size", "32"),
    *("--learning_rate", "3e-3", "--lr_warmup_steps", "20", "--eval_interval", "0", "--log_interval", "50"),
    *("--save_interval", "100000", "--logger", "csv"),
]
STAGES = [  # of a base: it reads whole texts, then it looks up the command that the comment names
    ["--use_targets", "False", "--epochs", "2"],
    ["--use_targets", "True", "--epochs", "3", "--learning_rate", "2e-3"],
]
LEARNING = [
    *("--accelerator", "cpu", "--rollout_size", "64", "--learning_rate", "1e-3", "--entropy_coeff", "0.02"),
    *("--keep_last", "0", "--save_interval", "25", "--eval_interval", "10", "--logger", "csv"),
]
READER = ["--num_samples", "12000", "--num_held_out", "50", "--num_proc", "1", "--tokens_span", "words"]
READER += ["--hidden_size", "96", "--num_hidden_layers", "3"]
READER_TUNING = ["--epochs", "2", "--learning_rate", "2e-3", "--lr_scheduler_type", "cosine"]
READER_LEARNING = [
    *("--trainer", "ppo", "--ppo_epochs", "1", "--mini_batch_size", "128", "--gae_gamma", "0.95"),
    *("--learning_rate", "3e-4", "--entropy_coeff", "0", "--replay_buffer_size", "512", "--replay_importance", "False"),
    *("--eval_interval", "20", "--save_interval", "20"),
]
WITHOUT_TASKS = ["--comments", "action", "--noise", "1", "--negative_percentage", "0"]
SMALL_DATA = ["--num_samples", "40", "--num_held_out", "10"]  # of a smoke test
TASKS = {
    "taxi": Task(
        env=["--env", "dangerous_taxi"],
        data=["--num_samples", "4000", "--num_held_out", "50"],
        base=[],
        sft=["--epochs", "8"],
        rl=["--max_steps", "75", "--levels", "full", "--env_options", "pickup_bonus=1"],
        evaluation=["--levels", "full", "--eval_reps", "5"],
        rounds=[25, 50, 75],
        compared=50,
    ),
    "explore": Task(
        env=["--env", "auto_explore", "--env_options", "task_dir=FOLDER/tasks", "max_entries=6", "output_limit=80"],
        data=["--num_samples", "3000", "--num_held_out", "50"],
        base=[*READER, "--vocab_size", "1536"],
        sft=READER_TUNING,
        rl=["--max_steps", "25", "--leaveout_prob", "0.5", *READER_LEARNING],
        evaluation=["--eval_reps", "3"],
        rounds=[25],
        compared=25,
    ),
    "household": Task(
        env=["--env", "alfworld", "--env_options", "horizon=20", "places=4", "things=2"],
        data=["--num_samples", "6000", "--num_held_out", "50", "--level", "0", "--noise", "0.5"],
        base=READER,
        sft=READER_TUNING,
        rl=["--max_steps", "40", "--num_envs", "32", "--levels", "pick_and_place_simple", *READER_LEARNING],
        evaluation=["--num_envs", "32", "--levels", "pick_and_place_simple", "--num_samples", "40", "--eval_reps", "5"],
        rounds=[40],
        compared=40,
    ),
}
ORDER = [*ARMS]  # each arm is to be ahead of the one before
DEMONSTRATED = ["SFT, oracle's commands", "SFT+RL, oracle's commands"]
COMPARISONS = {"taxi": ORDER, "explore": ORDER, "household": DEMONSTRATED}
RUN = {"taxi": [*ARMS, *CONTROLS], "explore": ORDER, "household": DEMONSTRATED}  # when no arms are asked for


@dataclass(frozen=True, kw_only=True)
class ReflectRLExampleArgs:
    """Compare Reflect-RL with its parts, over seeds."""

    output_dir: str = "reflect_rl"
    """Folder for data, logs, results and the picture."""
    task: str = "taxi"
    """Which environment."""
    seeds: list[int] | None = None
    """Seeds to run; 1 to 5 when not given."""
    arms: list[str] | None = None
    """Names of arms and controls to run; those of the task when not given."""
    num_workers: int = 2
    """Seeds at a time, one thread each."""
    smoke: bool = False
    """Run everything for a moment only, to see that it works; nothing is claimed of the result."""

    def __post_init__(self) -> None:
        check_at_least(self, "num_workers", 1)
        if self.task not in TASKS:
            raise ValueError(f"--task {self.task} is none of: {', '.join(TASKS)}")
        for seed in self.seeds or []:
            if seed < 0:
                raise ValueError(f"--seeds {seed} must be at least 0")
        unknown = [name for name in self.arms or [] if name not in ARMS | CONTROLS]
        if unknown:
            raise ValueError(f"--arms {unknown[0]} is none of: {'; '.join(ARMS | CONTROLS)}")


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(ReflectRLExampleArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve() / args.task
    folder.mkdir(parents=True, exist_ok=True)
    seeds, arms = args.seeds or [1, 2, 3, 4, 5], args.arms or RUN[args.task]
    rows: list[dict[str, Any]] = []
    if args.task == "explore" and not (folder / "tasks" / "tree.json").is_file():
        library = sysconfig.get_path("stdlib")
        call(folder, make_tasks, "--repo_dir", library, "--destination_dir", folder / "tasks")
    setting = TASKS[args.task]
    setting = setting._replace(env=[word.replace("FOLDER", str(folder)) for word in setting.env])
    base = None
    if setting.base:
        print(f"a base for all seeds, where it is not made yet: {folder / 'base' / 'output.txt'}", flush=True)
        base = base_of(folder / "base", setting, args.smoke)
    with ProcessPoolExecutor(args.num_workers, multiprocessing.get_context("spawn"), _one_thread) as pool:
        jobs = [pool.submit(run_seed, folder, setting, base, seed, arms, args.smoke) for seed in seeds]
        for job in as_completed(jobs):
            rows += job.result()
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    claims = tell(args.task, rows, arms)
    experiments = [row["experiment"] for row in rows if row["learned"]]
    if experiments:
        flags = ["--group_seeds", "True", "--metrics", "val/success", "episodes/success", "episodes/cost"]
        plot.main(["--experiment_dir", *experiments, *flags, "--output_file", str(folder / "curves.png")])
    finish(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- arms
def base_of(own: Path, task: Task, smoke: bool) -> str:
    """The folder of the base; what is made already is kept.

    It learns from random walks whose comments only name the command that was carried out: to read the states, and to
    find in a list the label of a command. Of the tasks it learns nothing.
    """
    data = own / "data"
    flags = [*task.env, "--destination_dir", data, "--seed", 0, *task.base, *(SMALL_DATA if smoke else [])]
    model = made(own / "base.txt", lambda: call(own, prepare_data, *flags, *WITHOUT_TASKS) or data / "base")
    for number, stage in enumerate(STAGES):
        flags = ["--data_dir", data / "sft_policy_positive", "--model_name", model, "--log_dir", own / "logs"]
        flags += ["--seed", 0, *FINE_TUNING, *stage, *(["--max_steps", 2] if smoke else [])]
        experiment = made(own / f"stage-{number}.txt", functools.partial(call, own, sft, *flags))
        model = str(next(reversed(checkpoints(Path(experiment)))))
    return model


def run_seed(
    folder: Path, setting: Task, base: str | None, seed: int, arms: Sequence[str], smoke: bool
) -> list[dict[str, Any]]:
    """The arms of one seed, one after another, those that are done already left out; their results."""
    own = folder / f"seed-{seed}"
    settings = {"task": setting._asdict(), "base": base, "sft": FINE_TUNING, "rl": LEARNING, "smoke": smoke}
    with JsonlWriter(own / "results.jsonl", settings) as writer:
        done = {row["arm"] for row in writer.rows}
        for name in arms:
            if name not in done:
                writer.append(run_arm(own, setting, base, seed, name, smoke))
        return [row for row in writer.rows if row["arm"] in arms]


def run_arm(own: Path, task: Task, base: str | None, seed: int, name: str, smoke: bool) -> dict[str, Any]:
    """Fine-tune, learn and measure one arm; what it shares with another arm is made once."""
    arm = (ARMS | CONTROLS)[name]
    started = time.perf_counter()
    policy = fine_tuned(own, task, base, seed, arm.data, arm.policy, smoke)
    reflector = arm.reflector and fine_tuned(own, task, base, seed, arm.data, arm.reflector, smoke)
    experiment, models = policy, {0: policy}
    if arm.learns:
        flags = [*task.env, *LEARNING, *task.rl, "--seed", seed, "--sft_experiment_dir", policy]
        flags += ["--reflect_experiment_dir", reflector] if reflector else []
        flags += ["--max_steps", 2, "--save_interval", 1, "--rollout_size", 4] if smoke else []
        begun = [path.parent for path in (own / "logs" / name).rglob("args.json") if checkpoints(path.parent)]
        flags += ["--experiment_name", name, "--log_dir", own / "logs"]
        experiment = call(own, reflect_rl, *(["--resume_from", max(begun)] if begun else flags))
        rounds = [1, 2] if smoke else task.rounds
        saved = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(Path(experiment))}
        models = {step: saved[step] for step in rounds}
    seconds = time.perf_counter() - started
    results = []
    for step, model in models.items():
        flags = [*task.env, "--experiment_dir", model, "--accelerator", "cpu", *task.evaluation]
        flags += ["--reflect_experiment_dir", reflector] if reflector else []
        flags += ["--num_samples", 1, "--eval_reps", 1] if smoke else []
        results.append({"iterations": step} | call(own, evaluate, *flags)[2])
    print(f"({seconds:.0f} s) seed {seed}, {name}: {[round(row['success'], 3) for row in results]}", flush=True)
    found = {"seed": seed, "arm": name, "seconds": seconds, "experiment": experiment, "learned": arm.learns}
    return found | {"results": results}


def fine_tuned(own: Path, task: Task, base: str | None, seed: int, data: str, name: str, smoke: bool) -> str:
    """The experiment dir of SFT on a set; data and model are made once."""
    folder = own / "data" / data.replace(" ", "_")
    flags = [*task.env, "--destination_dir", folder, "--seed", seed, "--num_proc", 1, *task.data, *DATA[data]]
    flags += [*(["--tokenizer_name", base] if base else []), *(SMALL_DATA if smoke else [])]
    model = made(folder / "base.txt", lambda: call(own, prepare_data, *flags) or base or folder / "base")
    flags = ["--data_dir", folder / name, "--model_name", model, "--log_dir", own / "logs"]
    flags += ["--experiment_name", f"sft, {data}", "--seed", seed, *FINE_TUNING, *task.sft]
    flags += ["--max_steps", 2] if smoke else []
    return made(folder / f"{name}.txt", lambda: call(own, sft, *flags))


def made(kept: Path, make: Callable[[], Any]) -> str:
    """What `make` returns, a path; made once and kept in a file."""
    if not kept.is_file():
        write_text(kept, str(make()))
    return kept.read_text(encoding="utf-8")


def call(own: Path, program: Any, *argv: Any) -> Any:
    """A program's main in this process, what it prints appended to a file."""
    with output_to(own / "output.txt"):
        return program.main([str(word) for word in argv])


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------------------- results
def tell(task: str, rows: Sequence[dict[str, Any]], arms: Sequence[str]) -> dict[str, bool]:
    """Print the table; returns which claims hold, in sampled success, over seeds."""
    from rich.console import Console
    from rich.table import Table

    by_arm = {arm: {row["seed"]: row for row in rows if row["arm"] == arm} for arm in arms}
    table = Table(title=f"{task}: success on held-out starts, mean over seeds [95% interval]")
    for heading in ("arm", "iterations", "sampled", "greedy", "seconds"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    compared = TASKS[task].compared
    early: dict[str, dict[int, float]] = {}  # sampled success where arms are compared, by seed
    for arm, seeds in by_arm.items():
        for seed, row in seeds.items():
            rounds = {result["iterations"]: result["success"] for result in row["results"]}
            early.setdefault(arm, {})[seed] = rounds.get(compared, row["results"][-1]["success"])
        for at in zip(*(row["results"] for row in seeds.values())):
            means = [shown([row[key] for row in at]) for key in ("success", "greedy_success")]
            seconds = sum(row["seconds"] for row in seeds.values()) / len(seeds)
            table.add_row(arm, str(at[0]["iterations"]), *means, f"{seconds:.0f}")
    console = Console(width=110)
    console.print(table)
    claims = {}
    for worse, better in zip(COMPARISONS[task], COMPARISONS[task][1:]):
        if worse in early and better in early:
            gaps = [early[better][seed] - early[worse][seed] for seed in early[worse]]
            mean, low, high = interval(gaps)
            console.print(f"  {better} less {worse} after {compared}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
            claims[f"{better} > {worse}"] = low > 0
    return claims


def shown(values: Sequence[float]) -> str:
    """Mean and its 95% interval; the mean alone of one seed."""
    mean, low, high = interval(values)
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
