"""Your own dataset, without code: a file, a folder or a hub dataset in any format of `datasets_prep.formats`.

OpenAI's messages and preferences, ShareGPT, Alpaca, TRL's columns and plain text are recognised by their columns;
`--columns prompt=question,completion=answer` names others. Every column that was not read is kept with the prompts,
for a reward function.

    python -m datasets_prep.generic.prepare_data --destination_dir=data/mine --dataset_name=mine.jsonl \\
        --tokenizer_name=facebook/opt-350m
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from datasets_prep.columns import check_columns, parse_columns
from datasets_prep.common import PrepareArgs, load_tokenizer, prepare, rows_of, source_of
from datasets_prep.formats import to_row
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import flag
from lightrlhf.cli.lists import pairs
from lightrlhf.cli.parser import parse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class GenericArgs(PrepareArgs):
    """Prepare any dataset of messages, prompts and completions, preferences or texts."""

    columns: list[str] = flag([], split=pairs)
    """Columns of the data by the names that are read, such as prompt=question,completion=answer."""
    remove_same_inputs: bool = False
    """Keep only the first row of each prompt (for dialogues: of each sequence of user turns)."""

    wrap_prompts: bool | None = None
    """Make a plain prompt a user message of the chat template; by default if the tokenizer has one."""

    def _check(self) -> None:
        parse_columns(self.columns)

    def wraps(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether plain prompts become a user message."""
        return bool(self.chat_template or tokenizer.chat_template) if self.wrap_prompts is None else self.wrap_prompts


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Prepare the dataset from the command line."""
    args = parse(GenericArgs, argv)
    mapping = parse_columns(args.columns)
    source = source_of(args)
    check_columns(mapping, source)
    tokenizer = load_tokenizer(args.tokenizer_name)
    rows = rows_of(source, partial(to_row, mapping=mapping), args.num_samples)
    prepare(args, rows, tokenizer=tokenizer, given=source.given)


if __name__ == "__main__":
    main()
