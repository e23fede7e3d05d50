"""Quantities against formulas written from the papers with plain floats, in float64: one line a check.

Tolerance: 1e-9 relative to the larger of 1 and the value; gradients, against central differences of the formula, 1e-6.
Other tolerances stand at their checks.
"""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from helpers.rollouts import advantages_of

from lightrlhf import judge, ppo, refuel, rm
from lightrlhf.demo.votes import tally
from lightrlhf.evaluation.answers import perplexity
from lightrlhf.generation.rollout_metrics import response_kl, rollout_metrics
from lightrlhf.maths import head as heads
from lightrlhf.maths import macro_actions as macro
from lightrlhf.maths import ops
from lightrlhf.rewards.kl import AdaptiveKL, bounded_scores, token_rewards
from lightrlhf.rewards.scorers import read_together
from lightrlhf.training.ranks import LocalRanks

SEEDS = range(5)


def near(found, expected, tolerance: float = 1e-9) -> bool:
    """Whether two numbers, or lists of them, agree."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(near(a, b, tolerance) for a, b in zip(found, expected))
    return abs(float(found) - expected) <= tolerance * max(1.0, abs(expected))


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_s(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


# ------------------------------------------------------------------------------------------------ advantages and PPO
def draw(seed: int, rows: int = 3, width: int = 9) -> tuple[torch.Tensor, ...]:
    """Rewards, values and a mask with gaps; the last row has no action."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(rows, width, generator=g) < 0.6
    mask[0, 0] = mask[1, -1] = True
    mask[-1] = False
    return rewards, values, mask


def gae_of(r: list[float], v: list[float], discounts: list[float], lambd: float) -> list[float]:
    """Schulman et al. 2016, eq. 16, the sum written out."""
    delta = [r[i] + discounts[i] * (v[i + 1] if i + 1 < len(v) else 0.0) - v[i] for i in range(len(r))]
    return [
        sum(delta[j] * lambd ** (j - i) * math.prod(discounts[i:j]) for j in range(i, len(r))) for i in range(len(r))
    ]


@pytest.mark.parametrize("gamma, lambd", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.7)])
def test_generalised_advantages(gamma, lambd, case):
    for seed in SEEDS:
        rewards, values, mask = draw(seed)
        advantages, returns = ops.gae(rewards, values, mask, gamma, lambd)
        held = True
        for row in range(3):
            r, v = rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist()
            expected = gae_of(r, v, [gamma] * len(r), lambd)
            held &= near(advantages[row][mask[row]].tolist(), expected)
            held &= near(returns[row][mask[row]].tolist(), [a + b for a, b in zip(expected, v)])
        held &= bool((advantages[~mask] == 0).all() and (returns[~mask] == 0).all())
        case(f"GAE gamma {gamma} lambda {lambd}, seed {seed}", held)


def test_advantages_with_a_discount_for_each_step_and_of_episodes(case):
    for seed in SEEDS:
        rewards, values, mask = draw(seed)
        discounts = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        advantages, _ = ops.gae(rewards, values, mask, discounts, 0.9)
        rows = [(x[0][mask[0]].tolist()) for x in (rewards, values, discounts)]
        case(f"GAE discounts by step, seed {seed}", near(advantages[0][mask[0]].tolist(), gae_of(*rows, 0.9)))
        lengths = [3, 1, 4]
        episode = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
        r, v = rewards.flatten()[:8].float(), values.flatten()[:8].float()
        found, _ = ops.episode_gae(r, v, episode, 0.9, 0.8)
        expected, start = [], 0
        for n in lengths:
            own = slice(start, start + n)
            expected += gae_of(r[own].tolist(), v[own].tolist(), [0.9] * n, 0.8)
            start += n
        case(f"GAE of episodes, float32 to 1e-5, seed {seed}", near(found.tolist(), expected, 1e-5))


def test_the_surrogate_and_the_value_loss(case):
    for seed, clip in itertools.product(SEEDS, (0.1, 0.2)):
        rng = random.Random(f"{seed} {clip}")
        rows = [(rng.uniform(-3, 0), rng.uniform(-3, 0), rng.uniform(-2, 2)) for _ in range(7)]

        def term(new, old, advantage, clip=clip):
            ratio = math.exp(new - old)
            return min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)

        new = f64([row[0] for row in rows]).requires_grad_()
        old, advantages = (f64([row[i] for row in rows]) for i in (1, 2))
        mask = torch.tensor([True] * 5 + [False] * 2)
        loss = ops.policy_loss(new, old, advantages, mask, clip, f64([0.5] * 7), 0.01)
        expected = -sum(term(*row) + 0.01 * 0.5 for row in rows[:5])
        case(f"policy loss with entropy, clip {clip}, seed {seed}", near(loss.item(), expected))
        (slope,) = torch.autograd.grad(loss, new)
        steps = [-(term(n + 1e-6, o, a) - term(n - 1e-6, o, a)) / 2e-6 for n, o, a in rows[:5]] + [0.0, 0.0]
        case(f"policy gradient, clip {clip}, seed {seed}", near(slope.tolist(), steps, 1e-6))
        values = f64([row[0] for row in rows]).requires_grad_()
        batch = SimpleNamespace(values=old, returns=advantages, action_mask=mask)
        found = ppo.value_loss(values, batch, clip)

        def error(v, old, target, clip=clip):
            near_old = old + min(max(v - old, -clip), clip)
            return 0.5 * max((v - target) ** 2, (near_old - target) ** 2)

        case(f"value loss, clip {clip}, seed {seed}", near(found.item(), sum(error(*row) for row in rows[:5])))
        (slope,) = torch.autograd.grad(found, values)
        steps = [(error(v + 1e-6, o, t) - error(v - 1e-6, o, t)) / 2e-6 for v, o, t in rows[:5]] + [0.0, 0.0]
        case(f"value gradient, clip {clip}, seed {seed}", near(slope.tolist(), steps, 1e-6))


def test_kl_estimators(case):
    """Their expectations under pi: k1 and k3 give the KL, k2 half the mean squared log-ratio; and k2's gradient."""
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        p, q = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
        kl = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist()))
        square = sum(math.exp(a) * (a - b) ** 2 / 2 for a, b in zip(p.tolist(), q.tolist()))
        mean = {name: float((p.exp() * f(p, q)).sum()) for name, f in ops.KL_ESTIMATORS.items()}
        case(f"k1 is unbiased, seed {seed}", near(mean["k1"], kl))
        case(f"k3 is unbiased, seed {seed}", near(mean["k3"], kl))
        case(f"k2 is half the squared log-ratio, seed {seed}", near(mean["k2"], square))
        case(f"k3 is never negative, seed {seed}", bool((ops.kl_k3(p, q) >= 0).all()))
        logits = p.clone().requires_grad_()
        logp = logits.log_softmax(0)
        (true,) = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits)
        logp = logits.log_softmax(0)
        (k2,) = torch.autograd.grad((logp.detach().exp() * ops.kl_k2(logp, q)).sum(), logits)
        case(f"k2 has the KL's gradient, seed {seed}", near(k2.tolist(), true.tolist()))


def rollout_of(g: torch.Generator, rows: int = 4, width: int = 8) -> ppo.Rollout:
    lengths = torch.randint(3, width + 1, (rows,), generator=g)
    steps = torch.arange(width)
    mask = (steps[1:] >= 2) & (steps[1:] < lengths[:, None])  # prompts of two tokens
    logprobs, ref = (-torch.rand(2, rows, width - 1, generator=g, dtype=torch.float64) * 3 * mask).unbind()
    return ppo.Rollout(
        input_ids=torch.zeros(rows, width, dtype=torch.int64),
        attention_mask=steps < lengths[:, None],
        action_mask=mask,
        prompt_len=torch.full((rows,), 2),
        truncated=torch.rand(rows, generator=g) < 0.5,
        logprobs=logprobs,
        ref_logprobs=ref,
    )


class TwoRanks(LocalRanks):
    """The other rank's sums are given."""

    def __init__(self, other: list[torch.Tensor]) -> None:
        super().__init__()
        self.world_size, self.other = 2, iter(other)

    def sum(self, tensor):
        return tensor + next(self.other)

    def total(self, value):
        return 2.0 * value


def test_token_rewards(case):
    for seed, name in itertools.product(SEEDS, ("k1", "k2", "k3")):
        rollout = rollout_of(torch.Generator().manual_seed(seed))
        scores = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = token_rewards(rollout, scores, 0.3, name)
        held = True
        for row in range(4):
            places = rollout.action_mask[row].nonzero()[:, 0].tolist()
            for t in range(7):
                r = float(rollout.logprobs[row, t] - rollout.ref_logprobs[row, t])
                kl = {"k1": r, "k2": r * r / 2, "k3": math.exp(-r) - 1 + r}[name]
                expected = (-0.3 * kl + (float(scores[row]) if t == places[-1] else 0)) if t in places else 0.0
                held &= near(found[row, t], expected)
        case(f"token rewards {name}, seed {seed}", held)


def test_means_of_a_rollout_with_unscored_responses(case):
    """Every subset of four responses without a score: score over the scored, KL over all, over one rank and two."""
    for missing in itertools.product([False, True], repeat=4):
        rollout = rollout_of(torch.Generator().manual_seed(7))
        given = f64([1.0, -2.0, 0.5, 3.0])
        scores = torch.where(torch.tensor(missing), math.nan, given)
        rewards = token_rewards(rollout.masked(~scores.isnan()), scores, 0.1)
        found = rollout_metrics(SimpleNamespace(ranks=LocalRanks(), args=None), rollout, scores, rewards)
        kl = response_kl(rollout).tolist()
        kept = [i for i in range(4) if not missing[i]]
        held = near(found["objective/kl"], sum(kl) / 4, 1e-6) and found["objective/valid_ratio"] == len(kept) / 4
        held &= near(found["completions/mean_length"], float(rollout.lengths().mean()), 1e-6)
        if kept:
            held &= near(found["objective/score"], sum(float(given[i]) for i in kept) / len(kept), 1e-6)
            expected = sum(float(given[i]) - 0.1 * kl[i] for i in kept) / len(kept)
            held &= near(found["objective/reward"], expected, 1e-6)
        else:
            held &= math.isnan(found["objective/score"]) and math.isnan(found["objective/reward"])
        case(f"means without {[i for i in range(4) if missing[i]]}", held, str(found["objective/score"]))
        # a second rank whose four responses are all scored 1 with KL 2
        other = [torch.tensor([8.0, 4.0, 4.0, 0.0, 4.0, 4.0]), torch.tensor([4.0, 4.0, 4.0])]
        both = rollout_metrics(SimpleNamespace(ranks=TwoRanks(other), args=None), rollout, scores, rewards)
        score = (sum(float(given[i]) for i in kept) + 4) / (len(kept) + 4)
        held = near(both["objective/score"], score, 1e-6) and near(both["objective/kl"], (sum(kl) + 8) / 8, 1e-6)
        case(f"the same over two ranks, without {[i for i in range(4) if missing[i]]}", held)


def test_scores_are_bounded(case):
    for limit, penalty in itertools.product((None, 2.0), (0.0, 1.0)):
        found = bounded_scores(f64([9, -9, 0.5, math.nan]), torch.tensor([1, 0, 1, 1]).bool(), limit, penalty).tolist()
        expected = [min(max(x, -(limit or 99)), limit or 99) - penalty * cut for x, cut in ((9, 1), (-9, 0), (0.5, 1))]
        case(f"bounded scores, limit {limit}, penalty {penalty}", near(found[:3], expected) and math.isnan(found[3]))


def test_the_adaptive_weight(case):
    """Ziegler et al. 2019, section 2.2: e = clip(KL / target - 1, -0.2, 0.2), beta *= 1 + e B / 10000."""
    for kl, target, count in itertools.product((-3.0, 0.0, 5.5, 6.5, 9.0), (6.0, 0.1), (128,)):
        found = AdaptiveKL(0.1, target)
        found.update(kl, count)
        expected = 0.1 * (1 + min(max(kl / target - 1, -0.2), 0.2) * count / 10_000)
        case(f"adaptive weight, KL {kl}, target {target}", near(found.value, expected))
    kl = AdaptiveKL(0.1, 6.0)
    for _ in range(50):
        kl.update(9.0, 128)
    case("50 rollouts of KL 9 raise .1 to .114", abs(kl.value - 0.1136) < 1e-4, f"{kl.value:.4f}")


def test_whitening_and_group_advantages(case):
    for seed, keep in itertools.product(SEEDS, (False, True)):
        values, _, mask = draw(seed)
        kept = values[mask].tolist()
        mean = sum(kept) / len(kept)
        std = (sum((x - mean) ** 2 for x in kept) / len(kept) + 1e-8) ** 0.5
        expected = [(x - mean) / std + (mean if keep else 0) for x in kept]
        found = ops.whiten(values, mask, keep_mean=keep)
        case(f"whitening, mean kept {keep}, seed {seed}", near(found[mask].tolist(), expected))
    for seed, size in itertools.product(SEEDS, (2, 4)):
        returns = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        expected = []
        for start in range(0, 8, size):
            group = returns[start : start + size].tolist()
            mean = sum(group) / size
            std = (sum((x - mean) ** 2 for x in group) / (size - 1)) ** 0.5
            expected += [(x - mean) / (std + 1e-6) for x in group]
        found = advantages_of(returns, size)
        case(f"advantages of groups of {size}, seed {seed}", near(found.tolist(), expected))


def test_log_probabilities_and_entropies(case):
    for seed, temperature, chunk in itertools.product(SEEDS, (1.0, 0.7), (2, 4096)):
        g = torch.Generator().manual_seed(seed)
        logits, targets = torch.randn(5, 7, generator=g), torch.randint(7, (5,), generator=g)
        found = heads.head_logprobs(logits, lambda h: h, targets, temperature, True, True, chunk)
        held = True
        for i, row in enumerate(logits.tolist()):
            total = math.log(sum(math.exp(x / temperature) for x in row))
            logp = [x / temperature - total for x in row]
            expected = [logp[int(targets[i])], -sum(math.exp(x) * x for x in logp), sum(logp) / 7]
            held &= near([float(part[i]) for part in found], expected, 1e-5)
        case(f"log-probability, entropy and mean, temperature {temperature}, chunk {chunk}, seed {seed}, to 1e-5", held)


# ----------------------------------------------------------------------------------------------------- macro actions
def tokens_of(segments: torch.Tensor, row: int) -> list[list[int]]:
    """Positions of each segment of a row."""
    numbers = segments[row].tolist()
    return [[t for t, n in enumerate(numbers) if n == m] for m in range(max(numbers, default=-1) + 1)]


WEIGHTS = {
    "equal": lambda i, n: 1 / n,
    "unit": lambda i, n: float(i == n - 1),
    "position": lambda i, n: 1 / (n - i),
    "position_first": lambda i, n: 1 / (i + 1),
    "first": lambda i, n: float(i == 0),
}


def test_macro_actions(case):
    for seed in SEEDS:
        rewards, values, mask = draw(seed, width=20)
        g = torch.Generator().manual_seed(seed)
        noise, ref = torch.rand(3, 12, generator=g), -torch.rand(3, 20, generator=g, dtype=torch.float64)
        for n in (0, 1, 3, 5):
            found = macro.fixed(mask, n)
            sizes = [[len(one) for one in tokens_of(found, row)] for row in range(3)]
            counts = mask.sum(1).tolist()
            expected = [[n] * (c // n) + [c % n] * (c % n > 0) if n else [c] * (c > 0) for c in counts]
            case(f"segments of {n} tokens, seed {seed}", sizes == expected, str(sizes[0]))
        found = macro.randomized(mask, noise)
        held = True
        for row in range(3):
            order = [([2, 3, 5, 10] * 3)[i] for i in noise[row].argsort().tolist()]
            left, expected = int(mask[row].sum()), []
            while left > 0:
                expected.append(min(left, order.pop(0)))
                left -= expected[-1]
            held &= [len(one) for one in tokens_of(found, row)] == expected
        case(f"segments of random lengths 2, 3, 5, 10, seed {seed}", held)
        found = macro.perplexity(mask, ref)
        held = True
        for row in range(3):
            places, number, before = mask[row].nonzero()[:, 0].tolist(), -1, math.inf
            for i, t in enumerate(places):
                ppl = math.exp(-float(ref[row, t]))
                number += i == 0 or ppl > before
                held &= int(found[row, t]) == number
                before = ppl
        case(f"segments where perplexity rises, seed {seed}", held)
        segments = macro.fixed(mask, 3)
        for name, weight in WEIGHTS.items():
            found, held = macro.VALUE_FUNCTIONS[name](values, segments), True
            for row in range(3):
                for m, places in enumerate(tokens_of(segments, row)):
                    shares = [weight(i, len(places)) for i in range(len(places))]
                    mean = sum(w * float(values[row, t]) for w, t in zip(shares, places)) / sum(shares)
                    held &= near(found[row, m], mean)
            case(f"value of a segment, {name}, seed {seed}", held)
        found = macro.discounted_sum(rewards, segments, 0.9)
        held = all(
            near(found[row, m], sum(0.9**i * float(rewards[row, t]) for i, t in enumerate(places)))
            for row in range(3)
            for m, places in enumerate(tokens_of(segments, row))
        )
        case(f"reward of a segment, seed {seed}", held)
        by_segment = ops.gae(found, macro.value_equal(values, segments), macro.segment_mask(segments), 0.9, 0.8)[0]
        parts = tokens_of(segments, 0)
        r = [sum(0.9**i * float(rewards[0, t]) for i, t in enumerate(one)) for one in parts]
        v = [sum(float(values[0, t]) for t in one) / len(one) for one in parts]
        case(
            f"advantage of a segment, seed {seed}",
            near(by_segment[0, : len(r)].tolist(), gae_of(r, v, [0.9] * len(r), 0.8)),
        )


# ----------------------------------------------------------------------------------------- REFUEL, REBEL, reward models
def test_refuel_and_multi_turn_dpo(case):
    for seed in SEEDS:
        rng = random.Random(seed)
        rows = [[rng.uniform(-5, 0) for _ in range(4)] + [rng.uniform(-1, 1) for _ in range(2)] for _ in range(3)]
        logps = f64([row[0] for row in rows] + [row[1] for row in rows]).requires_grad_()
        old = f64([row[2] for row in rows] + [row[3] for row in rows])
        rewards = f64([row[4] for row in rows] + [row[5] for row in rows])

        def regression(x, y, row, eta=0.7):
            return ((x - row[2]) - (y - row[3]) - eta * (row[4] - row[5])) ** 2

        def dpo(x, y, row, beta=0.2):
            sign = 1 if row[4] > row[5] else -1
            return -log_s(sign * beta * ((x - row[2]) - (y - row[3])))

        for name, found, hand in (
            ("REFUEL", refuel.refuel_loss(logps, old, rewards, 0.7), regression),
            ("multi-turn DPO", refuel.pairwise_loss(logps, old, rewards, 0.2), dpo),
        ):
            case(f"{name} value, seed {seed}", near(found.tolist(), [hand(row[0], row[1], row) for row in rows]))
            (slope,) = torch.autograd.grad(found.sum(), logps)
            d = 1e-6
            steps = [(hand(r[0] + d, r[1], r) - hand(r[0] - d, r[1], r)) / (2 * d) for r in rows]
            steps += [(hand(r[0], r[1] + d, r) - hand(r[0], r[1] - d, r)) / (2 * d) for r in rows]
            case(f"{name} gradient, seed {seed}", near(slope.tolist(), steps, 1e-6))


def test_losses_of_reward_models(case):
    for seed, name in itertools.product(SEEDS, ("last_token", "average", "per_sample", "pair")):
        rng = random.Random(f"{name} {seed}")
        prompt = [1, 2]
        texts = [[*prompt, *(rng.randint(3, 5) for _ in range(rng.randint(1, 5)))] for _ in range(6)]
        width = max(map(len, texts))
        mask = torch.tensor([[t < len(one) for t in range(width)] for one in texts])
        ids = torch.tensor([one + [0] * (width - len(one)) for one in texts])
        scores = torch.randn(6, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scores.requires_grad_()
        found = rm.LOSSES[name](scores, ids, mask)

        def by_hand(table, texts=texts, name=name):
            out = []
            for i in range(3):
                (c, r), (x, y) = (texts[i], texts[i + 3]), (table[i], table[i + 3])
                x, y = x[: len(c)] + [x[len(c) - 1]] * 9, y[: len(r)] + [y[len(r) - 1]] * 9
                last = max(len(c), len(r)) - 1
                part = next((t for t in range(last + 1) if c[t : t + 1] != r[t : t + 1]), last)
                if name == "last_token":
                    out.append(-log_s(x[len(c) - 1] - y[len(r) - 1]))
                elif name == "pair":
                    out.append((-log_s(x[len(c) - 1]) - log_s(-y[len(r) - 1])) / 2)
                elif name == "average":
                    means = [
                        sum(z[min(part, n - 1) : n]) / (n - min(part, n - 1)) for z, n in ((x, len(c)), (y, len(r)))
                    ]
                    out.append(-log_s(means[0] - means[1]))
                else:
                    terms = [-log_s(x[t] - y[t]) for t in range(part, last + 1)]
                    out.append(sum(terms) / len(terms))
            return out

        table = scores.detach().tolist()
        case(f"reward model {name} value, seed {seed}", near(found.tolist(), by_hand(table)))
        (slope,) = torch.autograd.grad(found.sum(), scores)
        i, t = rng.randrange(6), rng.randrange(width)
        steps = []
        for d in (1e-6, -1e-6):
            moved = [list(row) for row in table]
            moved[i][t] += d
            steps.append(sum(by_hand(moved)))
        case(f"reward model {name} gradient, seed {seed}", near(slope[i, t].item(), (steps[0] - steps[1]) / 2e-6, 1e-6))


# --------------------------------------------------------------------------------------------------------- statistics
def wilson_by_bisection(share: float, n: float, side: int) -> float:
    """The p where |share - p| = z sqrt(p (1-p) / n), below or above the share."""
    low, high = (0.0, share) if side < 0 else (share, 1.0)
    for _ in range(200):
        p = (low + high) / 2
        inside = abs(share - p) <= 1.959963984540054 * (p * (1 - p) / n) ** 0.5
        if side < 0:
            low, high = (low, p) if inside else (p, high)
        else:
            low, high = (p, high) if inside else (low, p)
    return (low + high) / 2


def test_intervals_of_shares(case):
    for wins, n in (
        (0, 3),
        (3, 3),
        (1.5, 3),
        (0, 20),
        (1, 7),
        (81, 263),
        (15, 148),
        (30, 50),
        (49.5, 50),
        (1000, 1000),
    ):
        expected = [wilson_by_bisection(wins / n, n, side) for side in (-1, 1)]
        found = list(ops.wilson_interval(wins, n))
        case(f"Wilson {wins} of {n} solves its equation, to 1e-7", near(found, expected, 1e-7), str(found))
    for text, expected in (("AAA", (3, 3)), ("BBB", (0, 3)), ("===", (1.5, 3)), ("AB=", (1.5, 3)), ("AA=", (2.5, 3))):
        rows = [{"verdict": {"=": "tie"}.get(v, v), "prompt": str(i), "a": "x", "b": "y"} for i, v in enumerate(text)]
        found = judge.summary(rows, 0)["win_rate_interval"]
        case(f"judge's interval of {text}", near(found, list(ops.wilson_interval(*expected))), str(found))
        low, high = judge.summary(rows, 0)["length_controlled_win_rate_interval"]
        case(f"judge's length-controlled interval of {text} is no point", high - low > 0.4, f"{low:.3f} {high:.3f}")
    rows = [(0.1 + 0.2, 0.3), (1.0, 0.0), (0.5, 0.5), (math.nan, 1.0), (None, 1.0), (2.0, None)]
    rate, interval = ops.win_rate(rows)
    case(
        "a pair without two numbers is no tie and no loss",
        near(rate, 2.5 / 3) and interval == ops.wilson_interval(2.5, 3),
    )
    votes = [
        {"pair": str(i), "rater": r, "verdict": "A", "models": ["m", "n"], "responses": ["x", "y"]}
        for i in range(3)
        for r in "ab"
    ]
    case(
        "six unanimous votes on three pairs are three observations",
        tally(votes)[0]["win_rate_interval"] == ops.wilson_interval(3, 3),
    )
    values, groups = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], list("aabbcc")
    mean, residuals = 0.5, [2 - 1, 1 - 1, 0 - 1]
    variance = 3 / 2 * sum(x * x for x in residuals) / 36
    case(
        "three groups of two count at least as three",
        near(list(ops.share_interval(values, groups)), list(ops.wilson_interval(1.5, 3))),
        f"{mean * (1 - mean) / variance:.2f}",
    )


@pytest.mark.parametrize("problems", [5, 10, 20, 50, 164])
@pytest.mark.parametrize("programs", [1, 4, 16])
def test_the_interval_of_pass_at_1_covers(problems, programs, case):
    """1,000 draws of problems with a share of correct programs from a Beta distribution; nominal 95%, at least 89%.

    As if programs were independent, 16 a problem, the interval covers 46% to 66%.
    """
    for a, b in ((0.3, 0.3), (1.0, 1.0), (5.0, 5.0), (0.5, 1.0)):
        torch.manual_seed(problems * 100 + programs)
        chances = torch.distributions.Beta(a, b).sample((1000, problems)).double()
        passed = torch.distributions.Binomial(programs, chances).sample()
        groups = [i for i in range(problems) for _ in range(programs)]
        covered = 0
        for row in passed.tolist():
            values = [float(i < count) for count in row for i in range(programs)]
            low, high = ops.share_interval(values, groups)
            covered += low <= a / (a + b) <= high
        case(
            f"pass@1, {problems} problems of {programs}, Beta({a}, {b})",
            covered / 1000 >= 0.89,
            f"covers {covered / 1000:.3f}",
        )


def test_explained_variance(case):
    for seed in SEEDS:
        returns, values, mask = draw(seed)
        error = [float(r - v) for r, v in zip(returns[mask], values[mask])]
        kept = returns[mask].tolist()

        def variance(x):
            return sum((y - sum(x) / len(x)) ** 2 for y in x) / len(x)

        found = ops.explained_variance(values, returns, mask)
        case(f"explained variance, seed {seed}", near(found, 1 - variance(error) / variance(kept)))


def test_perplexity(case):
    """exp of the mean negative log-probability of all counted tokens, whatever the batch; float32 to 1e-5."""
    for seed, batch_size in itertools.product(range(3), (1, 2, 5)):
        rng = random.Random(seed)
        rows = []
        for _ in range(5):
            ids = [rng.randrange(11) for _ in range(rng.randint(3, 8))]
            rows.append({"input_ids": ids, "prompt_len": 2, "targets": [-100, -100, *ids[2:]]})
        table = torch.randn(11, 11, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)

        class Bigram(torch.nn.Module):
            def __init__(self, table=table):
                super().__init__()
                self.model = torch.nn.Linear(1, 1)
                self.table = table

            def forward(self, input_ids, attention_mask, action_mask, **_):
                own = self.table[input_ids[:, :-1], input_ids[:, 1:]]
                return SimpleNamespace(logprobs=own * action_mask)

        terms = [float(table[a, b]) for row in rows for a, b in zip(row["input_ids"][1:], row["input_ids"][2:])]
        found = perplexity(Bigram(), rows, 0, batch_size)
        case(f"perplexity, seed {seed}, batches of {batch_size}", near(found, math.exp(-sum(terms) / len(terms)), 1e-5))


def test_responses_that_could_not_be_read_never_count(case):
    """Every set of missing comparisons among three responses: those left were all compared, in both orders."""
    orders = [(a, b) for a in range(3) for b in range(3) if a != b]
    for gone in itertools.chain.from_iterable(itertools.combinations(orders, n) for n in range(7)):
        there = set(orders) - set(gone)
        kept = read_together(there, [3, 2, 1])
        complete = all((a, b) in there for a in kept for b in kept if a != b)
        possible = any((a, b) in there and (b, a) in there for a, b in orders)
        case(f"comparisons {gone} missing", complete and (len(kept) >= 2) == possible, str(kept))


def test_verdicts_of_scores(case):
    """Each kind of score against each: equal ones tie, missing ones are malformed, others win."""
    kinds = [1000.0, 1000.009, 1000.0000001, 0.0, -0.0, 1e-300, None]
    for a, b in itertools.product(kinds, kinds):
        args = SimpleNamespace(judge="reward")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judge, "reward_scores", lambda args, a=a, b=b: lambda pairs: [[a, b]])
            (row,) = judge.compare_scores(args)([{"a": "x", "b": "y", "prompt": "p", "columns": {}}])
        expected = "malformed" if a is None or b is None else "A" if a > b else "B" if a < b else "tie"
        case(f"{a} against {b}", row["verdict"] == expected, row["verdict"])
