"""The adapter for verl, by the functions that verl calls: advantages of its own rows, from entropies that stayed."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages
from tests.support import ROOT
from tests.support.algorithms_reference import ragged_batch

pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed (docs/implementing.md)")


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples" / "elsewhere")
    return importlib.import_module("verl_gtpo")


@pytest.fixture
def rows() -> tuple[dict[str, Any], torch.Tensor]:
    """The keyword arguments that verl gives an estimator, and the advantages that it shall return."""
    entropy, mask, outcome, group_ids = ragged_batch(4, num_groups=4, dtype=torch.float32, pad=7.0)
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)
    rewards = torch.zeros(mask.shape).scatter_(1, last[:, None], outcome[:, None])  # verl's are at the last token
    given = {
        "token_level_rewards": rewards,
        "response_mask": mask.long(),
        "index": np.array([f"uid {group}" for group in group_ids.tolist()], dtype=object),
        "entropys": entropy,
    }
    return given, gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig())


def test_verl_finds_the_estimator_by_its_name(adapter: Any, rows: tuple[dict[str, Any], torch.Tensor]) -> None:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    given, expected = rows
    advantages, returns = get_adv_estimator_fn("gtpo")(config=None, reward_baselines=None, **given)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(returns, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="derive the trainer from KeepsEntropies"):
        get_adv_estimator_fn("gtpo")(**given | {"entropys": None})


def test_entropies_of_the_old_policy_reach_the_estimator(
    adapter: Any, rows: tuple[dict[str, Any], torch.Tensor]
) -> None:
    """In a trainer that does with a batch what verl's does: old log-probs, entropies dropped, advantages."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos, ray_trainer

    given, expected = rows
    tensors = {name: given[name] for name in ("token_level_rewards", "response_mask")}
    plain = ray_trainer.compute_advantage

    class Trainer:
        def _compute_old_log_prob(self, batch: Any) -> Any:
            values = {"entropys": given["entropys"], "old_log_probs": -given["entropys"]}
            return DataProto.from_dict(tensors=values), 0.5

        def fit(self) -> dict[str, torch.Tensor]:
            data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": given["index"]})
            old_log_prob, _ = self._compute_old_log_prob(data)
            old_log_prob.batch.pop("entropys")
            data = data.union(old_log_prob)
            found = {}
            for name in ("gtpo", "grpo"):
                computed = ray_trainer.compute_advantage(data, adv_estimator=name, gamma=1.0, lam=1.0, config=None)
                found[name] = computed.batch["advantages"].clone()
            return found

    class Keeping(adapter.KeepsEntropies, Trainer):
        pass

    found = Keeping().fit()
    torch.testing.assert_close(found["gtpo"], expected, rtol=0, atol=1e-6)
    grpo, _ = core_algos.compute_grpo_outcome_advantage(**tensors, index=given["index"])
    torch.testing.assert_close(found["grpo"], grpo)
    assert ray_trainer.compute_advantage is plain, "other trainers get verl's own again"
