"""Steps in buckets are the engine's own steps, and what a CUDA graph needs of them holds, as far as a CPU can tell."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import rows_of, tiny_model, tiny_policy
from helpers.captures import HostRead, NoCopies, NoReads, Tape
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrlhf.cli.groups import DecodingArgs, ModelArgs, SamplingArgs
from lightrlhf.generation import engine, graphs, slots
from lightrlhf.generation.engine import decode_all, generate, no_gradients
from lightrlhf.generation.graphs import BucketedSlots, slots_type
from lightrlhf.generation.slots import Slots
from lightrlhf.models.loading import load_policy
from lightrlhf.training.roofline import Shape

ENDS = [2, 9, 17, 23, 31, 44, 58]
LENGTHS = [5, 1, 12, 3, 8, 2, 7, 7, 4, 6, 11, 3, 9, 5, 2]
BUCKETED = ["llama", "gpt2", "opt", "gpt_neox", "qwen2", "mistral", "gemma2", "phi", "falcon", "bloom"]
LOOK, SPARE, LEAST = 4, 6, 8  # small, so that a short call has many looks, shifts of the slab and buckets


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small(monkeypatch)


def small(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(engine.STEPS_BETWEEN_CHECKS, "cpu", LOOK)
    patch.setattr(slots, "SPARE_COLUMNS", SPARE)
    patch.setattr(graphs, "LEAST_COLUMNS", LEAST)


def noise(rows: int, length: int) -> torch.Tensor:
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(0))


def decoded(kind: Callable[..., Slots], model, args: SamplingArgs, num_slots: int = 6, lengths=LENGTHS, ends=ENDS):
    """The slots of one kind after all prompts are answered."""
    prompts = rows_of(*lengths)
    uniforms = noise(len(prompts), args.max_new_tokens)
    with no_gradients(model):
        return decode_all(kind(model, prompts, args, ends, uniforms, num_slots), None)


def bucketed_as_on_cuda(model, *args: Any, **options: Any) -> BucketedSlots:
    """Slots that are captured; `graphs.capture` is patched where it is used."""
    made = BucketedSlots(model, *args, **options)
    made.captures = True
    return made


# ------------------------------------------------------------------------------------------------- the same samples
@pytest.mark.parametrize("architecture", BUCKETED)
def test_buckets_change_samples_by_rounding_only(architecture):
    """With refills, compaction, shifts of the slab and every option."""
    model = tiny_model(architecture)
    args = DecodingArgs(max_new_tokens=14, temperature=1.3, top_k=40, min_p=0.001, repetition_penalty=1.5)
    for num_slots in (1, 5, 64):
        plain, bucketed = (decoded(kind, model, args, num_slots) for kind in (Slots, BucketedSlots))
        assert torch.equal(bucketed.tokens[:-1], plain.tokens[:-1])
        assert torch.equal(bucketed.lengths[:-1], plain.lengths[:-1])
        torch.testing.assert_close(bucketed.logprobs[:-1], plain.logprobs[:-1], atol=2e-5, rtol=1e-5)


class InOrder(TorchFunctionMode):
    """Linear layers and attention as sums from the first addend to the last.

    Such a sum is the same bit by bit however many rows there are, and however many zeros around it.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            return self.linear(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def linear(inputs, weight, bias=None):
        outputs = (inputs[..., None, :] * weight).cumsum(-1)[..., -1]
        return outputs if bias is None else outputs + bias

    @staticmethod
    def attention(queries, keys, values, attn_mask=None, scale=None, is_causal=False, **options):
        if is_causal:
            attn_mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril()
        keys, values = (part.repeat_interleave(queries.shape[1] // part.shape[1], 1) for part in (keys, values))
        scores = (queries[..., None, :] * keys[:, :, None]).cumsum(-1)[..., -1] * scale  # (S, heads, Q, C)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -1e30)  # finite, as padding attends to nothing
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = (weights[..., None] * values[:, :, None]).cumsum(-2)[..., -1, :]
        return sums / weights.cumsum(-1)[..., -1:]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_buckets_change_nothing_where_the_order_of_sums_is_fixed(architecture):
    model, args = tiny_model(architecture), DecodingArgs(max_new_tokens=14, temperature=1.3)
    with InOrder():
        plain, bucketed = (decoded(kind, model, args) for kind in (Slots, BucketedSlots))
    assert len(bucketed.steps) > 2
    for name in ("tokens", "lengths", "logprobs"):
        assert torch.equal(getattr(bucketed, name)[:-1], getattr(plain, name)[:-1]), name


def test_generate_uses_them_where_steps_can_be_captured(monkeypatch):
    policy, args, prompts = tiny_policy("llama"), DecodingArgs(max_new_tokens=14), rows_of(*LENGTHS)
    given = (policy, prompts, args, ENDS, noise(len(prompts), 14), 6)
    plain, made = generate(*given), []
    assert slots_type(policy.model) is Slots
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    monkeypatch.setattr(BucketedSlots, "_compute", lambda own, step=BucketedSlots._compute: (made.append(1), step(own)))
    assert generate(*given).responses == plain.responses and len(made) > 10
    assert slots_type(tiny_model("gpt_neo")) is Slots
    layer = policy.model.model.layers[0]
    layer.__class__ = type("Sharded", (FSDPModule, type(layer)), {})
    assert slots_type(policy.model) is Slots


# ------------------------------------------------------------------------------------------------------------ shapes
def test_sizes_of_buckets(monkeypatch):
    monkeypatch.setattr(graphs, "LEAST_COLUMNS", 64)
    sizes = {BucketedSlots.columns_for(count) for count in range(1, 1537)}
    assert sorted(sizes) == [64, 128, 192, 256, 384, 512, 768, 1024, 1536]
    assert [BucketedSlots.slots_for(count) for count in (1, 2, 3, 4, 5, 33, 64)] == [1, 2, 4, 4, 8, 64, 64]


@settings(max_examples=25)
@example([3, 9] * 12, 30, 24)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=24), st.integers(1, 30), st.integers(1, 24))
def test_a_call_has_few_shapes(lengths, longest, num_slots):
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        done = decoded(BucketedSlots, tiny_model("llama"), DecodingArgs(max_new_tokens=longest), num_slots, lengths)
    num_slots = min(num_slots, len(lengths))
    numbers, sizes = ({shape[part] for shape in done.steps} for part in (0, 1))  # of slots, of columns
    assert len(numbers) <= math.ceil(math.log2(num_slots)) + 1
    assert len(sizes) <= 2 * math.ceil(math.log2(done.num_columns / LEAST)) + 1
    assert all(count <= num_slots and columns <= done.num_columns for count, columns in done.steps)


def test_a_long_call_keeps_to_small_buckets():
    """Thirty prompts one after the other in two slots: what they no longer need is dropped."""
    done = decoded(
        BucketedSlots, tiny_model("llama"), DecodingArgs(max_new_tokens=10), 2, [1 + i % 6 for i in range(30)]
    )
    assert sum(done.steps.values()) > 4 * done.num_columns
    assert max(columns for _, columns in done.steps) == done.num_columns < 40


# ----------------------------------------------------------------------------------------- what a graph needs of a step
class Watched(BucketedSlots):
    def step(self):
        with NoReads(), NoCopies():
            super().step()


OPTIONS = [{}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.4}, {"do_sample": False}]


@pytest.mark.parametrize("architecture", BUCKETED)
@pytest.mark.parametrize("options", OPTIONS)
def test_no_step_reads_anything_on_the_host(architecture, options):
    args = DecodingArgs(max_new_tokens=14, eos_ids=list(range(30, 50)), **options)
    done = decoded(Watched, tiny_model(architecture), args)
    assert len({*done.lengths[:-1].tolist()}) > 1


@torch.inference_mode()
def test_between_looks_the_host_reads_nothing():
    steps, reads_after = [], set()
    found = lambda name: reads_after.add(len(steps))
    prompts = rows_of(*LENGTHS)
    with NoReads(found), NoCopies(found):
        args = DecodingArgs(max_new_tokens=14)
        own = BucketedSlots(tiny_model("llama"), prompts, args, ENDS, noise(len(prompts), 14), 6)
        decode_all(own, None, before_step=lambda: steps.append(1))
    looks = {count for count in range(len(steps) + 1) if (count + 1) % LOOK == 0}
    assert reads_after == {0} | looks and len(looks) > 5


@pytest.mark.parametrize(
    "read",
    [
        lambda own: int(own.position[0]),
        lambda own: own.row.tolist(),
        lambda own: bool((own.row == 1).any()),
        lambda own: own.next[own.row == 1],
        lambda own: own.tokens.masked_select(own.tokens > 3),
        lambda own: own.position.add_(torch.tensor(1)),
        lambda own: own.next.cpu(),
    ],
)
def test_a_read_on_the_host_is_found(read, monkeypatch):
    step = BucketedSlots._compute
    monkeypatch.setattr(BucketedSlots, "_compute", lambda own: (read(own), step(own)))
    with pytest.raises(HostRead):
        decoded(Watched, tiny_model("llama"), DecodingArgs(max_new_tokens=14))


def tensors_of(own: BucketedSlots) -> dict[str, torch.Tensor]:
    """The state of a step by name."""
    found = {name: value for name, value in vars(own).items() if isinstance(value, torch.Tensor)}
    slabs = {f"{number}, {part}": slab for number, one in enumerate(own.layers) for part, slab in enumerate(one.slabs)}
    return found | slabs


def test_the_state_of_a_step_stays_where_it_is(monkeypatch):
    places: dict[str, set[int]] = {}

    class Placed(BucketedSlots):
        def step(self):
            super().step()
            for name, tensor in tensors_of(self).items():
                places.setdefault(name, set()).add(tensor.data_ptr())

    args = DecodingArgs(max_new_tokens=14, repetition_penalty=1.3)
    done = decoded(Placed, tiny_model("llama"), args)
    assert {"tokens", "mask", "row", "position", "next", "lengths", "column", "seen", "0, 1"} <= places.keys()
    assert len({slots_of_step for slots_of_step, _ in done.steps}) > 1  # compaction, too
    assert {name for name, found in places.items() if len(found) > 1} == set()


def taped(step: Callable[[], None], pool: Any) -> Tape:
    """Capture on the CPU: like a capture it changes nothing."""
    own = step.__self__
    before = {name: tensor.clone() for name, tensor in tensors_of(own).items()}
    with Tape() as tape:
        step()
    for name, tensor in tensors_of(own).items():
        tensor.copy_(before[name])
    return tape


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_replayed_operators_give_the_same_samples(architecture, monkeypatch):
    """Whatever a step took from the host, or had left at another address, would be that of the captured step."""
    monkeypatch.setattr(graphs, "capture", taped)
    model, args = tiny_model(architecture), DecodingArgs(max_new_tokens=24, repetition_penalty=1.3)
    plain, replayed = (decoded(kind, model, args) for kind in (BucketedSlots, bucketed_as_on_cuda))
    assert replayed.graphs.keys() == {shape for shape, count in replayed.steps.items() if count > 1}
    assert sum(replayed.steps.values()) > 3 * len(replayed.steps)
    for name in ("tokens", "lengths", "logprobs"):
        assert torch.equal(getattr(replayed, name)[:-1], getattr(plain, name)[:-1]), name


@torch.inference_mode()
def test_the_trial_of_an_architecture_replays_a_step(monkeypatch, capsys):
    class Wrong(Tape):
        def replay(self):
            super().replay()
            states.logprobs.sub_(1)

    def wrong(step, pool):
        nonlocal states
        states = step.__self__
        tape = taped(step, pool)
        tape.__class__ = Wrong
        return tape

    states: Any = None
    monkeypatch.setattr(graphs, "capture", taped)
    devices = {"cpu"}
    for module in (graphs, engine):
        monkeypatch.setattr(module, "DEVICES", devices)
    monkeypatch.setattr(graphs, "BucketedSlots", bucketed_as_on_cuda)
    engine.check_architecture(tiny_policy("llama"))
    assert devices and not capsys.readouterr().err
    monkeypatch.setattr(graphs, "capture", wrong)
    engine.check_architecture(tiny_policy("llama"))
    assert not devices and "note: decoding steps are not captured" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["all", "lora"])
def test_replayed_operators_do_not_cast_weights_again(mode, base_model, tokenizer, monkeypatch):
    """Under autocast each weight is cast once a call, before any capture; active adapters count."""
    monkeypatch.setattr(graphs, "capture", taped)
    policy = load_policy(str(base_model), ModelArgs(finetune_mode=mode), tokenizer).eval()
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape) * parameter.requires_grad
    matrices = {parameter.data_ptr() for parameter in policy.parameters() if parameter.dim() == 2}
    args = DecodingArgs(max_new_tokens=14)
    with policy.active(), torch.autocast("cpu", torch.bfloat16):
        plain, replayed = (decoded(kind, policy.model, args) for kind in (BucketedSlots, bucketed_as_on_cuda))
    assert torch.equal(replayed.tokens[:-1], plain.tokens[:-1])
    assert torch.equal(replayed.logprobs[:-1], plain.logprobs[:-1])
    calls = [call for tape in replayed.graphs.values() for call in tape.calls]
    read = {leaf.data_ptr() for _, args, _, _ in calls for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    assert calls and not read & matrices - {policy.model.get_input_embeddings().weight.data_ptr()}


def test_where_a_capture_fails_steps_run_eagerly_with_one_line(monkeypatch, capsys):
    def fails(step, pool):
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    tried: list[int] = []
    monkeypatch.setattr(graphs, "capture", fails)
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    model, args = tiny_model("llama"), DecodingArgs(max_new_tokens=14)
    plain, eager = (decoded(kind, model, args) for kind in (BucketedSlots, bucketed_as_on_cuda))
    assert torch.equal(eager.tokens, plain.tokens) and len(tried) == 1 and not eager.graphs
    assert slots_type(model) is Slots  # in later calls
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: decoding steps are not captured") and line.endswith("stream is capturing")


# ------------------------------------------------------------------------------------------------------------- bytes
class Reads(TorchDispatchMode):
    """Bytes that operators read of weights and of keys and values, and the operators that read the latter."""

    def __init__(self, weights: set[int], slabs: set[int]) -> None:
        super().__init__()
        self.weights, self.slabs, self.read = weights, slabs, {"weights": 0, "slabs": 0}
        self.readers: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ != "index_copy_":
            rows = out if func.overloadpacket.__name__ == "embedding" else None  # of a table only those rows are read
            for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
                place = tensor.untyped_storage().data_ptr()
                kind = "weights" if place in self.weights else "slabs" if place in self.slabs else None
                if kind:
                    self.read[kind] += (tensor if rows is None else rows).nbytes
                if kind == "slabs":
                    self.readers.add(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("groups", [2, 4])
@torch.inference_mode()
def test_a_step_reads_each_weight_and_the_columns_of_its_bucket_once(groups):
    model, prompts = tiny_model("llama", num_key_value_heads=groups), rows_of(*LENGTHS)
    own = BucketedSlots(model, prompts, DecodingArgs(max_new_tokens=14), [], noise(len(prompts), 14), 6)
    own.admit(torch.arange(6))
    places = [{one.untyped_storage().data_ptr() for one in many} for many in (model.parameters(), own.layers[0].slabs)]
    places[1] |= {slab.untyped_storage().data_ptr() for layer in own.layers for slab in layer.slabs}
    with Reads(*places) as reads:
        own.step()
    shape, columns, number = Shape.of(model), own.layers[0].columns, 4
    assert columns > LENGTHS[2] + 1
    norms = sum(one.numel() for one in model.parameters() if one.dim() == 1)
    embedded = 6 * model.config.hidden_size
    assert reads.read["weights"] == number * (shape.matrices + shape.head + norms + embedded)
    assert reads.read["slabs"] == number * 2 * shape.layers * shape.key_value_width * 6 * columns
    (reader,) = reads.readers  # none copies them first
    assert "scaled_dot_product" in reader
