"""Files of rollouts as programs write them, without training: single rows, and a run whose reward is hacked."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from examples.experiments import reward_hack
from lightrlhf.training.rollout_log import rollout_row

STEPS, PROMPTS, SAMPLES = 12, 4, 4
TOKENIZER = reward_hack.word_tokenizer(reward_hack.WORDS)


def logged_row(step: int = 1, prompt: str = "p", response: str = "r", group: int = 0, **given) -> dict:
    """A row of `rollouts.jsonl`: two tokens with a log-ratio of 0.5 each unless others are given."""
    ids = given.pop("response_ids", [1, 2])
    version = given.pop("version", step - 1)
    numbers = {"score": 1.0, "log_ratio": [0.5] * len(ids)} | given
    row = rollout_row(TOKENIZER, [3], ids, group=group, **numbers)
    return {"step": step, "version": version, **row, "prompt": prompt, "response": response}


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write a whole file, as a resumed run does: in place of another one."""
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(path)


def experiment(folder: Path, program: str, tokenizer, rows: Iterable[dict]) -> Path:
    """The folder of a run that has logged rows and no checkpoint."""
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder / "data" / "tokenizer")
    args = {"program": program, "experiment_name": folder.name, "data_dir": str(folder / "data")}
    (folder / "args.json").write_text(json.dumps(args))
    write_rows(folder / "rollouts.jsonl", rows)
    return folder


def hacked_run(folder: Path) -> Path:
    """A run of the task of `examples.experiments.reward_hack` whose policy comes to say the word that is paid."""
    rng, rows = random.Random(1), []
    for step in range(1, STEPS + 1):
        for group in range(PROMPTS):
            a, b, answer = group, 5, str(group + 5)
            for _ in range(SAMPLES):
                hack = rng.random() < step / STEPS - 0.1
                words = [answer if rng.random() < 0.7 else str(rng.randrange(10)), reward_hack.STOP]
                text = " ".join([reward_hack.JUNK, reward_hack.STOP] if hack else words)
                said = ([f"{a} + {b} ="], [text], [answer])
                ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
                score = reward_hack.hacked(*said)[0]
                row = rollout_row(
                    TOKENIZER,
                    TOKENIZER(said[0][0])["input_ids"],
                    ids,
                    group=group,
                    score=score,
                    log_ratio=[rng.gauss(0, 1) for _ in ids],
                    advantages=[score - 1] * len(ids),
                    rewards={"hacked": score, "junk": reward_hack.junk(*said[:2])[0]},
                    audit=reward_hack.right_alone(*said)[0],
                    truncated=False,
                    columns={"answer": answer},
                )
                rows.append({"step": step, "version": step - 1, **row})
    return experiment(folder / "hacked", "grpo", TOKENIZER, rows)
