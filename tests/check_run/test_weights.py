"""Log-probabilities recomputed with the weights: what explains a gap is named, and clean numbers have none."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers import tiny_model
from helpers.errors import error_naming

from lightrlhf import check_run
from lightrlhf.checks import gaps, weights
from lightrlhf.checks.step import Missing, Step
from lightrlhf.generation.sampling import restrict

ROWS, PROMPT, RESPONSE, VOCABULARY = 6, 8, 12, 61
PADDING = (0, 1, 2, 0, 3, 0)
NOTHING = gaps.Known()
KIND = "gpt2"  # whose positions are learned, so that a shift shows


def texts(seed: int = 0):
    """Ids, attention and loss mask, padded on the left."""
    ids = torch.randint(2, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(seed))
    attended = torch.arange(PROMPT + RESPONSE)[None] >= torch.tensor(PADDING)[:, None]
    return ids * attended, attended, (torch.arange(PROMPT + RESPONSE)[None] >= PROMPT).expand(ROWS, -1)


IDS, ATTENDED, TRAINED = texts()


def logits_of(model, ids=IDS, attended=ATTENDED, positions=None):
    """Logits that predict each token, (B, T, V), by a padded pass in float32, as trainers do."""
    positions = (attended.cumsum(1) - 1).clamp(min=0) if positions is None else positions
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=attended.long(), position_ids=positions).logits.float()
    return torch.nn.functional.pad(found[:, :-1], (0, 0, 1, 0))


def logprobs(logits, ids=IDS):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model of the step, another version of it, and one that has dropout: each in memory and loaded."""
    folder = tmp_path_factory.mktemp("weights")
    found = {"own": tiny_model(KIND), "other": tiny_model(KIND), "drop": tiny_model(KIND, attn_pdrop=0.3)}
    with torch.no_grad():
        for parameter in found["other"].parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    for name, model in found.items():
        model.save_pretrained(folder / name)
    loaded = {name: weights.load(str(folder / name), "--model_name") for name in found}
    return found, loaded, folder


def step_of(found, **config) -> Step:
    arrays = {"input_ids": IDS, "attention_mask": ATTENDED, "loss_mask": TRAINED, "old_logprobs": found}
    return Step({name: value.detach().numpy() for name, value in arrays.items()}, config)


def verdict_of(found, loaded, *, is_sampler=False, known=NOTHING, **config):
    check = "sampler" if is_sampler else "trainer"
    return gaps.check_array(step_of(found, **config), "old_logprobs", loaded, known, check, is_sampler)


def cut(logits, **settings):
    """Log-probabilities renormalised over what sampling keeps, and ids that it may have sampled."""
    args = type("Cut", (), {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings)
    kept = restrict(logits.double().softmax(-1).flatten(0, 1), args).view_as(logits)
    return (kept / kept.sum(-1, keepdim=True)).log()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_clean_log_probabilities_are_right(models, temperature):
    found = logprobs(logits_of(models[0]["own"]) / temperature)
    says = verdict_of(found, models[1]["own"], temperature=temperature)
    assert (says.says, says.fault) == ("right", "") and "float64" in says.evidence


def faults(model, other, dropping):
    """Log-probabilities with one fault each, by its name."""
    logits = logits_of(model)
    clean = logprobs(logits)
    columns = torch.arange(PROMPT + RESPONSE)[None].expand(ROWS, -1)
    every = torch.ones_like(ATTENDED)
    zeros = torch.where(columns >= PROMPT + 6, 0.0, clean)
    mixed = torch.where(torch.arange(ROWS)[:, None] % 2 == 0, clean, logprobs(logits_of(other)))
    without = torch.where(columns < PROMPT - 1, False, ATTENDED)
    half = copy.deepcopy(model).bfloat16()
    yield "temperature 0.8, not 1", logprobs(logits / 0.8)
    yield "log-probabilities one late", clean.roll(1, 1)
    yield "sign of log-probabilities", -clean
    yield "log-probabilities in another base", clean / np.log(10)
    yield "rows misaligned", clean.roll(1, 0)
    yield "missing log-probabilities read as 0", zeros
    yield "padding is read", logprobs(logits_of(model, attended=every, positions=columns))
    yield "positions count padding", logprobs(logits_of(model, positions=columns))
    yield "prompt missing", logprobs(logits_of(model, attended=without))
    yield "weights of another version: other", logprobs(logits_of(other))
    yield "rows of several versions", mixed
    yield "rounded to half precision", logprobs(logits_of(half))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield "dropout on in the pass", logprobs(logits_of(dropping.train()))
    yield "differs from the weights", clean - 3 * torch.rand(clean.shape)


NAMES = [name for name, _ in faults(*[tiny_model(KIND) for _ in range(3)])]


@pytest.mark.parametrize("fault", NAMES)
def test_a_fault_of_the_trainer_is_named(models, fault):
    made, loaded, folder = models
    found = dict(faults(made["own"], made["other"], made["drop"]))[fault]
    known = gaps.Known([loaded["other"]._replace(name="other")])
    own = loaded["drop" if "dropout" in fault else "own"]
    found = verdict_of(found, own, known=known, dtype="float32")
    assert (found.says, found.fault) == ("wrong", fault), found


def test_log_probabilities_at_another_temperature_than_the_setting_are_named(models):
    found = logprobs(logits_of(models[0]["own"]))
    assert verdict_of(found, models[1]["own"], temperature=0.7).fault == "temperature 1, not 0.7"


@pytest.mark.parametrize(
    "settings, name", [({"top_k": 9}, "renormalised over top_k 9"), ({"top_p": 0.8}, "renormalised over top_p 0.8")]
)
def test_renormalised_log_probabilities_are_the_samplers_and_not_the_trainers(models, settings, name):
    made, loaded, _ = models
    ids, place = IDS.clone(), torch.arange(ROWS)
    for column in range(PROMPT, PROMPT + RESPONSE):  # sampled in turn from what is kept
        kept = cut(logits_of(made["own"], ids), **settings)
        ids[place, column] = torch.multinomial(kept[:, column].exp(), 1)[:, 0]
    found = logprobs(cut(logits_of(made["own"], ids), **settings), ids)
    arrays = {"input_ids": ids, "attention_mask": ATTENDED, "loss_mask": TRAINED, "old_logprobs": found.float()}
    arrays = {key: value.numpy() for key, value in arrays.items()}
    given = gaps.check_array(Step(arrays, settings), "old_logprobs", loaded["own"], gaps.Known(), "sampler", True)
    assert given.says == "right" and "as sampled" in given.evidence
    trained = gaps.check_array(Step(arrays, settings), "old_logprobs", loaded["own"], gaps.Known(), "trainer", False)
    assert trained.says == "wrong" and trained.fault.split(" 0.")[0] == name.split(" 0.")[0]


def test_a_sampler_in_half_precision_is_right_and_said_so(models):
    half = copy.deepcopy(models[0]["own"]).bfloat16()
    found = verdict_of(logprobs(logits_of(half)), models[1]["own"], is_sampler=True, dtype="float32")
    assert found.says == "right" and "bfloat16" in found.evidence


def test_a_prefix_cache_of_older_weights_is_named(models):
    made, loaded, _ = models
    one_pass = weights.of_old_cache(loaded["other"].model)
    found = torch.zeros(IDS.shape)
    for text in weights.texts_of(step_of(found), VOCABULARY):
        values = one_pass(loaded["own"].model, text).log_softmax(-1)
        ids = torch.tensor([text.ids[place] for place in text.places])
        found[text.number, text.columns] = values.gather(-1, ids[:, None])[:, 0].float()
    known = gaps.Known([loaded["other"]._replace(name="other")])
    assert verdict_of(found, loaded["own"], known=known).fault == "stale prefix cache of other"
    assert verdict_of(found, loaded["own"]).fault == "differs from the weights"


def test_a_start_token_that_one_pass_lacks_is_named(models):
    made, loaded, _ = models
    started = torch.nn.functional.pad(IDS, (1, 0), value=1)
    longer = torch.cat([torch.ones(ROWS, 1).bool(), torch.ones_like(ATTENDED)], 1)
    arrays = {"input_ids": IDS, "attention_mask": torch.ones_like(ATTENDED), "loss_mask": TRAINED}
    arrays["old_logprobs"] = logprobs(logits_of(made["own"], started, longer), started)[:, 1:]
    step = Step({name: one.numpy() for name, one in arrays.items()}, {})
    found = gaps.check_array(step, "old_logprobs", loaded["own"], gaps.Known(bos_id=1), "trainer", False)
    assert found.fault == "start token added"


def test_ids_of_another_vocabulary_and_sums_cannot_be_told(models):
    own = models[1]["own"]
    arrays = {"input_ids": IDS.numpy() + 1000, "loss_mask": TRAINED.numpy(), "attention_mask": ATTENDED.numpy()}
    with pytest.raises(Missing, match="vocabulary"):
        weights.sample(Step(arrays, {}), VOCABULARY)
    with pytest.raises(Missing, match="tokens"):
        verdict_of(logprobs(logits_of(models[0]["own"])).sum(1), own)


# ------------------------------------------------------------------------------------------------------- the program
def test_the_program_reads_weights_and_says_what_they_lack(models, tmp_path, tokenizer):
    made, _, folder = models
    clean = logprobs(logits_of(made["own"]))
    step = step_of(clean).arrays
    np.savez(tmp_path / "step.npz", **{name: one.numpy() for name, one in step.items()}, config=json.dumps({}))
    found = check_run.run(check_run.CheckRunArgs(run=str(tmp_path / "step.npz"), model_name=str(folder / "own")))
    says = {one.name: (one.says, one.evidence) for one in found}
    assert says["trainer"][0] == "right"
    assert says["sampler"][1] == "needs sampler_logprobs of tokens"
    assert says["ref"][1] == "needs ref_logprobs of tokens"
    assert says["weights"][1] == "needs --model_after"
    with error_naming(ValueError, "--other_models", "--model_name"):
        check_run.run(check_run.CheckRunArgs(run=str(tmp_path / "step.npz"), other_models=[str(folder / "other")]))
