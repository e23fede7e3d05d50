"""What is trained and scored is the text that was given, whole, under tokenizers of every make; or it is refused."""

import pytest
from helpers.data import byte_level, collected, every, gpt2_like, llama3_like
from helpers.errors import error_naming
from helpers.templates import ZOO
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from datasets_prep.common import complete
from datasets_prep.encoding import LOSSY
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import controls
from lightrlhf.data.rows import load_rows
from lightrlhf.data.tokens import decode, encode_pair, encode_prompt, encode_response
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.encoding import Encoding, Sample

EOS = 1


def fast(backend: Tokenizer, **named: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<eos>"} | named)


def of_words(*words: str, splitter: str = "WhitespaceSplit", **named: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = getattr(pre_tokenizers, splitter)()
    return fast(backend, **{"unk_token": "<unk>"} | named)


# ------------------------------------------------------------------------------------------------ the first token
@pytest.mark.parametrize("unknown", ["<unk>", None])
@pytest.mark.parametrize("behind", ["", "c", "c<eos>"])
@pytest.mark.parametrize("splitter", ["WhitespaceSplit", "Whitespace", "BertPreTokenizer"])
def test_a_response_of_whole_words_keeps_its_first_word(splitter, behind, unknown):
    """Between an end token and a word, a tokenizer of whole words has no place for a separating character."""
    words = {word: index for index, word in enumerate(["<unk>", "<eos>", "b", "c", "d"])}
    rest = {word: index for word, index in words.items() if word != "<unk>"}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>") if unknown else models.WordLevel(rest))
    backend.pre_tokenizer = getattr(pre_tokenizers, splitter)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    for text in ("b c d", " b c d"):
        assert encode_response(tokenizer, text, behind) == [2, 3, 4, EOS]


@pytest.mark.parametrize("style", ["first", "always", "never"])
def test_a_response_keeps_an_unknown_first_character(style):
    """The separating character is unknown, too, and unknown characters in a row are one token."""
    pieces = [("<unk>", 0.0), ("<eos>", 0.0), ("▁", -1.0), ("a", -1.0), ("▁a", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    assert encode_response(tokenizer, "a") == [3, EOS]
    assert [index for index in encode_response(tokenizer, "龘 a") if index != 2] == [0, 4, EOS]
    assert encode_response(tokenizer, "龘")[-2:] == [0, EOS]


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace"])
def test_a_response_keeps_its_first_word_where_the_separator_is_no_token(kind):
    """A BPE without bytes and unknown tokens drops the separating character, so that a space merges with the word."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = getattr(pre_tokenizers, kind)()
    backend.decoder = getattr(decoders, kind)()
    trainer = trainers.BpeTrainer(vocab_size=99, special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator(["#### 72 a"] * 9, trainer)
    tokenizer = fast(backend)
    for text in ("#### 72", "72", "72 ####"):
        assert decode(tokenizer, encode_response(tokenizer, text)).split() == text.split()
        examples, _ = collected([{"prompt": "a", "completion": text}], complete(tokenizer, None), stage="finetune")
        (example,) = every(examples, "finetune")
        assert example.ids[0][example.prompt_len :].tolist() == encode_response(tokenizer, text)
        assert not example.notes


def test_a_response_does_not_begin_within_a_word():
    vocabulary = {"<unk>": 0, "<eos>": 1, "O": 2, "##f": 3, "Of": 4, "a": 5, "##a": 6}
    merges = [("O", "##f")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", continuing_subword_prefix="##"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert encode_response(fast(backend), "Of a", "a\n") == [4, 5, EOS]
    assert encode_response(fast(backend), "a", "a\n") == [5, EOS]


# ------------------------------------------------------------------------------------------------- control tokens
def test_a_normalised_text_that_becomes_a_control_token_is_refused():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -1.0), *((letter, -5.0) for letter in "</s>")]
    backend = Tokenizer(models.Unigram(pieces, 0))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    tokenizer = fast(backend, eos_token="</s>", unk_token="<unk>")
    text = "a \uff1c/s\uff1e a"
    for encode in (encode_prompt, encode_response, lambda *given: encode_pair(*given, "a")):
        with error_naming(UsageError, "control token"):
            encode(tokenizer, text)
        encode(tokenizer, "a a")
    examples, dropped = collected([{"prompt": "a", "completion": text}], tokenizer, stage="finetune")
    assert not every(examples, "finetune") and [row.reason for row in dropped] == ["special_token_in_text"]


@pytest.mark.parametrize("end", ["\n", "."])
def test_an_end_token_that_is_ordinary_text_is_refused(end):
    tokenizer = gpt2_like()
    tokenizer.eos_token_id = tokenizer(end)["input_ids"][0]
    for load in (lambda: load_tokenizer(None, given=tokenizer), lambda: complete(tokenizer, None)):
        with error_naming(UsageError, "end token"):
            load()
    tokenizer = of_words("a")
    tokenizer.add_tokens([AddedToken("<end>", single_word=True, special=True)])
    tokenizer.eos_token = "<end>"
    with error_naming(UsageError, "'<end>'"):
        load_tokenizer(None, given=tokenizer)


def test_a_bos_that_is_not_added_is_no_beginning_of_a_prompt():
    tokenizer = gpt2_like()
    assert tokenizer.bos_token == "<|endoftext|>"
    with error_naming(UsageError, "<|endoftext|>"):
        load_rows("prompts", "train", "", ["<|endoftext|>Hello"], tokenizer)
    unknown = of_words("b", bos_token="<unk>")  # which an unknown text begins with, too
    assert encode_prompt(unknown, "b b") == [2, 2]


def test_a_changed_end_token_is_one_that_texts_cannot_spell():
    tokenizer = gpt2_like()
    tokenizer.add_tokens(["END"])
    assert tokenizer.convert_tokens_to_ids("END") not in controls(tokenizer).ids
    tokenizer.eos_token = "END"
    assert encode_response(tokenizer, " the END is").count(tokenizer.eos_token_id) == 1


def test_the_beginning_of_a_control_token_is_none():
    def notes(content: str) -> set[str]:
        talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "no"}]
        examples, _ = collected([{"messages": talk}], llama3_like(), stage="finetune")
        return {note for example in every(examples, "finetune") for note in example.notes}

    assert notes("is 1 <") == set() and notes("<|eot_id|> is 1") == {"control_token_spelled_in_text"}


def test_a_reward_model_is_not_given_the_control_tokens_of_another_tokenizer():
    def make(*names: str) -> PreTrainedTokenizerFast:
        return fast(byte_level(["<eos>", *names]), extra_special_tokens=list(names))

    policy, scorer = make("<|user|>", "<|assistant|>"), make("<|pad|>", "<|sep|>")
    prompt = policy("<|user|>a latte<|assistant|>")["input_ids"]
    sample = Sample("a latte", "ok", False, prompt, encode_response(policy, "ok"), {}, policy)
    assert Encoding(scorer).prompt_and_response(sample)[0] == encode_prompt(scorer, "a latte")
    assert Encoding(policy).prompt_and_response(sample)[0] == prompt


def test_a_pair_has_no_padding_within():
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "a": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing(single, pair, [("[CLS]", 1), ("[SEP]", 2)])
    backend.enable_padding(length=6, pad_id=3, pad_token="[PAD]")
    tokenizer = fast(backend, eos_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]")
    assert encode_pair(tokenizer, "a [", "a")["input_ids"] == [1, 4, 0, 2, 4, 2]


# ---------------------------------------------------------------------------------------- rows, and what is noted
@pytest.mark.parametrize(
    "stage, row, part",
    [
        ("finetune", {"prompt": " \n", "completion": "a a"}, "prompt"),
        ("preference", {"prompt": "a", "chosen": " ", "rejected": "a"}, "chosen"),
        ("unpaired", {"prompt": "a", "completion": "", "label": True}, "completion"),
    ],
)
def test_given_rows_without_a_prompt_or_a_response_are_refused(stage, row, part):
    with error_naming(UsageError, "row 0", part):
        load_rows(stage, "train", "", [row], of_words("a"))


def test_given_rows_of_a_template_that_counts_a_part_of_an_answer_are_refused():
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": "Of course!"}
    with error_naming(UsageError, "generation tags"):
        load_rows("finetune", "train", "", [row], ZOO["partial_tags"].tokenizer)


@pytest.mark.parametrize("prompt, completion", [("a <", "a a"), ("a", "a <"), ("a:", "a a"), ("a", "b a")])
def test_a_text_that_tokens_do_not_give_back_is_noted(prompt, completion):
    tokenizer = complete(of_words("a", splitter="Whitespace"), None)
    examples, _ = collected([{"prompt": prompt, "completion": completion}], tokenizer, stage="finetune")
    assert [example.notes for example in every(examples, "finetune")] == [LOSSY]


def test_a_letter_with_a_separate_accent_is_given_back():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "e": 2, "\u0301": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = complete(fast(backend, unk_token="<unk>"), None)
    examples, _ = collected([{"prompt": "e", "completion": "e\u0301"}], tokenizer, stage="finetune")
    assert [example.notes for example in every(examples, "finetune")] == [()]
