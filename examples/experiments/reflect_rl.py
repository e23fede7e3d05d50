"""Does a reflector help RL, and which part of it does? Four arms and their controls, on three tasks, over seeds.

All arms are `datasets_prep.text_envs.prepare_data`, `lightrlhf.sft` and `lightrlhf.reflect_rl` with other flags,
measured by `lightrlhf.evaluate --env` on held-out starts of the full task, sampled and greedy. They differ in the
dataset that they are fine-tuned on, all with equally many rows, and in who reflects:

    SFT                     state -> command, mostly noise             no RL
    SFT+RL                  the same                                   RL alone
    Reflect-RL, positive    reflection -> command, the same noise      RL with a reflector
    Reflect-RL              half of the rows are negative examples     RL with a reflector

A negative example also trains the right command, so Reflect-RL sees more of the oracle than the others do. The controls
measure that: SFT on the oracle's commands alone; RL from there; Reflect-RL without negative examples, but with less
noise, so that equally many commands are the oracle's (of the taxi's six, a random one is right one time in six:
1/2 + 1/2 (1/10 + 9/10 1/6) = 1 - p + p/6 gives a noise p of 0.45); and Reflect-RL with more noise. Reflections are
matched already: every dataset of an arm has equally many.

Tasks: `taxi`, DangerousTaxi's full ride; `explore`, AutoExplore on the source of Python's own standard library, files
up to two folders deep; `household`, small games of ALFWorld's engine, which are **not** the ALFWorld benchmark: put an
object somewhere, in rooms of four places. There RL is compared with SFT on the planner's commands.

The commands of the last two differ from state to state, so a policy must read names and look its command up in a list.
A fresh model does not learn that from so few demonstrations. Therefore all seeds and arms of these tasks start from one
base that was trained on random walks; `base_of` explains how, and that it learns nothing about the tasks.

Claims, by the 95% interval of the paired difference of sampled success over seeds: each of the four arms above the one
before it (household: RL above SFT on the planner's commands); three comparisons a task, not adjusted. Seeds: ten, 1 to
10, of the taxi, whose arms take less than ten minutes; five, 1 to 5, of the other two.

Settings were tuned on seed 100, which is none of them. Taxi, with the arm Reflect-RL: 6 epochs of fine-tuning left
it at .12 of held-out starts after 50 iterations and .94 after 75; with 8 epochs an earlier trial reached .92 of its
training starts after 25. Household: eight trials, in results/earlier.json; one of them used seed 1.
Those of `explore` are the household's, untested before.

Prints a table and the claims that held, draws curves. Finished arms are kept: the same command resumes after a kill,
and `--seeds 11 12` adds two to those that are there.

    python -m examples.experiments.reflect_rl --task taxi
"""

from __future__ import annotations

import functools
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets_prep.text_envs import make_tasks, prepare_data
from examples.experiments.records import FIVE, TEN, Row, common_seeds, made_by, now, results, spent
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.programs import logged, made, workers
from lightrlhf import evaluate, plot, reflect_rl, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag, random_seed
from lightrlhf.cli.lists import texts
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import JsonlWriter
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import read_metrics

Flags = dict[str, Any]


class Arm(NamedTuple):
    """The datasets that an arm is fine-tuned on, and whether RL follows."""

    data: str  # one of DATA
    policy: str  # the policy's dataset
    reflector: str | None  # the reflector's dataset
    learns: bool = True


DATA: dict[str, Flags] = {
    "noisy": {},
    "oracle": {"targets": "oracle"},
    "less noise": {"noise": 0.45},
    "more noise": {"noise": 1.0},
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
    """An environment with its sizes and flags."""

    env: Flags
    data: Flags
    base: Flags  # data and size of the base that all seeds and arms start from; {}: each starts from fresh weights
    sft: Flags
    rl: Flags
    evaluation: Flags
    rounds: list[int]  # iterations after which success is measured
    compared: int  # the iteration at which arms are compared: early, since all may converge to the same success


FINE_TUNING = {
    "accelerator": "cpu",
    "use_targets": True,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 3e-3,
    "lr_warmup_steps": 20,
    "eval_interval": 0,
    "log_interval": 50,
    "save_interval": 100000,
    "logger": "csv",
}
BASE_STAGES: list[Flags] = [  # whole texts first, then only the command that the comment names
    {"use_targets": False, "epochs": 2},
    {"use_targets": True, "epochs": 3, "learning_rate": 2e-3},
]
LEARNING = {
    "accelerator": "cpu",
    "rollout_size": 64,
    "learning_rate": 1e-3,
    "entropy_coeff": 0.02,
    "keep_last": 0,
    "save_interval": 25,
    "eval_interval": 10,
    "logger": "csv",
}
READER = {
    "num_samples": 12000,
    "num_held_out": 50,
    "num_proc": 1,
    "tokens_span": "words",
    "hidden_size": 96,
    "num_hidden_layers": 3,
}
READER_TUNING = {"epochs": 2, "learning_rate": 2e-3, "lr_scheduler_type": "cosine"}
READER_LEARNING = {
    "trainer": "ppo",
    "ppo_epochs": 1,
    "mini_batch_size": 128,
    "gae_gamma": 0.95,
    "learning_rate": 3e-4,
    "entropy_coeff": 0,
    "replay_buffer_size": 512,
    "replay_importance": False,
    "eval_interval": 20,
    "save_interval": 20,
}
WITHOUT_TASKS = {"comments": "action", "noise": 1, "negative_percentage": 0}
SMALL_DATA = {"num_samples": 40, "num_held_out": 10}  # of a smoke test
SIMPLE = "pick_and_place_simple"
TASKS = {
    "taxi": Task(
        env={"env": "dangerous_taxi"},
        data={"num_samples": 4000, "num_held_out": 50},
        base={},
        sft={"epochs": 8},
        rl={"max_steps": 75, "levels": "full", "env_options": "pickup_bonus=1"},
        evaluation={"levels": "full", "eval_reps": 5},
        rounds=[25, 50, 75],
        compared=50,
    ),
    "explore": Task(
        env={"env": "auto_explore", "env_options": ["task_dir=FOLDER/tasks", "max_entries=6", "output_limit=80"]},
        data={"num_samples": 3000, "num_held_out": 50},
        base=READER | {"vocab_size": 1536},
        sft=READER_TUNING,
        rl={"max_steps": 25, "leaveout_prob": 0.5} | READER_LEARNING,
        evaluation={"eval_reps": 3},
        rounds=[25],
        compared=25,
    ),
    "household": Task(
        env={"env": "alfworld", "env_options": ["horizon=20", "places=4", "things=2"]},
        data={"num_samples": 6000, "num_held_out": 50, "level": 0, "noise": 0.5},
        base=READER,
        sft=READER_TUNING,
        rl={"max_steps": 40, "num_envs": 32, "levels": SIMPLE} | READER_LEARNING,
        evaluation={"num_envs": 32, "levels": SIMPLE, "num_samples": 40, "eval_reps": 5},
        rounds=[40],
        compared=40,
    ),
}
ORDER = [*ARMS]  # each arm is claimed to beat the one before
DEMONSTRATED = ["SFT, oracle's commands", "SFT+RL, oracle's commands"]
COMPARISONS = {"taxi": ORDER, "explore": ORDER, "household": DEMONSTRATED}
SEEDS = {"taxi": TEN, "explore": FIVE, "household": FIVE}
RUN = {"taxi": [*ARMS, *CONTROLS], "explore": ORDER, "household": DEMONSTRATED}  # arms by default


@dataclass(frozen=True, kw_only=True)
class ReflectRLExperimentArgs(Args):
    """Compare Reflect-RL with its parts, over seeds."""

    output_dir: str = "reflect_rl"
    """Folder for data, logs, results and the figure."""
    task: str = flag("taxi", choices=TASKS)
    """Environment: taxi, explore or household."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 of the taxi and 1 to 5 of the others by default."""
    arms: list[str] | None = flag(None, split=texts, choices=ARMS | CONTROLS)  # their names have commas
    """Names of arms and controls to run; those of the task by default."""
    num_workers: int = at_least(1, 2)
    """Seeds at a time, one thread each."""
    smoke: bool = False
    """Run everything for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(ReflectRLExperimentArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve() / args.task
    folder.mkdir(parents=True, exist_ok=True)
    seeds, arms = args.seeds or SEEDS[args.task], args.arms or RUN[args.task]
    if args.task == "explore" and not (folder / "tasks" / "tree.json").is_file():
        library = sysconfig.get_path("stdlib")
        logged(folder / "output.txt", make_tasks, repo_dir=library, destination_dir=folder / "tasks")
    task = in_folder(TASKS[args.task], folder)
    settings = TASKS[args.task]._asdict() | {"stages": BASE_STAGES, "fine_tuning": FINE_TUNING, "learning": LEARNING}
    with results(f"reflect_rl_{args.task}", folder, settings | {"smoke": args.smoke}) as writer:
        done = {(row["arm"], row["seed"]) for row in writer.rows}
        left = {seed: [arm for arm in arms if (arm, seed) not in done] for seed in seeds}
        for row in run_all(folder, task, {seed: own for seed, own in left.items() if own}, args):
            writer.append(row)
        rows = writer.rows
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    common = common_seeds(rows, arms)
    claims = show_results(args.task, [row for row in rows if row["seed"] in common], arms)
    learned = [
        folder / f"seed-{seed}" / "logs" / arm for seed in common for arm in arms if (ARMS | CONTROLS)[arm].learns
    ]
    experiments = [str(path.parent) for own in learned for path in sorted(own.rglob("args.json"))[-1:]]
    if experiments:  # of rows that are kept the runs are not
        metrics = ["val/success", "episodes/success", "episodes/cost"]
        where = [f"--output_file={folder / 'curves.png'}", "--group_seeds=True"]
        plot.main(["--experiment_dir", *experiments, "--metrics", *metrics, *where])
    report_claims(claims, folder)
    return claims


def in_folder(task: Task, folder: Path) -> Task:
    """The task with FOLDER in its environment's options replaced."""
    options = task.env.get("env_options")
    if options is None:
        return task
    return task._replace(env=task.env | {"env_options": [option.replace("FOLDER", str(folder)) for option in options]})


# ------------------------------------------------------------------------------------------------------------- arms
def run_all(folder: Path, task: Task, left: dict[int, list[str]], args: ReflectRLExperimentArgs) -> Iterator[Row]:
    """The rows of these arms of each seed, once all of the seed are done."""
    if not left:
        return
    with workers(args.num_workers) as pool:
        base = None
        if task.base:
            print(f"base of all seeds, trained if missing: {folder / 'base' / 'output.txt'}", flush=True)
            base = pool.submit(base_of, folder / "base", task, args.smoke).result()
        jobs = [pool.submit(run_seed, folder, task, base, seed, arms, args.smoke) for seed, arms in left.items()]
        for job in as_completed(jobs):
            yield from job.result()


def base_of(own: Path, task: Task, smoke: bool) -> str:
    """The folder of the base; finished stages are kept.

    It is trained on random walks whose comments only name the command that was carried out: to read states, and to find
    the label of a command in a list. It learns nothing about the tasks.
    """
    run = functools.partial(logged, own / "output.txt")
    data = own / "data"
    flags = task.env | task.base | (SMALL_DATA if smoke else {}) | WITHOUT_TASKS
    model = made(own / "base.txt", lambda: run(prepare_data, destination_dir=data, seed=0, **flags) or data / "base")
    for number, stage in enumerate(BASE_STAGES):
        flags = FINE_TUNING | stage | ({"max_steps": 2} if smoke else {}) | {"log_dir": own / "logs", "seed": 0}
        train = functools.partial(run, sft, data_dir=data / "sft_policy_positive", model_name=model, **flags)
        experiment = made(own / f"stage-{number}.txt", train)
        model = str(next(reversed(checkpoints(Path(experiment)))))
    return model


def run_seed(folder: Path, task: Task, base: str | None, seed: int, arms: Sequence[str], smoke: bool) -> list[Row]:
    """Run the arms of one seed; returns their rows, which its own file has as they come."""
    own = folder / f"seed-{seed}"
    settings = {"task": task._asdict(), "base": base, "sft": FINE_TUNING, "rl": LEARNING, "smoke": smoke}
    with JsonlWriter(own / "results.jsonl", settings) as writer:
        done = {row["arm"] for row in writer.rows}
        for name in arms:
            if name not in done:
                writer.append(run_arm(own, task, base, seed, name, smoke))
        return [row for row in writer.rows if row["arm"] in arms]


def run_arm(own: Path, task: Task, base: str | None, seed: int, name: str, smoke: bool) -> Row:
    """Fine-tune, train by RL and measure one arm; data and models that arms share are made once."""
    run = functools.partial(logged, own / "output.txt")
    arm = (ARMS | CONTROLS)[name]
    began = now()
    policy = fine_tuned(own, task, base, seed, arm.data, arm.policy, smoke)
    reflector = arm.reflector and fine_tuned(own, task, base, seed, arm.data, arm.reflector, smoke)
    experiment, models = policy, {0: policy}
    if arm.learns:
        flags = task.env | LEARNING | task.rl | {"experiment_name": name, "log_dir": own / "logs", "seed": seed}
        flags |= {"max_steps": 2, "save_interval": 1, "rollout_size": 4} if smoke else {}
        flags |= {"sft_experiment_dir": policy, "reflect_experiment_dir": reflector}
        begun = [path.parent for path in (own / "logs" / name).rglob("args.json") if checkpoints(path.parent)]
        experiment = run(reflect_rl, **({"resume_from": max(begun)} if begun else flags))
        rounds = [1, 2] if smoke else task.rounds
        saved = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(Path(experiment))}
        models = {step: saved[step] for step in rounds}
    seconds = spent(began)
    tested = held_out(own, task, models, reflector, smoke)
    print(
        f"({seconds['seconds']:.0f} s) seed {seed}, {name}: {[round(row['success'], 3) for row in tested]}", flush=True
    )
    curve = [row for row in read_metrics(experiment) if "val/success" in row] if arm.learns else []
    row = {"seed": seed, "arm": name, "results": tested, "curve": curve}
    return row | seconds | made_by()


def held_out(own: Path, task: Task, models: dict[int, str], reflector: str | None, smoke: bool) -> list[Row]:
    """What `evaluate` measures on held-out starts of models by their iterations."""
    flags = task.env | task.evaluation | ({"num_samples": 1, "eval_reps": 1} if smoke else {})
    flags |= {"reflect_experiment_dir": reflector, "accelerator": "cpu"}
    run = functools.partial(logged, own / "output.txt", evaluate)
    return [{"iterations": step} | run(model_name=model, **flags)[2] for step, model in models.items()]


def fine_tuned(own: Path, task: Task, base: str | None, seed: int, data: str, name: str, smoke: bool) -> str:
    """The experiment dir of SFT on a dataset; data and model are made once."""
    run = functools.partial(logged, own / "output.txt")
    folder = own / "data" / data.replace(" ", "_")
    flags = task.env | task.data | {"num_proc": 1} | DATA[data] | (SMALL_DATA if smoke else {})
    flags |= {"destination_dir": folder, "tokenizer_name": base, "seed": seed}
    model = made(folder / "base.txt", lambda: run(prepare_data, **flags) or base or folder / "base")
    tuning = FINE_TUNING | task.sft | ({"max_steps": 2} if smoke else {})
    where = {"data_dir": folder / name, "log_dir": own / "logs", "experiment_name": f"sft, {data}", "seed": seed}
    return made(folder / f"{name}.txt", lambda: run(sft, model_name=model, **where, **tuning))


# ---------------------------------------------------------------------------------------------------------- results
def show_results(task: str, rows: Sequence[Row], arms: Sequence[str]) -> dict[str, bool]:
    """Print the table; returns which claims hold, in sampled success, over seeds."""
    by_arm = {arm: {row["seed"]: row for row in rows if row["arm"] == arm} for arm in arms}
    table = []
    compared = TASKS[task].compared
    early: dict[str, dict[int, float]] = {}  # sampled success where arms are compared, by seed
    for arm, by_seed in by_arm.items():
        for seed, row in by_seed.items():
            rounds = {result["iterations"]: result["success"] for result in row["results"]}
            early.setdefault(arm, {})[seed] = rounds.get(compared, row["results"][-1]["success"])
        for tested in zip(*(row["results"] for row in by_seed.values())):
            means = [shown([result[key] for result in tested]) for key in ("success", "greedy_success")]
            seconds = sum(row["seconds"] for row in by_seed.values()) / len(by_seed)
            table.append((arm, str(tested[0]["iterations"]), *means, f"{seconds:.0f}"))
    title = f"{task}: success on held-out starts, mean over seeds [95% interval]"
    print_table(title, ("arm", "iterations", "sampled", "greedy", "seconds"), table, width=110)
    claims = {}
    for worse, better in zip(COMPARISONS[task], COMPARISONS[task][1:]):
        if worse in early and better in early:
            gap = paired([early[better][seed] for seed in early[worse]], list(early[worse].values()))
            print(f"  {better} minus {worse} after {compared}: {shown_gap(gap)}")
            claims[f"{better} > {worse}"] = gap[1] > 0
    return claims


if __name__ == "__main__":
    main()
