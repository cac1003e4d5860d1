"""Ray for the tests of a directory in which vLLM is real."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bundle() -> Iterator[Any]:
    """Two GPUs' worth of this module's own Ray, started as a run starts it; engines take turns in it."""
    from openrlhf_gtpo import platform
    from openrlhf_gtpo.training import host

    os.environ.setdefault(platform.PLATFORM_VARIABLE, platform.detect())
    platform.activate()
    import ray

    args = SimpleNamespace(actor=SimpleNamespace(backend="deepspeed", num_nodes=1, num_gpus_per_node=1))
    host.start_ray(args, gpus=2)
    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2)
    ray.get(group.ready())
    yield group
    ray.shutdown()
