"""A text environment in one file, a corridor with a trap, with a tokenizer and a small model for its texts."""

import os
from pathlib import Path

import gymnasium
import torch

from lightrlhf.envs import information, text_space

ACTIONS = ["west", "east", "wait"]
LENGTHS = (3, 5)  # of the two levels


class Corridor(gymnasium.Env):
    """Walk to an end of the corridor, east or west as the task says; the other end is a trap."""

    actions = ACTIONS
    levels = ["short", "long way"]
    instructions = "Walk to the goal."

    def __init__(self, horizon: int = 10) -> None:
        self.horizon = horizon
        self.observation_space = self.action_space = text_space(80)

    def starts(self, split, level=None):
        shift = {"train": 0, "validation": 1, "test": 2}[split]
        places = [(goal, at) for goal in ("west", "east") for at in range(-4, 5) if (at + 4) % 3 == shift]
        chosen = (0, 1) if level is None else (level,)
        return [{"level": n, "goal": goal, "at": at} for n in chosen for goal, at in places if abs(at) < LENGTHS[n]]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.at, self.level = options["goal"], options["at"], options["level"]
        self.history, self.cost = [], 0.0
        return self.text(), self.info()

    def text(self):
        return f"at {self.at} of {LENGTHS[self.level]}"

    def info(self, success=False, invalid=False):
        facts = {"task": f"go {self.goal}", "history": self.history, "success": success, "cost": self.cost}
        return information(ACTIONS, ACTIONS, level=self.level, invalid=invalid, **facts)

    def step(self, action):
        before = self.at
        self.at += {"west": -1, "east": 1}.get(action, 0)
        ended = abs(self.at) >= LENGTHS[self.level]
        success = ended and (self.at > 0) == (self.goal == "east")
        reward = (1.0 if success else -0.5 if ended else 0.0) - 0.05
        self.cost -= reward
        self.history.append((action, "moved" if self.at != before else "nothing"))
        return (
            self.text(),
            reward,
            ended,
            not ended and len(self.history) >= self.horizon,
            self.info(success, self.at == before),
        )

    def expert(self):
        return self.goal

    def reflection(self, action=None):
        return f"walk {self.goal}" if action is None else f"not {action} but {self.goal}"


class LoggedCorridor(Corridor):
    """A corridor that appends each start to a file of its process in the folder $STARTS_DIR."""

    def reset(self, *, seed=None, options=None):
        with (Path(os.environ["STARTS_DIR"]) / str(os.getpid())).open("a") as file:
            file.write(f"{options['level']} {options['goal']} {options['at']}\n")
        return super().reset(seed=seed, options=options)


class LopsidedCorridor(Corridor):
    """A corridor whose episodes take one step on the first rank and three on the second."""

    def step(self, action):
        text, reward, _, _, info = super().step(action)
        return text, reward, False, len(self.history) > 2 * int(os.environ["LOCAL_RANK"]), info


def corridor_tokenizer():
    """Words of the corridor's texts, the line break and single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "\n", *"0123456789-.#>:", "Analyze", "Choose", "Action"]
    words += [*ACTIONS, "go", "at", "of", "walk", "not", "but", "moved", "nothing"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    pieces = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(r"\n|[A-Za-z]+|."), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def save_corridor_model(folder, seed: int = 0, **changes) -> str:
    """A Hugging Face folder with a small random Llama that knows the corridor's words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = corridor_tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.15}
    sizes |= {"max_position_embeddings": 256, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**(sizes | special | changes))
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


STARTS = Corridor().starts("train")


WAYS = {
    "labels": {},
    "shuffled labels": {"shuffle_action": True, "with_history": True},
    "any token": {"shrink_head": False},
    "written": {"max_new_tokens": 4},
}
