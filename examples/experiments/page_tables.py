"""Tables that are made from raw rows, each by its name; pages have some of them, between markers with that name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations

from examples.experiments.agent_tasks import CREDIT, PLACES, POLICIES, SEEDS, bounds, end, exact
from examples.experiments.cafe_methods import METHODS
from examples.experiments.claim_list import COMPARED, LIMIT, MATCHED, SWITCHES, TOKEN, column, rollouts
from examples.experiments.readings import Curve, Read, at_equal_kl, at_equal_samples_and_time, compare, each
from examples.experiments.records import KEPT, Row, best_rate, common_seeds, kept_rows
from examples.experiments.stats import interval, log_rank, paired, pairing, restricted, shown, shown_gap

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


def by_arm(experiment: str, names: Iterable[str], **where: str) -> dict[str, list[Row]]:
    """The rows of each of these arms, by seed, of the arms that have some; where: values of columns of the rows."""
    rows = sorted((row for row in kept_rows(experiment) if where.items() <= row.items()), key=lambda row: row["seed"])
    own = {arm: [row for row in rows if row["arm"] == arm] for arm in names}
    return {arm: found for arm, found in own.items() if found}


def beside_tokens(of_arm: dict[str, list[Row]], arm: str, read: Read, digits: int, is_time: bool) -> list[str]:
    """How much better an arm is than tokens at the same lambda, and at the matched one."""
    cells = []
    for other in (TOKEN, MATCHED):
        rows = [*of_arm[arm], *of_arm.get(other, [])]
        found = compare(rows, arm, other, read, is_time) if arm not in (TOKEN, other) else None
        text = short(shown_gap(found.gap, digits)) if found else ""
        if found and is_time:
            times = ([row["rollouts"] for row in of_arm[name]] for name in (arm, other))
            text += f", p {short(f'{log_rank(*times)[1]:.2g}')}"
        cells.append(text)
    return cells


def letters_until() -> str:
    """Rollouts on letters until the score is reached, each arm beside tokens at both lambdas."""
    of_arm, table = by_arm("macro_actions", LETTERS, setting="share"), []
    for arm, rows in of_arm.items():
        times = [row["rollouts"] for row in rows]
        every = " ".join(f">{LIMIT}" if time is None else f"{time}" for time in times)
        mean = shown(restricted(times, LIMIT), 1)
        table.append(
            (LETTERS[arm], str(len(rows)), mean, every, *beside_tokens(of_arm, arm, rollouts, 1, is_time=True))
        )
    return markdown(("arm", "n", "rollouts, mean", "each seed", "fewer than tokens", "than tokens at λ^(1/8)"), table)


def macro_scores(setting: str, name: str = "score") -> str:
    """The last score in another setting, each arm beside tokens at both lambdas."""
    of_arm, table = by_arm("macro_actions", LETTERS, setting=setting), []
    for arm, rows in of_arm.items():
        mean = short(shown([row[name] for row in rows]))
        table.append((LETTERS[arm], str(len(rows)), mean, *beside_tokens(of_arm, arm, column(name), 3, is_time=False)))
    return markdown(("arm", "n", f"{name}, mean", "more than tokens", "than tokens at λ^(1/8)"), table)


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


def real_reasoning_means() -> str:
    """Means over the seeds of the real model on two tasks."""
    rows, table = kept_rows("real_reasoning"), []
    for task in dict.fromkeys(row["task"] for row in rows):
        for arm in ("base", "RAFT", "GRPO"):
            own = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
            cells = [over_seeds([row[name] for row in own]) for name in ("greedy", "pass_1", "pass_8")]
            cells.append(over_seeds([abs(row["kl"]) for row in own], 1))
            table.append([short(cell) for cell in (f"`{task}`: {arm}", *cells)])
    return markdown(("", "greedy", "pass@1", "pass@8", "KL to the base, nats"), table)


def over_seeds(values: Sequence[float], digits: int = 3) -> str:
    """A mean with its interval, or the only value."""
    return shown(values, digits) if len(values) > 1 else f"{values[0]:.{digits}f}"


def real_dialogues_means() -> str:
    """Means over the seeds of the real model on dialogues."""
    rows, table = kept_rows("real_dialogues"), []
    measures = {"accuracy": 3, "length_controlled_win_rate": 3, "kl": 2, "length": 1}
    for arm, name in DIALOGUES.items():
        own = [row for row in rows if row["arm"] == arm]
        cells = [shown([row[one] for row in own], digits) if one in own[0] else "" for one, digits in measures.items()]
        if any(cells):
            table.append([short(cell) for cell in (name, *cells)])
    return markdown(("", "accuracy, 240 pairs", "won against SFT, equal length", "KL to SFT, nats", "tokens"), table)


def unit_tests_table() -> str:
    """pass@1 of each arm on small programming problems, and its difference to SFT."""
    rows, table = kept_rows("unit_tests"), []
    names = {"SFT": "SFT", "token": "PPO over tokens", "n=5": "PPO, n = 5"}
    seeds = common_seeds(rows, names)
    of_run = {(row["arm"], row["seed"]): row for row in rows}
    first = [of_run["SFT", seed]["pass_1"] for seed in seeds]
    for arm, name in names.items():
        own = [of_run[arm, seed] for seed in seeds]
        passed = [row["pass_1"] for row in own]
        gap = "" if arm == "SFT" else shown_gap(paired(passed, first))
        every = " ".join(f"{value:.3f}" for value in passed)
        reward, runs = (shown([row[column] for row in own]) for column in ("reward", "runs"))
        table.append(tuple(map(short, (name, shown(passed), gap, every, reward, runs))))
    return markdown(("", "pass@1", "more than SFT", "each seed", "mean reward", "run to the end"), table)


HIDDEN_MAP = {  # group: arm: what the page calls it
    "who responds": {
        "online": "the last policy (online)",
        "offline, SFT policy": "the SFT policy (offline)",
        "offline, foreign text": "a policy trained on foreign text",
    },
    "which pair, online": {"online": "`max_min`", "online, max_random": "`max_random`", "online, max_max": "`max_max`"},
    "2 iterations, 10 epochs each": {
        "reused: online": "online",
        "reused: offline, SFT policy": "offline, SFT policy",
        "reused: offline, foreign text": "offline, foreign text",
    },
}


def hidden_map(group: str) -> str:
    """Rewards and KL of the arms of a group on the hidden map, at equal KL and at the end."""
    rows, names, table = kept_rows("hidden_map"), HIDDEN_MAP[group], []
    seeds = common_seeds(rows, names)
    by_run = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    curves = {arm: [by_run[arm, seed] for seed in seeds] for arm in names}
    at_equal = at_equal_kl(curves)
    for arm, runs in curves.items():
        reward, kl = ([curve[-1][name] for curve in runs] for name in ("reward", "kl"))
        gap = "" if arm == next(iter(names)) else shown_gap(paired(at_equal[next(iter(names))], at_equal[arm]))
        table.append(tuple(map(short, (names[arm], shown(at_equal[arm]), gap, shown(reward), shown(kl, 1)))))
    return markdown((group, "reward at equal KL", "the first row minus it", "final reward", "final KL"), table)


CAFE = {  # arm: what the page calls it
    "SFT": "SFT",
    "PPO": "PPO",
    "DPO": "DPO on the guests' pairs, `--rpo_alpha 0.5`",
    "online DPO": "online DPO",
}


def online_cafe() -> str:
    """Gold, win rate, KL and length of each method on the café."""
    table = []
    for arm, rows in by_arm("online_cafe", CAFE).items():
        cells = [str(len(rows)), shown([row["gold"] for row in rows])]
        for name, digits in (("win_rate", 3), ("kl", 1)):
            cells.append(shown([row[name] for row in rows], digits) if name in rows[0] else "")
        cells += [f"{interval([row['mean_length'] for row in rows])[0]:.1f}", f"{rows[0].get('reward_queries') or 0:,}"]
        table.append((CAFE[arm], *map(short, cells)))
    return markdown(("", "n", "gold", "gold win rate over SFT", "KL to SFT, nats", "length", "reward queries"), table)


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
    rates = sorted({row["learning_rate"] for row in rows if not row["seed"]})
    for method in METHODS:
        trials = [row for row in rows if row["arm"] == method and not row["seed"]]
        cells = [short(f"{row['score']:.3f} ({row['kl']:.1f})") for row in trials]
        table.append((method, *cells, f"{best_rate(trials):g}"))
    return markdown(("score (KL)", *(f"{rate:g}" for rate in rates), "chosen"), table)


def critic_free_curves() -> tuple[list[int], dict[str, list[Curve]]]:
    """The seeds that all methods have, and the curves of each method by seed."""
    rows = [row for row in kept_rows("critic_free_cafe") if row["seed"]]
    seeds = common_seeds(rows, METHODS)
    by_run = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    return seeds, {method: [by_run[method, seed] for seed in seeds] for method in METHODS}


def critic_free_ends() -> str:
    """Measures of each method at equal samples and at equal time."""
    (_, curves), table = critic_free_curves(), []
    for reading, by_method in at_equal_samples_and_time(curves, ("gold", "kl", "length")).items():
        for method, values in by_method.items():
            name = f"{reading}: {method}" if method == next(iter(by_method)) else method
            means = [shown(values[measure], digits) for measure, digits in (("gold", 3), ("kl", 1), ("length", 1))]
            seconds = f"{interval([curve[-1]['seconds'] for curve in curves[method]])[0]:.0f}"
            table.append((name, *map(short, means), seconds if reading == "equal samples" else ""))
    return markdown(("", "gold", "KL, nats", "tokens", "seconds of training"), table)


def critic_free_gaps() -> str:
    """Differences in gold between methods at equal samples and at equal time."""
    found = at_equal_samples_and_time(critic_free_curves()[1], ("gold",))
    pairs = list(combinations(METHODS, 2))
    table = []
    for one, other in pairs:
        gaps = [short(shown_gap(paired(by[one]["gold"], by[other]["gold"]))) for by in found.values()]
        table.append((f"{one} minus {other}", *gaps))
    return markdown(("difference in gold", *found), table)


def critic_free_checkpoints() -> str:
    """Means at each checkpoint."""
    _, curves = critic_free_curves()
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
    (seeds, curves), table = critic_free_curves(), []
    for method, runs in curves.items():
        table.append((f"{method}: gold", *(short(f"{curve[-1]['gold']:.3f}") for curve in runs)))
        table.append(("largest KL", *(f"{max(point['kl'] for point in curve):.1f}" for curve in runs)))
    return markdown(("seed", *map(str, seeds)), table)


def grpo_switch(title: str) -> str:
    """One table of GRPO's switches, each arm beside its control."""
    control, arms = SWITCHES[title]
    rows = [row for row in kept_rows("grpo_switches") if row["seed"]]
    seeds, table = common_seeds(rows, (control, *arms)), []
    results = {(row["arm"], row["seed"]): row["result"] for row in rows}

    def values(arm: str, name: str) -> list[float]:
        return [results[arm, seed][name] for seed in seeds]

    for arm in (control, *arms):
        cells = [f"`{arm}`" + " (control)" * (arm == control)]
        for name in COMPARED:
            gap = "" if arm == control else shown_gap(paired(values(arm, name), values(control, name)))
            cells += [shown(values(arm, name)), gap]
        cells += [shown(values(arm, name), 1) for name in ("kl", "wrong_length", "wrong_filler")]
        table.append(tuple(map(short, cells)))
    return markdown(("", "end", "minus control", "run", "minus control", "KL", "longer", "filler"), table)


def grpo_switches() -> str:
    """The share of right answers after training, of every switch beside its control."""
    rows, table = [row for row in kept_rows("grpo_switches") if row["seed"]], []
    for control, arms in SWITCHES.values():
        seeds = common_seeds(rows, (control, *arms))
        right = {(row["arm"], row["seed"]): row["result"]["right"] for row in rows}
        controls = [right[control, seed] for seed in seeds]
        if control not in [name for name, *_ in table]:
            table.append((control, shown(controls), ""))
        for arm in arms:
            own = [right[arm, seed] for seed in seeds]
            table.append((arm, shown(own), f"{shown_gap(paired(own, controls))} to {control}"))
    return markdown(("arm", "right", "minus control"), [tuple(map(short, cells)) for cells in table])


DIALOGUE_ARMS = {  # arm: what the page calls it
    "start": "start: SFT on demonstrations that seldom ask",
    "REFUEL": "REFUEL, final horizon",
    "MT-MIXIN": "MT-MIXIN",
    "LT-MIXIN": "LT-MIXIN",
    "LT-OFFLINE": "LT-OFFLINE",
    "REFUEL, random horizon": "REFUEL, random horizon",
    "multi-turn DPO": "multi-turn DPO",
    "REBEL, one turn": "REBEL, one turn",
}
DIALOGUE_TASKS = {"two_slots": "two slots", "cafe": "café"}  # experiment's name: the page's


def refuel_turns(task: str) -> str:
    """Gold scores of each arm after each turn."""
    found, table = by_arm(f"refuel_{task}", DIALOGUE_ARMS), []
    for arm, rows in found.items():
        by_turn = list(zip(*(row["scores"] for row in rows)))
        means = [f"{interval(scores)[0]:.3f}" for scores in by_turn[:-1]]
        table.append(tuple(map(short, (DIALOGUE_ARMS[arm], str(len(rows)), *means, shown(by_turn[-1])))))
    turns = len(next(iter(found.values()))[0]["scores"])
    return markdown(("", "n", *(f"h = {turn}" for turn in range(1, turns + 1))), table)


def refuel_gaps() -> str:
    """Differences at the last turn between the arms that claims name."""
    table = []
    for better, worse in (("REFUEL", "MT-MIXIN"), ("MT-MIXIN", "LT-MIXIN"), ("REFUEL", "LT-MIXIN")):
        cells = [f"{better} minus {worse}"]
        for task in DIALOGUE_TASKS:
            found = compare(kept_rows(f"refuel_{task}"), better, worse, each(lambda row: row["scores"][-1]))
            cells.append(short(shown_gap(found.gap)) if found else "")
        table.append(cells)
    return markdown(("at the last turn", *DIALOGUE_TASKS.values()), table)


def pairing_by_seed() -> str:
    """What pairing by seed saves in four comparisons of the café."""
    gold = each(lambda row: row["curve"][-1]["gold"])
    compared: list[tuple[str, str, str, str, Read, dict[str, str]]] = [
        ("RLOO and GRPO", "critic_free_cafe", "RLOO", "GRPO", gold, {}),
        ("PPO over macro actions and tokens", "macro_actions", "n=8", TOKEN, column("gold"), {"setting": "cafe"}),
        ("REFUEL and MT-MIXIN", "refuel_cafe", "REFUEL", "MT-MIXIN", each(lambda row: row["scores"][-1]), {}),
        ("PPO and GRPO, 1 and 8 responses to a prompt", "critic_free_cafe", "PPO", "GRPO", gold, {}),
    ]
    table = []
    for name, experiment, one, other, read, where in compared:
        rows = [row for row in kept_rows(experiment) if row["seed"] and where.items() <= row.items()]
        seeds = common_seeds(rows, (one, other))
        values = read([row for row in rows if row["arm"] in (one, other)])
        ratio, low, high = pairing(*([values[arm][seed] for seed in seeds] for arm in (one, other)))
        table.append((name, str(len(seeds)), short(f"{ratio:.2f} [{low:.2f}, {high:.2f}]")))
    return markdown(("of the café", "n", "variance, paired over unpaired"), table)


REFLECT_ARMS = {  # arm: what the page calls it
    "SFT": "SFT",
    "SFT+RL": "SFT+RL",
    "Reflect-RL, positive": "Reflect-RL, positive examples only",
    "Reflect-RL": "Reflect-RL",
    "SFT, oracle's commands": "SFT on the oracle's commands",
    "SFT+RL, oracle's commands": "SFT+RL on the oracle's commands",
    "positive, less noise": "positive examples only, less noise",
    "Reflect-RL, more noise": "Reflect-RL, more noise",
}


def reflect(task: str) -> str:
    """Success of each arm on held-out starts, after each number of iterations at which it was measured.

    Where starts have levels, sampled success at each stands beside it.
    """
    of_arm = by_arm(f"reflect_rl_{task}", REFLECT_ARMS)
    first = next(iter(of_arm.values()))[0]["results"][0]
    levels = [name for name in first if name.startswith("success, ") and not name.endswith("_interval")]
    table = []
    for arm, rows in of_arm.items():
        seconds = f"{interval([row['seconds'] for row in rows])[0]:.0f}"
        for tested in zip(*(row["results"] for row in rows)):
            means = [shown([result[key] for result in tested]) for key in ("success", "greedy_success")]
            means += [f"{interval([result[level] for result in tested])[0]:.3f}" for level in levels]
            is_first = tested[0] is rows[0]["results"][0]
            name, n, spent = (REFLECT_ARMS[arm], str(len(rows)), seconds) if is_first else ("", "", "")
            table.append((name, n, str(tested[0]["iterations"] or "none"), *map(short, means), spent))
    names = [level.removeprefix("success, ") for level in levels]
    return markdown(("arm", "n", "RL", "sampled", "greedy", *names, "s"), table)


def credits_of_turns() -> str:
    """Mean of the gradient's first coordinate, the exact one beside, and total variance by each credit."""
    table = []
    for place in PLACES:
        of_arm = by_arm("estimators", CREDIT, setting=place).values()
        means = [[row["mean"][0] for row in rows] for rows in of_arm]
        variances = [[row["variance"] for row in rows] for rows in of_arm]
        known = short(f"{exact(place)[0]:.3f}")
        table.append((f"rewards {place}: gradient, turn 1", known, *(short(over_seeds(one)) for one in means)))
        table.append(("variance", "", *(short(over_seeds(one, 4)) for one in variances)))
    return markdown(("", "exact", *CREDIT), table)


def seeds_of_groups() -> str:
    """How many times more variance a seed for each member has than one for the group."""
    table = []
    for policy in POLICIES:
        one, each_own = by_arm("estimators", SEEDS, setting=policy).values()
        ratios = [[own[name] / of[name] for of, own in zip(one, each_own)] for name in ("advantages", "variance")]
        table.append((policy, *(short(over_seeds(values, 2)) for values in ratios)))
    return markdown(("variance, a seed each over one seed", "advantages", "gradient"), table)


LEARNERS: dict[str, tuple[str, Callable[[Row], float]]] = {  # experiment: what a table calls it, and what is read
    "agents": ("", end),
    "real_calculator": ("SmolLM2's sums: ", partial(end, last=4)),
    "taxi_agents": ("taxi: ", lambda row: row["results"][-1]["success"]),
}


def agents() -> str:
    """Share of right episodes at the end of each arm, of the seeds that all arms of its task have; exact bounds."""
    table = []
    for experiment, (name, value) in LEARNERS.items():
        rows = kept_rows(experiment)
        for arm in dict.fromkeys(row["arm"] for row in rows):
            task = arm.partition(":")[0] if experiment == "agents" else ""
            seeds = common_seeds(rows, {row["arm"] for row in rows if row["arm"].startswith(task)})
            ends = [value(row) for row in rows if row["arm"] == arm and row["seed"] in seeds]
            table.append((name + arm, str(len(ends)), short(over_seeds(ends))))
    table += [(f"guess: {name}", "", short(f"{value:.3f}")) for name, value in bounds().items()]
    return markdown(("", "n", "right"), table)


def earlier(name: str) -> str:
    """A table of earlier runs, of which no rows were kept."""
    stored = EARLIER[name]
    return f"{stored['measured']}\n\n{markdown(stored['columns'], stored['rows'])}"


EARLIER = json.loads((KEPT / "earlier.json").read_text(encoding="utf-8"))
TABLES: dict[str, Callable[[], str]] = {
    "letters, rollouts": letters_until,
    "letters, position": lambda: macro_scores("position"),
    "letters, noise": lambda: macro_scores("noise"),
    "macro actions, café": lambda: macro_scores("cafe", "gold"),
    "unit tests": unit_tests_table,
    "online DPO, café": online_cafe,
    **{f"hidden map, {group}": partial(hidden_map, group) for group in HIDDEN_MAP},
    **{f"refuel, {name}": partial(refuel_turns, task) for task, name in DIALOGUE_TASKS.items()},
    "refuel, differences": refuel_gaps,
    "pairing": pairing_by_seed,
    **{f"reflect, {task}": partial(reflect, task) for task in ("taxi", "explore", "household")},
    "real model, two tasks": real_reasoning,
    "real model, dialogues": real_dialogues,
    "real model, means of two tasks": real_reasoning_means,
    "real model, means of dialogues": real_dialogues_means,
    "without a critic, rates": critic_free_rates,
    "without a critic, ends": critic_free_ends,
    "without a critic, differences": critic_free_gaps,
    "without a critic, checkpoints": critic_free_checkpoints,
    "without a critic, seeds": critic_free_seeds,
    "switches": grpo_switches,
    **{f"switches, {title}": partial(grpo_switch, title) for title in SWITCHES},
    "credit": credits_of_turns,
    "seeds of groups": seeds_of_groups,
    "agents": agents,
    **{name: partial(earlier, name) for name in EARLIER},
}
