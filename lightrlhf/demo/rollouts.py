"""Selection of samples for the tab Rollouts: a view, which is the query of its address, and the samples that it shows.

Plain values in, plain values out; no model and no user interface.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightrlhf.demo.rollout_file import REWARD, Flags, Samples

SORTS = {  # what samples are sorted by, and the column of it
    "reward": "score",
    "advantage": "advantage",
    "length": "length",
    "KL": "kl",
    "audit": "audit",
    "order of the file": "",
}
ORDERS = ("highest first", "lowest first")
COLOURS = {"log-ratio": "log_ratio", "advantage": "advantages", "value": "values"}  # and the field of a row
COLUMNS = {"log-ratio": "kl", "advantage": "deepest advantage", "value": "deepest value"}  # of the index, if logged
GROUPS_A_PAGE = 20
SAMPLES_TO_COMPARE = 80  # on a page
MOST_WORDS, LEAST_CHANGE = 12, 0.05  # of the words whose share differs between two steps
SAMPLES_FOR_WORDS = 2000  # of each step
LONGEST_TEXT = 200  # characters to search for
LINES = ("score", "audit", "kl", "length")  # curves above the samples
WORDS = re.compile(r"\w+|[^\w\s]+")
ALL = "all"
Ids = NDArray[np.intp]


@dataclass(frozen=True)
class View:
    """The selection of an address, with the names of its query; the defaults select as an empty query does."""

    run: str = ""
    step: int | None = None  # None: the last one
    all_steps: bool = False
    against: int | None = None  # the step to compare with
    prompt: str = ""  # `prompt_key`; empty: all prompts
    sort: str = "reward"
    order: str = ORDERS[0]
    colour: str = "log-ratio"
    q: str = ""  # the text to search for
    page: int = 1
    sample: int | None = None  # one sample alone

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> View:
        """Parse the query of an address; a value that does not exist is ignored."""
        texts = {name: value.encode("utf-8", "replace").decode() for name, value in query.items()}
        values: dict[str, Any] = {name: texts[name] for name in ("run", "prompt") if name in texts}
        for name in ("step", "against", "page", "sample"):
            if (digits := texts.get(name, "")).isdecimal() and len(digits) < 16:
                values[name] = int(digits)
        for name, allowed in (("sort", SORTS), ("order", ORDERS), ("colour", COLOURS)):
            if texts.get(name) in allowed:
                values[name] = texts[name]
        values["page"] = max(values.get("page", 1), 1)
        return cls(**values, all_steps=texts.get("step") == ALL, q=texts.get("q", "").strip()[:LONGEST_TEXT])

    def query(self) -> str:
        """Return the query of this view: the values that differ from the defaults."""
        values = {name: value for name, value in vars(self).items() if value != View.__dict__[name]}
        if values.pop("all_steps", False):
            values["step"] = ALL
        return urlencode({"tab": "rollouts", **values})

    def change(self, **changes: object) -> View:
        """Return another view, on its first page."""
        return dataclasses.replace(self, **({"page": 1, "sample": None} | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Selection:
    """The samples of a view; a group has the samples of one prompt at one step."""

    view: View  # with the step and the page that are shown
    steps: list[int]  # of the run, or those at which the view's prompt was logged
    groups: list[list[int]]  # samples of each group of the page
    num_groups: int
    num_samples: int  # on all pages
    found: Flags | None  # (N,) which samples of the run have the text; None without one
    problem: str = ""  # why nothing is shown


def select(samples: Samples, view: View) -> Selection:
    """Select the samples that a view shows, in order."""
    found, steps = samples.find(view.q) if view.q else None, steps_of(samples, view)
    if view.sample is not None:
        if view.sample >= len(samples):
            return Selection(view, [], [], 0, 0, found, f"sample {view.sample} is not in the file")
        step = int(samples.table["step"].iat[view.sample])
        return Selection(dataclasses.replace(view, step=step), steps, [[view.sample]], 1, 1, found)
    if not steps:
        return Selection(view, [], [], 0, 0, found, "this prompt was not logged in this run" if view.prompt else "")
    view = dataclasses.replace(view, step=nearest(steps, view.step))
    chosen = of_prompt(samples, view) & (True if found is None else found)
    if not view.all_steps:
        chosen &= samples.table["step"].to_numpy() == view.step
    order = sort(samples, np.flatnonzero(chosen), view)
    group = samples.table.loc[order].groupby(["step", "group"], sort=False).ngroup()  # in the order of their first
    num_groups = int(group.max()) + 1 if len(group) else 0
    view, page = turn_to(view, range(num_groups))
    groups = [group.index[group == number].tolist() for number in page]
    return Selection(view, steps, groups, num_groups, len(order), found)


def turn_to(view: View, things: Sequence[int]) -> tuple[View, Sequence[int]]:
    """Return the view with a page that exists, and what is on that page."""
    page = min(view.page, count_pages(len(things)))
    return dataclasses.replace(view, page=page), things[(page - 1) * GROUPS_A_PAGE : page * GROUPS_A_PAGE]


def count_pages(count: int) -> int:
    """Return the number of pages that `count` groups fill."""
    return max(math.ceil(count / GROUPS_A_PAGE), 1)


def steps_of(samples: Samples, view: View) -> list[int]:
    """Return the logged steps, or the steps at which the view's prompt was logged."""
    return np.unique(samples.table["step"][of_prompt(samples, view)]).astype(int).tolist()


def of_prompt(samples: Samples, view: View) -> Flags:
    """Return which samples have the view's prompt; all samples if it has no prompt."""
    if not view.prompt:
        return np.ones(len(samples), dtype=bool)
    return np.asarray(samples.table["prompt"] == samples.prompts.get(view.prompt, -1))


def nearest(steps: Sequence[int], step: int | None) -> int:
    """Return the logged step that is nearest to `step`; the last one for None."""
    return steps[-1] if step is None else min(steps, key=lambda one: abs(one - step))


def sort(samples: Samples, numbers: Ids, view: View) -> Ids:
    """Sort numbers of samples as the view asks; those without a value are last."""
    column = SORTS[view.sort]
    if not column:
        return numbers
    values = samples.table[column].iloc[numbers]
    return values.sort_values(ascending=view.order != ORDERS[0], kind="stable").index.to_numpy()


# ------------------------------------------------------------------------------------------------------------- curves
def curves(samples: Samples, selection: Selection) -> dict[str, pd.Series]:
    """Return means by step of score, audit, KL and length, and the share of samples with the text, where logged."""
    table = samples.table[["step", *LINES]]
    if selection.found is not None:
        table = table.assign(**{"share with the text": selection.found})
    means = table[of_prompt(samples, selection.view)].groupby("step").mean()
    lines = {name: means[name].dropna() for name in means}
    return {name: line for name, line in lines.items() if len(line)}


def logged_colours(samples: Samples) -> list[str]:
    """Return the colours for which the run has numbers."""
    return [name for name, column in COLUMNS.items() if samples.table[column].notna().any()]


def deepest(samples: Samples, name: str) -> float:
    """Return the advantage or value at which a colour saturates: the 95th percentile of the samples."""
    value = samples.table[f"deepest {name}"].quantile(0.95)
    return float(value) if value > 0 else 1.0


def audit_disagrees(samples: Samples) -> Flags:
    """Return which samples score above the run's mean while their audit is below its mean."""
    score, audit = samples.table["score"], samples.table["audit"]
    return np.asarray((score > score.mean()) & (audit < audit.mean()))


# -------------------------------------------------------------------------------------------------------- two steps
@dataclass(frozen=True)
class Comparison:
    """The difference between two steps."""

    view: View  # with the page that is shown
    steps: tuple[int, int]  # the step to compare with, the step of the view
    counts: tuple[int, int]  # samples of each
    means: list[tuple[str, float, float]]  # name, mean at each step
    words: list[tuple[str, float, float]]  # word, share of the responses that have it
    prompts: list[list[list[int]]]  # samples of each prompt that both have, at each step, on this page
    num_prompts: int  # that both have


def compare(samples: Samples, view: View, steps: Sequence[int]) -> Comparison:
    """Compare the view's step with another one, in the samples that the view selects."""
    assert view.against is not None and view.step is not None
    pair = nearest(steps, view.against), view.step
    table = samples.table[of_prompt(samples, view) & (samples.find(view.q) if view.q else True)]
    both = [table[table["step"] == step] for step in pair]
    columns = ["score", "audit", "kl", "length", "truncated", *(name for name in table if name.startswith(REWARD))]
    means = pd.concat([part[columns].mean() for part in both], axis=1).dropna(how="all")
    earlier = set(both[0]["prompt"])
    shared = [key for key in both[1]["prompt"].unique().tolist() if key in earlier]
    view, shown = turn_to(view, shared)
    most = max(SAMPLES_TO_COMPARE // (2 * max(len(shown), 1)), 1)
    prompts = [
        [sort(samples, np.asarray(part.index[part["prompt"] == key]), view)[:most].tolist() for part in both]
        for key in shown
    ]
    return Comparison(
        view=view,
        steps=pair,
        counts=(len(both[0]), len(both[1])),
        means=list(means.itertuples(name=None)),
        words=compare_words(*(samples.responses[part.index[:SAMPLES_FOR_WORDS]] for part in both)),
        prompts=prompts,
        num_prompts=len(shared),
    )


def compare_words(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, float, float]]:
    """Return the words whose share of the texts differs most, with both shares."""
    one, two = (Counter(word for text in texts for word in set(WORDS.findall(text))) for texts in (before, after))
    sizes = max(len(before), 1), max(len(after), 1)
    rows = [(word, one[word] / sizes[0], two[word] / sizes[1]) for word in {*one, *two}]
    rows.sort(key=lambda row: (-abs(row[2] - row[1]), row[0]))
    return [row for row in rows[:MOST_WORDS] if abs(row[2] - row[1]) >= LEAST_CHANGE]
