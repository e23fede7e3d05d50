"""RLHF algorithms on Lightning Fabric, each one a readable file that runs by itself.

From Python: `from lightrlhf import PPOArgs, ppo` and `ppo.train(PPOArgs(...), policy=..., prompts=..., reward=...)`.
Names are imported when they are first used, so that `import lightrlhf` stays light.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

TRAINING: tuple[str, ...] = ("sft", "rm", "ppo", "grpo", "dpo", "online_dpo", "refuel", "iterative_refuel")
TRAINING += ("online_refuel", "reflect_rl")
TOOLS: tuple[str, ...] = ("generate", "annotate", "evaluate", "evaluate_env", "evaluate_dialogues", "judge")
TOOLS += ("check_reward", "estimate", "sweep", "plot", "serve", "export", "demo", "doctor", "quickstart")
PROGRAMS = TRAINING + TOOLS
NAMES = {
    "SFTArgs": "lightrlhf.sft",
    "RMArgs": "lightrlhf.rm",
    "PPOArgs": "lightrlhf.ppo",
    "GRPOArgs": "lightrlhf.grpo",
    "DPOArgs": "lightrlhf.dpo",
    "OnlineDPOArgs": "lightrlhf.online_dpo",
    "RefuelArgs": "lightrlhf.refuel",
    "IterativeRefuelArgs": "lightrlhf.iterative_refuel",
    "OnlineRefuelArgs": "lightrlhf.online_refuel",
    "ReflectRLArgs": "lightrlhf.reflect_rl",
    "UsageError": "lightrlhf.cli.errors",
    "RunFailure": "lightrlhf.cli.errors",
    "StopTraining": "lightrlhf.cli.errors",
    "Batch": "lightrlhf.data.batch",
    "Rollout": "lightrlhf.data.batch",
    "Policy": "lightrlhf.models.roles",
    "ScalarModel": "lightrlhf.models.roles",
    "load_policy": "lightrlhf.models.loading",
    "load_scalar": "lightrlhf.models.loading",
    "load_tokenizer": "lightrlhf.models.tokenizer",
    "load_scorer": "lightrlhf.rewards.loading",
    "generate_rollout": "lightrlhf.generation.rollout",
    "make_env": "lightrlhf.envs",
    "Run": "lightrlhf.training.run",
}
__all__ = [*PROGRAMS, *NAMES, "__version__"]

if sys.argv[:1] == ["-m"]:  # python -m lightrlhf.NAME: its imports come before the `main` that prints errors in a line
    from lightrlhf.cli.packages import print_missing

    sys.excepthook = print_missing


def __getattr__(name: str) -> Any:
    if name in PROGRAMS:
        return import_module(f"lightrlhf.{name}")
    if name in NAMES:
        return getattr(import_module(NAMES[name]), name)
    raise AttributeError(f"module 'lightrlhf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
