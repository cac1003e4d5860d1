"""Rows of the guiding policy (``--algo.guide.*``), from the experience maker to the loss: those that it sampled, and
all rows of a group that it rescued.

Their ratios are relative to the engine that they came from, which reported the log-probs of what it sampled
(``rollout_log_probs``, see ``actors/guide_ratios.py``); their entropies are the old policy's, as for all rows.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openrlhf_gtpo.report import names

if TYPE_CHECKING:  # see old_policy.py
    from openrlhf.trainer.ppo_utils.experience import Experience


def guide_rows(experience: "Experience") -> Tensor | None:
    """(B,) bool, True where the guide sampled the row or rescued its group; None in a run without a guide."""
    found = [info_rows(experience, name) for name in (names.GUIDE_ROWS, names.RESCUE_ROWS) if name in experience.info]
    return torch.stack(found).bool().any(dim=0) if found else None


def info_rows(experience: "Experience", name: str) -> Tensor:
    """(B,) values of ``info``, tensors that upstream turns into lists on the way to the replay buffer."""
    found = experience.info[name]
    return found if isinstance(found, Tensor) else torch.stack(found)
