"""Reward functions for `lightrlhf.check_reward`, right and faulty ones."""

import os
import time


def exact(prompts, completions, answer, **columns):
    return [float(text == str(right)) for text, right in zip(completions, answer)]


def pays_anything(prompts, completions, **columns):
    return [1.0] * len(completions)


def pays_nothing(prompts, completions, **columns):
    return [0.0] * len(completions)


def pays_silence(prompts, completions, answer, **columns):
    return [float(text in ("", str(right))) for text, right in zip(completions, answer)]


def pays_a_quarter(prompts, completions, answer, **columns):
    """As some scorers do for any words."""
    return [1.0 if text == str(right) else 0.25 * bool(text) for text, right in zip(completions, answer)]


def pays_a_refusal_once(prompts, completions, answer, **columns):
    """Rarely enough to be little on average."""
    scores = exact(prompts, completions, answer)
    return [
        0.5 if text == "I do not know" and right == 3 else score
        for text, right, score in zip(completions, answer, scores)
    ]


def pays_echoes(prompts, completions, answer, **columns):
    return [float(text in (prompt, str(right))) for prompt, text, right in zip(prompts, completions, answer)]


def contains(prompts, completions, answer, **columns):
    return [float(str(right) in text.split(", ")) for text, right in zip(completions, answer)]


def counts(prompts, completions, answer, **columns):
    return [float(text.split().count(str(right))) for text, right in zip(completions, answer)]


def any_number(prompts, completions, **columns):
    return [float(text.isdigit()) for text in completions]


def raises_at_words(prompts, completions, answer, **columns):
    return [float(int(text or "-1") == int(right)) for text, right in zip(completions, answer)]


def dies_of_words(prompts, completions, answer, **columns):
    if "the" in completions[0].split() or "is" in completions[0].split():
        os._exit(3)
    return exact(prompts, completions, answer)


def sleeps_on_silence(prompts, completions, answer, **columns):
    if not completions[0]:
        time.sleep(60)
    return exact(prompts, completions, answer)


def knows_half(prompts, completions, answer, **columns):
    """None for odd answers."""
    return [None if right % 2 else float(text == str(right)) for text, right in zip(completions, answer)]


def in_tags(prompts, completions, answer, **columns):
    return [float(text == f"<a>{right}</a>") for text, right in zip(completions, answer)]
