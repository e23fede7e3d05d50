"""Tokenizers: loads the one stored with the prepared data, checked against the model's own, and what ends a response.

Left out: slow (Python) tokenizers in the check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.hub import is_gguf
from lightrlhf.data.chat import declare_ends
from lightrlhf.data.tokens import check_end_token
from lightrlhf.data.turn_ends import end_tokens, turn_ends
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.names import model_folder, quiet_libraries, resolve
from lightrlhf.storage.seals import check_sealed, seal


def load_tokenizer(
    data_dir: str | Path | list[str] | None, model_name: str | None = None, given: Any = None, verify: bool = True
) -> Any:
    """The given tokenizer, else the one the data was prepared with (`{data_dir}/tokenizer`), else the model's own.

    One without a pad token pads with its end token. verify: compare the data's tokenizer with the folder's seal.
    Raises: UsageError when it cannot be loaded, has changed, has no end token, or is not the same in all of several
    folders.
    """
    quiet_libraries()
    for folder in data_dir if isinstance(data_dir, list) else [data_dir] if data_dir is not None else []:
        if (Path(folder) / "tokenizer").is_dir():
            check_sealed(Path(folder), ["tokenizer", "args.json"], verify)
    if isinstance(data_dir, list):
        data_dir = _same_tokenizer(data_dir)
    if given is not None:
        if not hasattr(given, "get_vocab"):
            raise UsageError(f"tokenizer: a tokenizer of transformers is needed, not a {type(given).__name__}")
        stored_ids = _vocabulary(Path(data_dir) / "tokenizer") if data_dir is not None else {}
        own = given.get_vocab()
        if any(own.get(token) != index for token, index in stored_ids.items()):
            raise UsageError(
                f"{data_dir} was prepared with a tokenizer other than the given one; give its own, or none"
            )
        return _with_pad_token(given, "the given tokenizer")
    stored = Path(data_dir) / "tokenizer" if data_dir is not None else None
    source = stored if stored is not None and stored.is_dir() else model_name and resolve(model_name)
    if not source:
        if data_dir is None:
            raise UsageError("tokenizer is needed with policy; give it, or a --model_name that has it")
        raise UsageError(f"{data_dir} has no tokenizer folder; give --model_name to use that model's tokenizer")
    tokenizer = _with_pad_token(_read(str(source)), f"the tokenizer in {source}")
    if data_dir is not None and source == stored and model_name and model_name != "tiny":
        check_stored_ids(tokenizer, data_dir, model_name)
    return tokenizer


def store_tokenizer(tokenizer: Tokenizer, data_dir: Path) -> None:
    """Save a tokenizer as the prepared data's, `{data_dir}/tokenizer`, sealed."""
    tokenizer.save_pretrained(data_dir / "tokenizer")
    seal(data_dir, ["tokenizer"])


def _read(source: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as problem:  # a damaged file makes it raise anything
        raise UsageError(f"no tokenizer in {source}: {first_line(problem)}") from None
    declare_ends(tokenizer, source)
    return tokenizer


def _same_tokenizer(folders: list[str]) -> str:
    """The first of these folders. Raises: UsageError when one has no tokenizer, or they differ."""
    kinds = []
    for folder in folders:
        if not (Path(folder) / "tokenizer").is_dir():
            raise UsageError(f"--data_dir {folder} has no tokenizer folder, as the others do; prepare it again")
        one = _read(str(Path(folder) / "tokenizer"))
        ids = (one.get_vocab(), one.eos_token, one("a b")["input_ids"])
        kinds.append({"tokenizers": ids, "chat templates": one.chat_template})
        for what, value in kinds[0].items():
            if kinds[-1][what] != value:
                raise UsageError(
                    f"--data_dir {folders[0]} and {folder} were prepared with different {what}; "
                    f"prepare the second with --tokenizer_name {folders[0]}/tokenizer"
                )
    return folders[0]


def _with_pad_token(tokenizer: Tokenizer, name: str) -> Any:
    check_end_token(tokenizer, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks travel with the tokens, so no end token is masked
    return tokenizer


def end_ids(tokenizer: Tokenizer, model: Any) -> list[int]:
    """Ids that end a response of a model of transformers: its tokenizer's end token, the tokens with which the chat
    template ends a turn of words or of tool calls, and its generation config's.

    If the template ends a turn with several tokens, only the last ends a response. A generation config without any
    control token of the tokenizer is ignored: it was made for another tokenizer.
    """
    stored = getattr(model.generation_config, "eos_token_id", None)
    own = [stored] if isinstance(stored, int) else list(stored or [])
    if not {*own} & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
        own = []
    last = [tokenizer.eos_token_id, *turn_ends(tokenizer)]
    inner = end_tokens(tokenizer) - {*last}
    return list(dict.fromkeys(index for index in [*last, *own] if index not in inner))


def store_ends(model: Any, tokenizer: Tokenizer, *others: int) -> None:
    """Store in a model's generation config what ends and pads its responses."""
    config = model.generation_config
    if config is not None:
        ends = list(dict.fromkeys([*end_ids(tokenizer, model), *others]))
        config.eos_token_id = ends if len(ends) > 1 else ends[0]
        config.pad_token_id = tokenizer.pad_token_id


def check_same_ids(tokenizer: Tokenizer, model: Any) -> None:
    """Check that a given model's own tokenizer, where its folder has one, maps no token to another id.

    Raises: UsageError.
    """
    own = _vocabulary(Path(model.name_or_path)) if getattr(model, "name_or_path", "") else {}
    if any(own.get(token, index) != index for token, index in tokenizer.get_vocab().items()):
        raise UsageError(
            f"policy: the tokenizer of {model.name_or_path} has other token ids; give it, or data prepared with it"
        )


def check_stored_ids(tokenizer: Tokenizer, data_dir: Any, model_name: str) -> None:
    """Check that the tokenizer of a local model or run maps the data's tokens to the same ids. Raises: UsageError."""
    folder = Path(resolve(model_name)) if is_gguf(model_name) else model_folder(model_name) or Path(model_name)
    own = _vocabulary(folder)  # may have more: a reward model's pad token
    if own and any(own.get(token) != index for token, index in tokenizer.get_vocab().items()):
        raise UsageError(
            f"{data_dir} was prepared with another tokenizer than {model_name}'s; "
            f"prepare the data again with --tokenizer_name {model_name if is_gguf(model_name) else folder}"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token ids of the tokenizer in a local folder; empty without one."""
    return _read(str(folder)).get_vocab() if (folder / "tokenizer.json").is_file() else {}
