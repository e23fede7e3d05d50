"""The engine samples what transformers samples, for any number of slots; scoring gives the same log-probabilities."""

import copy

import pytest
import torch
from helpers import VOCABULARY, rows_of, tiny_model, tiny_policy
from helpers.errors import error_naming
from helpers.zoo import zoo_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from lightrlhf.cli.errors import NotFinite, UsageError
from lightrlhf.cli.groups import DecodingArgs, ModelArgs
from lightrlhf.data.batch import INFERENCE_TOKENS, response_batch
from lightrlhf.data.tokens import decode
from lightrlhf.generation import engine, slots
from lightrlhf.generation.engine import Completions, generate, generate_steps
from lightrlhf.generation.rollout import generate_rollout, score_logprobs
from lightrlhf.generation.sampling import sample
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy
from lightrlhf.models.saving import merged_model

ENDS = [2, 9, 17, 23, 31, 44, 58]  # several end tokens, so that random models stop at many different lengths
GENERATES = ["llama", "gpt2", "opt", "gpt_neo", "gpt_neox", "qwen2", "mistral", "gemma2", "phi", "falcon", "bloom"]
PROMPTS = rows_of(5, 1, 12, 3, 8, 2, 7, 7, 4)


def noise(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(seed))


def greedy_by_transformers(model, prompts: list[list[int]], max_new_tokens: int, ends: list[int]) -> list[list[int]]:
    """Each prompt by itself, without padding."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@torch.no_grad()
def plainly(policy, prompts, args, ends, uniforms, tokenizer=None) -> Completions:
    """Reference for the engine: one row at a time without a KV cache."""
    responses, logprobs, truncated = [], [], []
    for prompt, row in zip(prompts, uniforms):
        response: list[int] = []
        values: list[float] = []
        ended = False
        while not ended and len(response) < args.max_new_tokens:
            ids = torch.tensor([[*prompt, *response]])
            logits = policy.model(ids, use_cache=False).logits[:, -1]
            seen = torch.zeros_like(logits, dtype=torch.bool).index_fill(1, ids[0], True)
            token, _, _ = sample(logits, row[len(response)][None], args, seen)
            logprob = (logits / args.temperature).log_softmax(-1)[0, token]
            response.append(int(token))
            values.append(float(logprob))
            text = decode(tokenizer, response) if tokenizer else ""
            ended = response[-1] in [*ends, *args.eos_ids] or any(string in text for string in args.stop_strings)
        responses.append(response)
        logprobs.append(values)
        truncated.append(not ended)
    return Completions(responses, logprobs, truncated, 0.0)


def prefilled_rows(policy, monkeypatch) -> list[int]:
    """A list that gets the number of rows of each prefill."""
    rows: list[int] = []
    forward = type(policy.model).forward

    def watch(model, input_ids, **inputs):
        if inputs["attention_mask"].shape[1] == input_ids.shape[1]:  # the cache is empty
            rows.append(len(input_ids))
        return forward(model, input_ids=input_ids, **inputs)

    monkeypatch.setattr(type(policy.model), "forward", watch)
    return rows


class Letters:
    """A tokenizer whose tokens are one letter each."""

    chat_template = None

    def decode(self, ids, **options) -> str:
        return "".join(chr(ord("A") + index) for index in ids)


# ------------------------------------------------------------------------------------------------- responses
@pytest.mark.parametrize("architecture", GENERATES)
def test_the_engine_equals_a_plain_loop(architecture, monkeypatch):
    """With repeated prompts, refills, compaction, shifts of the slab and every option, for any slots and order."""
    policy = tiny_policy(architecture)
    if architecture not in ("gemma2", "bloom"):  # their attention makes NaN of padding in float64
        policy.double()
    strings = ["BA", "K", "Z", "d", "Qe", "o"]
    args = DecodingArgs(
        max_new_tokens=10,
        temperature=1.4,
        top_k=40,
        min_p=0.001,
        repetition_penalty=2.0,
        eos_ids=[5],
        stop_strings=strings,
    )
    prompts = [prompt for prompt in rows_of(5, 1, 9, 3) for _ in range(4)] + rows_of(7, 7, 2)
    uniforms = noise(len(prompts), 10)
    plain = plainly(policy, prompts, args, [2, 9, 17], uniforms, Letters())
    assert len({len(answer) for answer in plain.responses}) > 2
    assert any(s in Letters().decode(answer) for s in strings for answer in plain.responses)
    order = torch.randperm(len(prompts)).tolist()
    for num_slots, rows, steps in ((1, range(len(prompts)), 1), (3, order, 1), (64, order, 1), (7, order, 8)):
        monkeypatch.setitem(engine.STEPS_BETWEEN_CHECKS, "cpu", steps)
        monkeypatch.setattr(slots, "SPARE_COLUMNS", steps + 2)
        mine = [prompts[i] for i in rows]
        sampled = generate(policy, mine, args, [2, 9, 17], uniforms[list(rows)], num_slots, Letters())
        assert sampled.responses == [plain.responses[i] for i in rows]
        assert sampled.truncated == [plain.truncated[i] for i in rows]
        for logprobs, i in zip(sampled.logprobs, rows):
            assert logprobs == pytest.approx(plain.logprobs[i], abs=2e-4)


@pytest.mark.parametrize("num_slots", [2, 3, 8, 64])
def test_a_prompt_is_prefilled_once_for_all_its_samples(num_slots, monkeypatch):
    policy, args = tiny_policy("llama").double(), DecodingArgs(max_new_tokens=9)
    distinct = rows_of(5, 1, 12, 3)
    repeated = [prompt for prompt in distinct for _ in range(5)]
    uniforms = noise(len(repeated), 9)
    alone = [generate(policy, [p], args, ENDS, u[None], 1).responses[0] for p, u in zip(repeated, uniforms)]
    assert len(set(map(tuple, alone))) > 10
    prefilled = prefilled_rows(policy, monkeypatch)
    assert generate(policy, repeated, args, ENDS, uniforms, num_slots).responses == alone
    assert sum(prefilled) == len(distinct)


def test_an_idle_slot_stays_within_the_positions_of_the_model():
    """Of 40 slots some idle until enough do, long after their last row ended at the model's last position."""
    policy = tiny_policy("gpt2", n_positions=24)
    prompts, args = rows_of(*[12] * 120), DecodingArgs(max_new_tokens=12)
    uniforms = noise(120, 12)
    many, few = (generate(policy, prompts, args, [2], uniforms, num_slots) for num_slots in (40, 8))
    assert many.responses == few.responses and max(map(len, few.responses)) == 12


def test_stop_strings_keep_the_tokens_as_sampled(tokenizer, base_model):
    """Of a real tokenizer: the text holds the string, without its last token it does not, and no end is invented."""
    policy = load_policy(str(base_model), ModelArgs(), tokenizer).eval()
    prompts, uniforms = rows_of(3, 5, 4, 6, 2, 8), noise(6, 24)
    free = DecodingArgs(max_new_tokens=24)
    before = generate(policy, prompts, free, [], uniforms, 4)
    string = decode(tokenizer, before.responses[0][3:6])
    args = DecodingArgs(max_new_tokens=24, stop_strings=[string])
    sampled = generate(policy, prompts, args, [], uniforms, 4, tokenizer)
    assert sampled.responses[0] == before.responses[0][:6] and not sampled.truncated[0]
    for stopped, answer, whole in zip(sampled.truncated, sampled.responses, before.responses):
        assert answer == whole[: len(answer)] and stopped == (string not in decode(tokenizer, answer))


def test_stop_strings_require_the_tokenizer():
    args = DecodingArgs(max_new_tokens=2, stop_strings=["x"])
    with error_naming(ValueError, "stop_strings", "tokenizer"):
        generate(tiny_policy("llama"), PROMPTS, args, ENDS, noise(len(PROMPTS), 2))


def test_an_end_token_the_model_does_not_have_is_refused():
    args = DecodingArgs(max_new_tokens=2, eos_ids=[VOCABULARY])
    with error_naming(UsageError, f"--eos_ids {VOCABULARY}", f"{VOCABULARY} tokens"):
        generate(tiny_policy("llama"), PROMPTS, args, ENDS, noise(len(PROMPTS), 2))


def test_a_prompt_without_tokens_is_refused():
    with error_naming(UsageError, "prompt 2 of 3", "BOS"):
        generate(tiny_policy("llama"), [[3], [], [4]], DecodingArgs(max_new_tokens=2), ENDS, noise(3, 2))


@pytest.mark.parametrize("architecture", GENERATES)
def test_greedy_tokens_of_mixed_prompts_equal_those_of_transformers(architecture):
    policy = tiny_policy(architecture)
    args = DecodingArgs(max_new_tokens=14, do_sample=False)
    free = greedy_by_transformers(policy.model, PROMPTS, 14, [])
    ends = [free[0][5], free[3][8]]
    expected = greedy_by_transformers(policy.model, PROMPTS, 14, ends)
    assert len({len(answer) for answer in expected}) > 1  # some end early, so slots are refilled and compacted
    for num_slots in (3, 64):
        sampled = generate(policy, PROMPTS, args, ends, noise(len(PROMPTS), 14), num_slots)
        assert sampled.responses == expected


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "bloom"])
def test_samples_do_not_depend_on_the_number_of_slots(architecture):
    policy = tiny_policy(architecture)
    args = DecodingArgs(max_new_tokens=12, temperature=1.3, top_k=20, top_p=0.9)
    uniforms = noise(len(PROMPTS), 12)
    alone = generate(policy, PROMPTS, args, ENDS, uniforms, num_slots=1)
    assert len({len(answer) for answer in alone.responses}) > 2
    for num_slots in (2, 3, 8, 64):
        together = generate(policy, PROMPTS, args, ENDS, uniforms, num_slots)
        assert together.responses == alone.responses and together.truncated == alone.truncated


def test_samples_belong_to_their_prompt_and_noise_not_to_their_place():
    policy, args = tiny_policy("llama"), DecodingArgs(max_new_tokens=12)
    uniforms = noise(len(PROMPTS), 12)
    one = generate(policy, PROMPTS, args, ENDS, uniforms, 4).responses
    order = [4, 0, 8, 2, 6, 1, 3, 7, 5]
    other = generate(policy, [PROMPTS[i] for i in order], args, ENDS, uniforms[order], 3).responses
    assert other == [one[i] for i in order]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "bloom"])
def test_long_runs_drop_old_columns_and_stay_correct(architecture, monkeypatch):
    """Two slots answer thirty prompts one after the other, so the shared column advances far beyond the slab."""
    monkeypatch.setattr(slots, "SPARE_COLUMNS", 5)
    moves = []
    drop = slots.Slots._drop_columns
    monkeypatch.setattr(slots.Slots, "_drop_columns", lambda own, count: (moves.append(count), drop(own, count)))
    policy, args = tiny_policy(architecture), DecodingArgs(max_new_tokens=10)
    prompts = rows_of(*[1 + i % 6 for i in range(30)])
    uniforms = noise(30, 10)
    alone = [generate(policy, [p], args, ENDS, u[None], 1).responses[0] for p, u in zip(prompts, uniforms)]
    for num_slots in (2, 5):
        moves.clear()
        assert generate(policy, prompts, args, ENDS, uniforms, num_slots).responses == alone
        assert len(moves) > 1 and min(moves) > 0


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 9), st.integers(1, 30))
def test_for_any_prompts_and_slots_each_answer_is_that_of_its_prompt_alone(lengths, longest, num_slots, spare):
    policy, args = tiny_policy("llama"), DecodingArgs(max_new_tokens=longest)
    prompts, uniforms = rows_of(*lengths), noise(len(lengths), longest, seed=len(lengths))
    before = slots.SPARE_COLUMNS
    slots.SPARE_COLUMNS = spare
    try:
        together = generate(policy, prompts, args, ENDS, uniforms, num_slots)
    finally:
        slots.SPARE_COLUMNS = before
    for prompt, row, answer in zip(prompts, uniforms, together.responses):
        assert generate(policy, [prompt], args, ENDS, row[None], 1).responses == [answer]


def test_a_run_longer_than_the_real_spare_columns_stays_correct():
    policy, args = tiny_policy("llama"), DecodingArgs(max_new_tokens=20)
    prompts = rows_of(*[1 + i % 9 for i in range(24)])
    uniforms = noise(24, 20)
    alone = [generate(policy, [p], args, [1], u[None], 1).responses[0] for p, u in zip(prompts, uniforms)]
    assert sum(map(len, alone)) > 2 * (9 + 20 + slots.SPARE_COLUMNS)
    assert generate(policy, prompts, args, [1], uniforms, 2).responses == alone


def test_a_response_ends_with_the_end_token_or_is_marked_truncated():
    policy, args = tiny_policy("llama"), DecodingArgs(max_new_tokens=8)
    sampled = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4)
    assert any(sampled.truncated) and not all(sampled.truncated)
    for answer, truncated in zip(sampled.responses, sampled.truncated):
        assert 1 <= len(answer) <= 8
        assert truncated == (answer[-1] not in ENDS)
        assert not truncated or len(answer) == 8  # nothing is cut before its length is used up
        assert not set(answer[:-1]) & set(ENDS)  # and nothing follows an end token


def test_an_end_token_at_the_very_last_place_is_no_truncation():
    policy = tiny_policy("llama")
    free = DecodingArgs(max_new_tokens=6, do_sample=False)
    (answer,) = generate(policy, [PROMPTS[0]], free, [], noise(1, 6), 1).responses
    first = answer.index(answer[-1]) + 1
    args = DecodingArgs(max_new_tokens=first, do_sample=False)
    sampled = generate(policy, [PROMPTS[0]], args, [answer[-1]], noise(1, first), 1)
    assert sampled.responses == [answer[:first]] and sampled.truncated == [False]


def test_generating_leaves_a_training_model_in_training_mode_but_without_dropout():
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    policy = tiny_policy("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    args = DecodingArgs(max_new_tokens=6, do_sample=False)
    sampled = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 6), 4)
    assert sampled.responses == greedy_by_transformers(model, PROMPTS, 6, ENDS)
    assert policy.training and policy.model.training


def test_a_prompt_that_leaves_no_room_is_refused_with_what_fits():
    policy = tiny_policy("llama", max_position_embeddings=16)
    with error_naming(UsageError, "--max_new_tokens 6", "12", "16 positions", "at most 4"):
        generate(policy, PROMPTS, DecodingArgs(max_new_tokens=6), ENDS, noise(len(PROMPTS), 6))
    generate(policy, PROMPTS, DecodingArgs(max_new_tokens=4), ENDS, noise(len(PROMPTS), 4))


# ---------------------------------------------------------------------------------------------- distribution
def by_processors(logits: torch.Tensor, args: DecodingArgs, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities (V,) after Hugging Face's own processors, in the order of its `generate`; ids: the text so far."""
    names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    config = GenerationConfig(**{name: getattr(args, name) for name in names})
    model = tiny_model("llama")
    processors = model._get_logits_processor(config, input_ids_seq_length=len(ids), logits_processor=[])
    return processors(ids[None], logits[None]).softmax(-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_k": 1},
        {"top_k": 1000},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5, "top_k": 9},
        {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.08, "repetition_penalty": 1.3},
    ],
)
def test_the_sampling_distribution_is_that_of_the_processors_of_transformers(options):
    """Uniforms on a fine grid give each token exactly its share of the grid."""
    args = DecodingArgs(**options)
    logits = 2 * torch.randn(VOCABULARY)
    points = 20_000
    uniforms = (torch.arange(points) + 0.5) / points
    ids = torch.tensor([3, 14, 15, 9, 2, 6, 5, 3, 5])
    seen = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
    tokens, logprobs, removed = sample(logits.expand(points, -1), uniforms, args, seen.expand(points, -1))
    assert torch.allclose(
        logprobs, (logits / args.temperature).log_softmax(-1)[tokens], atol=1e-5
    )  # without penalty and truncation
    share = torch.bincount(tokens, minlength=VOCABULARY) / points
    expected = by_processors(logits, args, ids)
    assert (share - expected).abs().max() < 2 / points
    assert (expected[tokens.unique()] > 0).all()
    penalised = by_processors(logits, DecodingArgs(repetition_penalty=args.repetition_penalty), ids).log()
    kept = (penalised / args.temperature).softmax(-1)[expected > 0].sum()
    assert float(removed[0]) == pytest.approx(float(1 - kept), abs=1e-5)


def test_a_uniform_of_almost_one_never_gives_a_removed_token():
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0, -50.0]])
    for top_p in (1.0, 0.6):
        for u in (0.0, 1 - 2**-24, 1.0):  # 1 by rounding
            token, _, _ = sample(logits, torch.tensor([u]), DecodingArgs(top_k=3, top_p=top_p))
            assert int(token) in (0, 1, 2)


def test_greedy_takes_the_most_likely_token():
    logits = torch.randn(4, VOCABULARY)
    tokens, _, removed = sample(logits, torch.rand(4), DecodingArgs(do_sample=False))
    assert torch.equal(tokens, logits.argmax(-1)) and (removed == 0).all()


def test_removed_mass_is_the_mean_over_all_sampled_tokens():
    policy = tiny_policy("llama")
    free = generate(policy, PROMPTS, DecodingArgs(max_new_tokens=6), ENDS, noise(len(PROMPTS), 6), 4)
    assert abs(free.removed_mass) < 1e-5
    args = DecodingArgs(max_new_tokens=6, top_k=5)
    sampled = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 6), 4)
    removed = []
    for prompt, answer in zip(PROMPTS, sampled.responses):
        logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        removed += (1 - logits.softmax(-1).topk(5).values.sum(-1)).tolist()
    assert sampled.removed_mass == pytest.approx(sum(removed) / len(removed), abs=1e-4)


# --------------------------------------------------------------------------------------------------- scoring
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mistral", "falcon"])
def test_logprobs_of_samples_are_those_the_engine_drew_from(architecture):
    """Stored while decoding, compared with one scoring pass over the finished text."""
    policy, temperature = tiny_policy(architecture), 0.8
    args = DecodingArgs(max_new_tokens=12, temperature=temperature, top_k=30)
    sampled = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 12), 3)
    batch = response_batch(PROMPTS, sampled.responses, pad_id=1)
    scored = score_logprobs(policy, batch, temperature, batch_size=4)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, sampled.responses)):
        mine = scored[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)].tolist()
        assert mine == pytest.approx(sampled.logprobs[row], abs=2e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_at_bf16_mixed_sampling_and_scoring_see_the_same_weights_and_each_is_cast_once(frozen):
    policy = tiny_policy("llama").requires_grad_(not frozen)
    matrices = {parameter.data_ptr() for parameter in policy.parameters() if parameter.dim() == 2}
    cast: list[int] = []

    class WatchCasts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in matrices:
                cast.append(args[0].data_ptr())
            return function(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16):
        with WatchCasts():
            sampled = generate(policy, PROMPTS[:1], DecodingArgs(max_new_tokens=12), [], noise(1, 12), 1)
        scored = score_logprobs(policy, response_batch(PROMPTS[:1], sampled.responses, 1), 1.0, 1)[0, -12:]
    assert len(cast) == len(set(cast)) == 15  # seven of each layer, and the head
    assert scored.tolist() == pytest.approx(sampled.logprobs[0], abs=0.05)
    assert all(parameter.requires_grad != frozen for parameter in policy.parameters())


def test_prompts_prefilled_in_many_passes_give_the_same_samples(monkeypatch):
    policy, prompts = tiny_policy("llama"), [p for p in PROMPTS for _ in range(2)]
    args = DecodingArgs(max_new_tokens=6)
    batch = response_batch(PROMPTS, PROMPTS, 1)
    shapes = []  # of each forward pass
    policy.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    found = []
    for tokens in (10_000, 8):
        monkeypatch.setitem(INFERENCE_TOKENS, "cpu", tokens)
        shapes.clear()
        found.append(generate(policy, prompts, args, [1], noise(len(prompts), 6), num_slots=5))
        prefills = [shape for shape in shapes if len(shape) == 2 and shape[1] > 1]  # no decoding steps
        assert any(rows > 1 and rows * width > 8 for rows, width in prefills) == (tokens > 8)
        shapes.clear()
        score_logprobs(policy, batch, 1.0, batch_size=5)
        assert any(rows > 1 and rows * width > 8 for rows, width in shapes) == (tokens > 8)
    assert found[0].responses == found[1].responses
    for one, other in zip(found[0].logprobs, found[1].logprobs):
        assert one == pytest.approx(other, abs=1e-5)


def test_scoring_is_the_same_for_every_batch_size_and_without_dropout():
    policy = tiny_policy("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    batch = response_batch(PROMPTS, [[*row, 1] for row in reversed(PROMPTS)], 1)
    whole = score_logprobs(policy, batch, 0.7, 100)
    for size in (1, 2, 5):
        assert torch.allclose(score_logprobs(policy, batch, 0.7, size), whole, atol=1e-5)
    assert policy.training and (whole[~batch.action_mask] == 0).all() and (whole[batch.action_mask] < 0).all()


def test_a_change_of_the_weights_is_seen_by_sampling_and_by_scoring():
    policy = tiny_policy("llama")
    args = DecodingArgs(max_new_tokens=8, do_sample=False)
    before = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4).responses
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    after = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4).responses
    assert before != after == greedy_by_transformers(policy.model, PROMPTS, 8, ENDS)


def test_sampling_with_adapters_equals_sampling_with_the_exported_model(base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(finetune_mode="lora"), tokenizer)
    plain = copy.deepcopy(merged_model(policy))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    args = DecodingArgs(max_new_tokens=8, do_sample=False)
    sampled = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4).responses
    exported = merged_model(policy).eval()
    assert sampled == greedy_by_transformers(exported, PROMPTS, 8, ENDS)
    assert sampled != greedy_by_transformers(plain.eval(), PROMPTS, 8, ENDS)


def test_the_reference_on_a_shared_backbone_uses_its_own_adapters(base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(finetune_mode="lora"), tokenizer, shares=True)
    reference = policy.reference()
    args = DecodingArgs(max_new_tokens=8, do_sample=False)
    before = generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4).responses
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert generate(policy, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4).responses != before
    assert generate(reference, PROMPTS, args, ENDS, noise(len(PROMPTS), 8), 4).responses == before


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_a_rollout_marks_the_sampled_tokens_and_nothing_else(base_model, tokenizer, pad_is_eos, monkeypatch):
    tokenizer = copy.deepcopy(tokenizer)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    eos = tokenizer.eos_token_id
    answers = [[40, 41, eos], [42, 43, 44, 45], [eos]]
    sampled = Completions(answers, [[-0.1, -0.2, -0.3], [-0.4, -0.5, -0.6, -0.7], [-0.8]], [False, True, False], 0.0)
    monkeypatch.setattr("lightrlhf.generation.rollout.generate", lambda *args: sampled)
    policy = load_policy(str(base_model), ModelArgs(), tokenizer)
    rows = [{"input_ids": torch.tensor(ids), "columns": {"n": n}} for n, ids in enumerate(rows_of(4, 1, 6))]
    args = DecodingArgs(max_new_tokens=4)
    rollout = generate_rollout(policy, copy.deepcopy(policy), rows, args, tokenizer, noise(3, 4), 2)
    assert rollout.response_ids() == answers
    assert rollout.prompt_ids() == [row["input_ids"].tolist() for row in rows]
    assert rollout.truncated.tolist() == [False, True, False]
    assert [rollout.input_ids[i, 1:][rollout.action_mask[i]].tolist() for i in range(3)] == answers
    assert [row["n"] for row in rollout.columns] == [0, 1, 2]
    assert torch.allclose(-rollout.logprobs[rollout.action_mask], torch.arange(1, 9) / 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # where a decoding step rounds unlike a scoring pass
        rollout = generate_rollout(policy, copy.deepcopy(policy), rows, args, tokenizer, noise(3, 4), 2)
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)  # before any update: ratio 1, KL 0
    assert (rollout.logprobs[rollout.action_mask] < 0).all()


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "openai-gpt", "hrm_text", "bart"])
def test_an_architecture_that_the_engine_cannot_sample_from_is_refused(kind):
    if (model := zoo_model(kind)) is None:
        pytest.skip(f"this release of transformers has no {kind}")
    with error_naming(UsageError, kind, "sft and dpo"):
        policy = Policy(model)
        generate(policy, PROMPTS, DecodingArgs(max_new_tokens=2), ENDS, noise(len(PROMPTS), 2))


# ------------------------------------------------------------------------------------------------- logits not finite
@pytest.mark.parametrize("options", [{}, {"do_sample": False}, {"top_k": 3}, {"top_p": 0.5, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_one_line_with_the_model_and_the_prompts(bad, options):
    policy, args = tiny_policy("llama"), DecodingArgs(max_new_tokens=3, **options)
    policy.model.config.name_or_path = "some/model"
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[7] = bad
    prompts = [[8, 9], [8, 7], [9], [7, 7, 3]]
    generate(policy, [prompts[0]], args, range(61), noise(1, 3))  # ends at once, and never meets it
    with error_naming(NotFinite, "some/model", "1, 3 of 4 prompts") as raised:
        generate(policy, prompts, args, [token for token in range(61)], noise(4, 3))
    assert raised.value.indices == [1, 3]
    with error_naming(NotFinite, "some/model"):
        list(generate_steps(policy, prompts[1], args, [], noise(1, 3)))


def test_flash_attention_is_left_to_passes_that_train(monkeypatch):
    """The engine samples by sdpa, and gives the model its attention back; eager stands in for flash attention here."""
    policy = tiny_policy("llama")
    policy.model.set_attn_implementation("eager")
    monkeypatch.setattr(engine, "FLASH", "eager")
    used: list[str] = []
    ask = lambda: used.append(policy.model.config._attn_implementation)
    generate(policy, rows_of(3, 5), DecodingArgs(max_new_tokens=3), [], torch.rand(2, 3), before_step=ask)
    list(generate_steps(policy, [5, 6], DecodingArgs(max_new_tokens=3), [], torch.rand(1, 3)))
    assert used and set(used) == {"sdpa"} and policy.model.config._attn_implementation == "eager"
