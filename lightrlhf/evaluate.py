"""Evaluate models on a held-out split: generation metrics for language models, pairwise accuracy for reward models.

For a language model: perplexity of the demonstrations' responses, ROUGE against them, and of its own responses to the
prompts the mean reward, the KL to a reference, length, truncation, and the gold score where the data has a judge. All
models answer with the same sampling noise. Rewards, of a model or of Python functions, give pass@k and win rates. For a
DPO policy also how its implicit reward ranks preference pairs. For a reward model: accuracy with a 95% interval, by
group where the data names groups. Prints a table and writes `eval/{split}.json` and `eval/{split}.jsonl` into each
experiment dir.

`--responses_file` scores given responses, and `--ranking_file` ranks given ones as RewardBench 2 does; both write into
`eval` beside the file.

Other programs get the other flags: with `--env`, `--tools` or `--mcp` `lightrlhf.evaluate_episodes` (agents in episodes
that begin with prompts); without `--data_dir`, with an `--env` that has fixed starts, or a class of one's own,
`lightrlhf.evaluate_env` (agents in a text environment); with `--by_turn True` `lightrlhf.evaluate_dialogues` (scores by
turn).

`--harness` writes the files or the task of another harness in place of all this (`evaluation/harnesses.py`).

Left out: benchmark suites (other harnesses read our checkpoints as they are).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightrlhf import evaluate_dialogues, evaluate_env, evaluate_episodes
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import check_args, flag
from lightrlhf.cli.groups import agents, names_episodes
from lightrlhf.cli.lists import paths
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.cli.paths import check_file
from lightrlhf.data import splits, tokens
from lightrlhf.data.types import Tokenizer
from lightrlhf.evaluation import answers, frame, harnesses, pairs, ranking, responses
from lightrlhf.gguf.files import check_model_exists
from lightrlhf.maths.preference import DIVERGENCES, REFERENCE_FREE
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import holds_reward_model, resolve
from lightrlhf.models.roles import Policy, vocabulary_size
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards import encoding, loading, scorers
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.storage import destinations, jsonl
from lightrlhf.storage.results import cell, check_results, print_table, write_results
from lightrlhf.storage.run_dir import is_experiment_dir, read_arg, short_name

EVALUATED = "what is evaluated"
OF_MODELS: dict[str, Any] = dict.fromkeys(  # flags of models that respond, which say nothing of a file
    ("data_dir", "reference_dir", "use_pretrained", "rouge", "num_generations"), ...
)


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(responses.ResponseArgs, harnesses.HarnessArgs):
    """Evaluate language and reward models (see also evaluate_episodes, evaluate_env and evaluate_dialogues)."""

    model_name: list[str] = flag([], required=EVALUATED)
    """Experiment dirs or checkpoints; win rates are against the first."""
    responses_file: list[str] = flag(
        [],
        split=paths,
        check=check_file,
        excludes={"model_name": ..., "ranking_file": ..., **OF_MODELS},
        required=EVALUATED,
        show="first",
    )
    """JSONL files with `prompt` and `responses` or `response`, to score; win rates are against the first."""
    ranking_file: str | None = flag(
        None, check=check_file, excludes={"pass_k": ..., **OF_MODELS}, required=EVALUATED, show="first"
    )
    """JSONL file with `prompt`, `chosen`, `rejected` and `subset`, to rank by reward models or functions."""
    reference_dir: str | None = flag(None, check=check_model_exists)
    """Reference model for KL and implicit rewards. Default: the initial model of each experiment but SFT's."""
    rouge: bool = False
    """Compute ROUGE of responses against the demonstrations."""

    def _check(self) -> None:
        self.check_pass_k(may_have_rewards=bool(self.responses_file))
        self.check_files()

    def check_files(self) -> None:
        """Raises: ValueError unless one thing is evaluated, with flags that concern it, and results can be written."""
        files = [*self.responses_file, *([self.ranking_file] if self.ranking_file else [])]
        if not (files or self.model_name):
            raise ValueError("--model_name, --responses_file or --ranking_file is required")
        if self.ranking_file and not (self.model_name or self.has_rewards):
            raise ValueError(
                f"--ranking_file {self.ranking_file} needs a scorer: reward models by --model_name, or "
                "--reward_function"
            )
        for name, given in (("rm_chat_template", self.rm_chat_template), ("trust_remote_code", self.trust_remote_code)):
            if given and not (self.rm_experiment_dir or self.ranking_file):
                raise ValueError(f"--{name} True needs --rm_experiment_dir, or --ranking_file")
        for path in files:
            destinations.check_output(Path(path).parent / "eval" / f"{self.results_name(path)}.json", "results of")
        check_results(self.model_name, self.results_name(files[0]) if files else self.split)
        if not files and not self.do_sample and self.num_generations > 1:
            raise ValueError(f"--num_generations {self.num_generations}: greedy responses are identical; use 1")
        if not files and max(self.pass_k, default=1) > self.num_generations:
            raise ValueError(f"--pass_k {max(self.pass_k)} needs --num_generations of at least as many responses")

    def results_name(self, path: str) -> str:
        """Name of the result files of an input file."""
        return f"{Path(path).stem}_{'ranking' if path == self.ranking_file else 'responses'}"


def run(args: EvaluateArgs) -> list[dict[str, Any]]:
    """Evaluate models or files; returns one row of results per model or file, in the order of the table.

    A dry run takes as many rows as a batch has, and prints the first record in place of writing.
    """
    check_args(args, EvaluateArgs)
    args = frame.first_rows(args, max(1, args.rollout_mini_batch_size // args.num_generations))
    device = find_device(args.accelerator)
    if args.responses_file:
        rows = evaluate_files(args, device)
    elif args.ranking_file:
        rows = evaluate_ranking(args, args.ranking_file, device)
    else:
        rows = evaluate_models(args, device)
    show(rows)
    if args.dry_run:
        print(f"of {args.num_samples} rows at most; nothing was written; leave --dry_run out to evaluate all")
    return rows


def evaluate_models(args: EvaluateArgs, device: torch.device) -> list[dict[str, Any]]:
    """Evaluate language and reward models on a split; returns a row per model."""
    data_dir = args.data_folder
    if args.harness:
        return harnesses.write_for(args, args.harness, data_dir, device)
    by = "gold" if read_arg(data_dir, "judge") else "reward" if args.has_rewards else None  # what decides who wins
    rows: list[dict[str, Any]] = []
    baseline: responses.Tally | None = None  # of the first experiment
    for name in args.model_names:
        records = frame.records_of(args, name)
        if holds_reward_model(resolve(name, "--model_name")):
            rows.append({"model": short_name(name), **evaluate_reward_model(args, name, data_dir, device, records)})
        else:
            tally = responses.Tally(by)
            result = evaluate_policy(args, name, data_dir, device, records, tally)
            rows.append({"model": short_name(name), **result})
            if baseline and by:
                rows[-1] |= responses.win_rates(tally, baseline, args.seed)
            if len(rows) == 1 + args.use_pretrained:
                baseline = tally
        frame.write(args, name, args.split, rows[-1], records)
    return rows


# ------------------------------------------------------------------------------------------------------------- files
def make_rewards(args: EvaluateArgs, device: torch.device, grouped: bool = False) -> Rewards:
    """The rewards of the flags."""
    settings = (args, device, args.rollout_mini_batch_size)
    return loading.load_rewards(*settings, wrap_prompts=args.rm_chat_template, grouped=grouped)


def evaluate_files(args: EvaluateArgs, device: torch.device) -> list[dict[str, Any]]:
    """Score the responses of files, by the flags' rewards, else by those in the files; returns a row per file."""
    files = [responses.Given(path, args.num_samples) for path in args.responses_file]
    for file in files:
        file.check_same_prompts(files[0])
        file.check_counts(args.pass_k)
        if not (args.has_rewards or file.has_rewards):
            raise UsageError(f"{file.path} has no rewards yet; give --reward_function or --rm_experiment_dir")
    rewards = make_rewards(args, device) if args.has_rewards else None
    rows: list[dict[str, Any]] = []
    baseline: responses.Tally | None = None
    for file in files:
        folder = Path(file.path).parent
        records, tally = jsonl.Records(None if args.dry_run else folder / "eval"), responses.Tally("reward")
        lengths, scoring = responses.Lengths(), responses.Scoring(rewards)
        for given, samples in file.parts(answers.PART):
            for sample in samples:
                lengths.add(sample)
            part = responses.mark_passed(scoring(samples, given), args.pass_k, args.pass_threshold)
            records.extend(tally.add(part))
        row = {"model": Path(file.path).stem, **lengths.results(), **scoring.results()}
        row |= responses.pass_rates(tally, args.pass_k, args.pass_threshold)
        row |= responses.win_rates(tally, baseline, args.seed) if baseline else {}
        baseline = baseline or tally
        rows.append(row)
        write_results(folder, args.results_name(file.path), row, records, to_dict(args))
    return rows


def evaluate_ranking(args: EvaluateArgs, path: str, device: torch.device) -> list[dict[str, Any]]:
    """Rank the responses of a file by each reward model, and by the flags' rewards; returns a row for each."""
    questions = ranking.read_ranking(path, args.num_samples)
    rows: list[dict[str, Any]] = []

    def add(model: str, scorer: scorers.GroupScorer, folder: Path | None) -> None:
        result, records = ranking.rank(questions, scorer, args.seed)
        rows.append({"model": model, **result})
        if folder is not None:
            write_results(folder, args.results_name(path), rows[-1], records, to_dict(args))

    for name in args.model_name:
        trust, wrap = args.trust_remote_code, args.rm_chat_template
        scorer = loading.load_scorer(name, device, args.rollout_mini_batch_size, "--model_name", trust, wrap)
        add(short_name(name), scorer, Path(name) if is_experiment_dir(name) else None)
    if args.has_rewards:
        rewards = make_rewards(args, device, grouped=True)
        add(" + ".join(rewards.names), rewards.of_groups, Path(path).parent)
    return rows


# -------------------------------------------------------------------------------------------------- language models
def evaluate_policy(
    args: EvaluateArgs, name: str, data_dir: str, device: torch.device, records: jsonl.Records, tally: responses.Tally
) -> dict[str, Any]:
    """Results of a language model; adds one record per response (prompt, response, scores)."""
    policy, tokenizer = frame.load_evaluated(args, name, data_dir, device)
    results = on_demonstrations(args, policy, data_dir, tokenizer)
    rows = splits.load_prompts(data_dir, args.split, args.verify)[: args.num_samples]
    reference_dir, flag = reference_of(args, name)
    reference = policy
    if reference_dir is not None:
        reference = frame.load_frozen(reference_dir, tokenizer, device, flag)
        results |= on_pairs(args, name, policy, reference, data_dir, tokenizer)
    means, judge = responses.RolloutMeans(), read_arg(data_dir, "judge")
    scoring = responses.Scoring(make_rewards(args, device)) if args.has_rewards else None
    gold = answers.GoldMeans()
    size, repeats = args.rollout_mini_batch_size, args.num_generations
    for _, rollout in answers.respond_in_parts(args, policy, reference, rows, tokenizer, args.seed, size, repeats):
        means.add(rollout)
        samples = encoding.samples_of(rollout)
        part: list[dict[str, Any]] = [
            {"prompt": one.prompt, "response": one.response, **one.columns, "index": number // repeats}
            for number, one in enumerate(samples, start=len(tally.indices))
        ]
        part = scoring(samples, part) if scoring else part
        part = responses.mark_passed(part, args.pass_k, args.pass_threshold)
        records.extend(tally.add(gold.add(answers.judge_records(judge, part)) if judge else part))
    results |= means.results(with_kl=reference_dir is not None) | (scoring.results() if scoring else {})
    return results | responses.pass_rates(tally, args.pass_k, args.pass_threshold) | gold.results()


def on_demonstrations(args: EvaluateArgs, policy: Policy, data_dir: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Perplexity and ROUGE on the data's demonstrations; empty without any."""
    if not Path(data_dir, f"finetune_{args.split}.pt").is_file():
        return {}
    rows = splits.load_split(data_dir, "finetune", args.split, args.verify)[: args.num_samples]
    size = args.rollout_mini_batch_size
    splits.check_vocabulary(rows, vocabulary_size(policy), data_dir)
    results = {"perplexity": answers.perplexity(policy, rows, tokenizer.pad_token_id, size)}
    return results | (answers.rouge(args, policy, rows, tokenizer, args.seed, size) if args.rouge else {})


def on_pairs(
    args: EvaluateArgs, name: str, policy: Policy, reference: Policy, data_dir: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Accuracy of a DPO or KTO policy's implicit reward on the data's pairs; empty without any."""
    has_reward = read_arg(name, "program") in ("dpo", "kto") and read_arg(name, "loss_type") not in REFERENCE_FREE
    if not has_reward or not Path(data_dir, f"preference_{args.split}.pt").is_file():
        return {}
    rows = splits.load_split(data_dir, "preference", args.split, args.verify)[: args.num_samples]
    splits.check_vocabulary(rows, min(vocabulary_size(policy), vocabulary_size(reference)), data_dir)
    divergence = DIVERGENCES[read_arg(name, "f_divergence") or "reverse_kl"]
    reward = partial(divergence, alpha=read_arg(name, "f_alpha") or 0.0), read_arg(name, "beta")
    pad_id, size = tokenizer.pad_token_id, args.rollout_mini_batch_size
    return pairs.implicit_rewards(policy, reference, rows, *reward, pad_id, size)


def reference_of(args: EvaluateArgs, name: str) -> tuple[str | None, str]:
    """Reference model of an experiment's KL and implicit rewards, None if it has none, and the flag for errors."""
    reference = args.reference_dir or read_arg(name, "ref_model") or read_arg(name, "sft_experiment_dir")
    started = read_arg(name, "model_name") if read_arg(name, "program") != "sft" else None
    if reference is None and started not in (None, "tiny"):
        return started, "--model_name"
    return reference, "--reference_dir"


# ---------------------------------------------------------------------------------------------------- reward models
def evaluate_reward_model(
    args: EvaluateArgs, name: str, data_dir: str, device: torch.device, records: jsonl.Records
) -> dict[str, Any]:
    """Accuracy (ties half), loss and margin of a reward model on pairs; adds one record per pair."""
    tokenizer = load_tokenizer(data_dir, name, verify=args.verify)
    model = frame.load_reward_model(args, name, tokenizer, device)
    rows = splits.load_split(data_dir, "preference", args.split, args.verify)[: args.num_samples]
    if getattr(model.model.config, "compares_pairs", False):
        rows = tokens.pair_rows(tokenizer, rows)
    splits.check_vocabulary(rows, vocabulary_size(model), data_dir)
    return pairs.rank_pairs(model, rows, tokenizer.pad_token_id, args.rollout_mini_batch_size, records)


# ---------------------------------------------------------------------------------------------------------- results
def show(rows: list[dict[str, Any]]) -> None:
    """Print the results as a table with a column per model, and scores by group or subset below it."""
    by = {"by_group": ("accuracy", "group"), "by_subset": ("ranking score", "subset")}
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("model", *by)))
    names = [name for name in names if not name.endswith("_interval")]
    lines = [[name.replace("_", " "), *(cell(row, name) for row in rows)] for name in names]
    print_table("evaluation", ["", *(row["model"] for row in rows)], lines)
    for row in rows:
        for key, (score, kind) in by.items():
            if key in row:
                parts = [[name, cell(row[key], name)] for name in row[key] if not name.endswith("_interval")]
                print_table(f"{score} of {row['model']} by {kind}", [kind, score], parts)


# --------------------------------------------------------------------------------------------------------- programs
def program_for(words: Sequence[str]) -> tuple[Callable[[list[str]], Any] | None, list[str]]:
    """`main` of the program that other flags call, None for this one, and the words without --by_turn.

    Raises: UsageError when the value of --by_turn is neither True nor False.
    """
    others, by_turn = [], "false"
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        flag, equals, value = word.partition("=")
        if flag == "--by_turn":
            is_bare = not equals and (not remaining or remaining[0].startswith("--"))  # as any boolean may be given
            by_turn = value if equals else "true" if is_bare else remaining.popleft()
        else:
            others.append(word)
    if by_turn.lower() not in ("true", "false"):
        raise UsageError(f"--by_turn {by_turn} is not True or False")
    if names_episodes(others):
        parts = [(*word.partition("="), after) for word, after in zip(others, [*others[1:], ""])]
        flags = {name: value if equals else after for name, equals, value, after in parts}
        env = flags.get("--env", "")
        is_class = ":" in env and "://" not in env
        has_starts = "--data_dir" not in flags and (env in agents.ENVIRONMENTS or is_class)
        return evaluate_env.main if has_starts else evaluate_episodes.main, others
    return evaluate_dialogues.main if by_turn.lower() == "true" else None, others


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program, or the one that other flags call; returns the rows of the table."""
    program, argv = program_for(sys.argv[1:] if argv is None else argv)
    return program(argv) if program else run(parse(EvaluateArgs, argv))


if __name__ == "__main__":
    main()
