"""Drift of distillation: texts that the divergence rewards although the teacher would not write them.

The reverse KL of a response is small wherever both models are sure of the next token, as in repetitions; and far from
its own texts a teacher's distribution means little. Three figures tell of it, beside what they were in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightrlhf.training.run import Metrics, Run

LONGER, MORE_TRUNCATED = 1.5, 0.25  # times the first length, and share of responses beyond the first
SHORTER = 0.5  # times the first length
MORE_REPETITION = 0.1  # share of runs of tokens beyond the first
SURPRISE = 1.0  # nats a token beyond the first


class Drift:
    """Warns once of each kind; its state is the first step's figures."""

    def __init__(self, run: Run[Any]) -> None:
        stored = run.resumed["extra"].get("drift") if run.resumed else None
        self.run, self.first, self.told = run, dict(stored or {}), set[str]()
        run.checkpoints.others.append(lambda: {"drift": dict(self.first)})

    def watch(self, metrics: Mapping[str, float]) -> Metrics:
        """`drift/warning`: how many of the figures are far from the first step's; nothing on demonstrations."""
        if "completions/mean_length" not in metrics:
            return {}
        names = ("completions/mean_length", "completions/truncated_ratio", "completions/repetition", "teacher/surprise")
        now = {name: metrics[name] for name in names if name in metrics}
        for name, value in now.items():
            self.first.setdefault(name, value)
        found = self._found(now)
        for kind in found.keys() - self.told:
            self.run.print0(f"warning: step {self.run.step + 1}: {found[kind]}")
        self.told |= found.keys()
        return {"drift/warning": float(len(found))}

    def _found(self, now: Mapping[str, float]) -> dict[str, str]:
        """What is far from the first step, in words."""
        found = {}
        change = {name: value - self.first[name] for name, value in now.items()}
        length = now["completions/mean_length"]
        grew = length > LONGER * self.first.get("completions/mean_length", length)
        if grew and change["completions/truncated_ratio"] > MORE_TRUNCATED:
            found["length"] = f"responses have grown to {length:.0f} tokens, and more of them are truncated; read them"
        if length < SHORTER * self.first.get("completions/mean_length", length):
            found["length"] = (
                f"responses have shrunk to {length:.0f} tokens, less than half of the first step's; read them, and "
                "lower --learning_rate or give --student_share 0.5"
            )
        if change.get("completions/repetition", 0.0) > MORE_REPETITION:
            share = now["completions/repetition"]
            found["repetition"] = (
                f"responses repeat themselves ({share:.0%} of their runs of four tokens), as the reverse KL rewards; "
                "lower --learning_rate, or give --beta 0.5 or --student_share 0.5"
            )
        if change.get("teacher/surprise", 0.0) > SURPRISE:
            found["surprise"] = (
                f"the teacher finds a token {now['teacher/surprise']:.1f} nats less likely than its own would be, so "
                "its distribution there means little; give --student_share 0.5, or start from SFT"
            )
        return found
