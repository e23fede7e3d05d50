"""What the tab Rollouts shows: a view, which is the query of its address, and the samples that it selects.

Plain values in, plain values out; no model and no user interface.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from lightrlhf.demo.rollout_file import Flags, Numbers, Samples

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
COLUMNS = {"log-ratio": "kl", "advantage": "deepest advantage", "value": "deepest value"}  # that a logged one fills
GROUPS_A_PAGE = 20
SAMPLES_TO_COMPARE = 80  # on a page
MOST_WORDS, LEAST_CHANGE = 12, 0.05  # of the words whose share differs between two steps
SAMPLES_FOR_WORDS = 2000  # of each step
LONGEST_TEXT = 200  # characters to search for
LINES = ("score", "audit", "kl", "length")  # curves above the samples
WORDS = re.compile(r"\w+|[^\w\s]+")
ALL = "all"
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class View:
    """What is shown, by the names of the address; the defaults are for an address without them."""

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
        """The view of an address; a value that does not exist counts as not given."""
        query = {name: value.encode("utf-8", "replace").decode() for name, value in query.items()}

        def integer(name: str) -> int | None:
            digits = query.get(name, "")
            return int(digits) if digits.isdecimal() and len(digits) < 16 else None

        def one_of(name: str, values: Sequence[str]) -> str:
            return query[name] if query.get(name) in values else values[0]

        return cls(
            run=query.get("run", ""),
            step=integer("step"),
            all_steps=query.get("step") == ALL,
            against=integer("against"),
            prompt=query.get("prompt", ""),
            sort=one_of("sort", tuple(SORTS)),
            order=one_of("order", ORDERS),
            colour=one_of("colour", tuple(COLOURS)),
            q=query.get("q", "").strip()[:LONGEST_TEXT],
            page=max(integer("page") or 1, 1),
            sample=integer("sample"),
        )

    def query(self) -> str:
        """The address of this view: what differs from the defaults."""
        values = {name: value for name, value in vars(self).items() if value != View.__dict__[name]}
        if values.pop("all_steps", False):
            values["step"] = ALL
        return urlencode({"tab": "rollouts", **values})

    def changed(self, **changes: object) -> View:
        """Another view, on its first page."""
        return dataclasses.replace(self, **({"page": 1, "sample": None} | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Selection:
    """The samples of a view; a group has the samples of one prompt at one step."""

    view: View  # with the step that is shown
    steps: list[int]  # of the run, or those at which the view's prompt was logged
    groups: list[list[int]]  # samples of each group of the page
    num_groups: int
    num_samples: int  # on all pages
    found: Flags | None  # (N,) which samples of the run have the text; None without one
    problem: str = ""  # why nothing is shown

    @property
    def num_pages(self) -> int:
        return max(math.ceil(self.num_groups / GROUPS_A_PAGE), 1)


def select(samples: Samples, view: View) -> Selection:
    """The samples that a view shows, in order."""
    found = samples.having(view.q) if view.q else None
    if view.sample is not None:
        if view.sample < len(samples):
            step = int(samples.numbers["step"][view.sample])
            shown = dataclasses.replace(view, step=step)
            return Selection(shown, steps_of(samples, view), [[view.sample]], 1, 1, found)
        return Selection(view, [], [], 0, 0, found, f"sample {view.sample} is not in the file")
    steps = steps_of(samples, view)
    if not steps:
        return Selection(view, [], [], 0, 0, found, "this prompt was not logged in this run" if view.prompt else "")
    view = dataclasses.replace(view, step=nearest(steps, view.step))
    chosen = of_prompt(samples, view)
    if not view.all_steps:
        chosen = chosen & (samples.numbers["step"] == view.step)
    if found is not None:
        chosen = chosen & found
    numbers = np.flatnonzero(chosen)
    groups = grouped(samples, ordered(samples, numbers, view))
    view = dataclasses.replace(view, page=min(view.page, max(math.ceil(len(groups) / GROUPS_A_PAGE), 1)))
    first = (view.page - 1) * GROUPS_A_PAGE
    page = [group.tolist() for group in groups[first : first + GROUPS_A_PAGE]]
    return Selection(view, steps, page, len(groups), len(numbers), found)


def steps_of(samples: Samples, view: View) -> list[int]:
    """The logged steps, or those at which the view's prompt was."""
    logged = np.bincount(samples.step_index[of_prompt(samples, view)], minlength=len(samples.steps)) > 0
    steps: list[int] = samples.steps[logged].tolist()
    return steps


def of_prompt(samples: Samples, view: View) -> Flags:
    """Which samples are of the view's prompt; all without one."""
    if not view.prompt:
        return np.ones(len(samples), dtype=bool)
    return np.asarray(samples.prompt == samples.prompts.get(view.prompt, -1))


def nearest(steps: Sequence[int], step: int | None) -> int:
    """The logged step that is nearest to one; the last one for None."""
    return steps[-1] if step is None else min(steps, key=lambda one: abs(one - step))


def ordered(samples: Samples, numbers: Ids, view: View) -> Ids:
    """Numbers of samples in the order of the view; those without a value are last."""
    column = SORTS[view.sort]
    if not column:
        return numbers
    values = samples.numbers[column][numbers]
    return numbers[np.argsort(-values if view.order == ORDERS[0] else values, kind="stable")]  # NaN is last


def grouped(samples: Samples, numbers: Ids) -> list[Ids]:
    """The samples of each group, in their order; groups in the order of their first samples."""
    if not len(numbers):
        return []
    within = samples.numbers["group"][numbers]
    keys = samples.step_index[numbers] * (within.max() - within.min() + 1) + within
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    together = np.argsort(first[group], kind="stable")
    sizes = np.bincount(group)[np.argsort(first)]
    return np.split(numbers[together], np.cumsum(sizes)[:-1])


# ------------------------------------------------------------------------------------------------------------- curves
def curve(samples: Samples, values: Numbers, chosen: Flags) -> list[tuple[int, float]]:
    """(step, mean of the values) of the chosen samples; steps without a value are left out."""
    kept = chosen & ~np.isnan(values)
    place, steps = samples.step_index[kept], samples.steps
    sums, counts = np.bincount(place, values[kept], len(steps)), np.bincount(place, minlength=len(steps))
    given = counts > 0
    return list(zip(steps[given].tolist(), (sums[given] / counts[given]).tolist()))


def curves(samples: Samples, selection: Selection) -> dict[str, list[tuple[int, float]]]:
    """Means by step of score, audit, KL and length, and the share of samples that have the text; those there are."""
    chosen = of_prompt(samples, selection.view)
    columns: dict[str, Numbers] = {name: samples.numbers[name] for name in LINES}
    if selection.found is not None:
        columns["share with the text"] = selection.found.astype(np.float64)
    lines = {name: curve(samples, values, chosen) for name, values in columns.items()}
    return {name: line for name, line in lines.items() if line}


def logged_colours(samples: Samples) -> list[str]:
    """The colours of which the run has numbers."""
    return [name for name, column in COLUMNS.items() if not np.isnan(samples.numbers[column]).all()]


def deepest(samples: Samples, name: str) -> float:
    """The advantage or value at which a token's colour is deepest: the 95th percentile of the samples."""
    values = samples.numbers[f"deepest {name}"]
    values = values[~np.isnan(values)]
    return float(np.percentile(values, 95)) or 1.0 if len(values) else 1.0


def audit_disagrees(samples: Samples) -> Flags:
    """Which samples score above the run's mean while their audit is below its mean."""
    score, audit = samples.numbers["score"], samples.numbers["audit"]
    return np.asarray((score > mean(score)) & (audit < mean(audit)))


# -------------------------------------------------------------------------------------------------------- two steps
@dataclass(frozen=True)
class Comparison:
    """The difference between two steps."""

    view: View  # with the page that is shown
    steps: tuple[int, int]  # the step to compare with, the step of the view
    counts: tuple[int, int]  # samples of each
    means: list[tuple[str, float, float]]  # name, mean at each step
    words: list[tuple[str, float, float]]  # word, share of the responses that have it
    prompts: list[tuple[list[int], list[int]]]  # samples of each prompt that both have, on this page
    num_prompts: int  # that both have


def compare(samples: Samples, view: View, steps: Sequence[int]) -> Comparison:
    """The difference between the view's step and the one to compare with, of the samples that the view selects."""
    assert view.against is not None and view.step is not None
    pair = nearest(steps, view.against), view.step
    chosen = of_prompt(samples, view)
    if view.q:
        chosen = chosen & samples.having(view.q)
    both = [np.flatnonzero(chosen & (samples.numbers["step"] == step)) for step in pair]
    columns = {name: samples.numbers[name] for name in ("score", "audit", "kl", "length", "truncated")}
    columns |= {f"reward {name}": values for name, values in samples.rewards.items()}
    means = [(name, mean(values[both[0]]), mean(values[both[1]])) for name, values in columns.items()]
    before = set(samples.prompt[both[0]].tolist())
    shared = [key for key in dict.fromkeys(samples.prompt[both[1]].tolist()) if key in before]
    page = min(view.page, max(math.ceil(len(shared) / GROUPS_A_PAGE), 1))
    shown = shared[(page - 1) * GROUPS_A_PAGE : page * GROUPS_A_PAGE]
    most = max(SAMPLES_TO_COMPARE // (2 * max(len(shown), 1)), 1)

    def of_key(numbers: Ids, key: int) -> list[int]:
        best: list[int] = ordered(samples, numbers[samples.prompt[numbers] == key], view)[:most].tolist()
        return best

    return Comparison(
        view=dataclasses.replace(view, page=page),
        steps=pair,
        counts=(len(both[0]), len(both[1])),
        means=[row for row in means if not (math.isnan(row[1]) and math.isnan(row[2]))],
        words=words(samples, both[0], both[1]),
        prompts=[(of_key(both[0], key), of_key(both[1], key)) for key in shown],
        num_prompts=len(shared),
    )


def mean(values: Numbers) -> float:
    """The mean of the values that there are; NaN without any."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def words(samples: Samples, before: Ids, after: Ids) -> list[tuple[str, float, float]]:
    """Words whose share of the responses differs most between two sets of samples, with both shares."""

    def shares(numbers: Ids) -> Counter[str]:
        counts: Counter[str] = Counter()
        for number in numbers[:SAMPLES_FOR_WORDS].tolist():
            counts.update(set(WORDS.findall(samples.response_texts[number])))
        return counts

    one, two = shares(before), shares(after)
    sizes = max(min(len(before), SAMPLES_FOR_WORDS), 1), max(min(len(after), SAMPLES_FOR_WORDS), 1)
    rows = [(word, one[word] / sizes[0], two[word] / sizes[1]) for word in {*one, *two}]
    rows.sort(key=lambda row: (-abs(row[2] - row[1]), row[0]))
    return [row for row in rows[:MOST_WORDS] if abs(row[2] - row[1]) >= LEAST_CHANGE]


def neighbours(steps: Sequence[int], step: int) -> Iterator[int | None]:
    """The logged steps before and after one."""
    place = list(steps).index(step)
    yield steps[place - 1] if place else None
    yield steps[place + 1] if place + 1 < len(steps) else None
