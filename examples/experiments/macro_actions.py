"""Do macro actions learn faster than tokens, and is it more than a larger lambda? (MA-RLHF, Chai et al. 2025)

GAE over segments of n tokens at lambda looks as far ahead as GAE over tokens at lambda^(1/n), so the deciding control
is token PPO at both. Everything runs through `lightrlhf.ppo`; the arms differ in its flags only. 160 runs: four
settings, eight arms, five seeds.

The task: a prompt names one of two groups of four letters; a response has 64 letters out of eight and is scored, at its
end, by the share of them that belong to the group. Measured: rollouts until the mean score of five is above 0.9. Three
more settings were fixed before any of them was run: a reward by position (in the second half the other group counts), a
noisy reward, and the café with its reward model, where the gold score after equally many samples is measured. (The
reward by position is also measured by the score of the last five rollouts: its first five runs, one of each of five
arms, showed that none reaches 0.9 within 60 rollouts.)

Nothing was tuned on a macro arm: the learning rates of the letter task were set with token PPO alone, on a seed that is
not among the five. Prints a table per setting and the claims that held. Results are stored in `results.jsonl` as they
come: the same command resumes after a kill.

    python -m examples.experiments.macro_actions
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples.experiments.stats import paired, shown
from examples.programs import logged, workers
from lightrlhf import evaluate, ppo, quickstart, rm, sft
from lightrlhf.cli.args import check_at_least
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.plot import read_metrics
from lightrlhf.storage.jsonl import JsonlWriter
from lightrlhf.storage.results import print_table

LETTERS = "abcdefgh"
GROUPS = ("abcd", "efgh")
LENGTH, TARGET, WINDOW, NOISE, SHARE_AT_START = 64, 0.9, 5, 0.25, 0.7
LAMBDA, N = 0.95, 8
ARMS: dict[str, dict[str, Any]] = {
    "token": {},
    "n=4": {"ngram": 4},
    "n=8": {"ngram": N},
    "randomized": {"termination_condition": "randomized"},
    "ppl": {"termination_condition": "ppl"},
    "n=inf": {"ngram": 0},
    f"token, lambda^(1/{N})": {"gae_lambd": round(LAMBDA ** (1 / N), 6)},
    "token, lambda=1": {"gae_lambd": 1},
}
SAME_LAMBDA, MATCHED_LAMBDA, MACRO = "token", f"token, lambda^(1/{N})", f"n={N}"
LETTER_SETTINGS = {"share": "share_in_group", "position": "share_by_position", "noise": "noisy_share"}
MEASURES = {"share": "rollouts", "position": "score", "noise": "rollouts", "cafe": "gold"}
TITLES = {
    "rollouts": f"rollouts until the score is {TARGET}",
    "score": "score of the last five rollouts",
    "gold": "gold score",
}
Job = tuple[str, str, int]  # setting, arm, seed
Result = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MacroActionsArgs:
    """Compare macro-action PPO with token PPO at the same and at a matched lambda."""

    output_dir: str = "macro_actions"
    """Folder for data, logs and results."""
    num_seeds: int = 5
    """Seeds per arm, 2 to 5."""
    num_workers: int = 2
    """Runs at a time, one thread each."""
    smoke: bool = False
    """Run every arm for a moment only, to test that it works; the results mean nothing."""

    def __post_init__(self) -> None:
        check_at_least(self, "num_workers", 1)
        if not 2 <= self.num_seeds <= 5:
            raise ValueError(f"--num_seeds {self.num_seeds} must be 2 to 5")


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(MacroActionsArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = (*LETTER_SETTINGS, "cafe")
    jobs = [(name, arm, seed) for name in settings for seed in range(1, args.num_seeds + 1) for arm in ARMS]
    with JsonlWriter(folder / "results.jsonl", {"smoke": args.smoke}) as writer:
        results: dict[Job, Result] = {tuple(row["job"]): row["result"] for row in writer.rows}
        for job, result in run_all([job for job in jobs if job not in results], folder, args):
            results[job] = result
            writer.append({"job": job, "result": result})
            print(f"{len(results):4}  {', '.join(map(str, job)):40} {result}", flush=True)
    claims = dict(claim for setting in settings for claim in show(setting, results, args.num_seeds))
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    lists = ("; ".join(name for name, held in claims.items() if held is kept) or "none" for kept in (True, False))
    print("{} better than tokens, 95%: held in: {}. Not in: {}.".format(MACRO, *lists))


# ------------------------------------------------------------------------------------------------------- the rewards
# A response that ends early has its missing letters counted as wrong.
def share_in_group(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Share of the response's 64 places with a letter of the group named by the prompt."""
    return [
        sum(letter in prompt.split() for letter in answer.split()) / LENGTH
        for prompt, answer in zip(prompts, completions)
    ]


def share_by_position(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The same, but in the second half the letters of the other group count."""
    return [
        sum((letter in prompt.split()) == (i < LENGTH // 2) for i, letter in enumerate(answer.split())) / LENGTH
        for prompt, answer in zip(prompts, completions)
    ]


def noisy_share(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The share, plus Gaussian noise that is a function of the response."""
    shares = share_in_group(prompts, completions)
    return [share + random.Random(answer).gauss(0, NOISE) for share, answer in zip(shares, completions)]


# ---------------------------------------------------------------------------------------------------------- the runs
LETTER_MODEL = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128, "initializer_range": 0.1}
LETTER_SFT = {
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "epochs": 2,
    "learning_rate": 3e-3,
    "use_targets": True,
    "lr_scheduler_type": "constant",
}
SIZES = {"rollout_size": 64, "rollout_mini_batch_size": 64, "mini_batch_size": 32, "micro_batch_size": 32}
LETTER_PPO = SIZES | {
    "ppo_epochs": 1,
    "max_new_tokens": LENGTH,
    "init_kl_coeff": 0,
    "lr_scheduler_type": "constant",
    "actor_learning_rate": 5e-4,
    "critic_learning_rate": 5e-4,
    "epochs": 1000,
    "max_steps": 60,
}
CAFE_PPO = quickstart.PPO | SIZES | {"max_steps": 15, "lr_scheduler_type": "constant_with_warmup"}
QUIET = {"log_interval": 1, "eval_interval": 0, "save_interval": 1000, "logger": "csv", "accelerator": "cpu"}


def run_all(jobs: list[Job], folder: Path, args: MacroActionsArgs) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, as it ends; the café's models are trained while the first letter jobs run."""
    seeds = range(1, args.num_seeds + 1)
    with workers(args.num_workers) as pool:
        list(pool.map(prepare_letters, [folder / "letters" / str(seed) for seed in seeds], seeds))
        prepared = pool.submit(prepare_cafe, folder / "cafe", args.smoke)
        letters = {pool.submit(run_letters, folder, *job, args.smoke): job for job in jobs if job[0] != "cafe"}
        for done in as_completed(letters):
            yield letters[done], done.result()
        models = prepared.result()
        cafe = {pool.submit(run_cafe, folder, *models, *job[1:], args.smoke): job for job in jobs if job[0] == "cafe"}
        for done in as_completed(cafe):
            yield cafe[done], done.result()


def prepare_letters(folder: Path, seed: int) -> str:
    """The experiment dir of the initial policy, fine-tuned on responses with seven of ten letters in the named group.

    The end token is a ninth id, which no demonstration contains.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    data, done = folder / "data", folder / "model.json"
    if not done.is_file():
        data.mkdir(parents=True, exist_ok=True)
        words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
        tokenizer.save_pretrained(data / "tokenizer")
        rng = random.Random(seed)
        torch.save([demonstration(rng, GROUPS[i % 2]) for i in range(2048)], data / "finetune_train.pt")
        torch.manual_seed(seed)
        config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, **LETTER_MODEL)
        GPT2LMHeadModel(config).save_pretrained(folder / "model")
        where = {"data_dir": data, "model_name": folder / "model", "log_dir": folder / "logs", "seed": seed}
        done.write_text(json.dumps(logged(folder / "output.txt", sft, **where, **LETTER_SFT, **QUIET)))
    return json.loads(done.read_text())


def demonstration(rng: random.Random, group: str) -> dict[str, Any]:
    """A row of `finetune_train.pt`: the group's letters as the prompt, an answer with seven of ten letters in it."""
    other = GROUPS[1 - GROUPS.index(group)]
    answer = [rng.choice(group if rng.random() < SHARE_AT_START else other) for _ in range(LENGTH)]
    ids = [LETTERS.index(letter) for letter in (*group, *answer)]
    return {"prompt_len": len(group), "input_ids": ids, "targets": [-100] * len(group) + ids[len(group) :]}


def run_letters(folder: Path, setting: str, arm: str, seed: int, smoke: bool) -> Result:
    """Train one arm on letters; returns its measures."""
    own = folder / "letters" / str(seed)
    where = {"data_dir": own / "data", "sft_experiment_dir": prepare_letters(own, seed), "seed": seed}
    where["reward_function"] = f"examples.experiments.macro_actions:{LETTER_SETTINGS[setting]}"
    flags = {"gae_lambd": LAMBDA} | LETTER_PPO | QUIET | ARMS[arm] | ({"max_steps": 2} if smoke else {})
    experiment = logged(folder / "output.txt", ppo, **where, log_dir=folder / "logs" / setting / arm, **flags)
    return measured([row["objective/score"] for row in read_metrics(experiment)])


def measured(scores: list[float]) -> Result:
    """Rollouts until the mean score of five reaches the target (one more than there were if never), and the last mean.

    scores: of each rollout of a run.
    """
    means = [sum(scores[max(i - WINDOW, 0) : i]) / min(WINDOW, i) for i in range(1, len(scores) + 1)]
    reached = (i for i, mean in enumerate(means, start=1) if i >= WINDOW and mean >= TARGET)
    return {"rollouts": next(reached, len(scores) + 1), "score": means[-1]}


def prepare_cafe(folder: Path, smoke: bool) -> tuple[str, str, str]:
    """The quickstart's data, SFT policy and reward model: (data dir, experiment dir, experiment dir)."""
    done = folder / "models.json"
    if not done.is_file():
        run = partial(logged, folder / "output.txt")
        data = f"{folder}/data/cafe"
        few_rows = quickstart.FEW_ROWS if smoke else {}
        few_steps = {"max_steps": 2} if smoke else {}
        run(prepare_data, destination_dir=data, tokenizer_name=BASE_DIR, num_proc=1, **few_rows)
        common = {"data_dir": data, "log_dir": folder / "logs", "accelerator": "cpu"}
        start = run(sft, **common, model_name=BASE_DIR, **quickstart.SFT, **few_steps)
        reward = run(rm, **common, sft_experiment_dir=start, **quickstart.RM, **few_steps)
        done.write_text(json.dumps([data, start, reward]))
    return tuple(json.loads(done.read_text()))


def run_cafe(folder: Path, data: str, start: str, reward: str, arm: str, seed: int, smoke: bool) -> Result:
    """Gold score on held-out orders after training with the reward model on a fixed number of samples."""
    run = partial(logged, folder / "output.txt")
    where = {"data_dir": data, "log_dir": folder / "logs" / "cafe" / arm, "seed": seed}
    models = {"sft_experiment_dir": start, "rm_experiment_dir": reward}
    flags = {"gae_lambd": LAMBDA} | CAFE_PPO | QUIET | ARMS[arm] | ({"max_steps": 1} if smoke else {})
    experiment = run(ppo, **where, **models, **flags)
    rows = run(evaluate, experiment_dir=experiment, max_new_tokens=96, accelerator="cpu")
    return {"gold": rows[0]["gold"]}


# ------------------------------------------------------------------------------------------------------- the results
def show(setting: str, results: dict[Job, Result], num_seeds: int) -> list[tuple[str, bool]]:
    """Print a setting's tables; returns its two claims and whether they held."""
    claims = []
    for measure in results[setting, SAME_LAMBDA, 1]:
        values = {arm: [results[setting, arm, seed][measure] for seed in range(1, num_seeds + 1)] for arm in ARMS}
        sign = -1 if measure == "rollouts" else 1  # fewer rollouts are better, higher scores
        show_table(f"{setting}: {TITLES[measure]}", values, sign)
        if measure == MEASURES[setting]:
            for other, words in ((SAME_LAMBDA, "same"), (MATCHED_LAMBDA, "matched")):
                _, low, _ = paired(signed(values[MACRO], sign), signed(values[other], sign))
                claims.append((f"{setting}, {words} lambda", low > 0))
    return claims


def show_table(title: str, values: dict[str, list[float]], sign: int) -> None:
    """Mean and interval of each arm, and its paired advantage over the two kinds of token PPO."""
    table = []
    digits = 1 if sign < 0 else 3
    for arm, row in values.items():
        each = " ".join(f"{value:.0f}" if sign < 0 else f"{value:.3f}".lstrip("0") for value in row)
        gaps = [
            shown([sign * (a - b) for a, b in zip(row, values[other])], digits) if arm != other else ""
            for other in (SAME_LAMBDA, MATCHED_LAMBDA)
        ]
        table.append((arm, shown(row, digits), each, *gaps))
    headings = ("arm", "mean, 95%", "each seed", "better than token by", f"than {MATCHED_LAMBDA} by")
    print_table(title, headings, table, width=132)


def signed(values: Sequence[float], sign: int) -> list[float]:
    return [sign * value for value in values]


if __name__ == "__main__":
    main()
