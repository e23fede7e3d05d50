"""Steps of an open batch in buckets are the model's own, and can be captured as far as a CPU can tell."""

import pytest
import torch
from helpers import rows_of, tiny_model
from helpers.captures import NoCopies, NoReads, Tape

from lightrlhf import cpu
from lightrlhf.cpu import Piece
from lightrlhf.generation import graphs
from lightrlhf.generation.engine import no_gradients
from lightrlhf.generation.paged import PLAIN_BLOCK, BucketedRunner, ModelRunner, Pages, make_runner

BUCKETED = ["llama", "gpt2", "opt", "gpt_neox", "qwen2", "mistral", "gemma2", "phi", "falcon", "bloom"]


def taped(step, pool):
    """Capture on the CPU."""
    with Tape() as tape:
        step()
    return tape


@pytest.fixture
def captured(monkeypatch):
    """Captures on the CPU, with small buckets."""
    monkeypatch.setattr(graphs, "capture", taped)
    monkeypatch.setattr(graphs, "LEAST_COLUMNS", PLAIN_BLOCK)
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    start = BucketedRunner.__init__

    def as_on_cuda(own, model):
        start(own, model)
        own.captures = True

    monkeypatch.setattr(BucketedRunner, "__init__", as_on_cuda)


def decoded(runner, steps: int = 30, lengths=(5, 37, 12, 3, 61, 20, 9)) -> list[tuple[list[int], torch.Tensor]]:
    """Texts and logits after each, of rows that begin one after the other and end after nine tokens."""
    with no_gradients(runner.model):
        pages = Pages(runner, 2**22, 4096)
        prompts, running, found = rows_of(*lengths), [], []
        for turn in range(steps):
            if turn % 2 == 0 and prompts:
                ids = [*prompts.pop(0)]
                blocks = pages.blocks.take(pages.blocks.needed(len(ids) + 9))
                logits = runner.prefill([Piece(ids, 0, blocks)], pages.layers)
                running.append((ids, blocks, len(ids) + 9))
                found.append(([*ids], logits[0].clone()))
                ids.append(int(logits[0].argmax()))
            if running:
                pieces = [Piece(ids[-1:], len(ids) - 1, blocks) for ids, blocks, _ in running]
                for (ids, _, _), logits in zip(running, runner.step(pieces, pages.layers, [])):
                    found.append(([*ids], logits.clone()))
                    ids.append(int(logits.argmax()))
            for row in [row for row in running if len(row[0]) == row[2]]:
                running.remove(row)
                pages.blocks.release(row[1])
    assert not prompts and not running
    return found


@pytest.mark.parametrize("architecture", BUCKETED)
def test_steps_in_buckets_are_the_models_own(architecture, captured):
    model = tiny_model(architecture)
    runner = BucketedRunner(model)
    found = decoded(runner)
    assert len(runner.graphs) > 3 and sum(runner.steps.values()) > 2 * len(runner.steps)
    with torch.no_grad():
        for ids, logits in found:
            torch.testing.assert_close(logits, model(input_ids=torch.tensor([ids])).logits[0, -1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", BUCKETED)
def test_no_step_reads_anything_on_the_host(architecture, monkeypatch):
    run = BucketedRunner.run

    def watched(own, shape, compute):
        with NoReads(), NoCopies():
            run(own, shape, compute)

    monkeypatch.setattr(BucketedRunner, "run", watched)
    assert decoded(BucketedRunner(tiny_model(architecture)))


def test_rows_that_fill_a_bucket_cost_no_block(captured):
    model = tiny_model("gpt2")
    with no_gradients(model):
        plain, filled = (Pages(kind(model), 10**6, 2**20) for kind in (ModelRunner, BucketedRunner))
    assert plain.blocks.count == filled.blocks.count == len(filled.layers[0].keys) - 1


def test_a_graph_casts_the_weights_of_its_own_turn(captured):
    """Under autocast no cast outlives its turn, nor does one of a pass before the captured step."""
    model = tiny_model("gpt2")
    runner, plain = BucketedRunner(model), ModelRunner(model)
    piece = [Piece([7], 0, [0])]
    with torch.no_grad():
        layers, others = (one.make_layers(1, one.zeros) for one in (runner, plain))
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16), no_gradients(model):
            expected = plain.step(piece, others, []).float()
            found = runner.step(piece, layers, []).float()
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
    assert runner.graphs


def test_a_replay_that_gives_other_logits_is_not_used(captured, monkeypatch, capsys):
    class Wrong(Tape):
        def replay(self):
            super().replay()
            logits = runner.logits[1, PLAIN_BLOCK]
            logits.add_(torch.arange(logits.shape[1]))

    def wrong(step, pool):
        tape = taped(step, pool)
        tape.__class__ = Wrong
        return tape

    monkeypatch.setattr(graphs, "capture", wrong)
    model = tiny_model("gpt2")
    runner = BucketedRunner(model)
    found = decoded(runner, lengths=(5,))
    assert not runner.graphs and not graphs.can_capture(model)
    assert "not captured" in capsys.readouterr().err
    for (ids, logits), (others, expected) in zip(found, decoded(ModelRunner(model), lengths=(5,)), strict=True):
        assert ids == others
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_models_have_buckets_where_their_steps_can_be_captured(captured, monkeypatch):
    kinds = [type(make_runner(tiny_model(name))).__name__ for name in ("llama", "gpt2", "gpt_neo")]
    assert kinds == ["PackedRunner", "BucketedRunner", "ModelRunner"]
    monkeypatch.setattr(cpu, "pack_decoder", lambda *given: None)  # as on CUDA
    assert type(make_runner(tiny_model("llama"))) is BucketedRunner
