"""Do macro actions learn faster than tokens, and is it more than a larger lambda? (MA-RLHF, Chai et al. 2025)

GAE over segments of n tokens at lambda looks as far ahead as GAE over tokens at lambda^(1/n), so the deciding control
is token PPO at both. Everything runs through `lightrlhf.ppo`; the arms differ in its flags only.

The task: a prompt names one of two groups of four letters; a response has 64 letters out of eight and is scored, at its
end, by the share of them that belong to the group. Measured: rollouts until the mean score of five is above 0.9. Three
more settings were fixed before any of them was run: a reward by position (in the second half the other group counts), a
noisy reward, and the café with its reward model, where the gold score after equally many samples is measured. (The
reward by position is also measured by the score of the last five rollouts: its first five runs, one of each of five
arms, showed that none reaches 0.9 within 60 rollouts.)

What is tested, said before the runs that are kept: in each of the four settings n = 8 against token PPO at the same
lambda and at lambda^(1/8), by the 95% interval of the paired difference over seeds, eight comparisons, not adjusted for
their number. Rollouts are restricted to the 60 of a run where the score was not reached, see `stats.restricted`; the
log-rank test stands beside them and decides nothing. A run takes less than ten minutes: ten seeds, 1 to 10; 320 runs.

Nothing was tuned on a macro arm: the learning rates of the letter task were set with token PPO alone, on a seed that is
not among the first five. Prints a table per setting and the claims that held. Rows are stored in `results.jsonl` as
they come: the same command resumes after a kill, and `--seeds 11 12` adds two to those that are there.

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
from examples.experiments.records import TEN, Row, common_seeds, made_by, now, results, spent
from examples.experiments.stats import log_rank, paired, report_claims, restricted, shown, shown_gap
from examples.programs import logged, workers
from lightrlhf import evaluate, ppo, quickstart, rm, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import read_metrics

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
    f"token at lambda^(1/{N})": {"gae_lambd": round(LAMBDA ** (1 / N), 6)},
    "token at lambda=1": {"gae_lambd": 1},
}
SAME_LAMBDA, MATCHED_LAMBDA, MACRO = "token", f"token at lambda^(1/{N})", f"n={N}"
LETTER_SETTINGS = {"share": "share_in_group", "position": "share_by_position", "noise": "noisy_share"}
MEASURES = {"share": "rollouts", "position": "score", "noise": "rollouts", "cafe": "gold"}
TITLES = {
    "rollouts": f"rollouts until the score is {TARGET}",
    "score": "score of the last five rollouts",
    "gold": "gold score",
}
Job = tuple[str, str, int]  # setting, arm, seed


@dataclass(frozen=True, kw_only=True)
class MacroActionsArgs(Args):
    """Compare macro-action PPO with token PPO at the same and at a matched lambda."""

    output_dir: str = "macro_actions"
    """Folder for data, logs and results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 by default."""
    settings: list[str] | None = flag(None, choices=MEASURES)
    """Settings to run; all four by default."""
    arms: list[str] | None = flag(None, choices=ARMS)
    """Names of arms to run; all by default."""
    num_workers: int = at_least(1, 2)
    """Runs at a time, one thread each."""
    smoke: bool = False
    """Run every arm for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(MacroActionsArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve()
    settings, arms, seeds = args.settings or list(MEASURES), args.arms or list(ARMS), args.seeds or TEN
    jobs = [(setting, arm, seed) for setting in settings for seed in seeds for arm in arms]
    with results("macro_actions", folder, SETTINGS | {"smoke": args.smoke}) as writer:
        done = {(row["setting"], row["arm"], row["seed"]) for row in writer.rows}
        for row in run_all([job for job in jobs if job not in done], folder, args):
            writer.append(row)
            read = {name: row[name] for name in TITLES if name in row}
            print(f"{len(writer.rows):4}  {row['setting']}, {row['arm']}, {row['seed']:4}  {read}", flush=True)
        rows = writer.rows
    claims: dict[str, bool] = {}
    for setting in settings:
        claims |= show(setting, [row for row in rows if row["setting"] == setting], arms)
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    report_claims(claims, folder)
    return claims


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
SETTINGS = {"arms": ARMS, "lambda": LAMBDA, "sft": LETTER_SFT, "letters": LETTER_PPO, "model": LETTER_MODEL}
CAFE_PPO = quickstart.PPO | SIZES | {"max_steps": 15, "lr_scheduler_type": "constant_with_warmup"}
QUIET = {"log_interval": 1, "eval_interval": 0, "save_interval": 1000, "logger": "csv", "accelerator": "cpu"}


def run_all(jobs: list[Job], folder: Path, args: MacroActionsArgs) -> Iterator[Row]:
    """The row of each job, as it ends; the café's models are trained while the first letter jobs run."""
    letters, cafe = ([job for job in jobs if (job[0] == "cafe") is is_cafe] for is_cafe in (False, True))
    seeds = sorted({seed for *_, seed in letters})
    with workers(args.num_workers) as pool:
        list(pool.map(prepare_letters, [folder / "letters" / str(seed) for seed in seeds], seeds))
        prepared = pool.submit(prepare_cafe, folder / "cafe", args.smoke) if cafe else None
        for done in as_completed([pool.submit(run_letters, folder, *job, args.smoke) for job in letters]):
            yield done.result()
        if prepared:
            models = prepared.result()
            for done in as_completed([pool.submit(run_cafe, folder, *models, *job[1:], args.smoke) for job in cafe]):
                yield done.result()


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


def run_letters(folder: Path, setting: str, arm: str, seed: int, smoke: bool) -> Row:
    """Train one arm on letters; returns its row."""
    own = folder / "letters" / str(seed)
    where = {"data_dir": own / "data", "sft_experiment_dir": prepare_letters(own, seed), "seed": seed}
    where["reward_function"] = f"examples.experiments.macro_actions:{LETTER_SETTINGS[setting]}"
    flags = {"gae_lambd": LAMBDA} | LETTER_PPO | QUIET | ARMS[arm] | ({"max_steps": 2} if smoke else {})
    began = now()
    experiment = logged(folder / "output.txt", ppo, **where, log_dir=folder / "logs" / setting / arm, **flags)
    return {"setting": setting, "arm": arm, "seed": seed} | measured(experiment) | ended(began, flags)


def measured(experiment: str) -> Row:
    """What is read of a run's metrics, with the score of each rollout as its curve."""
    rows = read_metrics(experiment)
    curve = [row["objective/score"] for row in rows]
    return rollouts_until(curve) | {"kl": rows[-1]["objective/kl"], "curve": curve}


def rollouts_until(scores: Sequence[float]) -> dict[str, float | None]:
    """Rollouts until the mean score of five reaches the target (None if never), and the last mean."""
    means = [sum(scores[max(i - WINDOW, 0) : i]) / min(WINDOW, i) for i in range(1, len(scores) + 1)]
    reached = (i for i, mean in enumerate(means, start=1) if i >= WINDOW and mean >= TARGET)
    return {"rollouts": next(reached, None), "score": means[-1]}


def ended(began: tuple[float, float], flags: Row) -> Row:
    """Samples and seconds of a run that began then, and what made it."""
    return {"samples": flags["max_steps"] * flags["rollout_size"]} | spent(began) | made_by()


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


def run_cafe(folder: Path, data: str, start: str, reward: str, arm: str, seed: int, smoke: bool) -> Row:
    """Train one arm with the reward model; its row has the gold score on held-out orders after equally many samples."""
    run = partial(logged, folder / "output.txt")
    where = {"data_dir": data, "log_dir": folder / "logs" / "cafe" / arm, "seed": seed}
    models = {"sft_experiment_dir": start, "rm_experiment_dir": reward}
    flags = {"gae_lambd": LAMBDA} | CAFE_PPO | QUIET | ARMS[arm] | ({"max_steps": 1} if smoke else {})
    began = now()
    experiment = run(ppo, **where, **models, **flags)
    row = {"setting": "cafe", "arm": arm, "seed": seed} | ended(began, flags)
    (tested,) = run(evaluate, model_name=experiment, reference_dir=start, max_new_tokens=96, accelerator="cpu")
    curve = [step["objective/score"] for step in read_metrics(experiment)]
    return row | {"gold": tested["gold"], "kl": tested["kl"], "length": tested["mean_length"], "curve": curve}


# ------------------------------------------------------------------------------------------------------- the results
def show(setting: str, rows: Sequence[Row], arms: Sequence[str]) -> dict[str, bool]:
    """Print a setting's tables, of the seeds that all arms have; returns its claims and whether they held."""
    claims, seeds = {}, common_seeds(rows, arms)
    by_arm = {arm: {row["seed"]: row for row in rows if row["arm"] == arm} for arm in arms}
    for measure in (name for name in TITLES if name in rows[0]):
        values = {arm: [by_seed[seed][measure] for seed in seeds] for arm, by_seed in by_arm.items()}
        show_table(f"{setting}: {TITLES[measure]}", values, measure)
        for other, words in ((SAME_LAMBDA, "same"), (MATCHED_LAMBDA, "matched")):
            if measure == MEASURES[setting] and {MACRO, other} <= values.keys():
                claims[f"{setting}, {MACRO} better at the {words} lambda"] = gain(values, MACRO, other, measure)[1] > 0
    return claims


def gain(values: dict[str, list[Any]], arm: str, other: str, measure: str) -> tuple[float, float, float]:
    """Interval of how much better an arm is than another: fewer rollouts, restricted, or a higher score."""
    if measure == "rollouts":
        limit = LETTER_PPO["max_steps"]
        return paired(restricted(values[other], limit), restricted(values[arm], limit))
    return paired(values[arm], values[other])


def show_table(title: str, values: dict[str, list[Any]], measure: str) -> None:
    """Mean and interval of each arm, and its paired advantage over the two kinds of token PPO."""
    table, is_time = [], measure == "rollouts"
    digits, limit = (1, LETTER_PPO["max_steps"]) if is_time else (3, 0)
    for arm, own in values.items():
        each = " ".join(f">{limit}" if v is None else f"{v:.0f}" if is_time else f"{v:.3f}".lstrip("0") for v in own)
        cells = [shown(restricted(own, limit) if is_time else own, digits), each]
        for other in (SAME_LAMBDA, MATCHED_LAMBDA):
            gap = shown_gap(gain(values, arm, other, measure), digits) if other in values and arm != other else ""
            cells.append(gap + (f", p = {log_rank(own, values[other])[1]:.2g}" if gap and is_time else ""))
        table.append((arm, *cells))
    headings = ("arm", "mean, 95%", "each seed", "better than token by", f"than {MATCHED_LAMBDA} by")
    print_table(
        title + (f", restricted to {limit}; p of the log-rank test" if is_time else ""), headings, table, width=170
    )


if __name__ == "__main__":
    main()
