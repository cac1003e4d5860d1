"""The imports that rank processes need, actors included: the fork server of :mod:`rank_pool` runs them, then forks."""

import gc

from openrlhf_gtpo import platform

platform.activate()  # before Megatron is imported

import openrlhf_gtpo.megatron.checkpoint.checkpoints  # noqa: E402
import openrlhf_gtpo.megatron.checkpoint.export  # noqa: E402, F401
import openrlhf_gtpo.training.actors.megatron_actor  # noqa: E402
import openrlhf_gtpo.training.rollout.rollout_actor  # noqa: E402, F401

gc.collect()
