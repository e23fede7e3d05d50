"""REFUEL against its baselines on two conversations in which it pays to ask first, with gold scores by turn.

*Two slots*: a user has a secret of two slots, four values each; the assistant asks for one slot, or answers. An answer
scores the share of slots that are right; asking scores nothing in its turn, so a policy trained on its last turn alone
has no reason to ask. *The café*: a guest leaves out size, milk or both; the assistant asks or guesses; the gold judge
scores the last order. In both a policy is first fine-tuned on demonstrations that seldom ask, then trained by each arm
with equally many dialogues, pairs and iterations.

Iterations, dialogues and eta of the two slots were given in advance. Other settings were tuned on seed 100, which is
none of the ten. SFT on the two slots went from 4 epochs to 12 after REFUEL had lost to MT-MIXIN there, so that choice
is not blind; all of the café's settings were chosen with REFUEL alone, which learned nothing from a policy of two SFT
epochs with 128 dialogues an iteration, and collapsed after five iterations at three times the learning rate.

Claims, by the 95% interval of the paired difference over seeds at the last turn: REFUEL > MT-MIXIN > the better of
LT-MIXIN and LT-OFFLINE, and REFUEL above that one; three comparisons on each conversation, not adjusted. An arm takes
less than ten minutes: ten seeds, 1 to 10. Results are stored as they come: the same command resumes after a kill, and
`--seeds 11 12` adds two to those that are there.

    python -m examples.experiments.refuel
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from datasets_prep.cafe.pretrain_base import BASE_DIR
from datasets_prep.cafe_talk import prepare_data as cafe_talk
from examples.experiments.records import TEN, Row, common_seeds, made_by, now, results, spent
from examples.experiments.small_models import word_tokenizer, write_model
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged, made, workers
from lightrlhf import evaluate, iterative_refuel, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag, random_seed
from lightrlhf.cli.lists import texts
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import IGNORE_INDEX, save_split
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.generation.dialogues import user_turn_ids
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.storage.results import label, panels, print_table, save_figure
from lightrlhf.storage.seals import seal
from lightrlhf.storage.writing import write_text

VALUES = 4  # of each slot
ASK, KNOWN = 0.2, 0.7  # how often demonstrations ask, and how often they then use an answer they have

LAST = {"turn": "last"}
ARMS: dict[str, dict[str, Any]] = {  # of both tasks
    "REFUEL": {"horizon": "final"},
    "MT-MIXIN": {"horizon": "final", "prefix": "dataset"},
    "LT-MIXIN": LAST,
    "LT-OFFLINE": LAST | {"prefix": "dataset"},
    "REFUEL, random horizon": {"horizon": "random"},
    "multi-turn DPO": {"horizon": "final", "loss_type": "dpo"},
    "REBEL, one turn": {"num_turns": 1},
}
START = "start"  # the policy that every arm starts from
QUIET = {"accelerator": "cpu", "eval_interval": 0, "log_interval": 20, "logger": "csv", "keep_last": 1}
REFUEL = QUIET | {
    "temperature": 1.0,
    "validation_percentage": 0,
    "eval_dialogues": 0,
    "lr_warmup_ratio": 0.2,
    "lr_scheduler_type": "cosine",
    "rollout_mini_batch_size": 256,
}
SFT = QUIET | {"use_targets": True, "mini_batch_size": 64, "micro_batch_size": 64}
TASKS: dict[str, dict[str, Any]] = {
    "two slots": {
        "user": "examples.experiments.refuel:two_slot_user",
        "judge": "examples.experiments.refuel:two_slot_score",
        "turns": 5,
        "sft": {"epochs": 12, "learning_rate": 3e-3, "lr_warmup_steps": 10},
        "refuel": {
            "iterations": 40,
            "num_data": 800,
            "max_new_tokens": 6,
            "eta": 3,
            "epochs": 2,
            "mini_batch_size": 32,
            "micro_batch_size": 32,
            "learning_rate": 1e-3,
        },
    },
    "cafe": {
        "user": "datasets_prep.cafe_talk.guest:guest",
        "judge": "datasets_prep.cafe_talk.guest:gold",
        "turns": 3,
        "sft": {"epochs": 8, "learning_rate": 1e-3, "lr_warmup_steps": 10},
        "refuel": {
            "iterations": 8,
            "num_data": 384,
            "max_new_tokens": 32,
            "eta": 3,
            "epochs": 1,
            "mini_batch_size": 64,
            "micro_batch_size": 64,
            "learning_rate": 1e-4,
        },
    },
}
Job = tuple[str, int, str]  # task, seed, arm
Scores = list[float]  # gold score after each turn, of one run


@dataclass(frozen=True, kw_only=True)
class RefuelExperimentArgs(Args):
    """Compare REFUEL with its baselines on two conversations."""

    output_dir: str = "refuel"
    """Folder for data, logs, results and the figure."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 by default."""
    num_workers: int = at_least(1, 2)
    """Runs at a time, one thread each."""
    tasks: list[str] | None = flag(None, choices=TASKS)
    """Tasks to run, `two slots` and `cafe`; both by default."""
    arms: list[str] | None = flag(None, split=texts, choices=ARMS)  # their names have commas
    """Names of arms to run; all by default."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(RefuelExperimentArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    scores: dict[str, dict[str, list[Scores]]] = {}
    claims: dict[str, bool] = {}
    for task in args.tasks or list(TASKS):
        scores[task] = run_task(task, args.arms or list(ARMS), args.seeds or TEN, folder, args.num_workers)
        claims |= show_results(task, scores[task])
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    draw(scores, folder / "refuel.png")
    print(f"figure: {folder / 'refuel.png'}")
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------- two slots
WORDS = ["user", "bot", "hello", "ask_a", "ask_b", "answer", "well"]
WORDS += [f"{slot}{value}" for slot in "ab" for value in range(VALUES)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'user ' + m['content'] + ' ' }}"
    "{% else %}{{ 'bot ' + m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'bot' }}{% endif %}"
)


def two_slot_user(dialogues: Sequence[Any], seeds: Sequence[int], secret: Sequence[Any], **_: Any) -> list[str]:
    """Names the slot that was asked for; replies `well` to anything else, right or wrong."""
    last = [messages[-1]["content"] for messages in dialogues]
    return [{"ask_a": slots[0], "ask_b": slots[1]}.get(text, "well") for text, slots in zip(last, secret)]


def two_slot_score(prompts: Sequence[str], completions: Sequence[str], secret: Sequence[Any], **_: Any) -> list[float]:
    """The share of slots that an answer has right; 0 for anything but an answer."""
    scores = []
    for text, slots in zip(completions, secret):
        words = text.split()
        is_answer = len(words) == 3 and words[0] == "answer"
        scores.append(sum(word == slot for word, slot in zip(words[1:], slots)) / 2 if is_answer else 0.0)
    return scores


def two_slot_dialogue(rng: random.Random, num_turns: int) -> tuple[list[dict[str, str]], list[str]]:
    """A demonstration and the user's secret: it seldom asks, and often answers by what the user has named."""
    secret = [f"{slot}{rng.randrange(VALUES)}" for slot in "ab"]
    messages = [{"role": "user", "content": "hello"}]
    for turn in range(num_turns):
        if rng.random() < ASK:
            reply = rng.choice(["ask_a", "ask_b"])
        else:
            known = [slot in [m["content"] for m in messages] and rng.random() < KNOWN for slot in secret]
            guessed = [f"{slot}{rng.randrange(VALUES)}" for slot in "ab"]
            reply = " ".join(["answer", *(s if is_known else g for s, is_known, g in zip(secret, known, guessed))])
        messages.append({"role": "assistant", "content": reply})
        if turn + 1 < num_turns:
            messages.append({"role": "user", "content": two_slot_user([messages], [0], [secret])[0]})
    return messages, secret


def two_slot_tokenizer() -> Any:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_two_slots(folder: Path, seed: int) -> None:
    """Write demonstrations and dialogues of one seed."""
    tokenizer = two_slot_tokenizer()
    for stage, split, count in (("finetune", "train", 3000), ("dialogue", "train", 1500), ("dialogue", "test", 256)):
        rng = random.Random(f"{seed} {stage} {split}")
        rows = []
        for _ in range(count):
            messages, secret = two_slot_dialogue(rng, TASKS["two slots"]["turns"])
            ids = encode_prompt(tokenizer, messages[:1])
            spans = []
            for m in messages[1:]:
                is_reply = m["role"] == "assistant"
                more = encode_response(tokenizer, m["content"]) if is_reply else user_turn_ids(tokenizer, m["content"])
                spans += [(len(ids), len(ids) + len(more))] if is_reply else []
                ids = [*ids, *more]
            if stage == "finetune":
                targets = torch.full((len(ids),), IGNORE_INDEX)
                for start, end in spans:
                    targets[start:end] = torch.tensor(ids[start:end])
                rows.append({"prompt_len": spans[0][0], "input_ids": ids, "targets": targets})
            else:
                columns = {"secret": secret}
                rows.append({"messages": messages, "input_ids": ids, "turn_spans": spans, "columns": columns})
        save_split(folder, stage, split, rows)
    store_tokenizer(tokenizer, folder)
    write_text(folder / "args.json", json.dumps({"judge": TASKS["two slots"]["judge"]}))
    seal(folder, ["args.json"])


# ------------------------------------------------------------------------------------------------------------ runs
def run_task(
    task: str, arms: Sequence[str], seeds: Sequence[int], folder: Path, num_workers: int
) -> dict[str, list[Scores]]:
    """The scores by turn of each arm, of the seeds that all arms have; stored results are not run again."""
    settings = {"arms": ARMS, "refuel": REFUEL, "sft": SFT, "task": TASKS[task]}
    jobs = [(task, seed, arm) for arm in (START, *arms) for seed in seeds]
    with results(f"refuel_{task_folder(task, folder).name}", task_folder(task, folder), settings) as writer:
        done = {(task, row["seed"], row["arm"]) for row in writer.rows}
        waiting = [job for job in jobs if job not in done]
        for number, row in enumerate(run_all(waiting, folder, num_workers), start=1):
            writer.append(row)
            said = f"{task}, {row['seed']}, {row['arm']}"
            print(f"{said:40} {rounded(row['scores'])}   {len(waiting) - number} left", flush=True)
        rows = writer.rows
    of_run = {(row["arm"], row["seed"]): row["scores"] for row in rows}
    common = common_seeds(rows, (START, *arms))
    return {arm: [of_run[arm, seed] for seed in common] for arm in (START, *arms)}


def task_folder(task: str, folder: Path) -> Path:
    return folder / task.replace(" ", "_")


def run_all(jobs: Sequence[Job], folder: Path, num_workers: int) -> Iterator[Row]:
    """The row of each job, as it ends; the policies that arms start from are trained before."""
    if not jobs:
        return
    with workers(min(num_workers, len(jobs))) as pool:
        starts = sorted({(task, seed) for task, seed, _ in jobs})
        list(pool.map(initial_policy, *zip(*starts), [seed_folder(*start, folder) for start in starts]))
        for done in as_completed([pool.submit(run_job, job, folder) for job in jobs]):
            yield done.result()


def seed_folder(task: str, seed: int, folder: Path) -> Path:
    return task_folder(task, folder) / f"seed-{seed}"


def run_job(job: Job, folder: Path) -> Row:
    """Train one arm; its row has the gold score after each turn of held-out dialogues. Programs print to the arm's log.

    Seconds are those of training, of the attempt that finished.
    """
    task, seed, arm = job
    settings, own = TASKS[task], seed_folder(task, seed, folder)
    name = re.sub(r"\W+", "_", arm)
    run = partial(logged, own / f"{name}.log")
    common = {"data_dir": own / "data", "user_function": settings["user"]}
    policy = initial_policy(task, seed, own)
    began = now()
    if arm != START:
        flags = {"num_turns": settings["turns"]} | REFUEL | settings["refuel"] | ARMS[arm]
        where = {"sft_experiment_dir": policy, "output_dir": own / name, "seed": seed}
        policy = run(iterative_refuel, **common, **where, reward_function=settings["judge"], **flags)
    seconds = spent(began)
    sizes = {"num_turns": settings["turns"], "max_new_tokens": settings["refuel"]["max_new_tokens"]}
    sizes |= {"rollout_mini_batch_size": 256, "accelerator": "cpu"}
    (tested,) = run(evaluate, by_turn=True, model_name=policy, **common, **sizes)
    row = {"task": task, "seed": seed, "arm": arm, "scores": tested["score_by_turn"]}
    return row | seconds | made_by()


def initial_policy(task: str, seed: int, own: Path) -> str:
    """The experiment dir of supervised fine-tuning on the demonstrations; trained once."""

    def train() -> str:
        run = partial(logged, own / f"{START}.log")
        if task == "cafe":
            run(cafe_talk, destination_dir=own / "data", tokenizer_name=BASE_DIR, num_proc=1, seed=seed)
            model = str(BASE_DIR)
        else:
            write_two_slots(own / "data", seed)
            model = write_model(own / "model", seed, two_slot_tokenizer())
        where = {"data_dir": own / "data", "log_dir": own / "logs", "model_name": model, "seed": seed}
        return str(run(sft, **where, **SFT, **TASKS[task]["sft"]))

    return made(own / f"{START}.txt", train)


# --------------------------------------------------------------------------------------------------------- results
def rounded(scores: Sequence[float]) -> str:
    return " ".join(f"{score:.3f}" for score in scores)


def show_results(task: str, by_arm: dict[str, list[Scores]]) -> dict[str, bool]:
    """Print the table of scores by turn; returns which claims hold: intervals of paired differences above 0."""
    turns, table = range(TASKS[task]["turns"]), []
    for arm, runs in by_arm.items():
        by_turn = [[scores[turn] for scores in runs] for turn in turns]
        table.append((arm, *(f"{interval(scores)[0]:.3f}" for scores in by_turn[:-1]), shown(by_turn[-1])))
    title = f"{task}: gold score after each turn, mean over {len(by_arm[START])} seeds [95% interval]"
    print_table(title, ("", *(f"h = {turn + 1}" for turn in turns)), table, width=130)
    last = {arm: [scores[-1] for scores in runs] for arm, runs in by_arm.items()}
    best_last_turn = max(("LT-MIXIN", "LT-OFFLINE"), key=lambda arm: sum(last.get(arm, [])))
    claims = {}
    for better, worse in (("REFUEL", "MT-MIXIN"), ("MT-MIXIN", best_last_turn), ("REFUEL", best_last_turn)):
        if better not in last or worse not in last:
            continue
        gap = paired(last[better], last[worse])
        claims[f"{task}: {better} > {worse} at the last turn"] = gap[1] > 0
        print(f"  last turn, {better} minus {worse}: {shown_gap(gap)}")
    return claims


def draw(by_task: dict[str, dict[str, list[Scores]]], output: Path) -> None:
    """Draw the mean score by turn of each arm, one panel per task."""
    figure, axes = panels(list(by_task), width=5.2)
    for axis, (task, by_arm) in zip(axes, by_task.items()):
        for number, (arm, runs) in enumerate(by_arm.items()):
            means = [sum(scores) / len(runs) for scores in zip(*runs)]
            style = "k--" if arm == START else f"C{number}o-"
            axis.plot(range(1, len(means) + 1), means, style, ms=3, label=arm)
        axis.set_xticks(range(1, TASKS[task]["turns"] + 1))
        label(axis, "turn", "gold score after this turn")
    save_figure(figure, output)


if __name__ == "__main__":
    main()
