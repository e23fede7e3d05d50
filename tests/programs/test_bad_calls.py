"""Bad calls of every program: each is refused in one line that names the flag or the file, and nothing is written."""

import dataclasses
import importlib
import json
import math
import re
import shutil
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
from helpers import CPU
from helpers.programs import main_of

from lightrlhf import programs
from lightrlhf.cli.errors import UsageError

SETS = ("apps", "cafe", "cafe_talk", "feedback", "generic", "gsm8k", "helpful_harmless", "prompts", "summarization")
SETS += ("reasoning_gym", "text_envs", "ultrainteract", "webgpt")
PROGRAMS = [one.module for one in programs.PROGRAMS.values()]
MODULES = [*PROGRAMS, "datasets_prep.train_tokenizer", *(f"datasets_prep.{name}.prepare_data" for name in SETS)]
NUMBERS = ("many", "nan", "inf", "1e400", "1_000", "", " ", "٣", "1:30", "0x10", "9" * 30, "True", "[1]")
SPELLED = {
    int: (*NUMBERS, "1.5", "010", "1e3"),
    float: (*NUMBERS, "-inf", "0x1p3"),
    bool: ("maybe", "2", "", "Tru", "1.0", "[True]"),
}
OBJECTS = {
    int: ("3", 1.5, float("nan"), [1], {}, True, 10**30, object),
    float: ("3", float("nan"), float("inf"), float("-inf"), [1.0], {}, True, 10**400),
    bool: ("True", 1, 0, [], {}),
    str: (3, 1.5, b"x", ["x"], {}, "a\0b", "\udcff"),
}
GOOD = {"int": "1", "float": "0.5", "bool": "True"}


def args_class(module: str) -> type:
    source = importlib.import_module(module)
    name = re.search(r"(?:parse|run)\(\s*(\w+Args)", Path(source.__file__).read_text(encoding="utf-8"))[1]
    return getattr(source, name)


def kind_of(hint) -> object:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [option for option in options if option is not NoneType]
    return kinds[0] if len(kinds) == 1 else None


def all_fields() -> dict[str, tuple[str, object]]:
    """Each flag of any program once: a module that has it, and its type."""
    found: dict[str, tuple[str, object]] = {}
    for module in MODULES:
        hints = get_type_hints(args_class(module))
        for field in dataclasses.fields(args_class(module)):
            found.setdefault(field.name, (module, kind_of(hints[field.name])))
    return found


def refusal(work, capsys) -> tuple[bool, str]:
    """Whether `work` ends with status 2 and at most three lines without a traceback; and its last line."""
    capsys.readouterr()
    try:
        work()
        return False, "accepted"
    except SystemExit as stopped:
        lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        held = stopped.code == 2 and 1 <= len(lines) <= 3 and "Traceback" not in "".join(lines)
        return held, (lines or ["nothing said"])[-1]
    except (UsageError, ValueError) as problem:  # as Python sees it
        return type(problem) in (UsageError, ValueError) and "\n" not in str(problem), str(problem)
    except BaseException as problem:
        return False, f"{type(problem).__name__}: {problem}"


def needed(args: type, folder: Path) -> dict[str, object]:
    """Values of the fields without a default."""
    file = folder / "responses.jsonl"
    file.write_text('{"prompt": "a", "responses": ["b"], "response": "b", "truncated": [false]}\n')
    values: dict[str, object] = {"responses_file": str(file), "destination_dir": str(folder / "out")}
    if args.__name__ == "ExportArgs":
        values |= {"to": "merged", "model_name": "model", "destination_dir": None}
    if args.__name__ == "JudgeArgs":
        values["responses_file"] = [str(file), str(file)]
    lacking = [f for f in dataclasses.fields(args) if f.default is f.default_factory is dataclasses.MISSING]
    tiny = {field.name: ["tiny"] if str(field.type).startswith("list") else "tiny" for field in lacking}
    return {name: values.get(name, value) for name, value in tiny.items()}


def test_values_on_the_command_line(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*")) | {tmp_path / "responses.jsonl"}
    for number, (name, (module, kind)) in enumerate(all_fields().items()):
        main, good = importlib.import_module(module).main, needed(args_class(module), tmp_path)
        words = [f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in good.items()]
        wrong = ("nonsense", "") if get_origin(kind) is Literal else SPELLED.get(kind, ())
        start = number % 3  # a third of the spellings for each flag, in turn: all of them for each type
        for value in wrong if len(wrong) < 3 else wrong[start::3]:
            held, seen = refusal(lambda: main([*words, f"--{name}={value}"]), capsys)  # noqa: B023
            case(f"{module} --{name}={value!r}", held and f"--{name}" in seen, seen[:100])
    case("nothing was written", set(tmp_path.rglob("*")) <= before)


def test_values_from_python(case, tmp_path, capsys):
    for name, (module, kind) in all_fields().items():
        args = args_class(module)
        literal = (3, "nonsense", None, []) if get_origin(kind) is Literal else None
        for value in literal or OBJECTS.get(kind, ()):
            if value is None and NoneType in get_args(get_type_hints(args)[name]):
                continue
            held, seen = refusal(lambda: args(**{**needed(args, tmp_path), name: value}), capsys)  # noqa: B023
            label = f"{args.__name__}({name}={str(value)[:20]!r} {type(value).__name__})"
            case(label, held and name in seen, seen[:100])


def test_args_of_another_program(case, capsys):
    class Other:
        pass

    for module in PROGRAMS:
        if module == "lightrlhf.demo.page":  # which only its command line starts
            continue
        program = importlib.import_module(module)
        start = getattr(program, "train", None) or program.run
        for given in (Other(), None, {}, "args", args_class(module)):
            held, seen = refusal(lambda: start(given), capsys)  # noqa: B023
            case(f"{module} with {given!r:.30}", held and "args:" in seen, seen)


CONFIGS = {
    "no UTF-8": b"seed: \xff\xfe",
    "UTF-16": "seed: 1".encode("utf-16"),
    "a bomb": b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 60)),
    "an alias": b"seed: &s 1\nepochs: *s\n",
    "a tag": b"seed: !!python/object/apply:os.system [true]\n",
    "an unknown tag": b"seed: !foo 1\n",
    "a key twice": b"seed: 1\nseed: 2\n",
    "a list": b"- seed\n",
    "a text": b"seed",
    "a number": b"7",
    "empty": b"",
    "a wrong key": b"sede: 1\n",
    "a key that is no text": b"1: 2\n",
    "a wrong type": b"seed: [1, 2]\n",
    "a wrong number": b"learning_rate: .nan\n",
    "deep": b"[" * 5000 + b"]" * 5000,
    "deep mapping": b"a: " + b"{a: " * 3000 + b"}" * 3000,
    "no YAML": b"seed: [1\nx: }",
    "a tab": b"\tseed: 1",
    "NUL": b"seed: \x00",
    "two documents": b"seed: 1\n---\nseed: 2\n",
    "2 MiB": b"# " + b"a" * 2**21,
    "merge key": b"<<: [1]\n",
    "unhashable key": b"? [a]\n: 1\n",
    **{f"number {text}": f"seed: {text}\n".encode() for text in ("010", "0x10", "1:30", "1_000", "0o7", "0b1")},
    "a long number": b"seed: " + b"9" * 30,
    "a float of a clock": b"learning_rate: 1:30.5\n",
    "a long float": b"learning_rate: " + b"9" * 30,
    "an octal text": b"experiment_name: 010\n",
}  # fmt: skip


def test_config_files(case, tmp_path, capsys):
    flags = ("sft", "generate", "plot", "export", "serve", "doctor", "quickstart")
    for program, flag in {**dict.fromkeys(flags, "--config"), "sweep": "--sweep_file"}.items():
        main = main_of(program)
        for name, content in CONFIGS.items():
            file = tmp_path / "flags.yaml"
            file.write_bytes(content)
            held, seen = refusal(lambda: main([flag, str(file)]), capsys)  # noqa: B023
            named = any(name in seen for name in ("flags.yaml", "--learning_rate", "--seed", "--experiment_name"))
            case(f"{program} {flag} with {name}", held and named and len(seen) < 500, seen[-100:])
        for path in (tmp_path, tmp_path / "none.yaml", tmp_path / "flags.yaml" / "x"):
            held, seen = refusal(lambda: main([flag, str(path)]), capsys)  # noqa: B023
            case(f"{program} {flag} {path.name}", held and str(path) in seen, seen[-100:])


BROKEN = {
    "empty": b"",
    "truncated": None,
    "a list": b"[]",
    "null": b"null",
    "a text": b'"llama"',
    "no UTF-8": b'{"model_type": "\xff"}',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no type": b"{}",
    "huge": b'{"model_type": "llama", "num_hidden_layers": 1000000000}',
    "negative": b'{"model_type": "llama", "hidden_size": -8}',
    "infinite": b'{"model_type": "llama", "vocab_size": 1e999}',
    "wrong types": b'{"model_type": "llama", "hidden_size": "big", "num_attention_heads": []}',
    "another type": b'{"model_type": 7}',
}


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json"]
)
def test_broken_files_of_models(case, name, tmp_path, capsys, base_model, cafe_data):
    sft, export = (importlib.import_module(f"lightrlhf.{program}") for program in ("sft", "export"))
    for kind, content in BROKEN.items():
        if name != "config.json" and kind not in ("empty", "truncated", "a list", "null", "a text", "no UTF-8", "deep"):
            continue  # an object is a valid one of these
        folder = tmp_path / kind.replace(" ", "_")
        shutil.copytree(base_model, folder)
        whole = (folder / "config.json").read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
        flags = [
            "--model_name", folder, "--data_dir", cafe_data, "--max_steps", "1", "--log_dir", tmp_path / "logs", *CPU,
        ]  # fmt: skip
        held, seen = refusal(lambda: sft.main([str(flag) for flag in flags]), capsys)  # noqa: B023
        clean = not list((tmp_path / "logs").rglob("args.json"))
        case(f"{name} {kind}", held and clean and (str(folder) in seen), seen[-120:])
        words = [str(folder), "--to", "merged", "--destination_dir", str(tmp_path / "exported")]
        held, seen = refusal(lambda: export.main(words), capsys)  # noqa: B023
        clean = not (tmp_path / "exported").exists()
        case(f"export of {name} {kind}", held and clean and (str(folder) in seen), seen[-120:])


def test_statistics_of_a_reward_model(case, tmp_path, capsys):
    from lightrlhf.rewards.loading import reward_statistics

    wrong = ("NaN", "Infinity", "-Infinity", "1e999", "null", '"1"', "true", "[]", "{}", "9" * 5000)
    texts = [f'{{"mean": {a}, "std": {b}}}' for value in wrong for a, b in ((value, "1"), ("0", value))]
    texts += ["", "{", "[]", "7", "null", "{}", '{"mean": 1}', '{"std": 1}', '{"mean": 0, "std": -1}', "\x00"]
    for text in texts:
        (tmp_path / "reward_statistics.json").write_text(text)
        held, seen = refusal(lambda: reward_statistics(tmp_path), capsys)
        case(f"reward_statistics.json {text[:40]}", held and "reward_statistics.json" in seen, seen[-80:])


def test_pictures(case, tmp_path, capsys):
    plot = importlib.import_module("lightrlhf.plot")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for path in ("a.nonsense", "a", "a.png.txt", ".", "none/a.png", "file/a.png", "folder.png", "a.exe", ""):
        words = ["--experiment_dir", str(tmp_path), "--output_file", str(tmp_path / path)]
        held, seen = refusal(lambda: plot.main(words), capsys)  # noqa: B023
        case(f"plot --output_file {path}", held and "--output_file" in seen, seen[-80:])


GOOD_ROW = {"prompt": "a", "responses": ["b", "c"], "response": "b", "truncated": [False, True], "prompt_ids": [1, 2],
            "response_ids": [[3], [4]], "rewards": [1.0, None]}  # fmt: skip
PLAIN = (3, True, "ab", {}, {"0": "a"}, 1.5)
WRONG = {
    "prompt": (None, 3, True, 1.5, [], {}, ["a"], [{}], [None], [{"role": "user"}], [{"content": "a"}],
               [{"role": 3, "content": "a"}], [{"role": "user", "content": 7}], [{"role": None, "content": "a"}],
               [{"role": "user", "content": {}}]),
    "responses": (None, *PLAIN, ["a", 3], [["a"], "b"], [True, "b"], [{}, "b"], ["a", 1.5]),
    "response": (3, True, {}, ["a"], 1.5, [], None),
    "truncated": (*PLAIN, [0, 1], [None, True], ["no", "no"], [True], [True] * 3, []),
    "prompt_ids": (*PLAIN, [-1], [1.5], ["1"], [True], [None], [[1]]),
    "response_ids": (*PLAIN, [1, 2], [[-1], [1]], [["a"], [1]], [[1.5], [1]], [[True], [1]], [[1]], [[1]] * 3, []),
    "rewards": (*PLAIN, ["1", 2], [math.nan, 1], [math.inf, 1], [-math.inf, 1], [True, False], [10**400, 1], [1],
                [[1]] * 2, [1] * 3, [{}, {}], []),
}  # fmt: skip
LINES = {
    "empty": b"",
    "a list": b"[]",
    "a text": b'"prompt"',
    "null": b"null",
    "half a line": b'{"prompt": ',
    "no UTF-8": b'{"prompt": "\xff", "responses": []}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "surrogates": b'{"prompt": "\\ud800", "responses": ["a"]}',
    "no columns": b"{}",
    "long number": b'{"prompt": "a", "rewards": [' + b"9" * 5000 + b"]}",
    "NUL": b"\0" * 100,
}
READS = {  # by program the columns that it reads, and its flags
    "annotate": (("prompt", "responses", "truncated", "prompt_ids", "response_ids", "rewards"),
                 ("--reward_function", "helpers.rewards:constant", "--output_file", "out.jsonl")),
    "annotate pairs": (("prompt", "responses", "truncated", "prompt_ids", "response_ids", "rewards"),
                       ("--choose_type", "max_min", "--output_dir", "out", "--tokenizer_name", "MODEL")),
    "judge": (("prompt", "response"), ("--judge", "helpers.rewards:constant", "--output_file", "out.jsonl")),
    "judge responses": (("prompt", "responses"), ("--judge", "helpers.rewards:constant", "--output_file", "out.jsonl")),
    "judge sample": (("prompt",), ("--sample", 1)),
    "plot": (("rewards",), ("--output_file", "out.png")),
    "generate": (("prompt", "prompt_ids"), ("--model_name", "MODEL", "--output_file", "out.jsonl", *CPU[:2])),
}  # fmt: skip


@pytest.mark.parametrize("program", READS)
def test_rows_of_responses(case, program, tmp_path, capsys, base_model):
    columns, flags = READS[program]
    main = main_of(program.split()[0])
    flags = [str(base_model) if flag == "MODEL" else flag for flag in flags]
    flags = [tmp_path / flag if str(flag).startswith("out") else flag for flag in flags]
    file, out = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    (tmp_path / "rows.args.json").write_text('{"temperature": 1.0, "do_sample": true}')
    good = {name: value for name, value in GOOD_ROW.items() if (program, name) != ("judge responses", "response")}
    out.write_text((json.dumps(good) + "\n") * 2)
    contents = {f"{name} {str(value)[:40]} {type(value).__name__}": json.dumps(good | {name: value}).encode()
                for name in columns for value in WRONG[name]}  # fmt: skip
    for name, content in (contents | LINES).items():
        file.write_bytes((json.dumps(good) + "\n").encode() * (name not in LINES) + content + b"\n")
        words = ["--prompts_file" if program == "generate" else "--responses_file", file]
        words += [out] if program in ("judge", "judge responses") else []
        held, seen = refusal(lambda: main([str(word) for word in (*words, *flags)]), capsys)  # noqa: B023
        written = [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]
        for path in written:
            (shutil.rmtree if (tmp_path / path).is_dir() else Path.unlink)(tmp_path / path)
        named = "rows.jsonl" in seen and (name in LINES or "row 2" in seen)
        case(f"{program}: {name}", held and named and not written, f"{seen[-110:]} {written or ''}")


def test_output_files(case, tmp_path, capsys, base_model, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD_ROW) + "\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("run", "model"):
        shutil.copytree(base_model, tmp_path / name)
    (tmp_path / "run" / "args.json").write_text("{}")
    (tmp_path / "run" / "eval").write_text("")
    rows, files = tmp_path / "rows.jsonl", ("folder.jsonl", "file/a.jsonl", "a" * 300, "file/b/c", ".", "..")
    calls = [
        ("generate", "--output_file", name, ("--prompts_file", rows, "--model_name", base_model)) for name in files
    ]
    calls += [("generate", "--output_dir", name, ("--prompts_file", rows, "--model_name", base_model))
              for name in ("file", "file/a", "a" * 300)]  # fmt: skip
    scored = ("--responses_file", rows, "--reward_function", "helpers.rewards:constant")
    calls += [("annotate", "--output_file", name, scored) for name in files]
    pairs = ("--responses_file", rows, "--choose_type", "max_min", "--tokenizer_name", base_model)
    calls += [("annotate", "--output_dir", name, pairs) for name in ("file", "file/a", "a" * 300)]
    judged = ("--responses_file", rows, rows, "--judge", "helpers.rewards:constant")
    calls += [("judge", "--output_file", name, judged) for name in files]
    calls += [("evaluate", "--model_name", "run", ("--data_dir", tmp_path)),
              ("evaluate_dialogues", "--model_name", "run", ("--data_dir", tmp_path)),
              ("evaluate_env", "--model_name", "run", ("--env", "dangerous_taxi"))]  # fmt: skip
    (tmp_path / "sweep.yaml").write_text("{program: sft, flags: {model_name: tiny}, seeds: [1], metric: val/loss}")
    folders = {
        "export": ("--destination_dir", (base_model, "--to", "merged")),
        "sweep": ("--output_dir", (tmp_path / "sweep.yaml",)),
        "quickstart": ("--output_dir", ("--smoke",)),
    }
    calls += [
        (program, flag, name, others)
        for program, (flag, others) in folders.items()
        for name in ("file", "file/a", "a" * 300)
    ]
    before = sorted(tmp_path.rglob("*"))
    for program, flag, name, others in calls:
        main = main_of(program)
        words = [str(word) for word in (*others, flag, tmp_path / name)]
        held, seen = refusal(lambda: main(words), capsys)  # noqa: B023
        same = sorted(tmp_path.rglob("*")) == before
        case(f"{program} {flag} {name[:20]}", held and flag in seen and same and len(seen) < 900, seen[-110:])


def test_args_json_of_runs(case, tmp_path, capsys, base_model, cafe_data):
    from lightrlhf.storage.run_dir import read_arg

    deep = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    contents = {"a list": b"[]", "a number": b"7", "a text": b'"dpo"', "null": b"null", "empty": b"", "deep": deep,
                "cut": b'{"seed": 1', "no UTF-8": b'{"seed": "\xff"}'}  # fmt: skip
    shutil.copytree(base_model, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    for name, content in contents.items():
        (tmp_path / "run" / "args.json").write_bytes(content)
        held, seen = refusal(lambda: read_arg(str(tmp_path / "run"), "seed"), capsys)
        case(f"args.json, {name}", held and "args.json" in seen, seen[-80:])
        for program, words in {
            "evaluate": ("--model_name", tmp_path / "run", "--data_dir", cafe_data),
            "plot": ("--experiment_dir", tmp_path / "run"),
            "sft": ("--resume_from", tmp_path / "run"),
        }.items():
            main = main_of(program)
            held, seen = refusal(lambda: main([str(word) for word in words]), capsys)  # noqa: B023
            case(f"{program} of a run with args.json, {name}", held and "args.json" in seen, seen[-100:])


def test_functions(case, tmp_path, capsys, monkeypatch):
    from lightrlhf.cli.functions import load_function

    bodies = {"raises": "raise KeyError('a')", "exits": "import sys; sys.exit(3)", "syntax": "def f(:", "empty": "",
              "divides": "1/0", "number": "f = 3", "none": "f = None", "no_arguments": "def f(): pass",
              "one_argument": "def f(prompts, **columns): pass", "no_columns": "def f(prompts, completions): pass",
              "recursive": "def g(): g()\ng()", "bytes": "\x00"}  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in bodies.items():
        (tmp_path / f"attack_{name}.py").write_text(text)
        held, seen = refusal(lambda: load_function(f"attack_{name}:f", "--reward_function"), capsys)  # noqa: B023
        case(f"function {name}", held and f"attack_{name}" in seen, seen[:100])
    for path in (
        "", ":", "a", "a:", ":f", "..:f", "os", "os:", "os:nothing", "os.path.nothing:f", "a b:c", "os:path.join",
    ):  # fmt: skip
        held, seen = refusal(lambda: load_function(path, "--reward_function"), capsys)  # noqa: B023
        case(f"function {path!r}", held and "--reward_function" in seen, seen[:100])
