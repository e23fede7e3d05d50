"""Which of two models answers better: pairs of responses to the same prompts, judged one by one.

Two JSONL files, as `lightrlhf.generate` writes them, are matched by prompt. A judge is a model behind an
OpenAI-compatible server, a reward model, a Python function such as the café's gold judge, or a person in the
terminal. A model at a server sees each pair in both orders; where its verdicts disagree the pair is a tie, and how
often that happens is reported as position bias. A person sees each pair once, blind and in random order.

The end is wins, ties and losses of A with 95% intervals (bootstrap over prompts), the lengths, and the win rate that
answers of equal length would have (after Dubois et al. 2024, arXiv:2404.04475). Each verdict is written when it is
there: a run that stops goes on where it was.

`--sample` instead draws rows of the files for a judge who cannot read all of them. Left out: ratings of more than two
models, and prompts written by the companies whose models judge.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.lists import PATHS
from lightrlhf.cli.parser import parse
from lightrlhf.generation.openai_client import RemoteArgs, Reply, Servers
from lightrlhf.models.loading import find_device
from lightrlhf.rewards.loading import load_function, load_scorer
from lightrlhf.rewards.scorers import Sample, as_text
from lightrlhf.storage.checkpoint import write_text
from lightrlhf.storage.jsonl import JsonlWriter, read_jsonl, write_jsonl

CHUNK = 32  # pairs scored between two writes
RESAMPLES = 1000
CRITERIA = {
    "summarization": (
        "post",
        "summary",
        "Weigh four things: relevance (it keeps what matters and leaves out the rest), coherence (it reads as one "
        "text), consistency (it says nothing that the post does not) and fluency (it is well-formed language).",
    ),
    "dialogue": (
        "conversation",
        "reply",
        "Weigh how helpful the reply is to the person: does it do what was asked, correctly, and at the depth that "
        "was wanted?",
    ),
    "webgpt": (
        "question",
        "answer",
        "Weigh three things: accuracy (what it states is true), coherence (it is clear and in order) and usefulness "
        "(it answers what was asked, and fully).",
    ),
}
QUESTION = """Compare two {answer}s to the same {prompt}.

<{prompt}>
{text}
</{prompt}>

<{answer} A>
{first}
</{answer} A>

<{answer} B>
{second}
</{answer} B>

{criteria} Neither the order of the two nor their length should count for itself. Give your reason in one or two \
sentences. Then end with one line: "Verdict: A", "Verdict: B", or "Verdict: tie" if neither is better."""
REMINDER = 'Your reply had no verdict. Reply with one line: "Verdict: A", "Verdict: B" or "Verdict: tie".'
VERDICT = re.compile(r"verdict\W{1,6}(A|B|tie)\b", re.IGNORECASE)
KEYS = {"1": "first", "2": "second", "3": "tie", "4": "skip"}
SCORES = {"A": 1.0, "tie": 0.5, "B": 0.0}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class JudgeArgs(RemoteArgs):
    """Judge the responses of two models to the same prompts, or sample rows for judging."""

    responses_file: list[str] = field(metadata=PATHS)
    """JSONL files with `prompt` and `response` (or `responses`): A and B; for `sample` one or more."""
    judge: str = "openai"
    """Who judges: openai, reward, human, or a Python function `package.module:name` that scores responses."""
    judge_model: str | None = None
    """Name of the judging model at the server."""
    task: Literal["summarization", "dialogue", "webgpt"] = "dialogue"
    """What a judging model is asked to weigh."""
    rm_experiment_dir: str | None = None
    """Reward model that judges."""
    output_file: str | None = None
    """Records to write; `{A}-vs-{B}-{judge}.jsonl` beside A when not given. Results and a picture stand beside it."""
    num_pairs: int | None = None
    """Judge at most this many pairs, the first ones."""
    max_malformed: int = 3
    """How often a judging model is asked before a reply without a verdict counts as malformed."""
    max_new_tokens: int = 256
    """Longest reply of a judging model."""
    mini_batch_size: int = 32
    """Rows per pass of the reward model."""
    accelerator: str = "auto"
    """cpu, cuda, mps or auto, for the reward model."""
    seed: int = 42
    """Seed of the order in which a person sees two responses, of the sample and of the bootstrap."""
    sample: int | None = None
    """Write so many rows of each file to `{file}-sampled.jsonl` instead of judging; the same prompts of each."""
    max_per_subreddit: int | None = None
    """At most so many sampled rows with the same value in the column `subreddit`."""

    def __post_init__(self) -> None:
        self.check_remote()
        for name in ("max_malformed", "max_new_tokens", "mini_batch_size"):
            check_at_least(self, name, 1)
        for name in ("num_pairs", "sample", "max_per_subreddit"):
            if getattr(self, name) is not None:
                check_at_least(self, name, 1)
        for name in self.responses_file:
            if not Path(name).is_file():
                raise ValueError(f"--responses_file {name} does not exist")
        if self.max_per_subreddit is not None and self.sample is None:
            raise ValueError("--max_per_subreddit is of no use without --sample")
        if self.sample is not None:
            if not self.responses_file:
                raise ValueError("--responses_file needs a file to sample from")
            return
        if len(self.responses_file) != 2:
            raise ValueError(f"--responses_file needs two files, those of A and B; {len(self.responses_file)} given")
        if self.judge == "openai" and not (self.base_url and self.judge_model):
            raise ValueError("--judge openai needs --base_url, such as http://localhost:8000/v1, and --judge_model")
        if self.judge == "reward" and self.rm_experiment_dir is None:
            raise ValueError("--judge reward needs --rm_experiment_dir")
        if self.rm_experiment_dir is not None and not Path(self.rm_experiment_dir).is_dir():
            raise ValueError(f"--rm_experiment_dir {self.rm_experiment_dir} does not exist")
        if self.judge not in ("openai", "reward", "human") and ":" not in self.judge:
            raise ValueError(f"--judge {self.judge} is none of openai, reward, human, nor package.module:function")


def run(args: JudgeArgs) -> Row | list[str]:
    """Compare two files of responses; returns the results, or the sampled files."""
    if args.sample is not None:
        return write_samples(args)
    pairs, told = matched(args)
    output = output_path(args)
    with JsonlWriter(output, settings_of(args)) as writer:
        left = pairs[len(writer.rows) :]
        if left:
            for record in judge_of(args)(args, left):
                writer.append(record)
        records = writer.rows
    results = {
        "a": args.responses_file[0],
        "b": args.responses_file[1],
        "judge": args.judge,
        **told,
        "left": len(pairs),
    }
    results["left"] -= len(records)
    results |= summary(records, args.seed)
    write_text(output.with_suffix(".json"), json.dumps(results, indent=1))
    if results["judged"]:
        draw(results, output.with_suffix(".png"))
    show(results, output)
    return results


# --------------------------------------------------------------------------------------------------------- the pairs
def matched(args: JudgeArgs) -> tuple[list[Row], Row]:
    """Pairs with the same prompt, in the order of A, and how many rows found no partner.

    A prompt that comes several times is matched in order. Raises: UsageError when no prompt is in both.
    """
    ours, theirs = (by_prompt(name) for name in args.responses_file)
    pairs = []
    for key, row in ours.items():
        other = theirs.get(key)
        if other is not None:
            answers = {"a": response_of(row, args.responses_file[0]), "b": response_of(other, args.responses_file[1])}
            columns = {name: value for name, value in row.items() if isinstance(value, (str, int, float))}
            pairs.append({"columns": columns, "index": len(pairs), "prompt": row["prompt"], **answers})
    if not pairs:
        raise UsageError(f"--responses_file {' '.join(args.responses_file)} have no prompt in common")
    alone = {"only_in_a": len(ours) - len(pairs), "only_in_b": len(theirs) - len(pairs)}
    return pairs[: args.num_pairs], alone


def by_prompt(file: str) -> dict[tuple[str, int], Row]:
    """The rows of a file by prompt and by how often it came before."""
    seen: Counter[str] = Counter()
    rows = {}
    for row in read_jsonl(file, needs=["prompt"]):
        prompt = json.dumps(row["prompt"], ensure_ascii=False)
        rows[prompt, seen[prompt]] = row
        seen[prompt] += 1
    return rows


def response_of(row: Row, file: str) -> str:
    """Its `response`, else the first of its `responses`. Raises: UsageError."""
    response = row["response"] if "response" in row else next(iter(row.get("responses") or []), None)
    if not isinstance(response, str):
        raise UsageError(f"{file}: the row of prompt {as_text(row['prompt'])[:60]!r} has no response")
    return response


def settings_of(args: JudgeArgs) -> Row:
    """What the verdicts depend on; of the files their content."""
    names = (
        "judge",
        "judge_model",
        "task",
        "rm_experiment_dir",
        "num_pairs",
        "max_malformed",
        "max_new_tokens",
        "seed",
    )
    files = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in args.responses_file]
    return {"responses": files, **{name: getattr(args, name) for name in names}}


def output_path(args: JudgeArgs) -> Path:
    a, b = map(Path, args.responses_file)
    judge = re.sub(r"\W+", "_", args.judge)
    other = b.stem if b.stem != a.stem else b.parent.name  # one model at two temperatures
    return Path(args.output_file or a.with_name(f"{a.stem}-vs-{other}-{judge}.jsonl"))


# -------------------------------------------------------------------------------------------------------- the judges
def judge_of(args: JudgeArgs) -> Callable[[JudgeArgs, Sequence[Row]], Iterator[Row]]:
    """What turns pairs into records, each with a `verdict`: A, B, tie, skip or malformed."""
    return {"openai": ask_model, "human": ask_person}.get(args.judge, compare_scores)


def ask_model(args: JudgeArgs, pairs: Sequence[Row]) -> Iterator[Row]:
    """Verdicts of a model at a server, which sees each pair in both orders."""
    from tqdm import tqdm

    with Servers(args, args.judge_model) as servers:
        servers.wait_until_healthy()
        asked = ([question(args.task, pair, swapped)] for pair in pairs for swapped in (False, True))
        replies = servers.replies(request(args, words) for words in asked)
        for pair in tqdm(pairs, desc="judge", unit=" pairs"):
            straight, swapped = (
                settled(args, servers, question(args.task, pair, order), next(replies)) for order in (False, True)
            )
            first, second = straight[0], {"A": "B", "B": "A"}.get(swapped[0], swapped[0])  # in terms of A and B
            verdict = "malformed" if None in (first, second) else first if first == second else "tie"
            yield record(pair, verdict, a_first=first, b_first=second, replies=[straight[1], swapped[1]])


def settled(args: JudgeArgs, servers: Servers, asked: str, reply: Reply) -> tuple[str | None, str]:
    """The verdict (A is what was shown first; None if none came) and the last reply; asks again where it had none."""
    for _ in range(args.max_malformed - 1):
        if reply.error or read_verdict(reply.text):
            break
        (reply,) = servers.replies([request(args, [asked, reply.text, REMINDER])])
    return read_verdict(reply.text), reply.error or reply.text


def request(args: JudgeArgs, words: Sequence[str]) -> Row:
    """A chat completion; user and model say the words in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
    return {"messages": messages, "max_tokens": args.max_new_tokens, "temperature": 0.0}


def question(task: str, pair: Row, swapped: bool) -> str:
    """What a judging model reads."""
    prompt, answer, criteria = CRITERIA[task]
    first, second = (pair["b"], pair["a"]) if swapped else (pair["a"], pair["b"])
    text = as_text(pair["prompt"])
    return QUESTION.format(prompt=prompt, answer=answer, criteria=criteria, text=text, first=first, second=second)


def read_verdict(reply: str) -> str | None:
    """The last verdict of a reply, or the whole of it when it is just A, B or tie."""
    found = VERDICT.findall(reply) or re.findall(r"^\W*(A|B|tie)\W*$", reply, re.IGNORECASE)
    return {"a": "A", "b": "B", "tie": "tie"}[found[-1].lower()] if found else None


def compare_scores(args: JudgeArgs, pairs: Sequence[Row]) -> Iterator[Row]:
    """Verdicts by who has the higher score; a score that is not there makes a pair malformed."""
    scores_of = reward_scores(args) if args.judge == "reward" else function_scores(args)
    for start in range(0, len(pairs), CHUNK):
        chunk = pairs[start : start + CHUNK]
        for pair, (a, b) in zip(chunk, scores_of(chunk)):
            if None in (a, b):
                verdict = "malformed"
            else:  # the same text may score a rounding error apart
                verdict = "tie" if math.isclose(a, b, rel_tol=1e-5) else "A" if a > b else "B"
            yield record(pair, verdict, score_a=a, score_b=b)


def reward_scores(args: JudgeArgs) -> Callable[[Sequence[Row]], list[list[float | None]]]:
    """Scores of a reward model; one that compares pairs is asked in both orders."""
    scorer = load_scorer(
        args.rm_experiment_dir, find_device(args.accelerator), args.mini_batch_size, "--rm_experiment_dir"
    )
    return lambda pairs: scorer([[Sample(pair["prompt"], pair[side]) for side in "ab"] for pair in pairs])


def function_scores(args: JudgeArgs) -> Callable[[Sequence[Row]], list[list[float | None]]]:
    """Scores of a Python function `f(prompts, completions, **columns)`: numbers, or dicts with a `score`."""
    function = load_function(args.judge, "--judge")

    def scores_of(pairs: Sequence[Row]) -> list[list[float | None]]:
        names = {name for pair in pairs for name in pair["columns"]} - {"prompt", "response"}
        columns = {name: [pair["columns"].get(name) for pair in pairs] for name in names}
        prompts = [as_text(pair["prompt"]) for pair in pairs]
        sides = []
        for side in "ab":
            found = function(prompts, [pair[side] for pair in pairs], **columns)
            sides.append([float(score["score"] if isinstance(score, dict) else score) for score in found])
        return [[None if score != score else score for score in both] for both in zip(*sides, strict=True)]

    return scores_of


def ask_person(args: JudgeArgs, pairs: Sequence[Row]) -> Iterator[Row]:
    """Verdicts of whoever sits at the terminal, who does not know which model is which; `q` ends it for now."""
    print("1: the first is better   2: the second is better   3: equal   4: skip   q: stop, and go on another time")
    for pair in pairs:
        swapped = random.Random(f"{args.seed} {pair['index']}").random() < 0.5
        first, second = ("b", "a") if swapped else ("a", "b")
        print(f"\n{'=' * 80}\n{as_text(pair['prompt'])}\n")
        for number, side in ((1, first), (2, second)):
            print(f"--- {number} {'-' * 74}\n{pair[side]}\n")
        key = ""
        while key not in (*KEYS, "q"):
            try:
                key = input(f"[{pair['index'] + 1}] 1 / 2 / 3 / 4 / q: ").strip().lower()
            except EOFError:
                key = "q"
        if key == "q":
            return
        choice = KEYS[key]
        yield record(
            pair, {"first": first.upper(), "second": second.upper()}.get(choice, choice), shown_first=first.upper()
        )


def record(pair: Row, verdict: str, **more: Any) -> Row:
    """A row of the output."""
    told = {name: value for name, value in pair.items() if name != "columns"}
    return {**told, "verdict": verdict, **more}


# ------------------------------------------------------------------------------------------------------- the results
def summary(records: Sequence[Row], seed: int) -> Row:
    """Counts, shares of A with 95% intervals, lengths in words, and position bias where both orders were asked."""
    counts = Counter(row["verdict"] for row in records)
    judged = [row for row in records if row["verdict"] in SCORES]
    results: Row = {"judged": len(judged), "skipped": counts["skip"], "malformed": counts["malformed"]}
    if judged:
        scores = torch.tensor([SCORES[row["verdict"]] for row in judged], dtype=torch.float64)
        lengths = torch.tensor([[len(row[side].split()) for side in "ab"] for row in judged], dtype=torch.float64)
        weights = resampled(len(judged), seed)  # (R, N)
        for name, values in (("win", scores == 1), ("tie", scores == 0.5), ("loss", scores == 0), ("win_rate", scores)):
            results |= with_interval(name, values.double()[None] @ weights.T / len(judged))
        results |= with_interval("length_controlled_win_rate", length_controlled(scores, lengths, weights)[None])
        results |= {f"mean_length_{side}": float(lengths[:, i].mean()) for i, side in enumerate("ab")}
    both = [row for row in judged if "a_first" in row]
    if both:
        shown_first = [row["a_first"] == "A" for row in both] + [row["b_first"] == "B" for row in both]
        shown_second = [row["a_first"] == "B" for row in both] + [row["b_first"] == "A" for row in both]
        results["orders_disagree"] = sum(row["a_first"] != row["b_first"] for row in both) / len(both)
        results["prefers_first"] = sum(shown_first) / len(shown_first)
        results["prefers_second"] = sum(shown_second) / len(shown_second)
    return results


def resampled(count: int, seed: int) -> Tensor:
    """How often each pair is in each bootstrap sample: (R, N). The first row is the data itself."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    weights = torch.zeros(RESAMPLES, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, count, dtype=torch.float64), weights])


def with_interval(name: str, estimates: Tensor) -> Row:
    """The estimate of the data and the middle 95% of those of the resamples: (1, R) -> two entries."""
    low, high = estimates[0, 1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {name: float(estimates[0, 0]), f"{name}_interval": [low, high]}


def length_controlled(scores: Tensor, lengths: Tensor, weights: Tensor, ridge: float = 0.1) -> Tensor:
    """Win rate that a logistic model gives at equal lengths, for each resample: (N,), (N, 2), (R, N) -> (R,).

    P(A wins) = sigmoid(theta + phi tanh(d / std(d))), d the difference in length; then sigmoid(theta). This is Dubois
    et al. 2024, eq. 2, without its term for how hard a prompt is. Newton's method, with a small ridge.
    """
    difference = lengths[:, 0] - lengths[:, 1]
    features = torch.stack(
        [torch.ones_like(scores), (difference / difference.std(correction=0).clamp(min=1e-9)).tanh()]
    )
    penalty = torch.tensor([1e-3, ridge], dtype=torch.float64)
    beta = torch.zeros(len(weights), 2, dtype=torch.float64)  # (R, 2)
    for _ in range(25):
        chance = (beta @ features).sigmoid()  # (R, N)
        gradient = (weights * (scores - chance)) @ features.T - penalty * beta
        curvature = torch.einsum("rn,in,jn->rij", weights * chance * (1 - chance), features, features)
        beta = beta + torch.linalg.solve(curvature + penalty.diag(), gradient).clamp(-2, 2)
    return beta[:, 0].sigmoid()


def show(results: Row, output: Path) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    a, b = (Path(results[side]).stem for side in "ab")
    table = Table(title=f"A: {a}   B: {b}   judge: {results['judge']}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in results.items():
        if name in ("a", "b", "judge") or name.endswith("_interval"):
            continue
        interval = results.get(f"{name}_interval")
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown + (" [{:.3f}, {:.3f}]".format(*interval) if interval else ""))
    Console().print(table)
    print(f"records: {output}")


def draw(results: Row, output: Path) -> None:
    """One bar: how often A wins, ties and loses, and the interval of its win rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 1.8))
    left = 0.0
    for name, colour in (("win", "C2"), ("tie", "0.8"), ("loss", "C3")):
        axis.barh(0, results[name], left=left, color=colour, label=f"{name} {results[name]:.2f}")
        left += results[name]
    low, high = results["win_rate_interval"]
    middle = results["win_rate"]
    axis.errorbar(
        middle, 0, xerr=[[max(middle - low, 0)], [max(high - middle, 0)]], fmt="ko", capsize=4, label="win rate"
    )
    axis.axvline(0.5, color="k", lw=0.8, ls=":")
    axis.set_xlim(0, 1)
    axis.set_yticks([])
    axis.set_title(
        f"{Path(results['a']).stem} against {Path(results['b']).stem}, {results['judged']} pairs", fontsize=9
    )
    axis.legend(fontsize=7, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=130)
    plt.close(figure)


# -------------------------------------------------------------------------------------------------------- the sample
def write_samples(args: JudgeArgs) -> list[str]:
    """`{file}-sampled.jsonl` of each file, all with the same prompts where the files have them."""
    written = []
    for name in args.responses_file:
        rows = read_jsonl(name, needs=["prompt"])
        if args.max_per_subreddit is not None and not any("subreddit" in row for row in rows):
            raise UsageError(f"--max_per_subreddit {args.max_per_subreddit}: {name} has no column subreddit")
        rows = sampled(rows, args.sample, args.max_per_subreddit, args.seed)
        output = Path(name).with_name(f"{Path(name).stem}-sampled.jsonl")
        write_jsonl(output, rows)
        print(f"{output}: {len(rows)} rows" + (f", fewer than --sample {args.sample}" * (len(rows) < args.sample)))
        written.append(str(output))
    return written


def sampled(rows: Iterable[Row], size: int, max_per_subreddit: int | None, seed: int) -> list[Row]:
    """Rows in an order that follows from the seed and their prompts alone, so that two files give the same prompts."""

    def rank(row: Row) -> str:
        return hashlib.sha256(f"{seed} {json.dumps(row['prompt'])}".encode()).hexdigest()

    taken: Counter[Any] = Counter()
    chosen: list[Row] = []
    for row in sorted(rows, key=rank):
        group = row.get("subreddit")
        if len(chosen) < size and (max_per_subreddit is None or taken[group] < max_per_subreddit):
            taken[group] += 1
            chosen.append(row)
    return chosen


@one_line_errors
def main(argv: list[str] | None = None) -> Row | list[str]:
    """Run the program; returns the results, or the sampled files."""
    return run(parse(JudgeArgs, argv))


if __name__ == "__main__":
    main()
