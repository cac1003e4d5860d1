"""Settings of a run that belong to none of its algorithms, backends and features."""

import os
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import Bounds, Group, Ignored, Need, Setting, Values, needs_flag


class Secret(str):
    """Text that is hidden when arguments are printed to a log or to W&B's configuration."""

    def __repr__(self) -> str:
        return "'***'"


def fill_in_penalty_and_key(values: dict[str, Any], given: frozenset[str]) -> None:
    """Take GR3's factor from its paper, and W&B's key from this process's environment, because trackers on a cluster
    have another."""
    if values["reward.overlong_form"] == "group_rescaled" and "reward.overlong_penalty_factor" not in given:
        values["reward.overlong_penalty_factor"] = 0.33
    if values["logger.wandb.key"]:
        values["logger.wandb.key"] = Secret(os.environ.get("WANDB_API_KEY") or values["logger.wandb.key"])
        if values["logger.wandb.key"] == "WANDB_API_KEY":
            raise UsageError(
                "--logger.wandb.key WANDB_API_KEY takes the key from that variable, which is not set here; export it "
                "where the trainer runs (on a Ray cluster, before its head starts)."
            )


def steps_in_flight(max_staleness: int) -> int:
    """Return the number of steps whose prompts are in flight or ready, the next one included."""
    return 1 + (max_staleness + 1) // 2


def _fills_a_step(values: Values) -> bool:
    """True if a rollout has enough rows for one step, or others may join them."""
    prompts = values["rollout.batch_size"]
    prompts = min(prompts, values["rollout.vllm_generate_batch_size"] or prompts)  # as in ``count_rows``
    rows = prompts * values["rollout.n_samples_per_prompt"]
    return rows >= values["train.batch_size"] or values["rollout.joined_by"]


def _has_buffer(values: Values) -> bool:
    """True if the overlong penalty counts from a length limit, not within groups."""
    return values["algo.advantage.estimator"] not in ESTIMATORS or values["reward.overlong_form"] not in _WITHIN_GROUPS


_ESTIMATORS = ", ".join(ESTIMATORS)
_WITHIN_GROUPS = ("group_relative", "group_rescaled")  # forms of the overlong penalty

RUN = Group(
    "run",
    "settings of any run",
    (
        Setting(
            "actor.trust_remote_code",
            False,
            "run the Python code in a checkpoint (auto_map in its configuration files), for any of the run's models; "
            "without this flag such a checkpoint is refused",
        ),
        Setting(
            "reward.overlong_form",
            "continuous",
            f"overlong penalty of {_ESTIMATORS}: continuous (DAPO's), as_printed (the paper's formula), "
            "group_relative (its revision's, by lengths within the group) or group_rescaled (GR3's, factor 0.33 by "
            "default)",
            choices=("continuous", "as_printed", *_WITHIN_GROUPS),
            needs=(
                Need(
                    lambda values: values["algo.advantage.estimator"] in ESTIMATORS,
                    "OpenRLHF's estimators do not offer this choice",
                ),
                Need(
                    lambda values: values["reward.overlong_buffer_len"] or not _has_buffer(values),
                    "needs --reward.overlong_buffer_len",
                ),
            ),
            page="algorithms.md#length-penalties",
        ),
        Setting(
            "eval.before_training",
            False,
            "evaluate --eval.dataset once before the first step",
            needs=(needs_flag("eval.dataset"),),
        ),
        Setting(
            "ckpt.stop_file",
            None,
            "when this file appears, save a checkpoint after the current step and exit with status 75, as after "
            "SIGUSR1 (default: 'stop' in --ckpt.path)",
            metavar="FILE",
            page="slurm.md#stop-requeue-resume",
        ),
        Setting(
            "ckpt.load_tag",
            None,
            "with --ckpt.load_enable, resume from this checkpoint, such as global_step40 (default: the newest "
            "complete one)",
            lambda tag: tag or None,  # a supervised run gives "" to resume from its own checkpoint
            metavar="TAG",
            needs=(needs_flag("ckpt.load_enable"),),
        ),
        Setting(
            "logger.metrics_path",
            None,
            "append every step's metrics to this JSON-lines file, in addition to TensorBoard and W&B",
            metavar="FILE",
            page="metrics.md",
        ),
        Setting(
            "logger.entropy_enable",
            False,
            f"log policy entropies with other estimators too ({_ESTIMATORS} always log them)",
        ),
        Setting(
            "train.shared_prompts",
            "on",
            "on: compute a group's prompt once for all its responses, in log-probs and training, where model and "
            "settings allow it (printed at start); off: with each response",
            choices=("on", "off"),
            page="performance.md#a-prompt-is-computed-once",
        ),
        Setting(
            "train.max_staleness",
            2,
            "maximum age of a token in steps, N, with weights in flight; prompts of 1 + (N + 1) // 2 steps are in "
            "flight at once",
            bounds=Bounds(at_least=0),
            needs=(needs_flag("train.partial_rollout_enable"),),
            page="async.md#weights-in-flight",
        ),
        Setting(
            "vllm.max_num_seqs",
            None,
            "maximum responses that an engine decodes at once (default: vLLM's for an engine in a Ray actor, 128)",
            int,
            bounds=Bounds(at_least=1),
            page="performance.md#decoding",
        ),
        Setting(
            "vllm.max_num_batched_tokens",
            None,
            "maximum tokens that an engine computes per step, prompts included (default: vLLM's for an engine in a "
            "Ray actor, 2048)",
            int,
            bounds=Bounds(at_least=1),
            page="performance.md#decoding",
        ),
        Setting(
            "vllm.sync_bucket_mb",
            256,
            "size of a weight-transfer bucket, in MiB",
            bounds=Bounds(at_least=1),
            needs=(Need(lambda values: not values["vllm.sync_with_ray"], "--vllm.sync_with_ray has no buckets"),),
            page="openrlhf.md#weights-to-vllm",
        ),
        Setting(
            "vllm.sync_checksum",
            False,
            "after every transfer, verify that each parameter reached every engine as sent and that the whole model "
            "was written; otherwise stop the run",
            page="megatron.md#a-weight-in-vllm-looks-wrong",
        ),
    ),
    ignored=(
        Ignored(
            ("vllm.sync_backend",),
            Need(
                lambda values: values["vllm.sync_with_ray"] or values["vllm.sync_backend"] == "nccl",
                "GPUs use NCCL, a host without them gloo",
            ),
        ),
        Ignored(
            ("reward.overlong_buffer_len",),
            Need(_has_buffer, "--reward.overlong_form {0[reward.overlong_form]} has no buffer"),
        ),
        Ignored(("train.batch_size",), Need(_fills_a_step, "a rollout has fewer rows, which make one step")),
    ),
)
