"""The functions that ranks run in the tests of checkpoints: training steps, a save, and the steps after a load."""

import ctypes
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.checkpoints.folder import newest_whole
from openrlhf_gtpo.megatron.checkpoint import state as checkpoint_state
from openrlhf_gtpo.megatron.checkpoint import writer as checkpoint_writer
from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import trainer as trainer_module
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from tests.support.families import ragged_rows
from tests.support.logits_program import all_actions, on

MICRO_BATCHES = [[5, 9], [17], [3, 11], [8, 4]]
TOKENS = sum(length - 1 for lengths in MICRO_BATCHES for length in lengths)
CLIENT_STATE = {"global_step": 3, "episode": 1, "data_loader_state_dict": {"position": torch.arange(3)}, "kl": 0.1}


def make_trainer(
    source: str, layout: Layout, dtype: str = "float32", distributed: bool = True, lr: float = 5e-3, **more: Any
) -> Trainer:
    """A trainer whose learning rate falls at each step."""
    model = load_model(source, ModelOptions(layout=layout, dtype=getattr(torch, dtype)))
    options = OptimizerOptions(lr=lr, weight_decay=0.1, distributed=distributed, **more)
    return Trainer(model, options, lambda carrier: torch.optim.lr_scheduler.LambdaLR(carrier, lambda step: 0.8**step))


def train(trainer: Trainer, steps: range) -> list[tuple[float, float, float]]:
    """(mean loss per token, gradient norm, next learning rate) of each step; same micro-batches at every layout."""
    from megatron.core import parallel_state

    mine = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size()
    reports = []
    for step in steps:
        rows = [ragged_rows(151, lengths, seed=100 * step + i) for i, lengths in enumerate(MICRO_BATCHES)]

        def loss(index: int, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
            value = -log_probs.sum() / TOKENS
            return value, (mine + index * replicas, float(value.detach()))

        report = trainer.step([all_actions(part) for part in rows[mine::replicas]], loss)
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, report.kept)
        losses = dict(pair for kept in everyone for pair in kept)
        assert len(losses) == len(MICRO_BATCHES)
        reports.append((sum(losses[i] for i in sorted(losses)), report.grad_norm, report.next_lr))
    return reports


def die_while_writing(model: str, folder: str) -> None:
    """Save a good ``step1``, then be killed while ``step2`` is written in the background."""
    with on(Layout()):
        trainer = make_trainer(model, Layout())
        checkpoints = Checkpoints(folder, asynchronous=True)
        checkpoints.save("step1", trainer, {"tag": "step1"})
        checkpoints.finish()
        whole, items = checkpoint_writer._write_item, []

        def write(*args: object, **options: object) -> object:
            items.append(None)
            if len(items) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **options)

        checkpoint_writer._write_item = write
        checkpoints.save("step2", trainer, {"tag": "step2"})
        train(trainer, range(3))
        checkpoints.finish()


def save_and_go_on(source: str, layout: Layout, folder: str, dtype: str, distributed: bool) -> dict[str, Any]:
    """Take three steps, save in each way (a distributed optimizer in Megatron's own format too), and take two more
    steps while the asynchronous save is written."""
    with on(layout):
        trainer = make_trainer(source, layout, dtype, distributed)
        train(trainer, range(3))
        torch.rand(5 + torch.distributed.get_rank())  # each rank's generator is in another state
        Checkpoints(Path(folder) / "now", hf_source=source).save("step3", trainer, CLIENT_STATE)
        if distributed:
            with gathered_by_megatron():
                Checkpoints(Path(folder) / "whole", hf_source=source).save("step3", trainer, CLIENT_STATE)
        later = Checkpoints(Path(folder) / "later", asynchronous=True, hf_source=source)
        later.save("step3", trainer, CLIENT_STATE)
        draws = torch.rand(3).tolist()
        reports = train(trainer, range(3, 5))
        before = latest(later)
        later.finish()
        return {"reports": reports, "draws": draws, "before": before, "latest": latest(later)}


def latest(checkpoints: Checkpoints) -> str | None:
    path = newest_whole(checkpoints.folder)
    return None if path is None else path.name


def resume(source: str, layout: Layout, folders: list[str], dtype: str, distributed: bool) -> list[dict[str, Any]]:
    """Load what ``save_and_go_on`` saved into trainers with other weights, and take its later steps; after the first
    load, compare every state of a distributed optimizer with the checkpoint in Megatron's own format."""
    found = []
    with on(layout):
        for folder in folders:
            trainer = make_trainer(source, layout, dtype, distributed)
            client_state = Checkpoints(folder).load(trainer)
            loader = client_state["data_loader_state_dict"]
            loader["position"] = loader["position"].tolist()
            draws = torch.rand(3).tolist()
            answer = {"client_state": client_state, "draws": draws}
            if distributed and folder == folders[0]:
                answer["different"] = differences_as_whole(trainer, str(Path(folder).with_name("whole")))
            found.append(answer | {"reports": train(trainer, range(3, 5))})
    return found


def save_with_next_report(source: str, folder: str) -> None:
    """Save after two steps, with the report of the third; as ``tests/megatron/checkpoint_of_0.16.1.tar.xz`` was made
    from ``make_checkpoint(source, "llama", **SMALLEST)`` by megatron-core 0.16.1, on one rank."""
    with on(Layout()):
        report = train(make_trainer(source, Layout()), range(3))[2]
        trainer = make_trainer(source, Layout())
        train(trainer, range(2))
        Checkpoints(folder).save("step2", trainer, {"report": list(report)})


def next_report(source: str, folder: str) -> tuple[list[float], list[float]]:
    """The reports of the third step of ``save_with_next_report`` and of a run that goes on from its checkpoint."""
    with on(Layout()):
        trainer = make_trainer(source, Layout())
        saved = Checkpoints(folder).load(trainer)
        return saved["report"], list(train(trainer, range(2, 3))[0])


def resume_slower(source: str, folder: str, distributed: bool) -> tuple[list[list[float]], list[Any]]:
    """Learning rates before and after a step of three resumed runs: at the saved run's peak, at a hundredth of it, and
    at the same hundredth from a checkpoint of the slower run. Then the betas and eps with which the last one trained,
    whose command line has others than the first."""
    rates, other = [], {"betas": (0.5, 0.6), "eps": 1e-2}
    with on(Layout()):
        trainer = make_trainer(source, Layout(), distributed=distributed)
        train(trainer, range(2))
        Checkpoints(folder).save("step2", trainer, {})
        for lr, more in ((5e-3, {}), (5e-5, {}), (5e-5, other)):
            trainer = make_trainer(source, Layout(), lr=lr, distributed=distributed, **more)
            Checkpoints(folder).load(trainer)
            now = trainer.schedule_state()["lr_carrier"]["param_groups"][0]["lr"]
            rates.append([now, train(trainer, range(2, 3))[0][2]])
            if lr < 5e-3:
                Checkpoints(folder).save("step3", trainer, {})
        return rates, [(tuple(group["betas"]), group["eps"]) for group in trainer.optimizer.param_groups]


@contextmanager
def gathered_by_megatron() -> Iterator[None]:
    """Make saves gather the optimizer's states and write them whole, in Megatron's format, as earlier versions did."""
    ours, checkpoint_state.METADATA = checkpoint_state.METADATA, {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,
    }
    try:
        yield
    finally:
        checkpoint_state.METADATA = ours


def differences_as_whole(trainer: Trainer, whole: str) -> list[str]:
    """Names of tensors of the checkpoint ``whole`` that are not bit for bit what Megatron gathers from the trainer."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    again = f"{whole}-again"
    with gathered_by_megatron():
        Checkpoints(again).save("step3", trainer, {})
    loaded = (load_plain_tensors(str(Path(folder) / "step3")) for folder in (whole, again))
    exact, tensors = ({k: v for k, v in state.items() if isinstance(v, torch.Tensor)} for state in loaded)
    assert set(tensors) == set(exact) and any("exp_avg_sq" in key for key in exact)
    # Another TP pads the vocabulary to another size.
    common = {k: tuple(slice(min(n)) for n in zip(t.shape, exact[k].shape, strict=True)) for k, t in tensors.items()}
    return [key for key, part in common.items() if not torch.equal(tensors[key][part], exact[key][part])]


def boxes_of(shape: tuple[int, ...]) -> int:
    """The most boxes that any flat range of a tensor takes; checks that every range is its boxes, in order."""
    most = 0
    flat = torch.arange(math.prod(shape))
    for start in range(len(flat)):
        for stop in range(start, len(flat) + 1):
            boxes = list(checkpoint_state.split_into_boxes(shape, start, stop))
            parts = [
                flat.view(shape)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten()
                for _, offset, size in boxes
            ]
            assert [begin for begin, _, _ in boxes] == [int(part[0]) for part in parts]
            assert torch.equal(torch.cat(parts) if parts else flat[:0], flat[start:stop])
            most = max(most, len(boxes))
    return most


def peak_of_save(source: str, layout: Layout, folder: str) -> tuple[float, float]:
    """Bytes of this rank's memory (resident, as the kernel counts it) that asynchronous saves add at their peak, per
    parameter of its share of the model; and the bytes that they keep."""
    with on(layout):
        trainer = make_trainer(source, layout, "bfloat16")
        train(trainer, range(1))
        checkpoints = Checkpoints(folder, asynchronous=True)
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = _resident("VmRSS")
        checkpoints.save("step1", trainer, {})
        checkpoints.finish()
        parameters = sum(parameter.numel() for parameter in trainer.model.stage.parameters())
        kept = checkpoints._host._bytes.data_ptr(), checkpoints._host._bytes.numel()
        checkpoints.save("step1", trainer, {})
        checkpoints.finish()
        assert kept == (checkpoints._host._bytes.data_ptr(), checkpoints._host._bytes.numel())
        return (_resident("VmHWM") - before) / parameters, kept[1] / parameters


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def save_while_parameters_are_gathered_late(source: str, layout: Layout, folder: str) -> bool:
    """Save right after a step whose weights the replicas gather in the next forward pass; return True if the weights
    that were written are the optimizer's."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    config = trainer_module.DistributedDataParallelConfig
    trainer_module.DistributedDataParallelConfig = partial(config, overlap_grad_reduce=True, overlap_param_gather=True)
    try:
        with on(layout):
            trainer = make_trainer(source, layout)
            train(trainer, range(1))
            Checkpoints(folder).save("step1", trainer, {})
    finally:
        trainer_module.DistributedDataParallelConfig = config
    tensors = load_plain_tensors(str(Path(folder) / "step1"))
    prefix = "optimizer.state.param."
    exact = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    assert exact
    return all(torch.equal(tensors[key], tensor) for key, tensor in exact.items())


def refused(
    source: str,
    layout: Layout,
    folders: list[str],
    dtype: str = "float32",
    distributed: bool = True,
    tag: str | None = None,
) -> list[tuple[str, bool]]:
    """Load each folder; return what each load said, and whether all weights and optimizer states are as before."""
    found = []
    with on(layout):
        trainer = make_trainer(source, layout, dtype, distributed)
        train(trainer, range(1))
        before = _everything(trainer)
        for folder in folders:
            try:
                Checkpoints(folder).load(trainer, tag)
            except ValueError as error:
                message = f"{type(error).__name__}: {error}"
            else:
                message = "loaded"
            same = all(torch.equal(old, new) for old, new in zip(before, _everything(trainer), strict=True))
            steps = [state["step"].data_ptr() for state in _optimizer_states(trainer)]
            found.append((message, same and len(set(steps)) == len(steps)))
    return found


def fall_back(source: str, layout: Layout, folder: str) -> tuple[str, list[str], str]:
    """Save twice, damage the second and load; return what was loaded, what is in the folder then, and what a load says
    once the first has lost a file too."""
    with on(layout):
        trainer = make_trainer(source, layout)
        checkpoints = Checkpoints(folder)
        for tag in ("step1", "step2"):
            checkpoints.save(tag, trainer, {"tag": tag})
        first = torch.distributed.get_rank() == 0
        if first:
            shard = sorted(Path(folder, "step2").glob("*.distcp"))[-1]
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
            Path(folder, "latest").write_text("step7")
        torch.distributed.barrier()
        loaded = checkpoints.load(trainer)["tag"]
        there = sorted(path.name for path in Path(folder).iterdir())
        torch.distributed.barrier()
        if first:
            Path(folder, "step1", "common.pt").unlink()
        torch.distributed.barrier()
        try:
            checkpoints.load(trainer)
        except ValueError as error:
            return loaded, there, str(error)
        raise AssertionError("loaded")


def resume_and_save(source: str, folder: str, tag: str) -> str:
    """Load the latest checkpoint and save another one; return the tag in the state that was loaded."""
    with on(Layout()):
        trainer = make_trainer(source, Layout())
        checkpoints = Checkpoints(folder)
        loaded = checkpoints.load(trainer)["tag"]
        checkpoints.save(tag, trainer, {"tag": tag})
        return loaded


def failing_saves(source: str, layout: Layout, folder: str) -> list[Any]:
    """Make a good save, then a synchronous and an asynchronous one that the second rank cannot write, the latter
    followed by a good one; return the errors, and what is there after each."""
    with on(layout):
        trainer = make_trainer(source, layout)
        seen = []
        checkpoints = Checkpoints(folder, hf_source=source)
        checkpoints.save("step0", trainer, {"global_step": 0})
        whole = checkpoint_writer._write_item

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        for asynchronous in (False, True):
            if torch.distributed.get_rank() == 1:
                checkpoint_writer._write_item = fail
            checkpoints.asynchronous = asynchronous
            try:
                checkpoints.save("step1", trainer, {"global_step": 1})
                checkpoints._pending.write.join()
                checkpoint_writer._write_item = whole
                checkpoints.save("step2", trainer, {"global_step": 2})  # surfaces the failure of step1
            except OSError as error:
                seen.append(str(error))
            checkpoints.finish()
            torch.distributed.barrier()  # the first rank has cleared up
            seen.append((latest(checkpoints), sorted(path.name.split(".")[0] for path in Path(folder).iterdir())))
            torch.distributed.barrier()  # every rank has looked before the next save begins
        seen.append(checkpoints.load(trainer)["global_step"])
        checkpoints.save("step3", trainer, {"global_step": 3})
        while checkpoints._pending is not None:
            checkpoints.finish(wait=False)
        torch.distributed.barrier()
        seen.append((latest(checkpoints), sorted(path.name for path in Path(folder).iterdir())))
        return seen


def before_any_step(source: str, other: str, layout: Layout, folder: str, distributed: bool) -> list[Any]:
    """Save an optimizer that has not stepped yet and load it into another; return the first steps of both."""
    with on(layout):
        trainer = make_trainer(source, layout, distributed=distributed)
        Checkpoints(folder).save("step0", trainer, {})
        again = make_trainer(other, layout, distributed=distributed)
        Checkpoints(folder).load(again)
        return [train(one, range(2)) for one in (trainer, again)]


def weights_alone(source: str, other: str, layout: Layout, folder: str) -> bool:
    """Load a trainer's checkpoint into a model without a trainer; return True if their weights are equal."""
    with on(layout):
        trainer = make_trainer(source, layout)
        train(trainer, range(1))
        Checkpoints(folder).save("step1", trainer, {})
        model = load_model(other, ModelOptions(layout=layout, dtype=torch.float32))
        Checkpoints(folder).load(model)
        pairs = zip(_weights(model), _weights(trainer.model), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


def _weights(model: LoadedModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.stage.parameters()]


def _optimizer_states(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    inner = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    return [state for optimizer in inner for state in optimizer.state.values()]


def _everything(trainer: Trainer) -> list[torch.Tensor]:
    states = [tensor.clone() for state in _optimizer_states(trainer) for tensor in state.values()]
    return _weights(trainer.model) + states
