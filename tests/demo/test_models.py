"""Models of the demo: streamed answers, log-ratios, the cache, and prompts."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, reseal, rows_of, save_model, tiny_policy
from helpers.data import chatml_like, gpt2_like, llama3_like, sentencepiece_like
from helpers.errors import error_naming

from datasets_prep.common import complete
from datasets_prep.summarization.prepare_data import from_feedback
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DecodingArgs, FrozenArgs, ModelArgs
from lightrlhf.data.splits import load_prompts
from lightrlhf.data.tokens import encode_prompt, messages_of
from lightrlhf.demo.markup import tokens_as_html
from lightrlhf.demo.models import (
    Answer,
    LoadedModel,
    ModelCache,
    as_prompt,
    example_prompt,
    macro_segments,
    measure,
    stream_answer,
    token_texts,
)
from lightrlhf.demo.summaries import summary_fields, summary_prompt
from lightrlhf.generation.engine import generate, generate_steps
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.sft import main
from lightrlhf.storage.run_dir import choices, locate

DEVICE = torch.device("cpu")
TALK = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello."}]
TALK += [{"role": "user", "content": "Two muffins,\nplease"}]


# ----------------------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize("sampling", [{}, {"do_sample": False}, {"top_k": 5, "repetition_penalty": 1.3}])
def test_a_stream_only_grows_and_ends_with_the_result_of_generate(sampling):
    policy, (prompt,), noise = tiny_policy("llama"), rows_of(9), torch.rand(1, 40)
    args = DecodingArgs(max_new_tokens=40, **sampling)
    steps = list(generate_steps(policy, prompt, args, [1], noise))
    responses = [step.responses[0] for step in steps]
    assert [len(ids) for ids in responses] == list(range(1, len(responses) + 1))
    assert all(responses[-1][: len(ids)] == ids for ids in responses)
    assert steps[-1] == generate(policy, [prompt], args, [1], noise)


def test_a_stream_ends_at_a_stop_string(tokenizer, base_model):
    policy = load_policy(str(base_model), ModelArgs(), tokenizer).eval()
    args, noise = DecodingArgs(max_new_tokens=30, stop_strings=["e"]), torch.rand(1, 30)
    prompt = encode_prompt(tokenizer, "Guest: A tea.\nBarista:")
    steps = list(generate_steps(policy, prompt, args, [tokenizer.eos_token_id], noise, tokenizer))
    last = steps[-1]
    assert len(steps) == len(last.responses[0])  # nothing is sampled after it
    assert last == generate(policy, [prompt], args, [tokenizer.eos_token_id], noise, tokenizer=tokenizer)
    assert not last.truncated[0] and len(last.responses[0]) < 30


def test_interleaved_streams_of_one_model_do_not_mix():
    policy, args = tiny_policy("gpt2"), DecodingArgs(max_new_tokens=20)
    prompts, noise = rows_of(4, 11, 7), torch.rand(3, 20)
    streams = [generate_steps(policy, p, args, [1], noise[i : i + 1]) for i, p in enumerate(prompts)]
    last = [None] * 3
    while any(stream is not None for stream in streams):
        for i, stream in enumerate(streams):
            step = stream and next(stream, None)
            last[i], streams[i] = step or last[i], stream if step else None
    alone = [generate(policy, [p], args, [1], noise[i : i + 1]) for i, p in enumerate(prompts)]
    assert last == alone


# ------------------------------------------------------------------------------------------------------------- cache
@pytest.fixture(scope="module")
def lora_dir(cafe_data, sft_dir, logs):
    """A LoRA stage on top of the supervised one."""
    flags = ["--max_steps", "2", "--finetune_mode", "lora", "--learning_rate", "1e-2", "--lr_warmup_steps", "0"]
    flags += ["--experiment_name", "lora"]
    return main(["--data_dir", str(cafe_data), "--model_name", sft_dir, "--log_dir", str(logs), *CPU, *flags])


def answer_of(model: LoadedModel, prompt, seed: int = 3, **settings) -> Answer:
    *_, answer = stream_answer(model, prompt, DecodingArgs(**({"max_new_tokens": 12} | settings)), seed)
    return answer


def test_every_checkpoint_and_its_start_model_generate_as_loaded_by_themselves(sft_dir, lora_dir, base_model):
    cache = ModelCache([sft_dir, lora_dir], DEVICE)
    first, supervised, lora = cache.labels()
    assert (first, supervised, lora) == ("pretrained llama", "rlhf-supervised-finetuning step 2", "lora step 2")
    assert cache.newest() == cache.labels()
    answers = {label: answer_of(cache.model(label), TALK) for label in cache.labels()}
    assert len({tuple(answer.ids) for answer in answers.values()}) > 1
    for label, source in (
        (first, base_model),
        (supervised, last_checkpoint(sft_dir)),
        (lora, last_checkpoint(lora_dir)),
    ):
        tokenizer = cache.model(label).tokenizer
        policy = load_policy(str(source), ModelArgs(), tokenizer)
        noise = torch.rand(1, 12, generator=torch.Generator().manual_seed(3))
        alone = generate(policy, [encode_prompt(tokenizer, TALK)], DecodingArgs(max_new_tokens=12), [0], noise)
        assert answers[label].ids == alone.responses[0]


def test_the_reference_is_the_model_that_training_started_from(sft_dir, lora_dir, base_model):
    cache = ModelCache([sft_dir, lora_dir], DEVICE)
    first, supervised, lora = cache.labels()
    assert cache.reference(first) is None
    assert cache.reference(lora) is cache.model(supervised)
    assert cache.reference(supervised) is cache.model(first)
    model, reference = cache.model(lora), cache.reference(lora)
    answer = answer_of(model, TALK, temperature=0.7)
    measures = measure(model, reference, answer, 0.7)
    expected = 0.0
    for one, sign in ((model, 1), (reference, -1)):
        ids = torch.tensor([answer.prompt_ids + answer.ids])
        with torch.no_grad(), one.policy.active():
            logits = one.policy.model(ids).logits[0, len(answer.prompt_ids) - 1 : -1].double()
        chosen = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])
        expected += sign * float(chosen.sum())
    assert measures.kl == pytest.approx(expected, abs=1e-4)
    assert len(measures.log_ratios) == len(answer.ids)
    assert measure(model, model, answer, 0.7).kl == 0


@pytest.mark.thorough
def test_twenty_swaps_leave_one_model_in_memory(tmp_path, tokenizer, cafe_data):
    wide = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 3}
    folders = [str(save_model("llama", tmp_path / name, tokenizer, **wide)) for name in "ab"]
    size = sum(file.stat().st_size for file in Path(folders[0]).iterdir()) / 2**20  # MiB
    cache = ModelCache(folders, DEVICE, capacity=1, data_dir=str(cafe_data))
    seen, used = [], []
    for swap in range(20):
        seen.append(weakref.ref(cache.model("ab"[swap % 2]).policy))
        answer_of(cache.model("ab"[swap % 2]), "Guest: A tea.\nBarista:", max_new_tokens=3)
        used.append(resident())
    assert [policy() is not None for policy in seen] == [False] * 19 + [True]
    assert size > 12 and used[-1] - used[3] < size, used


def resident() -> float:
    """Resident memory of this process in MiB; 0 on systems without /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_the_least_recently_used_model_is_unloaded_first(sft_dir, lora_dir):
    cache = ModelCache([sft_dir, lora_dir], DEVICE, capacity=2)
    first, supervised, lora = cache.labels()
    kept = cache.model(first)
    cache.model(supervised), cache.model(first), cache.model(lora)
    assert cache.model(first) is kept
    assert len(cache.loaded) == 2


def test_a_folder_without_a_model_is_refused(tmp_path):
    with error_naming(UsageError, f"--model_name {tmp_path}", "config.json", "args.json"):
        ModelCache([str(tmp_path)], DEVICE)


def test_a_reward_model_is_refused(rm_dir):
    with pytest.raises(UsageError, match="--rm_experiment_dir"):
        ModelCache([rm_dir], DEVICE)


def test_a_damaged_checkpoint_is_named_and_others_still_load(sft_dir, tmp_path):
    folder = shutil.copytree(sft_dir, tmp_path / "sft")
    cache = ModelCache([str(folder)], DEVICE)
    first, supervised = cache.labels()
    weights = last_checkpoint(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match="model.safetensors"):
        cache.model(supervised)
    assert answer_of(cache.model(first), TALK).ids
    shutil.rmtree(last_checkpoint(folder))
    with pytest.raises(UsageError, match=f"{supervised}"):
        cache.model(supervised)


def test_adapters_on_weights_in_four_bits_generate(lora_dir, cafe_data):
    pytest.importorskip("bitsandbytes", reason="needs pip install -e '.[quantisation]'")
    args = FrozenArgs(load_in_4bit=True)
    cache = ModelCache([lora_dir], DEVICE, model_args=args)
    label = cache.labels()[-1]
    answer = answer_of(cache.model(label), TALK)
    assert len(answer.ids) > 0
    assert abs(measure(cache.model(label), cache.reference(label), answer, 1.0).kl) > 0


def test_an_empty_and_a_too_long_prompt_are_refused(sft_dir):
    model = ModelCache([sft_dir], DEVICE).model("rlhf-supervised-finetuning step 2")
    with pytest.raises(UsageError, match="prompt"):
        answer_of(model, "")
    with pytest.raises(UsageError, match="256 positions"):
        answer_of(model, "tea " * 200, max_new_tokens=100)


def test_paths_of_an_experiment_are_found_from_elsewhere(tmp_path, monkeypatch):
    run = tmp_path / "there" / "out" / "logs" / "rlhf-ppo" / "cafe" / "tiny" / "2026"
    data = tmp_path / "there" / "data"
    for folder in (run, data):
        folder.mkdir(parents=True)
    (run / "args.json").write_text(json.dumps({"log_dir": "out/logs", "data_dir": "data", "ref_model": "gone"}))
    reseal(run)
    monkeypatch.chdir(tmp_path)
    assert locate(str(run), "data_dir") == str(data)
    assert locate(str(run / "checkpoint-000001"), "data_dir") == str(data)
    assert locate(str(run), "ref_model") == "gone" and locate(str(run), "model_name") is None
    assert list(choices([str(run)])) == ["2026"]


# ------------------------------------------------------------------------------------------------------------ tokens
def test_token_texts_concatenate_to_the_answer_and_are_escaped(tokenizer):
    ids = tokenizer(" A <b>latté</b> & a\nmuffin.", add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, [*ids, tokenizer.eos_token_id])
    assert "".join(texts) == " A <b>latté</b> & a\nmuffin." and texts[-1] == ""
    shown = tokens_as_html(texts, [1.0, -9.0] + [0.0] * (len(texts) - 2), [0, 0] + [1] * (len(texts) - 2))
    assert "<b>" not in shown and "&amp;" in shown and shown.count('class="token ') == len(texts)
    assert (
        shown.count(" first") == 1
        and 'token more" title="log-ratio +1.000, segment 0" style="--strength:0.20"' in shown
    )
    assert 'token less" title="log-ratio -9.000, segment 0" style="--strength:0.60"' in shown and "<i> end</i>" in shown


def test_macro_actions_as_trained_and_of_any_length(sft_dir, lora_dir, tmp_path):
    cache = ModelCache([lora_dir], DEVICE)
    label = cache.labels()[-1]
    model = cache.model(label)
    answer = answer_of(model, TALK, max_new_tokens=11)
    measures = measure(model, cache.reference(label), answer, 1.0)
    number = range(len(answer.ids))

    def segments(**stored) -> list[int]:
        (tmp_path / "args.json").write_text(json.dumps(stored))
        reseal(tmp_path)
        return macro_segments(str(tmp_path), measures)

    assert macro_segments(lora_dir, measures, 3) == [i // 3 for i in number]
    assert segments() == list(number)
    assert segments(termination_condition="fixed", ngram=4) == [i // 4 for i in number]
    assert segments(termination_condition="fixed", ngram=0) == [0 for _ in number]
    for stored in (
        {"termination_condition": "ppl"},
        {"termination_condition": "randomized", "repeat_times": 3},
        {"termination_condition": "parsing", "parser": "python", "parsing_cutoff": 5},
    ):
        found = segments(**stored)
        assert len(found) == len(answer.ids) and found[0] == 0
        assert all(later - earlier in (0, 1) for earlier, later in zip(found, found[1:]))


# ----------------------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize("kind", ["cafe", "chatml", "llama3", "plain", "sentencepiece"])
def test_a_dialogue_is_read_back_from_its_ids(kind, tokenizer, tmp_path):
    makers = {"cafe": lambda: tokenizer, "chatml": chatml_like, "llama3": llama3_like, "plain": gpt2_like}
    made = makers[kind]() if kind in makers else sentencepiece_like(tmp_path)
    made = complete(made, None)
    for talk in (TALK[:1], TALK, [*TALK, {"role": "assistant", "content": "Of course."}, TALK[0]]):
        ids = encode_prompt(made, talk)
        assert messages_of(made, ids) == talk
        assert messages_of(made, ids[:-1]) is None
    with error_naming(UsageError, "messages"):
        as_prompt(made, encode_prompt(made, [*TALK, TALK[-1]])[:-1])
    for text in ("Guest: a tea", f"Guest: {made.eos_token} a tea"):  # the second is shown where it comes back as text
        if kind != "sentencepiece":
            ids = encode_prompt(made, text)
            assert encode_prompt(made, as_prompt(made, ids)) == ids


def test_a_system_message_is_read_back():
    talk = [{"role": "system", "content": "Be kind."}, *TALK]
    assert messages_of(chatml_like(), encode_prompt(chatml_like(), talk)) == talk


def test_a_text_that_the_template_would_not_reproduce_is_no_dialogue():
    made = complete(llama3_like(), None)  # its template trims the content of messages
    text = made.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    ids = made(text.replace("Hi there", " Hi there "), add_special_tokens=False)["input_ids"]
    assert messages_of(made, ids) is None


def test_the_summary_form_matches_the_training_data():
    info = {"subreddit": "cooking", "title": "My bread", "post": "It never rises.\nWhy?"}
    summaries = [{"text": "Flat bread."}, {"text": "Bread."}]
    row = from_feedback({"info": info, "summaries": summaries, "choice": 0})
    assert summary_prompt(*info.values()) == row["prompt"]
    assert summary_fields(row["prompt"]) == tuple(info.values())
    assert summary_fields("Guest: A tea.") is None


def test_the_test_split_and_the_example_are_dialogues(cafe_data, tokenizer):
    prompts = [as_prompt(tokenizer, row["input_ids"].tolist()) for row in load_prompts(cafe_data, "test")]
    assert len(prompts) == 12 and all(prompt[0]["role"] == "user" for prompt in prompts)
    example = as_prompt(tokenizer, example_prompt(str(cafe_data)))
    assert example == [{"role": "user", "content": "Could I get a large oat latte and two muffins, please?"}]


def test_a_missing_or_damaged_example_prompt_is_named(tmp_path):
    with error_naming(UsageError, "example_prompt.pt"):
        example_prompt(str(tmp_path))
    (tmp_path / "example_prompt.pt").write_bytes(b"no")
    with error_naming(UsageError, "example_prompt.pt", "damaged"):
        example_prompt(str(tmp_path))


def test_the_tokenizer_is_that_of_the_data(sft_dir, cafe_data):
    cache = ModelCache([sft_dir], DEVICE)
    own = load_tokenizer(cafe_data)
    assert cache.model("pretrained llama").tokenizer.get_vocab() == own.get_vocab()
    assert cache.model("pretrained llama").tokenizer.chat_template == own.chat_template
