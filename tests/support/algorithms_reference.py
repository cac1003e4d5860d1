"""The paper's formulas as plain Python loops over floats, written without looking at the vectorised code."""

import math
import statistics
from types import SimpleNamespace

import torch


def arithmetic_mean(values):
    return math.fsum(values) / len(values)


def geometric_mean(values):
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


MEANS = {"arithmetic": arithmetic_mean, "geometric": geometric_mean}


def tokens_of(matrix, mask):
    """Per row, the values at the action tokens in order: list index t - 1 is position t."""
    return [[float(v) for v, m in zip(row, keep) if m] for row, keep in zip(matrix.tolist(), mask.tolist())]


def scatter(per_row, mask):
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(mask.tolist()):
        values = iter(per_row[i])
        for column, keep in enumerate(row):
            if keep:
                out[i, column] = next(values)
    return out


def groups_of(group_ids):
    groups = {}
    for i, g in enumerate(group_ids.tolist()):
        groups.setdefault(g, []).append(i)
    return list(groups.values())


def token_shares(H, members, config, weight):
    """{row: shares} for one polarity of one group."""
    mean = MEANS[config.entropy_mean]
    w = {i: [weight(h) for h in H[i]] for i in members}
    peers = {}

    def compared(i, t):
        return {"position": t, "response": i, "group": None}[config.compare]

    for i in members:
        for t, x in enumerate(w[i]):
            peers.setdefault(compared(i, t), []).append(x)
    means = {key: mean(values) for key, values in peers.items()}
    return {i: [x / means[compared(i, t)] for t, x in enumerate(w[i])] for i in members}


def clip(value, low, high):
    return max(low, min(value, high))


def gtpo_reward_lists(entropy, mask, outcome, group_ids, config):
    """(rewards of the O+ tokens, or of the only set where a variant has one; rewards of the O- tokens), with zeros."""
    H = [[max(h, config.entropy_eps) for h in row] for row in tokens_of(entropy, mask)]
    r = [float(x) for x in outcome]
    positive = [[0.0] * len(row) for row in H]
    negative = [[0.0] * len(row) for row in H]
    for rows in groups_of(group_ids):
        won = [i for i in rows if r[i] >= config.success_threshold]
        lost = [i for i in rows if i not in won]
        for i, shares in token_shares(H, won, config, lambda h: h).items():
            for t, share in enumerate(shares):
                if config.variant == "v1":
                    positive[i][t] = r[i] + config.alpha * share
                elif config.variant == "v3":
                    positive[i][t] = config.alpha1 * r[i] + config.alpha2 * share
                else:
                    a1, a2 = config.alpha1, config.alpha2
                    positive[i][t] = clip(a1 + a2 * share, 1, a1 + a1 / config.kappa)
        for i, shares in token_shares(H, lost, config, lambda h: 1 / h).items():
            for t, share in enumerate(shares):
                if config.variant == "v2":
                    negative[i][t] = -share
                elif config.variant == "v3":
                    negative[i][t] = -config.alpha1 - config.alpha2 * share
    return positive, negative


def grpo_s_reward_lists(entropy, mask, outcome, group_ids, config):
    """The same with one value per row, in a list of one so that both are normalized by the same code."""
    H = [[max(h, config.entropy_eps) for h in row] for row in tokens_of(entropy, mask)]
    r = [float(x) for x in outcome]
    mean_H = [MEANS[config.entropy_mean](row) if row else None for row in H]
    positive, negative = [[0.0] for _ in r], [[0.0] for _ in r]
    for rows in groups_of(group_ids):
        won = [i for i in rows if r[i] >= config.success_threshold]
        lost = [i for i in rows if i not in won]

        def share(i, members, weight):
            if mean_H[i] is None:
                return 1.0
            return weight(mean_H[i]) / arithmetic_mean([weight(mean_H[k]) for k in members if mean_H[k] is not None])

        for i in won:
            s = share(i, won, lambda h: h)
            positive[i][0] = (
                config.beta1 * r[i] + config.beta2 * s if config.variant == "v3" else r[i] + config.beta * s
            )
        for i in lost:
            s = share(i, lost, lambda h: 1 / h)
            if config.variant == "v2":
                negative[i][0] = -s
            elif config.variant == "v3":
                negative[i][0] = -config.beta1 - config.beta2 * s
    return positive, negative


def normalised(values, pool):
    mean = arithmetic_mean(pool)
    std = statistics.stdev(pool) if len(pool) > 1 else 0.0
    return [(v - mean) / (std + 1e-9) for v in values]


def advantage_lists(positive, negative, outcome, group_ids, config, penalty=None):
    r = [float(x) for x in outcome]
    won = [x >= config.success_threshold for x in r]
    two_sets = config.variant in ("v2", "v3")
    penalty = [0.0] * len(r) if penalty is None else [float(x) for x in penalty]
    if two_sets:
        positive = [[v + p for v in row] if w else row for row, p, w in zip(positive, penalty, won)]
        negative = [row if w else [v + p for v in row] for row, p, w in zip(negative, penalty, won)]
    else:
        positive = [[v + p for v in row] for row, p in zip(positive, penalty)]
    out = [[0.0] * len(row) for row in positive]
    for rows in groups_of(group_ids):
        if len({won[i] for i in rows if positive[i]}) < 2 and not config.shape_uniform_groups:  # GTPO's with tokens
            continue
        pool_rows = rows if config.scope == "group" else range(len(r))
        for i in rows:
            own = negative if two_sets and not won[i] else positive
            members = pool_rows
            if two_sets and config.normalize_over == "polarity":
                members = [k for k in pool_rows if won[k] == won[i]]
            out[i] = normalised(own[i], [v for k in members for v in own[k]]) if own[i] else []
    return out


def loss(log_probs, old_log_probs, advantages, mask, level, low, high, ratio_mean="arithmetic", dual_clip=None):
    """Scalar loss, clip fraction and approximate KL of section 5."""

    def term(w, a):
        unclipped, clipped = w * a, clip(w, 1 - low, 1 + high) * a
        objective = min(unclipped, clipped)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        return -objective, clipped < unclipped

    lp, old, adv = (tokens_of(x.detach(), mask) for x in (log_probs, old_log_probs, advantages))
    kl = [o - n for row, old_row in zip(lp, old) for n, o in zip(row, old_row)]
    units = []
    for i in range(len(lp)):
        ratios = [math.exp(n - o) for n, o in zip(lp[i], old[i])]
        if level == "token":
            units += [term(w, a) for w, a in zip(ratios, adv[i])]
        elif ratios:
            units.append(term(MEANS[ratio_mean](ratios), adv[i][0]))
    n = len(units)
    return sum(x for x, _ in units) / n, sum(c for _, c in units) / n, sum(kl) / len(kl)


def grop_list(lengths, won, group_ids, gamma=0.75):
    lengths, won = [int(x) for x in lengths], [bool(x) for x in won]
    out = [0.0] * len(lengths)
    for rows in groups_of(group_ids):
        right = [i for i in rows if won[i]]
        wrong = [i for i in rows if not won[i]]
        share = len(right) / len(rows)
        if share >= gamma:
            penalized, compared = right, right
        elif share <= 1 - gamma:
            continue
        else:
            penalized, compared = (right if len(right) > len(wrong) else wrong), rows
        of = [lengths[i] for i in compared]
        knee = max((min(of) + max(of)) / 2, arithmetic_mean(of))
        for i in penalized:
            if 0 < knee <= lengths[i]:
                out[i] = -0.5 if lengths[i] >= 2 * knee else -0.5 * (lengths[i] - knee) / knee
    return out


def rescaling_list(lengths, outcome, group_ids, alpha):
    lengths, out = [int(x) for x in lengths], [0.0] * len(lengths)
    for rows in groups_of(group_ids):
        mean = arithmetic_mean([lengths[i] for i in rows])
        for i in rows:
            r = float(outcome[i])
            out[i] = r / (1 + alpha * lengths[i] / mean) - r if mean else 0.0
    return out


def ragged_batch(seed, num_groups=3, num_columns=7, empty_row=False, dtype=torch.float64, pad=float("nan")):
    """Groups of 2 to 5 rows, shuffled; masks with holes and offsets; junk where the mask is False."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 6, (num_groups,), generator=g)
    names = torch.randperm(50, generator=g)[:num_groups] - 20
    group_ids = torch.repeat_interleave(names, sizes)
    group_ids = group_ids[torch.randperm(len(group_ids), generator=g)]
    num_rows = len(group_ids)
    mask = torch.rand(num_rows, num_columns, generator=g) < 0.6
    mask[torch.arange(num_rows), torch.randint(num_columns, (num_rows,), generator=g)] = True
    if empty_row:
        mask[0] = False
    outcome = (torch.rand(num_rows, generator=g) < 0.5).to(dtype)
    entropy = torch.rand(num_rows, num_columns, generator=g, dtype=torch.float64) * 3
    entropy[torch.rand(num_rows, num_columns, generator=g) < 0.15] = 0.0
    entropy = entropy.to(dtype).masked_fill(~mask, pad)
    return entropy, mask, outcome, group_ids


def penalties(num_rows, seed):
    """Random penalties (B,) between -1 and 0."""
    return -torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ── Other methods: a response is three lists: its tokens' new log-probs, old log-probs and advantages ──


def grpo_lists(outcome, group_ids, lengths, penalty=None):
    r = [float(x) + (0.0 if penalty is None else float(penalty[i])) for i, x in enumerate(outcome)]
    out = [[] for _ in r]
    for rows in groups_of(group_ids):
        for i, a in zip(rows, normalised([r[i] for i in rows], [r[i] for i in rows]), strict=True):
            out[i] = [a] * lengths[i]
    return out


def forking_lists(H, advantages, top_fraction):
    everything = sorted((h for row in H for h in row), reverse=True)
    threshold = everything[max(1, math.ceil(top_fraction * len(everything) - 1e-9)) - 1]
    return [[a if h >= threshold else 0.0 for h, a in zip(*rows)] for rows in zip(H, advantages)]


def bonus_lists(H, advantages, alpha, kappa):
    return [[a + min(alpha * h, abs(a) / kappa) for h, a in zip(*rows)] for rows in zip(H, advantages)]


def pair_of(ratio, a, config):
    """The loss of a clipped term, and its derivative with respect to the log of the ratio."""
    bounded = clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * a
    loss, slope = (-bounded, 0.0) if bounded < ratio * a else (-ratio * a, -ratio * a)
    if config.dual_clip is not None and a < 0 and -config.dual_clip * a < loss:
        return -config.dual_clip * a, 0.0
    return loss, slope


def gspo_token_row(new, old, advantages, config):
    ratio = geometric_mean([math.exp(n - o) for n, o in zip(new, old)])
    return [pair_of(ratio, a, config) for a in advantages]


def cispo_row(new, old, advantages, config):
    weights = [clip(math.exp(n - o), 1 - config.clip_low, 1 + config.clip_high) for n, o in zip(new, old)]
    return [(-w * a * n, -w * a) for w, a, n in zip(weights, advantages, new)]


def sapo_row(new, old, advantages, config):
    pairs = []
    for n, o, a in zip(new, old, advantages):
        ratio, tau = math.exp(n - o), config.tau_positive if a > 0 else config.tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        pairs.append((-4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a))
    return pairs


def gmpo_row(new, old, advantages, config):
    """One pair per token; the response's loss is their sum."""
    a, low, high = advantages[0], 1 - config.clip_low, 1 + config.clip_high
    ratios = [math.exp(n - o) for n, o in zip(new, old)]
    bounded = [min(w, high) if a > 0 else max(w, low) for w in ratios]
    loss = -a * geometric_mean(bounded)
    return [(loss / len(new), loss / len(new) if b == w else 0.0) for b, w in zip(bounded, ratios)]


ROWS = {"gspo_token": gspo_token_row, "cispo": cispo_row, "sapo": sapo_row, "gmpo": gmpo_row}


def covariances(new, advantages):
    """Each token's part of the covariance of log-prob and advantage, by (row, token)."""
    mean_new, mean_a = (arithmetic_mean([x for row in rows for x in row]) for rows in (new, advantages))
    return {
        (i, t): (n - mean_new) * (a - mean_a)
        for i, rows in enumerate(zip(new, advantages))
        for t, (n, a) in enumerate(zip(*rows))
    }


def clip_cov_pairs(new, old, advantages, config):
    """Clip-Cov with every candidate drawn."""
    cov, pairs = covariances(new, advantages), []
    for i, rows in enumerate(zip(new, old, advantages)):
        pairs.append([pair_of(math.exp(n - o), a, config) for n, o, a in zip(*rows)])
        for t, (n, o, a) in enumerate(zip(*rows)):
            ratio = math.exp(n - o)
            is_clipped = clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * a < ratio * a
            if config.cov_low < cov[i, t] < config.cov_high and not is_clipped:
                pairs[i][t] = (0.0, 0.0)
    return pairs


def kl_cov_pairs(new, old, advantages, config):
    cov = covariances(new, advantages)
    marked = sorted(cov, key=cov.get, reverse=True)[: max(1, int(config.fraction * len(cov)))]
    pairs = []
    for i, rows in enumerate(zip(new, old, advantages)):
        pairs.append([])
        for t, (n, o, a) in enumerate(zip(*rows)):
            w, coef = math.exp(n - o), config.coef if (i, t) in marked else 0.0
            pairs[i].append((-w * a + coef * abs(n - o), -w * a + coef * math.copysign(1, n - o)))
    return pairs


def stare_pairs(new, old, advantages, config):
    surprisal = {(i, t): -n for i, row in enumerate(new) for t, n in enumerate(row)}
    pairs = [[pair_of(math.exp(n - o), a, config) for n, o, a in zip(*rows)] for rows in zip(new, old, advantages)]
    if surprisal and arithmetic_mean(list(surprisal.values())) < config.target_entropy:
        for sign, weight in ((1, config.weight_positive), (-1, config.weight_negative)):
            side = sorted((at for at in surprisal if sign * advantages[at[0]][at[1]] > 0), key=surprisal.get)
            for i, t in side[len(side) - math.ceil(config.fraction * len(side) - 1e-9) :]:
                pairs[i][t] = tuple(weight * x for x in pairs[i][t])
    return pairs


def hapo_pairs(new, old, advantages, config, entropy):
    logs = [[math.log(max(h, 1e-8)) for h in row] for row in entropy]
    ordered = sorted(x for row in logs for x in row)
    pivot, pairs = ordered[round(config.pivot * (len(ordered) - 1))], []
    for i, rows in enumerate(zip(new, old, advantages)):
        pairs.append([])
        for t, (n, o, a) in enumerate(zip(*rows)):
            distance = logs[i][t] - pivot
            height = distance / max(1e-8, ordered[-1] - pivot if distance > 0 else pivot - ordered[0])
            low, high = config.clip_low, config.clip_high
            if height > 0:
                high *= 1 + config.adaptation * height
            else:
                low *= 1 - config.adaptation * height
            ratio = math.exp(n - o)
            explores = not 1 - config.clip_low / 2 < ratio < 1 + config.clip_high / 2
            if explores == (height > 0):
                a *= 1 + config.redistribution * height
            pairs[i].append(
                pair_of(ratio, a, SimpleNamespace(clip_low=low, clip_high=high, dual_clip=config.dual_clip))
            )
    return pairs


def htpo_row(new, old, advantages, config, entropy, is_correct, is_hard):
    def threshold(values, fraction):
        return values[max(1, math.floor(fraction * len(values) + 1e-9)) - 1]

    forks = [h for h in entropy if h >= threshold(sorted(entropy, reverse=True), config.forking_fraction)]
    others = sorted(h for h in entropy if h < min(forks))
    pairs = []
    for n, o, a, h in zip(new, old, advantages, entropy):
        ratio, forking = math.exp(n - o), h >= min(forks)
        pair = pair_of(ratio, a, config)
        above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
        if forking and is_correct and is_hard and (above or below):
            weight = 1 + config.clip_high if above else 1 / ratio
            pair = (-weight * a, -weight * a)
        if forking and not is_correct and below:
            pair = (-(1 - config.clip_low) * a, -(1 - config.clip_low) * a)
        lowest = not forking and h < threshold(others, config.lowest_fraction)
        highest = forking and h >= threshold(sorted(forks, reverse=True), config.highest_fraction)
        pairs.append((0.0, 0.0) if is_correct and (lowest if is_hard else highest) else pair)
    return pairs


def surrogate_pairs(name, new, old, advantages, config, entropy=None, correct=None, accuracy=None):
    """For each row and token: its part of the loss, and the derivative of the whole sum by its log-prob."""
    if name == "hapo":
        return hapo_pairs(new, old, advantages, config, entropy)
    if name == "htpo":
        rows = zip(new, old, advantages, entropy, correct, accuracy)
        return [
            htpo_row(n, o, a, config, h, c > 0, p < config.difficulty_threshold) if n else []
            for n, o, a, h, c, p in rows
        ]
    if name == "clip_cov":
        return clip_cov_pairs(new, old, advantages, config)
    if name == "kl_cov":
        return kl_cov_pairs(new, old, advantages, config)
    if name == "stare":
        return stare_pairs(new, old, advantages, config)
    return [ROWS[name](*rows, config) if rows[0] else [] for rows in zip(new, old, advantages)]
