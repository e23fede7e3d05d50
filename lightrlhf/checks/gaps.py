"""Which change of a pass explains the gap between log-probabilities as recorded and as recomputed with the weights.

What fits to rounding is named. Its size is the larger of a formula's and of passes of the same model in float32, or in
bfloat16. Dropout is random, so the mean size of the gap is compared to several passes with dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrlhf.checks import weights as passes
from lightrlhf.checks.logprobs import LARGEST_LOGIT, ROUNDED, UNLIKELY, moved
from lightrlhf.checks.step import UNITS, Step
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.checks.weights import Text, Weights
from lightrlhf.maths.student import interval

OTHER_KERNELS = 4  # times the gap of one pass in a dtype, another with the same dtype may have
DROPOUT_PASSES = 6
FITTED = 64  # tokens, of which a temperature is estimated
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Known(NamedTuple):
    """What surrounds the weights: other versions, and ids of the tokenizer."""

    others: Sequence[Weights] = ()
    bos_id: int | None = None
    pad_id: int = 0
    templates: Sequence[Callable[[list[int]], list[int] | None]] = ()  # a prompt with, or without, its chat template


class Case(NamedTuple):
    """Recorded numbers of one array beside the pass that should give them."""

    step: Step
    name: str
    found: Tensor  # (N,)
    texts: Sequence[Text]
    weights: Weights
    logits: Tensor  # (N, V)
    temperature: float  # that the numbers should have
    error: float  # that rounding makes in their mean size


def check_array(step: Step, name: str, weights: Weights, known: Known, check: str, is_sampler: bool) -> Verdict:
    """The verdict on one array of log-probabilities. Raises: Missing."""
    texts = passes.sample(step, weights.model.config.get_text_config().vocab_size)
    found = passes.recorded(step, name, texts)
    logits = passes.run(weights.model, texts)
    assert logits is not None
    temperature = float(step.config.get("temperature") or 1.0)
    case = Case(step, name, found.to(logits.dtype), texts, weights, logits, temperature, 0.0)
    case = case._replace(error=_error(case, "float32", torch.float32))
    plain = of_logits(case, logits, temperature)
    gap = size(case, plain)
    wide = str(weights.dtype).removeprefix("torch.")
    many = f"{len(found)} tokens of {len(texts)} rows in {wide}"
    evidence = f"{name} - recomputed: mean size {gap:.3g}, rounding makes {case.error:.2g} ({many}, {weights.name})"
    if gap <= case.error:
        return Verdict(check, RIGHT, evidence=evidence)
    if zeros := _zeros(case, plain):
        causes = ("missing ones read as 0", "arrays of tool tokens filled with 0")
        return Verdict(check, WRONG, "missing log-probabilities read as 0", f"{zeros}; {evidence}", causes, name)
    cut = dict(_cut(case, is_given=True)) if is_sampler else {}
    if fit := [one for one, values in cut.items() if size(case, values) <= case.error]:
        return Verdict(check, RIGHT, evidence=f"{fit[0]}, as sampled; {evidence}")
    return _explained(case, known, check, evidence, gap, is_sampler)


def _explained(case: Case, known: Known, check: str, evidence: str, gap: float, is_sampler: bool) -> Verdict:
    """The first explanations that fit to rounding of float32, else to rounding of bfloat16."""
    half = _half_error(case)
    near: dict[str, float] = {}
    fit: list[str] = []
    for part in (of_numbers(case), of_passes(case, known)):
        near |= {} if fit else dict(part)
        fit = [one for one, gap_left in near.items() if gap_left <= case.error]
    if not fit and gap <= half:
        given = str(case.step.config.get("dtype") or "").removeprefix("torch.")
        says = f"as passes in bfloat16 make ({half:.2g}); {evidence}"
        if given == "float32" and not is_sampler:
            return Verdict(
                check,
                WRONG,
                "rounded to half precision",
                says,
                ("autocast in this pass", "weights of another version"),
                "dtype",
            )
        return Verdict(check, RIGHT, evidence=says)
    if not fit and is_sampler:
        cut = dict(_cut(case, is_given=True))
        if named := [one for one, values in cut.items() if size(case, values) <= half]:
            return Verdict(check, RIGHT, evidence=f"{named[0]}, as sampled, rounded; {evidence}")
    if not fit:
        fit = sorted((one for one, value in near.items() if value <= half), key=near.__getitem__)
    fit = fit or _dropout(case, gap)
    if fit:
        return Verdict(check, WRONG, fit[0], evidence, tuple(fit) if len(fit) > 1 else (), case.name)
    causes = ("weights of another version", "another prompt or template", "quantised weights", "a mask of attention")
    where = _where(case)
    return Verdict(check, WRONG, "differs from the weights", f"{evidence}; {where}", causes, case.name)


def of_logits(case: Case, logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the tokens, (N,)."""
    ids = passes.targets(case.texts)
    return (logits / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def size(case: Case, values: Tensor) -> float:
    """Mean size of the gap to the recorded numbers; infinite where one is NaN."""
    return float((case.found - values).abs().mean().nan_to_num(torch.inf, torch.inf))


def _error(case: Case, name: str, dtype: torch.dtype) -> float:
    """What rounding to a dtype and of the written numbers makes of the mean size of a gap."""
    unit = UNITS[name] * LARGEST_LOGIT * ROUNDED if name == "float32" else 0.0
    measured = 0.0
    exact = of_logits(case, case.logits, case.temperature)
    if dtype != case.weights.dtype:
        for way in (passes.in_dtype, passes.autocast) if name != "float32" else (passes.in_dtype,):
            with way(case.weights.model, dtype) as model:
                other = passes.run(model, case.texts)
            assert other is not None
            values = of_logits(case, other.to(exact.dtype), case.temperature)
            measured = max(measured, float((values - exact).abs().mean()))
    written = case.step.unit * float(case.found.abs().mean().nan_to_num())
    return max(unit, OTHER_KERNELS * measured) + written


def _half_error(case: Case) -> float:
    """The same of bfloat16, which rounds most."""
    return max(case.error, _error(case, "bfloat16", torch.bfloat16))


def _zeros(case: Case, plain: Tensor) -> str:
    """How many are exactly 0 where the weights say otherwise, if the others fit; else empty."""
    zero = (case.found == 0) & (plain < UNLIKELY)
    rest = ~zero & (case.found != 0)
    fits = not bool(rest.any()) or float((case.found - plain)[rest].abs().mean()) <= max(case.error, _half_error(case))
    return f"{int(zero.sum())} of {len(zero)} tokens are 0" if bool(zero.any()) and fits else ""


# ---------------------------------------------------------------------------------------------------- what may explain
def of_numbers(case: Case) -> Iterator[tuple[str, float]]:
    """Names of faults that need no other pass, and the mean size of the gap that each leaves."""
    fitted = temperature_of(case)
    if fitted is not None and abs(fitted / case.temperature - 1) > 1e-3:
        yield f"temperature {fitted:.3g}, not {case.temperature:.3g}", size(case, of_logits(case, case.logits, fitted))
    for name, values in _cut(case, is_given=False):
        yield name, size(case, values)
    counts = [len(text.places) for text in case.texts]
    plain = of_logits(case, case.logits, case.temperature)
    found, plain, is_token = (
        F.pad(pad_sequence(values.split(counts), batch_first=True), (1, 0))  # moved values come from no other row
        for values in (case.found, plain, torch.ones_like(plain))
    )
    yield from moved(found, plain, is_token != 0).items()


def of_passes(case: Case, known: Known) -> Iterator[tuple[str, float]]:
    """The same of faults that need passes of their kind."""
    for name, one_pass in _passes(case, known):
        logits = passes.run(case.weights.model, case.texts, one_pass)
        if logits is not None:
            yield name, size(case, of_logits(case, logits, case.temperature))
    for name, values in (*_versions(case, known), *_adapters(case)):
        yield name, size(case, values)


def temperature_of(case: Case) -> float | None:
    """The temperature of least squares, by golden sections of its logarithm; None where it is at a bound."""
    low, high, share = math.log(0.02), math.log(50.0), (math.sqrt(5) - 1) / 2
    every = max(len(case.found) // FITTED, 1)
    logits, found, ids = case.logits[::every], case.found[::every], passes.targets(case.texts)[::every, None]

    def loss(at: float) -> float:
        values = (logits / math.exp(at)).log_softmax(-1).gather(-1, ids)[:, 0]
        return float((values - found).nan_to_num(neginf=-1e3).pow(2).mean())

    grid = torch.linspace(low, high, 40).tolist()
    best = min(range(len(grid)), key=lambda i: loss(grid[i]))
    if best in (0, len(grid) - 1):
        return None
    low, high = grid[best - 1], grid[best + 1]
    for _ in range(40):
        left, right = high - share * (high - low), low + share * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def _cut(case: Case, is_given: bool) -> Iterator[tuple[str, Tensor]]:
    """Log-probabilities renormalised over the tokens that top_k, top_p or min_p keep: as given, or as estimated."""
    for temperature in dict.fromkeys((case.temperature, 1.0)):
        plain = of_logits(case, case.logits, temperature)
        probs, order = (case.logits / temperature).softmax(-1).sort(-1, descending=True)  # (N, V)
        kept = probs.cumsum(-1)
        config = case.step.config
        count = _count(probs, kept, config) if is_given else None
        beside = f" at temperature {temperature:.3g}" if temperature != case.temperature else ""
        if count is not None:
            mass = kept.gather(-1, count[:, None] - 1)[:, 0]
            yield f"renormalised over the tokens that sampling keeps{beside}", plain - mass.log()
        if is_given:
            continue
        if temperature != case.temperature:
            yield f"temperature {temperature:.3g}, not {case.temperature:.3g}", plain
        if bool((case.found - plain < -case.error * OTHER_KERNELS).any()):
            continue  # renormalising only adds
        mass = (plain - case.found).exp()  # what was kept, (N,)
        k = int((kept.log() - mass.log()[:, None]).abs().mean(0).argmin())
        if k + 1 < probs.shape[-1]:
            yield f"renormalised over top_k {k + 1}{beside}", plain - kept[:, k].log()
        top_p = float(mass.min())
        nucleus = ((kept - probs) < top_p * (1 - 1e-6)).sum(-1).clamp(min=1)
        if bool((nucleus < probs.shape[-1]).any()):
            in_nucleus = kept.gather(-1, nucleus[:, None] - 1)[:, 0]
            yield f"renormalised over top_p {top_p:.2g}{beside}", plain - in_nucleus.log()


def _count(probs: Tensor, kept: Tensor, config: Mapping[str, object]) -> Tensor | None:
    """How many of the ordered tokens the settings keep, (N,); None where they keep all."""
    top_k, top_p, min_p = (float(str(config.get(one) or 0)) for one in ("top_k", "top_p", "min_p"))
    count = torch.full_like(probs[:, 0], probs.shape[-1])
    if 0 < top_k < probs.shape[-1]:
        count = count.clamp(max=top_k)
    if 0 < top_p < 1:
        whole = kept.gather(-1, count.long()[:, None] - 1)  # the mass of what is left
        count = torch.minimum(count, ((kept - probs) < top_p * whole).sum(-1).to(count))
    if min_p > 0:
        count = torch.minimum(count, (probs >= min_p * probs[:, :1]).sum(-1).to(count))
    return count.long() if bool((count < probs.shape[-1]).any()) else None


def _passes(case: Case, known: Known) -> Iterator[tuple[str, passes.Pass]]:
    """Passes over other prompts and with padding that is read."""
    if known.bos_id is not None:
        bos = known.bos_id
        yield "start token missing", passes.of_prompt(lambda ids: ids[1:] if ids[0] == bos else None)
        yield "start token added", passes.of_prompt(lambda ids: [bos, *ids])
    yield "prompt missing", passes.of_prompt(lambda ids: ids[-1:])
    for change in known.templates:
        yield "prompt of another template", passes.of_prompt(change)
    for share in (0.25, 0.5, 0.75):
        yield "prompt cut at its start", passes.of_prompt(lambda ids, share=share: ids[int(len(ids) * share) :])  # type: ignore[misc]
    if any(text.padding for text in case.texts):
        yield "positions count padding", passes.of_padding(False, known.pad_id)
        yield "padding is read", passes.of_padding(True, known.pad_id)
    for other in known.others:
        yield f"stale prefix cache of {other.name}", passes.of_old_cache(other.model)


def _versions(case: Case, known: Known) -> Iterator[tuple[str, Tensor]]:
    """Other versions of the weights, as one and by row."""
    found = [of_logits(case, case.logits, case.temperature)]
    for other in known.others:
        logits = passes.run(other.model, case.texts)
        assert logits is not None
        found.append(of_logits(case, logits.to(case.logits.dtype), case.temperature))
        yield f"weights of another version: {other.name}", found[-1]
    if len(found) > 1:
        counts = [len(text.places) for text in case.texts]
        by_row = zip(case.found.split(counts), *(values.split(counts) for values in found))
        rows = [min(each, key=lambda one: float((one - row).abs().mean())) for row, *each in by_row]
        yield "rows of several versions", torch.cat(rows)


def _adapters(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Adapters left out, of another scale, and merged otherwise."""
    model = case.weights.model
    layers = list(passes.lora_layers(model).values())
    if not layers:
        return
    name = next(iter(layers[0].scaling))
    rank, scaling = layers[0].r[name], layers[0].scaling[name]
    ways = {"adapter missing": 0.0, "adapter applied twice": 2.0, "adapter without its scale": 1 / scaling}
    ways |= {"alpha not divided by the rank": rank, "alpha divided by the root of the rank": math.sqrt(rank)}
    ways["alpha divided by the rank, not by its root"] = 1 / math.sqrt(rank)
    for fault, factor in ways.items():
        if factor != 1:
            with passes.adapters_scaled(model, factor) as changed:
                logits = passes.run(changed, case.texts)
            assert logits is not None
            yield fault, of_logits(case, logits, case.temperature)
    merges: list[tuple[str, torch.dtype | None, bool]] = [("merged into the tied embedding", None, True)]
    merges += [(f"adapter merged in {half}", dtype, False) for half, dtype in HALVES.items()]
    for fault, dtype, keeps_tied in merges:
        with passes.adapters_merged(model, dtype, keeps_tied) as changed:
            logits = passes.run(changed, case.texts)
        assert logits is not None
        yield fault, of_logits(case, logits, case.temperature)


def _dropout(case: Case, gap: float) -> list[str]:
    """Whether passes with the model's dropout are as far off as the recorded numbers: within their 95% interval."""
    if not passes.drops(case.weights.model):
        return []
    exact, sizes = of_logits(case, case.logits, case.temperature), []
    for seed in range(DROPOUT_PASSES):
        with passes.with_dropout(case.weights.model, seed) as model:
            logits = passes.run(model, case.texts)
        assert logits is not None
        sizes.append(float((of_logits(case, logits, case.temperature) - exact).abs().mean()))
    mean, low, _ = interval(sizes)
    half = (mean - low) * math.sqrt(1 + len(sizes)) + 1e-12  # of one more pass, not of the mean
    return ["dropout on in the pass"] if abs(gap - mean) <= half else []


def _where(case: Case) -> str:
    """Rows that fit and places of the gap, in words."""
    gaps = (
        (case.found - of_logits(case, case.logits, case.temperature))
        .abs()
        .split([len(text.places) for text in case.texts])
    )
    fit = sum(float(row.mean()) <= case.error for row in gaps)
    first = [float(row[: max(len(row) // 4, 1)].mean()) for row in gaps]
    last = [float(row[-max(len(row) // 4, 1) :].mean()) for row in gaps]
    shares = f"mean size {sum(first) / len(first):.3g} in the first quarter of responses, {sum(last) / len(last):.3g}"
    return f"{fit} of {len(gaps)} rows fit; {shares} in the last"
