"""Files that carry code, in every place that a program reads: none of it runs; a canary file would appear."""

import importlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split
from lightrlhf.data.tokens import render
from lightrlhf.demo.models import example_prompt
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.sft import SFTArgs
from lightrlhf.storage import seals
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.run_dir import read_arg
from lightrlhf.training.resume import read_state

LETHAL = (Exception, SystemExit)


class Bomb:
    """Unpickling it calls a function with arguments."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def bombs(canary: Path) -> dict[str, object]:
    """Objects whose pickles write the canary, each by another way."""
    code, command = f"open({str(canary)!r}, 'w').close()", f"touch {canary}"
    return {
        "os.system": Bomb(os.system, command),
        "eval": Bomb(eval, f"open({str(canary)!r}, 'w')"),
        "exec": Bomb(exec, code),
        "open": Bomb(open, str(canary), "w"),
        "Path.touch": Bomb(Path.touch, canary),
        "subprocess.call": Bomb(subprocess.call, ["touch", str(canary)]),
        "subprocess.Popen": Bomb(subprocess.Popen, ["touch", str(canary)]),
        "os.mkdir": Bomb(os.mkdir, str(canary)),
        "os.popen": Bomb(os.popen, command),
        "import_module": Bomb(importlib.import_module, "canary_module"),
        "__import__": Bomb(__import__, "canary_module"),
        "pickle.loads": Bomb(pickle.loads, pickle.dumps(Bomb(os.system, command))),
        "torch.load": Bomb(torch.load, str(canary)),
        "shutil.copy": Bomb(shutil.copy, "/etc/hostname", str(canary)),
        "numpy object array": np.array([Bomb(os.system, command)], dtype=object),
        "nested": [{"prompt_len": 1, "input_ids": [1, Bomb(exec, code)], "targets": [1, 2]}],
        "key": {1: Bomb(exec, code)},
    }


def formats(value: object, file: Path) -> dict[str, bytes]:
    """The bytes of a value in each format that `torch.load` knows, and in those of its neighbours."""
    torch.save(value, file)
    found = {"zip": file.read_bytes()}
    torch.save(value, file, _use_new_zipfile_serialization=False)
    found["legacy"] = file.read_bytes()
    found["pickle"] = pickle.dumps(value)
    found["an old protocol"] = pickle.dumps({"__array__": value}, protocol=2)
    return found


def attempt(read) -> str:
    """What a call raised; the code of a file must not run whatever it says."""
    try:
        read()
    except LETHAL as problem:
        return type(problem).__name__
    return "loaded"


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that code would write; a module of that name on the path would write it, too."""
    file = tmp_path / "canary"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "canary_module.py").write_text(f"open({str(file)!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return file


@pytest.fixture
def inert(case, canary):
    def check(name: str, read, refused: bool = True) -> None:
        seen = attempt(read)
        ran = canary.exists()
        shutil.rmtree(canary) if canary.is_dir() else canary.unlink(missing_ok=True)
        case(name, not ran and (not refused or seen in ("UsageError", "RunFailure", "SystemExit")), seen)

    return check


@pytest.mark.attack
def test_the_canary_sings(canary):
    """Without restrictions the code of these files runs, so that they prove something."""
    for name in ("os.system", "eval", "exec", "open", "Path.touch", "subprocess.call", "os.mkdir", "shutil.copy"):
        pickle.loads(pickle.dumps(bombs(canary)[name]))
        assert canary.exists(), name
        shutil.rmtree(canary) if canary.is_dir() else canary.unlink()


def test_pickles_in_splits_examples_and_states(canary, tmp_path, sft_dir, inert):
    run = shutil.copytree(sft_dir, tmp_path / "run")
    saved = checkpoints(run)[-1]
    data = tmp_path / "data"
    data.mkdir()
    for name, bomb in bombs(canary).items():
        for kind, content in formats(bomb, tmp_path / "made").items():
            (data / "finetune_train.pt").write_bytes(content)
            inert(f"split: {name} as {kind}", partial(load_split, data, "finetune", "train"))
            (data / "example_prompt.pt").write_bytes(content)
            inert(f"example_prompt.pt: {name} as {kind}", partial(example_prompt, str(data)))
            (saved / "resume.pt").write_bytes(content)
            inert(f"resume.pt: {name} as {kind}", partial(read_state, run, "sft", {}))
            if name in ("os.system", "exec", "nested"):  # even sealed anew
                seals.seal(saved, ["resume.pt"])
                inert(f"sealed resume.pt: {name} as {kind}", partial(read_state, run, "sft", {}), refused=False)


def test_archives_that_leave_their_folder(canary, tmp_path, inert):
    for number, inner in enumerate(("../canary", f"{canary}", "archive/../../canary", "archive/data/../../../canary")):
        file = tmp_path / "finetune_train.pt"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps([]))
            archive.writestr("archive/version", "3")
            archive.writestr(inner, "code")
        inert(f"zip with the member {number}", partial(load_split, tmp_path, "finetune", "train"))


def test_model_folders(canary, base_model, tokenizer, tmp_path, inert):
    code = f"open({str(canary)!r}, 'w').close()\n"
    maps = {
        "config.json": ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer"),
        "tokenizer_config.json": ("AutoTokenizer", "AutoProcessor"),
        "generation_config.json": ("AutoModelForCausalLM",),
    }

    def folder(name: str) -> Path:
        made = shutil.copytree(base_model, tmp_path / name)
        tokenizer.save_pretrained(made)
        for module in ("configuration_x", "modeling_x", "tokenization_x", "generate", "canary_module"):
            (made / f"{module}.py").write_text(code)
        (made / "custom_generate").mkdir()
        (made / "custom_generate" / "generate.py").write_text(code)
        return made

    def load(made: Path):
        own = load_tokenizer(None, str(made))
        load_policy(str(made), ModelArgs(), own)

    for file, classes in maps.items():
        for auto in classes:
            for module in ("modeling_x.X", "tokenization_x.X", "configuration_x.X", f"{tmp_path}--modeling_x.X"):
                made = folder(f"{file}-{auto}-{module[-18:].replace('/', '-')}")
                path = made / file
                values = json.loads(path.read_text()) if path.is_file() else {}
                target = [module, module] if auto == "AutoTokenizer" else module
                values |= {"auto_map": {auto: target}, "model_type": "x" if auto == "AutoConfig" else "llama"}
                values |= {"tokenizer_class": "X"} if auto == "AutoTokenizer" else {}
                path.write_text(json.dumps(values))
                inert(f"{file}: {auto} -> {module[-14:]}", partial(load, made), refused=False)
                if auto == "AutoModelForSequenceClassification":
                    inert(f"{file} as a reward model: {module[-14:]}", partial(load_scorer,
                        str(made), torch.device("cpu"), 1, "--rm_experiment_dir"))  # fmt: skip
                shutil.rmtree(made)
    for name, bomb in bombs(canary).items():
        made = folder(f"bin-{name}")
        (made / "model.safetensors").unlink()
        torch.save({"model.embed_tokens.weight": bomb}, made / "pytorch_model.bin")
        inert(f"pytorch_model.bin: {name}", partial(load, made))
        torch.save({"model.embed_tokens.weight": bomb}, made / "model.safetensors")
        inert(f"a pickle called model.safetensors: {name}", partial(load, made))
        (made / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base_model)}))  # fmt: skip  # noqa: E501
        torch.save({"base_model.model.x.lora_A.weight": bomb}, made / "adapter_model.bin")
        inert(f"adapter_model.bin: {name}", partial(load, made), refused=False)
        shutil.rmtree(made)
    made = folder("safetensors")
    huge = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    for name, content in {
        "header longer than the file": struct.pack("<Q", 2**60) + b"{}",
        "no header": b"",
        "deep header": struct.pack("<Q", 200_000) + b"[" * 200_000,
        "offsets beyond the file": struct.pack("<Q", len(huge)) + huge + b"abcd",
        "a header of another kind": struct.pack("<Q", 2) + b"[]",
        "overlapping": struct.pack("<Q", len(huge)) + huge.replace(b"4]", b"0]"),
        "python tags": struct.pack("<Q", 30) + b"!!python/object/apply:os.system",
    }.items():
        (made / "model.safetensors").write_bytes(content)
        inert(f"model.safetensors: {name}", partial(load, made))


JINJA = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for c in ().__class__.__base__.__subclasses__() %}{% if c.__name__ == 'Popen' %}{{ c('touch CANARY', shell=True) }}{% endif %}{% endfor %}",  # noqa: E501
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ self.__init__.__globals__.__builtins__.exec('open(\"CANARY\",\"w\")') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ strftime_now.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{% set f = raise_exception|attr('__globals__') %}{{ f['os'].system('touch CANARY') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ '%s'|format(namespace.__init__.__globals__) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% macro x() %}{{ caller.__globals__ }}{% endmacro %}{% call x() %}{% endcall %}",
    "{{ messages.append(1) }}",
    "{{ tojson.__globals__ }}",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(JINJA)))
def test_templates(number, canary, tokenizer, tmp_path, inert):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = JINJA[number].replace("CANARY", str(canary))
    for kind in ("chat_template.jinja", "tokenizer_config.json"):
        own = shutil.copytree(tmp_path / "tokenizer", tmp_path / kind / "tokenizer")
        if kind == "chat_template.jinja":
            (own / kind).write_text(text)
        else:
            (own / "chat_template.jinja").unlink(missing_ok=True)
            values = json.loads((own / kind).read_text()) | {"chat_template": text}
            (own / kind).write_text(json.dumps(values))
        asked = [{"role": "user", "content": "a"}]
        inert(f"{kind}: {JINJA[number][:50]}", partial(render, load_tokenizer(own.parent), asked), refused=False)


YAML = [
    "!!python/object/apply:os.system ['touch CANARY']",
    "!!python/object/new:os.system ['touch CANARY']",
    "!!python/object/apply:subprocess.call [['touch', 'CANARY']]",
    "!!python/object/apply:builtins.exec [\"open('CANARY', 'w')\"]",
    "!!python/module:canary_module",
    "!!python/name:os.system",
    "seed: !!python/object/apply:os.system ['touch CANARY']",
    "epochs: !!python/object/apply:eval [\"open('CANARY', 'w')\"]",
    "seed: !!python/tuple [1, 2]",
    "data_dir: !!binary aGVsbG8=",
]


def test_configs_and_arguments(canary, tmp_path, inert):
    for number, text in enumerate(YAML):
        for name in ("a.yaml", "a.json"):
            (tmp_path / name).write_text(text.replace("CANARY", str(canary)))
            inert(f"--config {name} {number}: {text[:40]}", partial(parse, SFTArgs, ["--config", str(tmp_path / name)]), refused=False)  # fmt: skip  # noqa: E501
        (tmp_path / "args.json").write_text(text.replace("CANARY", str(canary)))
        inert(f"args.json {number}", partial(read_arg, str(tmp_path), "judge"), refused=False)
        inert(f"args.json of a resumed run {number}", partial(parse, SFTArgs, ["--resume_from", str(tmp_path)]))
        (tmp_path / "rows.jsonl").write_text(text.replace("CANARY", str(canary)))
        inert(f"rows.jsonl {number}", partial(read_jsonl, tmp_path / "rows.jsonl"))
