"""The divergence of a student from its teacher at each token, recomputed with the weights of both.

Left out: teachers with another tokenizer, those that read another prompt, and sums over a part of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.checks import weights as passes
from lightrlhf.checks.fitting import ROUNDINGS, Formula, Known, judge
from lightrlhf.checks.gaps import OTHER_KERNELS
from lightrlhf.checks.logprobs import LARGEST_LOGIT, ROUNDED
from lightrlhf.checks.step import UNITS, Missing, Step
from lightrlhf.checks.verdicts import Verdict
from lightrlhf.checks.weights import Weights
from lightrlhf.maths import ops


def check_divergence(step: Step, student: Weights, teacher: Weights, estimator: str) -> Verdict:
    """The verdict on `kl`: over the whole vocabulary (exact), or of the sampled tokens (k1). Raises: Missing."""
    sizes = [one.model.config.get_text_config().vocab_size for one in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise Missing("a teacher with the student's vocabulary")
    texts = passes.sample(step, sizes[0])
    found, ids = passes.recorded(step, "kl", texts), passes.targets(texts)
    wide, other = (_logprobs(one, texts) for one in (student, teacher))  # (N, V) each
    made = formulas(wide, other, ids)
    error = torch.full_like(found, UNITS["float32"] * LARGEST_LOGIT * ROUNDED)
    if student.dtype == torch.float64:  # what other kernels in float32 make of it
        rounded = []
        for one in (student, teacher):
            with passes.in_dtype(one.model, torch.float32) as model:
                rounded.append(_logprobs(one._replace(model=model), texts).to(wide.dtype))
        near = formulas(rounded[0], rounded[1], ids)
        error += OTHER_KERNELS * max(float((near[name] - made[name]).abs().max()) for name in ("exact", "k1"))
    known = {name: Formula(value, error + ROUNDINGS * step.unit * value.abs()) for name, value in made.items()}
    ends = torch.tensor([len(text.places) for text in texts]).cumsum(0)
    for name, edges in (("teacher one late", (ends[:-1] % len(ids)).tolist() + [0]), ("teacher one early", ends - 1)):
        known[name].error[edges] = torch.inf  # beside them stand other rows
    meant = {estimator: known.pop(estimator)}
    return judge("kl", found, Known(meant, known), [estimator], "--estimator, --teacher", "token")


def _logprobs(weights: Weights, texts: list[passes.Text]) -> Tensor:
    """Log-probabilities of all tokens, (N, V)."""
    logits = passes.run(weights.model, texts)
    assert logits is not None
    return logits.log_softmax(-1)


def formulas(student: Tensor, teacher: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """What is meant and what faults make of it, (N,) each; student, teacher: (N, V), ids: (N,) of the samples."""
    p, q = (one.gather(-1, ids[:, None])[:, 0] for one in (student, teacher))
    middle = torch.logaddexp(student, teacher) - torch.tensor(2.0).log()
    exact, forward = ((a.exp() * (a - b)).sum(-1) for a, b in ((student, teacher), (teacher, student)))
    half = [(one.exp() * (one - middle)).sum(-1) / 2 for one in (student, teacher)]
    found = {"exact": exact, "k1": p - q, "forward KL": forward, "Jensen-Shannon divergence": half[0] + half[1]}
    found |= {"k3 of the samples": ops.kl_k3(p, q), "k2 of the samples": ops.kl_k2(p, q)}
    found |= {f"sign of {name}": -found[name] for name in ("exact", "k1")}
    found |= {"teacher one late": _moved(student, teacher, 1), "teacher one early": _moved(student, teacher, -1)}
    return found | {"KL of 0": torch.zeros_like(exact)}


def _moved(student: Tensor, teacher: Tensor, by: int) -> Tensor:
    """The KL from the teacher's distribution at another place."""
    return (student.exp() * (student - teacher.roll(by, 0))).sum(-1)
