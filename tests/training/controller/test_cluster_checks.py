"""A cluster or a disk on which a run would hang or die is refused, and a failure says what to do."""

import errno
import math
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from openrlhf_gtpo.checkpoints.files import DamagedError
from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.errors import Restartable, TrainingStopped, UsageError
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.controller import cluster_checks
from openrlhf_gtpo.training.controller.checkpoint_disk import check_room, checkpoint_bytes
from openrlhf_gtpo.training.controller.cluster_checks import (
    check_nodes,
    check_shared_folder,
)
from openrlhf_gtpo.training.controller.failures import explained


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
    with pytest.raises(UsageError, match="does not exist on node n2, but all 2 nodes must"):
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
    vars(args).update(vars(saving("none", tmp_path / "checkpoints", save_steps=math.inf)) | kept)
    fetched: list[tuple[str, bool]] = []
    monkeypatch.setattr(cluster_checks, "fetch_model", lambda name, nodes, weights: fetched.append((name, weights)))
    check_nodes(args)
    assert fetched == [("someone/something", True)]
    for flags in ({"save_steps": 5}, {"best_metric_key": ""}):  # the latter keeps the best evaluation's
        args.ckpt = saving("none", tmp_path / "checkpoints", **{"save_steps": math.inf} | flags).ckpt
        args.eval = SimpleNamespace(dataset="held_out", steps=4)
        with pytest.raises(UsageError, match="does not exist on node n2"):
            check_nodes(args)
        args.eval.steps = math.inf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        eval=SimpleNamespace(dataset=None, steps=math.inf),
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
    with pytest.raises(UsageError, match=f"--ckpt.path .* is on a disk that cannot {named}, which checkpoints need"):
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
    with pytest.raises(UsageError, match=r"0\.2 MB free, but one checkpoint of .* takes about 0\.2 MB; free some"):
        check(saving(model, tmp_path))
    for unchecked in (
        saving(model, tmp_path, save_steps=math.inf),
        saving(model, tmp_path, disable_ds=True),
        saving("Qwen/Qwen2.5-7B", tmp_path),
    ):
        check(unchecked)
    free = 15107 * 2 - 1
    with pytest.raises(
        UsageError, match=r"--ckpt.output_dir .*, but the trained model takes about 0\.0 MB; free some"
    ):
        check(saving(model, tmp_path, save_steps=math.inf))


def task_error(cause: BaseException) -> BaseException:
    remote = f"Traceback (most recent call last):\n  File ...\n{type(cause).__name__}: {cause}"
    return ray.exceptions.RayTaskError("save_checkpoint", remote, cause).as_instanceof_cause()


def test_a_checkpoint_without_which_a_run_cannot_go_on_ends_it_with_a_sentence() -> None:
    for cause in (DamagedError("t3 is damaged"), CheckpointWriteError("t3 could not be written")):
        with pytest.raises(TrainingStopped, match=f"^{cause}$"), explained():
            raise task_error(cause)


@pytest.mark.parametrize("kind", [UsageError, Restartable, TrainingStopped])
def test_how_an_actor_ended_a_run_is_its_own_sentence_and_kind(kind: type[Exception]) -> None:
    sentence = "--megatron.fp8 hybrid needs a Hopper GPU."
    with pytest.raises(kind) as caught, explained():
        raise task_error(kind(sentence))
    assert str(caught.value) == sentence and caught.type is kind
