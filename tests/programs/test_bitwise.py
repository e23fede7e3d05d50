"""Which results are the same bit for bit under another vector width and another number of threads.

Every setting runs twice, in processes of its own, from the same data and models. What the page promises is asserted:
the same setting gives the same bits, prepared files and batches are the same under all, losses, scores and trained
weights are close. What else is equal is printed as a table and not asserted: a rounding may decide a token,
and all that follows from it, such as a whole rollout of PPO. Left out: other processors than the one at hand; one
without AVX512 has the same setting under two names.
"""

import itertools
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import ROOT, environment, save_model, tiny_scalar
from helpers.bitwise import PROGRAMS
from helpers.processes import PATIENCE, started
from helpers.tiny_runs import TinyRuns

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETTINGS = {
    f"{name}, {threads}": extra | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    for name, extra in (("AVX2", AVX2), ("native", {}))
    for threads in (1, 2)
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
STEPS, RATE = 3, 1e-3
EVERYWHERE = ("prepared files", "batches and noise")
CLOSE = {"weights drawn at a seed": 1e-5, "preference losses": 1e-5, "scores": 1e-5}  # relative to the largest value
TRAINED = ("sft, 3 steps", "rm, 3 steps", "dpo, 3 steps")
FURTHEST = 2 * STEPS * RATE  # an early step of Adam moves a weight by about the rate, in two runs in two directions


@pytest.fixture(scope="module")
def found(tmp_path_factory, cafe_data, talk_data, tokenizer) -> dict[str, list[dict]]:
    """The results of two runs of each setting."""
    folder = tmp_path_factory.mktemp("bitwise")
    runs = TinyRuns(folder / "runs", cafe_data, talk_data, tokenizer)
    model = save_model("llama", folder / "llama", tokenizer, **WIDE)
    tokenizer.save_pretrained(model)
    tiny_scalar("llama", **WIDE).model.save_pretrained(folder / "scalar")
    (folder / "data").symlink_to(cafe_data)
    found: dict[str, list[dict]] = {}
    for (name, extra), number in itertools.product(SETTINGS.items(), range(2)):
        own = folder / f"{name.replace(', ', '-')}-{number}"
        own.mkdir()
        rates = ["--actor_learning_rate", RATE], ["--learning_rate", RATE]
        flags = {
            program: runs.flags(program, own / program, "--model_name", model, *rates[program != "ppo"], steps=STEPS)
            for program in PROGRAMS
        }
        script = str(ROOT / "tests" / "helpers" / "bitwise.py")
        command = [sys.executable, script, str(folder), str(own), json.dumps(flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with started(command, cwd=ROOT, env={**environment(), **extra}, **pipes) as process:
            out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, out[-3000:]
        made = torch.load(own / "results.pt", weights_only=True)
        assert made["threads"] == int(extra["OMP_NUM_THREADS"])
        print(f"{name} thread(s), run {number + 1}: vectors of {made['capability']}", flush=True)
        found.setdefault(name, []).append(made["results"])
    return found


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """Tensors and plain values of a tree by their place in it."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {place: leaf for key, value in items for place, leaf in leaves(value, f"{name}/{key}").items()}
    return {name: tree}


def bits(tree: Any) -> dict[str, Any]:
    """The leaves of a tree as what is the same only if every bit is, NaN and the sign of zero included."""
    return {
        name: (str(leaf.dtype), tuple(leaf.shape), leaf.numpy().tobytes())
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for name, leaf in leaves(tree).items()
    }


def distance(one: Any, other: Any) -> float:
    """Largest difference of two trees, of each leaf relative to its largest value where that is above 1."""
    ours, others = leaves(one), leaves(other)
    if ours.keys() != others.keys():
        return math.inf
    furthest = 0.0
    for name, leaf in ours.items():
        if isinstance(leaf, str | bool | None):
            furthest = max(furthest, 0.0 if leaf == others[name] else math.inf)
            continue
        a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (leaf, others[name]))
        if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
            return math.inf
        if a.numel():
            scale = float(a.nan_to_num(0.0).abs().max().clamp(min=1.0))
            furthest = max(furthest, float((a - b).nan_to_num(0.0).abs().max()) / scale)
    return furthest


def test_the_same_setting_gives_the_same_bits(found, case):
    for name, (one, other) in found.items():
        for item in one:
            case(f"{item}: {name} thread(s), twice", bits(one[item]) == bits(other[item]))


def test_data_and_batches_are_the_same_everywhere(found, case):
    first, *others = found
    for item, name in itertools.product(EVERYWHERE, others):
        case(f"{item}: {first} and {name} thread(s)", bits(found[first][0][item]) == bits(found[name][0][item]))


def test_what_a_model_computes_is_close(found, case):
    for one, other in itertools.combinations(found, 2):
        a, b = found[one][0], found[other][0]
        pair = f"{one} and {other} thread(s)"
        for item, largest in CLOSE.items():
            gap = distance(a[item], b[item])
            case(f"{item}: {pair}", gap <= largest, f"{gap:.1e} of at most {largest:.0e} apart")
        for item in TRAINED:
            gap = distance(a[item]["weights"], b[item]["weights"])
            case(f"{item}: {pair}", gap <= FURTHEST, f"weights {gap:.1e} of at most {FURTHEST:.0e} apart")


@pytest.mark.slow
@pytest.mark.attack
def test_table(found):
    """Prints which settings agree, by letters: the same letter, the same bits; then the largest distance."""
    print("\n" + " " * 26 + "  ".join(found))
    for item in next(iter(found.values()))[0]:
        seen: list[dict] = []
        letters = []
        for results, _ in found.values():
            own = bits(results[item])
            if own not in seen:
                seen.append(own)
            letters.append("abcd"[seen.index(own)])
        apart = max(distance(one[0][item], other[0][item]) for one, other in itertools.combinations(found.values(), 2))
        line = "".join(f"{letter:>{len(name)}}  " for letter, name in zip(letters, found))
        print(f"{item:26}{line}{f'{apart:.1e} apart' if apart else ''}")
