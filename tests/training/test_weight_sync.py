"""These tests catch an actor trainer that takes the wrong transport, misses an engine, or goes on after a failed sync.

Engines are processes with plain models; the trainer is one process.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util.state
import torch
from openrlhf.trainer.ray import ppo_actor
from ray.exceptions import ActorUnavailableError

from benchmarks.suite.process_engine import ProcessEngine
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.actors import adapters
from openrlhf_gtpo.training.actors.actor_trainer import wait_for_engines
from openrlhf_gtpo.training.actors.policy_actor import DeepspeedActorTrainer
from openrlhf_gtpo.training.rollout import rollout_actor
from tests.support.rollouts import arguments
from tests.support.weight_workers import Worker

TRANSPORT = {
    (): "receive_weights",
    ("--train.colocate_all",): "receive_bucket",
    ("--train.colocate_all", "--vllm.sync_backend", "gloo"): "receive_bucket",
    ("--train.colocate_all", "--train.async_enable"): "receive_weights",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("lone_rank")]


def started() -> Future:
    future: Future = Future()
    future.set_result(True)
    return future


class Actor:
    """A handle like Ray's to an engine, which records what it is asked."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.engine = ProcessEngine(shapes, [torch.device("cpu")], Worker)
        self.asked: list[str] = []
        self.sync_checksums: list[Any] = []  # for each transfer, or bucket of one, whether they were asked for

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            if method == "__ray_ready__":
                return SimpleNamespace(future=started)
            self.asked.append(method)
            self.sync_checksums.append(args[-2])
            return SimpleNamespace(future=lambda: self.engine(method, *args))

        return SimpleNamespace(remote=remote)


@pytest.fixture(scope="module")
def policy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.Linear(1000, 7))


@pytest.fixture(scope="module")
def actors(policy: torch.nn.Module) -> Iterator[list[Actor]]:
    """Two engines with tensors of the policy's shapes."""
    made = [Actor({name: tuple(p.shape) for name, p in policy.named_parameters()}) for _ in range(2)]
    yield made
    for actor in made:
        actor.engine.close()


def trainer_of(policy: torch.nn.Module, actors: list[Actor], *argv: str) -> DeepspeedActorTrainer:
    flags = ("--algo.advantage.estimator", "group_norm", "--vllm.num_engines", str(len(actors)), *argv)
    args = arguments(*flags, "--vllm.sync_bucket_mb", "1")
    model = SimpleNamespace(model=SimpleNamespace(module=policy))
    return DeepspeedActorTrainer(
        SimpleNamespace(args=args, arguments=args), model, None, None, None, vllm_engines=actors
    )


@pytest.mark.parametrize("argv", TRANSPORT, ids=" ".join)
@pytest.mark.parametrize("checksum", [(), ("--vllm.sync_checksum",)], ids=["", "checksum"])
def test_every_engine_gets_the_policy(
    argv: tuple[str, ...], checksum: tuple[str, ...], policy: torch.nn.Module, actors: list[Actor]
) -> None:
    trainer = trainer_of(policy, actors, *argv, *checksum)
    for parameter in policy.parameters():
        parameter.data.normal_()
    for actor in actors:
        actor.asked.clear()
    trainer.broadcast_to_vllm(version=3)
    expected = [(name, p.bfloat16().flatten().tolist(), tuple(p.shape)) for name, p in policy.named_parameters()]
    for actor in actors:
        assert set(actor.asked) == {TRANSPORT[argv]}
        assert actor.engine("holds").result()[0] == expected
        assert actor.engine("version").result() == [3]


@pytest.mark.parametrize("argv", [(), ("--train.colocate_all",)], ids=["broadcast", "colocated"])
def test_the_first_transfer_to_an_engine_that_came_back_is_verified_by_checksums(
    argv: tuple[str, ...], policy: torch.nn.Module, actors: list[Actor]
) -> None:
    """It has lost the group that it had joined; its weights are those that it gets now."""
    trainer = trainer_of(policy, actors, *argv)
    trainer.broadcast_to_vllm()
    actors[1].engine("forget_group").result()
    trainer.rejoin_engines()
    for verified in (True, False):
        for actor in actors:
            actor.sync_checksums.clear()
        trainer.broadcast_to_vllm()
        assert [set(actor.sync_checksums) for actor in actors] == [{verified}] * 2
    expected = [(name, p.bfloat16().flatten().tolist(), tuple(p.shape)) for name, p in policy.named_parameters()]
    assert actors[1].engine("holds").result()[0] == expected


@pytest.mark.parametrize("argv", [(), ("--train.colocate_all",)], ids=["broadcast", "colocated"])
def test_weights_that_do_not_arrive_stop_the_run(
    argv: tuple[str, ...], policy: torch.nn.Module, actors: list[Actor]
) -> None:
    trainer = trainer_of(policy, actors, *argv, "--vllm.sync_checksum")
    trainer._parts_to_send = lambda: adapters.parts(policy)[:-1]  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match="1.bias was not loaded completely by worker 0 of vLLM engine 0"):
        trainer.broadcast_to_vllm()


def test_rays_transfer_is_upstreams(
    policy: torch.nn.Module, actors: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("_init_vllm_sync_group", "broadcast_to_vllm"):
        monkeypatch.setattr(ppo_actor.ActorPPOTrainer, name, lambda self, *args, name=name: called.append(name))
    trainer_of(policy, actors, "--vllm.sync_with_ray").broadcast_to_vllm()
    assert called == ["_init_vllm_sync_group", "broadcast_to_vllm"]


def test_experts_in_an_engine_on_a_gpu_stay_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own conversion after loading leaves them alone, unlike that for the kernels that it prefers on Blackwell;
    on a CPU, vLLM reloads them and has only one kernel."""
    from vllm import AsyncEngineArgs
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    started: dict[str, Any] = {}

    async def start(self: Any, **kwargs: Any) -> None:
        started.update(kwargs)
        self.executor, self.llm = None, SimpleNamespace(engine_core=None)

    monkeypatch.setattr(rollout_actor.StrictRolloutActor.__base__, "__init__", start)
    for platform in ("cpu", "cuda"):
        monkeypatch.setenv("OPENRLHF_GTPO_PLATFORM", platform)
        actor = object.__new__(rollout_actor.StrictRolloutActor)
        asyncio.run(actor.__init__())  # type: ignore[misc]
        assert ("moe_backend" in started) == (platform == "cuda")
    assert "moe_backend" in AsyncEngineArgs.__dataclass_fields__

    weights = torch.randn(2, 8, 4), torch.randn(2, 4, 4)  # gate and up, down: (experts, out, in)

    def kept(backend: str) -> list[bool]:
        kernel = unquantized.map_unquantized_backend(backend)
        moe = SimpleNamespace(is_act_and_mul=True)
        after = unquantized.convert_to_unquantized_kernel_format(kernel, moe, *weights)
        return [new.equal(sent) for new, sent in zip(after, weights)]

    assert kept(started["moe_backend"]) == [True, True] and kept("flashinfer_cutlass") == [False, True]


class Starting:
    """A handle like Ray's to an engine that is ready, or has died, or neither, after some seconds."""

    def __init__(self, after: float | None, failure: Exception | None = None) -> None:
        future: Future = Future()
        if after is not None:
            Timer(after, future.set_exception if failure else future.set_result, [failure]).start()
        self.__ray_ready__ = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: future))
        self._actor_id = b"\x01"


@pytest.mark.usefixtures("brief_waits")
def test_the_trainer_waits_for_an_engine_that_ray_starts_again() -> None:
    engine, again = Starting(0.0, ActorUnavailableError("it is being started", None)), Starting(0.1)
    answers = [engine.__ray_ready__, engine.__ray_ready__, again.__ray_ready__]
    engine.__ray_ready__ = SimpleNamespace(remote=lambda: answers.pop(0).remote())
    wait_for_engines([Starting(0.0), engine])
    assert not answers


def test_no_group_is_joined_before_every_engine_is_there(
    policy: torch.nn.Module, actors: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util.state, "get_log", None)
    died = RuntimeError("out of memory")
    with pytest.raises(TrainingStopped, match="out of memory"):
        trainer_of(policy, [actors[0], Starting(0.0, died)])  # type: ignore[list-item]
