"""Adapters, the norm of a gradient and an optimiser's step, beside weights before and after."""

import copy

import numpy as np
import pytest
import torch
from helpers import tiny_model
from helpers.steps import EOS

from lightrlhf.checks import gaps, gradient, weights
from lightrlhf.checks.step import Step
from lightrlhf.models import lora

ROWS, PROMPT, RESPONSE = 4, 4, 8
RATE, CLIP = 1e-3, 0.5
NOTHING = gaps.Known()


def rows():
    ids = torch.randint(2, 61, (ROWS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = EOS
    return ids, torch.arange(PROMPT + RESPONSE)[None].expand(ROWS, -1) >= PROMPT


IDS, TRAINED = rows()


def logprobs(model, ids=IDS):
    found = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return torch.nn.functional.pad(found[:, :-1].gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


def step_of(values, config=None, **arrays) -> Step:
    arrays = {"input_ids": IDS, "attention_mask": IDS > 0, "loss_mask": TRAINED, "new_logprobs": values} | arrays
    config = {"method": "sft", "first_pass": True} | (config or {})
    return Step({name: one.detach().numpy() for name, one in arrays.items()}, config)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """An adapter folder, on the tied output layer too, its base, and the model loaded from it."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapted")
    base = tiny_model("llama", tie_word_embeddings=True)
    base.save_pretrained(folder / "base")
    base.name_or_path = str(folder / "base")
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder / "adapter")
    return weights.load(str(folder / "adapter"), "--model_name")


def changed(model, fault):
    """A copy of the model in float32 with a fault of its adapters."""
    model = copy.deepcopy(model).float()
    layers = lora.lora_layers(model).values()
    factor = {"adapter missing": 0.0, "adapter applied twice": 2.0, "alpha not divided by the rank": 4.0}.get(fault, 1)
    for layer in layers:
        layer.scaling = {name: value * factor for name, value in layer.scaling.items()}
    if fault == "merged into the tied embedding":
        for layer in layers:
            layer.get_base_layer().weight.data += layer.get_delta_weight("start_0")
            layer.scaling = {"start_0": 0.0}
    return model


ADAPTERS = ["", "adapter missing", "adapter applied twice", "alpha not divided by the rank"]


@pytest.mark.parametrize("fault", [*ADAPTERS, "merged into the tied embedding"])
def test_adapters_that_are_missing_or_applied_otherwise_are_named(adapted, fault):
    with torch.no_grad():
        step = step_of(logprobs(changed(adapted.model, fault)))
    found = gaps.check_array(step, "new_logprobs", adapted, NOTHING, "trainer", False)
    assert (found.says, found.fault) == ("wrong" if fault else "right", fault)


# ----------------------------------------------------------------------------------------------- gradient and update
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, its loss and gradient in float32, and its weights after a first step of AdamW."""
    folder = tmp_path_factory.mktemp("trained")
    model = tiny_model("llama", tie_word_embeddings=False)
    model.save_pretrained(folder / "before")
    before = weights.load(str(folder / "before"), "--model_name")
    values = logprobs(model)
    (-values[TRAINED].mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    config = {"optimizer": "AdamW", "is_first": True, "max_grad_norm": CLIP}
    step = step_of(values, config, total_grad_norm=norm)
    return before, model, step, gradient.recompute(step, before)


@pytest.mark.parametrize(
    "fault, change",
    [
        ("", lambda norm, made: norm),
        ("", lambda norm, made: torch.tensor(CLIP)),
        ("norm squared", lambda norm, made: norm**2),
        ("4 times the gradient", lambda norm, made: norm * 4),
        ("loss scale of 1024 not taken out", lambda norm, made: norm * 1024),
        ("gradient of 0", lambda norm, made: norm * 0),
        ("output layer left out", lambda norm, made: without(made, "lm_head")),
        ("norm of another gradient", lambda norm, made: norm * 1.7),
    ],
)
def test_norms_of_a_gradient(trained, fault, change):
    _, _, step, made = trained
    step = copy.copy(step)
    step.arrays = step.arrays | {"total_grad_norm": change(step.get("total_grad_norm"), made).double()}
    found = gradient.check_norm(step, made)
    assert (found.says, found.fault) == ("wrong" if fault else "right", fault)


def without(made, part):
    return torch.tensor(gradient.norm_of({name: one for name, one in made.gradient.items() if part not in name}))


def after(trained, fault):
    """Weights after a step with one fault, and the step as recorded."""
    before, model, step, _ = trained
    model = copy.deepcopy(model)
    for parameter, source in zip(model.parameters(), trained[1].parameters()):
        parameter.grad = source.grad.clone() * (-1 if fault == "update along the gradient" else 1)
    skips = "lm_head" if fault == "parameters left out of the update" else "none"
    rate = RATE * (0.1 if fault.startswith("learning rate") else 0.0 if fault == "weights did not change" else 1)
    own = [one for name, one in model.named_parameters() if skips not in name]
    if fault == "step lost in rounding":
        model, rate = model.bfloat16(), 1e-7
        own = list(model.parameters())
    if fault == "update of another gradient":
        noise = torch.Generator().manual_seed(0)
        for parameter in own:
            turned = torch.rand(parameter.shape, generator=noise) < 0.2
            parameter.grad = torch.where(turned, -parameter.grad, parameter.grad)
    torch.optim.AdamW(own, lr=rate, weight_decay=0.1).step()
    if fault == "changed without a gradient":
        model.model.embed_tokens.weight.data += 0.1
    return weights.Weights("after", model.double().eval(), None)


UPDATES = ["", "weights did not change", "parameters left out of the update", "update along the gradient"]
UPDATES += ["update of another gradient", "step lost in rounding", "learning rate 0.0001, not 0.001"]


@pytest.mark.parametrize("fault", UPDATES)
def test_an_optimisers_step(trained, fault):
    before, model, step, made = trained
    if fault == "step lost in rounding":
        half = copy.deepcopy(before.model).bfloat16()
        before = before._replace(model=half.double())
    told = Step({"learning_rate": np.array([RATE]), "weight_decay": np.array([0.1])}, step.config)
    found = gradient.check_update(told, before, after(trained, fault), made.gradient)
    assert (found.says, found.fault) == ("wrong" if fault else "right", fault), found


def test_frozen_weights_that_change_are_named(adapted):
    with torch.no_grad():
        values = logprobs(copy.deepcopy(adapted.model).float())
    step = step_of(values, {"method": "sft"})
    made = gradient.recompute(step, adapted)
    assert all(".lora_" in name for name in made.gradient) and made.norm > 0
    later = copy.deepcopy(adapted.model)
    for name, parameter in later.named_parameters():
        parameter.data += 0.01 * ((".lora_" in name) or ("layers.0.self_attn.k_proj" in name))
    found = gradient.check_update(step, adapted, adapted._replace(model=later, name="after"), made.gradient)
    assert found.fault == "changed without a gradient" and "k_proj" in found.evidence


def test_steps_that_lack_rows_are_not_judged(trained):
    before, _, step, _ = trained
    passed = copy.copy(step)
    passed.config = step.config | {"passes": 4}
    with pytest.raises(gradient.Missing, match="rows"):
        gradient.recompute(passed, before)
