"""The program that a process runs to compare upstream's actor with Megatron's on the same rollouts, without Ray."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

# Columns of every row: prompt, response.
ROWS = [(3, 9), (1, 4), (5, 12), (2, 2), (4, 7), (3, 1), (6, 10), (2, 8)]
BATCHES = [[0, 1, 2], [3, 4], [5, 6, 7]]


def run_actor(backend: str, model: str, argv: list[str], output: str | None = None) -> dict[str, Any]:
    """Return the log-probs before training, the metrics of two rounds of training, and the log-probs afterwards.

    The model is then saved to ``output``, where only the second attempt can write it.
    """
    from openrlhf.utils import get_strategy

    from openrlhf_gtpo.training import patch
    from tests.support.rollouts import adapted, arguments

    world_size = int(os.environ["WORLD_SIZE"])
    args = arguments(*argv, "--actor.model_name_or_path", model, "--actor.backend", backend)
    args.actor.num_gpus_per_node = world_size
    args.ckpt.output_dir = output or args.ckpt.output_dir
    args = adapted(args)
    patch.apply(args)
    os.environ["LOCAL_RANK"] = "0"
    strategy = get_strategy(args)
    policy = start_actor(policy_class(backend), world_size)
    policy.init_model_from_pretrained(strategy, model, max_steps=10)
    batches = [padded_batch(members) for members in BATCHES]
    sizes = _note_packed_sizes() if backend == "megatron" else []
    before = [log_probs_of(result) for result in run_forward(policy, batches)]
    sizes.append(0)
    for batch, old in zip(batches, before, strict=True):
        policy.append(make_experience(batch, old, args))
    first = policy.fit(0.1)
    for batch, old in zip(batches, before, strict=True):
        policy.append(make_experience(batch, old, args))
    second = policy.fit(0.1)
    after = [log_probs_of(result) for result in run_forward(policy, batches)]
    if output is not None:
        with mock.patch(
            "time.sleep", lambda seconds: shutil.rmtree(Path(output, "model.safetensors"), ignore_errors=True)
        ):
            policy.save_model()
    if backend == "megatron":
        from openrlhf_gtpo.megatron.parallel import groups

        groups.destroy()
    return {
        "before": [value.tolist() for value in before],
        "first": to_numbers(first),
        "second": to_numbers(second),
        "after": [value.tolist() for value in after],
        "sizes": sizes,
    }


def _note_packed_sizes() -> list[int]:
    """The list that gets the tokens of every micro-batch which this process packs from now on."""
    from openrlhf_gtpo.megatron.train import schedule

    sizes, pack = [], schedule.pack
    schedule.pack = lambda rows, *rest: sizes.append(sum(len(tokens) for tokens, _ in rows)) or pack(rows, *rest)
    return sizes


def policy_class(backend: str) -> Any:
    if backend == "megatron":
        from openrlhf_gtpo.training.actors.megatron_actor import MegatronPolicy

        return MegatronPolicy
    from openrlhf_gtpo.training.actors.policy_actor import EntropyPolicyActor

    return EntropyPolicyActor


def start_actor(kind: Any, world_size: int) -> Any:
    actor = object.__new__(kind)
    actor._world_size, actor._rank = world_size, int(os.environ.get("RANK", 0))
    return actor


def run_forward(actor: Any, batches: list[SimpleNamespace]) -> list[Any]:
    columns = {name: [getattr(batch, name) for batch in batches] for name in vars(batches[0])}
    return actor.execute_batch("forward", columns, 0, len(batches))


def log_probs_of(result: Any) -> torch.Tensor:
    return result.log_probs if hasattr(result, "log_probs") else result


def padded_batch(members: list[int]) -> SimpleNamespace:
    """The rows of ``members`` as OpenRLHF pads them: on the right, with action columns from the second token on."""
    width = max(sum(ROWS[i]) for i in members)
    sequences = torch.zeros(len(members), width, dtype=torch.long)
    attention = torch.zeros_like(sequences)
    actions = torch.zeros(len(members), width - 1, dtype=torch.long)
    for place, row in enumerate(members):
        prompt, response = ROWS[row]
        generator = torch.Generator().manual_seed(row)
        sequences[place, : prompt + response] = torch.randint(1, 60, (prompt + response,), generator=generator)
        attention[place, : prompt + response] = 1
        actions[place, prompt - 1 : prompt + response - 1] = 1
    return SimpleNamespace(sequences=sequences, action_mask=actions, attention_mask=attention)


def make_experience(batch: SimpleNamespace, old: torch.Tensor, args: SimpleNamespace) -> Any:
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(batch.sequences.shape[1])
    mask = batch.action_mask
    rows = len(mask)
    by_token = args.actor.loss_agg_mode == "token-mean"
    advantages = torch.randn((rows, mask.shape[1] if by_token else 1), generator=generator) * mask
    reward = torch.rand(rows, generator=generator)
    return Experience(
        sequences=batch.sequences.clone(),
        attention_mask=batch.attention_mask.clone(),
        action_mask=mask.clone(),
        action_log_probs=old.clone(),
        base_action_log_probs=old + 0.1 * torch.randn(mask.shape, generator=generator) * mask,
        rollout_log_probs=old + 0.01 * torch.randn(mask.shape, generator=generator) * mask,
        advantages=advantages,
        returns=advantages.clone(),
        rewards=reward,
        total_length=batch.attention_mask.sum(-1).float(),
        response_length=mask.sum(-1).float(),
        truncated=torch.zeros(rows),
        prompts=["prompt"] * rows,
        labels=["label"] * rows,
        images=[None] * rows,
        mm_train_inputs=[None] * rows,
        info={"reward": reward.clone(), "kl": torch.full((rows,), 7.0)},
    )


def to_numbers(status: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in status.items()}
