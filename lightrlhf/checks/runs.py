"""Our own runs: steps of `rollouts.jsonl`, and what `metrics.jsonl` and the checkpoints must agree on.

Left out: advantages and losses where not all rows of a step are logged, of PPO's macro actions, and of episodes, but
for GRPO's advantages in groups whose episodes are a row each; end tokens of runs with tools or several turns.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightrlhf.checks.logprobs import LARGEST_LOGIT, ROUNDED
from lightrlhf.checks.losses import check_loss
from lightrlhf.checks.step import UNITS, Missing, Step, from_rows
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.maths import preference
from lightrlhf.maths.groups import ADVANTAGES
from lightrlhf.maths.ops import KL_ESTIMATORS
from lightrlhf.maths.unpaired import UNPAIRED_LOSSES, Responses
from lightrlhf.rewards import kl
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.run_dir import read_args, read_logged, read_metrics

LOSS_OF = {"dpo": "train/preference_loss", "kto": "train/loss"}  # names of metrics
DIGITS = 5  # of the numbers in rollouts.jsonl
CHANGED = ("normalize_advantages", "overlong_filter", "normalize_each_reward")
AT_ONE = ("clip", "sapo")  # losses that are known where the ratio is 1, whatever the log-probabilities
NEED_LOGPROBS = ("loss cispo", "loss reinforce")  # faults that fit where these are not known
APART = ("entropy_coeff", "teacher_coeff", "rollout_server", "overlong_filter")  # what else enters a loss
PENALTIES = ("overlong_buffer", "missing_eos_penalty")
OF_AGENTS = ("env", "tools", "mcp", "agent")


class Run(NamedTuple):
    """What the steps of a run have in common."""

    args: Mapping[str, Any]
    ends: list[int]  # end tokens
    metrics: Mapping[int, Mapping[str, Any]]  # rows of `metrics.jsonl` of a single step, by it


def of_run(directory: str) -> Run:
    """Arguments, end tokens and metrics of a run."""
    args, file = read_args(directory), Path(directory) / "metrics.jsonl"
    rows = {row["step"]: row for row in read_logged(file)} if args.get("log_interval", 1) == 1 else {}
    return Run(args, _ends(Path(directory)), rows)


def read_rollouts(directory: str) -> list[dict[str, Any]]:
    """The logged samples of a run. Raises: UsageError for a row that no run has written."""
    path = Path(directory) / "rollouts.jsonl"
    rows = list(read_logged(path))
    for number, row in enumerate(rows, start=1):
        if not _is_written(row):
            raise UsageError(f"{path}: row {number} is not as runs write it; restore the file")
    return rows


def _is_written(row: Mapping[str, Any]) -> bool:
    """Whether a row has ids, and lists of a number for each token of the response."""
    ids: list[Any] = [row.get(name) for name in ("prompt_ids", "response_ids", "mask")]
    if not all(_are_numbers(one) and None not in one and min(one, default=0) >= 0 for one in ids):
        return False
    lists = [ids[2], *(row.get(name) for name in ("log_ratio", "advantages", "values"))]
    numbers = [row.get("score"), row.get("truncated"), row.get("version", 0), row.get("group", "")]
    fits = all(one is None or (_are_numbers(one) and len(one) == len(ids[1])) for one in lists)
    return fits and _are_numbers(numbers) and None not in numbers[2:]


def _are_numbers(values: Any) -> bool:
    """Whether values are a list of numbers, or None for those that are not finite."""
    return isinstance(values, list) and all(one is None or isinstance(one, int | float) for one in values)


def read_run(directory: str) -> list[Step]:
    """The logged samples of each step of a run; none where it has no rollouts."""
    run, rows = of_run(directory), read_rollouts(directory)
    return [_step(list(part), run, step) for step, part in groupby(rows, key=lambda row: row["step"])]


def _step(rows: list[dict[str, Any]], run: Run, number: int) -> Step:
    """One step: ids, masks, scores and groups, and advantages where they are made of the logged rows alone."""
    args, size = run.args, run.args.get("num_generations") or 1
    of_agents = any(args.get(name) for name in OF_AGENTS)
    members = Counter(row["group"] for row in rows)
    apart = {row["group"] for row in rows if of_agents and not _is_whole_episode(row)}
    kept = [row for row in rows if members[row["group"]] == size and row["group"] not in apart]
    whole, by_gae = is_whole(args, rows), _gae(run, rows, number)
    kinds = {*ADVANTAGES} - ({"none"} if whole else {"none", "batch_std"})
    is_of_groups = args.get("program") == "grpo" and args.get("advantage") in kinds
    changed = CHANGED + (PENALTIES if of_agents else ())
    is_plain = is_of_groups and not any(args.get(name) for name in changed)
    is_plain = is_plain and bool(kept) and all(row["advantages"] and None not in row["advantages"] for row in kept)
    config = {"method": args.get("program"), "digits": DIGITS, "temperature": args.get("temperature")}
    config |= {name: args.get(name) for name in ("top_p", "top_k", "min_p")}
    sizes, made = [0.0], []
    for row in kept or rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        one = {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + row["mask"], "prompt_len": len(prompt)}
        if row.get("truncated") is not None and not args.get("stop_strings"):
            one["truncated"] = float(row["truncated"])
        if kept and size > 1:
            one["group"] = row["group"]
        if is_plain:
            first = next((value for value, is_on in zip(row["advantages"], row["mask"]) if is_on), 0.0)
            one |= {"rewards": penalised(row, args), "advantages": first}
            one["row_kl"] = sum(value or 0.0 for value in row["log_ratio"] or [])
            sizes.append(sum(abs(value or 0.0) for value in row["log_ratio"] or []) + abs(first))
        made.append(one | by_gae(row) if by_gae else one)
    if is_plain:
        coeff = args["init_kl_coeff"] if args["kl_placement"] == "reward" else 0.0
        _without_kl(made, coeff, size / (size - 1) if args["advantage"] == "rloo" and size > 1 else 1.0)
        config["advantage_error"] = (2.0 + coeff) * 10.0 ** (1 - DIGITS) * max(sizes) if coeff else 0.0
    config["mask_truncated"] = bool(args.get("overlong_filter"))
    ends = [] if of_agents else run.ends  # templates end turns that were cut
    config |= {"eos_token_id": ends or None} | ({"advantage": args["advantage"]} if is_plain else {})
    if by_gae:
        config |= {"advantage": "gae", "gamma": args["gae_gamma"], "lambd": args["gae_lambd"]}
        config["kl_coeff"] = run.metrics[number]["objective/kl_coeff"]
    return from_rows(made, config, f"step {number}")


def _is_whole_episode(row: Mapping[str, Any]) -> bool:
    """Whether a row is an episode; one whose facts were too large to be logged may have other rows."""
    facts = (row.get("columns") or {}).get("episode") or {}
    return bool(facts.get("rows") == 1)


def is_whole(args: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the logged rows are all of their step: one rank, and no episodes, which may be several rows."""
    count = (args.get("rollout_size") or 0) * (args.get("num_generations") or 1)
    one_rank = (args.get("devices") or 1) == (args.get("num_nodes") or 1) == 1
    return one_rank and len(rows) == count and not any(args.get(name) for name in OF_AGENTS)


def penalised(row: Mapping[str, Any], args: Mapping[str, Any]) -> float | None:
    """The score of which an advantage was made: less the penalties of length."""
    score: float | None = row["score"]
    if score is None:
        return None
    score -= (args.get("missing_eos_penalty") or 0.0) * bool(row.get("truncated"))
    if buffer := args.get("overlong_buffer"):
        over = kl.overlong(torch.tensor(float(sum(row["mask"]))), args["max_new_tokens"], buffer)
        score -= args["overlong_penalty"] * float(over)
    return score


def _gae(run: Run, rows: list[dict[str, Any]], number: int) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """What PPO's advantages are made of, by row; None where not all is logged, or actions are of several tokens."""
    args = run.args
    is_ppo = args.get("program") == "ppo" and args.get("termination_condition") == "fixed" and args.get("ngram") == 1
    coeff = run.metrics.get(number, {}).get("objective/kl_coeff") if is_ppo else None
    if not is_whole(args, rows) or any(row["score"] is None for row in rows) or coeff is None:
        return None
    if coeff and any(row["log_ratio"] is None for row in rows):
        return None

    def made_of(row: dict[str, Any]) -> dict[str, Any]:
        ratios = torch.tensor([value or 0.0 for value in row["log_ratio"] or row["mask"]], dtype=torch.float64)
        of_tokens = KL_ESTIMATORS[args["kl_estimator"]](ratios, torch.zeros_like(ratios)) if coeff else 0.0 * ratios
        rewards = -coeff * of_tokens * torch.tensor(row["mask"])
        rewards[max(i for i, is_on in enumerate(row["mask"]) if is_on)] += row["score"]
        made = {"token_rewards": rewards.tolist(), "values": row["values"], "advantages": row["advantages"]}
        return made | {"kl": of_tokens.tolist()}

    return made_of


def _without_kl(rows: list[dict[str, Any]], coeff: float, scale: float) -> None:
    """Add to each advantage what the KL in the reward took from it: its coefficient times the row's less the mean."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row["rewards"] is not None:
            groups.setdefault(row["group"], []).append(row["row_kl"])
    for row in rows:
        kl, others = row.pop("row_kl"), groups.get(row["group"], [])
        if row["rewards"] is not None and len(others) > 1:
            row["advantages"] += coeff * scale * (kl - sum(others) / len(others))


def _ends(directory: Path) -> list[int]:
    """End tokens of the policy, by the generation config of its last checkpoint."""
    found = checkpoints(directory)
    file = found[-1] / "generation_config.json" if found else directory
    if not file.is_file():
        return []
    try:
        given = dict(json.loads(file.read_text(encoding="utf-8"))).get("eos_token_id")
    except (ValueError, TypeError) as problem:
        raise UsageError(f"{file} cannot be read: {first_line(problem)}; restore it") from None
    return given if isinstance(given, list) else [] if given is None else [given]


# ------------------------------------------------------------------------------------------- metrics and checkpoints
def check_run_files(directory: str) -> Iterator[Verdict]:
    """Verdicts beside the steps: on the first update, and on the weights of checkpoints."""
    for name, check in (("loss", check_logged_loss), ("start", check_start), ("weights", check_weights)):
        try:
            yield check(directory)
        except Missing as missing:
            yield Verdict(name, "cannot tell", evidence=f"needs {missing}")


def check_logged_loss(directory: str) -> Verdict:
    """The loss of steps of GRPO and PPO with one update, in which all ratios are 1: the advantages, weighted."""
    run, last = of_run(directory), None
    if any(run.args.get(name) for name in (*APART, *OF_AGENTS)) or run.args.get("loss_type", "clip") not in AT_ONE:
        raise Missing("a loss of ratios alone, of samples of this process")
    if not run.args.get("disable_dropout") or not is_wide(run.args):
        raise Missing("passes without dropout in float32: else the ratio of the first update is not 1")
    rows = read_rollouts(directory)
    for number, part in groupby(rows, key=lambda row: row["step"]):
        last = _check_loss(run, list(part), number) or last
        if last is not None and last.says == WRONG:
            return last
    if last is None:
        raise Missing("all rows of a step with one update, and its metrics (--log_rollouts, --log_interval 1)")
    return last


def _check_loss(run: Run, rows: list[dict[str, Any]], number: int) -> Verdict | None:
    """The verdict on the loss of a step; None where it cannot be told."""
    args, metrics = run.args, run.metrics.get(number, {})
    with_kl = bool(args.get("init_kl_coeff")) and args.get("kl_placement") == "loss"
    if not is_whole(args, rows) or metrics.get("policy/updates", _updates(args)) != 1 or "policy/loss" not in metrics:
        return None
    if any(row["score"] is None for row in rows) or (with_kl and any(row["log_ratio"] is None for row in rows)):
        return None
    made = []
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        one = {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + row["mask"], "group": row["group"]}
        logprobs = row["log_ratio"] or [0.0] * len(response)  # beside a reference of 0
        made.append(one | {"advantages": row["advantages"], "new_logprobs": logprobs, "old_logprobs": logprobs})
        made[-1] |= {"ref_logprobs": [0.0] * len(response)} if with_kl else {}
    config = {"method": "grpo", "digits": DIGITS, "loss_type": args.get("loss_type", "clip")}
    config |= {"clip_low": args["clip_coeff"], "clip_high": args.get("clip_coeff_high") or args["clip_coeff"]}
    config |= {"aggregation": args.get("aggregation", "token"), "max_new_tokens": args["max_new_tokens"]}
    config |= {"kl_coeff": args["init_kl_coeff"], "kl_estimator": "k2 weighted"} if with_kl else {}
    step = from_rows(made, config | {"loss": metrics["policy/loss"]}, f"step {number}")
    verdict = check_loss(step)
    if verdict.fault in NEED_LOGPROBS and (fit := [one for one in verdict.causes if one not in NEED_LOGPROBS]):
        verdict = verdict._replace(fault=fit[0], causes=tuple(fit) if len(fit) > 1 else ())
    return verdict._replace(evidence=f"{step.name}: {verdict.evidence}")


def check_start(directory: str) -> Verdict:
    """The first row of metrics: DPO begins at log 2, and one update a rollout has a ratio of 1."""
    args, first = read_args(directory), read_metrics(directory)[0]
    error = _unit(args) * LARGEST_LOGIT * ROUNDED
    if first["step"] != 1:
        raise Missing("a row of metrics of step 1 (log_interval 1)")
    if not args.get("disable_dropout", True):
        raise Missing("disable_dropout: with dropout the first pass differs from the stored one")
    if (meant := _loss_at_reference(args)) is not None and (name := LOSS_OF[args["program"]]) in first:
        found, gap = first[name], error * args["beta"] * 1e3 * max(1.0, meant)  # tokens of two responses, at most
        evidence = f"{name} {found:.6g} at step 1; {args['loss_type']} is {meant:.6g} at the reference"
        if abs(found - meant) <= gap:
            return Verdict("start", RIGHT, evidence=evidence)
        causes = ("the reference is another model", "an adapter is missing in the reference", "dropout")
        return Verdict("start", WRONG, "reference is not the start", evidence, causes, "--sft_experiment_dir")
    if first.get("policy/updates", _updates(args)) == 1 and not args.get("rollout_server") and "policy/ratio" in first:
        found, evidence = first["policy/ratio"], f"mean ratio {first['policy/ratio']:.6g} in the only update of step 1"
        if abs(found - 1) <= error:
            return Verdict("start", RIGHT, evidence=evidence)
        causes = ("dropout in one of the passes", "another temperature", "stale weights of the sampler")
        return Verdict("start", WRONG, "ratio not 1 at the first pass", evidence, causes, "--disable_dropout")
    raise Missing("dpo or kto with a loss of log-ratios alone, or one update for each rollout")


def _loss_at_reference(args: Mapping[str, Any]) -> float | None:
    """The loss of pairs or labelled responses where policy and reference are one; None where that is not known."""
    if args.get("ref_model") or args.get("program") not in LOSS_OF:
        return None
    kind, alone = args["loss_type"], torch.zeros(2, dtype=torch.float64)
    if args["program"] == "kto":
        if (args["desirable_weight"], args["undesirable_weight"]) != (1.0, 1.0):
            return None
        labels = torch.tensor([True, False])
        given = Responses(policy_logps=alone, ref_logps=alone, desirable=labels, beta=args["beta"])
        return float(UNPAIRED_LOSSES[kind](given).mean())
    apart = {*preference.REFERENCE_FREE, *preference.SOFT_LABEL_LOSSES, "raft"}
    if kind in apart or args.get("length_alpha") or args.get("rapo"):
        return None
    divergence = partial(preference.DIVERGENCES[args["f_divergence"]], alpha=args["f_alpha"])
    sides = [f"{model}_{side}_logps" for model in ("policy", "ref") for side in ("chosen", "rejected")]
    options: dict[str, Any] = {
        "beta": args["beta"],
        "label_smoothing": args["label_smoothing"],
        "divergence": divergence,
    }
    options |= dict.fromkeys(sides, alone)
    return float(preference.LOSSES[kind](preference.Pairs(**options)).mean())


def _updates(args: Mapping[str, Any]) -> int:
    """Updates that a rollout of `grpo` gets; 0 for other programs."""
    if args.get("program") != "grpo":
        return 0
    return int(math.ceil(args["rollout_size"] * args["num_generations"] / args["mini_batch_size"]) * args["ppo_epochs"])


def _unit(args: Mapping[str, Any]) -> float:
    """Rounding of the passes, by the run's precision."""
    half = "bfloat16" if "bf16" in str(args.get("precision")) else "float16"
    return UNITS["float32" if is_wide(args) else half]


def is_wide(args: Mapping[str, Any]) -> bool:
    """Whether passes are in float32."""
    return str(args.get("precision", "32")).startswith("32")


def check_weights(directory: str) -> Verdict:
    """The weights of the first and the last checkpoint: finite, and not the same."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folders = checkpoints(Path(directory))
    if len(folders) < 2:
        raise Missing("two checkpoints")
    count = 0
    same: list[str] = []
    changed: list[str] = []
    for file in sorted(folders[-1].glob("*.safetensors")):
        other = folders[0] / file.name
        try:
            last, before = load_file(file), load_file(other) if other.is_file() else {}
        except (SafetensorError, OSError) as problem:
            raise UsageError(f"{file} or {other} cannot be read: {first_line(problem)}; restore it") from None
        for name, weight in last.items():
            if not bool(weight.isfinite().all()):
                causes = ("overflow of float16", "a learning rate that is too high")
                return Verdict("weights", WRONG, "weights are not finite", f"{folders[-1].name}: {name}", causes)
            if name in before:
                count += 1
                (same if torch.equal(before[name], weight) else changed).append(name)
    if not count:
        raise Missing("weights as safetensors in both checkpoints")
    evidence = f"{len(changed)} of {count} tensors differ between {folders[0].name} and {folders[-1].name}"
    if changed and read_args(directory).get("finetune_mode") == "last_layer":
        top = max(_layer(name) for name in [*same, *changed])
        if beyond := [name for name in changed if 0 <= _layer(name) < top]:
            evidence = f"{beyond[0]}; {evidence}"
            return Verdict("weights", WRONG, "frozen weights changed", evidence, (), "--finetune_mode")
    if changed or not _learns(directory):
        return Verdict("weights", RIGHT, evidence=evidence)
    why = ("all parameters frozen", "the optimiser has others than the model", "gradients of 0")
    return Verdict("weights", WRONG, "weights did not change", evidence, why, "--finetune_mode")


def _layer(name: str) -> int:
    """The number of the layer in a weight's name; -1 for others."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _learns(directory: str) -> bool:
    """Whether a step had a gradient and a learning rate above 0."""
    rows = read_metrics(directory)
    return any(row.get("train/lr") and (row.get("train/grad_norm") or row.get("policy/grad_norm")) for row in rows)
