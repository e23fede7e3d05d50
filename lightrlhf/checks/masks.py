"""Masks against ids, and responses of a group against each other."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from lightrlhf.checks.step import Missing, Step
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict

LONG, LEAST_GROUPS = 16, 4  # of texts and groups, so that a policy with one answer is not meant
CHANCE = 1e-9  # of a coincidence; below it there is a cause
GIVEN = ("sft", "dpo")  # train on texts of templates, which may write a line break behind the end token


Fault = tuple[str, Tensor, tuple[str, ...]]  # its name, where it is (B, T), and probable causes


def check_mask(step: Step) -> Verdict:
    """Which tokens the loss counts: the response to its end token, which belongs to it."""
    step.need("input_ids", "loss_mask")
    step.need_tokens()
    trained, attended = step.mask(), step.attended()
    if not bool(trained.any()):
        if step.config.get("mask_truncated") or ("truncated" in step and bool(step.get("truncated").all())):
            raise Missing("a trained token: truncated responses may be left out")
        return Verdict("mask", WRONG, "nothing is trained", f"none of {trained.numel()} tokens", (), "loss_mask")
    if "labels" in step and (shifted := _shifted(step, trained)) is not None:
        return shifted
    padding = trained & ~attended
    found: list[Fault] = [("padding trained", padding, ("a mask made before padding", "labels of padding not -100"))]
    if "response_mask" in step or "prompt_len" in step:
        found = _borders(trained, step.responses(), attended) + found
    if step.config.get("eos_token_id") not in (None, []):
        found += _ends(step, trained, attended)
    if step.config.get("bos_token_id") is not None:
        start = (step.whole("input_ids") == step.config["bos_token_id"]) & attended
        doubled = start & _after(start)
        if step.config.get("method") not in GIVEN and ("response_mask" in step or "prompt_len" in step):
            doubled &= ~step.responses()  # a policy may sample it
        found.append(("doubled start token", doubled, ("template and tokenizer both add it",)))
    for fault, where, causes in found:
        if bool(where.any()):
            row, token = where.nonzero()[0].tolist()
            many = f"{int(where.any(1).sum())} of {len(where)} rows, {int(where.sum())} tokens"
            first = f"first in row {row}, token {token}, id {int(step.get('input_ids')[row, token])}"
            return Verdict("mask", WRONG, fault, f"{many}; {first}", causes, "loss_mask")
    return Verdict("mask", RIGHT, evidence=f"{int(trained.sum())} tokens in {len(trained)} rows")


def _shifted(step: Step, trained: Tensor) -> Verdict | None:
    """A fault where labels are not the ids of their tokens."""
    labels, ids = step.whole("labels"), step.whole("input_ids")
    other = trained & (labels != ids)
    if not bool(other.any()):
        return None
    evidence = f"{int(other.sum())} of {int(trained.sum())} trained labels are not their tokens"
    for shift, name in ((-1, "labels one early"), (1, "labels one late")):
        moved = trained & (labels != ids.roll(shift, 1))
        if int(moved.sum()) <= len(labels):  # but for a token at the end of each row
            return Verdict("mask", WRONG, name, evidence, ("shifted by hand; the model shifts, too",), "labels")
    return Verdict("mask", WRONG, "labels of other tokens", evidence, ("rows misaligned",), "labels")


def _borders(trained: Tensor, response: Tensor, attended: Tensor) -> list[Fault]:
    """Faults at the border of prompt and response, the most specific first; all (B, T) bool."""
    first, last = response & (response.cumsum(1) == 1), response & (response.flip(1).cumsum(1).flip(1) == 1)
    rows, of_prompt = trained.any(1), trained & ~response & attended
    before = _before(first)
    is_early = bool(((of_prompt & before).any(1) & ~(trained & last).any(1))[rows].all())
    is_early &= not bool((of_prompt & ~before).any())
    untrained = first & ~trained & _before(trained)
    is_late = bool((untrained.any(1) & ~of_prompt.any(1))[rows].all())
    of_inputs = "the mask belongs to inputs, not to targets"
    return [
        ("mask one early", of_prompt & is_early, (of_inputs, "shifted twice")),
        ("prompt tokens trained", of_prompt, ("prompt_len of another tokenisation", "no mask of the prompt")),
        ("mask one late", untrained & is_late, (of_inputs, "prompt_len counts a token too many")),
    ]


def _ends(step: Step, trained: Tensor, attended: Tensor) -> list[Fault]:
    """Faults around end tokens. A row with gaps has several turns, each with its own end."""
    is_end = torch.isin(step.whole("input_ids"), torch.tensor(sorted(step.ends())))  # (B, T); padding may be one
    one_turn = (trained & ~_after(trained)).sum(1) <= 1  # (B,)
    ended = (is_end & trained).long()  # (B, T)
    is_sampled = step.config.get("method") not in GIVEN
    after = trained & one_turn[:, None] & (ended.cumsum(1) - ended > 0) & is_sampled
    found: list[Fault] = [
        ("tokens after the end trained", after, ("end tokens of padding counted", "a doubled end token"))
    ]
    untrained = is_end & _after(trained) & ~trained & attended & (not bool(ended.any()))
    found.append(("end token not trained", untrained, ("padding is the end token", "ids != pad as the mask")))
    lengths = trained.sum(1)
    complete = torch.zeros_like(one_turn)
    if "truncated" in step:
        complete = step.get("truncated") == 0
    elif step.config.get("max_new_tokens"):
        complete = lengths < step.config["max_new_tokens"]
    last = trained & (trained.flip(1).cumsum(1).flip(1) == 1)  # (B, T)
    lacks = last & (complete & one_turn & ~ended.any(1))[:, None]
    found.append(("end token missing", lacks, ("a stop string was removed", "tokenised again without the end")))
    return found


def _before(where: Tensor) -> Tensor:
    """The place before each True: (B, T) bool."""
    return torch.nn.functional.pad(where[:, 1:], (0, 1))


def _after(where: Tensor) -> Tensor:
    """The place after each True: (B, T) bool."""
    return torch.nn.functional.pad(where[:, :-1], (1, 0))


def check_texts(step: Step) -> Verdict:
    """Rows are the data set's and the template's, and rewarded texts belong to their rows."""
    given = [one for one in ("differs_at", "is_known", "rewarded_row") if one in step]
    if not given:
        raise Missing("differs_at, is_known, or rewarded_row")
    if "rewarded_row" in step:
        rows = step.get("rewarded_row")
        other = (~rows.isnan() & (rows != torch.arange(len(rows)))).nonzero()[:, 0].tolist()
        if other:
            first = (
                f"{len(other)} of {len(rows)} rows, first {other[0]}: it has the reward of row {int(rows[other[0]])}"
            )
            return Verdict("texts", WRONG, "rewarded text of another row", first, ("rows misaligned",), "reward_funcs")
    if "differs_at" in step and bool((~step.get("differs_at").isnan()).any()):
        where = step.get("differs_at")
        row = int((~where.isnan()).nonzero()[0])
        first = f"{int((~where.isnan()).sum())} of {len(where)} rows, first row {row} from its token {int(where[row])}"
        causes: tuple[str, ...] = (
            "another template",
            "a template without its generation prompt",
            "tokens added or cut by hand",
        )
        return Verdict("texts", WRONG, "ids are not the template's of the text", first, causes, "chat_template")
    if "is_known" in step and bool((step.get("is_known") == 0).any()):
        unknown = (step.get("is_known") == 0).nonzero()[:, 0].tolist()
        first = f"{len(unknown)} of {len(step.get('is_known'))} rows, first {unknown[0]}"
        causes = ("the collator adds or drops tokens", "rows misaligned")
        return Verdict("texts", WRONG, "rows that the data set lacks", first, causes, "data_collator")
    return Verdict("texts", RIGHT, evidence=", ".join(given))


def check_members(step: Step) -> Verdict:
    """Responses of one group that are the same text, more often than chance gives."""
    step.need("input_ids", "loss_mask", "group")
    if (mixed := _mixed(step)) is not None:
        return mixed
    ids, trained, groups = step.whole("input_ids"), step.mask(), step.whole("group").tolist()
    texts = [tuple(row[mask].tolist()) for row, mask in zip(ids, trained)]
    members = Counter(zip(groups, texts))
    copies = {member: count for member, count in members.items() if count > 1 and member[1]}
    if not copies:
        return Verdict("members", RIGHT, evidence=f"{len(texts)} responses, no two of a group alike")
    if step.config.get("temperature") == 0 or step.config.get("top_k") == 1:
        raise Missing("sampling with noise: temperature 0 or top_k 1 makes all responses of a prompt alike")
    if step.is_cut():
        raise Missing(
            "top_p 1, top_k 0 and min_p 0: the chance of equal responses is not known where tokens were cut off"
        )
    kinds = ("sampler_logprobs", "old_logprobs", "new_logprobs", "alone_logprobs")
    name = next((one for one in kinds if one in step), None)
    if name is None:
        if (alike := _all_alike(groups, texts)) is not None:
            return alike
        raise Missing("old_logprobs or sampler_logprobs, to tell what chance gives")
    values = step.get(name)
    sums = torch.where(trained, values, 0.0).sum(1) if values.ndim == 2 else values  # (B,)
    sizes, chances = Counter(groups), []
    for (group, text), count in copies.items():
        row = next(i for i, member in enumerate(zip(groups, texts)) if member == (group, text))
        chances.append(math.log(math.comb(sizes[group], count)) + (count - 1) * float(sums[row]))
    log_chance = min(0.0, min(chances) + math.log(len(sizes)))  # at most, that any group has such copies
    rows = sum(copies.values())
    evidence = f"{rows} of {len(texts)} responses have a twin in their group; chance 10^{log_chance / math.log(10):.0f}"
    if log_chance > math.log(CHANCE):
        return Verdict("members", RIGHT, evidence=evidence)
    causes = ("one seed for all requests", "one response copied to all members", "temperature 0 where sampled")
    return Verdict("members", WRONG, "members share their noise", evidence, causes, "seed of the sampler")


def _all_alike(groups: list[int], texts: list[tuple[int, ...]]) -> Verdict | None:
    """A fault where each group has one long text, and no other group has it: no group has a signal to learn from."""
    by_group: dict[int, set[tuple[int, ...]]] = {}
    for group, text in zip(groups, texts):
        by_group.setdefault(group, set()).add(text)
    whole = {next(iter(members)) for members in by_group.values() if len(members) == 1}
    is_long = min(map(len, texts), default=0) >= LONG
    if len(whole) < max(len(by_group), LEAST_GROUPS) or len(texts) < 2 * len(by_group) or not is_long:
        return None
    evidence = f"all {len(texts)} responses of {len(by_group)} groups are the text of their group"
    causes = ("one seed for all requests", "temperature 0", "one response copied to all members")
    return Verdict("members", WRONG, "members share their noise", evidence, causes, "seed of the sampler")


def _mixed(step: Step) -> Verdict | None:
    """A fault where rows of a group have different prompts."""
    if "prompt_len" not in step or "attention_mask" not in step:
        return None
    before = step.attended() & ~step.responses()
    prompts = [tuple(row[on].tolist()) for row, on in zip(step.whole("input_ids"), before)]
    of_group: dict[int, set[tuple[int, ...]]] = {}
    for group, prompt in zip(step.whole("group").tolist(), prompts):
        of_group.setdefault(group, set()).add(prompt)
    mixed = [group for group, them in of_group.items() if len(them) > 1]
    if not mixed:
        return None
    many = f"{len(mixed)} of {len(of_group)} groups, first {mixed[0]} with {len(of_group[mixed[0]])} prompts"
    causes = ("rows shuffled before they were grouped", "an environment that draws a task for each member")
    return Verdict("members", WRONG, "prompts of a group differ", many, causes, "num_generations")
