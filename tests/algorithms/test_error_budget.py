"""The error budget equals a loop over action tokens: errors, quantiles, sign flips, and ranks of equal values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import GRPOSConfig, GTPOConfig, error_budget, grpo_s_shares, gtpo_advantages
from openrlhf_gtpo.algorithms.error_budget import rank_correlation
from openrlhf_gtpo.token_values import TokenValues

B, T, G = 8, 50, 4


def spearman(x: list[float], y: list[float]) -> float:
    """Pearson's coefficient of the ranks; equal values share the mean of their ranks."""
    ranks = [[np.mean([i for i, other in enumerate(sorted(z)) if other == value]) for value in z] for z in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def batch(seed: int = 0) -> tuple[TokenValues, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(T) < torch.randint(5, T, (B, 1), generator=generator)
    draws = [torch.rand(B, T, generator=generator) * scale for scale in (-3.0, 2.0)]
    return TokenValues(draws[0], draws[1]), mask


def moved(values: TokenValues, mask: torch.Tensor, size: float, seed: int = 1) -> TokenValues:
    """``values`` moved by up to ``size`` at action tokens, and by much more elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    noise = [2 * size * torch.rand(B, T, generator=generator) - size for _ in range(2)]
    return TokenValues(
        *(torch.where(mask, v + n, v + 99.0).clamp_min(-99) for v, n in zip(values, noise, strict=True))
    )


def test_the_numbers_are_those_of_a_loop() -> None:
    exact, mask = batch()
    rough = moved(exact, mask, 0.3)

    def advantages(entropy: torch.Tensor) -> torch.Tensor:
        return torch.where(entropy > 0.5, entropy - 1.0, 0.0)  # positive, negative and zero

    found = error_budget(exact, rough, mask, lambda entropy: entropy[mask], advantages)
    entropy_errors, log_prob_errors, before, after, flips = [], [], [], [], []
    for i in range(B):
        for t in range(T):
            if not mask[i, t]:
                continue
            entropy_errors.append(abs(float(rough.entropy[i, t]) - float(exact.entropy[i, t])))
            log_prob_errors.append(abs(float(rough.log_probs[i, t]) - float(exact.log_probs[i, t])))
            one, other = float(advantages(exact.entropy)[i, t]), float(advantages(rough.entropy)[i, t])
            before.append(one)
            after.append(other)
            if one or other:
                flips.append(np.sign(one) != np.sign(other))
    assert 0 < sum(flips) < len(flips) < len(before)
    n = len(before)
    place = math.ceil(0.99 * n) - 1
    assert found.entropy_error_mean == pytest.approx(np.mean(entropy_errors))
    assert found.entropy_error_p99 == pytest.approx(sorted(entropy_errors)[place])
    assert found.log_prob_error_mean == pytest.approx(np.mean(log_prob_errors))
    assert found.log_prob_error_p99 == pytest.approx(sorted(log_prob_errors)[place])
    assert found.ratio_error == pytest.approx(np.mean(np.exp(log_prob_errors)))
    assert found.advantage_error_mean == pytest.approx(np.mean(np.abs(np.subtract(after, before))) / np.std(before))
    assert found.sign_flips == pytest.approx(np.mean(flips))
    assert found.share_rank_correlation == pytest.approx(
        spearman(exact.entropy[mask].tolist(), rough.entropy[mask].tolist())
    )


def test_two_equal_passes_differ_in_nothing() -> None:
    exact, mask = batch()
    outcome, group_ids = (torch.arange(B) % 3 == 0).float(), torch.arange(B) // G
    config = GTPOConfig()
    found = error_budget(
        exact, exact, mask, lambda h: h, lambda h: gtpo_advantages(h, mask, outcome, group_ids, config)
    )
    assert found.ratio_error == found.share_rank_correlation == pytest.approx(1.0)
    rest = vars(found) | {"ratio_error": 0.0, "share_rank_correlation": 0.0}
    assert not any(rest.values())


def test_where_nobody_has_credit_nothing_flips() -> None:
    exact, mask = batch()
    found = error_budget(exact, moved(exact, mask, 0.5), mask, lambda h: h[mask], torch.zeros_like)
    assert found.sign_flips == 0 and found.advantage_error_mean == 0 and found.entropy_error_mean > 0.1


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_rank_correlation_is_that_of_a_loop(pairs: list[tuple[int, int]]) -> None:
    x, y = zip(*pairs, strict=True)
    found = rank_correlation(torch.tensor(x), torch.tensor(y))
    varies = len(set(x)) > 1, len(set(y)) > 1
    expected = spearman(list(x), list(y)) if all(varies) else float(varies[0] == varies[1])
    assert found == pytest.approx(expected, abs=1e-12)


def test_grpo_s_shares_have_mean_one_in_every_set() -> None:
    exact, mask = batch()
    outcome, group_ids = (torch.arange(B) % 3 == 0).float(), torch.arange(B) // G
    shares = grpo_s_shares(exact.entropy, mask, outcome, group_ids, GRPOSConfig())
    for group in range(B // G):
        for success in (0.0, 1.0):
            rows = (group_ids == group) & (outcome == success)
            assert shares[rows].mean().item() == pytest.approx(1.0)
