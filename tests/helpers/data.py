"""Tokenizers of each kind, trained in a moment on a few sentences, and small raw files."""

import gzip
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from datasets_prep.common import PrepareArgs, complete, encoded, rows_of
from datasets_prep.encoding import Encoder, Example
from datasets_prep.reading import Source
from datasets_prep.splits import Placement
from lightrlhf.data.schema import IGNORE_INDEX

SENTENCES = [
    "Human: Could I get a large oat latte and two muffins, please?",
    "Assistant: Of course! A large oat latte and two muffins. Anything else?",
    "SUBREDDIT: r/cooking TITLE: My bread never rises POST: I bake every Sunday. TL;DR: the bread stays flat",
    "QUESTION: Read a number n and print the sum. ANSWER: print(sum(range(int(input()) + 1)))",
    "She sold 48/2 = 24 clips in May, so 48+24 = 72 clips altogether. #### 72",
] * 4
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(special: list[str], sentences: list[str] = SENTENCES) -> Tokenizer:
    """A byte-level BPE like GPT-2's, with a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def gpt2_like() -> PreTrainedTokenizerFast:
    """bos = eos, none added, no pad, no chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<|endoftext|>"]), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def llama3_like() -> PreTrainedTokenizerFast:
    """Adds a BOS, ends a turn with its own token, has a chat template."""
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|pad|>"]
    tokenizer = byte_level(special)
    bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[4],
        extra_special_tokens=special[2:4],
        chat_template=LLAMA3_TEMPLATE,
    )


def chatml_like() -> PreTrainedTokenizerFast:
    """No BOS at all, its pad is its eos, and its template writes a line break behind the end token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<|im_start|>", "<|im_end|>"]),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHATML_TEMPLATE,
    )


def sentencepiece_like(folder: Path) -> Any:
    """A SentencePiece `.model` with byte fallback, loaded the way Llama 2 is."""
    import sentencepiece

    corpus = folder / "corpus.txt"
    folder.mkdir(parents=True, exist_ok=True)
    corpus.write_text("\n".join(SENTENCES), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=420, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = LLAMA2_TEMPLATE
    return tokenizer


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """A JSONL file, gzipped where its name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


def arguments(args_class: type[PrepareArgs] = PrepareArgs, **given: Any) -> PrepareArgs:
    """Arguments for calls that write nothing."""
    defaults = {"destination_dir": "unused", "tokenizer_name": "unused", "dataset_name": "unused", "num_proc": 1}
    return args_class(**(defaults | given))


def collect(args: PrepareArgs, rows: Iterable[Any], encoder: Encoder):
    """(examples by stage and split, dropped) of rows."""
    with tempfile.TemporaryDirectory() as folder, encoded(args, rows, encoder, folder) as selection:
        examples = {
            stage: {split: [selection.encoded.example(n) for n in own.tolist()] for split, own in splits.items()}
            for stage, splits in selection.splits.items()
        }
        return examples, list(selection.dropped())


def collected(rows: Iterable[dict], tokenizer: Any = None, **given: Any):
    """(examples by stage and split, dropped) of rows, without writing anything."""
    args = arguments(**given)
    tokenizer = complete(tokenizer or gpt2_like(), args.chat_template)
    wraps = args.wraps(tokenizer)
    return collect(args, rows, Encoder(args, tokenizer, Placement(args, wraps=wraps), wraps))


def collected_file(module: Any, args_class: type[PrepareArgs], file: Path, **given: Any):
    """(examples by stage and split, dropped) of a raw file read by a dataset's script."""
    args = arguments(args_class, dataset_name=str(file), **given)
    tokenizer = complete(gpt2_like(), args.chat_template)
    stages = getattr(module, "STAGES", ("finetune", "preference", "unpaired", "prompts", "dialogue"))
    encoder = Encoder(args, tokenizer, Placement(args, stages))
    return collect(args, rows_of(Source(str(file)), module.to_row, None), encoder)


def every(examples: dict, stage: str) -> list:
    """The examples of a stage, whatever their split."""
    return [example for members in examples.get(stage, {}).values() for example in members]


def targets_of(example: Example, mask_prompt: bool) -> np.ndarray:
    """(T,) int32: the ids that carry loss, `IGNORE_INDEX` elsewhere."""
    ids = example.ids[0]
    if not mask_prompt:
        return ids.copy()
    targets = np.full_like(ids, IGNORE_INDEX)
    for start, end in example.spans:
        targets[start:end] = ids[start:end]
    return targets


def rows_of_file(stage: str, examples: Iterable[Example], mask_prompt: bool = True) -> list[dict[str, Any]]:
    """The rows of a `.pt` file, one by one."""
    rows: list[dict[str, Any]] = []
    for e in examples:
        ids = e.ids[0]
        if stage == "finetune":
            rows.append({"prompt_len": e.prompt_len, "input_ids": ids, "targets": targets_of(e, mask_prompt)})
        elif stage == "preference":
            columns = {"columns": e.extra} if e.extra else {}
            rows.append({"prompt_len": e.prompt_len, "chosen_input_ids": ids, "rejected_input_ids": e.ids[1]} | columns)
        elif stage == "dialogue":
            columns = {"columns": e.columns} if e.columns else {}
            rows.append({"messages": e.extra, "input_ids": ids, "turn_spans": e.spans} | columns)
        else:
            label = {"label": e.label} if stage == "unpaired" else {}
            rows.append({"prompt_len": e.prompt_len, "input_ids": ids} | label | {"columns": e.extra})
    return rows
