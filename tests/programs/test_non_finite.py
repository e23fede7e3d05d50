"""Values that are not finite: in weights, buffers, optimiser states, logits, gradients, rewards and loaded models.

And damaged newest checkpoints: a run is resumed from the last good one and ends as if nothing had been damaged. Each
case runs in a fork, which is made faulty first.
"""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import last_checkpoint, metrics, reseal, weights
from helpers.flat import stored_rows
from helpers.killed import forked
from helpers.programs import fields_of, main_of
from helpers.tiny_runs import ITERATED, PROGRAMS, SAMPLING, TRAINED, TinyRuns, experiment_of
from safetensors.torch import load_file, save_file

from lightrlhf.cli.groups import DecodingArgs, ModelArgs
from lightrlhf.generation.engine import generate, generate_steps
from lightrlhf.generation.sampling import check_sampled, sample
from lightrlhf.models.loading import load_policy
from lightrlhf.programs import TRAINING
from lightrlhf.storage.checkpoint import checkpoints, verify_checkpoint
from lightrlhf.storage.seals import sha256
from lightrlhf.training.learners import Learners
from lightrlhf.training.phases import Phases
from lightrlhf.training.run_files import Checkpoints

VALUES = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
MARKER = 7  # a token that in each split one row alone has


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    for program in (*PROGRAMS, "generate", "annotate", "evaluate"):
        main_of(program)  # imported once, before any fork
    folder = tmp_path_factory.mktemp("runs")
    made = TinyRuns(folder, cafe_data, talk_data, tokenizer)
    made.reward = Path(main_of("rm")(made.flags("rm", folder / "reward", steps=2)))
    made.whole = {}
    for program in PROGRAMS:
        flags = made.flags(program, folder / "whole" / program)
        output = folder / f"{program}.txt"
        assert forked(lambda flags=flags, program=program: main_of(program)(flags), output) == 0, output.read_text()
        made.whole[program] = experiment_of(folder / "whole" / program)
    return made


def ending(folder: Path, call) -> tuple[int, str, list[str]]:
    """Exit status, output and lines with `error:` of a call in a fork."""
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    status = forked(call, output)
    text = output.read_text(errors="replace")
    return status, text, [line[line.index("error: ") :] for line in text.splitlines() if "error: " in line]


def before(owner: type, method: str, number: int, fault) -> None:
    """Let `fault(part, *arguments)` happen before the `number`-th call of a method of a part of Run; in a fork."""
    function, calls = getattr(owner, method), []

    def wrapped(part, *arguments, **options):
        calls.append(0)
        if len(calls) == number:
            fault(part, *arguments)
        return function(part, *arguments, **options)

    setattr(owner, method, wrapped)


def poison(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[tensor.numel() // 2] = value


def is_one_line(status: int, text: str, errors: list[str], *words: str, exit_status: int = 1) -> bool:
    one = status == exit_status and len(errors) == 1 and "Traceback" not in text
    return one and all(word in errors[0] for word in words)


# ------------------------------------------------------------------------------------------------------------ in memory
def weight_of(run, name: str) -> torch.Tensor:
    return list(run.learners[name].module.parameters())[-1]


def state_of(run, name: str, key: str) -> torch.Tensor:
    optimizer = run.learners[name].optimizer.optimizer
    return next(iter(optimizer.state.values()))[key]


def places_in_memory(program: str) -> dict:
    """What can go bad in memory of a run, by name: a function of the run that returns a tensor."""
    name = "reward" if program == "rm" else "policy"
    places = {
        "weight": lambda run: weight_of(run, name),
        "embedding": lambda run: next(run.learners[name].module.parameters()),
        "buffer": lambda run: next(run.learners[name].module.buffers()),
        "first moment": lambda run: state_of(run, name, "exp_avg"),
        "second moment": lambda run: state_of(run, name, "exp_avg_sq"),
    }
    if program == "ppo":
        places |= {"critic": lambda run: weight_of(run, "critic")}
        places |= {"critic's moment": lambda run: state_of(run, "critic", "exp_avg")}
    return places


@pytest.mark.parametrize("program", TRAINED)
def test_a_fault_in_memory_before_a_save(program, runs, case, tmp_path):
    for place, find in places_in_memory(program).items():
        for shown, value in VALUES.items():
            log_dir = tmp_path / f"{place} {shown}"

            def faulty(find=find, value=value, log_dir=log_dir):
                before(Phases, "save", 2, lambda run, *_: poison(find(run), value))
                main_of(program)(runs.flags(program, log_dir))

            status, text, errors = ending(tmp_path, faulty)
            saved = [path.name for path in checkpoints(experiment_of(log_dir))]
            words = ("is not finite after step 4 (", "no checkpoint is written", "checkpoint-000002")
            held = is_one_line(status, text, errors, *words) and saved == ["checkpoint-000002"]
            case(f"{program} {place} {shown} before a save", held, str((status, saved, errors or text[-300:])))


def test_a_fault_in_the_state_of_the_loop(runs, case, tmp_path):
    for shown, value in VALUES.items():

        def faulty(value=value, shown=shown):
            save = Checkpoints.save

            def with_fault(checkpoints, start, texts):
                extra = {"kl_coeff": value} if start.step == 4 else start.extra
                save(checkpoints, start._replace(extra=extra), texts)

            Checkpoints.save = with_fault
            main_of("ppo")(runs.flags("ppo", tmp_path / shown))

        end = ending(tmp_path, faulty)
        case(f"ppo KL weight {shown} before a save", is_one_line(*end, "kl_coeff", "step 4"), str(end[2] or end[1]))


@pytest.mark.parametrize("program", TRAINED)
def test_a_gradient(program, runs, case, tmp_path):
    for shown, value in VALUES.items():

        def faulty(value=value, shown=shown):
            def spoil(learners, name):
                poison(next(p.grad for p in learners[name].module.parameters() if p.grad is not None), value)

            before(Learners, "optimize", 5, spoil)
            main_of(program)(runs.flags(program, tmp_path / shown))

        end = ending(tmp_path, faulty)
        saved = checkpoints(experiment_of(tmp_path / shown))
        last = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint had been written yet"
        held = is_one_line(*end, "gradient norm is", "counted from 0)", last)
        case(f"{program} gradient {shown}", held, str(end[2] or end[1][-300:]))


# ---------------------------------------------------------------------------------------------------- rows of the batch
def marked_data(runs: TinyRuns, program: str, folder: Path) -> tuple[list[str], int]:
    """Flags of data in which one training row alone has the marker, and the row's number."""
    stage = TRAINING[program].data
    source = {"refuel": runs.pairs, "unpaired": runs.unpaired}.get(stage, runs.cafe)
    shutil.copytree(source, folder)
    path = folder / f"{stage}_train.pt"
    rows = stored_rows(path)
    for number, row in enumerate(rows):
        for key in ("input_ids", "chosen_input_ids", "rejected_input_ids"):
            if key in row:
                ids = torch.as_tensor(row[key]).clone()
                ids[ids == MARKER] = MARKER + 1
                if number == 5:
                    ids[0] = MARKER
                row[key] = ids
        if "targets" in row:
            row["targets"] = torch.where(torch.as_tensor(row["targets"]) == -100, -100, row["input_ids"])
    torch.save(rows, path)
    reseal(folder)
    return ["--data_dir", str(folder)], 5


@pytest.mark.parametrize("program", [one for one in TRAINED if TRAINING[one].data not in ("dialogue", "environment")])
def test_the_row_that_brings_it_is_named(program, runs, case, tmp_path):
    more, number = marked_data(runs, program, tmp_path / "data" / "marked")
    for shown, value in VALUES.items():

        def faulty(value=value, shown=shown):
            embed = torch.nn.functional.embedding

            def spoiled(ids, *arguments, **options):
                out = embed(ids, *arguments, **options)
                return torch.where((ids == MARKER)[..., None] & torch.tensor(armed[0]), value, out)

            armed = [False]
            torch.nn.functional.embedding = spoiled
            before(Checkpoints, "begin_step", 1, lambda *_: armed.__setitem__(0, True))
            flags = runs.flags(program, tmp_path / shown, *more, "--save_interval", "1", "--keep_last", "2", steps=99)
            main_of(program)(flags)

        end = ending(tmp_path, faulty)
        named = end[2][0].partition("training rows ")[2].partition(", counted")[0].split(", ") if end[2] else []
        few = 1 if program in ("ppo", "grpo") else 2  # the rows of a micro-batch; a prompt is named alone
        held = is_one_line(*end) and str(number) in named and len(named) <= few
        case(f"{program} row with {shown}", held, str(end[2] or end[1][-300:]))


# ------------------------------------------------------------------------------------------------------------- sampling
def last_of(steps, *arguments):
    return list(steps(*arguments))[-1]


OPTIONS = {
    "sampled": {},
    "greedy": {"do_sample": False},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.3},
    "cold": {"temperature": 0.1},
}


@pytest.mark.parametrize("shown", VALUES)
def test_logits_in_sampling(shown, runs, case, tokenizer):
    for option, changes in OPTIONS.items():
        policy = load_policy(str(runs.model), ModelArgs(), tokenizer).eval()
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(VALUES[shown])
        args = DecodingArgs(max_new_tokens=4, **changes)
        noise = torch.rand(3, 4)
        calls = {
            "engine": partial(generate, policy, [[5, 6], [7], [8, 9]], args, [1], noise),
            "stream": partial(last_of, generate_steps, policy, [5, 6], args, [1], noise[:1]),
        }
        for name, call in calls.items():
            try:
                call()
                seen = "went on"
            except Exception as problem:
                seen = f"{type(problem).__name__}: {problem}"
            held = seen.startswith("NotFinite") and str(runs.model) in seen and "\n" not in seen
            case(f"{name}, {option}, logits {shown}", held, seen)


def test_single_tokens_may_be_impossible(runs, case, tokenizer):
    """A logit of -inf forbids a token and is no fault."""

    class Model:
        config = None

    for option, changes in OPTIONS.items():
        logits = torch.randn(64, 61)
        logits[:, 3:50] = -math.inf
        token, logprobs, _ = sample(logits, torch.rand(64), DecodingArgs(max_new_tokens=1, **changes))
        check_sampled(logprobs, Model)
        case(f"forbidden tokens, {option}", bool(((token < 3) | (token >= 50)).all() and logprobs.isfinite().all()))


# -------------------------------------------------------------------------------------------------------------- rewards
REWARDS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "None": None}


@pytest.mark.parametrize("program", [one for one in SAMPLING if "reward_function" in fields_of(f"lightrlhf.{one}")])
def test_rewards(program, runs, case, tmp_path):
    import helpers.rewards

    for shown, value in REWARDS.items():
        for some in (True, False):

            def reward(prompts, completions, value=value, some=some, **columns):
                given = helpers.rewards.__dict__["true_vowels"](prompts, completions)
                return [value if i % 3 == 0 or not some else number for i, number in enumerate(given)]

            def faulty(reward=reward, shown=shown, some=some):
                helpers.rewards.true_vowels, helpers.rewards.vowels = helpers.rewards.vowels, reward
                helpers.rewards.whole_vowels = reward
                main_of(program)(runs.flags(program, tmp_path / f"{shown} {some}"))

            status, text, errors = ending(tmp_path, faulty)
            found = [*(tmp_path / f"{shown} {some}").rglob("*model.safetensors")]
            finite = all(part.isfinite().all() for path in found for part in load_file(path).values())
            ended = status == 0 or (status in (1, 2) and len(errors) == 1 and "Traceback" not in text)
            name = f"{program} {'some' if some else 'all'} rewards {shown}"
            case(name, ended and finite, str((status, len(found), errors or text[-200:] * (status != 0))))


# -------------------------------------------------------------------------------------------------------- loaded models
def damaged_model(source: Path, folder: Path, part: str, value: float) -> Path:
    """A copy of a model's folder with one value of a weight whose name holds `part`."""
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    poison(next(tensor for name, tensor in stored.items() if part in name), value)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    reseal(folder)
    return folder


def uses_of(runs: TinyRuns, log_dir: Path, model: Path, reward: Path) -> dict:
    """Programs by the flag that names a model: of a language model, or of a reward model."""
    rows = log_dir.parent / "responses.jsonl"
    rows.write_text(json.dumps({"index": 0, "prompt": "a latte", "responses": ["of course"]}) + "\n")
    asked = log_dir.parent / "prompts.jsonl"
    asked.write_text(json.dumps({"prompt": "a latte"}) + "\n")
    plain, out = ["--accelerator", "cpu"], ["--output_file", str(log_dir / "out.jsonl")]
    made = [*plain, "--prompts_file", str(asked), "--max_new_tokens", "2", *out]
    scored = [*plain, "--responses_file", str(rows), *out]
    return {
        **{f"{p} --model_name": (p, runs.flags(p, log_dir, "--model_name", model)) for p in TRAINED},
        "ppo --rm_experiment_dir": ("ppo", runs.flags("ppo", log_dir, "--rm_experiment_dir", reward)),
        "dpo --ref_model": ("dpo", runs.flags("dpo", log_dir, "--ref_model", model)),
        "generate --model_name": ("generate", [*made, "--model_name", str(model)]),
        "annotate --rm_experiment_dir": ("annotate", [*scored, "--rm_experiment_dir", str(reward)]),
    }


@pytest.mark.parametrize("shown", VALUES)
def test_a_loaded_model(shown, runs, case, tmp_path):
    saved = last_checkpoint(runs.reward)
    for part in ("embed_tokens", "q_proj", "mlp", "norm"):
        folder = tmp_path / part
        model = damaged_model(runs.model, folder / "model", part, VALUES[shown])
        corridor = damaged_model(Path(runs.corridor), folder / "corridor", part, VALUES[shown])
        reward = damaged_model(saved, folder / "reward", part, VALUES[shown])
        for name, (program, flags) in uses_of(runs, folder / "logs", model, reward).items():
            if program == "reflect_rl":
                flags = [str(corridor) if flag == str(model) else flag for flag in flags]
            if name == "ppo --rm_experiment_dir":
                place = flags.index("--reward_function")
                del flags[place : place + 2]
            end = ending(tmp_path, lambda program=program, flags=flags: main_of(program)(flags))
            flag = name.split()[1]
            held = is_one_line(*end, "weights that are not finite", part, flag, exit_status=2)
            case(f"{name}: {shown} in {part}", held, str(end[2] or end[1][-300:]))


# -------------------------------------------------------------------------------------------------- damaged checkpoints
def rewrite_manifest(folder: Path) -> None:
    """Let the manifest say what the files are now."""
    names = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({name: sha256(folder / name) for name in names}))


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def change_state(folder: Path, change) -> None:
    """Change `resume.pt` so that its manifest is true."""
    state = torch.load(folder / "resume.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "resume.pt")
    rewrite_manifest(folder)


def spoil_weight(folder: Path, value: float) -> None:
    """Change a trained weight so that the manifest is true."""
    stored = load_file(folder / "model.safetensors")
    poison(next(iter(stored.values())), value)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_manifest(folder)


def spoil_moment(state: dict, value: float) -> None:
    moments = next(iter(state["optimizers"].values()))["state"]
    poison(next(iter(moments.values()))["exp_avg"], value)


DAMAGES = {
    "resume.pt flipped at its start": lambda at: flip(at / "resume.pt", 0.01),
    "resume.pt flipped in the middle": lambda at: flip(at / "resume.pt", 0.5),
    "resume.pt flipped at its end": lambda at: flip(at / "resume.pt", 1),
    "resume.pt torn": lambda at: (at / "resume.pt").write_bytes((at / "resume.pt").read_bytes()[:999]),
    "resume.pt empty": lambda at: (at / "resume.pt").write_bytes(b""),
    "resume.pt missing": lambda at: (at / "resume.pt").unlink(),
    "weights flipped": lambda at: flip(at / "model.safetensors", 0.7),
    "weights torn": lambda at: (at / "model.safetensors").write_bytes(b"{"),
    "weights missing": lambda at: (at / "model.safetensors").unlink(),
    "config flipped": lambda at: flip(at / "config.json", 0.5),
    "tokenizer missing": lambda at: (at / "tokenizer.json").unlink(),
    "manifest flipped": lambda at: flip(at / "manifest.json", 0.5),
    "manifest torn": lambda at: (at / "manifest.json").write_text("{"),
    "manifest empty": lambda at: (at / "manifest.json").write_text(""),
    "manifest missing": lambda at: (at / "manifest.json").unlink(),
    "folder empty": lambda at: [path.unlink() for path in at.iterdir()],
    "weights NaN": lambda at: spoil_weight(at, math.nan),
    "weights inf": lambda at: spoil_weight(at, math.inf),
    "moment NaN": lambda at: change_state(at, lambda state: spoil_moment(state, math.nan)),
    "moment -inf": lambda at: change_state(at, lambda state: spoil_moment(state, -math.inf)),
    "state without weights": lambda at: change_state(at, lambda state: state.pop("learned")),
    "state of another kind": lambda at: (torch.save([1], at / "resume.pt"), rewrite_manifest(at)),
    "state no archive": lambda at: ((at / "resume.pt").write_text("x"), rewrite_manifest(at)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_damaged_newest_checkpoint(program, runs, case, tmp_path):
    whole = runs.whole[program]
    if program in ITERATED:  # its stages name the policies before by their whole paths, so it stays in its place
        whole = shutil.copytree(whole, tmp_path / "whole", symlinks=True)
    for number, (name, damage) in enumerate(DAMAGES.items()):
        if program in ITERATED and ("NaN" in name or "inf" in name or "state" in name):
            continue  # of a finished iteration the weights alone are used; loading looks at them
        run = tmp_path / str(number) / "run"
        if program in ITERATED:
            run = runs.whole[program]
            shutil.rmtree(run)
        shutil.copytree(whole, run, symlinks=True)
        policy = sorted(run.glob("iteration-*/policy"))[-1] if program in ITERATED else run
        newest = checkpoints(policy)[-1]
        damage(newest)
        status, text, _ = ending(tmp_path, lambda run=run: main_of(program)(["--resume_from", str(run)]))
        notes = [line for line in text.splitlines() if "is damaged (" in line and newest.name in line]
        policy = sorted(run.glob("iteration-*/policy"))[-1] if program in ITERATED else run
        kept = (policy / f"damaged-{newest.name}").is_dir()
        held = status == 0 and len(notes) >= 1 and kept and last_checkpoint(policy).name == newest.name
        if held:
            verify_checkpoint(last_checkpoint(policy))
            original = sorted(whole.glob("iteration-*/policy"))[-1] if program in ITERATED else whole
            held = weights(last_checkpoint(policy)) == weights(last_checkpoint(original))
            held = held and metrics(policy) == metrics(original)
        case(f"{program}: {name}", held, str((status, notes, "" if held else text[-300:])))


@pytest.mark.parametrize("program", TRAINED)
def test_every_checkpoint_is_damaged(program, runs, case, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs.whole[program], run, symlinks=True)
    for one in checkpoints(run):
        flip(one / "resume.pt", 0.5)
    before_it = sorted(path.name for path in run.iterdir())
    end = ending(tmp_path, lambda: main_of(program)(["--resume_from", str(run)]))
    held = is_one_line(*end, "no good checkpoint", "start a new run", exit_status=2)
    held = held and sorted(path.name for path in run.iterdir()) == before_it
    case(f"{program}: all damaged", held, str(end[2] or end[1][-300:]))


def test_two_newest_checkpoints_are_damaged(runs, case, tmp_path):
    for program in TRAINED:
        run = tmp_path / program
        shutil.copytree(runs.whole[program], run, symlinks=True)
        flip(run / "checkpoint-000006" / "resume.pt", 0.5)
        (run / "checkpoint-000004" / "manifest.json").unlink()
        status, text, _ = ending(
            tmp_path, lambda program=program, run=run: main_of(program)(["--resume_from", str(run)])
        )
        held = status == 0 and text.count("is damaged (") == 2
        held = held and weights(last_checkpoint(run)) == weights(last_checkpoint(runs.whole[program]))
        case(f"{program}: the two newest", held, text[-200:] * (not held))
