"""Both backends' trainers train on the same loss: one micro-batch, from the replay buffer to its gradient."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ray import ppo_actor

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.actors import megatron_trainer, optimizer_steps
from openrlhf_gtpo.training.actors.megatron_trainer import MegatronActorTrainer
from openrlhf_gtpo.training.actors.optimizer_steps import MicroBatch, count_actions, row_metrics
from openrlhf_gtpo.training.actors.policy_actor import DeepspeedActorTrainer
from openrlhf_gtpo.training.features.dumps.ratios import TokenRatios
from openrlhf_gtpo.training.features.guide.loss import GuideRatios
from tests.support.rollouts import arguments

VOCABULARY, KL_COEF = 19, 0.2
CORRECTION = "--algo.advantage.is_correction_level"
KL_LOSS = ["--algo.kl.use_loss", "--algo.kl.estimator", "k2", "--algo.kl.init_coef", "0.1"]
ENTROPY = ["--actor.entropy_coef", "0.05"]
GUIDE = ["--algo.guide.model_name_or_path", "guide", "--algo.guide.fraction", "0.3"]


def values_of(model: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of tokens, from a table in place of a model."""
    return -model[0][tokens].exp(), model[1][tokens].exp()


class Table(torch.nn.Module):
    """An actor on DeepSpeed whose log-probs and entropies are in a table."""

    def __init__(self, model: torch.Tensor) -> None:
        super().__init__()
        self.model = model

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, **_: Any) -> Any:
        log_probs, entropy = values_of(self.model, sequences[:, 1:])
        return log_probs * action_mask, SimpleNamespace(entropy=entropy)


def sampled_rows(reference: bool) -> list[Experience]:
    """Rows of other lengths, as the replay buffer has them; every third is a guide's."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row, length in enumerate((9, 4, 7, 6, 8)):
        mask = torch.rand(length, generator=generator) < 0.7
        mask[1] = True
        old = -3 * torch.rand(length, generator=generator) * mask
        noise = [0.4 * torch.randn(length, generator=generator) * mask for _ in range(3)]
        info = {"reward": torch.tensor(float(row)), names.OFF_POLICY_ROWS: torch.tensor(float(row % 3 == 0))}
        info |= {names.GROUPS_CORRECT: torch.tensor(row % 2.0), names.GROUPS_ACCURACY: torch.tensor(row % 3 / 2)}
        rows.append(
            Experience(
                sequences=torch.randint(VOCABULARY, (length + 1,), generator=generator),
                attention_mask=torch.ones(length + 1, dtype=torch.long),
                action_mask=mask.long(),
                action_log_probs=old,
                rollout_log_probs=old + noise[0],
                base_action_log_probs=old + noise[1] if reference else None,
                advantages=torch.randn(1, generator=generator).expand(length) * mask,
                labels=[row if row != 1 else None],
                info=info,
            )
        )
    return rows


@pytest.mark.parametrize(
    "argv",
    [
        ["gtpo", *GUIDE, *KL_LOSS, *ENTROPY],
        ["grpo_s", CORRECTION, "seq", "--algo.advantage.is_correction_threshold", "0.9", "1.1", *ENTROPY],
        ["gtpo", CORRECTION, "token", "--algo.advantage.is_correction_mode", "clip", "--algo.kl.init_coef", "0"],
        ["group_norm", *GUIDE, CORRECTION, "token", *KL_LOSS, "--algo.kl.unbiased_gradient"],
        ["group_norm", "--actor.policy_loss_type", "htpo"],
        ["group_norm", "--actor.policy_loss_type", "gspo", *ENTROPY],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_a_micro_batch_has_one_loss_and_gradient(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, gradient and what a dump gets are the same."""
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(optimizer_steps, "all_reduce", lambda *args, **options: None)
    monkeypatch.setattr(megatron_trainer, "device", lambda: torch.device("cpu"))
    args = arguments("--algo.advantage.estimator", *argv, "--logger.dump_rollouts", "1")
    strategy = SimpleNamespace(
        args=args,
        arguments=args,
        ring_attn_group=None,
        ds_device_mesh={"dp": SimpleNamespace(get_group=lambda: None)},
        backward=lambda loss, *_: loss.backward(),
        optimizer_step=lambda *_, **__: None,
    )
    rows = sampled_rows(reference=args.algo.kl.use_loss)
    tables = [torch.rand(2, VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]

    deepspeed = DeepspeedActorTrainer(strategy, Table(tables[0]), None, None, None, vllm_engines=None)
    deepspeed.loss_features = [GuideRatios(args.algo.guide.ratio_cap), TokenRatios()]
    totals = count_actions([row.action_mask for row in rows], None, torch.device("cpu"))
    batch = MicroBatch(make_experience_batch(rows), len(rows), 1.0, True, totals, (0, 0))
    found = deepspeed.train_micro_batch(batch, KL_COEF)

    megatron = MegatronActorTrainer(strategy, None, None, None)
    megatron.loss_features = [GuideRatios(args.algo.guide.ratio_cap), TokenRatios()]
    step = megatron_trainer._StepLoss(megatron, rows, KL_COEF)
    assert len(step.micro_batches) == 1
    labels = torch.cat([tokens[actions] for tokens, actions in step.micro_batches[0]])
    log_probs, entropy = values_of(tables[1], labels)
    loss, metrics = step.loss(0, log_probs, entropy if step.with_entropy else None)
    loss.backward()
    expected = row_metrics(step.experiences[0]) | metrics

    assert set(found) == set(expected) and tables[0].grad.abs().max() > 1e-3
    for name, value in found.items():
        torch.testing.assert_close(value.float().mean(), expected[name].float().mean())
    torch.testing.assert_close(tables[0].grad, tables[1].grad)
    seen, of_megatron = (trainer.loss_features[1].take() for trainer in (deepspeed, megatron))
    assert set(seen) == set(of_megatron) == {0, 2, 3, 4}
    for row, (ratio, clipped) in seen.items():
        torch.testing.assert_close(ratio, of_megatron[row][0])
        assert (clipped == of_megatron[row][1]).all()
