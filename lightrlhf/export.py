"""Export a model for other programs: merged weights, an adapter for the hub, GGUF for llama.cpp, a folder for Ollama.

`python -m lightrlhf.export DIR --to gguf` takes whatever `--model_name` takes. Adapters are merged in float32 before
weights are rounded. The folder gets its name only once its content has been loaded again and compared with the model:
token ids, chat template, end tokens, weights, logits and greedy decoding (`models/export_check.py`).

Left out: ONNX, other quantisers (GPTQ, AWQ), and uploading (`--push_to_hub` of a training run, or `hf upload`).
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, between, check_args, flag
from lightrlhf.cli.groups import FrozenArgs, ModelArgs
from lightrlhf.cli.hub import is_gguf, is_on_hub
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.data.rendering import writes_date
from lightrlhf.gguf import modelfile, reading, tokens, writer
from lightrlhf.models import export_check as checks
from lightrlhf.models import lora
from lightrlhf.models.export_check import Finding, Observed, Pair
from lightrlhf.models.loading import load_model, load_policy, load_scalar
from lightrlhf.models.names import holds_reward_model, resolve
from lightrlhf.models.quantisation import is_quantised
from lightrlhf.models.roles import Role
from lightrlhf.models.tokenizer import end_ids, load_tokenizer
from lightrlhf.storage import destinations, locks, seals
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import is_experiment_dir
from lightrlhf.storage.writing import make_folder, writing
from lightrlhf.training.model_card import model_card, quote

FOR_LLAMA = ("gguf", "ollama")
USES = {
    "gguf": "```bash\nllama-cli -m {name}-{type}.gguf\n```\n",
    "ollama": "```bash\nollama create {name} -f Modelfile\nollama run {name}\n```\n",
}


def check_stored(name: str, flag: str) -> None:
    """Raises: ValueError for the new model `tiny`, which is not stored."""
    if name == "tiny":
        raise ValueError(f"{flag} tiny is a new, untrained model; give a trained one")


def check_new(folder: str | Path, flag: str = "--destination_dir") -> None:
    """Raises: UsageError when a folder is there already, or would be in a run or a checkpoint."""
    with writing(f"{flag} {folder}", error=UsageError):  # a name may be too long to look for
        exists = Path(folder).exists()
    if exists:
        raise UsageError(f"{flag} {folder} exists; name a new one, or remove it")
    destinations.check_destination(Path(folder), flag)


@dataclass(frozen=True, kw_only=True)
class ExportArgs(Args):
    """Export a model for other programs, and check what was written."""

    model_name: str = flag(check=check_stored, show="first", positional=True)
    """Experiment dir, checkpoint, folder, GGUF file or hub name of the model; may be given without its flag."""
    to: Literal["merged", "safetensors-bf16", "adapter", "gguf", "ollama"] = flag(
        packages=dict.fromkeys(FOR_LLAMA, "gguf")
    )
    """All weights for transformers (`safetensors-bf16`: in bfloat16), an adapter, GGUF, or GGUF with a Modelfile."""
    dtype: Literal["float32", "bfloat16", "float16"] = flag("float32", needs={"to": "merged"})
    """Dtype of the weights for `to` merged."""
    gguf_type: Literal["f32", "bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"] = flag(
        "f16", needs={"to": FOR_LLAMA}
    )
    """Type of the matrices in a GGUF file."""
    destination_dir: str | None = flag(None, check=check_new)
    """New folder to write. Default: in `export` of the experiment dir, else of the current folder."""
    temperature: float | None = between(0, 100, None, needs={"to": "ollama"})
    """Temperature in the Modelfile. Default: the generation config's, else 1."""
    base_model_name: str | None = flag(None, needs={"to": "adapter"}, show="rarely")
    """Hub name of the base model to write into an exported adapter, if the base is a local folder."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a model to run code from its repository."""


def run(args: ExportArgs) -> str:
    """Export a model; returns the folder. Raises: RunFailure when what was written is not the model."""
    check_args(args, ExportArgs)
    source = resolve(args.model_name)
    name = name_of(source)
    destination = Path(args.destination_dir) if args.destination_dir else default_destination(args, source, name)
    check_new(destination)
    write = {"adapter": write_adapter, "gguf": write_llama, "ollama": write_llama}.get(args.to, write_merged)
    found: list[Finding] = []
    with writing(f"--destination_dir {destination}", error=UsageError):
        make_folder(destination.parent)
    with locks.lock_file(destination):
        seals.write_folder(destination, lambda folder: found.append(write(args, source, folder, name)))
    show(args, destination, found[0])
    return str(destination)


def name_of(source: str) -> str:
    """A name for a model, from its folder's or run's."""
    path = Path(source).resolve()
    if (path.parent / "args.json").is_file():
        try:
            stored = json.loads((path.parent / "args.json").read_text(encoding="utf-8"))
            return f"{Path(str(stored['experiment_name'])).name}-{path.name.removeprefix('checkpoint-')}"
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the folder's own name will do
    return path.name


def default_destination(args: ExportArgs, source: str, name: str) -> Path:
    """`export/NAME-KIND` in the model's experiment dir, or in the current folder."""
    kind = {"merged": f"merged-{args.dtype}", "safetensors-bf16": "merged-bfloat16"}.get(args.to, args.to)
    kind = f"{args.to}-{args.gguf_type}" if args.to in FOR_LLAMA else kind
    run_dir = Path(source).resolve().parent
    return (run_dir if is_experiment_dir(str(run_dir)) else Path()) / "export" / f"{name}-{kind}"


# ------------------------------------------------------------------------------------------------------------- writing
def write_merged(args: ExportArgs, source: str, folder: Path, name: str) -> Finding:
    """Write a folder of transformers with all weights."""
    from transformers import AutoTokenizer

    model, tokenizer, before = load_merged(args, source)
    dtype = "bfloat16" if args.to == "safetensors-bf16" else args.dtype
    save_rounded(model, dtype, folder)
    tokenizer.save_pretrained(folder)
    write_card(args, folder, name, source)
    read = auto_class(source).from_pretrained(folder, dtype=torch.float32).eval()
    after = checks.observe(read, AutoTokenizer.from_pretrained(folder), before)
    state, kind = read.state_dict(), getattr(torch, dtype)
    pairs = (Pair(key, value.to(kind).float(), state[key]) for key, value in model.state_dict().items())
    return checks.check(model, before, read, after, pairs)


def save_rounded(model: Any, dtype: str, folder: Path) -> None:
    """Save a model in another type; the model itself is left as it is."""
    rounded = model if dtype == "float32" else copy.deepcopy(model).to(getattr(torch, dtype))
    rounded.save_pretrained(folder)


def write_adapter(args: ExportArgs, source: str, folder: Path, name: str) -> Finding:
    """Write a peft folder that names its base."""
    from transformers import AutoTokenizer

    if lora.adapter_config(source, "--model_name") is None:
        raise UsageError(f"--to adapter: {args.model_name} holds full weights, not an adapter; use --to merged")
    tokenizer = load_tokenizer(None, source)
    is_scalar = holds_reward_model(source)
    options: dict[str, Any] = {"num_labels": 1} if is_scalar else {}
    model, base, loaded = load_model(auto_class(source), source, "--model_name", model_args(args), tokenizer, **options)
    check_unquantised(args, model)
    adapters = [adapter for adapter, _ in loaded.values()]
    lora.configure(model, active=adapters, trainable=())
    model.config.pad_token_id = tokenizer.pad_token_id
    before = checks.observe(model.eval(), tokenizer)
    head = model.get_parameter("score.weight") if is_scalar else None
    lora.save_adapter(model, adapters, head, base, folder)
    if not is_scalar and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    read = auto_class(source).from_pretrained(folder, dtype=torch.float32, **options).eval()
    read.config.pad_token_id = tokenizer.pad_token_id
    after = checks.observe(read, AutoTokenizer.from_pretrained(folder), before)
    state = read.state_dict()
    weights = {key: value for key, value in model.state_dict().items() if ".lora_" in key}
    (own,) = adapters
    pairs = (Pair(key, value, state[key.replace(f".{own}.", ".default.")]) for key, value in weights.items())
    finding = checks.check(model, before, read, after, pairs)
    if args.base_model_name is not None:
        rename_base(folder, args.base_model_name)
    write_card(args, folder, name, source, args.base_model_name or base)
    return finding


def rename_base(folder: Path, base: str) -> None:
    """Name another place of the base in an adapter's config."""
    file = folder / lora.ADAPTER_CONFIG
    stored = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(stored, indent=2), encoding="utf-8")


def write_llama(args: ExportArgs, source: str, folder: Path, name: str) -> Finding:
    """Write a GGUF file, for Ollama with its Modelfile."""
    if holds_reward_model(source):
        raise UsageError(f"--to {args.to}: {args.model_name} holds a reward model; llama.cpp reads language models")
    model, tokenizer, before = load_merged(args, source)
    described = writer.metadata(model, tokenizer, end_ids(tokenizer, model))
    file = folder / f"{name}-{args.gguf_type}.gguf"
    if args.to == "ollama":
        stored = model.generation_config.temperature if model.generation_config else None
        temperature = args.temperature if args.temperature is not None else stored or 1.0
        text = modelfile.modelfile(tokenizer, before.ends, file.name, temperature)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
        if writes_date(tokenizer):
            print("the chat template writes the present date, so today's stays in the Modelfile; change its TEMPLATE")
    writer.write_gguf(model, described, file, args.gguf_type, name)
    write_card(args, folder, name, source)
    try:
        read, tokenizer, metadata = reading.read_gguf(file, "its file")
    except UsageError as problem:
        wider = "; a wider --gguf_type may hold them" if "not finite" in str(problem) else ""
        raise RunFailure(f"the export was not kept: {str(problem).partition(';')[0]}{wider}") from None
    read = read.float().eval()
    ends = tokens.ends_of(metadata, tokenizer)
    after = checks.observe(read, tokenizer, before)._replace(ends={ends} if isinstance(ends, int) else {*ends})
    both = zip(writer.stored_tensors(model, args.gguf_type), writer.stored_tensors(read, "f32"), strict=True)
    pairs = (Pair(mine.name, writer.round_as_stored(mine), theirs.value) for mine, theirs in both)
    return checks.check(model, before, read, after, pairs)


# ------------------------------------------------------------------------------------------------------------- loading
def model_args(args: ExportArgs) -> ModelArgs:
    return FrozenArgs(trust_remote_code=args.trust_remote_code)


def auto_class(source: str) -> Any:
    """The class of transformers that loads a model: with a scalar head, or a language model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if holds_reward_model(source) else AutoModelForCausalLM


def load_merged(args: ExportArgs, source: str) -> tuple[Any, Any, Observed]:
    """A model in float32 with its adapters merged, its tokenizer, and its outputs before the merge."""
    tokenizer = load_tokenizer(None, source)
    role: Role
    if holds_reward_model(source):
        role = load_scalar(source, model_args(args), None, seed=0, merges=False)
        role.model.config.pad_token_id = tokenizer.pad_token_id
    else:
        role = load_policy(source, model_args(args), tokenizer, merges=False)
    check_unquantised(args, role.model)
    before = checks.observe(role.model.eval(), tokenizer)
    return lora.merge(role.model, role.adapters), tokenizer, before


def check_unquantised(args: ExportArgs, model: Any) -> None:
    """Raises: UsageError for weights that are stored in 4 or 8 bits."""
    if is_quantised(model):
        raise UsageError(
            f"{args.model_name}: its weights are stored in 4 or 8 bits (bitsandbytes), which are not exported; give an "
            "adapter on unquantised ones"
        )


# ------------------------------------------------------------------------------------------------------------- showing
def write_card(args: ExportArgs, folder: Path, name: str, source: str, base: str | None = None) -> None:
    """Write a model card for the hub beside the weights, with the source's below it."""
    given = {key: value for key, value in to_dict(args).items() if value is not None and key != "destination_dir"}
    summary = f"Exported by lightrlhf from {quote(args.model_name)}."
    header = {"library_name": "peft"} if base is not None else {}
    header |= {"base_model": base} if base is not None and is_on_hub(base) else {}
    header |= {"pipeline_tag": "text-classification"} if holds_reward_model(source) else {}
    header |= {"library_name": "gguf"} if args.to in FOR_LLAMA else {}
    use = USES[args.to].format(name=name, type=args.gguf_type) if args.to in USES else None
    text = model_card(name, "export", summary, given, header=header, use=use)
    before = Path(source) / "README.md"
    if before.is_file() and not is_gguf(args.model_name):  # whose folder says nothing but what `describe_file` does
        text += "\n## The model it was made of\n\n" + without_header(before.read_text(encoding="utf-8"))
    (folder / "README.md").write_text(text, encoding="utf-8")


def without_header(card: str) -> str:
    """A model card without the YAML at its start."""
    parts = card.split("---\n", 2)
    return parts[2] if card.startswith("---\n") and len(parts) == 3 else card


def show(args: ExportArgs, folder: Path, finding: Finding) -> None:
    """Print what was written, and what the check has measured."""
    columns = ["file", "MB", "largest difference of logits", "greedy tokens equal"]
    files = sorted(path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors"))
    rows = [[path.name, f"{path.stat().st_size / 1e6:.1f}"] for path in files]
    measured = [f"{finding.difference:.2g}", finding.greedy]
    print_table(
        f"{args.to}: {folder}", columns, [row + (measured if i == 0 else [""] * 2) for i, row in enumerate(rows)]
    )
    print(f"wrote {folder}")


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the folder."""
    return run(parse(ExportArgs, argv))


if __name__ == "__main__":
    main()
