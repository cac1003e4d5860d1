"""The program that a process runs to train on given rollouts with DeepSpeed or Megatron, without Ray. It returns the
status of each round, and everything that an optimizer step may change."""

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from openrlhf_gtpo.report import names
from tests.support.actor_program import (
    log_probs_of,
    make_experience,
    policy_class,
    run_forward,
    start_actor,
    to_numbers,
)

PROMPT = 3


def run_rounds(
    backend: str, model: str, argv: list[str], rounds: list[list[int]], save_after: int = 0
) -> list[dict[str, float]]:
    """The status of each round, and the squared norm of the weights' moving average if there is one. A round is given
    as response lengths, dealt to the replicas as ``ActorGroup`` does. A checkpoint follows round ``save_after``."""
    args, strategy, trained = _trained(backend, model, argv)
    critic = args.algo.advantage.estimator == "gae"
    found = []
    for number, lengths in enumerate(rounds, start=1):
        for row, batch, old in _own_rows(trained, strategy, lengths, "--train.shared_prompts" in argv):
            trained.append(_sample(row, batch, old, args))
        found.append(to_numbers(trained.fit() if critic else trained.fit(0.1)))
        if getattr(trained, "ema_model", None) is not None:
            found[-1]["average"] = float(sum(average.double().square().sum() for average in trained._averages()))
        if number == save_after:
            trained.save_checkpoint(f"global_step{number}")
    if backend == "megatron":
        from openrlhf_gtpo.megatron.parallel import groups

        groups.destroy()
    return found


def run_averages(model: str, argv: list[str], rounds: int) -> tuple[float, float]:
    """Train for ``rounds`` on the same rows; return the largest difference of this rank's part of the weights' moving
    average from one in float64, and the largest distance of that one from where it began."""
    args, strategy, trained = _trained("deepspeed", model, argv)

    def weights() -> torch.Tensor:
        own = [getattr(weight, "ds_tensor", weight).data for weight in trained.actor.parameters()]
        return torch.cat([one.double().flatten() for one in own])

    expected, begun = weights(), weights()
    for _ in range(rounds):
        for row, batch, old in _own_rows(trained, strategy, [9, 4]):
            trained.append(_sample(row, batch, old, args))
        trained.fit(0.1)
        expected.lerp_(weights(), 1 - args.train.ema_beta)
    found, rest = torch.cat([part.double().flatten() for part in trained._averages()]).chunk(2)
    return float((found + rest - expected).abs().max()), float((expected - begun).abs().max())


def run_ratios(
    backend: str, model: str, argv: list[str], lengths: list[int]
) -> tuple[dict[str, float], dict[int, dict[str, torch.Tensor]]]:
    """The status of a round whose old log-probs are shifted away from the policy's by ``shift``, and what the loss saw
    in each row of this replica except every fourth, as a dump has it: (T,) ``ratio`` and ``clipped``, with ``shift``
    and ``advantages``."""
    from openrlhf_gtpo.training.features.dumps.ratios import take_ratios

    args, strategy, trained = _trained(backend, model, [*argv, "--logger.dump_rollouts", "1"])
    rows = {}
    for row, batch, old in _own_rows(trained, strategy, lengths):
        shift = 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(row)) * batch.action_mask
        sample = _sample(row, batch, old - shift, args)
        sample.labels = [row if row % 4 else None]
        if row % 4:
            rows[row] = {"shift": shift[0], "advantages": sample.advantages[0]}
        trained.append(sample)
    status = to_numbers(trained.fit(0))
    seen = take_ratios(trained)
    assert set(seen) == set(rows) and take_ratios(trained) == {}
    for row, (ratio, clipped) in seen.items():
        width = len(rows[row]["shift"])
        rows[row] |= {"ratio": torch.tensor(ratio[:width]), "clipped": torch.tensor(clipped[:width])}
    if backend == "megatron":
        from openrlhf_gtpo.megatron.parallel import groups

        groups.destroy()
    return status, rows


def run_poisoned(
    backend: str, model: str, argv: list[str], rounds: list[str | None], fused: bool = False
) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """For each round of four rows per replica: its status, and the weights, masters, moments and counts after it.

    Args:
        rounds: what the last replica has that is not finite: nothing (None), the "gradient" or the "loss" of its
            last row, the "log_probs" of all rows while it trains, a "weight" in its optimizer, or the "padding" of
            what it has of a weight under ZeRO 3. Or its rows have "nothing" to learn from.
        fused: use DeepSpeed's own optimizer for FusedAdam, around torch's AdamW.
    """
    from deepspeed.runtime import engine

    from openrlhf_gtpo.megatron.parallel import groups

    with mock.patch.object(engine, "FusedAdam", torch.optim.AdamW if fused else engine.FusedAdam):
        args, strategy, trained = _trained(backend, model, argv)
    try:
        return [_poisoned_round(backend, trained, args, strategy.ds_device_mesh["dp"], wrong) for wrong in rounds]
    finally:
        if backend == "megatron":
            groups.destroy()


def run_gathers(model: str, argv: list[str]) -> list[bool]:
    """Whether a large weight, gathered with a small one, has what the first rank wrote into it just before."""
    import deepspeed

    _, strategy, _ = _trained("deepspeed", model, argv)
    with deepspeed.zero.Init(config_dict_or_path=strategy.get_ds_eval_config(offload=False)):
        layer = torch.nn.Linear(2048, 2048)
    found = []
    for value in range(1, 6):
        with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0), torch.no_grad():
            layer.weight.fill_(value)
        with deepspeed.zero.GatheredParameters(list(layer.parameters())):
            found.append(bool((layer.weight == value).all()))
    return found


def _poisoned_round(backend: str, trained: Any, args: SimpleNamespace, replicas: Any, wrong: str | None) -> Any:
    critic = args.algo.advantage.estimator == "gae"
    if replicas.get_local_rank() + 1 != replicas.size():
        wrong = None
    module, optimizers = _module(backend, trained, critic), _optimizers(backend, trained, critic)
    for row in range(4 * replicas.get_local_rank(), 4 * replicas.get_local_rank() + 4):
        batch = _row(row, 3 + row)
        old = log_probs_of(run_forward(trained, [batch])[0])
        sample = _sample(row, batch, old, args)
        if row % 4 == 3 and wrong == "gradient":
            sample.advantages = sample.returns = torch.full_like(sample.advantages, 3e38) * batch.action_mask
        if wrong == "nothing":
            sample.advantages = torch.zeros_like(sample.advantages)
        if row % 4 == 3 and wrong == "loss":  # a clamp gives it a gradient of 0
            sample.base_action_log_probs = torch.full_like(old, torch.nan)
        trained.append(sample)
    norm = [one for name, one in module.named_modules() if name.endswith("norm")][-1]
    hook = norm.register_forward_hook(
        lambda module, inputs, output: output * torch.nan if wrong == "log_probs" else None
    )
    if wrong == "weight":
        optimizers[0].param_groups[0]["params"][0].data.view(-1)[0] = torch.nan
    if wrong == "padding":
        trained.actor_optim.fp32_partitioned_groups_flat[0].data[-1] = torch.nan
    try:
        return to_numbers(trained.fit() if critic else trained.fit(0.1)), _state(backend, trained, critic)
    finally:
        hook.remove()


def _module(backend: str, trained: Any, critic: bool) -> torch.nn.Module:
    return trained.model.stage if backend == "megatron" else (trained.critic if critic else trained.actor.model).module


def _optimizers(backend: str, trained: Any, critic: bool) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside the backend's."""
    if backend == "megatron":
        return [one.optimizer for one in trained.megatron.optimizer.chained_optimizers]
    return [(trained.critic if critic else trained.actor.model).basic_optimizer]


def _state(backend: str, trained: Any, critic: bool) -> dict[str, torch.Tensor]:
    """Copies of everything that an optimizer step may change, by name."""
    parameters = _module(backend, trained, critic).named_parameters()
    found = {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in parameters}
    if backend == "megatron":
        schedule, steps = trained.megatron.lr_schedule, trained.megatron.steps
    else:
        engine = trained.critic if critic else trained.actor.model
        schedule, steps = engine.lr_scheduler, engine.global_steps - engine.skipped_steps
    for optimizer in _optimizers(backend, trained, critic):
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            found[f"master {i}"] = parameter.detach().clone()
            state = optimizer.state.get(parameter, {})
            found |= {f"{name} {i}": torch.as_tensor(value).clone() for name, value in state.items()}
    counts = {"steps": steps, "schedule": schedule.last_epoch, "learning rate": schedule.get_last_lr()[0]}
    return found | {name: torch.tensor(value) for name, value in counts.items()}


def _trained(backend: str, model: str, argv: list[str]) -> tuple[SimpleNamespace, Any, Any]:
    """Arguments, strategy, and the actor that holds the policy or, with ``gae``, the critic."""
    from openrlhf.utils import get_strategy

    from openrlhf_gtpo.training import patch, run
    from openrlhf_gtpo.training.checks import shared_prompts
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.settings.frozen import changed, freeze, thaw
    from tests.support.rollouts import adapted, arguments

    args = arguments(*argv, "--actor.model_name_or_path", model, "--actor.backend", backend)
    args.actor.num_gpus_per_node = int(os.environ["WORLD_SIZE"])
    args = adapted(args)
    if args.train.shared_prompts == "on" and "--train.shared_prompts" in argv:
        decided = shared_prompts.decide(freeze(args), [Model(model, "--actor.model_name_or_path")])
        args = thaw(changed(freeze(args), decided))
        assert args.train.shares_prompts
    patch.apply(args)
    os.environ["LOCAL_RANK"] = "0"
    strategy = get_strategy(args)
    critic = args.algo.advantage.estimator == "gae"
    trained = start_actor(_critic_class() if critic else policy_class(backend), int(os.environ["WORLD_SIZE"]))
    trained.loss_features = [part for feature in run.features_of(args) if (part := feature.loss()) is not None]
    with mock.patch("deepspeed.ops.op_builder.builder.OpBuilder.jit_load") as compile_it:
        trained.init_model_from_pretrained(strategy, model, max_steps=100)
    assert not compile_it.called, "DeepSpeed compiled its all-reduce through shared memory, or an Adam"
    return args, strategy, trained


def _own_rows(
    trained: Any, strategy: Any, lengths: list[int], grouped: bool = False
) -> Iterator[tuple[int, SimpleNamespace, torch.Tensor]]:
    """This replica's rows, dealt as ``ActorGroup`` does: number, tokens, and what the model answers for them."""
    from openrlhf_gtpo.shared_prompts.balance import Prompt
    from openrlhf_gtpo.training.actors.optimizer_steps import deal_rows

    replicas, order = strategy.ds_device_mesh["dp"], trained.trainer.row_order()
    if order is None or len(lengths) < replicas.size():
        dealt = np.array_split(np.arange(len(lengths)), replicas.size())
    else:
        tokens = [_row(row, length, grouped).sequences[0] for row, length in enumerate(lengths)]
        prompts = (
            [Prompt.of(row, torch.arange(len(row)) >= PROMPT) for row in tokens] if order.shares_prompts else None
        )
        dealt = deal_rows([PROMPT + length for length in lengths], replicas.size(), order, prompts)
    mine = dealt[replicas.get_local_rank()].tolist()
    batches = [_row(row, lengths[row], grouped) for row in mine]
    old = [log_probs_of(result) for result in run_forward(trained, batches)] if batches else []
    return zip(mine, batches, old, strict=True)


def _critic_class() -> Any:
    from openrlhf_gtpo.training.actors.policy_actor import DeepspeedCriticActor

    return DeepspeedCriticActor


def _row(row: int, length: int, grouped: bool = False) -> SimpleNamespace:
    """Args: grouped: four rows in a row have the same prompt."""
    generator = torch.Generator().manual_seed(100 + row)
    tokens = torch.randint(1, 60, (1, PROMPT + length), generator=generator)
    if grouped:
        tokens[:, :PROMPT] = torch.randint(1, 60, (PROMPT,), generator=torch.Generator().manual_seed(1000 + row // 4))
    actions = torch.zeros(1, PROMPT + length - 1, dtype=torch.long)
    actions[:, PROMPT - 1 :] = 1
    return SimpleNamespace(sequences=tokens, action_mask=actions, attention_mask=torch.ones_like(tokens))


def _sample(row: int, batch: SimpleNamespace, old: torch.Tensor, args: SimpleNamespace) -> Any:
    """A row whose advantages, and whatever else is drawn, depend on the row alone."""
    experience = make_experience(batch, old, args)
    generator = torch.Generator().manual_seed(row)
    level = args.actor.loss_agg_mode
    shape = (1, 1) if level != "token-mean" else batch.action_mask.shape
    experience.advantages = torch.randn(shape, generator=generator).expand(batch.action_mask.shape) * batch.action_mask
    experience.returns = experience.advantages.clone()
    experience.values = torch.randn(batch.action_mask.shape, generator=generator) * batch.action_mask
    if args.actor.policy_loss_type == "htpo":
        experience.info[names.GROUPS_CORRECT] = torch.tensor([float(row % 2)])
        experience.info[names.GROUPS_ACCURACY] = torch.tensor([row % 3 / 2])
    if args.algo.guide.model_name_or_path:
        guided, rescued = row % 3 == 1, bool(args.algo.guide.rescue_batch) and row % 4 == 2
        experience.info[names.GUIDE_ROWS] = torch.tensor([float(guided)])
        if args.algo.guide.rescue_batch:
            experience.info[names.RESCUE_ROWS] = torch.tensor([float(rescued)])
        experience.info[names.OFF_POLICY_ROWS] = torch.tensor([float(guided or rescued)])
        if guided or rescued:
            away = 0.5 * torch.randn(batch.action_mask.shape, generator=generator) * batch.action_mask
            # No ratio lies so near its cap that bf16 decides whether it is truncated.
            cap = math.log(args.algo.guide.ratio_cap)
            away = torch.where((away - cap).abs() < 0.1, away - 0.2, away)
            assert (away - cap).abs().min() >= 0.1 - 1e-6
            experience.rollout_log_probs = old - away
    return experience


def run_whole_step(
    backend: str, model: str, argv: list[str], missed: float = 0.0
) -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
    """Take a rollout of eight responses of equal length from the experience maker to the end of training; return its
    metrics, all it may change, and how often the policy was asked for a forward. The sampler says what a forward of
    the policy says, in pairs of rows, as ``argv`` must have them; ``missed`` is how far weights have moved since."""
    from openrlhf_gtpo.megatron.parallel import groups
    from openrlhf_gtpo.token_values import TokenValues
    from openrlhf_gtpo.training import run
    from openrlhf_gtpo.training.credit import experiences
    from openrlhf_gtpo.training.rows import Row

    args, strategy, trained = _trained(backend, model, argv)
    asked = []
    generator = torch.Generator().manual_seed(1)

    def policy(**columns: Any) -> list[Any]:
        asked.append(columns.pop("method_name"))
        return [trained.execute_batch("forward", columns, 0, len(columns["sequences"]))]

    def reference(action_mask: list[torch.Tensor], **columns: Any) -> list[Any]:
        return [[-3 * torch.rand(mask.shape, generator=generator) * mask for mask in action_mask]]

    def column(values: torch.Tensor) -> np.ndarray:
        return np.append(np.zeros(1, dtype=np.float32), values[0].numpy())

    rows = []
    for first in range(0, 8, 2):
        pair = [_row(row, 5) for row in (first, first + 1)]
        both = SimpleNamespace(**{name: torch.cat([getattr(row, name) for row in pair]) for name in vars(pair[0])})
        sampled = run_forward(trained, [both])[0]
        for place, batch in enumerate(pair):
            values = TokenValues(*(column(values[place : place + 1]) for values in sampled))  # type: ignore[arg-type]
            rollout_log_probs = make_experience(batch, sampled[0][place : place + 1], args).rollout_log_probs
            rows.append(
                Row(
                    prompt="",
                    label=None,
                    number=(first + place) // args.rollout.n_samples_per_prompt,
                    tokens=batch.sequences[0].numpy(),
                    mask=column(batch.action_mask).astype(bool),
                    log_probs=None if rollout_log_probs is None else column(rollout_log_probs),
                    reward=float((first + place) % 3 == 0),
                    score=None,
                    values=values,
                )
            )
    for parameter in _module(backend, trained, critic=False).parameters():
        parameter.data += missed * torch.randn(parameter.shape, generator=generator)
    features = [part for feature in run.features_of(args) if (part := feature.controller()) is not None]
    models = experiences.Models(
        actor=SimpleNamespace(async_run_method_batch=policy),
        critic=None,
        reward=None,
        reference=SimpleNamespace(async_run_method_batch=reference) if args.algo.kl.init_coef else None,
    )
    with mock.patch.object(experiences, "ray", SimpleNamespace(get=lambda value: value)):
        kl_control, tokenizer = SimpleNamespace(value=args.algo.kl.init_coef), SimpleNamespace(pad_token_id=0)
        maker = experiences.ExperienceMaker(strategy, models, kl_control, tokenizer, features)
        for experience in maker.make(rows):
            trained.append(experience)
    try:
        metrics = to_numbers(trained.fit(args.algo.kl.init_coef)) | maker.metrics
        for feature in features:
            feature.on_step(1, metrics)
        return metrics, _state(backend, trained, critic=False), len(asked)
    finally:
        if backend == "megatron":
            groups.destroy()
