"""These tests catch layers unlike the portable ones, FP8 that stays on or off when it must not, quantized weights that
outlive a step or an offload, and delayed scales that a resume forgets. They need a CUDA device with Transformer
Engine, which other hosts lack.
"""

import gc
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.fp8 import weights as fp8_weights
from openrlhf_gtpo.megatron.fp8.options import RECIPES, Fp8Options
from openrlhf_gtpo.megatron.model import policy as model
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from tests.support import fp8_program as program
from tests.support.checkpoint_program import train
from tests.support.families import make_checkpoint, ragged_rows
from tests.support.logits_program import all_actions, on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # every side of every matrix a multiple of 128
# 256 tokens: FP8 pads to multiples of 128, and products of other sizes may be summed in another order.
LENGTHS = [40, 150, 66]
TE = {recipe: Fp8Options("e4m3" if recipe == "blockwise" else "hybrid", recipe) for recipe in RECIPES}
IMMEDIATE = ("tensorwise", "blockwise")  # recipes whose scales come from the tensor itself
PRIMARY = {recipe: replace(TE[recipe], primary_weights=True) for recipe in IMMEDIATE}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints with different weights."""
    return [str(make_checkpoint(tmp_path_factory.mktemp(str(i)), "llama", seed=i, **WIDE)) for i in range(2)]


@pytest.fixture(scope="module")
def device_group() -> Iterator[None]:
    """This process as the only rank of an NCCL group."""
    torch.cuda.set_device(0)
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # a host without a network may not know its own name
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def alone(device_group: None) -> Iterator[None]:
    """Megatron's groups for one rank; afterwards Transformer Engine forgets all models' delayed scales and groups."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with on(Layout()):
        yield
        FP8GlobalStateManager.reset()


def rows(seed: int = 4) -> list[list[int]]:
    return ragged_rows(151, LENGTHS, seed=seed)


def values(source: str, fp8: Fp8Options | None = None, dtype: str = "bfloat16") -> Any:
    return program.values(program.load(source, Layout(), fp8, dtype), rows())


def trainer(source: str, fp8: Fp8Options | None) -> Trainer:
    return Trainer(program.load(source, Layout(), fp8, "bfloat16"), OptimizerOptions(lr=5e-3))


def distance(found: Any, expected: Any) -> float:
    """The relative L2 distance, over the whole arrays."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# Transformer Engine multiplies float32 in TF32.
@pytest.mark.parametrize("dtype, bound", [("float32", 3e-3), ("bfloat16", 1e-2)])
def test_its_layers_are_the_portable_ones(
    dtype: str, bound: float, sources: list[str], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = values(sources[0], dtype=dtype)
    monkeypatch.setattr(model, "has_transformer_engine", lambda: False)
    assert distance(found, values(sources[0], dtype=dtype)) < bound


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_close_to_bf16_and_can_be_switched_off(recipe: str, sources: list[str], alone: None) -> None:
    never = values(sources[0])
    fp8 = program.load(sources[0], Layout(), TE[recipe], "bfloat16")
    found = program.values(fp8, rows())
    assert 1e-4 < distance(found, never) < 0.1
    with fp8.fp8.high_precision():
        assert np.array_equal(program.values(fp8, rows()), never)
    assert np.array_equal(program.values(fp8, rows()), found)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_step_is_finite_and_changes_the_weights(recipe: str | None, sources: list[str], alone: None) -> None:
    trained = trainer(sources[0], TE[recipe] if recipe else None)
    before = [parameter.detach().clone() for parameter in trained.model.stage.parameters()]
    ((loss, norm, _),) = train(trained, range(1))
    assert np.isfinite([loss, norm]).all() and norm > 0
    for old, new in zip(before, trained.model.stage.parameters(), strict=True):
        assert new.isfinite().all() and not torch.equal(old, new)


@pytest.mark.parametrize("recipe", IMMEDIATE)
def test_quantised_weights_do_not_outlive_a_step(recipe: str, sources: list[str], alone: None) -> None:
    trained = trainer(sources[0], TE[recipe])
    program.values(trained.model, rows())  # as an old policy's pass, whose quantized weights stay
    train(trained, range(1))
    fresh = program.load(sources[1], Layout(), TE[recipe], "bfloat16")
    with torch.no_grad():
        for mine, theirs in zip(fresh.stage.parameters(), trained.model.stage.parameters(), strict=True):
            mine.copy_(theirs)
    assert np.array_equal(program.values(trained.model, rows()), program.values(fresh, rows()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_offloading_frees_quantised_weights_too(recipe: str, sources: list[str], alone: None) -> None:
    trained = trainer(sources[0], TE[recipe])
    train(trained, range(1))
    before = program.values(trained.model, rows())
    caches = [module._fp8_workspaces for module in trained.model.stage.modules() if hasattr(module, "_fp8_workspaces")]
    kept = [tensor for cache in caches for one in cache.values() for tensor in one.get_data_tensors()]
    size = sum(tensor.nbytes for tensor in kept if tensor is not None)
    assert size > 0
    del kept
    size += sum(parameter.nbytes for parameter in trained.model.stage.parameters())
    mover = Offload(trained)
    mover.optimizer()
    held = torch.cuda.memory_allocated()
    mover.parameters()
    assert not any(caches) and held - torch.cuda.memory_allocated() >= size
    assert all(host._bytes.is_pinned() for host in mover._host.values())
    mover.restore()
    assert np.array_equal(program.values(trained.model, rows()), before)


@pytest.mark.parametrize("recipe", IMMEDIATE)
def test_fp8_primary_weights_train_as_bf16_weights_do(recipe: str, sources: list[str], alone: None) -> None:
    """Float32 weights are rounded to BF16 before they are rounded to FP8; kernels may still sum in another order."""
    found = []
    for fp8 in (TE[recipe], PRIMARY[recipe]):
        trained = trainer(sources[0], fp8)
        before = program.values(trained.model, rows())
        masters = [parameter.main_param.clone() for parameter in trained.model.stage.parameters()]
        found.append((before, masters, train(trained, range(3)), program.values(trained.model, rows())))
    (bf16, masters, reports, after), (primary, started, same, then) = found
    assert np.array_equal(primary, bf16) and all(map(torch.equal, started, masters))
    for (loss, norm, _), (expected, expected_norm, _) in zip(same, reports, strict=True):
        assert loss == pytest.approx(expected, rel=1e-2) and norm == pytest.approx(expected_norm, rel=0.1)
    assert distance(then, after) < 0.02 and not np.array_equal(then, primary)


@pytest.mark.parametrize("recipe", IMMEDIATE)
def test_fp8_primary_weights_are_moved_and_resumed(
    recipe: str, sources: list[str], tmp_path: Path, alone: None
) -> None:
    first = trainer(sources[0], PRIMARY[recipe])
    train(first, range(2))
    Checkpoints(tmp_path, hf_source=sources[0]).save("step2", first, {})
    before = program.values(first.model, rows())
    mover = Offload(first)
    mover.optimizer()
    held = torch.cuda.memory_allocated()
    size = sum(part.nbytes for p in first.model.stage.parameters() for part in fp8_weights.memory_of(p))
    mover.parameters()
    assert held - torch.cuda.memory_allocated() >= size
    mover.restore()
    assert np.array_equal(program.values(first.model, rows()), before)
    twin = trainer(sources[1], PRIMARY[recipe])
    Checkpoints(tmp_path).load(twin)
    assert np.array_equal(program.values(twin.model, rows()), before)
    (loss, norm, _), (expected, expected_norm, _) = train(twin, range(2, 3))[0], train(first, range(2, 3))[0]
    assert loss == pytest.approx(expected, rel=1e-3) and norm == pytest.approx(expected_norm, rel=1e-2)


def test_delayed_scales_are_resumed(sources: list[str], tmp_path: Path, alone: None) -> None:
    first = trainer(sources[0], TE["delayed"])
    train(first, range(2))
    Checkpoints(tmp_path, hf_source=sources[0]).save("step2", first, {})
    twin = trainer(sources[1], TE["delayed"])
    Checkpoints(tmp_path).load(twin)
    assert np.array_equal(program.values(twin.model, rows()), program.values(first.model, rows()))
    for (loss, norm, _), (expected, expected_norm, _) in zip(
        train(twin, range(2, 4)), train(first, range(2, 4)), strict=True
    ):
        assert loss == pytest.approx(expected, rel=0.02) and norm == pytest.approx(expected_norm, rel=0.2)


def test_what_is_offloaded_is_free_for_an_engine(sources: list[str], tmp_path: Path, alone: None) -> None:
    """Checks what PyTorch has reserved, which an engine finds taken, at a colocated start and after a step."""
    train(trainer(sources[0], None), range(1))  # allocates the libraries' workspaces, which stay
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128}
    source = str(make_checkpoint(tmp_path, "llama", **wide))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    trained = trainer(source, None)
    size = sum(parameter.nbytes for parameter in trained.model.stage.parameters())  # gradients take twice as much
    mover = Offload(trained)
    for step in range(2):
        mover.optimizer()
        assert torch.cuda.memory_reserved() - before < 2 * size
        mover.parameters()
        assert torch.cuda.memory_reserved() - before < 0.5 * size
        mover.restore()
        train(trained, range(step, step + 1))


@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_full_determinism_reaches_attention(
    recipe: str | None, sources: list[str], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a sequence of many blocks: other kernels sum gradients of queries in the order in which blocks finish."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # read when a layer is built
    found = []
    for _ in range(2):
        trained = trainer(sources[0], TE[recipe] if recipe else None)
        rows = all_actions([ragged_rows(151, [4096], seed=5)[0]])
        norm = trained.step([rows], lambda index, log_probs, entropy: (-log_probs.mean(), None)).grad_norm
        found.append((norm, [parameter.detach().clone() for parameter in trained.model.stage.parameters()]))
    (norm, weights), (same_norm, same) = found
    assert norm == same_norm and all(map(torch.equal, weights, same))
