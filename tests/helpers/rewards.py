"""Reward functions, judges and users that tests name by import path, such as `helpers.rewards:length`."""

import asyncio
import math
import os
import random
import re
import time

number = 3


# ---------------------------------------------------------------------------------------------------- reward functions
def length(prompts, completions, **columns):
    """Prefers long completions."""
    return [len(text) / 10 for text in completions]


def constant(prompts, completions, **columns):
    return [1.0] * len(completions)


def letters_said(prompts, completions, **columns):
    """Letters of completions that are messages."""
    return [len(message["content"]) for (message,) in completions]


def vowels(prompts, completions, **columns):
    """Rarely gives the same reward twice."""
    return [sum(letter in "aeiou" for letter in text) + len(text) / 100 for text in completions]


def noisy(prompts, completions, **columns):
    """Draws from both generators that a checkpoint keeps."""
    import torch  # not for the processes that import this file to call a function

    return [sum(letter in "aeiou" for letter in text) + float(torch.rand(())) + random.random() for text in completions]


def whole_vowels(prompts, completions, **columns):
    """Often gives the same reward twice."""
    return [sum(letter in "aeiou" for letter in text) for text in completions]


def many_vowels(prompts, completions, **columns):
    """1 or 0."""
    return [float(sum(letter in "aeiou" for letter in text) > 4) for text in completions]


def worth(prompts, completions, worth, **columns):
    """Multiplies the length by the column `worth`."""
    return [value * len(text) for value, text in zip(worth, completions)]


def thousands(prompts, completions, **columns):
    """The number that a completion writes."""
    return [float(text) for text in completions]


steps = 0  # calls of `growing` in this process


def growing(prompts, completions, **columns):
    """The same for all samples, more at each call."""
    global steps
    steps += 1
    return [steps / 100] * len(completions)


def shrinking(prompts, completions, **columns):
    """Less the more `growing` gave."""
    return [-steps / 100] * len(completions)


# ---------------------------------------------------------------------------------------------- faulty reward functions
def always_nan(prompts, completions, **columns):
    return [math.nan] * len(completions)


def every_other(prompts, completions, **columns):
    return [math.nan if i % 2 else 1.0 for i in range(len(completions))]


def partly_invalid(prompts, completions, **columns):
    """None for a refusal, NaN for a promise, 1 otherwise."""
    return [None if text == " No." else math.nan if "Sure" in text else 1.0 for text in completions]


def takes_no_columns(prompts, completions):
    return [1.0] * len(completions)


def too_few(prompts, completions, **columns):
    return [1.0]


def digit(prompts, completions, **columns):
    return "1"


def raises(prompts, completions, **columns):
    raise KeyError("answer")


calls = 0  # of the two functions below, in this process


def _third_call_of_rank_one() -> bool:
    global calls
    calls += 1
    return calls == 3 and os.environ["LOCAL_RANK"] == "1"


def fails_on_rank_one(prompts, completions, **columns):
    if _third_call_of_rank_one():
        raise ValueError("no more")
    return length(prompts, completions)


def hangs_on_rank_one(prompts, completions, **columns):
    if _third_call_of_rank_one():
        time.sleep(100)
    return length(prompts, completions)


# ------------------------------------------------------------------------------------- of one response: verl's, async
def digits(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: the share of the answer's letters that the response has."""
    assert data_source == "sums" and extra_info["index"] >= 0
    return {"score": sum(letter in solution_str for letter in ground_truth) / len(ground_truth), "acc": 1.0}


async def slow_length(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


def shaky(prompts, completions, **columns):
    """Does what the one completion says: hangs, dies, raises, scores nothing or 1."""
    (text,) = completions  # with a time limit it is called for one at a time
    if "hang" in text:
        print("hangs", flush=True)  # a worker's output goes to the standard error
        re.fullmatch("(a+)+b", "a" * 60)  # without an end, and holds Python's lock
    if "die" in text:
        os._exit(7)
    if "raise" in text:
        raise KeyError("answer")
    return [{"none": None, "nan": math.nan}.get(text, 1.0)]


# ----------------------------------------------------------------------------------------------------- judges and users
def shorter(prompts, completions, extra, **columns):
    """A judge that prefers short completions, has no valid score for prompt p3 and requires the column `extra`."""
    assert extra == ["e"] * len(prompts)
    return [{"score": math.nan if prompt == "p3" else -len(text)} for prompt, text in zip(prompts, completions)]


def echo(dialogues, seeds, **columns):
    """A user who repeats the first letters of the last message, and draws a number."""
    return [f"You said {messages[-1]['content'][:5]} {seed % 7}?" for messages, seed in zip(dialogues, seeds)]


def own_loss(logprobs, log_ratio, advantages, action_mask):
    """A policy loss: plain REINFORCE."""
    return -advantages * logprobs


def mean_loss(logprobs, log_ratio, advantages, action_mask):
    """A policy loss that is one number."""
    return -(advantages * logprobs).mean()


def constant_loss(logprobs, log_ratio, advantages, action_mask):
    return (advantages * logprobs).detach()


def loss_of_two(logprobs, advantages):
    return -advantages * logprobs


def median_advantage(scores):
    """Advantages (P, K): scores less the median of their prompt's."""
    return scores - scores.median(-1, keepdim=True).values


def advantage_without_a_number(scores):
    return scores / 0


def one_advantage(scores):
    """One for each prompt, which is one too few for each response."""
    return scores.mean(-1)
