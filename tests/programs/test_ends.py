"""Every place where a response ends: rollouts, `generate`, the demo, dialogues, scorers, and transformers."""

import json
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, reseal
from helpers.data import CHATML_TEMPLATE, LLAMA2_TEMPLATE, sentencepiece_like
from helpers.ends import EOS, GEMMA, PHI3, chatty_base, tokenizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from datasets_prep.common import PLAIN_TEMPLATE
from datasets_prep.common import load_tokenizer as load_for_data
from lightrlhf import generate, sft
from lightrlhf.cli.groups import DecodingArgs, ModelArgs
from lightrlhf.data.splits import save_split
from lightrlhf.data.tokens import decode, encode_prompt, encode_response
from lightrlhf.demo.models import load_model, stream_answer
from lightrlhf.envs import agents
from lightrlhf.generation import users
from lightrlhf.generation.dialogues import Dialogue, roll_out, user_turn_ids
from lightrlhf.generation.engine import generate as generate_all
from lightrlhf.generation.rollout import generate_rollout, store_sampling
from lightrlhf.models.given import as_policy
from lightrlhf.models.loading import load_policy
from lightrlhf.models.saving import export, merged_model
from lightrlhf.models.tokenizer import end_ids, load_tokenizer
from lightrlhf.rewards.encoding import Encoding, Sample
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl

WORDS = "a latte|two muffins|hello|oat|bread|print|May|clips|sum|n|Sunday|a|c|d|e|f|g|two|three|four|sold|I|You"
CHATS = [[{"role": "user", "content": words}] for words in WORDS.split("|")]
GREEDY = DecodingArgs(max_new_tokens=30, do_sample=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return chatty_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def ends(base):
    return load_tokenizer(None, str(base)).convert_tokens_to_ids([EOS, "<|im_end|>", "<|stop|>"])


@pytest.fixture(scope="module", params=["all", "lora"])
def trained(request, base, tmp_path_factory):
    """The checkpoint of an SFT run that changes no weight."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), load_tokenizer(None, str(base))
    prompt, answer = encode_prompt(tokenizer, CHATS[0]), encode_response(tokenizer, "of course")
    targets = [-100] * len(prompt) + answer
    row = {"prompt_len": len(prompt), "input_ids": [*prompt, *answer], "targets": torch.tensor(targets)}
    for split in ("train", "validation"):
        save_split(folder / "data", "finetune", split, [row])
    tokenizer.save_pretrained(folder / "data" / "tokenizer")
    reseal(folder / "data")
    flags = ["--data_dir", str(folder / "data"), "--log_dir", str(folder), "--max_steps", "1", "--eval_interval", "0"]
    flags += ["--learning_rate", "1e-30", "--mini_batch_size", "1", "--micro_batch_size", "1"]
    return last_checkpoint(sft.main([*flags, "--model_name", str(base), "--finetune_mode", request.param, *CPU]))


def greedy_rows(folder: Path, model: Path) -> list[dict]:
    """Rows of `lightrlhf.generate` for the chats."""
    write_jsonl(folder / "prompts.jsonl", [{"prompt": chat} for chat in CHATS])
    flags = ["--prompts_file", str(folder / "prompts.jsonl"), "--output_file", str(folder / "rows.jsonl")]
    flags += ["--max_new_tokens", "30", "--do_sample", "False", "--accelerator", "cpu"]
    (file,) = generate.main([*flags, "--model_name", str(model)])
    return read_jsonl(file)


def check_ended(responses: list[list[int]], truncated: list[bool], ends: list[int]) -> None:
    """Each response ends at its first end token, or was truncated; all ends and truncation occur."""
    assert {ids[-1] for ids, cut in zip(responses, truncated) if not cut} == {*ends} and any(truncated)
    for ids, cut in zip(responses, truncated):
        assert not {*ids[:-1]} & {*ends} and cut == (ids[-1] not in ends)
        assert not cut or len(ids) == 30


# ------------------------------------------------------------------------------------------------------- what ends it
def test_ends_are_the_tokenizers_the_templates_and_the_models(base, ends):
    tokenizer = load_tokenizer(None, str(base))
    policy = load_policy(str(base), ModelArgs(), tokenizer)
    assert end_ids(tokenizer, policy.model) == policy.model.generation_config.eos_token_id == ends
    given = as_policy(policy.model, ModelArgs(), tokenizer)
    assert end_ids(tokenizer, given.model) == given.model.generation_config.eos_token_id == ends
    policy.model.generation_config.eos_token_id = [11, 12]  # of a tokenizer with other ids: here they are text
    assert end_ids(tokenizer, policy.model) == ends[:2]
    policy.model.generation_config = None
    assert end_ids(tokenizer, policy.model) == ends[:2]
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert end_ids(tokenizer, policy.model) == ends[:1]


def test_an_end_that_is_a_plain_entry_of_the_vocabulary_is_no_text(tmp_path):
    from tokenizers import Tokenizer, models

    words = ["<unk>", "</s>", "<|eot|>", "\n", *"abc<|eot>"]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 3]}))
    for tokenizer in (load_tokenizer(None, str(tmp_path)), load_for_data(str(tmp_path))):
        assert not {1, 2} & {*encode_prompt(tokenizer, "a<|eot|>b</s>")}
        assert encode_prompt(tokenizer, "a\nb")[1] == 3  # an end, too, but a line break is text


def test_one_end_is_stored_as_a_number(base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(), tokenizer)
    assert policy.model.generation_config.eos_token_id == tokenizer.eos_token_id
    store_sampling(policy, DecodingArgs(eos_ids=[7, tokenizer.eos_token_id, 9]), tokenizer)
    assert policy.model.generation_config.eos_token_id == [tokenizer.eos_token_id, 7, 9]


# ---------------------------------------------------------------------------------------------------- after training
@pytest.mark.slow
def test_a_trained_model_keeps_every_end_and_stops_there(trained, ends, tmp_path):
    stored = json.loads((trained / "generation_config.json").read_text())
    assert stored["eos_token_id"] == ends
    rows = greedy_rows(tmp_path, trained)
    responses = [row["response_ids"][0] for row in rows]
    check_ended(responses, [row["truncated"][0] for row in rows], ends)
    assert not any("<|" in row["responses"][0] for row in rows)


@pytest.mark.slow
def test_transformers_stops_at_the_same_places(trained, tmp_path):
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModelForCausalLM.from_pretrained(trained)
    config = GenerationConfig.from_pretrained(trained)
    for row in greedy_rows(tmp_path, trained):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")
        prompt = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
        ids = model.generate(prompt, generation_config=config, do_sample=False, max_new_tokens=30)[0]
        assert ids[prompt.shape[1] :].tolist() == row["response_ids"][0]


@pytest.mark.slow
def test_the_demo_stops_at_the_same_places(trained, tmp_path):
    model = load_model(str(trained), None, torch.device("cpu"), ModelArgs())
    for row in greedy_rows(tmp_path, trained)[:12]:
        *_, answer = stream_answer(model, row["prompt"], GREEDY, 0)
        assert (answer.ids, answer.truncated) == (row["response_ids"][0], row["truncated"][0])


@pytest.mark.slow
def test_a_rollout_ends_there_and_trains_one_end_token_a_response(trained, ends):
    tokenizer = load_tokenizer(None, str(trained))
    policy = load_policy(str(trained), ModelArgs(), tokenizer).eval()
    rows = [{"input_ids": encode_prompt(tokenizer, chat)} for chat in CHATS]
    rollout = generate_rollout(policy, policy, rows, GREEDY, tokenizer, torch.rand(len(rows), 30), 8)
    check_ended(rollout.response_ids(), rollout.truncated.tolist(), ends)
    actions = [rollout.input_ids[i, 1:][rollout.action_mask[i]].tolist() for i in range(len(rows))]
    assert actions == rollout.response_ids()


def test_a_merged_adapter_keeps_every_end(base, ends, tmp_path):
    tokenizer = load_tokenizer(None, str(base))
    policy = load_policy(str(base), ModelArgs(finetune_mode="lora"), tokenizer)
    store_sampling(policy, DecodingArgs(eos_ids=[77]), tokenizer)
    for name, merge in (("adapter", False), ("merged", True)):
        (tmp_path / name).mkdir()
        if merge:
            merged_model(policy).save_pretrained(tmp_path / name)
        else:
            export(policy, tmp_path / name, tmp_path / "base")
        again = load_policy(str(tmp_path / name), ModelArgs(), tokenizer)
        assert again.model.generation_config.eos_token_id == [*ends, 77]


# ---------------------------------------------------------------------------------------------------------- dialogues
def test_a_dialogue_goes_on_after_the_end_of_a_turn_as_its_template_does(base, ends):
    tokenizer = load_tokenizer(None, str(base))
    policy = load_policy(str(base), ModelArgs(), tokenizer).eval()
    starts = [Dialogue(i, chat, encode_prompt(tokenizer, chat)) for i, chat in enumerate(CHATS)]
    rolled = roll_out(policy, tokenizer, starts, 2, lambda rows, seed: ["And?"] * len(rows), GREEDY, 0, 8)
    check_ended([row.turn_ids(0) for row in rolled], [row.truncated[0] for row in rolled], ends)
    shown = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    for row in rolled:
        (_, end), (start, _) = row.turn_spans
        assert tokenizer.decode(row.input_ids[end:start]) == shown
        assert not any("<|" in message["content"] for message in row.messages)


@pytest.mark.parametrize("template, written", [(CHATML_TEMPLATE, ""), (PHI3, EOS), (GEMMA, ""), (PLAIN_TEMPLATE, "")])
def test_turns_read_as_the_whole_dialogue_does(template, written):
    """written: what the template adds after a whole dialogue."""
    marks = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>")
    check_turns(tokenizer_of(template, *marks), written)


def test_turns_of_sentencepiece_read_as_the_whole_dialogue_does(tmp_path):
    tokenizer = sentencepiece_like(tmp_path)
    tokenizer.chat_template = LLAMA2_TEMPLATE
    check_turns(tokenizer, "")


def check_turns(tokenizer, written: str) -> None:
    words = [("user", "a latte"), ("assistant", "of course"), ("user", "And?"), ("assistant", "two")]
    messages = [{"role": role, "content": text} for role, text in words]
    encoding = Encoding(tokenizer)
    prompt, reply = encoding.prompt_and_response(Sample(messages[:1], "of course"))
    longer, _ = encoding.prompt_and_response(Sample(messages[:3], "two"))
    assert [*prompt, *reply, *user_turn_ids(tokenizer, "And?")] == longer
    whole = str(tokenizer.apply_chat_template(messages, tokenize=False)).rstrip().removesuffix(written).rstrip()
    assert (
        sum(encoding.prompt_and_response(Sample(messages[:3], "two")), [])
        == tokenizer(whole, add_special_tokens=False)["input_ids"]
    )


# ------------------------------------------------------------------------------------------------------------ scorers
def test_a_scorer_ends_a_turn_once_and_a_truncated_one_not_at_all():
    tokenizer = tokenizer_of(PHI3, "<|user|>", "<|assistant|>", "<|end|>")
    end, eos = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id
    for template, last in ((PHI3, end), (PLAIN_TEMPLATE.replace(" + eos_token", ""), eos)):
        tokenizer.chat_template = template
        _, whole = Encoding(tokenizer).prompt_and_response(Sample(CHATS[0], "yes"))
        _, cut = Encoding(tokenizer).prompt_and_response(Sample(CHATS[0], "yes", truncated=True))
        assert whole[-1] == last and cut == whole[:-1] and not {end, eos} & {*cut}


def test_a_scorer_takes_sampled_ids_that_end_as_its_own_turns_do():
    tokenizer = tokenizer_of(CHATML_TEMPLATE, "<|im_start|>", "<|im_end|>", "<|other|>")
    prompt, words = encode_prompt(tokenizer, CHATS[0]), tokenizer("yes")["input_ids"]
    eos, end, other = tokenizer.convert_tokens_to_ids([EOS, "<|im_end|>", "<|other|>"])
    taken = {
        (last, cut)
        for last in (eos, end, other)
        for cut in (False, True)
        if Encoding(tokenizer).sampled_ids(Sample(CHATS[0], "yes", cut, prompt, [*words, last]))
    }
    assert taken == {(eos, False), (end, False), (other, True)}


def test_an_end_that_is_no_special_token_is_not_part_of_the_text():
    tokenizer = tokenizer_of(CHATML_TEMPLATE, added=("<|im_start|>", "<|im_end|>"))
    ids = tokenizer("of course<|im_end|>")["input_ids"]
    assert decode(tokenizer, ids) == "of course" != tokenizer.decode(ids, skip_special_tokens=True)


def test_a_user_and_a_reflector_stop_there_too(base, ends, monkeypatch):
    tokenizer, seen = load_tokenizer(None, str(base)), []
    policy = load_policy(str(base), ModelArgs(), tokenizer).eval()

    def sampled(policy, prompts, args, eos_ids, *rest, **options):
        seen.append(eos_ids)
        return generate_all(policy, prompts, args, eos_ids, *rest, **options)

    for module in (users, agents):
        monkeypatch.setattr(module, "generate", sampled)
    users.ModelUser(policy, tokenizer, GREEDY, 8)([Dialogue(0, CHATS[0], [1])], 0)
    agents.Reflector(policy, tokenizer, agents.ActingArgs(), 8)._generate(["a latte"], [], torch.zeros(1, 100))
    assert seen == [ends, ends]
