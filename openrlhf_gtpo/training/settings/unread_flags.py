"""Names the flags on a command line that its run does not read."""

import dataclasses
import sys
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.training.settings import megatron_flags, replay


def name_unread(values: dict[str, Any], given: frozenset[str]) -> None:
    """Print one line that names the ``given`` flags that this run, with these ``values`` by flag, does not read."""
    estimator, with_ray = values["algo.advantage.estimator"], values["vllm.sync_with_ray"]
    loss_type, guide = values["actor.policy_loss_type"], values["algo.guide.model_name_or_path"]
    prompts = values["rollout.batch_size"]
    prompts = min(prompts, values["rollout.vllm_generate_batch_size"] or prompts)  # as in ``count_rows``
    rows = prompts * values["rollout.n_samples_per_prompt"]
    shapes_credit, evaluates = estimator in ESTIMATORS, values["eval.dataset"] and values["eval.steps"] > 0
    keeps_best = values["ckpt.best_metric_key"] != "none"
    reward_url = values["reward.remote_url"] or values["train.agent_func_path"]
    megatron: tuple[str, ...] = megatron_flags.NOT_READ
    if reward_url or not values["reward.model_name_or_path"]:
        megatron += megatron_flags.READ_BY_REWARD_MODEL
    # When a rule holds, why, and prefixes of the flags that nothing reads then.
    rules: list[tuple[bool, str, tuple[str, ...]]] = [
        (
            values["train.replay_rollouts"] is not None,
            "a replay starts no engines, and takes prompts, responses and rewards from the dumps",
            replay.NOT_READ,
        ),
        (shapes_credit, f"not read by {estimator}", ("algo.advantage.gamma", "algo.advantage.lambd")),
        (
            estimator not in ("gae", "reinforce", "reinforce_baseline"),
            f"not read by {estimator}",
            ("algo.advantage.no_std_norm",),
        ),
        *((estimator != name, f"the estimator is {estimator}", (f"algo.{name}.",)) for name in ESTIMATORS),
        *(
            (
                estimator == name and values[f"algo.{name}.variant"] not in variants,
                f"of the variants only {' and '.join(variants)} {'read' if len(variants) > 1 else 'reads'} it",
                (f"algo.{name}.{field.name} ",),
            )
            for name, kind in ESTIMATORS.items()
            for field in dataclasses.fields(kind.config)
            if (variants := field.metadata.get("variants"))
        ),
        *((loss_type != name, f"the loss is {loss_type}", (f"actor.{name}.",)) for name in SURROGATES),
        (
            loss_type in SURROGATES and not hasattr(SURROGATES[loss_type].config, "clip_low"),
            f"{loss_type} has no clip range",
            ("actor.eps_clip " if "actor.eps_clip" in given else "actor.eps_clip_low_high",),
        ),
        (estimator == "grpo_s" and loss_type in SURROGATES, f"the loss is {loss_type}", ("algo.grpo_s.ratio_mean",)),
        (not shapes_credit, "OpenRLHF's estimators do not offer this choice", ("reward.overlong_form",)),
        (
            values["reward.overlong_buffer_len"] is None,
            "there is no --reward.overlong_buffer_len",
            ("reward.overlong_form", "reward.overlong_penalty_factor"),
        ),
        (loss_type == "gspo", "gspo always takes the mean over responses", ("actor.loss_agg_mode",)),
        (
            loss_type == "gspo" and values["algo.advantage.is_correction_level"] != "off",
            "gspo takes its ratio to the engine's log-probs, and corrects nothing",
            tuple(f"algo.advantage.is_correction_{name}" for name in ("mode", "gating", "threshold")),
        ),
        (
            guide is None and values["train.replay_rollouts"] is None,  # a dump may have a guide's rows
            "neither --algo.guide.fraction nor --algo.guide.rescue_batch gives a guide anything to do",
            ("algo.guide.",),
        ),
        (guide and values["algo.guide.fraction"] == 0, "there is no --algo.guide.fraction", ("algo.guide.steps",)),
        (
            guide and values["algo.guide.rescue_batch"] == 0,
            "there is no --algo.guide.rescue_batch",
            ("algo.guide.rescue_weight",),
        ),
        (
            guide and values["algo.guide.endpoint"],
            "--algo.guide.endpoint replaces the guide's engines",
            ("algo.guide.num_engines", "algo.guide.tensor", "algo.guide.gpu"),
        ),
        (
            rows < values["train.batch_size"] and not values["algo.guide.rescue_batch"],
            f"a rollout has {rows} rows, which make one step",
            ("train.batch_size ",),
        ),
        (values["rollout.entropy"] == "actor", "entropies are the actor's", ("rollout.entropy_audit",)),
        (
            values["rollout.entropy"] != "actor" and not shapes_credit,
            "the credit does not depend on entropies",
            ("rollout.entropy_audit",),
        ),
        (
            values["rollout.entropy"] != "actor" and values["rollout.entropy_audit_steps"] == 0,
            "there are no audits",
            ("rollout.entropy_audit_gate",),
        ),
        (values["actor.backend"] == "megatron", "not read by the Megatron actor", megatron),
        (
            values["actor.backend"] == "deepspeed" and not values["train.dynamic_batch_enable"],
            "there is no --train.dynamic_batch_enable",
            ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
        ),
        (
            values["actor.backend"] == "deepspeed" and values["ds.zero_stage"] < 3,
            "DeepSpeed keeps a model that is not trained off the GPU only with --ds.zero_stage 3",
            ("ref.offload", "reward.offload"),
        ),
        (values["ds.lora.rank"] == 0, "there is no --ds.lora.rank", ("ds.lora.",)),
        (values["data.apply_chat_template"], "the chat template makes the prompts", ("data.input_template",)),
        (
            values["train.agent_func_path"],
            "rewards are the agent's",
            ("reward.remote_url", "reward.model_name_or_path"),
        ),
        (not values["eval.dataset"], "there is no --eval.dataset", ("eval.",)),
        (
            values["eval.dataset"] and values["eval.steps"] < 1 and not values["eval.before_training"],
            "there is neither --eval.steps nor --eval.before_training",
            ("eval.",),
        ),
        (keeps_best and not evaluates, "there is no evaluation during training", ("ckpt.best_metric_key",)),
        (
            not (keeps_best and evaluates)
            and values["ckpt.save_steps"] < 0
            and not (values["ckpt.stop_file"] or values["ckpt.load_enable"]),
            "there is no --ckpt.save_steps",
            ("ckpt.max_num", "ckpt.max_mem"),
        ),
        (values["actor.optim"] != "muon", "the optimizer is not Muon", ("actor.muon.",)),
        (not values["train.enable_ema"], "there is no --train.enable_ema", ("train.ema_beta",)),
        (
            estimator != "gae",
            f"{estimator} has no critic",
            (
                "algo.advantage.lambd",
                *(f"{flag} " for flag in given if flag.startswith("critic.") and flag != "critic.freezing_steps"),
            ),
        ),
        (values["critic.optim"] != "muon", "its optimizer is not Muon", ("critic.muon.",)),
        (
            values["algo.kl.init_coef"] == 0,
            "--algo.kl.init_coef is 0",
            (
                *(f"algo.kl.{name}" for name in ("target", "horizon", "use_loss", "estimator", "unbiased")),
                "ref.offload",
            ),
        ),
        (not values["algo.kl.use_loss"], "there is no --algo.kl.use_loss", ("algo.kl.unbiased_gradient",)),
        (values["algo.kl.target"] is None, "there is no --algo.kl.target", ("algo.kl.horizon",)),
        (
            not values["algo.dynamic_filtering_enable"],
            "there is no --algo.dynamic_filtering_enable",
            ("algo.dynamic_filtering_range",),
        ),
        (
            values["algo.advantage.is_correction_level"] == "off",
            "--algo.advantage.is_correction_level is off",
            tuple(f"algo.advantage.is_correction_{name}" for name in ("mode", "gating", "threshold")),
        ),
        (
            not values["logger.wandb.key"],
            "there is no --logger.wandb.key",
            ("logger.wandb.project", "logger.wandb.org", "logger.wandb.group"),
        ),
        (
            not with_ray and values["vllm.sync_backend"] != "nccl",
            "GPUs use NCCL, a host without them gloo",
            ("vllm.sync_backend",),
        ),
        (not values["logger.dump_rollouts"], "there is no --logger.dump_rollouts", ("logger.dump_rows",)),
        (with_ray, "--vllm.sync_with_ray has no buckets", ("vllm.sync_bucket_mb",)),
    ]
    unread_by_reason: dict[str, list[str]] = {}
    left = set(given)
    for holds, reason, beginnings in rules:
        unread = sorted(flag for flag in left if f"{flag} ".startswith(beginnings)) if holds else []
        if unread:
            left.difference_update(unread)
            unread_by_reason.setdefault(reason, []).extend(f"--{flag}" for flag in unread)
    groups = [f"{', '.join(flags)} ({reason})" for reason, flags in unread_by_reason.items()]
    if groups:
        print(f"These flags were given but have no effect here: {'; '.join(groups)}.", file=sys.stderr)
