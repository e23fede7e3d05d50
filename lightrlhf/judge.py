"""Judge which of two models answers better, on pairs of responses to the same prompts.

Two JSONL files, as `lightrlhf.generate` writes them, are matched by prompt. A judge is a model at an OpenAI-compatible
server, a reward model, a Python function such as the café's gold judge, or a person in the terminal. A model at a
server sees each pair in both orders; where its verdicts disagree the pair is a tie, and the share of such pairs is
reported as position bias. A person sees each pair once, blind and in random order. Identical texts are a tie by any
judge; neither a model at a server nor a person is asked about them.

The results are wins, ties and losses of A with 95% intervals (Wilson's, which have a width even after three equal
verdicts), the lengths, the win rate at equal lengths (after Dubois et al. 2024, arXiv:2404.04475), and an e-value, by
which one may stop at any time. Each verdict is written at once; an interrupted run resumes.

`--sample` instead draws rows of the files, for a judge who cannot read all of them. Left out: ratings of more than two
models, and the judging prompts of commercial benchmarks.
"""

from __future__ import annotations

import json
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, check_args, flag, random_seed
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import DryRunArgs
from lightrlhf.cli.groups.rewards import check_reward_model
from lightrlhf.cli.lists import paths
from lightrlhf.cli.parser import parse
from lightrlhf.cli.paths import check_file
from lightrlhf.data.responses import are_identical, read_responses
from lightrlhf.data.splits import hash64
from lightrlhf.evaluation.matching import evidence, match_rows, prompt_hash
from lightrlhf.generation.openai_client import RemoteArgs, Reply, Servers
from lightrlhf.maths import length_control, ops
from lightrlhf.models.loading import find_device
from lightrlhf.rewards import encoding, functions, loading, scorers
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.jsonl import JsonlWriter, Row, to_json, write_jsonl
from lightrlhf.storage.results import cell, new_figure, print_table, save_figure, try_first
from lightrlhf.storage.seals import sha256
from lightrlhf.storage.writing import write_text

CHUNK = 32  # pairs scored between two writes
MAX_MALFORMED = 3  # replies without a verdict, after which a pair counts as malformed
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
# letters are capitals, for "a" is an article, too: "Verdict: a tie"
VERDICT = re.compile(r"(?i:verdict)\W{1,6}((?:[Aa] +)?(?i:tie)|[ABb])\b(?!\s*(?:/|and|or)\s*[AB]\b)")
KEYS = {"1": "first", "2": "second", "3": "tie", "4": "skip"}
SCORES = {"A": 1.0, "tie": 0.5, "B": 0.0}
ENOUGH = 20.0  # e-value of a verdict, which is wrong in one of 20 comparisons at most
WORTH = {"win": 1.0, "tie": 0.5, "loss": 0.0}
Work = Callable[[Sequence[Row]], Iterator[Row]]  # pairs to records


def check_judge(name: str, flag: str) -> None:
    """Raises: ValueError for a text that is neither a judge nor the path of a function."""
    if name not in ("openai", "reward", "human") and ":" not in name:
        raise ValueError(f"{flag} {name} is not one of openai, reward, human, or package.module:function")


@dataclass(frozen=True, kw_only=True)
class JudgeArgs(RemoteArgs, DryRunArgs):
    """Judge the responses of two models to the same prompts, or sample rows for judging."""

    responses_file: list[str] = flag(split=paths, check=check_file)
    """JSONL files with `prompt` and `response` (or `responses`): A and B; for `sample` one or more."""
    judge: str = flag("openai", check=check_judge)
    """Judge: openai, reward, human, or a scoring function `package.module:name`."""
    judge_model: str | None = None
    """Name of the judging model at the server."""
    task: Literal["summarization", "dialogue", "webgpt"] = "dialogue"
    """Criteria in the prompt of a judging model."""
    rm_experiment_dir: str | None = flag(None, check=check_reward_model)
    """Reward model that judges."""
    output_file: str | None = None
    """File of verdicts, with results and a plot beside it. Default: `{A}-vs-{B}-{judge}.jsonl` next to A."""
    max_new_tokens: int = at_least(1, 256)
    """Maximum tokens of a judging model's reply."""
    rollout_mini_batch_size: int = at_least(1, 32)
    """Rows per pass of the reward model."""
    accelerator: str = "auto"
    """cpu, cuda, mps, or auto (a GPU if there is one), for the reward model."""
    seed: int = random_seed(42)
    """Seed of the order in which a person sees two responses, of the sample and of the bootstrap."""
    sample: int | None = at_least(1, None, excludes={"dry_run": True})
    """Instead of judging, write this many rows of each file, for the same prompts, to `{file}-sampled.jsonl`."""
    max_per_subreddit: int | None = at_least(1, None, needs="sample", show="rarely")
    """Largest number of sampled rows with the same value in the column `subreddit`."""

    def _check(self) -> None:
        if self.dry_run and self.judge == "human":
            raise ValueError("--dry_run True has no model to try with --judge human; leave one of them out")
        if self.sample is not None:
            if not self.responses_file:
                raise ValueError("--responses_file needs a file to sample from")
            return
        if len(self.responses_file) != 2:
            raise ValueError(f"--responses_file needs two files, for A and B; {len(self.responses_file)} given")
        if self.judge == "openai" and not (self.base_url and self.judge_model):
            raise ValueError("--judge openai needs --base_url, such as http://localhost:8000/v1, and --judge_model")
        if self.judge == "reward" and self.rm_experiment_dir is None:
            raise ValueError("--judge reward needs --rm_experiment_dir")
        if (output := output_path(self)).suffix in (".json", ".png"):
            raise ValueError(f"--output_file {output}: name it .jsonl, for results go to .json and .png beside it")
        check_output(output, "--output_file")


def run(args: JudgeArgs) -> Row | list[str]:
    """Compare two files of responses; returns the results, in a dry run for one batch, or the sampled files."""
    check_args(args, JudgeArgs)
    if args.sample is not None:
        return write_samples(args, args.sample)
    pairs, unmatched = match_rows(args.responses_file)
    output = output_path(args)
    if args.dry_run:
        work = (ask_model if args.judge == "openai" else compare_scores)(args)
        tried = pairs[: args.rollout_mini_batch_size]
        return summary(try_first(work, tried, len(pairs), "pairs", output), args.seed)
    with JsonlWriter(output, settings_of(args)) as writer:
        check_records(writer.rows, output)
        if len(writer.rows) < len(pairs):
            if args.judge == "openai":  # requests of all pairs overlap
                writer.extend(pairs, len(pairs), ask_model(args), "judge", " pairs", whole_chunks=False)
            elif args.judge == "human":
                writer.extend(pairs, len(pairs), ask_person(args), whole_chunks=False)
            else:
                writer.extend(pairs, CHUNK, compare_scores(args), "judge", " pairs")
        records = writer.rows
    results: Row = {"a": args.responses_file[0], "b": args.responses_file[1], "judge": args.judge}
    results |= {**unmatched, "left": len(pairs) - len(records), **summary(records, args.seed)}
    write_text(output.with_suffix(".json"), to_json(results, indent=1))
    if results["judged"]:
        draw(results, output.with_suffix(".png"))
    show(results, output)
    return results


def settings_of(args: JudgeArgs) -> Row:
    """Settings that determine the verdicts, with the files' hashes, stored to detect different ones."""
    names = ("judge", "judge_model", "task", "rm_experiment_dir", "max_new_tokens")
    files = [sha256(Path(name)) for name in args.responses_file]
    return {"responses": files, **{name: getattr(args, name) for name in names}, "seed": args.seed}


def output_path(args: JudgeArgs) -> Path:
    a, b = map(Path, args.responses_file)
    judge = re.sub(r"\W+", "_", args.judge)
    other = b.stem if b.stem != a.stem else b.parent.name  # one model at two temperatures
    return Path(args.output_file or a.with_name(f"{a.stem}-vs-{other}-{judge}.jsonl"))


# ----------------------------------------------------------------------------------------------------------- judges
# Each returns a function from pairs to records, with a `verdict` each: A, B, tie, skip or malformed.
def ask_model(args: JudgeArgs) -> Work:
    """Verdicts of a model at a server, which sees each pair in both orders."""

    def work(pairs: Sequence[Row]) -> Iterator[Row]:
        with Servers(args, args.judge_model or "") as servers:
            servers.wait_until_healthy()
            asked = (pair for pair in pairs if not are_identical(pair["a"], pair["b"]))
            questions = ([question(args.task, pair, swapped)] for pair in asked for swapped in (False, True))
            replies = servers.replies(request(args, texts) for texts in questions)
            for pair in pairs:
                if are_identical(pair["a"], pair["b"]):
                    yield record(pair, "tie")
                    continue
                straight, swapped = (
                    verdict_of(args, servers, question(args.task, pair, order), next(replies))
                    for order in (False, True)
                )
                first = straight[0]
                second = {"A": "B", "B": "A"}.get(swapped[0] or "", swapped[0])  # in terms of A and B
                verdict = "malformed" if first is None or second is None else first if first == second else "tie"
                yield record(pair, verdict, a_first=first, b_first=second, replies=[straight[1], swapped[1]])

    return work


def verdict_of(args: JudgeArgs, servers: Servers, asked: str, reply: Reply) -> tuple[str | None, str]:
    """The verdict on the responses as shown, None without one, and the last reply; repeats a malformed request."""
    for _ in range(MAX_MALFORMED - 1):
        if reply.error or read_verdict(reply.text):
            break
        (reply,) = servers.replies([request(args, [asked, reply.text, REMINDER])])
    return read_verdict(reply.text), reply.error or reply.text


def request(args: JudgeArgs, texts: Sequence[str]) -> Row:
    """A chat completion; the texts are messages of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": args.max_new_tokens, "temperature": 0.0}


def question(task: str, pair: Row, swapped: bool) -> str:
    """The prompt of a judging model."""
    prompt, answer, criteria = CRITERIA[task]
    first, second = (pair["b"], pair["a"]) if swapped else (pair["a"], pair["b"])
    text = functions.as_text(pair["prompt"])
    return QUESTION.format(prompt=prompt, answer=answer, criteria=criteria, text=text, first=first, second=second)


def read_verdict(reply: str) -> str | None:
    """The last verdict of a reply, or the whole reply when it is only A, B or tie."""
    verdicts = VERDICT.findall(reply) or re.findall(r"^\W*(A|B|tie)\W*$", reply, re.IGNORECASE)
    return {"a": "A", "b": "B", "tie": "tie"}[verdicts[-1].lower().split()[-1]] if verdicts else None


def compare_scores(args: JudgeArgs) -> Work:
    """Verdicts for the higher score; a missing score makes a pair malformed."""
    scores_of = reward_scores(args) if args.judge == "reward" else function_scores(args)

    def work(pairs: Sequence[Row]) -> Iterator[Row]:
        pairs = list(pairs)
        for pair, (a, b) in zip(pairs, scores_of(pairs)):
            if a is None or b is None:
                verdict = "malformed"
            else:  # in a batch, scores of one text may differ by a rounding error
                verdict = "tie" if a == b or are_identical(pair["a"], pair["b"]) else "A" if a > b else "B"
            yield record(pair, verdict, score_a=a, score_b=b)

    return work


def reward_scores(args: JudgeArgs) -> Callable[[Sequence[Row]], list[list[float | None]]]:
    """Scores of a reward model; a model that compares two responses sees both orders."""
    device, batch_size = find_device(args.accelerator), args.rollout_mini_batch_size
    scorer = loading.load_scorer(args.rm_experiment_dir or "", device, batch_size, "--rm_experiment_dir")
    return lambda pairs: scorer([list(pair["samples"].values()) for pair in pairs])


def function_scores(args: JudgeArgs) -> Callable[[Sequence[Row]], list[list[float | None]]]:
    """Scores of a Python function `f(prompts, completions, **columns)`: numbers, or dicts with a `score`."""
    function = load_function(args.judge, "--judge")

    def scores_of(pairs: Sequence[Row]) -> list[list[float | None]]:
        columns = [{k: v for k, v in pair["columns"].items() if k not in ("prompt", "response")} for pair in pairs]
        scorer = scorers.FunctionScorer(function, f"--judge {args.judge}")
        sides = [
            scorer([[encoding.Sample(pair["prompt"], pair[side], columns=own)] for pair, own in zip(pairs, columns)])
            for side in "ab"
        ]
        return [[a, b] for (a,), (b,) in zip(*sides)]

    return scores_of


def ask_person(args: JudgeArgs) -> Work:
    """Verdicts of a person at the terminal, who does not know which model is which; `q` stops for now."""

    def work(pairs: Sequence[Row]) -> Iterator[Row]:
        print("1: the first is better   2: the second is better   3: equal   4: skip   q: stop; run again to resume")
        for pair in pairs:
            if are_identical(pair["a"], pair["b"]):
                yield record(pair, "tie")
                continue
            swapped = random.Random(f"{args.seed} {pair['index']}").random() < 0.5
            first, second = ("b", "a") if swapped else ("a", "b")
            print(f"\n{'=' * 80}\n{functions.as_text(pair['prompt'])}\n")
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
            verdict = {"first": first.upper(), "second": second.upper()}.get(KEYS[key], KEYS[key])
            yield record(pair, verdict, shown_first=first.upper())

    return work


def record(pair: Row, verdict: str, **more: Any) -> Row:
    """A row of the output."""
    kept = {name: value for name, value in pair.items() if name not in ("columns", "samples")}
    return {**kept, "verdict": verdict, **more}


def check_records(records: Sequence[Row], output: Path) -> None:
    """Raises: UsageError when the output to continue has rows that this program did not write."""
    verdicts = (*SCORES, "skip", "malformed")
    for number, row in enumerate(records, start=1):
        texts = all(isinstance(row.get(side), str) for side in "ab")
        if row.get("verdict") not in verdicts or not texts or "prompt" not in row:
            raise UsageError(f"{output}: row {number} has no verdict as this program writes it; remove the file")


# ---------------------------------------------------------------------------------------------------------- results
def summary(records: Sequence[Row], seed: int) -> Row:
    """Counts, shares of A with 95% intervals, lengths in words, and position bias where both orders were judged."""
    counts: Counter[str] = Counter()
    scores, prompts = array("d"), array("Q")  # of the judged
    lengths = array("q"), array("q")
    for row in records:
        verdict = row["verdict"]
        counts[verdict] += 1
        if verdict not in SCORES:
            continue
        counts["identical"] += are_identical(row["a"], row["b"])
        scores.append(SCORES[verdict])
        prompts.append(prompt_hash(row))
        for side, words in zip("ab", lengths):
            words.append(len(row[side].split()))
        if "a_first" in row:
            counts["both"] += 1
            counts["disagree"] += row["a_first"] != row["b_first"]
            counts["first"] += (row["a_first"] == "A") + (row["b_first"] == "B")
            counts["second"] += (row["a_first"] == "B") + (row["b_first"] == "A")
    results: Row = {"judged": len(scores), "skipped": counts["skip"], "malformed": counts["malformed"]}
    results["identical"] = counts["identical"]
    if scores:
        worths: dict[str, float | None] = {**WORTH, "win_rate": None}
        for name, worth in worths.items():
            values = scores if worth is None else array("d", (score == worth for score in scores))
            results[name] = sum(values) / len(values)
            results[f"{name}_interval"] = list(ops.share_interval(values, prompts))
        results |= evidence(scores, prompts)
        rate, interval = length_control.length_controlled_win_rate(scores, lengths, prompts, seed)
        results |= {"length_controlled_win_rate": rate, "length_controlled_win_rate_interval": list(interval)}
        results |= {f"mean_length_{side}": sum(words) / len(words) for side, words in zip("ab", lengths)}
    if both := counts["both"]:
        results["orders_disagree"] = counts["disagree"] / both
        results["prefers_first"] = counts["first"] / (2 * both)
        results["prefers_second"] = counts["second"] / (2 * both)
    return results


def verdict_so_far(results: Row) -> str:
    """What the larger e-value says, in a sentence."""
    value, better = max((results["e_value_a"], "A"), (results["e_value_b"], "B"))
    if value < ENOUGH:
        return f"no verdict: the larger e-value is {value:.1f}, and {ENOUGH:g} decides; judge more pairs"
    return (
        f"{better} is better: its e-value is {value:.3g}, however often you look. This compares two sets of weights; a "
        "verdict on two methods needs seeds"
    )


def show(results: Row, output: Path) -> None:
    """Print the results as a table, and the verdict."""
    a, b = (Path(results[side]).stem for side in "ab")
    names = [name for name in results if name not in ("a", "b", "judge") and not name.endswith("_interval")]
    lines = [[name.replace("_", " "), cell(results, name)] for name in names]
    print_table(f"A: {a}   B: {b}   judge: {results['judge']}", ["", ""], lines)
    if results["judged"]:
        print(verdict_so_far(results))
    print(f"records: {output}")


def draw(results: Row, output: Path) -> None:
    """Draw the shares of wins, ties and losses of A as a bar, and the interval of its win rate."""
    figure, (axis,) = new_figure(7, 1.8)
    left = 0.0
    for name, colour in (("win", "C2"), ("tie", "0.8"), ("loss", "C3")):
        axis.barh(0, results[name], left=left, color=colour, label=f"{name} {results[name]:.2f}")
        left += results[name]
    (low, high), rate = results["win_rate_interval"], results["win_rate"]
    error = [[max(rate - low, 0)], [max(high - rate, 0)]]
    axis.errorbar(rate, 0, xerr=error, fmt="ko", capsize=4, label="win rate")
    axis.axvline(0.5, color="k", lw=0.8, ls=":")
    axis.set_xlim(0, 1)
    axis.set_yticks([])
    a, b = (Path(results[side]).stem for side in "ab")
    axis.set_title(f"{a} against {b}, {results['judged']} pairs", fontsize=9)
    axis.legend(fontsize=7, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    save_figure(figure, output)


# ----------------------------------------------------------------------------------------------------------- sample
def write_samples(args: JudgeArgs, size: int) -> list[str]:
    """Write `{file}-sampled.jsonl` of each file, with the same prompts where the files have them; returns the files."""
    written = []
    for name in args.responses_file:
        rows: Sequence[Row] = read_responses(name, ["prompt"])
        if args.max_per_subreddit is not None and not any("subreddit" in row for row in rows):
            raise UsageError(f"--max_per_subreddit {args.max_per_subreddit}: {name} has no column subreddit")
        rows = sample_rows(rows, size, args.max_per_subreddit, args.seed)
        output = Path(name).with_name(f"{Path(name).stem}-sampled.jsonl")
        write_jsonl(output, rows)
        print(f"{output}: {len(rows)} rows" + (f", fewer than --sample {size}" if len(rows) < size else ""))
        written.append(str(output))
    return written


def sample_rows(rows: Sequence[Row], size: int, max_per_subreddit: int | None, seed: int) -> list[Row]:
    """Rows in an order that depends on the seed and their prompts alone, so that two files give the same prompts."""
    ranks = array("Q", (hash64(f"{seed} {json.dumps(row['prompt'])}".encode()) for row in rows))
    counts: Counter[str] = Counter()
    chosen: list[Row] = []
    for place in sorted(range(len(rows)), key=ranks.__getitem__):
        if len(chosen) == size:
            break
        row = rows[place]
        group = json.dumps(row.get("subreddit"))
        if max_per_subreddit is None or counts[group] < max_per_subreddit:
            counts[group] += 1
            chosen.append(row)
    return chosen


@one_line_errors
def main(argv: list[str] | None = None) -> Row | list[str]:
    """Run the program; returns the results, or the sampled files."""
    return run(parse(JudgeArgs, argv))


if __name__ == "__main__":
    main()
