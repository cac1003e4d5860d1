"""Per-row tensors in an experience's ``info``, beside upstream's fields."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openrlhf_gtpo.report import names

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience


def off_policy_rows(experience: "Experience") -> Tensor | None:
    """Return (B,) bool, True for rows whose ratio is to the engine that sampled them instead of the old policy; None
    in a run without such rows."""
    name = names.OFF_POLICY_ROWS
    return info_rows(experience, name).bool() if name in experience.info else None


def info_rows(experience: "Experience", name: str) -> Tensor:
    """Return (B,) values of ``info``, which upstream turns into lists on the way to the replay buffer."""
    values = experience.info[name]
    return values if isinstance(values, Tensor) else torch.stack(values)
