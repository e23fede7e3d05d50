"""Print the results of the benchmarks as tables, `python -m benchmarks.tables`, and insert some rows into pages.

Goals are in none of them; `verdict` says which are met.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.writing import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "howto" / "speed.md")
PAGE = (  # rows of howto/speed.md, one of each kind of work
    "sft-30M",
    "dpo-30M-dialogues",
    "rollout-skewed-30M",
    "ppo-skewed-30M",
    "grpo-skewed-4-4M",
    "vllm-equal-30M",
    "vllm-samples-30M",
    "vllm-skewed-135M-bf16",
)
SETTING = re.compile(r",.*:")  # of a peer, after its name
SHORT = ("sft-30M", "dpo-30M-dialogues", "ppo-full-4M")  # rows of README, among the slower ones


def verdict(case: dict[str, Any]) -> str:
    """The goals of a row and whether they are met, for the one who measures: by all turns, not by their median."""
    met = []
    if (measured := case.get("ratio", case.get("value"))) and case["goal"] is not None:
        worst = measured["max" if case["less_is_better"] else "min"]
        met.append(judged("goal", worst, case["goal"], case["less_is_better"]))
    if case.get("memory_goal") and "peer" in case:
        met.append(judged("memory", memory_share(case), case["memory_goal"], less_is_better=True))
    if case.get("limit_goal") and "limit_share" in case:
        met.append(judged("of the limit", case["limit_share"], case["limit_goal"], less_is_better=False))
    return "; ".join(met)


def judged(name: str, value: float, goal: float, less_is_better: bool) -> str:
    met = value <= goal if less_is_better else value >= goal
    return f"{name} {'≤' if less_is_better else '≥'} {goal:g}: {'met' if met else 'missed'}"


def memory_share(case: dict[str, Any]) -> float:
    """Our peak memory over the peer's."""
    return case["ours"]["peak_bytes"] / case["peer"]["peak_bytes"]


def table(results: dict[str, Any]) -> str:
    """All results of a processor as Markdown."""
    headings = ("work", "ours, fastest setting", "the peer's fastest setting", "ratio", "of the limit", "memory, both")
    rows = [cells_of(case) for case in results["cases"].values()]
    return measured_on(results) + markdown((*headings, "tokens computed, both"), rows)


def page_table(results: dict[str, Any]) -> str:
    """The rows of howto/speed.md of a processor."""
    rows = []
    for name in PAGE:
        if name in results["cases"]:
            what, ours, peer, ratio, *_ = cells_of(results["cases"][name])
            rows.append((what, ours.rpartition(": ")[2], SETTING.sub(":", peer), ratio))
    return measured_on(results) + markdown(("work", "lightrlhf", "beside", "ratio"), rows)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(headings), "", *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" if line else "|---" * len(headings) + "|" for line in lines) + "\n"


def measured_on(results: dict[str, Any]) -> str:
    """Processor, packages and days of the results."""
    where, cases = results["machine"], results["cases"]
    versions = {k: v for c in cases.values() for side in c.get("versions", {}).values() for k, v in side.items()}
    trl = sorted(
        {c["versions"]["peer"]["trl"] for c in cases.values() if "trl" in c.get("versions", {}).get("peer", {})}
    )
    versions = {**versions, **({"trl": " and ".join(trl)} if trl else {})}
    days = sorted(case["date"] for case in cases.values())
    kind = f" with {where['instructions']}" if "instructions" in where and "gpu" not in where else ""
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    turns = max([results["repetitions"], *(case.get("turns", 0) for case in cases.values())])
    measured = (
        f"{where.get('gpu', where['cpu'])}{kind}, {where['threads']} of {where['cores']} cores, "
        + ", ".join(f"{name} {release}" for name, release in sorted(versions.items()))
        + f"; {when}, up to {turns} turns."
    )
    return "\n".join([*textwrap.wrap(measured, 120), "", ""])


def row(case: dict[str, Any]) -> str:
    return "| " + " | ".join(cells_of(case)) + " |"


def cells_of(case: dict[str, Any]) -> list[str]:
    """What was done, ours, the peer's, their ratio, the share of the limit, memory and tokens computed."""
    unit, missing = case["unit"], case.get("not_measured")
    what, ours, peer, ratio, limit, memory, tokens = case["what"], "", "", "", "", "", ""
    if missing:
        ratio = f"not measured ({missing})"
    if "ours" in case:
        ours = f"{case['ours']['label']}: {number(case['ours']['per_second']['median'])} {unit}/s"
    if "peer" in case:
        peer = f"{case['peer']['label']}: {number(case['peer']['per_second']['median'])}"
        memory = f"{mebibytes(case['ours']['peak_bytes'])} / {mebibytes(case['peer']['peak_bytes'])}"
        if case.get("memory_goal"):
            memory += f" = {memory_share(case):.2f}"
        if "tokens" in case["ours"] and "tokens" in case["peer"]:
            counts = [case[side]["tokens"] for side in ("ours", "peer")]
            tokens = f"{number(counts[0])} / {number(counts[1])} = {counts[0] / counts[1]:.2f}"
    if "memory" in case:
        peer = case["memory"]["label"]
        memory = f"{mebibytes(case['memory']['ours'])} / {mebibytes(case['memory']['peer'])}"
    if "value" in case:
        ours = spread_shown(case["value"], f" {unit}")
    if "ratio" in case:
        ratio = spread_shown(case["ratio"])
    if "limit_share" in case:
        limit = f"{case['limit_share']:.0%}"
    return [what, ours, peer, ratio, limit, memory, tokens]


def spread_shown(measured: dict[str, float], unit: str = "") -> str:
    low, high = measured["min"], measured["max"]
    return f"**{measured['median']:.2f}**{unit}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short_table(results: Sequence[dict[str, Any]]) -> str:
    """The ratios of a few rows, a column for each processor that has them."""
    rows: dict[str, list[str]] = {}  # by name of the case
    kinds: list[str] = []
    for result in results:
        cases = {name: result["cases"][name] for name in SHORT if name in result["cases"]}
        if not cases:
            continue
        for name, case in cases.items():
            what, _, peer, ratio, *_ = cells_of(case)
            begun = rows.setdefault(name, [what, SETTING.sub(":", peer).partition(":")[0]])
            begun += [""] * (2 + len(kinds) - len(begun)) + [ratio]
        where = result["machine"]
        kinds.append(f"{where.get('instructions', where['cpu'])}, {min(case['date'] for case in cases.values())}")
    full = [row + [""] * (2 + len(kinds) - len(row)) for row in rows.values()]
    return markdown(("work", "beside", *kinds), full)


def insert(suite: str, folder: Path) -> None:
    """Write the tables between the markers of the pages. Raises: UsageError if there are no measured results."""
    sources = sorted(folder.glob(f"{suite}*.json"))
    if not sources:
        raise UsageError(f"--insert True: {folder} has no {suite}*.json; measure first")
    results = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    for source, result in zip(sources, results, strict=True):
        if result["quick"]:
            raise UsageError(
                f"--insert True: {source} is from a run with --quick, which measures nothing; measure first"
            )
    tables = {suite: "\n".join(map(page_table, results)), f"{suite}, short": short_table(results)}
    for name, text in tables.items():
        start, end = f"<!-- benchmark {name} -->", f"<!-- end of benchmark {name} -->"
        for page in PAGES:
            before, marker, rest = page.read_text(encoding="utf-8").partition(start)
            if marker:
                write_text(page, f"{before}{start}\n{text}{end}{rest.partition(end)[2]}")
                print(f"inserted into {page}")


def main() -> None:
    """Print the tables of all results, and the measurements of single parts."""
    from benchmarks import growth

    for source in sorted(RESULTS.glob("*pu*.json")):
        print(table(json.loads(source.read_text(encoding="utf-8"))))
    for source in sorted(RESULTS.glob("growth*.json")):
        print(growth.table(json.loads(source.read_text(encoding="utf-8"))))
    for name, part in json.loads((RESULTS / "parts.json").read_text(encoding="utf-8")).items():
        command = f" (`{part['command']}`)" if part["command"] else ""
        print(f"{name}: {part['measured']}{command}\n\n{markdown(part['columns'], part['rows'])}")


if __name__ == "__main__":
    main()
