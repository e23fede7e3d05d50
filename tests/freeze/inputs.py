"""Models and data of the runs, made once by the base: `python inputs.py FOLDER`."""

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

WIDTH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CAFE = ["--num_finetune", "60", "--num_preference", "60", "--num_prompts", "40", "--num_held_out", "12"]
WORDS = ["<pad>", "<eos>", "<unk>", "\n", *"0123456789-.#>:", "Analyze", "Choose", "Action", "west", "east", "wait"]
WORDS += ["go", "at", "of", "walk", "not", "but", "moved", "nothing"]


def make(folder: Path) -> None:
    """Write all models and data below a folder."""
    from transformers import AutoTokenizer

    from datasets_prep.cafe.prepare_data import main as cafe
    from datasets_prep.cafe_talk.prepare_data import main as talk

    data, one = ["--num_proc", "1"], folder / "sets" / "one"
    cafe(["--destination_dir", str(folder / "cafe" / "tiny"), *CAFE, "--num_held_out_pairs", "12", *data])
    tokenizer = AutoTokenizer.from_pretrained(folder / "cafe" / "tiny" / "tokenizer")
    sizes = ["--num_dialogues", "40", "--num_held_out", "8"]
    tokenizer.save_pretrained(folder / "tokenizer")
    talk(["--destination_dir", str(folder / "talk"), "--tokenizer_name", str(folder / "tokenizer"), *sizes, *data])
    for name, (first, last) in {"one": (0, 20), "two": (30, 37)}.items():
        part_of(folder / "cafe" / "tiny", folder / "sets" / name, first, last)
    take_apart(one.parent.parent / "cafe" / "tiny", folder / "labelled")
    dialogue_pairs(folder / "pairs", folder / "cafe" / "tiny" / "tokenizer")
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    for name, scalar in (("llama", False), ("other", False), ("scorer", True)):
        seed = {"llama": 1, "other": 2, "scorer": 3}[name]
        save_model(folder / name, seed, scalar, vocab_size=len(tokenizer), attention_dropout=0.1, **special)
        tokenizer.save_pretrained(folder / name)
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.15}
    words = word_tokenizer()
    save_model(folder / "corridor", 0, False, vocab_size=len(words), **special)
    words.save_pretrained(folder / "corridor")


def save_model(folder: Path, seed: int, scalar: bool, **config: Any) -> None:
    """Write a Llama with random weights, so large that distributions are peaked and errors show."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    made = LlamaConfig(max_position_embeddings=256, num_labels=1, **WIDTH, **config)
    model = (LlamaForSequenceClassification if scalar else LlamaForCausalLM)(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def word_tokenizer() -> Any:
    """A tokenizer of the words of the corridor's texts."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    pieces = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(r"\n|[A-Za-z]+|."), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def copied(source: Path, folder: Path) -> Path:
    """A copy of a data folder, without the seal, which changed files would break."""
    shutil.copytree(source, folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    return folder


def part_of(source: Path, folder: Path, first: int, last: int) -> None:
    """Write a copy with the rows first … last-1 of each training split."""
    for path in copied(source, folder).glob("*_train.pt"):
        torch.save(rows_of(path)[first:last], path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a split's file, of any layout."""
    from lightrlhf.data.splits import load_split

    stage, _, split = path.stem.rpartition("_")
    return copy.deepcopy(list(load_split(path.parent, stage, split, verify=False)))  # which are mapped from the file


def take_apart(source: Path, folder: Path) -> None:
    """Write a copy with labelled responses in place of pairs; of every third pair the chosen response alone."""
    for path in copied(source, folder).glob("preference_*.pt"):
        rows = []
        for i, pair in enumerate(rows_of(path)):
            for side in ("chosen", "rejected") if i % 3 else ("chosen",):
                row = {"prompt_len": pair["prompt_len"], "input_ids": pair[f"{side}_input_ids"]}
                rows.append({**row, "label": side == "chosen", "columns": {"number": i}})
        torch.save(rows, path.with_name(path.name.replace("preference", "unpaired")))
        path.unlink()


def dialogue_pairs(folder: Path, tokenizer: Path) -> None:
    """Write random pairs of dialogues with a common prefix, as `refuel` reads them."""
    folder.mkdir(parents=True)
    shutil.copytree(tokenizer, folder / "tokenizer")
    for split, number in (("train", 12), ("validation", 4)):
        torch.save([dialogue_pair(i) for i in range(number)], folder / f"refuel_{split}.pt")


def dialogue_pair(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    prefix = torch.randint(2, 61, (3,), generator=generator)
    row: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        ids = torch.cat([prefix, torch.randint(2, 61, (2 + number % 4,), generator=generator)])
        row |= {f"{side}_input_ids": ids, f"{side}_action_mask": torch.arange(1, len(ids)) >= 3}
        row |= {f"{side}_reward": float(torch.rand((), generator=generator))}
    return row


if __name__ == "__main__":
    make(Path(sys.argv[1]))
