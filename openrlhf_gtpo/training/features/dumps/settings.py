"""The settings of rollout dumps and of training on them."""

from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import SAMPLES, Bounds, Group, Ignored, Setting, needs_flag

DUMPS = Group(
    "dumps",
    "rollouts on disk, for the token viewer and for replays",
    (
        Setting(
            "logger.dump_rollouts",
            0,
            "write the rollouts of every N-th step to 'rollouts' in --ckpt.path, for cli.view; 0 writes none",
            metavar="N",
            bounds=Bounds(at_least=0),
        ),
        Setting(
            "logger.dump_rows",
            64,
            "maximum responses in a dump; whole groups, drawn anew each step, and at least one group",
            metavar="M",
            bounds=Bounds(at_least=1),
            needs=(needs_flag("logger.dump_rollouts"),),
        ),
    ),
    page="viewer.md",
)

ABSENT = "replay"  # so that no reward actor is made; for an agent's reward, upstream likewise sets "agent"


def leave_out_sampling(values: dict[str, Any], given: frozenset[str]) -> None:
    """Reset what a replay does not read. OpenRLHF's own checks still see an engine and a reward."""
    if values["train.replay_rollouts"] is None:
        return
    if not values["train.replay_rollouts"]:
        raise UsageError("Expected --train.replay_rollouts to be a folder with dumps, got an empty string.")
    values["rollout.is_sampled"] = False
    values |= {"vllm.num_engines": 1, "eval.dataset": None, "train.agent_func_path": None}
    values["algo.dynamic_filtering_enable"] = False
    if not values["reward.model_name_or_path"]:  # gae may start its critic from it
        values["reward.remote_url"] = ABSENT


REPLAY = Group(
    "replay",
    "training on dumps",
    (
        Setting(
            "train.replay_rollouts",
            None,
            "train on the dumps that --logger.dump_rollouts wrote to DIR, one per step, without engines, prompts or "
            "rewards",
            metavar="DIR",
        ),
    ),
    ignored=(
        Ignored(
            (
                *("vllm.*", "eval.*", "reward.remote_url", "reward.model_name_or_path", "reward.num_*"),
                *("data.prompt_*", "data.input_*", "data.label_key", "data.apply_chat_template", "data.max_samples"),
                *("data.chat_template_kwargs*", "data.tools_key", "data.system_prompt"),
                *("data.dataloader_num_workers", "rollout.vllm_generate_batch_size"),
                *("algo.dynamic_filtering_*", "train.agent_func_path", "train.num_episodes"),
            ),
            SAMPLES,
        ),
    ),
    page="viewer.md#replay",
)
