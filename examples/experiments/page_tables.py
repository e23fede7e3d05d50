"""Tables of pages that are made from raw rows, each by its name, which stands in the markers around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from examples.experiments.readings import compare, each
from examples.experiments.records import kept_rows
from examples.experiments.stats import log_rank, paired, restricted, shown, shown_gap

LETTERS = {  # arm: what the page calls it
    "token": "tokens",
    "n=4": "n = 4",
    "n=8": "n = 8",
    "randomized": "randomized",
    "ppl": "ppl",
    "n=inf": "the whole response",
    "token at lambda^(1/8)": "tokens, λ^(1/8) = 0.9936",
    "token at lambda=1": "tokens, λ = 1",
}
SAME, MATCHED = "token", "token at lambda^(1/8)"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return (
        "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]]).replace("|  |", "| |").replace("|  |", "| |")
        + "\n"
    )


def letters_until(limit: int = 60) -> str:
    """Rollouts on letters until the score is reached, each arm beside tokens at both lambdas."""
    rows = [row for row in kept_rows("macro_actions") if row["setting"] == "share"]
    arms = [arm for arm in LETTERS if any(row["arm"] == arm for row in rows)]
    times = {arm: {row["seed"]: row["rollouts"] for row in rows if row["arm"] == arm} for arm in arms}
    table = []
    for arm in arms:
        own = [times[arm][seed] for seed in sorted(times[arm])]
        cells = [LETTERS[arm], shown(restricted(own, limit), 1)]
        cells.append(" ".join(f">{limit}" if time is None else f"{time}" for time in own))
        for other in (SAME, MATCHED):
            if arm in (SAME, other):
                cells.append("")
                continue
            seeds = sorted(times[arm].keys() & times[other].keys())
            ours, theirs = ([times[name][seed] for seed in seeds] for name in (arm, other))
            gap = paired(restricted(theirs, limit), restricted(ours, limit))
            cells.append(f"{shown_gap(gap, 1)}, p = {log_rank(ours, theirs)[1]:.2g}")
        table.append(cells)
    return markdown(("arm", "rollouts, mean", "each seed", "fewer than tokens", "than tokens at λ^(1/8)"), table)


def letters_scores() -> str:
    """The last score on letters in the two other settings, each arm beside tokens at both lambdas."""
    by_setting = {
        name: [r for r in kept_rows("macro_actions") if r["setting"] == name] for name in ("position", "noise")
    }
    arms = [arm for arm in LETTERS if all(any(row["arm"] == arm for row in rows) for rows in by_setting.values())]
    table = []
    for arm in arms:
        cells = [LETTERS[arm]]
        for rows in by_setting.values():
            cells.append(short(shown([row["score"] for row in rows if row["arm"] == arm])))
            for other in (SAME, MATCHED):
                found = (
                    None if arm in (SAME, other) else compare(rows, arm, other, each(lambda row: float(row["score"])))
                )
                cells.append(short(shown_gap(found.gap)) if found else "")
        table.append(cells)
    gaps = ("more than tokens", "than tokens at λ^(1/8)")
    return markdown(("arm", "one group early, the other late", *gaps, "noisy reward", *gaps), table)


def real_reasoning() -> str:
    """What was read of each run of the real model on two tasks."""
    rows, table = kept_rows("real_reasoning"), []
    for task in dict.fromkeys(row["task"] for row in rows):
        for arm in ("base", "RAFT", "GRPO"):
            own = sorted((row for row in rows if (row["task"], row["arm"]) == (task, arm)), key=lambda row: row["seed"])
            for number, row in enumerate(own):
                first = arm if number == 0 else ""
                first = f"`{task}`: {arm}" if arm == "base" else first
                shares = [short(f"{row[name]:.3f}") for name in ("greedy", "pass_1", "pass_8")]
                numbers = [short(f"{abs(row['kl']):.2f}"), f"{row['length']:.1f}", short(f"{row['commonest']:.3f}")]
                cost = [short(f"{row['cpu_seconds'] / 3600:.2f}"), f"{row['peak_gib']:.1f} GiB"]
                seed = "" if arm == "base" else str(row["seed"])
                table.append((first, seed, *shares, *numbers, *cost))
    names = (
        "greedy",
        "pass@1",
        "pass@8",
        "KL to the base, nats",
        "tokens",
        "commonest response",
        "hours",
        "peak memory",
    )
    return markdown(("", "seed", *names), table)


def short(text: str) -> str:
    """Numbers below one without their zero, as pages write them."""
    return re.sub(r"(?<![\d.])0\.", ".", text)


TABLES: dict[str, Callable[[], str]] = {
    "letters, rollouts": letters_until,
    "letters, scores": letters_scores,
    "real model, two tasks": real_reasoning,
}
