"""Sources of a run: fingerprints of the models, templates and functions that its flags name.

`args.json` stores them, and a resumed run compares them: with a model that was trained further, or other weights at the
path of an adapter's base, it would be another run under the same name. The fingerprint of a model covers every file
that loading may read, also of an adapter's base; of prepared data the tokenizer (for rows see `beginning.py`); of
a function the file that defines it; of a hub repository the commit in the cache. A model may have moved.

For a file of more than 64 MiB the size and 256 evenly spaced pieces of 64 KiB are hashed. Training changes every
tensor, but a manual edit of a few numbers can lie between the pieces. Left out: imports of a function's file,
functions of this library and of scripts, models behind servers, and what is measured but not trained on
(`--audit_function`, the validation split).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightrlhf.cli.functions import split_path
from lightrlhf.cli.groups import DataArgs, DataSetsArgs, TeacherArgs, TrainArgs
from lightrlhf.cli.hub import is_gguf
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.macro_parsers import parser_model
from lightrlhf.gguf.files import gguf_file
from lightrlhf.models.names import base_name, model_folder, starting_model
from lightrlhf.storage.seals import sha256

MODELS = ("rm_experiment_dir", "teacher", "ref_model", "reflect_experiment_dir", "user_model", "responder")
FUNCTIONS = ("reward_function", "user_function", "loss_type", "advantage", "env", "tools", "agent")
READ = (".safetensors", ".bin", ".index.json", ".jinja", ".model", ".py")  # suffixes of files that loading may read
READ_BY_NAME = {"merges.txt", "vocab.txt", "vocab.json", "added_tokens.json", "special_tokens_map.json"}
READ_BY_NAME |= {"tokenizer.json", "tokenizer_config.json", "chat_template.json", "reward_statistics.json"}
READ_BY_NAME |= {"config.json", "generation_config.json", "adapter_config.json"}
WHOLE, PIECE, PIECES = 2**26, 2**16, 256  # bytes of files hashed whole; of larger files, PIECES of PIECE bytes

NOT_SEEN = {"lightrlhf", "__main__", *sys.stdlib_module_names}  # functions of these packages count by name only
RESTORE = "restore it"

Source = dict[str, Any]  # `name` as given, `folder` (what it meant; of models alone), `files`: SHA-256 by name


def sources_of(args: TrainArgs, given: Mapping[str, str], start: str | None = None) -> dict[str, Source]:
    """The sources that a run's flags name, by flag.

    given: objects that the program was called with, as `describe_given` describes them; start: the folder to which the
    flag of the starting model resolved when the run began, if the program keeps using it.
    Raises: UsageError when a model cannot be read.
    """
    found: dict[str, Source] = {}
    (name, flag), flags = starting_model(args), to_dict(args)
    models = {flag: name} | {f"--{one}": flags.get(one) for one in MODELS}
    if isinstance(args, TeacherArgs) and args.teacher_column:
        models |= {f"--teacher {one}": model for one, model in args.teacher_models.items()} | {"--teacher": None}
    models["--parser"] = parser_model(flags.get("parser") or "")
    for flag_of, value in models.items():
        if value and (flag_of, value) not in (("--responder", "last"), ("--responder", "initial")):
            of = start if start and flag_of == flag else value
            found[flag_of] = {"name": value, **_model(of, flag_of)}
    for one in FUNCTIONS:
        value = flags.get(one) or []
        paths = [path for path in ([value] if isinstance(value, str) else value) if ":" in path]
        if paths:
            found[f"--{one}"] = {"name": " ".join(paths), "files": _functions(paths)}
    for one, described in given.items():
        if files := _functions(word for word in described.split() if word.partition(":")[0] in sys.modules):
            found[one] = {"name": described, "files": files}
    are_given = bool({"rows", "prompts", "dialogues"} & given.keys())
    folders = args.data_dirs if isinstance(args, DataArgs | DataSetsArgs) and not are_given else []
    tokenizers = {f"{number}/{name}": digest for number, one in enumerate(folders) for name, digest in _templates(one)}
    if tokenizers:
        found["--data_dir"] = {"name": " ".join(folders), "folder": folders[0], "files": tokenizers}
    return found


def find_changed_source(before: Mapping[str, Source], now: Mapping[str, Source]) -> tuple[str, str] | None:
    """A description of the first source that has changed since the run began, and the remedy."""
    for flag in sorted(before.keys() | now.keys()):
        one, other = before.get(flag), now.get(flag)
        if one is None or other is None:
            was, now_is = (source["name"] if source else "not given" for source in (one, other))
            return f"{flag} was {was} when the run began and is {now_is}", ""
        if _is_same(one, other):
            continue
        was, now_is = str(one.get("folder", "")), str(other.get("folder", ""))
        if one["name"] != other["name"]:
            return f"{flag} was {one['name']} when the run began, and {other['name']} is not the same", ""
        if was != now_is:
            kept = _model(was, flag)["files"] == one["files"]
            remedy = f"give {flag} {was}" if kept else RESTORE
            return f"{flag} meant {was} when the run began and means {now_is}", remedy
        files = one["files"] | other["files"]
        changed = min(name for name in files if one["files"].get(name) != other["files"].get(name))
        return f"{flag} {one['name']} is not what it was when the run began ({changed} has changed)", RESTORE
    return None


def _is_same(one: Source, other: Source) -> bool:
    """Whether two sources are equal, as far as detected: a model may have moved, a function may not."""
    if one["files"] and other["files"] and one["files"] != other["files"]:
        return False
    has_moved = "folder" in one and one["files"] == other["files"] != {}
    return has_moved or one["name"] == other["name"]


def _model(name: str, flag: str) -> Source:
    """Folder and files of a model; no files for `tiny`, servers and hub repositories that are not cached yet."""
    if is_gguf(name):
        file = gguf_file(name, flag)
        return {"folder": str(file.absolute()), "files": {file.name: fingerprint(file)}}
    folder = model_folder(name)
    if folder is None:
        return {"folder": name, "files": _commit(name)}
    files = dict(_files(folder))
    base = base_name(str(folder), flag)
    if base and Path(base) != folder.resolve():
        below = _model(base, flag)["files"]
        files |= {f"base/{name}": digest for name, digest in below.items()}
    return {"folder": str(folder.absolute()), "files": files}


def _files(folder: Path) -> Iterable[tuple[str, str]]:
    for file in sorted(folder.iterdir()):
        is_read = file.name.endswith(READ) or file.name in READ_BY_NAME
        if is_read and not file.name.startswith(".") and file.is_file():
            yield file.name, fingerprint(file)


def _templates(data_dir: str) -> Iterable[tuple[str, str]]:
    folder = Path(data_dir) / "tokenizer"
    return _files(folder) if folder.is_dir() else ()


def _commit(name: str) -> dict[str, str]:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        try:
            cached = try_to_load_from_cache(name, file)
        except ValueError:  # not a repository name
            return {}
        if isinstance(cached, str):
            return {"commit": Path(cached).parent.name}
    return {}


def _functions(paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files of functions `package.module:name`, by module: those named, and those that define them."""
    found = {}
    for path in paths:
        try:
            module, name = split_path(path)
            named: Any = importlib.import_module(module)
            defining = inspect.getmodule(inspect.unwrap(getattr(named, name)))
        except Exception:  # a module may raise anything; the program reports it when it loads the function
            continue
        for one in {named, defining or named}:
            file = getattr(one, "__file__", None)
            if file and Path(file).is_file() and one.__name__.partition(".")[0] not in NOT_SEEN:
                found[one.__name__] = sha256(Path(file))
    return found


def fingerprint(file: Path) -> str:
    """SHA-256 of a file's content; of a large file's size and of pieces of it."""
    size = file.stat().st_size
    if size <= WHOLE:
        return sha256(file)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for number in range(PIECES):
            stream.seek((size - PIECE) * number // (PIECES - 1))
            digest.update(stream.read(PIECE))
    return digest.hexdigest()
