"""The café without a critic: GRPO, RLOO and PPO from the same SFT policy and reward model, over seeds.

Every method samples 64 responses a step and makes one update with them, for 48 steps, so that all see 3,072 samples and
make 48 updates; GRPO and RLOO sample eight responses to each prompt, PPO one. KL coefficient (in the reward, 0.05),
standardised rewards, penalty for a missing end, warm-up and constant rate are the same. GRPO has its defaults, RLOO is
`--advantage rloo --loss_type reinforce --aggregation sum`, PPO has the café's critic and its learning rate.

Of each method the learning rate is chosen among the same three on seed 0, by the reward model's score on the validation
prompts after training, never by the gold judge. Then seeds 1 to 10 are trained at that rate, each run on one
core. Checkpoints after 1/8, 1/4, 1/2, 3/4 and all of the samples answer the 400 test prompts, once each and with
the same noise for all. Read: gold score (of the judge that no training stage uses), KL to the SFT policy in nats a
response, length in tokens, at equal samples (the end) and at equal time: where the fastest method with that seed ended,
each curve a line between two checkpoints. Time is what the run itself measured of sampling, scoring, advantages and
updates, times the share of the core that it had (CPU over wall time, one thread): other programs may take some.

Gold is compared by the 95% interval of the paired difference over seeds, three pairs of methods, at equal samples and
at equal time: six comparisons, not adjusted for their number. A run takes 20 to 50 seconds, all of them about an hour
of one core. Results are stored as they come: the same command resumes after a kill, and `--seeds 11 12` adds two to
those that are there.

    python -m examples.experiments.critic_free_cafe
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from examples.experiments.cafe_methods import COMMON, METHODS, RESPONSES, prepared
from examples.experiments.readings import Curve, at_equal_samples_and_time
from examples.experiments.records import TEN, best_rate, common_seeds, made_by, results
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged
from lightrlhf import evaluate
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.results import label, panels, print_table, save_figure
from lightrlhf.storage.run_dir import read_metrics

READ_AT, SMOKE_READ_AT = (6, 12, 24, 36, 48), (1, 2)  # steps; the last is the end
RATES = [1e-4, 3e-4, 1e-3]
MEASURES = {"gold": "gold score", "kl": "KL to the SFT policy, nats", "length": "tokens of a response"}


@dataclass(frozen=True, kw_only=True)
class CriticFreeCafeArgs(Args):
    """Compare GRPO, RLOO and PPO on the café."""

    output_dir: str = "critic_free_cafe"
    """Folder for data, logs, results and the figure."""
    methods: list[str] | None = flag(None, choices=METHODS)
    """Methods to run; all by default."""
    seeds: list[int] | None = at_least(1, None, remedy="learning rates are chosen on seed 0")
    """Seeds to run; 1 to 10 by default."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(CriticFreeCafeArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve()
    methods, seeds = args.methods or list(METHODS), args.seeds or TEN
    flags = {name: method.flags for name, method in METHODS.items()}
    settings = {"common": COMMON, "methods": flags, "rates": RATES, "read_at": READ_AT, "smoke": args.smoke}
    with results("critic_free_cafe", folder, settings) as writer:
        for method in methods:
            for rate in RATES:
                if not any((row["arm"], row["learning_rate"]) == (method, rate) for row in trials(writer.rows)):
                    writer.append(run_trial(folder, method, rate, args.smoke) | made_by())
            rate = best_rate(row for row in trials(writer.rows) if row["arm"] == method)
            for seed in seeds:
                if not any((row["arm"], row["seed"]) == (method, seed) for row in writer.rows):
                    writer.append(run_seed(folder, method, seed, rate, args.smoke) | made_by())
        rows = writer.rows
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    of_run = {(row["arm"], row["seed"]): row["curve"] for row in rows if row["seed"]}
    seeds = common_seeds((row for row in rows if row["seed"]), methods)
    curves = {method: [of_run[method, seed] for seed in seeds] for method in methods}
    show_trials(trials(rows))
    claims = show_results(curves)
    draw(curves, folder / "critic_free_cafe.png")
    print(f"curves: {folder / 'critic_free_cafe.png'}")
    report_claims(claims, folder)
    return claims


def trials(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of trials, which are those of seed 0."""
    return [row for row in rows if row["seed"] == 0]


# ------------------------------------------------------------------------------------------------------------- runs
def read_steps(smoke: bool) -> tuple[int, ...]:
    return SMOKE_READ_AT if smoke else READ_AT


def trained(folder: Path, method: str, seed: int, rate: float, smoke: bool, **flags: Any) -> tuple[str, float]:
    """The experiment dir of one run, and the share of the core that it had."""
    own = folder / f"seed-{seed}"
    data, start, reward = prepared(own, seed, smoke)
    program, own_flags, rate_flag = METHODS[method]
    where = {"data_dir": data, "sft_experiment_dir": start, "rm_experiment_dir": reward, "seed": seed}
    where |= {"log_dir": own / "logs" / method, "max_steps": read_steps(smoke)[-1], rate_flag: rate}
    began = time.process_time(), time.perf_counter()
    experiment = logged(own / "output.txt", program, **where, **COMMON, **own_flags, **flags)
    return experiment, min((time.process_time() - began[0]) / (time.perf_counter() - began[1]), 1.0)


def run_trial(folder: Path, method: str, rate: float, smoke: bool) -> dict[str, Any]:
    """Train with one learning rate on seed 0; returns the reward model's score on validation prompts."""
    end, iters = read_steps(smoke)[-1], {"eval_iters": 1} if smoke else {}
    experiment, share = trained(folder, method, 0, rate, smoke, eval_interval=end, save_interval=end, **iters)
    rows = read_metrics(experiment)
    last = next(row for row in reversed(rows) if "val/score" in row)
    row = {"arm": method, "seed": 0, "learning_rate": rate, "score": last["val/score"], "kl": last["val/kl"]}
    print(f"{method}, trial: {rate:g} has score {row['score']:.3f}, KL {row['kl']:.1f}", flush=True)
    return row | {"seconds": seconds_by_step(rows, share)[-1], "share_of_core": share}


def run_seed(folder: Path, method: str, seed: int, rate: float, smoke: bool) -> dict[str, Any]:
    """Train one method; returns its curve, measured on test prompts."""
    steps = read_steps(smoke)
    experiment, share = trained(folder, method, seed, rate, smoke, eval_interval=0, save_interval=steps[0], keep_last=0)
    by_step = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(Path(experiment))}
    own = folder / f"seed-{seed}"
    _, start, reward = prepared(own, seed, smoke)
    models = {"model_name": [start, *(by_step[step] for step in steps)], "reference_dir": start}
    models["rm_experiment_dir"] = reward
    flags = {"max_new_tokens": 96, "rollout_mini_batch_size": 128, "num_samples": 8 if smoke else None}
    tested = logged(own / "output.txt", evaluate, **models, **flags, accelerator="cpu")
    seconds = [0.0, *seconds_by_step(read_metrics(experiment), share)]
    names = {"gold": "gold", "kl": "kl", "mean_length": "length", "reward": "reward", "win_rate": "win_rate"}
    curve = [
        {"samples": step * RESPONSES, "seconds": seconds[step]} | {names[key]: row[key] for key in names if key in row}
        for step, row in zip([0, *steps], tested)
    ]
    print(f"{method}, seed {seed}: " + ", ".join(f"{name} {curve[-1][name]:.3f}" for name in MEASURES), flush=True)
    row = {"arm": method, "seed": seed, "learning_rate": rate, "curve": curve, "share_of_core": share}
    return row | {"seconds": curve[-1]["seconds"]}


def seconds_by_step(rows: Sequence[dict[str, Any]], share: float) -> list[float]:
    """Seconds of training up to each step, by what a run measured of it at this share of the core.

    rows: of `metrics.jsonl`.
    """
    total, sums = 0.0, []
    for row in rows:
        if "time/update" in row:
            total += share * sum(row.get(f"time/{phase}", 0.0) for phase in ("rollout", "score", "resample", "update"))
            sums.append(total)
    return sums


# ---------------------------------------------------------------------------------------------------------- results
def show_trials(rows: Sequence[dict[str, Any]]) -> None:
    """Print the validation scores by which learning rates were chosen."""
    table = []
    for method in METHODS:
        mine = [row for row in rows if row["arm"] == method]
        if mine:
            cells = [f"{row['score']:.3f} (KL {row['kl']:.1f})" for row in mine]
            table.append((method, *cells, f"{best_rate(mine):g}"))
    title = "reward model's validation score on seed 0, by learning rate"
    print_table(title, ("", *(f"{rate:g}" for rate in RATES), "chosen"), table, width=100)


def show_results(curves: dict[str, list[Curve]]) -> dict[str, bool]:
    """Print the tables; returns which claims hold."""
    claims: dict[str, bool] = {}
    seeds = len(next(iter(curves.values())))
    start = [curve[0] for curve in next(iter(curves.values()))]
    print("  SFT policy: " + ", ".join(f"{name} {shown([row[name] for row in start])}" for name in MEASURES))
    for reading, by_method in at_equal_samples_and_time(curves, list(MEASURES)).items():
        table = []
        for method, values in by_method.items():
            ends = interval([curve[-1]["seconds"] for curve in curves[method]])[0]
            cells = (shown(values[name], 1 if name == "length" else 3) for name in MEASURES)
            table.append((method, *cells, f"{ends:.0f}"))
        title = f"the café at {reading}: mean over {seeds} seeds [95% interval]"
        print_table(title, ("", *MEASURES.values(), "seconds of the whole run"), table, width=130)
        for one, other in combinations(by_method, 2):
            gap = paired(by_method[one]["gold"], by_method[other]["gold"])
            print(f"  gold at {reading}, {one} minus {other}: {shown_gap(gap)}")
            claims[f"{one} differs from {other} at {reading}"] = gap[1] > 0 or gap[2] < 0
    return claims


def draw(curves: dict[str, list[Curve]], output: Path) -> None:
    """Draw each method's curves: thin lines for seeds, a thick one for their mean."""
    titles = {
        "gold score": ("samples", "gold"),
        "gold score over time": ("seconds", "gold"),
        "KL": ("samples", "kl"),
        "length": ("samples", "length"),
    }
    figure, axes = panels(list(titles), lines=2, width=4.6, height=3.0)
    for axis, (x, y) in zip(axes, titles.values()):
        for number, (method, runs) in enumerate(curves.items()):
            for curve in runs:
                axis.plot([p[x] for p in curve], [p[y] for p in curve], color=f"C{number}", alpha=0.25, lw=1)
            points = list(zip(*runs))
            xs, ys = ([sum(p[name] for p in row) / len(row) for row in points] for name in (x, y))
            axis.plot(xs, ys, "o-", color=f"C{number}", ms=3, label=method)
        label(axis, "sampled responses" if x == "samples" else "seconds of training", MEASURES[y])
    save_figure(figure, output)


if __name__ == "__main__":
    main()
