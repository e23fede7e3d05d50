"""Train a small byte-level BPE tokenizer on any dataset, for a model trained from scratch (`--model_name tiny`).

A model built from its config has no tokenizer, and the embeddings of 50,000 tokens would be larger than the model.
Reads every text of the raw rows, messages included. Byte-level, so there are no unknown tokens. Data preparation adds
the plain chat template.

    python -m datasets_prep.train_tokenizer --dataset_name=mine.jsonl --destination_dir=data/mine/tokenizer_4k

Left out: other kinds of tokenizers (the `tokenizers` package trains them in as many lines).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets_prep.destination import replacing
from datasets_prep.reading import Source
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, at_least
from lightrlhf.cli.parser import parse
from lightrlhf.storage.destinations import check_destination
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.seals import MANIFEST

PAD, EOS = "<|pad|>", "<|endoftext|>"
MIN_VOCABULARY = 256 + 2  # all bytes and the two special tokens


@dataclass(frozen=True, kw_only=True)
class TokenizerArgs(Args):
    """Train a small tokenizer on the texts of a dataset."""

    destination_dir: str
    """Output folder, for `--tokenizer_name` of the data preparation."""
    dataset_name: str
    """Hub id, local folder, or a .jsonl, .jsonl.gz or .parquet file."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    vocab_size: int = at_least(MIN_VOCABULARY, 4096)
    """Number of tokens, special ones included."""
    num_samples: int = at_least(1, 50_000)
    """Maximum number of raw rows to read; more than some ten thousand change little."""


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the folder."""
    args = parse(TokenizerArgs, argv)
    destination = Path(args.destination_dir)
    check_destination(destination, "--destination_dir")
    is_own = (destination / MANIFEST).is_file() and not (destination / "config.json").is_file()
    if (destination / "tokenizer.json").is_file() and not is_own:
        raise UsageError(f"--destination_dir {destination} holds a tokenizer of another program; name another folder")
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    source = Source(args.dataset_name, args.dataset_config, args.dataset_revision)
    texts = [text for raw in islice(source, args.num_samples) for text in texts_of(raw.values)]
    if not texts:
        raise RunFailure(f"--dataset_name {args.dataset_name} contains no text")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=args.vocab_size, min_frequency=2, special_tokens=[PAD, EOS], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token=PAD, eos_token=EOS)
    with lock_folder(destination, "--destination_dir"), replacing(destination, []) as folder:
        tokenizer.save_pretrained(folder)
    # Raw text: tokens are only counted.
    tokens = sum(len(ids) for ids in tokenizer(texts[:1000])["input_ids"])
    characters = sum(map(len, texts[:1000]))
    print(f"wrote {len(tokenizer)} tokens to {args.destination_dir}; {characters / tokens:.1f} characters a token")
    return args.destination_dir


def texts_of(value: Any) -> Iterator[str]:
    """Every string in a raw row, in any column; text that is not valid Unicode is skipped."""
    if isinstance(value, str):
        if value and not any("\ud800" <= letter <= "\udfff" for letter in value):
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)


if __name__ == "__main__":
    main()
