"""Every tool that computes by a model, on a device that is not the CPU: the same files, and few reads by the host."""

import importlib
import json

import pytest
from helpers import tool_calls
from helpers.corridor import save_corridor_model
from helpers.second_runs import contents, gaps, there

pytestmark = pytest.mark.slow
SAMPLING = ("generate", "evaluate", "evaluate_dialogues", "serve", "demo")
ROUNDING = 5e-6  # relative to numbers above 1: a reward is divided by the deviation of a hardly trained model's scores
STREAMED = {"serve": 2, "demo": 6}  # reads for each token that is shown as soon as it is there
FAULTS = {"rewards": "annotate", "evaluation": "evaluate", "serving": "serve", "demo": "demo"}  # by room, what meets it


@pytest.fixture
def made(tmp_path, sft_dir, rm_dir, cafe_data, talk_data):
    """A function that gives the calls of all tools on a device, in a folder of their own."""

    def make(device: str, folder: str = "", length: int = 6) -> dict[str, tuple[str, list[str]]]:
        own = tmp_path / (folder or device)
        corridor = save_corridor_model(own / "corridor", 5)
        return tool_calls.calls(own, device, sft_dir, rm_dir, cafe_data, talk_data, corridor, length)

    return make


def test_tools_write_what_they_write_on_the_cpu(made, tmp_path):
    """Texts and ids are the same, numbers up to rounding, and no batch is read from the device."""
    calls, returned = made("second"), {}
    for name, (target, flags) in made("cpu").items():
        module, _, function = target.partition(":")
        returned[name] = getattr(importlib.import_module(module), function or "main")(flags)
    found = there(calls)
    values = {name: one["returned"] for name, one in found.items()}
    one, other = (json.dumps(value).replace(str(tmp_path), "") for value in (values, returned))
    pair = json.loads(one.replace("/second/", "/")), json.loads(other.replace("/cpu/", "/"))
    assert max(gaps(*pair))[0] <= ROUNDING, max(gaps(*pair))
    files = contents(tmp_path / "second"), contents(tmp_path / "cpu")
    assert len(files[0]) > 8 and max(gaps(*files))[0] <= ROUNDING, max(gaps(*files))
    assert not any(site.startswith("lightrlhf/data/") for name in found for site in found[name]["reads"])


def test_no_tool_needs_what_apple_s_gpus_lack(made):
    there(made("second"), mps_rules=True)


def growth(made, names: tuple[str, ...]) -> dict[str, int]:
    """By how many reads 12 tokens need more than 3."""
    both = []
    for length in (3, 12):
        calls = made("second", str(length), length)
        found = there({name: calls[name] for name in names})
        both.append({name: sum(one["reads"].values()) for name, one in found.items()})
    return {name: both[1][name] - both[0][name] for name in names}


def test_reads_do_not_grow_with_responses(made):
    """The host reads tokens once for up to 16 of them, and a few times for each where a person watches."""
    assert growth(made, SAMPLING) == {name: 9 * STREAMED.get(name, 0) for name in SAMPLING}


@pytest.mark.parametrize("room", FAULTS)
def test_a_fault_planted_in_a_room_is_found(room, made):
    """A tensor of the CPU beside scores, and a batch that is moved before its lengths are read."""
    name = FAULTS[room]
    one = there({name: made("second")[name]}, fault=room)[name]
    sites = [site for site in one["reads"] if site.startswith("lightrlhf/data/")]
    assert sites if room in ("serving", "demo") else "same device" in one["problem"], one
