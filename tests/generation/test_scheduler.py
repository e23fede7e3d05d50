"""Continuous batching: rows of many requests sample what each would alone, in any order, with any room."""

import random
import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import tiny_model
from helpers.processes import PATIENCE

from lightrlhf.cli.errors import NotFinite, UsageError
from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.generation import open_batch, row_memory
from lightrlhf.generation import scheduler as scheduling
from lightrlhf.generation.engine import generate, generate_turns
from lightrlhf.generation.scheduler import Scheduler
from lightrlhf.generation.tickets import Ask, Failed, Job
from lightrlhf.models.roles import Policy

ENDS = [2]
SETTINGS = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}]
SETTINGS += [{"repetition_penalty": 1.3}, {"do_sample": False}, {"eos_ids": [7, 8]}]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def policy(request) -> Policy:
    """A model with packed weights, and one without."""
    return Policy(tiny_model(request.param)).eval()


class Client:
    """Collects what a request gets; `order` has the numbers of clients, of all in the order of their tokens."""

    def __init__(self, number: int = 0, order: list[int] | None = None) -> None:
        self.number, self.order = number, order
        self.rows: dict[int, list] = {}
        self.problem: BaseException | None = None

    def emit(self, part) -> None:
        if isinstance(part, Failed):
            self.problem = part.problem
            return
        for token in part:
            self.rows.setdefault(token.index, []).append(token)
            if self.order is not None:
                self.order.append(self.number)

    def ids(self, index: int = 0) -> list[int]:
        return [token.token for token in self.rows[index]]


def asks(prompt: list[int], noise: torch.Tensor, allowed=None, **flags) -> list[Ask]:
    args = DecodingArgs(max_new_tokens=noise.shape[1], **flags)
    return [Ask(prompt, args, ENDS, row, allowed) for row in noise]


@contextmanager
def turns_by_hand(scheduler: Scheduler):
    """The scheduler without its thread."""
    scheduler.thread = threading.current_thread()
    yield scheduler


def submit(scheduler: Scheduler, policy: Policy, rows: list[Ask], client: Client | None = None):
    client = client or Client()
    return scheduler.submit(lambda: policy, "w", rows, client.emit), client


def finish(scheduler: Scheduler, most: int = 3000) -> int:
    """Take turns until nothing is left; returns how many."""
    count = 0
    while scheduler.line or scheduler.memory.tickets or scheduler.jobs:
        scheduler.turn()
        count += 1
        assert count < most
    return count


@pytest.mark.parametrize("num_slots, cache", [(64, 2**22), (3, 2**22), (8, 150 * 2**10)], ids=["all", "few", "memory"])
def test_every_row_is_what_it_would_be_alone(policy, num_slots, cache):
    choose = random.Random(num_slots)
    common = [choose.randrange(3, 40) for _ in range(70)]
    requests = []
    for number in range(16):
        prompt = common[: choose.choice([0, 40, 70])] + [
            choose.randrange(3, 40) for _ in range(choose.choice([1, 5, 30]))
        ]
        noise = torch.rand(choose.choice([1, 1, 2, 4]), choose.choice([3, 20, 60]))
        requests.append((prompt, noise, choose.choice([None, None, [5, 6, 7, 9]]), SETTINGS[number % len(SETTINGS)]))
    with turns_by_hand(Scheduler(None, num_slots, cache)) as scheduler:
        clients = []
        for prompt, noise, allowed, flags in requests:
            clients.append(submit(scheduler, policy, asks(prompt, noise, allowed, **flags))[1])
            scheduler.turn()
        finish(scheduler)
    for client, (prompt, noise, allowed, flags) in zip(clients, requests):
        args = DecodingArgs(max_new_tokens=noise.shape[1], **flags)
        alone = generate(policy, [prompt] * len(noise), args, ENDS, noise, allowed=allowed)
        assert [client.ids(index) for index in range(len(noise))] == alone.responses
        assert [client.rows[index][-1].finish == "length" for index in range(len(noise))] == alone.truncated
        for index, logprobs in enumerate(alone.logprobs):
            assert [token.logprob for token in client.rows[index]] == pytest.approx(logprobs, abs=1e-4)
    blocks = scheduler.memory.pages.blocks
    assert blocks.room() == blocks.count and not any(blocks.users) and not scheduler.memory.running


def test_a_prompt_is_read_once_for_all_its_rows_and_a_prefix_once_for_all_requests(policy):
    prompt = [5 + number % 30 for number in range(75)]
    with turns_by_hand(Scheduler(None, 16, 2**22)) as scheduler:
        counts = scheduler.memory.counts
        ticket, _ = submit(scheduler, policy, asks(prompt, torch.rand(8, 4)))
        again, _ = submit(scheduler, policy, asks([*prompt[:70], 3, 4, 5], torch.rand(1, 4)))  # while the other reads
        finish(scheduler)
        assert ticket.cached == 0 and again.cached == 64  # whole blocks of 32
        assert counts.prefilled == 75 + 73 - 64 and counts.prompt == 8 * 75 + 73
        assert counts.cached == 7 * 75 + 64
        third, client = submit(scheduler, policy, asks(prompt, torch.rand(1, 40)))
        finish(scheduler)
        grown = prompt + client.ids()
        if len(grown) > 97:  # what was sampled is known, too
            fourth, _ = submit(scheduler, policy, asks([*grown, 3], torch.rand(1, 2)))
            finish(scheduler)
            assert fourth.cached == 96
        assert third.cached == 64


def test_weights_that_change_share_no_prefix(policy):
    prompt = [5 + number % 30 for number in range(75)]
    with turns_by_hand(Scheduler(None, 16, 2**22)) as scheduler:
        submit(scheduler, policy, asks(prompt, torch.rand(1, 2)))
        order = []

        def change():
            order.append(len(scheduler.memory.tickets))
            scheduler.memory.forget_weights()
            yield from ()

        job = scheduler.run(Job(change(), alone=True))
        later, client = submit(scheduler, policy, asks(prompt, torch.rand(1, 2)))
        finish(scheduler)
        assert order == [0] and job.future.done() and later.cached == 0 and client.rows


def test_a_long_request_starves_nobody(policy, monkeypatch):
    monkeypatch.setattr(scheduling, "QUANTUM", 10)
    with turns_by_hand(Scheduler(None, 2, 2**22)) as scheduler:
        long = [submit(scheduler, policy, asks([5, 6], torch.rand(4, 100), allowed=[5, 6, 7])) for _ in range(2)]
        for _ in range(20):
            scheduler.turn()
        ticket, client = submit(scheduler, policy, asks([8, 9], torch.rand(1, 3), allowed=[5, 6, 7]))
        for _ in range(15):
            scheduler.turn()
        assert len(client.rows[0]) == 3 and ticket not in scheduler.memory.tickets
        finish(scheduler)
        assert all(len(one.rows) == 4 and len(one.rows[3]) == 100 for _, one in long)


def test_a_long_prompt_is_read_beside_the_steps_of_others(policy, monkeypatch):
    monkeypatch.setattr(open_batch, "PREFILL_TOKENS", 8)
    order: list[int] = []
    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        submit(scheduler, policy, asks([5], torch.rand(1, 30), allowed=[5, 6]), Client(0, order))
        scheduler.turn()
        submit(
            scheduler, policy, asks([5 + n % 30 for n in range(80)], torch.rand(1, 2), allowed=[5, 6]), Client(1, order)
        )
        finish(scheduler)
    assert order.index(1) >= 10 and order.count(0) == 30


def test_a_cancelled_request_frees_its_rows_before_the_next_turn(policy):
    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        ticket, client = submit(scheduler, policy, asks([5, 6], torch.rand(9, 100), allowed=[5, 6, 7]))
        other, kept = submit(scheduler, policy, asks([5, 6], torch.rand(1, 20), allowed=[5, 6, 7]))
        for _ in range(5):
            scheduler.turn()
        ticket.cancel()
        before = sum(map(len, client.rows.values()))
        scheduler.turn()
        assert {row.ticket for row in scheduler.memory.running} == {other}
        finish(scheduler)
        assert sum(map(len, client.rows.values())) == before and len(kept.rows[0]) == 20
        assert scheduler.memory.pages.blocks.room() == scheduler.memory.pages.blocks.count


def test_a_request_that_never_fits_is_refused_and_others_go_on(policy):
    with turns_by_hand(Scheduler(None, 4, 60 * 2**10)) as scheduler:
        _, client = submit(scheduler, policy, asks([5] * 200, torch.rand(1, 50)))
        _, other = submit(scheduler, policy, asks([5], torch.rand(1, 5)))
        finish(scheduler)
    assert isinstance(client.problem, UsageError) and "--kv_cache_gb" in str(client.problem)
    assert other.rows


def test_a_row_whose_own_blocks_make_room_starts_anew(policy):
    prompt, noise = [5 + number % 30 for number in range(35)], torch.rand(1, 60)
    with turns_by_hand(Scheduler(None, 1, 2**22)) as scheduler:
        _, client = submit(scheduler, policy, asks(prompt, noise, allowed=[5, 6, 7]))
        scheduler.turn()
        memory, blocks = scheduler.memory, scheduler.memory.pages.blocks
        (row,), taken = memory.running, blocks.take(blocks.room())
        while len(row.ids) < 64:  # two blocks, which leave no place for the next token
            scheduler.turn()
        memory.suspend(row)
        scheduler.turn()
        blocks.release(taken)
        finish(scheduler)
    alone = generate(policy, [prompt], DecodingArgs(max_new_tokens=60), ENDS, noise, allowed=[5, 6, 7])
    assert client.problem is None and client.ids() == alone.responses[0]


def test_a_failure_ends_its_requests_and_leaves_nothing_behind(policy, monkeypatch):
    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        prompt, noise = [5 + number % 30 for number in range(40)], torch.rand(2, 4)
        _, expected = submit(scheduler, policy, asks(prompt, noise))
        finish(scheduler)
        embedding = policy.model.get_input_embeddings().weight
        with torch.no_grad():
            before = embedding[9].clone()  # of a token in the middle of the prompt
            embedding[9] = float("nan")
        scheduler.memory.forget_weights()
        _, client = submit(scheduler, policy, asks(prompt, noise))
        finish(scheduler)
        with torch.no_grad():
            embedding[9] = before
        assert isinstance(client.problem, NotFinite) and "not finite" in str(client.problem)
        assert all(not layer.keys.isnan().any() for layer in scheduler.memory.pages.layers)
        scheduler.memory.forget_weights()
        _, again = submit(scheduler, policy, asks(prompt, noise))
        finish(scheduler)
        assert [again.ids(n) for n in (0, 1)] == [expected.ids(n) for n in (0, 1)]


def test_a_request_that_fails_while_it_reads_another_prompt_fails_no_other(policy, monkeypatch):
    def failing(model):
        runner = make_runner(model)
        step = runner.step

        def fail(pieces, *given):
            is_bad = torch.tensor([[piece.ids == [9]] for piece in pieces])
            return step(pieces, *given).masked_fill(is_bad, torch.nan)

        runner.step = fail
        return runner

    make_runner = row_memory.make_runner
    monkeypatch.setattr(row_memory, "make_runner", failing)
    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        _, other = submit(scheduler, policy, asks([5], torch.rand(1, 20), allowed=[5, 6]))
        rows = [*asks([7], torch.rand(1, 5), allowed=[9]), *asks([5] * 200, torch.rand(1, 5))]
        ticket, client = submit(scheduler, policy, rows)
        finish(scheduler)
        scheduler.batch.fail(ticket, MemoryError())  # of the same turn, later
    assert isinstance(client.problem, NotFinite) and other.problem is None and len(other.ids()) == 20


def test_a_job_by_turns_is_bitwise_the_call_whatever_runs_beside_it(policy):
    prompts, noise = [[5, 6, 7], [8], [5, 6, 7], [9, 10]], torch.rand(4, 40)
    args = DecodingArgs(max_new_tokens=40)
    whole = generate(policy, prompts, args, ENDS, noise, 2)
    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        submit(scheduler, policy, asks([5, 6], torch.rand(3, 60)))
        given = policy, prompts, args, ENDS, noise, 2, None
        jobs = [scheduler.run(Job(generate_turns(*given), num_bytes=count)) for count in (10, 2**40, 10)]
        finish(scheduler)
    assert all(job.future.result() == whole for job in jobs)


def test_a_cancelled_job_ends_before_its_next_turn(policy):
    taken = []

    def turns():
        for number in range(10):
            taken.append(number)
            yield

    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        job = scheduler.run(Job(turns()))
        for _ in range(3):
            scheduler.turn()
        job.cancel()
        finish(scheduler)
    assert taken == [0, 1, 2] and job.future.cancelled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_whose_future_is_cancelled_in_its_last_turn_fails_nothing_else(policy, fails):
    def turns():
        yield
        job.future.cancel()  # as a client does that goes away meanwhile
        if fails:
            raise UsageError("no result")

    with turns_by_hand(Scheduler(None, 4, 2**22)) as scheduler:
        _, client = submit(scheduler, policy, asks([5, 6], torch.rand(1, 5), allowed=[5, 6]))
        job = scheduler.run(Job(turns()))
        finish(scheduler)
    assert job.future.cancelled() and len(client.ids()) == 5 and client.problem is None


def test_requests_from_many_threads_are_answered(policy):
    scheduler, done = Scheduler(None, 8, 2**22), threading.Semaphore(0)
    clients = [Client(number) for number in range(24)]

    def ask(client: Client) -> None:
        def emit(part) -> None:
            client.emit(part)
            if isinstance(part, Failed) or part[-1].finish:
                done.release()

        scheduler.submit(lambda: policy, "w", asks([5, 6, client.number], torch.rand(1, 10)), emit)

    threads = [threading.Thread(target=ask, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    for _ in clients:
        assert done.acquire(timeout=PATIENCE)
    assert not any(client.problem for client in clients) and all(client.rows[0][-1].finish for client in clients)
    scheduler.close()
    scheduler.thread.join(PATIENCE)
    assert not scheduler.thread.is_alive()


def test_tokens_of_a_turn_are_shared_by_length():
    assert open_batch.share_tokens([100, 5, 100], 44) == [39, 5, 0]
    assert open_batch.share_tokens([100, 50, 5], 44) == [22, 17, 5]
    assert open_batch.share_tokens([300], 128) == [128] and open_batch.share_tokens([2, 1], 8) == [2, 1]
    assert sum(open_batch.share_tokens([9] * 7, 4)) == 4
