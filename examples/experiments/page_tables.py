"""Tables of pages that are made from raw rows, each by its name, which stands in the markers around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

from examples.experiments import critic_free_cafe, grpo_switches
from examples.experiments.claim_list import LIMIT, MATCHED, TOKEN, column, rollouts
from examples.experiments.readings import Read, compare
from examples.experiments.records import Row, best_rate, common_seeds, kept_rows
from examples.experiments.stats import interval, log_rank, paired, restricted, shown, shown_gap

LETTERS = {  # arm: what the page calls it
    TOKEN: "tokens",
    "n=4": "n = 4",
    "n=8": "n = 8",
    "randomized": "randomized",
    "ppl": "ppl",
    "n=inf": "the whole response",
    MATCHED: "tokens, λ^(1/8) = 0.9936",
    "token at lambda=1": "tokens, λ = 1",
}


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    text = "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]])
    return re.sub(r"(?<=\|)  (?=\|)", " ", text) + "\n"


def short(text: str) -> str:
    """Numbers below one without their zero, as pages write them."""
    return re.sub(r"(?<![\d.])0\.", ".", text)


def of_letters(setting: str) -> dict[str, list[Row]]:
    """The rows of each arm on letters, by seed, of the arms that have some."""
    kept = sorted((row for row in kept_rows("macro_actions") if row["setting"] == setting), key=lambda row: row["seed"])
    by_arm = {arm: [row for row in kept if row["arm"] == arm] for arm in LETTERS}
    return {arm: rows for arm, rows in by_arm.items() if rows}


def beside_tokens(by_arm: dict[str, list[Row]], arm: str, read: Read, digits: int, is_time: bool) -> list[str]:
    """How much better an arm is than tokens at the same lambda, and at the matched one."""
    cells = []
    for other in (TOKEN, MATCHED):
        rows = [*by_arm[arm], *by_arm.get(other, [])]
        found = compare(rows, arm, other, read, is_time) if arm not in (TOKEN, other) else None
        text = short(shown_gap(found.gap, digits)) if found else ""
        if found and is_time:
            times = ([row["rollouts"] for row in by_arm[name]] for name in (arm, other))
            text += f", p {short(f'{log_rank(*times)[1]:.2g}')}"
        cells.append(text)
    return cells


def letters_until() -> str:
    """Rollouts on letters until the score is reached, each arm beside tokens at both lambdas."""
    by_arm, table = of_letters("share"), []
    for arm, rows in by_arm.items():
        times = [row["rollouts"] for row in rows]
        every = " ".join(f">{LIMIT}" if time is None else f"{time}" for time in times)
        mean = shown(restricted(times, LIMIT), 1)
        table.append(
            (LETTERS[arm], str(len(rows)), mean, every, *beside_tokens(by_arm, arm, rollouts, 1, is_time=True))
        )
    return markdown(("arm", "n", "rollouts, mean", "each seed", "fewer than tokens", "than tokens at λ^(1/8)"), table)


def letters_scores(setting: str) -> str:
    """The last score on letters in another setting, each arm beside tokens at both lambdas."""
    by_arm, table = of_letters(setting), []
    for arm, rows in by_arm.items():
        mean = short(shown([row["score"] for row in rows]))
        table.append(
            (LETTERS[arm], str(len(rows)), mean, *beside_tokens(by_arm, arm, column("score"), 3, is_time=False))
        )
    return markdown(("arm", "n", "score, mean", "more than tokens", "than tokens at λ^(1/8)"), table)


def real_reasoning() -> str:
    """What was read of each run of the real model on two tasks."""
    rows, table = kept_rows("real_reasoning"), []
    for task in dict.fromkeys(row["task"] for row in rows):
        for arm in ("base", "RAFT", "GRPO"):
            own = sorted((row for row in rows if (row["task"], row["arm"]) == (task, arm)), key=lambda row: row["seed"])
            for row in own:
                name = "" if row is not own[0] else arm if arm != "base" else f"`{task}`: base"
                cells = [
                    name,
                    str(row["seed"] or ""),
                    *(f"{row[share]:.3f}" for share in ("greedy", "pass_1", "pass_8")),
                ]
                cells += [f"{abs(row['kl']):.2f}", f"{row['length']:.1f}", f"{row['commonest']:.3f}"]
                cells += [f"{row['cpu_seconds'] / 3600:.2f}", f"{row['peak_gib']:.1f} GiB"]
                table.append([short(cell) for cell in cells])
    measures = ("greedy", "pass@1", "pass@8", "KL to the base, nats", "tokens", "commonest response")
    return markdown(("", "seed", *measures, "hours", "peak memory"), table)


DIALOGUES = {  # arm: what the page calls it
    "rm": "reward model, all pairs",
    "judge": "judge, the other half",
    "sft": "SFT",
    "policy_rm": "reward model of the policies",
    "dpo": "DPO",
    "grpo": "GRPO",
    "ppo": "PPO",
}


def real_dialogues() -> str:
    """What was read of each run of the real model on dialogues; beside each win rate the accuracy of its judge."""
    rows, table = kept_rows("real_dialogues"), []
    judges = {row["seed"]: row["accuracy"] for row in rows if row["arm"] == "judge"}
    for arm, name in DIALOGUES.items():
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        for row in own:
            cells = [name if row is own[0] else "", str(row["seed"]), "", "", "", "", ""]
            if "accuracy" in row:
                cells[2] = f"{row['accuracy']:.3f} {interval_of(row['accuracy_interval'])}"
            elif "perplexity" in row:
                cells[2] = f"perplexity {row['perplexity_before']:.1f} -> {row['perplexity']:.1f}"
            else:
                won = f"{row['length_controlled_win_rate']:.3f}"
                cells[3] = f"{won} {interval_of(row['length_controlled_win_rate_interval'])}"
                cells[4:7] = f"{judges[row['seed']]:.3f}", f"{row['kl']:.2f}", f"{row['length']:.1f}"
            cells += [f"{row['cpu_seconds'] / 3600:.2f}", f"{row['peak_gib']:.1f} GiB"]
            table.append([short(cell) for cell in cells])
    measures = ("accuracy, 240 pairs", "won against SFT, equal length", "its judge", "KL to SFT, nats", "tokens")
    return markdown(("", "seed", *measures, "hours", "peak memory"), table)


def interval_of(bounds: Sequence[float]) -> str:
    """An interval in brackets."""
    return f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"


# ------------------------------------------------------------------------------------------------ GRPO, RLOO and PPO
def critic_free_rates() -> str:
    """The validation scores on seed 0 by which learning rates were chosen."""
    rows, table = kept_rows("critic_free_cafe"), []
    for method in critic_free_cafe.METHODS:
        trials = [row for row in rows if row["arm"] == method and not row["seed"]]
        cells = [short(f"{row['score']:.3f}") + f" ({row['kl']:.1f})" for row in trials]
        table.append((method, *cells, f"{best_rate(trials):g}"))
    return markdown(("score (KL)", *(f"{rate:g}" for rate in critic_free_cafe.RATES), "chosen"), table)


def critic_free_curves() -> dict[str, list[critic_free_cafe.Curve]]:
    """The curves of each method by seed, of the seeds that all methods have."""
    rows = [row for row in kept_rows("critic_free_cafe") if row["seed"]]
    seeds = common_seeds(rows, critic_free_cafe.METHODS)
    by_run = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    return {method: [by_run[method, seed] for seed in seeds] for method in critic_free_cafe.METHODS}


def critic_free_ends() -> str:
    """Measures of each method at equal samples and at equal time."""
    curves, table = critic_free_curves(), []
    for reading, by_method in critic_free_cafe.readings(curves).items():
        for method, values in by_method.items():
            name = f"{reading}: {method}" if not table or method == next(iter(by_method)) else method
            means = [shown(values[measure], digits) for measure, digits in (("gold", 3), ("kl", 1), ("length", 1))]
            seconds = f"{interval([curve[-1]['seconds'] for curve in curves[method]])[0]:.0f}"
            table.append((name, *map(short, means), seconds if reading == "equal samples" else ""))
    return markdown(("", "gold", "KL, nats", "tokens", "seconds of training"), table)


def critic_free_gaps() -> str:
    """Differences in gold between methods at equal samples and at equal time."""
    found = critic_free_cafe.readings(critic_free_curves())
    pairs = list(combinations(critic_free_cafe.METHODS, 2))
    table = []
    for one, other in pairs:
        gaps = [short(shown_gap(paired(by[one]["gold"], by[other]["gold"]))) for by in found.values()]
        table.append((f"{one} minus {other}", *gaps))
    return markdown(("difference in gold", *found), table)


def critic_free_checkpoints() -> str:
    """Means at each checkpoint."""
    curves = critic_free_curves()
    points = [f"{point['samples']:,}" for point in next(iter(curves.values()))[0]]
    table = []
    for method, runs in curves.items():
        means = [
            tuple(sum(point[name] for point in of_runs) / len(runs) for name in ("gold", "reward", "kl"))
            for of_runs in zip(*runs)
        ]
        table.append((method, *(short(f"{gold:.3f} ({reward:.2f}, {abs(kl):.1f})") for gold, reward, kl in means)))
    return markdown(("samples", *points), table)


def critic_free_seeds() -> str:
    """Gold at the end and the largest KL of each run."""
    table = []
    for method, runs in critic_free_curves().items():
        table.append((f"{method}: gold", *(short(f"{curve[-1]['gold']:.3f}") for curve in runs)))
        table.append(("largest KL", *(f"{max(point['kl'] for point in curve):.1f}" for curve in runs)))
    return markdown(("seed", *(str(number + 1) for number in range(len(table[0]) - 1))), table)


def grpo_switch(title: str) -> str:
    """One table of GRPO's switches, each arm beside its control."""
    control, arms = grpo_switches.TABLES[title]
    rows = [row for row in kept_rows("grpo_switches") if row["seed"]]
    seeds, table = common_seeds(rows, (control, *arms)), []
    results = {(row["arm"], row["seed"]): row["result"] for row in rows}

    def values(arm: str, name: str) -> list[float]:
        return [results[arm, seed][name] for seed in seeds]

    for arm in (control, *arms):
        cells = [f"`{arm}`" + " (control)" * (arm == control)]
        for name in grpo_switches.COMPARED:
            gap = "" if arm == control else shown_gap(paired(values(arm, name), values(control, name)))
            cells += [shown(values(arm, name)), gap]
        cells += [shown(values(arm, name), 1) for name in ("kl", "wrong_length", "wrong_filler")]
        table.append(tuple(map(short, cells)))
    return markdown(("", "end", "minus control", "run", "minus control", "KL", "longer", "filler"), table)


TABLES: dict[str, Callable[[], str]] = {
    "letters, rollouts": letters_until,
    "letters, position": lambda: letters_scores("position"),
    "letters, noise": lambda: letters_scores("noise"),
    "real model, two tasks": real_reasoning,
    "real model, dialogues": real_dialogues,
    "without a critic, rates": critic_free_rates,
    "without a critic, ends": critic_free_ends,
    "without a critic, differences": critic_free_gaps,
    "without a critic, checkpoints": critic_free_checkpoints,
    "without a critic, seeds": critic_free_seeds,
    **{f"switches, {title}": partial(grpo_switch, title) for title in grpo_switches.TABLES},
}
