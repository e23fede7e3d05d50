"""RLHF algorithms on Lightning Fabric, each one a readable file that runs by itself.

From Python: `from lightrlhf import PPOArgs, ppo` and `ppo.train(PPOArgs(...), policy=..., prompts=..., reward=...)`.
Names are imported when they are first used, so that `import lightrlhf` stays light.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightrlhf.programs import PROGRAMS, TRAINING

__version__ = "1.0.0"

NAMES = {one.args: one.module for one in TRAINING.values()} | {
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
# what `NAMES` says, for editors, written by make lists
if TYPE_CHECKING:
    from lightrlhf.cli.errors import RunFailure as RunFailure
    from lightrlhf.cli.errors import StopTraining as StopTraining
    from lightrlhf.cli.errors import UsageError as UsageError
    from lightrlhf.data.batch import Batch as Batch
    from lightrlhf.data.batch import Rollout as Rollout
    from lightrlhf.distill import DistillArgs as DistillArgs
    from lightrlhf.dpo import DPOArgs as DPOArgs
    from lightrlhf.envs import make_env as make_env
    from lightrlhf.generation.rollout import generate_rollout as generate_rollout
    from lightrlhf.grpo import GRPOArgs as GRPOArgs
    from lightrlhf.iterative_refuel import IterativeRefuelArgs as IterativeRefuelArgs
    from lightrlhf.kto import KTOArgs as KTOArgs
    from lightrlhf.models.loading import load_policy as load_policy
    from lightrlhf.models.loading import load_scalar as load_scalar
    from lightrlhf.models.roles import Policy as Policy
    from lightrlhf.models.roles import ScalarModel as ScalarModel
    from lightrlhf.models.tokenizer import load_tokenizer as load_tokenizer
    from lightrlhf.online_dpo import OnlineDPOArgs as OnlineDPOArgs
    from lightrlhf.online_refuel import OnlineRefuelArgs as OnlineRefuelArgs
    from lightrlhf.ppo import PPOArgs as PPOArgs
    from lightrlhf.reflect_rl import ReflectRLArgs as ReflectRLArgs
    from lightrlhf.refuel import RefuelArgs as RefuelArgs
    from lightrlhf.rewards.loading import load_scorer as load_scorer
    from lightrlhf.rm import RMArgs as RMArgs
    from lightrlhf.sft import SFTArgs as SFTArgs
    from lightrlhf.training.run import Run as Run
# end of the list

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
