"""What ``--train.replay_rollouts`` makes of a command line: the flags that such a run does not read."""

from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError

# Prefixes of the flags that concern only sampling, rewards, evaluation and the length of a run.
NOT_READ = (
    "vllm.",
    "eval.",
    "reward.remote_url",
    "reward.model_name_or_path",
    "reward.num_",
    "data.prompt_",
    "data.input_",
    "data.label_key",
    "data.apply_chat_template",
    "data.max_samples",
    "data.dataloader_num_workers",
    "rollout.vllm_generate_batch_size",
    "rollout.entropy_audit",
    "algo.dynamic_filtering",
    *(
        f"algo.guide.{name}"
        for name in ("model", "fraction", "steps", "endpoint", "num_engines", "tensor", "gpu", "on_failure", "rescue")
    ),
    "train.agent_func_path",
    "train.num_episodes",
)

_ABSENT = "replay"  # so that no reward actor is made; for an agent's reward, upstream likewise sets "agent"


def adjust(values: dict[str, Any]) -> None:
    """Reset what a replay does not read in ``values``, the parsed command line by flag. OpenRLHF's own checks
    still see an engine and a reward.

    Raises:
        UsageError: the folder's name is empty, as when a script's variable is not set.
    """
    if not values["train.replay_rollouts"]:
        raise UsageError("Expected --train.replay_rollouts to be a folder with dumps, got an empty string.")
    values |= {"vllm.num_engines": 1, "eval.dataset": None, "train.agent_func_path": None}
    values |= {"algo.dynamic_filtering_enable": False, "rollout.entropy_audit_steps": 0}
    # The dumps say which rows are the guide's, and have no rescued ones.
    values |= {"algo.guide.model_name_or_path": None, "algo.guide.rescue_batch": 0}
    if not values["reward.model_name_or_path"]:  # gae may start its critic from it
        values["reward.remote_url"] = _ABSENT


def leave_out_engines(args: SimpleNamespace) -> None:
    """Take the engines and the reward actor out of the run, after OpenRLHF's own checks."""
    args.vllm.num_engines = 0
    args.reward.remote_url = [_ABSENT]
