"""Where a model's ranks run, and how they find each other."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from openrlhf.cli import train_ppo_ray
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.utils import get_bundle_indices
from openrlhf.utils import deepspeed
from openrlhf.utils.deepspeed import DeepspeedStrategy

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.actors import dispatch
from openrlhf_gtpo.training.actors.dispatch import ActorGroup, open_store
from openrlhf_gtpo.training.actors.strategy import Strategy
from openrlhf_gtpo.training.settings.frozen import freeze
from tests.support.rollouts import arguments

# Where Ray's PACK put 32 equal bundles on 4 nodes of 8 GPUs (ray 2.55.0): the node of each bundle.
PACKED = "23333333" "32222222" "01111111" "10000000"

PATCHED = (
    *((train_ppo_ray, f"{name}ModelActor") for name in ("Critic", "Policy", "Reference")),
    *((train_ppo_ray, "RayActorGroup"), (ppo_trainer, "PPOTrainer"), (deepspeed, "DeepspeedStrategy")),
    *((vllm_engine, "RolloutRayActor"), (vllm_engine, "get_bundle_indices")),
)


def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a run patches when the test ends."""
    for module, name in PATCHED:
        monkeypatch.setattr(module, name, getattr(module, name))


def start_nothing(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a run, which patches upstream and goes no further."""
    put_back(monkeypatch)
    for module, name in ((run, "run"), (run.stop, "prepare"), (run.shared_prompts, "decide"), (run.host, "start_ray")):
        monkeypatch.setattr(module, name, lambda *values: {})
    run.train(freeze(arguments(*argv)))


class FakeCluster:
    """Stands for Ray's placement groups and actors; ``nodes`` has the node of each bundle."""

    def __init__(self, nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = nodes
        self.ranks: dict[int, tuple[int, Any]] = {}  # bundle, and what the rank is told about rank 0
        self.group: Any = SimpleNamespace(ready=lambda: None)
        monkeypatch.setattr(dispatch, "placement_group", self._make_group)
        monkeypatch.setattr(
            ray.util, "placement_group_table", lambda _: {"bundles_to_node_id": dict(enumerate(nodes))}
        )
        monkeypatch.setattr(ray, "get", lambda value: value)
        monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "NodeName": f"n{node}"} for node in set(nodes)])

    def _make_group(self, bundles: list[Any], strategy: str) -> Any:
        assert len(bundles) == len(self.nodes)
        return self.group

    def options(self, scheduling_strategy: Any, **unused: Any) -> Any:
        def start(world_size: int, rank: int, *meeting: Any) -> Any:
            self.ranks[rank] = scheduling_strategy.placement_group_bundle_index, meeting
            return SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: ("10.0.0.9", 1234)))

        return SimpleNamespace(remote=start)

    def start(self, gpus_per_node: int, tensor_parallel_size: int, shared: bool) -> None:
        num_nodes = len(self.nodes) // gpus_per_node
        pg = self.group if shared else None
        ActorGroup(num_nodes, gpus_per_node, self, pg=pg, tensor_parallel_size=tensor_parallel_size)


@pytest.mark.parametrize("shared", [True, False], ids=["colocated", "split"])
def test_ranks_go_from_node_to_node(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cuda")
    cluster = FakeCluster(PACKED, monkeypatch)
    cluster.start(8, 8, shared)
    bundles = [cluster.ranks[rank][0] for rank in range(32)]
    nodes = [PACKED[bundle] for bundle in bundles]
    assert sorted(bundles) == list(range(32))
    assert [len(set(nodes[rank : rank + 8])) for rank in range(0, 32, 8)] == [1, 1, 1, 1]
    # A colocated engine of 8 GPUs has those of 8 consecutive ranks.
    assert [get_bundle_indices(cluster.group, engine, 8) for engine in range(4)] == [
        bundles[rank : rank + 8] for rank in range(0, 32, 8)
    ]
    assert cluster.ranks[0][1] == (None, None)
    assert {cluster.ranks[rank][1] for rank in range(1, 32)} == {("10.0.0.9", 1234)}


def test_a_tensor_parallel_group_that_would_cross_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster("0" * 6 + "1" * 2, monkeypatch)
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cuda")
    cluster.start(4, 2, shared=False)
    with pytest.raises(
        UsageError, match="a multiple of 4 GPUs on each node.*8 processes of the model as n0: 6, n1: 2."
    ):
        cluster.start(4, 4, shared=False)
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cpu")
    cluster.start(4, 4, shared=False)


def test_what_is_for_the_first_rank_goes_to_no_other() -> None:
    """A rollout in a checkpoint, say, of which 32 copies are some GB."""
    told: list[dict[str, Any]] = []

    def remote(**given: Any) -> int:
        told.append(given)
        return len(told)

    group: Any = ActorGroup.__new__(ActorGroup)
    group._actor_handlers = [SimpleNamespace(save=SimpleNamespace(remote=remote)) for _ in range(3)]
    assert group.async_run_method("save", tag="a", for_first={"states": 1}) == [1, 2, 3]
    assert group.ask_first("save") == 4
    assert told == [{"tag": "a", "states": 1}, {"tag": "a"}, {"tag": "a"}, {}]


@pytest.mark.parametrize("shared", [True, False], ids=["colocated", "split"])
def test_an_engine_that_would_cross_nodes_is_refused(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cuda")
    put_back(monkeypatch)
    run.patch.apply(arguments("--algo.advantage.estimator", "gtpo"))
    cluster = FakeCluster("0" * 6 + "1" * 2, monkeypatch)
    monkeypatch.setattr(vllm_engine, "placement_group", cluster._make_group)
    started: list[list[int]] = []
    fake = SimpleNamespace(remote=lambda bundle_indices, **unused: started.append(bundle_indices))
    monkeypatch.setattr(vllm_engine, "RolloutRayActor", SimpleNamespace(options=lambda **unused: fake))

    def start(engines: int, size: int) -> None:
        pg = cluster.group if shared else None
        vllm_engine.create_vllm_engines(engines, size, "model", 1, False, False, True, 64, shared_pg=pg)

    start(4, 2)
    assert started == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UsageError, match=r"4 processes of vLLM engine 1 \(counted from 0\) as n0: 2, n1: 2."):
        start(2, 4)


def test_the_reference_of_adapters_is_the_actor_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded for it, and its forward passes are the actor's."""
    asked: list[Any] = []

    class Recorder:
        def __init__(self, nodes: int, gpus: int, kind: Any, **options: Any) -> None:
            asked.append((kind, options))

        def async_run_method_batch(self, method_name: str, **columns: Any) -> list[Any]:
            asked.append((method_name, columns))
            return ["log-probs"]

    monkeypatch.setattr(dispatch, "ActorGroup", Recorder)
    start_nothing(["--algo.advantage.estimator", "gtpo", "--ds.lora.rank", "8"], monkeypatch)
    train_ppo_ray.RayActorGroup(1, 1, train_ppo_ray.PolicyModelActor)
    reference = train_ppo_ray.RayActorGroup(1, 1, train_ppo_ray.ReferenceModelActor)
    assert reference.async_init_model_from_pretrained("strategy", "model") == []
    assert reference.async_run_method_batch("forward", sequences=[1]) == ["log-probs"]
    policy = (train_ppo_ray.PolicyModelActor, {"tensor_parallel_size": 1})
    assert asked == [policy, ("forward_reference", {"sequences": [1]})]


def test_nobody_else_gets_the_port_at_which_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch's rendezvous does, because it shares the store."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    actor = SimpleNamespace(_master_addr="127.0.0.1")
    address, port = open_store(actor)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert (address, os.environ["MASTER_PORT"]) == ("127.0.0.1", str(port))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_gloo_takes_the_interface_by_which_ray_knows_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "ib0": "10.0.0.2"}
    addresses = {name: [SimpleNamespace(address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(DeepspeedStrategy, "setup_distributed", lambda self, timeout: None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    strategy = object.__new__(Strategy)
    strategy.arguments = SimpleNamespace(ds=SimpleNamespace(attn_implementation="sdpa"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    strategy.setup_distributed()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1", "the user's setting wins"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    strategy.setup_distributed()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
