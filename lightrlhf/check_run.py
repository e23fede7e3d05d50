"""Find the fault in a run of any trainer: recompute a step in float64 and name what differs.

    lightrlhf check_run step.npz

Input is a step as arrays (`lightrlhf/checks/step.py` has the schema; all fields are optional), or an experiment dir of
ours, whose rollouts, metrics and checkpoints are read; `lightrlhf.checks.trl` records TRL's steps. From the
arrays alone: which tokens the loss counts, responses of a group that are one text, log-probabilities that cannot be,
the ratio at the first pass, rewards to advantages, the KL term, and the loss of PPO, GRPO, DPO and SFT, each token's
weight included. Of a recorded step also: rows against the data set and its template, batches against each row by
itself, samples against the policy, what the optimiser changed, its learning rate, and the reference. Where numbers do
not fit the formula that the settings name, the known formula or fault that fits them is named. `--follow True` looks at
the curves instead: equal groups, truncation, KL, reward against audit. Tolerances are the rounding of the numbers,
never a tuned threshold. Exits with status 1 when a check is wrong.

With the weights (`--model_name`; our own runs find their checkpoint) log-probabilities of sampled rows are recomputed,
in float64 where the model fits, and what explains a gap is named: temperature, top_p and top_k, rounding, prompt,
versions, adapters, dropout; then the norm of the gradient, and what a step changed (`--model_after`).

Left out: states of optimisers, and text against a chat template (`lightrlhf check_data`). A loss of one's own is only
said to differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightrlhf.checks.advantages import check_advantages
from lightrlhf.checks.curves import diagnose, read_curves
from lightrlhf.checks.logprobs import check_kl, check_logprobs, check_ratio
from lightrlhf.checks.losses import check_loss
from lightrlhf.checks.masks import check_mask, check_members, check_texts
from lightrlhf.checks.pairs import check_pairs
from lightrlhf.checks.passes import check_passes, check_samples
from lightrlhf.checks.readers import read_foreign
from lightrlhf.checks.recomputed import Models, check_own, check_recomputed
from lightrlhf.checks.runs import check_run_files, read_run
from lightrlhf.checks.step import Missing, Step, read_steps
from lightrlhf.checks.updates import check_rate, check_reference, check_update
from lightrlhf.checks.verdicts import CANNOT_TELL, RIGHT, WRONG, Verdict, is_wrong, show, write
from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import Args, check_args, flag
from lightrlhf.cli.lists import paths
from lightrlhf.cli.parser import parse
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.run_dir import is_experiment_dir

CHECKS: dict[str, Callable[[Step], Verdict]] = {
    "texts": check_texts,
    "mask": check_mask,
    "members": check_members,
    "pairs": check_pairs,
    "logprobs": check_logprobs,
    "passes": check_passes,
    "samples": check_samples,
    "ratio": check_ratio,
    "advantages": check_advantages,
    "kl": check_kl,
    "loss": check_loss,
    "update": check_update,
    "rate": check_rate,
    "reference": check_reference,
}


@dataclass(frozen=True, kw_only=True)
class CheckRunArgs(Args):
    """Recompute steps of a run in float64, and name what is wrong in them."""

    run: str = flag(positional=True)
    """A step (.npz, or a folder with rows.jsonl), a folder of steps, or an experiment dir."""
    follow: bool = False
    """Diagnose the curves so far (metrics.jsonl, trainer_state.json, TensorBoard's files), not the steps."""
    model_name: str | None = None
    """Weights before the step: a folder, experiment dir or hub name; then log-probabilities are recomputed."""
    reference_model: str | None = flag(None, needs="model_name", show="rarely")
    """Weights of the reference."""
    other_models: list[str] = flag([], split=paths, needs="model_name", show="rarely")
    """Other versions of the weights, which might have been used instead."""
    model_after: str | None = flag(None, needs="model_name", show="rarely")
    """Weights after the step."""
    output_file: str | None = flag(None, check=check_output)
    """JSON file for the results."""


def run(args: CheckRunArgs) -> list[Verdict]:
    """Check a run; returns a verdict for each check. Raises: UsageError when it cannot be read."""
    check_args(args, CheckRunArgs)
    if args.follow:
        verdicts = diagnose(read_curves(args.run))
    elif is_experiment_dir(args.run):
        verdicts = check_experiment(args.run)
    else:
        steps = read_foreign(args.run) or read_steps(args.run)
        verdicts = check_steps(steps)
        if args.model_name is not None:
            models = Models(args.model_name, args.reference_model, args.model_after, args.other_models)
            verdicts += check_recomputed(steps, models)
    show(args.run, verdicts)
    if args.output_file is not None:
        write(args.output_file, verdicts)
    return verdicts


def check_experiment(directory: str) -> list[Verdict]:
    """One verdict a check on a run of ours. Raises: UsageError when its files are not a run's."""
    try:
        return strongest([*check_steps(read_run(directory)), *check_run_files(directory), *check_own(directory)])
    except KeyError as problem:
        raise UsageError(f"{directory}/args.json has no {problem}; check it with the version that wrote it") from None


def check_steps(steps: Iterable[Step]) -> list[Verdict]:
    """One verdict a check over all steps: the first that is wrong, else right where any is."""
    return strongest(_check(step, name, check) for step in steps for name, check in CHECKS.items())


def _check(step: Step, name: str, check: Callable[[Step], Verdict]) -> Verdict:
    """The verdict of a check on a step; without its fields it cannot tell."""
    try:
        verdict = check(step)
    except Missing as missing:
        return Verdict(name, CANNOT_TELL, evidence=f"needs {missing}")
    return verdict._replace(evidence=f"{step.name}: {verdict.evidence}") if verdict.says == WRONG else verdict


def strongest(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """One verdict a check: the first that is wrong, else the first that is right, else the first."""
    found: dict[str, Verdict] = {}
    order = (CANNOT_TELL, RIGHT, WRONG)
    for one in verdicts:
        if one.name not in found or order.index(one.says) > order.index(found[one.name].says):
            found[one.name] = one
    return list(found.values())


@one_line_errors
def main(argv: list[str] | None = None) -> list[Verdict]:
    """Run the program; exits with status 1 when a check is wrong, else returns the verdicts."""
    verdicts = run(parse(CheckRunArgs, argv))
    if is_wrong(verdicts):
        sys.exit(1)
    return verdicts


if __name__ == "__main__":
    main()
