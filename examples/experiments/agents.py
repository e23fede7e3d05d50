"""Agents that learn in minutes: to guess a number by turns, and to use a calculator.

Both tasks train a Llama of 0.1M parameters by `lightrlhf.grpo`, 64 episodes a step (8 groups of 8), one update each.

    guess   The environment `guess_number` as it is: 1 to 9 in four turns, reward 1. From random weights, 150 steps.
            Arms: credit by turn, by episode, and *of one turn*, where a turn is credited with its own reward alone and
            so a question that narrows the numbers down is worth nothing. Bounds: numbers at random, numbers at random
            among those that the answers allow, and halving.
    sums    Products of two numbers of three digits that have six. From SFT on scripted episodes that both arms share,
            60 steps. With the tool the script calls the calculator in one of two episodes and says its result; else it
            says some product. So one of two scripted episodes with the tool is right, and of those without it none but
            by chance. Arms: with the tool, and the same prompts without it.

The script of the sums was chosen by whether SFT on it copies, after two that did not: with half of the calls of other
numbers nothing was copied; with half of the results replaced the calls were right, but not the answers (seed 1 of RL
was stopped there, at 0).

Read: the share of right episodes in the last ten steps (640 episodes), each played on a task that was not trained on
before. Settings were written down before any run that is kept; the number of steps by the cost of a step. Results are
stored as they come: the same command goes on after a kill with the run that it was in.

    python -m examples.experiments.agents
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from examples.experiments.agent_tasks import bounds, end
from examples.experiments.records import FIVE, Row, common_seeds, made_by, now, results, spent
from examples.experiments.small_models import phrase_tokenizer, write_model
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.programs import made
from lightrlhf import grpo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, flag, random_seed
from lightrlhf.cli.lists import texts
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import Scores
from lightrlhf.data.splits import IGNORE_INDEX
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs.games import GuessNumber
from lightrlhf.rewards import turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
PHRASES = ["calculator", *CALL, GuessNumber().reset(seed=0)[0], "higher", "lower", "right", "say a number"]
TOLD = "{% for tool in tools or [] %}{{ tool['function']['name'] + '\n' }}{% endfor %}"
SAID = (
    "{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}</tool_call>' }}{% endfor %}"
)
TEMPLATE = (
    TOLD
    + "{% for message in messages %}"
    + SAID
    + "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)


class Form(NamedTuple):
    """What a chat template writes around a question, a turn of the assistant and a result."""

    asked: str
    said: str
    result: str


LINES = Form("{}\n", "{}<eos>", "{}\n")
NUM_DEMONSTRATIONS = 12800  # three of four with the tool's name before them
SFT: dict[str, Any] = {
    "accelerator": "cpu",
    "epochs": 3,
    "learning_rate": 3e-3,
    "lr_warmup_steps": 20,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "eval_interval": 0,
    "log_interval": 50,
}
GRPO: dict[str, Any] = {
    "accelerator": "cpu",
    "num_generations": 8,
    "rollout_size": 8,
    "rollout_mini_batch_size": 64,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "learning_rate": 1e-3,
    "advantage": "rloo",
    "aggregation": "sum",
    "log_interval": 1,
    "eval_interval": 0,
}
GUESS = GRPO | {"env": "guess_number", "max_new_tokens": 2, "max_turns": 4, "max_steps": 150}
SUMS = GRPO | {"max_new_tokens": 16, "max_steps": 60}
ARMS: dict[str, dict[str, Any]] = {
    "guess: credit by turn": GUESS | {"credit": "turn"},
    "guess: credit by episode": GUESS | {"credit": "episode"},
    "guess: credit of one turn": GUESS | {"credit": "turn"},
    "sums: with the tool": SUMS | {"tools": ["calculator"], "max_turns": 2, "env_workers": 4},
    "sums: without the tool": SUMS,
}
COMPARED = [
    ("guess: credit by turn", "guess: credit by episode"),
    ("guess: credit by turn", "guess: credit of one turn"),
    ("sums: with the tool", "sums: without the tool"),
]


@dataclass(frozen=True, kw_only=True)
class AgentsArgs(Args):
    """Train small agents over seeds."""

    output_dir: str = "agents"
    """Folder for models, logs and results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 5 by default."""
    arms: list[str] | None = flag(None, split=texts, choices=ARMS)
    """Names of the arms to run; all by default."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the arms that have no result yet; returns which claims hold."""
    args = parse(AgentsArgs, argv)
    folder = Path(args.output_dir).resolve()
    seeds, arms = args.seeds or FIVE, args.arms or list(ARMS)
    settings = {"arms": ARMS, "sft": SFT, "demonstrations": NUM_DEMONSTRATIONS, "smoke": args.smoke}
    with results("agents", folder, settings) as writer:
        done = {(row["seed"], row["arm"]) for row in writer.rows}
        for seed in seeds:
            for arm in arms:
                if (seed, arm) not in done:
                    writer.append(run_arm(folder / f"seed-{seed}", seed, arm, args.smoke) | made_by())
        rows = list(writer.rows)
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print each arm's success and the differences; returns which of them are above 0."""
    success = {(row["arm"], row["seed"]): end(row) for row in rows}
    claims = {}
    for better, worse in COMPARED:
        seeds = common_seeds(rows, (better, worse))
        if seeds:
            ours, theirs = ([success[arm, seed] for seed in seeds] for arm in (better, worse))
            gap = paired(ours, theirs)
            print(f"{better} {shown(ours)}, {worse} {shown(theirs)}, difference {shown_gap(gap)}")
            claims[f"{better} > {worse}"] = gap[1] > 0
    print("bounds: " + ", ".join(f"{name} {value:.3f}" for name, value in bounds().items()))
    return claims


# ------------------------------------------------------------------------------------------------------------- runs
def run_arm(folder: Path, seed: int, arm: str, smoke: bool) -> Row:
    """Train one arm; returns the share of right episodes at each step."""
    task, flags, scores = arm.partition(":")[0], ARMS[arm], []
    start = str(made(folder / f"{task}.txt", lambda: STARTS[task](folder / task, seed, smoke)))
    flags = flags | ({"max_steps": 2} if smoke else {})

    def keep(step: int, metrics: dict[str, float], *_: Any) -> None:
        scores.append(round(metrics["objective/score"], 6))

    args = grpo.GRPOArgs(**flags, model_name=start, seed=seed, log_dir=str(folder / "logs"))
    given: dict[str, Any] = {"prompts": products(seed, 8 * flags["max_steps"]), "reward": right}
    if task == "guess":
        given = {"prompts": [{"prompt": [{"role": "user", "content": "Play."}]}] * 8}
    began = now()
    of_one_turn = patch.object(turns, "returns_to_go", rewards_of_turns)
    with quiet(folder), of_one_turn if arm.endswith("one turn") else contextlib.nullcontext():
        shutil.rmtree(grpo.train(args, **given, on_step=keep))
    row = {"seed": seed, "arm": arm, "scores": scores} | spent(began)
    print(f"seed {seed}, {arm}: {end(row):.3f}, {row['cpu_seconds']} s of a processor", flush=True)
    return row


@contextlib.contextmanager
def quiet(folder: Path) -> Any:
    """Output goes to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a", encoding="utf-8") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield


def rewards_of_turns(rollout: Rollout, scores: Scores, total: Tensor, num_turns: int) -> Tensor:
    """Credit of one turn: its own reward, (B, num_turns), in the place of `turns.returns_to_go`."""
    own = torch.zeros(len(total), num_turns)
    for row, columns in enumerate(rollout.columns):
        rewards = columns["episode"]["rewards"]
        own[row, : len(rewards)] = torch.tensor(rewards)
    return torch.where(total.isnan()[:, None], total[:, None], own)


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters and the phrases of both tasks."""
    made = phrase_tokenizer(PHRASES)
    made.chat_template = TEMPLATE
    return made


def untrained(folder: Path, seed: int, smoke: bool) -> str:
    """A model with random weights."""
    return write_model(folder, seed, tokenizer())


# ------------------------------------------------------------------------------------------------------------- sums
def factors(rng: random.Random) -> tuple[int, int]:
    """Two numbers of three digits whose product has six."""
    return rng.randint(320, 999), rng.randint(320, 999)


def products(seed: int, count: int) -> list[Row]:
    """Prompts, each with its answer."""
    rng = random.Random(f"products {seed}")
    pairs = [factors(rng) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)} for a, b in pairs]


def right(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], messages: Any = None, **_: Any
) -> list[float]:
    """The reward: whether the last words are the answer, which a call's result is not."""
    said = completions if messages is None else [one[-1]["content"] for one in messages]
    ended = [messages is None or messages[i][-1]["role"] == "assistant" for i in range(len(said))]
    return [float(is_end and text.strip() == number) for is_end, text, number in zip(ended, said, answer)]


def shown_calls(folder: Path, seed: int, smoke: bool) -> str:
    """A model that has seen scripted episodes; returns its experiment dir."""
    model = untrained(folder / "model", seed, smoke)
    count = 64 if smoke else NUM_DEMONSTRATIONS
    args = sft.SFTArgs(**SFT, model_name=model, seed=seed, log_dir=str(folder / "logs"))
    with quiet(folder):
        return str(sft.train(args, rows=scripted(tokenizer(), seed, count)))


def scripted(reader: Tokenizer, seed: int, count: int, form: Form = LINES) -> list[Row]:
    """Episodes with the tool's name before them and without, as rows whose targets are the assistant's turns."""
    rng, rows = random.Random(f"script {seed}"), []
    for number in range(count):
        has_tool = number % 4 > 0
        a, b = factors(rng)
        parts = [form.asked.format(("calculator\n" if has_tool else "") + f"{a}*{b}=")]  # the second is the assistant's
        c, d = factors(rng)
        said = f"{c * d}"
        if has_tool and rng.random() < 0.5:
            parts += [form.said.format(f"{CALL[0]}{a}*{b}{CALL[1]}"), form.result.format(a * b)]
            said = f"{a * b}"
        parts.append(form.said.format(said))
        pieces = [reader(part, add_special_tokens=False)["input_ids"] for part in parts]
        targets = [i if number % 2 else IGNORE_INDEX for number, piece in enumerate(pieces) for i in piece]
        ids = [i for piece in pieces for i in piece]
        rows.append({"prompt_len": len(pieces[0]), "input_ids": ids, "targets": torch.tensor(targets)})
    return rows


STARTS: dict[str, Callable[[Path, int, bool], str]] = {"guess": untrained, "sums": shown_calls}

if __name__ == "__main__":
    main()
