"""The limits of each number on the command line."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from openrlhf_gtpo.errors import UsageError

# Limits of the numbers of OpenRLHF 0.11.2 and of this package: the rule in words, the rule, its flags. Other numbers
# fail in an actor, or mean what nobody would guess (-2 for --eval.steps is every second step). NaN satisfies no rule;
# infinity may open a clip range. Not here: what infinity or -1 switches off, such as --actor.max_norm, --ckpt.max_mem.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "{} >= 1",
        lambda number: number >= 1,
        "actor.num_nodes actor.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node critic.num_nodes "
        "critic.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node vllm.tensor_parallel_size "
        "ds.tensor_parallel_size ds.ring_attn_size train.num_episodes train.max_epochs train.batch_size "
        "train.micro_batch_size train.max_tokens_per_gpu train.async_queue_size rollout.batch_size "
        "rollout.micro_batch_size rollout.n_samples_per_prompt rollout.max_tokens_per_gpu rollout.max_new_tokens "
        "data.max_samples eval.n_samples_per_prompt logger.logging_steps ckpt.max_num algo.kl.horizon "
        "train.max_bad_steps logger.dump_rows vllm.sync_bucket_mb vllm.max_num_seqs vllm.max_num_batched_tokens "
        "algo.guide.num_engines algo.guide.tensor_parallel_size",
    ),
    ("a finite {} >= 1", lambda number: 1 <= number < math.inf, "algo.guide.ratio_cap"),
    ("{} >= 64", lambda number: number >= 64, "megatron.lm_head_mb"),
    ("{} >= 2, for a prompt and a response", lambda number: number >= 2, "data.max_len"),
    ("{} >= 1, or -1 for never", lambda number: number >= 1 or number == -1, "eval.steps ckpt.save_steps"),
    (
        "{} >= 0",
        lambda number: number >= 0,
        "actor.eps_clip actor.eps_clip_low_high critic.value_clip data.dataloader_num_workers "
        "rollout.vllm_generate_batch_size train.max_restarts logger.dump_rollouts megatron.fp8_audit_steps "
        "rollout.entropy_audit_steps rollout.entropy_audit_gate algo.guide.steps algo.guide.rescue_batch",
    ),
    (
        "a finite {} >= 0",
        lambda number: 0 <= number < math.inf,
        "actor.adam.eps critic.adam.eps actor.adam.weight_decay critic.adam.weight_decay actor.aux_loss_coef "
        "algo.kl.init_coef algo.kl.target train.spike_zscore train.stall_timeout algo.guide.rescue_weight",
    ),
    (
        "0 <= {} <= 1",
        lambda number: 0 <= number <= 1,
        "actor.adam.lr critic.adam.lr actor.muon.lr critic.muon.lr actor.lr_warmup_ratio critic.lr_warmup_ratio "
        "actor.min_lr_ratio critic.min_lr_ratio algo.advantage.gamma algo.advantage.lambd train.ema_beta "
        "megatron.fp8_audit_gate",
    ),
    (
        "0 <= {} < 1",
        lambda number: 0 <= number < 1,
        "actor.adam.betas critic.adam.betas actor.muon.momentum critic.muon.momentum algo.guide.fraction",
    ),
    (
        "0 < {} <= 1",
        lambda number: 0 < number <= 1,
        "vllm.gpu_memory_utilization rollout.top_p algo.guide.gpu_memory_utilization",
    ),
    ("0 <= {} <= 2", lambda number: 0 <= number <= 2, "rollout.temperature eval.temperature"),  # vLLM 0.29's limits
    ("0 <= {} <= 3", lambda number: 0 <= number <= 3, "ds.zero_stage"),
    ("0 <= {} < 2^32", lambda number: 0 <= number < 2**32, "train.seed"),  # NumPy's limits
    (
        "{} from 0 to 1, or a reward below 0",
        lambda number: -math.inf < number <= 1,
        "reward.stop_properly_penalty_coef",
    ),
    ("a finite {}", math.isfinite, "actor.entropy_coef reward.overlong_penalty_factor"),
)


def check_values(values: dict[str, Any]) -> None:
    """Refuse a run without a reward, and numbers that nothing can work with, before OpenRLHF's block trips over them.

    Args:
        values: the parsed command line, by flag; None is a flag that was not given.

    Raises:
        UsageError: the first of them.
    """
    reward_url = values["reward.remote_url"] or values["train.agent_func_path"]
    if not reward_url and not values["reward.model_name_or_path"]:
        raise UsageError(
            "There is no reward: give --reward.remote_url FILE.py (a reward function) or URL, "
            "--reward.model_name_or_path, or --train.agent_func_path."
        )
    if (values["vllm.num_engines"] or 0) < 1:
        raise UsageError(f"Expected --vllm.num_engines >= 1 to sample from, got {values['vllm.num_engines']}.")
    for name in ("algo.advantage.is_correction_threshold", "algo.dynamic_filtering_range", "reward.clip_range"):
        pair = values[name]
        if pair is not None and len(pair) == 2 and not pair[0] < pair[1]:
            raise UsageError(f"Expected --{name} LOW HIGH with LOW < HIGH, got {pair[0]:g} {pair[1]:g}.")
    check_template(values["data.input_template"])
    # Groups of processes that this run does not have; their numbers may be anything.
    there = {
        "critic.": values["algo.advantage.estimator"] == "gae",
        "ref.": values["algo.kl.init_coef"] > 0,
        "reward.num_": not reward_url,
    }
    absent = tuple(beginning for beginning, is_there in there.items() if not is_there)
    check_ranges({name: value for name, value in values.items() if not name.startswith(absent)})


def check_template(template: str | None) -> None:
    """Refuse an ``--data.input_template`` without a place for the question: OpenRLHF's training drops such a template
    (openrlhf 0.11.2, cli/train_ppo_ray.py), and anywhere else every prompt would be the same text."""
    if template and "{}" not in template.replace("{{", ""):  # {{ is a brace of the text
        raise UsageError(f"Expected --data.input_template to have {{}}, where the question goes, got {template!r}.")


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuse numbers that nothing can work with.

    Args:
        values: those of a command line, by flag; None is a flag that was not given.

    Raises:
        UsageError: the first of them.
    """
    for rule, holds, names in _RANGES:
        for name in names.split():
            given = values.get(name)
            if given is None:
                continue
            numbers = given if isinstance(given, list | tuple) else [given]
            if not all(map(holds, numbers)):
                got = " ".join(f"{number:.10g}" for number in numbers)
                raise UsageError(f"Expected {rule.format('--' + name)}, got {got}.")
