"""A cluster or a disk on which a run would hang or die is refused, and a failure says what to do."""

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoConfig
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo import platform
from openrlhf_gtpo.checkpoints.files import DamagedError
from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.errors import Restartable, TrainingStopped, UsageError
from openrlhf_gtpo.model_shape import PRESETS
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.controller import cluster_checks
from openrlhf_gtpo.training.controller.checkpoint_disk import ahead_bytes, check_room, checkpoint_bytes
from openrlhf_gtpo.training.controller.cluster_checks import (
    check_gpus,
    check_memory,
    check_nodes,
    check_shared_folder,
    free_memory,
)
from openrlhf_gtpo.training.controller.failures import explained, raise_if_lost, write_errors
from openrlhf_gtpo.training.host import EngineGroup
from openrlhf_gtpo.training.rollout.packed import pack
from openrlhf_gtpo.training.rows import Row


def run_of(actor: int, engines: int, colocated: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        actor=SimpleNamespace(
            num_nodes=2, num_gpus_per_node=actor, model_name_or_path="someone/something", backend="megatron"
        ),
        vllm=SimpleNamespace(num_engines=engines, tensor_parallel_size=2, others=()),
        train=SimpleNamespace(
            colocate_all=colocated, colocate_actor_ref=False, colocate_critic_reward=False, async_enable=False
        ),
        algo=SimpleNamespace(kl=SimpleNamespace(init_coef=0.0)),
        critic=SimpleNamespace(model_name_or_path=None),
        reward=SimpleNamespace(remote_url=["reward.py"]),
    )


def node(name: str, gpus: int, cpus: int = 99) -> dict[str, Any]:
    resources = {"GPU": gpus, "CPU": cpus}
    return {
        "NodeName": name,
        "NodeID": name.encode().ljust(28, b"\0").hex(),
        "NodeManagerAddress": "10.0.0.1",
        "Resources": resources,
    }


@pytest.mark.parametrize(
    ("args", "needed", "groups"),
    [
        (run_of(4, 4), 16, "actor 8, engines 8"),
        (run_of(4, 4, True), 8, "actor 8"),
        (run_of(2, 0), 4, "actor 4"),
    ],
)
def test_too_few_gpus_are_refused_with_each_nodes_share(args: SimpleNamespace, needed: int, groups: str) -> None:
    half = needed // 2
    check_gpus(args, [node("n1", half), node("n2", half)])
    with pytest.raises(UsageError) as refusal:
        check_gpus(args, [node("n1", half), node("n2", half - 1)])
    there = f"the Ray cluster has {needed - 1} (n1: {half}, n2: {half - 1})"
    assert f"needs {needed} GPUs ({groups}), and {there}" in str(refusal.value)
    check_gpus(args, [node("n1", half), node("n1", half)])  # two of Ray's nodes on one host have its name


@pytest.mark.parametrize(
    ("cpus", "guides", "fits"),
    [((8, 9), 0, True), ((8, 8), 0, False), ((9, 7), 0, False), ((1, 0), 0, False), ((99, 7), 0, False)]
    + [((8, 8), 2, True), ((8, 7), 2, False)],
)
def test_too_few_cpus_beside_the_gpus_are_refused(cpus: tuple[int, int], guides: int, fits: bool) -> None:
    """The controller needs one to start, which the guide's engines, started by it, may have afterwards."""
    args = run_of(4, 4 - guides // 2)
    args.vllm.others = (EngineGroup("--algo.guide", "guide", guides // 2, 2, 0.9, "serve it elsewhere"),)
    nodes = [node(f"n{number}", 8, count) for number, count in enumerate(cpus)]
    if fits:
        check_gpus(args, nodes)
        return
    with pytest.raises(UsageError, match=rf"CPUs, one on the node of each of its 16 GPUs .*n1: {cpus[1]} for 8\)"):
        check_gpus(args, nodes)


@pytest.mark.parametrize("colocated", [True, False])
def test_engines_for_which_no_node_has_enough_gpus_are_refused(
    colocated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cuda")
    args = run_of(8, 2, colocated)
    args.vllm.tensor_parallel_size = 8
    more = 0 if colocated else 16
    check_gpus(args, [node("n1", 8 + more), node("n2", 8 + more)])
    check_gpus(args, [node("n1", 8 + more), node("n2", 9 + more), node("head", 0)])
    with pytest.raises(UsageError) as refusal:
        check_gpus(args, [node(f"n{number}", 4) for number in range(8)])
    said = str(refusal.value)
    assert "--vllm.tensor_parallel_size 8 for --vllm.num_engines 2 would cross nodes, which have n0: 4, n1: 4" in said
    assert said.endswith("n7: 4 GPUs; sizes that fit, with as many more engines: 1, 2, 4.")


def on_nodes(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    """Have ``answer``, which gets the node's name too, stand for functions that are called on a node."""

    def remote(scheduling_strategy: Any, **options: Any) -> Any:
        name = bytes.fromhex(scheduling_strategy.node_id).rstrip(b"\0").decode()
        return lambda function: SimpleNamespace(remote=partial(answer, name, function))

    monkeypatch.setattr(ray, "remote", remote)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder as node n2 sees it; n1 sees what the driver sees."""
    folder = tmp_path / "n2"

    def look(node: str, function: Any, token: str, patience: float) -> str | None:
        return function(token if node == "n1" else str(folder / Path(token).name), 0)

    on_nodes(monkeypatch, look)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return folder


def test_a_folder_that_one_node_does_not_share_is_refused_and_left_clean(tmp_path: Path, elsewhere: Path) -> None:
    nodes = [node("n1", 1), node("n2", 1)]
    run = tmp_path / "checkpoints"
    with pytest.raises(UsageError, match="does not exist on node n2, and all 2 nodes must"):
        check_shared_folder(str(run), nodes)
    elsewhere.mkdir()
    with pytest.raises(UsageError, match=f"--ckpt.path {run} is another folder on node n2"):
        check_shared_folder(str(run), nodes)
    assert list(run.iterdir()) == []


def test_a_shared_folder_passes(tmp_path: Path, elsewhere: Path) -> None:
    elsewhere.symlink_to(tmp_path / "checkpoints")
    check_shared_folder(str(tmp_path / "checkpoints"), [node("n1", 1), node("n2", 1)])


def test_only_a_run_that_saves_needs_a_shared_folder(tmp_path: Path, elsewhere: Path, monkeypatch) -> None:
    nodes = [node("n1", 2) | {"Alive": True}, node("n2", 2) | {"Alive": True}]
    monkeypatch.setattr(cluster_checks.ray, "nodes", lambda: nodes)
    args = run_of(1, 1)
    kept = {"actor": args.actor, "train": args.train}
    vars(args).update(vars(saving("none", tmp_path / "checkpoints", save_steps=-1)) | kept)
    fetched: list[tuple[str, bool]] = []
    monkeypatch.setattr(cluster_checks, "fetch_model", lambda name, nodes, weights: fetched.append((name, weights)))
    check_nodes(args)
    assert fetched == [("someone/something", True)]
    for flags in ({"save_steps": 5}, {"best_metric_key": ""}):  # the latter keeps the best evaluation's
        args.ckpt = saving("none", tmp_path / "checkpoints", **{"save_steps": -1} | flags).ckpt
        args.eval = SimpleNamespace(dataset="held_out", steps=4)
        with pytest.raises(UsageError, match="does not exist on node n2"):
            check_nodes(args)
        args.eval.steps = -1


@pytest.mark.parametrize(
    ("kind", "memory", "size", "said"),
    [
        ("cuda", 40e9, 1, "15.2 GB of weights for each of its 1 GPUs, and --algo.guide.gpu_memory_utilization 0.3"),
        ("cuda", 40e9, 2, None),
        ("cpu", 14e9, 1, "15.2 GB of weights for each of its 1 GPUs, and a node has 14.0 GB of memory left"),
        ("cpu", 40e9, 1, None),
    ],
)
def test_a_guide_that_is_larger_than_memory_is_refused(
    kind: str, memory: float, size: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2.5-7B has 7.6e9 parameters, which the planner gives 2 bytes each; a quantized model is not checked."""

    def ask(node: str, function: Any) -> int:
        assert function.__name__ == {"cuda": "gpu_memory", "cpu": "free_memory"}[kind]
        return int(memory)

    monkeypatch.setenv(platform.PLATFORM_VARIABLE, kind)
    on_nodes(monkeypatch, ask)
    monkeypatch.setattr(cluster_checks.ray, "get", lambda answers: answers)
    guide = EngineGroup("--algo.guide", str(tmp_path), 1, size, 0.3, "serve it elsewhere")
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["7b"]))
    if said is None:
        check_memory(guide, [node("n1", 2)])
        return
    with pytest.raises(UsageError, match=re.escape(said)):
        check_memory(guide, [node("n1", 2)])
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["7b"] | {"quantization_config": {"bits": 4}}))
    check_memory(guide, [node("n1", 2)])


def test_this_hosts_memory_is_known() -> None:
    assert 1e8 < free_memory() < 1e13


def test_a_node_that_cannot_look_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_nodes(monkeypatch, lambda *of: None)

    def died(reference: Any, timeout: float) -> None:
        raise ray.exceptions.RayTaskError("look_for", "traceback", ImportError("no module named openrlhf_gtpo"))

    monkeypatch.setattr(ray, "get", died)
    with pytest.raises(UsageError, match="could not be checked .*on node n1"):
        check_shared_folder(str(tmp_path), [node("n1", 1), node("n2", 1)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    save_file({"a": torch.zeros(300, 50), "b": torch.zeros(7)}, folder / "model-1.safetensors")
    save_file({"c": torch.zeros(100)}, folder / "model-2.safetensors")
    return folder


def saving(model: Path | str, path: Path, **ckpt: Any) -> SimpleNamespace:
    values = {"path": str(path), "output_dir": str(path), "save_steps": 5, "stop_file": None, "load_enable": False}
    values |= {"disable_ds": False, "best_metric_key": "none"} | ckpt
    return SimpleNamespace(
        ckpt=SimpleNamespace(**values),
        actor=SimpleNamespace(model_name_or_path=str(model), lora=None),
        eval=SimpleNamespace(dataset=None, steps=-1),
        logger=SimpleNamespace(tensorboard_dir=None),
        train=SimpleNamespace(async_enable=False, partial_rollout_enable=False, max_staleness=1),
        rollout=SimpleNamespace(batch_size=8, n_samples_per_prompt=4, replays_routes=False),
        data=SimpleNamespace(max_len=100),
    )


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("rename", r"rename a folder \(Operation not supported\)"),
        ("replace", r"replace a file \(Operation not supported\)"),
        ("fsync", r"sync a folder \(Operation not supported\)"),
    ],
)
def test_a_disk_that_cannot_do_what_a_checkpoint_needs_is_refused_before_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, named: str
) -> None:
    """As object stores and some network disks cannot; a run without checkpoints needs none of it."""

    def refuse(path: Any, *rest: Any) -> None:
        if function == "fsync" and not stat.S_ISDIR(os.fstat(path).st_mode):
            return
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(path))

    def check(**ckpt: Any) -> None:
        check_room(saving(model, tmp_path / "not" / "yet", **ckpt), Model(str(model), "--actor.model_name_or_path"))

    check()
    monkeypatch.setattr(os, function, refuse)
    check(disable_ds=True)
    with pytest.raises(UsageError, match=f"--ckpt.path .* is on a disk that cannot {named}, as a checkpoint needs"):
        check()
    assert not list(tmp_path.iterdir())


def test_a_disk_on_which_no_checkpoint_fits_is_refused(model, tmp_path, monkeypatch) -> None:
    def check(args: SimpleNamespace) -> None:
        check_room(args, Model(args.actor.model_name_or_path, "--actor.model_name_or_path"))

    assert checkpoint_bytes(15107) == 15107 * 14
    free = 15107 * 14
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    check(saving(model, tmp_path / "not" / "yet"))
    free -= 1
    with pytest.raises(UsageError, match=r"0\.2 MB free, and one checkpoint of .* takes about 0\.2 MB; free some"):
        check(saving(model, tmp_path))
    for unchecked in (
        saving(model, tmp_path, save_steps=-1),
        saving(model, tmp_path, disable_ds=True),
        saving("Qwen/Qwen2.5-7B", tmp_path),
    ):
        check(unchecked)
    free = 15107 * 2 - 1
    with pytest.raises(
        UsageError, match=r"--ckpt.output_dir .*, and the trained model takes about 0\.0 MB; free some"
    ):
        check(saving(model, tmp_path, save_steps=-1))


def packed_bytes(tokens: int) -> int:
    """What a row with all that an asynchronous run's has takes in a checkpoint."""
    floats, ints = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32)
    values = TokenValues(floats, floats)
    return len(pack([Row("a", None, 0, ints, ints > 0, floats, 1.0, None, values=values, versions=ints)]))


def test_rows_that_were_sampled_ahead_need_room_too(model, tmp_path, monkeypatch) -> None:
    args = saving(model, tmp_path)
    policy = Model(args.actor.model_name_or_path, "--actor.model_name_or_path")
    config = {"model_type": "qwen3_moe", "num_experts": 300, "num_experts_per_tok": 8, "num_hidden_layers": 2}
    assert ahead_bytes(args, policy) == 0
    args.train.async_enable = True
    a_token = (packed_bytes(1000) - packed_bytes(0)) // 1000
    assert ahead_bytes(args, policy) == 8 * 4 * 100 * a_token
    free = 15107 * 14 + ahead_bytes(args, policy) - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(UsageError, match="one checkpoint of .* free some"):
        check_room(args, policy)
    args.train.partial_rollout_enable = True
    for staleness, steps in ((0, 1), (4, 3), (1, 2)):
        args.train.max_staleness = staleness
        assert ahead_bytes(args, policy) == steps * 8 * 4 * 100 * a_token
    args.rollout.replays_routes = True
    for experts, size in ((128, 1), (300, 2)):
        policy.config = AutoConfig.for_model(**config | {"num_experts": experts})
        assert ahead_bytes(args, policy) == 2 * 8 * 4 * 100 * (a_token + 2 * 8 * size)


def task_error(cause: BaseException) -> BaseException:
    remote = f"Traceback (most recent call last):\n  File ...\n{type(cause).__name__}: {cause}"
    return ray.exceptions.RayTaskError("save_checkpoint", remote, cause).as_instanceof_cause()


def test_a_checkpoint_that_cannot_be_written_has_its_reason_and_the_room(tmp_path: Path) -> None:
    why = "The checkpoint X could not be written: [Errno 28] No space left on device; earlier ones are as they were."
    with pytest.raises(CheckpointWriteError) as raised, write_errors(SimpleNamespace(path=str(tmp_path))):
        raise task_error(CheckpointWriteError(why))
    assert re.fullmatch(re.escape(why) + r" The disk of --ckpt\.path has [0-9.]+ [GM]B free\.", str(raised.value))


def test_other_failures_stay_what_they_are(tmp_path: Path) -> None:
    for cause in (RuntimeError("shapes do not match"), FileNotFoundError("label.txt")):
        with pytest.raises(ray.exceptions.RayTaskError, match=str(cause)):
            with write_errors(SimpleNamespace(path=str(tmp_path))):
                raise task_error(cause)


def test_a_checkpoint_without_which_a_run_cannot_go_on_ends_it_with_a_sentence() -> None:
    for cause in (DamagedError("t3 is damaged"), CheckpointWriteError("t3 could not be written")):
        with pytest.raises(TrainingStopped, match=f"^{cause}$"), explained():
            raise task_error(cause)


def test_a_dead_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("n1", 1) | {"Alive": True}, node("n2", 1) | {"Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(Restartable, match=r"the node n2 \(10\.0\.0\.1\) left the Ray cluster"):
        raise_if_lost(task_error(ray.exceptions.ActorDiedError()))
    nodes.pop()
    died = ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError("low on memory")
    for error in (*died, task_error(EngineDeadError())):  # in the last, vLLM's process died, not its actor
        with pytest.raises(Restartable, match="a process of the run died"):
            raise_if_lost(error)
    with pytest.raises(Restartable, match="--train.max_tokens_per_gpu .Megatron.* or --train.micro_batch_size"):
        raise_if_lost(task_error(died[1]))
    with pytest.raises(TrainingStopped, match="A GPU is full: CUDA out of memory.*--train.max_tokens_per_gpu"):
        with explained():
            raise task_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    raise_if_lost(task_error(ValueError("a bug")))


@pytest.mark.parametrize("kind", [UsageError, Restartable, TrainingStopped])
def test_how_an_actor_ended_a_run_is_its_own_sentence_and_kind(kind: type[Exception]) -> None:
    sentence = "--megatron.fp8 hybrid needs a Hopper GPU."
    with pytest.raises(kind) as caught, explained():
        raise task_error(kind(sentence))
    assert str(caught.value) == sentence and caught.type is kind
