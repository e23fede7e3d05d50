"""The taxi as an agent's environment: `lightrlhf.grpo --env` beside `lightrlhf.reflect_rl`, from the same start.

The control is the arm SFT+RL of `examples.experiments.reflect_rl` as it is: 4,000 demonstrations, nine tenths of them
noise, then 75 iterations of 64 episodes. GRPO starts from the same weights and takes as many steps with as many
episodes, learning rate and entropy bonus. Its prompts are the same, too: a chat template writes the last state alone,
so that each turn is a row of its own, and the reply is one token, the label of a command. What differs:

    baseline    GRPO plays 8 starts 8 times and centres by group, Reflect-RL plays 64 starts and centres by iteration;
                both then whiten over decisions
    credit      by turn, as Reflect-RL's return to go; or by episode, GRPO's default
    choice      GRPO samples from the whole vocabulary, Reflect-RL from the six labels

Claims, by the 95% interval of the paired difference of sampled success on held-out starts after 75 iterations, five
seeds: GRPO with credit by turn above Reflect-RL, and above GRPO with credit by episode. Settings were written down
before any run; those that the programs share are Reflect-RL's, and were tuned for it. Rows of finished arms are kept.

    python -m examples.experiments.taxi_agents
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from examples.experiments.records import FIVE, Row, made_by, now, results, spent
from examples.experiments.reflect_rl import LEARNING, TASKS, fine_tuned, held_out
from examples.experiments.reflect_rl import run_arm as run_control
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from lightrlhf import grpo
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, flag, random_seed
from lightrlhf.cli.lists import texts
from lightrlhf.cli.parser import parse
from lightrlhf.data import tokens
from lightrlhf.envs import Info, Start, prompts
from lightrlhf.envs.dangerous_taxi import FULL, DangerousTaxi
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.checkpoint import checkpoints

TASK, CONTROL = TASKS["taxi"], "Reflect-RL's program, SFT+RL"
TEMPLATE = (  # the last message alone, and the first without the prompt before it
    "{{ messages[-1]['content'].removeprefix('Drive.\\n\\n') }}{{ eos_token if messages[-1]['role'] == 'assistant' }}"
)
GRPO: dict[str, Any] = {name: LEARNING[name] for name in ("accelerator", "learning_rate", "entropy_coeff", "keep_last")}
GRPO |= {
    "env": "examples.experiments.taxi_agents:LabelledTaxi",
    "env_options": ["pickup_bonus=1"],
    "max_turns": 20,
    "max_new_tokens": 1,
    "num_generations": 8,
    "rollout_size": 8,
    "rollout_mini_batch_size": 64,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "advantage": "mean",
    "normalize_advantages": True,
    "max_steps": 75,
    "save_interval": 25,
    "eval_interval": 0,
}
BY_TURN, BY_EPISODE = "GRPO, credit by turn", "GRPO, credit by episode"
ARMS: dict[str, dict[str, Any]] = {CONTROL: {}, BY_TURN: {"credit": "turn"}, BY_EPISODE: {"credit": "episode"}}
COMPARED = ((BY_TURN, CONTROL), (BY_TURN, BY_EPISODE))


class LabelledTaxi:
    """DangerousTaxi whose texts are the policy's prompts of `lightrlhf.envs.prompts`, and whose replies are labels."""

    def __init__(self, **options: Any) -> None:
        self.taxi = DangerousTaxi(**options)

    def reset(self, *, seed: int | None = None, options: Start | None = None) -> tuple[str, Info]:
        text, self.info = self.taxi.reset(seed=seed, options=options)
        return self._prompt(text), {}

    def step(self, label: str) -> tuple[str, float, bool, bool, Info]:
        action = prompts.action_of(label, self.info, prompts.labels_for(self.info))
        text, reward, terminated, truncated, self.info = self.taxi.step(action or "")
        return self._prompt(text), reward, terminated, truncated, {"invalid": self.info["invalid"]}

    def _prompt(self, text: str) -> str:
        return prompts.policy_prompt(text, self.info, None, prompts.labels_for(self.info))


@dataclass(frozen=True, kw_only=True)
class TaxiAgentsArgs(Args):
    """Train agents on the taxi over seeds."""

    output_dir: str = "taxi_agents"
    """Folder for data, models, logs and results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 5 by default."""
    arms: list[str] | None = flag(None, split=texts, choices=ARMS)  # their names have commas
    """Names of the arms to run; all by default."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the arms that have no result yet; returns which claims hold."""
    args = parse(TaxiAgentsArgs, argv)
    folder = Path(args.output_dir).resolve()
    settings = {"arms": ARMS, "grpo": GRPO, "task": TASK._asdict(), "learning": LEARNING, "smoke": args.smoke}
    with results("taxi_agents", folder, settings) as writer:
        done = {(row["seed"], row["arm"]) for row in writer.rows}
        for seed in args.seeds or FIVE:
            for arm in args.arms or list(ARMS):
                if (seed, arm) not in done:
                    writer.append(run_arm(folder / f"seed-{seed}", seed, arm, args.smoke))
        rows = list(writer.rows)
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print each arm's sampled success at the end and the differences; returns which of them are above 0."""
    by_arm: dict[str, dict[int, float]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row["results"][-1]["success"]
    for arm, values in by_arm.items():
        print(f"{arm}: {shown(list(values.values()))}")
    claims = {}
    for better, worse in COMPARED:
        seeds = sorted(by_arm.get(better, {}).keys() & by_arm.get(worse, {}).keys())
        if seeds:
            gap = paired(*([by_arm[arm][seed] for seed in seeds] for arm in (better, worse)))
            print(f"{better} minus {worse}: {shown_gap(gap)}")
            claims[f"{better} > {worse}"] = gap[1] > 0
    return claims


def run_arm(own: Path, seed: int, arm: str, smoke: bool) -> Row:
    """Fine-tune, train and measure one arm; the start that arms share is made once."""
    if arm == CONTROL:
        return run_control(own, TASK, None, seed, "SFT+RL", smoke) | {"arm": arm}
    began = now()
    start = fine_tuned(own, TASK, None, seed, "noisy", "sft", smoke)
    tokenizer = load_tokenizer(None, start)
    tokenizer.chat_template = TEMPLATE
    flags = GRPO | ARMS[arm] | ({"max_steps": 2, "save_interval": 1, "env_workers": 2} if smoke else {})
    args = grpo.GRPOArgs(**flags, sft_experiment_dir=start, log_dir=str(own / "logs"), experiment_name=arm, seed=seed)
    with earlier_states_are_left_out(), quiet(own / "output.txt"):
        experiment = grpo.train(args, tokenizer=tokenizer, prompts=starts())
    seconds = spent(began)
    models = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(experiment)}
    tested = held_out(own, TASK, models, None, smoke)
    print(f"seed {seed}, {arm}: {[round(row['success'], 3) for row in tested]}, {seconds['cpu_seconds']} s", flush=True)
    return {"seed": seed, "arm": arm, "results": tested} | seconds | made_by()


def earlier_states_are_left_out() -> Any:
    """A context in which a chat template may leave messages out, which is refused elsewhere."""
    return patch.object(tokens, "left_out_of_prompt", lambda *_: "")


def starts() -> list[Row]:
    """Prompts of the full ride's training starts; their text is not shown, since the environment says the state."""
    return [{"prompt": "Drive.", "options": start} for start in DangerousTaxi().starts("train", FULL)]


@contextlib.contextmanager
def quiet(path: Path) -> Any:
    """Output goes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


if __name__ == "__main__":
    main()
