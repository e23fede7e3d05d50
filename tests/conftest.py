"""One tiny café, and one tiny experiment of each stage, made once for all tests."""

import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from helpers import CAFE_SIZES, CPU, ROOT, environment, forks, processes, reseal, save_model
from helpers.attacks import case, pytest_terminal_summary  # noqa: F401  (given to all tests)
from helpers.servers import Scripted, answering
from hypothesis import settings

from lightrlhf.cli.patience import DEFAULTS

os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]  # ranks and servers import tests/helpers, too

torch.set_num_threads(1)
processes.open_session()
forks.open_session(environment())
EXAMPLES = int(os.environ.get("LIGHTRLHF_EXAMPLES", 100))  # that hypothesis draws for a test
QUICK = ("llama", "gpt2", "gemma2")  # architectures whose tests are not slow: rotary, learned and sliding positions
settings.register_profile("patient", max_examples=EXAMPLES, deadline=None)  # no example fails for being slow
settings.load_profile("patient")


def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker(pytest.mark.browser)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "browser" in item.fixturenames or parameters.get("architecture", "llama") not in QUICK:
            item.add_marker(pytest.mark.slow)
        if "case" in item.fixturenames:
            item.add_marker(pytest.mark.attack)
    thorough = {item.path for item in items if item.get_closest_marker("thorough")}
    in_browser = {item.path for item in items if item.get_closest_marker("browser")}
    sizes = Counter(item.path for item in items)
    # the longest files begin first; those with a browser are last, for its event loop runs in its process until the end
    items.sort(key=lambda item: (item.path in in_browser, item.path not in thorough, -sizes[item.path]))


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _usual_patience(monkeypatch):
    """Restore how long programs wait for others, which `helpers.servers.wait_at_most` changes."""
    for name in DEFAULTS:
        monkeypatch.setenv(name, "")


@pytest.fixture(autouse=True)
def _ports_of_their_own():
    """Remove the port that Fabric leaves in the environment; another program may have taken it since."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    before = processes.running()
    yield
    left = processes.left_by_a_test(before)
    if left:  # an error that the test caught may still hold the object that ends them
        gc.collect()
        left = processes.left_by_a_test(before)
    processes.end(list(left))
    assert not left, f"still running, killed now: {[*left.values()]}"


@pytest.fixture
def light_functions(monkeypatch):
    """Let `helpers.answers` and `helpers.rewards` be imported by their own names, too, which imports no torch.

    Each process that calls a reward function imports the packages that its path names.
    """
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tests" / "helpers")])


@pytest.fixture(scope="session")
def cafe_data(tmp_path_factory):
    """The café's splits with a few dozen rows each."""
    from datasets_prep.cafe.prepare_data import main

    folder = tmp_path_factory.mktemp("data") / "cafe" / "tiny"
    main(["--destination_dir", str(folder), *CAFE_SIZES])
    return folder


@pytest.fixture(scope="session")
def tokenizer(cafe_data):
    from lightrlhf.models.tokenizer import load_tokenizer

    return load_tokenizer(cafe_data)


@pytest.fixture(scope="session")
def talk_data(tmp_path_factory, tokenizer):
    """The café's conversations with a few dozen rows, in the tokens of the other tests."""
    from datasets_prep.cafe_talk.prepare_data import main as prepare

    folder = tmp_path_factory.mktemp("talk")
    tokenizer.save_pretrained(folder / "tokenizer")
    reseal(folder)
    flags = ["--tokenizer_name", str(folder / "tokenizer"), "--num_dialogues", "40", "--num_held_out", "8"]
    prepare(["--destination_dir", str(folder / "data"), *flags, "--num_proc", "1"])
    return folder / "data"


@pytest.fixture(scope="session")
def base_model(tmp_path_factory, tokenizer):
    """A Hugging Face folder: a Llama of two layers of width 32 that knows the café's tokens."""
    return save_model("llama", tmp_path_factory.mktemp("models") / "llama", tokenizer)


@pytest.fixture(scope="session")
def noisy_model(tmp_path_factory, tokenizer):
    """A model with dropout, so that resuming must bring back the random numbers too."""
    dropout = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    return save_model("gpt2", tmp_path_factory.mktemp("models") / "gpt2", tokenizer, **dropout)


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def sft_dir(cafe_data, base_model, logs):
    """The experiment dir of two SFT steps."""
    from lightrlhf.sft import main

    flags = ["--max_steps", "2", "--log_interval", "1", "--lr_warmup_steps", "0", "--learning_rate", "1e-3"]
    return main(["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(logs), *CPU, *flags])


@pytest.fixture(scope="session")
def rm_dir(cafe_data, sft_dir, logs):
    """The experiment dir of two reward-model steps."""
    from lightrlhf.rm import main

    flags = ["--max_steps", "2", "--log_interval", "1", "--lr_warmup_steps", "0", "--learning_rate", "1e-3"]
    return main(["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(logs), *CPU, *flags])


@pytest.fixture(scope="session")
def unpaired_data(tmp_path_factory, cafe_data):
    """The café's pairs taken apart, and no pairs."""
    from helpers.tiny_runs import take_pairs_apart

    return take_pairs_apart(cafe_data, tmp_path_factory.mktemp("unpaired") / "cafe")


@pytest.fixture(scope="session")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    """What runs of every training program need, and their flags."""
    from helpers.tiny_runs import TinyRuns

    return TinyRuns(tmp_path_factory.mktemp("runs"), cafe_data, talk_data, tokenizer)


@pytest.fixture(scope="session")
def transformers_serve(tmp_path_factory, tokenizer):
    """`transformers serve` with a tiny model on localhost: its address and the model's name there."""
    pytest.importorskip("uvicorn", reason="needs pip install 'transformers[serving]'")
    pytest.importorskip("fastapi", reason="needs pip install 'transformers[serving]'")
    folder = save_model("llama", tmp_path_factory.mktemp("served") / "tiny", tokenizer)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["serve", folder, "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with forks.started_program("transformers.cli.transformers", *flags, cwd=ROOT, env=environment(), **quiet):
        yield f"http://127.0.0.1:{port}/v1", str(folder)


@pytest.fixture
def serve():
    """A function that starts a server with a script."""
    with contextlib.ExitStack() as started:

        def start(script=None, **options) -> Scripted:
            server = Scripted(script or {}, **options)
            started.enter_context(answering(server))
            return server

        yield start
