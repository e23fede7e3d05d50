"""Loading scorers: reward models, models that compare two responses, and Python functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import EpisodeArgs, FrozenArgs
from lightrlhf.data.scores import FAILURES
from lightrlhf.models.loading import check_weights, from_pretrained, load_scalar
from lightrlhf.models.names import holds_reward_model, resolve
from lightrlhf.models.offload import on_device
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.quantisation import is_quantised, keep_unpacked
from lightrlhf.models.roles import Policy, ScalarModel
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.audit import RewardAudit
from lightrlhf.rewards.encoding import Encoding
from lightrlhf.rewards.functions import RewardFunction, RewardFunctions
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.rewards.scorers import EnvScorer, FunctionScorer, GroupScorer, ModelScorer, PairScorer
from lightrlhf.rewards.workers import path_of
from lightrlhf.training.ranks import LocalRanks, Ranks

if TYPE_CHECKING:
    from lightrlhf.training.run import Run

Freeze = Callable[[nn.Module], nn.Module]
STATISTICS = "reward_statistics.json"


def reward_statistics(model_dir: str | Path) -> tuple[float, float]:
    """Mean and standard deviation of a reward model's scores on its own validation split; (0, 1) when not stored.

    Raises: UsageError when the file holds anything else.
    """
    path = Path(model_dir) / STATISTICS
    if not path.is_file():
        return 0.0, 1.0
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        mean, std = (number(stored[name]) for name in ("mean", "std"))
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise UsageError(f"{path} has no finite mean and std; train the reward model again, or remove it") from None
    if std < 0:
        raise UsageError(f"{path}: std {std} must be at least 0; train the reward model again, or remove it")
    return mean, max(std, 1e-6)


def number(value: Any) -> float:
    """A finite number. Raises: ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


# ---------------------------------------------------------------------------------------------------------- loading
def make_rewards(
    args: Any,
    run: Run[Any],
    reward: RewardFunctions | None = None,
    backbone: Policy | None = None,
    keeps_infinite: bool = False,
) -> Rewards:
    """The rewards of a training program, and its audit, restored in a resumed run; see `load_rewards`.

    Raises: UsageError naming the flag when one cannot be loaded.
    """
    rewards = load_rewards(
        args,
        run.device,
        args.rollout_mini_batch_size,
        reward,
        backbone=backbone,
        standardise=args.normalize_rewards,
        keeps_infinite=keeps_infinite,
        ranks=run.ranks,
        freeze=run.freeze,
    )
    if args.audit_function:
        state = run.resumed["extra"].get("audit") if run.resumed else None
        rewards.audit = RewardAudit(args, run.ranks, state)
    run.on_end(rewards.close)
    return rewards


def load_rewards(
    args: Any,
    device: torch.device,
    batch_size: int,
    reward: RewardFunctions | None = None,
    *,
    wrap_prompts: bool = False,
    grouped: bool = False,
    backbone: Policy | None = None,
    standardise: bool = True,
    keeps_infinite: bool = False,
    ranks: Ranks | None = None,
    freeze: Freeze | None = None,
) -> Rewards:
    """The rewards of `--rm_experiment_dir`, then of `reward`, one or several functions, or of `--reward_function`, then
    of the environment of episodes.

    batch_size: rows of a forward pass, at most. grouped: responses come in groups, which a model that compares two may
    judge. keeps_infinite: the caller clips scores, so an infinite one is a score; ranks: of a run. The others as in
    `load_scorer`.
    Raises: UsageError naming the flag when one cannot be loaded.
    """
    scorers: list[GroupScorer] = []
    names: list[str] = []
    if args.rm_experiment_dir:
        names.append("reward_model")
        scorers.append(
            load_scorer(
                args.rm_experiment_dir,
                device,
                batch_size,
                "--rm_experiment_dir",
                args.trust_remote_code,
                wrap_prompts=wrap_prompts,
                single=not grouped,
                backbone=backbone,
                standardise=standardise,
                freeze=freeze,
            )
        )
    for function, path in reward_functions(args.reward_function, reward):
        names.append(unique_name(path.rpartition(":")[2] or getattr(function, "__name__", "reward"), names))
        timeout = args.reward_timeout or getattr(function, "timeout", 0.0)
        if timeout:
            path = path or path_of(function)
        name = path or f"{function.__module__}:{getattr(function, '__qualname__', 'reward')}"
        scorers.append(
            FunctionScorer(
                function, name, keeps_infinite, timeout, path, takes_messages=True, ranks=ranks or LocalRanks()
            )
        )
    if isinstance(args, EpisodeArgs) and args.plays_episodes:  # of tools alone only the faults count
        names.append(unique_name("env", names))
        scorers.append(EnvScorer())
    weights = [*args.reward_weights, *[1.0] * (len(names) - len(args.reward_weights))]
    return Rewards(scorers, tuple(names), torch.tensor(weights, dtype=torch.float64))


def reward_functions(paths: Sequence[str], reward: RewardFunctions | None) -> list[tuple[RewardFunction, str]]:
    """The functions given from Python, whose path is empty, else by `--reward_function`, each with its path."""
    if reward is None:
        return [(load_function(path, "--reward_function"), path) for path in paths]
    given: Any = reward if isinstance(reward, list | tuple) else [reward]
    return [(function, "") for function in given]


def unique_name(name: str, taken: Sequence[str]) -> str:
    """A name for a metric `reward/{name}` that no other reward has, nor a count of failures."""
    used = {*taken, *FAILURES}
    return next(one for one in (name, *(f"{name}_{n}" for n in range(2, len(used) + 3))) if one not in used)


def load_scorer(
    name: str,
    device: torch.device,
    batch_size: int,
    flag: str,
    trust_remote_code: bool = False,
    wrap_prompts: bool = False,
    single: bool = False,
    backbone: Policy | None = None,
    standardise: bool = True,
    freeze: Freeze | None = None,
) -> GroupScorer:
    """The scorer of a reward model or a pair-preference model.

    wrap_prompts: whether a text prompt becomes a user message of the model's chat template. single: responses come one
    a prompt, and each is scored whatever its length; a model that compares two is refused. backbone: a policy whose
    shared backbone it may use. standardise: whether to shift and scale by the mean and deviation stored with the model.
    freeze: of a run, see `Learners.freeze`; None puts the model on the device.
    Raises: UsageError naming `flag` when it cannot be loaded, is not a reward model, or needs code that is not trusted.
    """
    source = resolve(name, flag)
    custom = "AutoModelForSequenceClassification" in _config(source).get("auto_map", {})
    if custom and not trust_remote_code:
        raise UsageError(f"{flag} {name} needs the code in its own folder; allow it by --trust_remote_code True")
    if not custom and not holds_reward_model(source):
        raise UsageError(
            f"{flag} {name} holds a language model, not a reward model: it has no classification head; "
            "give an RM experiment dir"
        )
    model: Any
    if custom:
        model, tokenizer = _load_custom(source, flag)
        config = model.config
    else:
        frozen = FrozenArgs(trust_remote_code=trust_remote_code)
        model = load_scalar(source, frozen, None, 0, flag, needs_head=single, backbone=backbone, may_be_encoder=True)
        config = model.model.config
        if hasattr(model.model, "score") or model.shares:
            tokenizer = load_tokenizer(None, source)
        else:
            model, tokenizer = model.model, _plain(source)  # an encoder
    model = freeze(model) if freeze else model.requires_grad_(False).eval().to(device)
    if isinstance(model, ScalarModel):
        with on_device(model):
            enable_packing(model)
    longest = None if single else getattr(config, "max_position_embeddings", None)
    encoding = Encoding(tokenizer, wrap_prompts, longest)
    if getattr(config, "compares_pairs", False) and not single:
        return PairScorer(model, encoding, batch_size)
    mean, std = reward_statistics(source) if standardise else (0.0, 1.0)
    return ModelScorer(model, encoding, batch_size, mean, std)


def _config(source: str) -> dict[str, Any]:
    try:
        stored = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # loading says what is wrong
    found = stored.get("auto_map") if isinstance(stored, dict) else None
    return {"auto_map": found} if isinstance(found, dict) else {}


def _load_custom(source: str, flag: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(None, source)
    options = {"dtype": torch.float32, "trust_remote_code": True}
    model: Any = from_pretrained(AutoModelForSequenceClassification, source, flag, **options)
    check_weights(model, f"{flag} {source}")
    if is_quantised(model):
        keep_unpacked(model, f"{flag} {source}", torch.float32)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _plain(source: str) -> Any:
    """An encoder's tokenizer, which may have no end token."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as problem:  # a damaged file makes it raise anything
        raise UsageError(f"no tokenizer in {source}: {first_line(problem)}") from None
