"""The checks that need the weights: of the first steps of arrays, and of our own runs at their checkpoints.

The weights belong to one step: of a folder of steps the first that has sampler's, old or the reference's
log-probabilities, and the first that has new ones. In our `rollouts.jsonl` stands the gap of policy and reference; the
weights of both are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightrlhf.checks import gaps, gradient, teachers, weights
from lightrlhf.checks.capture import alone
from lightrlhf.checks.masks import check_members
from lightrlhf.checks.passes import check_samples
from lightrlhf.checks.runs import DIGITS, is_wide, read_rollouts
from lightrlhf.checks.step import Missing, Step, from_rows
from lightrlhf.checks.verdicts import CANNOT_TELL, WRONG, Verdict
from lightrlhf.checks.weights import Weights
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.programs import TRAINING
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.run_dir import read_args

MOST_SAMPLES = 32  # rows
SAMPLER, TRAINER = ("sampler_logprobs",), ("old_logprobs", "new_logprobs")


class Models(NamedTuple):
    """Names of the weights that the user gives."""

    policy: str  # of the step, before its update
    reference: str | None = None
    after: str | None = None
    others: Sequence[str] = ()


def check_recomputed(steps: Sequence[Step], models: Models) -> Iterator[Verdict]:
    """Verdicts on sampler, trainer, reference, gradient and update."""
    policy = weights.load(models.policy, "--model_name")
    known = surroundings(policy, models.others)
    yield _verdict("sampler", lambda: _of_arrays(steps, SAMPLER, policy, known, "sampler"))
    yield _verdict("trainer", lambda: _of_arrays(steps, TRAINER, policy, known, "trainer"))
    yield _verdict("ref", lambda: _of_reference(steps, models, known))
    made: list[gradient.Recomputed] = []

    def check_norm() -> Verdict:
        step = _first(steps, ("new_logprobs",))
        if models.after is None:
            step.need("total_grad_norm")
        made.append(gradient.recompute(step, policy))
        return gradient.check_norm(step, made[0])

    yield _verdict("gradient", check_norm)
    yield _verdict("weights", lambda: _of_update(steps, models, policy, made))


def surroundings(policy: Weights, others: Sequence[str]) -> gaps.Known:
    """Other versions, and what the tokenizer beside the weights says of prompts."""
    loaded = [weights.load(name, "--other_models") for name in others]
    for one in loaded:
        if sizes_of(one) != sizes_of(policy):
            raise UsageError(
                f"--other_models {one.name} is not a version of {policy.name}: its layers have other sizes"
            )
    try:
        tokenizer = load_tokenizer(None, policy.name)
    except UsageError:
        return gaps.Known(loaded)
    templates = _templates(tokenizer) if tokenizer.chat_template else ()
    return gaps.Known(loaded, tokenizer.bos_token_id, tokenizer.pad_token_id or 0, templates)


def sizes_of(one: Weights) -> tuple[Any, ...]:
    """Architecture, vocabulary, and number and sizes of layers."""
    config = one.model.config.get_text_config()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return (config.model_type, *(getattr(config, name, None) for name in names))


def _templates(tokenizer: Tokenizer) -> tuple[Callable[[list[int]], list[int] | None], ...]:
    """A prompt's text as a user's message in the chat template, and without the template around it."""

    def render(text: str) -> str:
        message = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # Raw text: prompts of the user's data, to see which ids another template makes.
    before, _, after = render("\0").partition("\0")

    def put_in(ids: list[int]) -> list[int] | None:
        return ids_of(render(str(tokenizer.decode(ids, skip_special_tokens=True))))

    def take_out(ids: list[int]) -> list[int] | None:
        text = str(tokenizer.decode(ids))
        return ids_of(text.removeprefix(before).removesuffix(after)) if text.endswith(after) and after else None

    def without_end(ids: list[int]) -> list[int] | None:
        rest = ids_of(after.rpartition("\n")[0] or after)
        end = ids_of(after)
        start = ids[: len(ids) - len(end)] if end and ids[-len(end) :] == end else None
        return start + rest[: len(end) - 1] if start else None

    return put_in, take_out, without_end


def _verdict(check: str, make: Callable[[], Verdict]) -> Verdict:
    """The verdict of a check; without its fields it cannot tell."""
    try:
        return make()
    except Missing as missing:
        return Verdict(check, CANNOT_TELL, evidence=f"needs {missing}")


def _first(steps: Sequence[Step], names: Sequence[str]) -> Step:
    """The first step with one of the arrays. Raises: Missing."""
    found = next((step for step in steps if any(name in step and step.get(name).ndim == 2 for name in names)), None)
    if found is None:
        raise Missing(f"{' or '.join(names)} of tokens")
    return found


def _of_arrays(steps: Sequence[Step], names: Sequence[str], policy: Weights, known: gaps.Known, check: str) -> Verdict:
    """The first array of these that is wrong, else the first."""
    _first(steps, names)
    verdicts = []
    for name in names:
        step = next((one for one in steps if name in one and one.get(name).ndim == 2), None)
        if step is not None and not _is_same(step, name, names[0]):
            found = gaps.check_array(step, name, policy, known, check, is_sampler=check == "sampler")
            is_first = step.config.get("first_pass") or ("old_logprobs" not in step and step.name == steps[0].name)
            if name == "new_logprobs" and found.says == WRONG and not is_first:
                continue  # of later weights
            verdicts.append(found)
    if not verdicts:
        raise Missing("old_logprobs, or first_pass: new_logprobs may be of later weights")
    return next((one for one in verdicts if one.says == WRONG), verdicts[0])


def _is_same(step: Step, name: str, first: str) -> bool:
    """Whether an array is another one again."""
    return name != first and first in step and torch.equal(step.get(name), step.get(first))


def _of_reference(steps: Sequence[Step], models: Models, known: gaps.Known) -> Verdict:
    """The reference's array beside its weights."""
    step = _first(steps, ("ref_logprobs",))
    if models.reference is None:
        raise Missing("--reference_model")
    reference = weights.load(models.reference, "--reference_model")
    return gaps.check_array(step, "ref_logprobs", reference, known, "ref", is_sampler=False)


def _of_update(steps: Sequence[Step], models: Models, policy: Weights, made: list[gradient.Recomputed]) -> Verdict:
    """The weights after the step beside those before."""
    if models.after is None:
        raise Missing("--model_after")
    after = weights.load(models.after, "--model_after")
    step = next((one for one in steps if "learning_rate" in one), steps[0])
    return gradient.check_update(step, policy, after, made[0].gradient if made else None)


# ------------------------------------------------------------------------------------------------------------ own runs
class Logged(NamedTuple):
    """Rows that the weights of a checkpoint sampled."""

    args: dict[str, Any]
    version: int
    rows: Sequence[dict[str, Any]]
    policy: Weights


def check_own(directory: str) -> Iterator[Verdict]:
    """Verdicts on our own run at the last checkpoint that sampled logged rows: its log-probabilities and samples,
    and the divergence from a teacher."""
    try:
        logged = _logged(directory)
    except Missing as missing:
        yield Verdict("trainer", CANNOT_TELL, evidence=f"needs {missing}")
        return
    yield _verdict("trainer", lambda: _of_trainer(logged))
    yield _verdict("samples", lambda: check_samples(sampled(logged)))
    yield _verdict("members", lambda: check_members(sampled(logged)))
    if logged.args.get("program") == "distill":
        yield _verdict("kl", lambda: _of_teacher(logged))


def _logged(directory: str) -> Logged:
    """The rows of the last version of the weights that is a checkpoint. Raises: Missing."""
    args, folders = read_args(directory), {int(one.name.split("-")[1]): one for one in checkpoints(Path(directory))}
    rows = [row for row in read_rollouts(directory) if any(row["mask"])]
    versions = sorted({row.get("version", -1) for row in rows} & {*folders})
    if not versions:
        raise Missing("rows sampled by the weights of a checkpoint (--log_rollouts, --save_interval, --log_interval)")
    if args.get("max_staleness") or args.get("rollout_server"):
        raise Missing("rows whose version of the weights is the step's, without servers")
    if args.get("program") in TRAINING and TRAINING[args["program"]].data == "environment":
        raise Missing("rows of one text: each decision of an episode reads another prompt")
    try:
        policy = weights.load(str(folders[versions[-1]]), "--model_name")
    except UsageError as problem:
        raise Missing(f"weights that can be read: {problem}") from problem
    return Logged(args, versions[-1], [row for row in rows if row.get("version") == versions[-1]], policy)


def _start_of(args: dict[str, Any]) -> Weights:
    """The weights that a run began from. Raises: Missing."""
    start = args.get("sft_experiment_dir") or args.get("model_name")
    if start in (None, "tiny") or args.get("base_dtype") == "bfloat16":
        raise Missing("the weights that the run started from")
    return _load(str(start))


def _load(name: str) -> Weights:
    """Weights of a name in the arguments of a run. Raises: Missing."""
    try:
        return weights.load(name, "--model_name")
    except UsageError as problem:
        raise Missing(f"weights that can be read: {problem}") from problem


def _of_trainer(logged: Logged) -> Verdict:
    """The logged gap plus the reference's log-probabilities are the policy's."""
    rows = [row for row in logged.rows if row.get("log_ratio")]
    if not rows:
        raise Missing("rollouts.jsonl with log_ratio (--init_kl_coeff)")
    reference = _start_of(logged.args)
    step = _with_policy(rows, logged.version, logged.args, reference)
    return gaps.check_array(step, "old_logprobs", logged.policy, gaps.Known([reference]), "trainer", is_sampler=False)


def sampled(logged: Logged) -> Step:
    """Some of the rows, with the log-probabilities and entropies of what was sampled."""
    args, size = logged.args, logged.policy.model.config.get_text_config().vocab_size
    rows = [row for row in logged.rows if max(row["prompt_ids"] + row["response_ids"]) < size][:MOST_SAMPLES]
    if not rows:
        raise Missing("rows of ids of the checkpoint's vocabulary")
    temperature = float(args.get("temperature") or 1.0)
    given = []
    for row in rows:
        ids = row["prompt_ids"] + row["response_ids"]
        one = {"input_ids": ids, "loss_mask": [0] * len(row["prompt_ids"]) + row["mask"], "group": row["group"]}
        (made,) = alone(logged.policy.model, [torch.tensor(ids)], temperature)
        one |= {"alone_logprobs": made.logprobs.tolist(), "alone_entropy": made.entropy.tolist()}
        given.append(one | {"alone_spread": made.spread.tolist()})
    config = {name: args.get(name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return from_rows(given, config, f"version {logged.version}")


def _of_teacher(logged: Logged) -> Verdict:
    """The logged divergence from the teacher of each token."""
    args, known = logged.args, ("exact", "k1")
    if args.get("estimator") not in known or args.get("privileged_column") or args.get("teacher_column"):
        raise Missing(f"one teacher that reads the prompt, and the estimator {' or '.join(known)}")
    if not is_wide(args):
        raise Missing("passes in float32")
    if args.get("teacher_server") or (args.get("teacher") is None and args.get("own_teacher") != "start"):
        raise Missing("the teacher's weights")
    teacher = _load(str(args["teacher"])) if args.get("teacher") else _start_of(args)
    step = from_rows([_told(row) for row in logged.rows], {"digits": DIGITS}, f"version {logged.version}")
    return teachers.check_divergence(step, logged.policy, teacher, args["estimator"])


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose advantages are less the divergence."""
    mask = [0] * len(row["prompt_ids"]) + row["mask"]
    told = [None if value is None else -value for value in row["advantages"]]
    return {"input_ids": row["prompt_ids"] + row["response_ids"], "loss_mask": mask, "kl": told}


def _first_turn(mask: list[int]) -> list[int]:
    """The mask of the first turn alone: only the turn that a dialogue's reward is of has log-probabilities."""
    start = mask.index(1) if 1 in mask else len(mask)
    end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
    return [*mask[:end], *[0] * (len(mask) - end)]


def _with_policy(rows: Sequence[dict[str, Any]], version: int, args: dict[str, Any], reference: Weights) -> Step:
    """A step of the rows of a version, whose old log-probabilities are logged gap plus reference."""
    one_turn = args.get("program") in TRAINING and TRAINING[args["program"]].data == "dialogue"
    given = [
        {
            "input_ids": row["prompt_ids"] + row["response_ids"],
            "loss_mask": [0] * len(row["prompt_ids"]) + (_first_turn(row["mask"]) if one_turn else row["mask"]),
            "old_logprobs": row["log_ratio"],
        }
        for row in rows
    ]
    config = {"method": args.get("program"), "digits": DIGITS, "temperature": args.get("temperature")}
    config["dtype"] = "float32" if is_wide(args) else None
    step = from_rows(given, config, f"version {version}")
    texts = weights.sample(step, reference.model.config.get_text_config().vocab_size)
    logits = weights.run(reference.model, texts)
    assert logits is not None
    temperature = float(args.get("temperature") or 1.0)
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, weights.targets(texts)[:, None])[:, 0]
    for text, values in zip(texts, logprobs.split([len(text.places) for text in texts])):
        step.arrays["old_logprobs"][text.number, text.columns] += values.to(torch.float64)
    return step
