"""Tiny GRPO runs on episodes with a game of several turns."""

import copy
import dataclasses
import random

from helpers import tiny_model
from helpers.episodes import Told
from helpers.templates import ZOO
from lightrlhf import GRPOArgs, grpo

KEEPS, REWRITES = "qwen25", "deepseek_r1"  # templates of the zoo
PROMPTS = [{"prompt": [{"role": "user", "content": f"Say {word}"}], "word": word} for word in ("tea", "water", "milk")]
SIZES = {"num_generations": 3, "rollout_size": 2, "mini_batch_size": 6, "micro_batch_size": 6, "max_new_tokens": 5}
SIZES |= {"rollout_mini_batch_size": 4, "max_turns": 4, "log_interval": 1, "accelerator": "cpu", "eval_interval": 0}


class Game(Told):
    """Ends by its seed, or by what was said; a turn's reward and the outcome are the letters of the word in it."""

    def reset(self, seed, row):
        super().reset(seed, row)
        self.rng, self.word = random.Random(seed), row["word"]
        self.num_turns = self.rng.randint(1, 3)
        return [{"role": "user", "content": f"You have {self.num_turns}."}]

    def step(self, reply):
        answer = super().step(reply)
        done = answer.done or sum(map(ord, reply["content"])) % 3 == 0
        return dataclasses.replace(answer, reward=self.letters(), done=done, counts={"calls": 1})

    def finish(self, stop_reason):
        return 2 * self.letters()

    def letters(self) -> float:
        return float(sum(letter in self.word for letter in "".join(self.said)))


def agent_args(**changes) -> GRPOArgs:
    return GRPOArgs(**({"env": "helpers.episodes:Told", **SIZES} | changes))


def model_of(name: str):
    tokenizer = ZOO[name].tokenizer
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return tiny_model("llama", vocab_size=len(tokenizer), **special, max_position_embeddings=1024)


def trained(name: str, tmp_path, model=None, on_step=None, prompts=PROMPTS, **changes):
    given = {"policy": model or model_of(name), "tokenizer": copy.deepcopy(ZOO[name].tokenizer), "prompts": prompts}
    args = agent_args(log_dir=str(tmp_path), **({"max_steps": 2, "learning_rate": 1e-2} | changes))
    return grpo.train(args, **given, on_step=on_step)
