"""With the sampler's entropies, the policy runs a forward only if something needs it; audits compare the two."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
from openrlhf_gtpo.training.features.guide.controller import GuideInController
from openrlhf_gtpo.training.features.sampler_entropy.controller import SamplerEntropyInController
from openrlhf_gtpo.training.rows import Row
from tests.support.rollouts import Rollout, arguments, in_sampling_order, maker, rollout

SAMPLER = ("--rollout.entropy", "sampler", "--algo.kl.init_coef", "0", "--train.batch_size", "20")
GTPO = ("--algo.advantage.estimator", "gtpo", *SAMPLER)
GUIDE = ("--algo.guide.model_name_or_path", "guide")
NO_AUDIT = ("--rollout.entropy_audit_steps", "0")
KL_LOSS = ("--algo.kl.init_coef", "0.1", "--algo.kl.use_loss")
DYNAMIC = ("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "30")
# Heavily weighted shares make signs flip.
WEIGHTS = ("--algo.gtpo.alpha1", "0.1", "--algo.gtpo.alpha2", "0.9")


class Asked:
    """A model that counts the forwards that it is asked for, and their rows."""

    def __init__(self, model: Any) -> None:
        self.model, self.forwards, self.rows = model, 0, 0

    def async_run_method_batch(self, **dispatch: Any) -> Any:
        self.forwards += 1
        self.rows += sum(map(len, dispatch["sequences"]))
        return self.model.async_run_method_batch(**dispatch)


class Maker:
    """An experience maker with the sampler's entropies, whose policy answers with the values of ``batch``.

    Attributes:
        policy: counts its forwards.
        sampler: the feature.
        metrics: what a step is logged with.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: Rollout, *argv: str, kl_coef: float = 0.0) -> None:
        args = arguments(*argv)
        self.sampler = SamplerEntropyInController(args)
        self._features = [self.sampler, GuideInController(args)] if args.rollout.entropy == "sampler" else []
        self.made = maker(ExperienceMaker, args, batch, monkeypatch, kl_coef, self._features)
        self.policy = Asked(self.made.models.actor)
        self.made.models = self.made.models._replace(actor=self.policy)
        self.metrics: dict[str, float] = {}

    def make(self, rows: list[Row]) -> list[Experience]:
        experiences = self.made.make(rows)
        self.metrics = dict(self.made.metrics)
        for feature in self._features:
            feature.on_step(1, self.metrics)
        return experiences


def samples(sampled: Rollout) -> list[Row]:
    """The rows that the engines' responses become, with what the sampler said about each."""
    rows = sampled.rows()
    for number, row in enumerate(rows):
        values = torch.zeros(2, len(row.tokens))
        values[0, 1:], values[1, 1:] = (
            torch.where(torch.from_numpy(row.mask[1:]), table[number, : len(row.tokens) - 1], 0)
            for table in (sampled.log_probs, sampled.entropy)
        )
        row.values = TokenValues(*values)
    return rows


def twin(batch: Rollout, distance: float) -> Rollout:
    """The same responses with the values of another policy, ``distance`` (0 to 1) away."""
    other = rollout(seed=1)
    entropy = (1 - distance) * batch.entropy + distance * other.entropy
    return replace(batch, entropy=entropy, log_probs=batch.log_probs - 0.1 * distance)


def advantages(made: Maker, batch: Rollout, entropy: torch.Tensor) -> torch.Tensor:
    assert made.made.credit is not None
    return made.made.credit.advantages(entropy, batch.mask, batch.outcome, batch.group_ids, None)


def rows_of(experiences: Sequence[Experience], name: str, batch: Rollout) -> torch.Tensor:
    return in_sampling_order(experiences, name, batch.mask.shape[1])


# ── Who is asked ──


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s", "group_norm"])
@pytest.mark.parametrize("layout", [(), DYNAMIC], ids=["in order", "dynamic"])
def test_the_samplers_entropies_shape_and_the_policy_is_not_asked(
    estimator: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie on their own rows, beside the reference model's log-probs, and nothing stays behind."""
    batch = rollout()
    sampled = twin(batch, 0.5)
    argv = ("--algo.advantage.estimator", estimator, *SAMPLER, *NO_AUDIT, *KL_LOSS, *layout)
    argv += ("--logger.entropy_enable",) if estimator == "group_norm" else ()
    made = Maker(monkeypatch, batch, *argv, kl_coef=0.1)
    experiences = made.make(samples(sampled))
    assert made.policy.forwards == 0 and made.metrics[names.SAMPLER_MISSING] == 0
    assert made.metrics[names.ENTROPY_ALL] == pytest.approx(sampled.entropy[batch.mask].mean().item())
    if made.made.credit is not None:
        wanted = advantages(made, batch, sampled.entropy)
        torch.testing.assert_close(rows_of(experiences, "advantages", batch), wanted)
    reference = rows_of(experiences, "base_action_log_probs", batch)
    assert torch.equal(reference[batch.mask], batch.reference[batch.mask])
    fresh = set(vars(Experience()))
    assert all(e.action_log_probs is None and set(vars(e)) == fresh for e in experiences)
    assert made.made.seconds[names.timing(names.OLD_LOG_PROBS)] < 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("argv", "replayed", "forwarded"),
    [((), False, 5), (DYNAMIC, False, 5), (("--train.max_epochs", "2"), False, 20), ((), True, 0)],
    ids=["in order", "dynamic", "old log-probs", "replayed"],
)
def test_of_a_guides_rows_the_policy_is_asked_for_entropies(
    estimator: str, argv: tuple[str, ...], replayed: bool, forwarded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward covers these rows alone if nothing else needs it; they are shaped by the old policy's entropies, the
    others by the sampler's, and values that the guide's rows lack do not count as missing. A dump has them all."""
    batch = rollout()
    sampled = twin(batch, 0.5)
    made = Maker(monkeypatch, batch, "--algo.advantage.estimator", estimator, *SAMPLER, *NO_AUDIT, *argv)
    rows, guided = samples(sampled), torch.arange(20) % 4 == 3
    for row, is_guided in zip(rows, guided.tolist(), strict=True):
        row.off_policy, row.metrics[names.GUIDE_ROWS] = is_guided, float(is_guided)
        if is_guided and not replayed:
            row.values = None
    experiences = made.make(rows)
    assert (made.policy.forwards, made.policy.rows) == (int(not replayed), forwarded)
    assert made.metrics[names.SAMPLER_MISSING] == 0
    of_actor = guided.unsqueeze(-1) & torch.tensor(not replayed)
    entropy = torch.where(of_actor, batch.entropy, sampled.entropy)
    torch.testing.assert_close(rows_of(experiences, "advantages", batch), advantages(made, batch, entropy))
    assert made.metrics[names.GUIDE_REWARD] == pytest.approx(batch.outcome[guided].mean().item())
    assert made.metrics[names.GUIDE_POLICY_REWARD] == pytest.approx(batch.outcome[~guided].mean().item())


@pytest.mark.parametrize(
    ("argv", "kl_coef", "forwards", "kept"),
    [
        (("--algo.kl.init_coef", "0.1"), 0.1, 1, False),
        (("--train.batch_size", "10"), 0.0, 1, True),
        (("--train.max_epochs", "2"), 0.0, 1, True),
        (("--train.batch_size", "10", "--rollout.log_probs", "sampler"), 0.0, 0, False),
        (("--train.batch_size", "11"), 0.0, 0, False),  # one step of 20 rows
        (("--critic.freezing_steps", "0"), 0.0, 1, True),
        ((*GUIDE, "--algo.guide.rescue_batch", "2", "--algo.dynamic_filtering_enable"), 0.0, 1, True),
    ],
    ids=[
        "KL as a reward",
        "two steps",
        "two epochs",
        "two steps of the sampler's",
        "a step and a rest",
        "frozen",
        "rescues",
    ],
)
def test_the_policy_is_asked_where_its_log_probs_are_read(
    argv: tuple[str, ...], kl_coef: float, forwards: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel on if several optimizer steps are compared with them; entropies are the sampler's all the same."""
    batch = rollout()
    sampled = twin(batch, 0.5)
    made = Maker(monkeypatch, batch, *GTPO, *NO_AUDIT, *argv, kl_coef=kl_coef)
    experiences = made.make(samples(sampled))
    assert made.policy.forwards == forwards
    assert made.metrics[names.ENTROPY_ALL] == pytest.approx(sampled.entropy[batch.mask].mean().item())
    if kept:
        log_probs = rows_of(experiences, "action_log_probs", batch)
        assert torch.equal(log_probs[batch.mask], batch.log_probs[batch.mask])
    else:
        assert all(experience.action_log_probs is None for experience in experiences)
    if kl_coef:
        plain = Maker(monkeypatch, batch, *GTPO, "--rollout.entropy", "actor", *argv, kl_coef=kl_coef)
        kl = torch.cat([e.info["kl"] for e in plain.make(batch.rows())])
        assert kl.abs().min() > 0 and torch.equal(torch.cat([e.info["kl"] for e in experiences]), kl)


def test_what_a_filter_leaves_keeps_its_own_entropies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic sampling drops groups of a rollout before it is cut into micro-batches."""
    whole = rollout()
    kept = torch.arange(20).view(5, 4)[[1, 3, 4]].flatten()
    fields = {name: value[kept] for name, value in vars(whole).items()} | {"group_ids": torch.arange(12) // 4}
    batch = Rollout(**fields)
    made = Maker(monkeypatch, whole, *GTPO, *NO_AUDIT)
    of_whole = samples(twin(whole, 0.5))
    experiences = made.make([of_whole[row] for row in kept])
    assert made.policy.forwards == 0
    wanted = advantages(made, batch, twin(whole, 0.5).entropy[kept])
    torch.testing.assert_close(rows_of(experiences, "advantages", batch), wanted)


# ── Tokens that the sampler said nothing about ──


def holed(batch: Rollout, tokens: int) -> Rollout:
    """``batch`` without values at the first action token of each of the last ``tokens`` rows."""
    entropy, log_probs = batch.entropy.clone(), batch.log_probs.clone()
    for row in range(len(batch.mask) - tokens, len(batch.mask)):
        column = int(batch.mask[row].nonzero()[0])
        entropy[row, column] = log_probs[row, column] = torch.nan
    return replace(batch, entropy=entropy, log_probs=log_probs)


def test_missing_values_are_the_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(prompts=30)
    sampled = replace(batch, entropy=batch.entropy * 0.9)
    made = Maker(monkeypatch, batch, *GTPO, *NO_AUDIT, "--train.batch_size", "120")
    experiences = made.make(samples(holed(sampled, 3)))
    assert made.policy.forwards == 1 and made.metrics[names.SAMPLER_MISSING] == 3
    filled = torch.where(holed(sampled, 3).entropy.isnan(), batch.entropy, sampled.entropy)
    torch.testing.assert_close(rows_of(experiences, "advantages", batch), advantages(made, batch, filled))
    made.make(samples(sampled))
    assert made.policy.forwards == 1 and made.metrics[names.SAMPLER_MISSING] == 0


# ── Audits ──


def test_an_audit_measures_what_a_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout()
    sampled = twin(batch, 0.3)
    made = Maker(monkeypatch, batch, *GTPO, *WEIGHTS, *DYNAMIC, "--rollout.entropy_audit_gate", "inf")
    made.make(samples(sampled))
    actors, ours = advantages(made, batch, batch.entropy), advantages(made, batch, sampled.entropy)
    entropy, log_probs, flips, with_credit = [], [], 0, 0
    for row, column in batch.mask.nonzero().tolist():
        entropy.append(abs(float(batch.entropy[row, column]) - float(sampled.entropy[row, column])))
        log_probs.append(abs(float(batch.log_probs[row, column]) - float(sampled.log_probs[row, column])))
        signs = {float(each[row, column].sign()) for each in (actors, ours)}
        flips += len(signs) == 2
        with_credit += signs != {0.0}
    found = made.metrics
    assert found["rollout/entropy_diff_mean"] == pytest.approx(sum(entropy) / len(entropy))
    assert found["rollout/entropy_diff_p99"] == pytest.approx(sorted(entropy)[-(-99 * len(entropy) // 100) - 1])
    assert found["rollout/log_prob_diff_mean"] == pytest.approx(sum(log_probs) / len(log_probs))
    assert found["rollout/advantage_sign_flips"] == pytest.approx(flips / with_credit) and flips
    assert -1 <= found["rollout/share_rank_correlation"] < 1 and found[names.SAMPLER_IN_USE] == 1


def test_a_stale_engine_closes_the_gate_until_it_has_new_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What other weights say shapes nothing, from the audit that notices them to the first that no longer does."""
    batch = rollout()
    stale = twin(batch, 0.5)
    made = Maker(monkeypatch, batch, *GTPO, "--rollout.entropy_audit_steps", "2")
    of_actor = advantages(made, batch, batch.entropy)
    for number in range(4):
        experiences = made.make(samples(stale))
        torch.testing.assert_close(rows_of(experiences, "advantages", batch), of_actor)
        assert made.policy.forwards == number + 1
        assert made.metrics.get(names.SAMPLER_IN_USE) == (None if number % 2 else 0)
    said = capsys.readouterr().out
    assert said.count("fall back to the actor's") == 1 and "--rollout.entropy_audit_gate 0.1" in said

    fresh = replace(batch, entropy=batch.entropy + 1e-4)
    made.make(samples(fresh))
    assert made.metrics[names.SAMPLER_IN_USE] == 1 and made.policy.forwards == 5
    made.make(samples(fresh))
    assert made.policy.forwards == 5 and "entropies are the sampler's again" in capsys.readouterr().out


def test_a_gate_that_was_closed_opens_in_a_run_without_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from the checkpoint of a run with audits."""
    made = Maker(monkeypatch, rollout(), *GTPO, *NO_AUDIT)
    made.sampler.restore({"audit": (3, True)}, 3)
    made.make(samples(rollout()))
    assert made.policy.forwards == 0 and not made.sampler.audit.closed
