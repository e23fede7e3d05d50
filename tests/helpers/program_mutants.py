"""One-line faults of the training programs, each of which changes what is learned, chosen, measured or counted.

Each program has ten pairs of a text that occurs once and its replacement; `mutants.py` runs the tests against them.
`tests/programs/test_program_mutants.py` checks that the list still applies.
"""

from pathlib import Path

FAULTS: dict[str, list[tuple[str, str]]] = {
    "sft": [
        ("loss = -stats.logprobs[actions].sum()", "loss = -stats.logprobs[actions].mean()"),
        ("loss = (1 - label_smoothing) * loss - label", "loss = (1 - label_smoothing) * loss + label"),
        ("run.backward(loss / count, batch.on_host.row)", "run.backward(loss / batch.num_actions, batch.on_host.row)"),
        ("[finetune_batch(micro, pad_id, args.use_targets)", "[finetune_batch(micro, pad_id, True)"),
        ("with_mean=args.label_smoothing > 0", "with_mean=False"),
        ("for i in index], pad_id, args.use_targets)", "for i in index], pad_id, True)"),
        ("/ max(run.ranks.total(count), 1)", "/ max(run.ranks.total(len(rows)), 1)"),
        ("loss = evaluate(run, model, start.held_out, pad_id)", "loss = evaluate(run, model, start.rows, pad_id)"),
        ("math.exp(min(loss, 50))", "math.exp(min(loss, 1))"),
        ("start.rows, step, args.mini_batch_size))", "start.rows, step, args.micro_batch_size))"),
    ],
    "rm": [
        ("(steps <= ends.amax(0))", "(steps <= ends.amin(0))"),
        ("*held_scores(scores, attention_mask)[:, -1]", "*scores[:, -1]"),
        ("(steps >= torch.minimum(first, end))", "(steps >= first)"),
        ("+ preference_loss(zero, rejected)", "+ preference_loss(rejected, zero)"),
        ("torch.minimum(steps, last)", "torch.maximum(steps, last)"),
        ("in_one = torch.maximum(", "in_one = torch.minimum("),
        ("run.backward(loss / count, batch.on_host.row)", "run.backward(loss / len(micro), batch.on_host.row)"),
        ("max(squares / 2 - mean * mean, 0.0)", "max(squares / 2 - mean, 0.0)"),
        ("mean, metrics = total / 2,", "mean, metrics = total,"),
        ("config.compares_pairs = True", "config.compares_pairs = False"),
    ],
    "dpo": [
        ("chosen, rejected = logps.chunk(2)", "rejected, chosen = logps.chunk(2)"),
        ("length_alpha=args.length_alpha,", "length_alpha=-args.length_alpha,"),
        ("gamma=args.beta / 2 if", "gamma=args.beta if"),
        ('[row["columns"]["margin"] if soft else 0.0 for row in rows]', "[0.0 for row in rows]"),
        ("run.backward(loss / count, batch.on_host.row)", "run.backward(loss / len(micro), batch.on_host.row)"),
        ("return loss + args.rpo_alpha * nll, [loss", "return loss, [loss"),
        ("* len(batch), 2 * len(batch)", "* len(batch), len(batch)"),
        ("pad_id=pad_id), dropout=True)", "pad_id=pad_id), dropout=False)"),
        ("slopes.T[here].tolist()", "slopes.T[: len(here)].flip(0).tolist()"),
        ("ref_chosen_logps=ref_logps[0],", "ref_chosen_logps=ref_logps[1],"),
    ],
    "kto": [
        (
            "return run.args.beta * max(float(total) / run.ranks.total(len(rows)), 0.0)",
            "return run.args.beta * float(total)",
        ),
        ("undesirable_weight=args.undesirable_weight,", "undesirable_weight=args.desirable_weight,"),
        ("run.backward(loss / count, batch.on_host.row)", "run.backward(loss / len(micro), batch.on_host.row)"),
        ("return sum(means) / max(len(means), 1)", "return sum(means)"),
        ("wins(margins, torch.zeros_like(margins))", "wins(responses.rewards, torch.zeros_like(margins))"),
        ("for label in (good, ~good):", "for label in (~good, good):"),
        ('reference_point(run, model, run.ranks.shard(rows), pad_id) if args.loss_type == "kto" else delta', "delta"),
        ('{**row, "mismatch": {**other, "ref_logps": logp}}', '{**row, "mismatch": {**other, "ref_logps": 0.0}}'),
        ("ratio = args.desirable_weight * good / (", "ratio = good / ("),
        ("validation = mismatches.add(validation, -1)", "validation = mismatches.add(validation, 0)"),
    ],
    "ppo": [
        ("else micro.advantages * micro.correction", "else micro.advantages"),
        (".clamp(-clip_coeff, clip_coeff)", ".clamp(-clip_coeff, 10)"),
        ("error = torch.maximum(", "error = torch.minimum("),
        ("args.vf_coeff * critic_loss / count", "critic_loss / count"),
        ("run.backward(loss / count, micro.on_host.row)", "run.backward(loss / micro.num_actions, micro.on_host.row)"),
        ("else args.gae_gamma", "else 1.0"),
        ("discounts = args.gae_gamma, args.gae_lambd", "discounts = args.gae_lambd, args.gae_gamma"),
        ("whiten(advantages, rollout.action_mask, ", "whiten(advantages, rollout.action_mask, True, "),
        ("approxkl > args.max_kl", "approxkl < args.max_kl"),
        ('init_kl = start.resumed.get("kl_coeff", args.init_kl_coeff)', "init_kl = args.init_kl_coeff"),
    ],
    "grpo": [
        ("else entropy_weights * minibatch.correction", "else entropy_weights"),
        ("place[batch.group].argsort(stable=True)", "torch.randperm(len(batch), generator=generator)"),
        ('baseline = "rloo" if args.advantage == "rloo" else "mean"', 'baseline = "mean"'),
        ("learned = scored.masked(~turns", "learned = rollout.masked(~turns"),
        ("torch.where(total.isnan(), total, rollout_metrics", "(rollout_metrics"),
        ("kl_loss(logprobs, micro.ref_logprobs, difference)", "kl_loss(logprobs, micro.ref_logprobs, log_ratio)"),
        ("return scores - args.overlong_penalty * over", "return scores - over"),
        ("torch.where(part.isfinite() & ~total.isnan(), part", "torch.where(part.isfinite(), part"),
        ("not (kl_coeff or args.entropy_coeff or term):", "not (args.entropy_coeff or term):"),
        ("kl.token_rewards(scored, by_turn, kl_coeff)", "kl.token_rewards(scored, by_turn, 0.0)"),
    ],
    "refuel": [
        ("return first_minus_second(logps - old_logps)", "return first_minus_second(logps)"),
        ("return first - second", "return second - first"),
        ("2, run.args.temperature)", "2, 1.0)"),
        ("losses.sum() / max(total, 1.0),", "losses.mean(),"),
        ("* log_ratio_gap(logps, old_logps)) * sign.abs()", "* log_ratio_gap(logps, old_logps))"),
        ("target = log_ratio_gap(logps, old).detach(), args.eta *", "target = log_ratio_gap(logps, old).detach(), 1 *"),
        ("aligned = (future * target > 0)", "aligned = (future * target < 0)"),
        ('_reward") for side in SIDES]', '_reward") for side in SIDES[::-1]]'),
        ("pairwise_loss(logps, old, rewards, args.beta)", "pairwise_loss(logps, old, rewards, args.eta)"),
        ("(model, batch, run.args.temperature)", "(model, batch, 1.0)"),
    ],
    "online_refuel": [
        ("score - args.init_kl_coeff * kl", "score + args.init_kl_coeff * kl"),
        ("rewards = ops.whiten(rewards, valid, ", "rewards = ops.whiten(rewards, torch.ones_like(valid), "),
        ("score.isfinite().all(0)", "score.isfinite().any(0)"),
        ("[args.penalty_reward_value if is_cut else score for", "[score for"),
        ("mix_seed(run.step, i))", "mix_seed(run.step, 0))"),
        ("truncated = [dialogue.truncated[h] for", "truncated = [dialogue.truncated[-1] for"),
        ("scoring.score_shard(run, reference,", "scoring.score_shard(run, sampler.model,"),
        ("refuel.Pairs(pair_rows, rewards, old_logps).", "refuel.Pairs(pair_rows, rewards, old_logps - kl)."),
        ("len(order) * part // parts : len(order) * (part + 1) // parts]", "len(order) * part // parts :]"),
        (".randrange(row.num_turns) for row", ".randrange(1) for row"),
    ],
    "online_dpo": [
        ('"ref_model": fixed if is_fixed else None}', '"ref_model": None}'),
        ("fixed = args.ref_model or it.initial", "fixed = args.ref_model or it.policy"),
        ('"seed": (args.seed * 1000 + it.number) % 2**32,', '"seed": args.seed,'),
        ("        seed=(args.seed * 1000 + it.number) % 2**32,", "        seed=args.seed,"),
        ("choose_type=args.choose_type,", 'choose_type="max_min",'),
        ("length_penalty=args.length_penalty,", "length_penalty=0.0,"),
        ("if len({reward for reward, _ in valid}) < 2:", "if len({reward for reward, _ in valid}) < 1:"),
        ("(max(valid, key=lambda one: one[0])[1])", "(min(valid, key=lambda one: one[0])[1])"),
        ("order[t * size : (t + 1) * size]", "order[:size]"),
        ('{"last": it.policy, "initial": it.initial}', '{"last": it.initial, "initial": it.initial}'),
    ],
    "iterative_refuel": [
        ("range((it.number - 1) * size, it.number * size)", "range(0, size)"),
        ('"seed": batch.mix_seed(it.args.seed, it.number) % 2**31', '"seed": it.args.seed'),
        ("[INVALID_REWARD if score is None else score for", "[0.0 if score is None else score for"),
        ("zip(rows, values[::2], values[1::2])", "zip(rows, values[1::2], values[::2])"),
        ('"train" if args.dry_run else dialogue_pairs.split_of(args, row)', '"train"'),
        ("has_collapsed = it.number > 1 and", "has_collapsed = it.number > 2 and"),
        ("sum(len(scores[side]) for scores in rewards for side in SIDES)", 'sum(len(one["first"]) for one in rewards)'),
        ('[row.before(0) for row in rows_of("validation")', '[row.before(1) for row in rows_of("validation")'),
        ("[row[h] for row in rows if len(row) > h]", "[row[-1] for row in rows if len(row) > h]"),
        ('queries += pairs["reward_queries"]', 'queries = pairs["reward_queries"]'),
    ],
    "reflect_rl": [
        ("return values if self.correction is None else values * self.correction", "return values"),
        ("batch.rewards - run.args.init_kl_coeff *", "batch.rewards + run.args.init_kl_coeff *"),
        ("argmax(1, keepdim=True))[:, 0].float()", "argmax(1, keepdim=True) + 1)[:, 0].float()"),
        ("returns[lengths.cumsum(0) - lengths]", "returns[lengths.cumsum(0) - 1]"),
        ("// args.num_generations  # (E,) of each episode", "// 1"),
        ("return -batch.weight(gain)[batch.actions]", "return -gain[batch.actions]"),
        ("else batch.weight(stats.entropy)", "else stats.entropy"),
        ("log_ratio.exp().clamp(max=MAX_REPLAY_WEIGHT)", "log_ratio.exp()"),
        ("run.backward(actor_loss / total", "run.backward(actor_loss / len(micro)"),
        ("batch.episode, args.gae_gamma, args.gae_lambd)  #", "batch.episode, args.gae_lambd, args.gae_gamma)  #"),
    ],
}
FOLDER = Path(__file__).resolve().parents[1] / "programs"
OTHER_TESTS = {"reflect_rl": ("test_servers_of_programs.py",)}
TESTS = {  # test files of each program in tests/programs, quick ones first
    name: " ".join(
        [one for one in (f"test_{name}_update.py", f"test_{name}.py") if (FOLDER / one).is_file()]
        + [*OTHER_TESTS.get(name, ())]
    )
    for name in FAULTS
}
