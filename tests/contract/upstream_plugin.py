"""A pytest plugin that sets a process up as in our runs before it collects anything: stand-ins, patch, worker classes.

Named with ``-p`` by ``test_upstream_suite.py``; on a CUDA host only the patch does anything.
"""

import os

from openrlhf_gtpo import platform

os.environ.setdefault(platform.PLATFORM_VARIABLE, platform.detect())
platform.activate()

from openrlhf.trainer.ray import ppo_actor  # noqa: E402

from openrlhf_gtpo.training import patch, run  # noqa: E402
from openrlhf_gtpo.training.actors.policy_actor import DeepspeedActorTrainer  # noqa: E402
from openrlhf_gtpo.training.actors.policy_model import PolicyModel  # noqa: E402

patch.apply(
    run.parse(["--reward.remote_url", "none", "--vllm.num_engines", "1", "--algo.advantage.estimator", "gtpo"])
)
# The policy's worker process makes these replacements when it loads its model.
ppo_actor.ActorPPOTrainer = DeepspeedActorTrainer
ppo_actor.Actor = PolicyModel
