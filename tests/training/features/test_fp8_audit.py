"""An audit compares row with row and changes no training data; its gate closes at once, uses the exact values, and
opens again; the actors are told.
"""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.algorithms import error_budget
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
from openrlhf_gtpo.training.features.fp8_audit import controller as module
from openrlhf_gtpo.training.features.fp8_audit.controller import FP8AuditInController
from tests.support.rollouts import Rollout, arguments, in_sampling_order, maker, rollout

FP8 = ("--actor.backend", "megatron", "--megatron.fp8", "emulated", "--algo.kl.init_coef", "0")
SHUFFLED = ("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "30")


class Policy:
    """Stands for the actors: their FP8 values are those of the batch, the exact ones those of its twin."""

    def __init__(self, table_model: Any, twin: Rollout) -> None:
        self.rough, self.twin = table_model, twin
        self.exact = type(table_model)(table_model.processes, table_model.duplicates, twin.log_probs, twin.entropy)
        self.high_precision = False
        self.told: list[bool] = []
        self.forwards = 0
        self.forwards_in: list[bool] = []  # whether in high precision

    def async_run_method(self, method_name: str, on: bool) -> None:
        assert method_name == "set_high_precision"
        self.high_precision = on
        self.told.append(on)

    def async_run_method_batch(self, **dispatch: Any) -> Any:
        self.forwards += 1
        self.forwards_in.append(self.high_precision)
        model = self.exact if self.high_precision else self.rough
        model.result = TokenValues
        return model.async_run_method_batch(**dispatch)


class Maker:
    """An experience maker whose policy computes in FP8, and is audited.

    Attributes:
        policy: stands for its actors.
        metrics: what a step is logged with.
    """

    def __init__(self, *argv: str, monkeypatch: pytest.MonkeyPatch) -> None:
        args, self.batch = arguments(*FP8, *argv), rollout()
        audit = FP8AuditInController(args)
        self.made = maker(ExperienceMaker, args, self.batch, monkeypatch, features=[audit])
        monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda value: value))
        self.policy = Policy(self.made.models.actor, exact_twin(self.batch))
        self.made.models = self.made.models._replace(actor=self.policy)
        audit.begin(self.made)
        self._audit = audit
        self.metrics: dict[str, float] = {}

    def make(self, own: bool = True) -> list[Experience]:
        experiences = self.made.make(self.batch.rows(), own)
        self.metrics = dict(self.made.metrics)
        self._audit.on_step(1, self.metrics)
        return experiences


def exact_twin(batch: Rollout) -> Rollout:
    """The same responses with other numbers."""
    other = rollout(seed=1)
    assert other.entropy.shape == batch.entropy.shape
    return replace(batch, entropy=0.7 * batch.entropy + 0.3 * other.entropy, log_probs=batch.log_probs - 0.1)


def budget(made: Maker, batch: Rollout, twin: Rollout) -> dict[str, float]:
    about = (batch.mask, batch.outcome, batch.group_ids)
    found = error_budget(
        TokenValues(twin.log_probs, twin.entropy),
        TokenValues(batch.log_probs, batch.entropy),
        batch.mask,
        lambda entropy: made.made.credit.shares(entropy, *about),
        lambda entropy: made.made.credit.advantages(entropy, *about, None),
    )
    return {names.FP8_PREFIX + name: value for name, value in asdict(found).items()}


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s"])
@pytest.mark.parametrize("layout", [(), SHUFFLED])
def test_an_audit_compares_row_with_row(
    estimator: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--algo.advantage.estimator", estimator, *layout)
    made = Maker(*argv, "--megatron.fp8_audit_steps", "1", monkeypatch=monkeypatch)
    policy, batch = made.policy, made.batch
    experiences = made.make()
    assert policy.told == [True, False] and policy.forwards == 2
    expected = budget(made, batch, policy.twin)
    assert {name: made.metrics[name] for name in expected} == pytest.approx(expected)
    assert expected["fp8/entropy_error_mean"] > 0.05 and made.metrics[names.FP8_IN_USE] == 1

    never = Maker(*argv, monkeypatch=monkeypatch)
    untouched = never.make()
    assert not any(name.startswith(names.FP8_PREFIX) for name in never.metrics)
    for name in ("advantages", "action_log_probs"):
        width = batch.mask.shape[1]
        assert torch.equal(in_sampling_order(experiences, name, width), in_sampling_order(untouched, name, width))


@pytest.mark.parametrize("layout", [(), SHUFFLED])
def test_the_gate_closes_for_the_batch_that_it_is_for_and_opens_again(
    layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Heavily weighted shares make signs flip.
    weights = ("--algo.gtpo.alpha1", "0.1", "--algo.gtpo.alpha2", "0.9")
    argv = ("--algo.advantage.estimator", "gtpo", *weights, *layout, "--megatron.fp8_audit_steps", "2")
    made = Maker(*argv, "--megatron.fp8_audit_gate", "0.001", monkeypatch=monkeypatch)
    policy, batch = made.policy, made.batch
    assert budget(made, batch, policy.twin)["fp8/sign_flips"] > 0.001
    width = batch.mask.shape[1]
    about = (batch.mask, batch.outcome, batch.group_ids)
    wanted = made.made.credit.advantages(policy.twin.entropy, *about, None)
    for audited in (True, False, True, False):
        policy.forwards_in = []
        experiences = made.make()
        others = [] if audited else made.make(own=False)  # whose rows join the step
        assert policy.forwards_in == [True, False] * (1 if audited else 2)
        for part in filter(None, (experiences, others)):
            torch.testing.assert_close(in_sampling_order(part, "advantages", width), wanted)
        # Training is in FP8, too: the ratio's log-probs stay FP8's, and with them the KL to the reference.
        log_probs = in_sampling_order(experiences, "action_log_probs", width)
        assert torch.equal(log_probs[batch.mask], batch.log_probs[batch.mask])
        if audited:
            assert made.metrics[names.FP8_IN_USE] == 0
    said = capsys.readouterr().out
    assert said.count("fall back to BF16") == 1 and "--megatron.fp8_audit_gate 0.001" in said

    policy.exact.tables = (batch.log_probs, batch.entropy)  # FP8 does as well as BF16 from now on
    made.make()
    assert made.metrics["fp8/sign_flips"] == 0 and made.metrics[names.FP8_IN_USE] == 1
    made.make()
    assert "entropies are FP8's again" in capsys.readouterr().out
