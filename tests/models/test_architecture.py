"""Every causal language model that transformers builds tiny, in every role: exact, or one line that names it."""

import pytest
import torch
from helpers import PAIRS, alone, gradients, mixed_batch, rows_of
from helpers.zoo import capped, enlarged, model_types, zoo_model

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.batch import preference_batch
from lightrlhf.generation.engine import generate
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import Policy, ScalarModel, last_token, policy_inputs

SPREADS = {0.0: "own initialisation", 0.1: "wide weights"}


def attempt(run, *args) -> tuple[bool, str]:
    """Whether a role is exact or refused in one line, and what was seen."""
    try:
        return run(*args)
    except UsageError as problem:
        line = str(problem)
        return "\n" not in line and len(line) < 500, f"refused: {line[:160]}"
    except Exception as problem:  # a traceback, which the case is about
        return False, f"{type(problem).__name__}: {str(problem)[:160]!r}"


def gap(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).abs().max())


def worst_gradient(found: dict, expected: dict) -> float:
    """Largest error of a tensor relative to its own size; the noise of 3e-6 of the largest of all is none."""
    noise = 3e-6 * max(float(part.abs().max()) for part in expected.values())
    zero = torch.zeros(())
    errors = [
        max(gap(found.get(name, zero), expected.get(name, zero)) - noise, 0.0)
        / max(float(expected.get(name, zero).abs().max()), noise)
        for name in found.keys() | expected.keys()
    ]
    return max(errors)


def as_policy(model, batch):
    """Log-probabilities and gradients of padded rows against the whole model's on each row without padding."""
    policy, expected, total = Policy(model).eval(), [], 0.0
    policy.train(model.config.model_type == "reformer")  # reversible layers have gradients in this mode only
    for part in (alone(batch, row) for row in range(len(batch))):
        logits = policy.model(input_ids=part.input_ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, part.input_ids[:, 1:, None])[..., 0][part.action_mask]
        expected.append(logprobs.detach())
        total = total + logprobs.pow(2).sum()
    total.backward()
    slopes = gradients(policy)
    logprobs = policy(**policy_inputs(batch)).logprobs
    logprobs.pow(2).sum().backward()
    error, slope = (
        gap(logprobs.detach()[batch.action_mask], torch.cat(expected)),
        worst_gradient(gradients(policy), slopes),
    )
    return error < 1e-4 and slope < 1e-2, f"exact to {error:.0e}, gradients {slope:.0e}"


def as_packed(role, batch):
    enable_packing(role)
    if not role.packs:
        return True, "texts stay separate"
    weights = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(0)) * batch.attention_mask
    found, slopes = [], []
    for packs in (False, True):
        role.packs = packs
        if isinstance(role, Policy):
            values = role(**policy_inputs(batch)).logprobs
            (values * weights[:, 1:]).sum().backward()
        else:
            values = role(batch.input_ids, batch.attention_mask, batch.group) * batch.attention_mask
            (values * weights).sum().backward()
        found.append(values.detach())
        slopes.append(gradients(role))
    error, slope = gap(*found), worst_gradient(slopes[1], slopes[0])
    return error < 1e-4 and slope < 1e-2, f"packed, exact to {error:.0e}, gradients {slope:.0e}"


def as_sampler(policy):
    """The engine's tokens and log-probabilities, with refilled slots, against the whole model on each row alone."""
    prompts, args = rows_of(3, 9, 1, 5, 3), DecodingArgs(max_new_tokens=8)
    uniforms = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    sampled, error = generate(policy, prompts, args, [], uniforms, num_slots=2), 0.0
    for prompt, response, logprobs, uniform in zip(prompts, sampled.responses, sampled.logprobs, uniforms):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, :-1].float()
        known = logits[len(prompt) - 1 :].log_softmax(-1)  # (8, V)
        error = max(error, gap(torch.tensor(logprobs), known.gather(-1, torch.tensor(response)[:, None])[:, 0]))
        cumulative = known.exp().cumsum(-1)
        near = (cumulative - uniform[:, None]).abs().min(-1).values < 1e-4  # where rounding may choose the neighbour
        drawn = (cumulative < uniform[:, None]).sum(-1).clamp(max=known.shape[-1] - 1)
        if not bool(((drawn == torch.tensor(response)) | near).all()):
            return False, f"other tokens: {response}, expected {drawn.tolist()}"
    return error < 1e-4, f"token for token, exact to {error:.0e}"


def as_reward_model(model, batch):
    role, rows = ScalarModel(model).eval(), [alone(batch, row).input_ids for row in range(3)]
    expected = torch.cat([model(input_ids=ids, use_cache=False).logits[:, 0] for ids in rows])
    scores = last_token(role(batch.input_ids, batch.attention_mask), batch.attention_mask)
    held, seen = as_packed(role, preference_batch(PAIRS, 0))
    return held and gap(scores, expected) < 1e-4, f"exact to {gap(scores, expected):.0e}; {seen}"


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.timeout(3600)
def test_every_role_of_every_architecture_is_exact_or_refused(spread, case):
    batch, seen = mixed_batch(), 0
    for kind in model_types():
        model = zoo_model(kind, spread)
        if model is None:
            continue
        seen += 1
        name = f"{kind}, {SPREADS[spread]}"
        held, line = attempt(as_policy, model, batch)
        case(f"{name}, policy", held, line)
        if not line.startswith("refused"):
            policy = Policy(model).eval()
            case(f"{name}, packing", *attempt(as_packed, policy, batch))
            case(f"{name}, prefixes", *attempt(as_packed, policy, preference_batch(PAIRS, 0)))
            case(f"{name}, engine", *attempt(as_sampler, policy))
        model = zoo_model(kind, spread, scalar=True)
        if model is not None:
            case(f"{name}, reward model", *attempt(as_reward_model, model, batch))
    assert seen >= 89


CAPS = {
    "tanh": lambda logits: 30 * torch.tanh(logits / 30),
    "wide tanh": lambda logits: 1000 * torch.tanh(logits / 1000),
    "clamp": lambda logits: logits.clamp(-50, 50),
    "soft sign": lambda logits: logits / (1 + logits.abs() / 100),
    "asinh": torch.asinh,
    "scale": lambda logits: logits * 0.25,
    "shift": lambda logits: logits - logits.mean(-1, keepdim=True) * 0.5,
    "forbidden token": lambda logits: logits.index_fill(-1, torch.tensor([3]), -1e9),
    "sorted by nothing": lambda logits: logits.roll(1, -1),
}
CONFIGURED = [
    ("gemma2", {"final_logit_softcapping": cap, "attn_logit_softcapping": soft})
    for cap in (0.5, 5.0, 30.0, 3000.0)
    for soft in (None, 1.0, 50.0)
]
CONFIGURED += [("vaultgemma", {"final_logit_softcapping": cap}) for cap in (0.5, 5.0, 30.0, 3000.0)]
CONFIGURED += [("gemma3_text", {"final_logit_softcapping": cap}) for cap in (5.0, 30.0)]
CONFIGURED += [("gemma3n_text", {"final_logit_softcapping": cap}) for cap in (5.0, 30.0)]
CONFIGURED += [("nanochat", {"final_logit_softcapping": cap}) for cap in (5.0, 15.0, 300.0)]
CONFIGURED += [("recurrent_gemma", {"logits_soft_cap": cap}) for cap in (5.0, 30.0)]
CONFIGURED += [("cohere", {"logit_scale": scale}) for scale in (0.0625, 2.0)]
CONFIGURED += [("cohere2", {"logit_scale": scale}) for scale in (0.0625, 2.0)]
CONFIGURED += [(kind, {"logits_scaling": 8.0}) for kind in ("granite", "granitemoe", "granitemoeshared")]
CONFIGURED += [("minicpm3", {"dim_model_base": base}) for base in (8, 16)]
CONFIGURED += [("falcon_h1", {"lm_head_multiplier": scale}) for scale in (0.1, 3.0)]


def is_whole_model(model) -> tuple[bool, str]:
    """Whether a policy, its head enlarged since the probe, gives the whole model's log-probabilities."""
    policy = Policy(model).eval()
    batch = mixed_batch()
    enlarged(policy)
    with torch.no_grad():
        found = policy(**policy_inputs(batch)).logprobs[batch.action_mask]
        expected = []
        for part in (alone(batch, row) for row in range(len(batch))):
            logits = policy.model(input_ids=part.input_ids, use_cache=False).logits[:, :-1].float()
            expected.append(logits.log_softmax(-1).gather(-1, part.input_ids[:, 1:, None])[..., 0][part.action_mask])
    error, size = gap(found, torch.cat(expected)), float(torch.cat(expected).abs().max())
    return error <= 1e-4 * max(size, 1.0), f"plain head: {policy.head_is_plain}, differs by {error:.0e} of {size:.0f}"


def test_caps_and_scales_show_at_small_weights(case):
    for kind, changes in CONFIGURED:
        model = zoo_model(kind, **changes)
        case(f"{kind} {changes}", *attempt(is_whole_model, model))
    for name, cap in CAPS.items():
        case(f"an unknown {name}", *attempt(is_whole_model, capped(cap)))
    plain = Policy(zoo_model("llama"))
    case("llama has none", plain.head_is_plain)


@pytest.mark.parametrize("kind", ["llama", "jamba", "gemma2", "mixtral", "lfm2", "llama4_text"])
def test_probes_change_neither_weights_nor_random_numbers_nor_hooks(kind, case):
    model = zoo_model(kind).train()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    policy = Policy(model)
    enable_packing(policy)
    attempt(generate, policy, [[2, 3]], DecodingArgs(max_new_tokens=2), [], torch.full((1, 2), 0.5))
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    case(f"{kind}: weights", same)
    case(f"{kind}: random numbers", torch.equal(torch.get_rng_state(), state))
    case(f"{kind}: hooks and mode", model.training and not any(part._forward_hooks for part in model.modules()))
