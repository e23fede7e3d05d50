"""The packed decoder gives the model's own logits, with adapters, biases and groups, and elsewhere steps aside."""

import pytest
import torch
from helpers import ARCHITECTURES, LLAMA, tiny_model, tiny_policy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lightrlhf.cli.groups import DecodingArgs, ModelArgs, SamplingArgs
from lightrlhf.cpu import decoder
from lightrlhf.cpu.cache import has_fast_sums
from lightrlhf.cpu.decoder import Norm
from lightrlhf.data.batch import INFERENCE_TOKENS
from lightrlhf.generation.engine import generate
from lightrlhf.generation.slots import Slots
from lightrlhf.models import lora
from lightrlhf.models.frozen import activation_dtype
from lightrlhf.models.loading import load_policy

PROMPTS = [[5, 9, 7], [11, 3, 8, 2, 40, 21], [30], [17, 4, 9, 9]]
KINDS = {
    "llama": {"num_key_value_heads": 2},
    "llama, one head a group": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with scaled positions": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
}
STEPS = 20
pytestmark = pytest.mark.skipif(not has_fast_sums(), reason="models are not packed without FBGEMM")


def packed(model, steps=STEPS):
    return decoder.pack_decoder(model, steps, activation_dtype(model))


def noise(steps: int = STEPS) -> torch.Tensor:
    return torch.rand(len(PROMPTS), steps, generator=torch.Generator().manual_seed(3))


def model_of(kind: str, **changes) -> torch.nn.Module:
    return tiny_model(kind.split(" ")[0].rstrip(","), **(KINDS[kind] | changes))


def logits_after(model, autocast: bool = False, prefixes: list | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, V) after prompts and five sampled tokens: of the decoder, and of the model in one pass of float32.

    With `prefixes` the model computes the prompts.
    """
    args, found = SamplingArgs(max_new_tokens=STEPS), []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        slots = Slots(model, PROMPTS, args, [], noise(), len(PROMPTS), prefixes=prefixes)
        dtype = torch.bfloat16 if autocast else torch.float32
        assert slots.decoder is not None
        assert slots.decoder.head.up.dtype is dtype
        assert slots.layers[0].keys.dtype is (torch.float16 if autocast else dtype)
        slots.admit(torch.arange(len(PROMPTS)))
        sample = slots._sample
        slots._sample = lambda part, logits: (found.append(logits.float()), sample(part, logits))
        for _ in range(5):
            slots.step()
    texts = [torch.tensor([prompt + row[:5].tolist()]) for prompt, row in zip(PROMPTS, slots.tokens)]
    logits = torch.empty_like(found[-1])
    logits[slots.row] = found[-1]  # slots begin with the longest prompt
    return logits, torch.cat([model(input_ids=ids, use_cache=False).logits[:, -1] for ids in texts])


def test_a_kept_copy_is_of_one_dtype_and_made_for_calls_of_enough_steps():
    model, pack = model_of("llama"), decoder.KeptPacking()
    first = pack(model, STEPS, torch.float32)
    assert first is not None and pack(model, STEPS, torch.float32) is first
    assert pack(model, decoder.LEAST_STEPS - 1, torch.float32) is None
    other = pack(model, STEPS, torch.bfloat16)
    assert other.head.up.dtype is torch.bfloat16 and [*pack.copies.values()] == [other]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_of_a_step_are_those_of_the_model(kind):
    torch.testing.assert_close(*logits_after(model_of(kind)), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_prompts_give_the_keys_values_and_logits_of_the_model(kind):
    model = model_of(kind)
    decoder = packed(model)
    assert decoder is not None
    states, mask, logits = decoder.prefill(PROMPTS)
    assert mask.sum(1).tolist() == list(map(len, PROMPTS)) and mask[:, -1].all()
    for row, prompt in enumerate(PROMPTS):
        alone = model(input_ids=torch.tensor([prompt]), use_cache=True)
        torch.testing.assert_close(logits[row], alone.logits[0, -1], atol=2e-5, rtol=1e-5)
        for layer, expected in zip(states, alone.past_key_values.layers, strict=True):
            keys = layer.keys[..., decoder.pairs.argsort()] / decoder.scale
            for found, own in ((keys, expected.keys), (layer.values, expected.values)):
                torch.testing.assert_close(found[row, :, mask[row]], own[0], atol=2e-5, rtol=1e-5)
                assert not found[row, :, ~mask[row]].any()


@pytest.mark.parametrize(
    "lengths, passes",
    [
        ((6, 4, 3, 1), [6 + 4, 3 + 1]),
        ((8, 1, 1, 1), [8 + 1, 1 + 1]),  # with a third prompt attention would have 24 columns
        ((30, 2, 2, 1), [30, 2 + 2 + 1]),
    ],
)
def test_passes_over_prompts_have_so_many_tokens_and_little_padding(lengths, passes, monkeypatch):
    """Of 10 tokens here, and attention of at most 20 columns."""
    monkeypatch.setitem(INFERENCE_TOKENS, "cpu", 10)
    rows, project = [], decoder.PackedLinear.__call__
    monkeypatch.setattr(
        decoder.PackedLinear, "__call__", lambda own, inputs: (rows.append(len(inputs)), project(own, inputs))[1]
    )
    prompts = [[3 + number] * length for number, length in enumerate(lengths)]
    with torch.inference_mode():
        slots = Slots(tiny_model("llama"), prompts, SamplingArgs(max_new_tokens=STEPS), [], noise(), len(prompts))
        slots.admit(torch.arange(len(prompts)))
    products = 4 * 2 + 1  # four in each of two layers, and the head
    assert rows[::products] == passes


@pytest.mark.parametrize("shape", [(3, 64), (3, 2, 7)])
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 1e4])  # beside an epsilon of 1e-5
def test_norms_are_those_of_float64(shape, size):
    own = LlamaRMSNorm(shape[-1], eps=1e-5)
    torch.nn.init.normal_(own.weight)
    inputs, weight = size * torch.randn(shape), own.weight.detach().double()
    expected = inputs.double() * weight / (inputs.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    norm = Norm(own)
    torch.testing.assert_close(norm(inputs).double() * norm.scale * weight, expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("prefixes", [None, [None] * len(PROMPTS)], ids=["prompts", "prompts by the model"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_under_autocast_logits_are_near_those_of_float32(kind, prefixes):
    found, expected = logits_after(model_of(kind), autocast=True, prefixes=prefixes and [*prefixes])
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_active_adapters_count_and_others_do_not(autocast, base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(finetune_mode="lora"), tokenizer)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found = []
    for adapters in (policy.adapters, ()):
        with lora.active(policy.model, adapters, False):
            logits, expected = logits_after(policy.model, autocast)
        bound = 0.03 * float(expected.abs().max()) if autocast else 1e-4
        assert float((logits - expected).abs().max()) < bound
        found.append(logits)
    assert float((found[0] - found[1]).abs().max()) > 0.5


def test_a_response_is_the_same_with_and_without_it(monkeypatch):
    policy = tiny_policy("llama", num_key_value_heads=2)
    args = SamplingArgs(max_new_tokens=STEPS)
    packed = generate(policy, PROMPTS, args, [], noise(), 2)
    monkeypatch.setattr(decoder, "LEAST_STEPS", STEPS + 1)
    plain = generate(policy, PROMPTS, args, [], noise(), 2)
    assert packed.responses == plain.responses
    for one, other in zip(packed.logprobs, plain.logprobs):
        assert one == pytest.approx(other, abs=1e-5)
    assert packed.logprobs != plain.logprobs  # else it was not used


def test_weights_are_those_of_the_call(monkeypatch):
    policy = tiny_policy("llama")
    args = DecodingArgs(max_new_tokens=STEPS, do_sample=False)
    before = generate(policy, PROMPTS, args, [], noise(), 4).responses
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = generate(policy, PROMPTS, args, [], noise(), 4).responses
    monkeypatch.setattr(decoder, "LEAST_STEPS", STEPS + 1)
    assert before != after == generate(policy, PROMPTS, args, [], noise(), 4).responses


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("llama", "qwen2", "qwen3")])
def test_other_architectures_and_windows_are_left_to_the_model(name):
    assert packed(tiny_model(name)) is None


def test_changed_layers_short_calls_and_large_models_are_left_to_the_model(monkeypatch):
    model = tiny_model("llama")
    assert packed(model, decoder.LEAST_STEPS - 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "MOST_BYTES", 1000)
        assert packed(model) is None
    scaled = tiny_model("llama")
    scaled.model.layers[1].mlp.up_proj = torch.nn.Sequential(scaled.model.layers[1].mlp.up_proj)
    assert packed(scaled) is None
    normed = tiny_model("qwen3")
    normed.model.layers[1].self_attn.k_norm = torch.nn.LayerNorm(LLAMA["hidden_size"])
    assert packed(normed) is None
    embedded = tiny_model("llama")
    embedded.model.embed_tokens = type("Scaled", (torch.nn.Embedding,), {})(LLAMA["vocab_size"], LLAMA["hidden_size"])
    assert packed(embedded) is None
    ours = type("LlamaForCausalLM", (type(model),), {"__module__": "mine"})
    model.__class__ = ours
    assert packed(model) is None


def test_dora_is_left_to_the_model(base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(finetune_mode="lora", use_dora=True), tokenizer)
    assert packed(policy.model) is None


def test_without_onednn_the_copy_is_multiplied_by_torch(monkeypatch):
    policy = tiny_policy("qwen2")
    args = SamplingArgs(max_new_tokens=STEPS)
    packed = generate(policy, PROMPTS, args, [], noise(), 4)
    monkeypatch.setattr(decoder, "packs", lambda dtype: False)
    plain = generate(policy, PROMPTS, args, [], noise(), 4)
    assert packed.responses == plain.responses


@pytest.mark.parametrize("is_right", [True, False])
def test_the_trial_of_an_architecture_finds_a_decoder_that_differs(is_right, monkeypatch, capsys):
    """As after a release of transformers that changed a layer: the model itself is called then, and a note says so."""
    known = set(decoder.ARCHITECTURES)
    monkeypatch.setattr(decoder, "ARCHITECTURES", known)
    policy, args = tiny_policy("llama"), DecodingArgs(max_new_tokens=STEPS)
    with monkeypatch.context() as other:
        other.setattr(decoder, "LEAST_STEPS", STEPS + 1)
        expected = generate(policy, PROMPTS, args, [], noise(), 4)
    policy.sampled = False
    if not is_right:
        rotated = decoder.PackedDecoder._rotate
        monkeypatch.setattr(decoder.PackedDecoder, "_rotate", lambda *given: 2 * rotated(*given))
    found = generate(policy, PROMPTS, args, [], noise(), 4)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert ("Llama" in known) is is_right
    assert ("note: rollouts decode without packed weights" in capsys.readouterr().err) is not is_right
