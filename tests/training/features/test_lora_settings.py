"""These tests catch adapters that are trained with something that they do not go with."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.training import run
from tests.support.command_lines import argv_of, assert_names
from tests.support.families import SHALLOW, make_checkpoint
from tests.training.checks.conftest import command, model  # noqa: F401  # fixtures

LORA: dict[str, Any] = {"--ds.lora.rank": 8, "--actor.adam.lr": 1e-5}


@pytest.mark.parametrize(
    ("backend", "targets", "names"),
    [
        ("deepspeed", "all-linear", None),
        ("deepspeed", ["q_proj", "o_proj"], None),
        ("deepspeed", "down_proj", "--ds.lora.target_modules down_proj experts k_proj o_proj q_proj v_proj"),
        ("deepspeed", ["q_proj", "gate"], "--ds.lora.target_modules gate routers"),
        ("megatron", "all-linear", "--ds.lora.rank mixtures --actor.backend megatron"),
    ],
)
def test_of_a_mixture_what_is_not_routed_is_adapted(
    backend: str,
    targets: Any,
    names: str | None,
    refused: Callable[..., str],
    command: dict[str, Any],  # noqa: F811
    model: Path,  # noqa: F811
    tmp_path: Path,
    no_engine: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mixture = make_checkpoint(tmp_path / "moe", "qwen3_moe", 96, num_experts=4, moe_intermediate_size=32, **SHALLOW)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, mixture)
    changes = {"--actor.model_name_or_path": mixture, "--actor.backend": backend, "--ds.lora.target_modules": targets}
    if names:
        assert_names(refused(LORA | changes), names)
    else:
        run.check(run.parse(argv_of(command | LORA | changes)))
        assert "Experts and routers of a mixture of experts get no adapters" in capsys.readouterr().err


def test_megatron_adapts_no_matrix_of_several(
    refused: Callable[..., str], model: Path, tmp_path: Path, no_engine: None  # noqa: F811
) -> None:
    stacked = make_checkpoint(tmp_path / "phi3", "phi3", 96, **SHALLOW)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, stacked)
    changes = {"--actor.model_name_or_path": stacked, "--actor.backend": "megatron"}
    assert_names(refused(LORA | changes), "--ds.lora.rank phi3 --actor.backend deepspeed")


def test_another_base_is_refused_before_anything_starts(
    refused: Callable[..., str],
    command: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from openrlhf_gtpo.checkpoints.folder import begin, publish, write_manifest
    from openrlhf_gtpo.lora.folder import RECIPE, fingerprint
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.features.lora.check import check_lora

    folder, resume = tmp_path / "checkpoints" / "_actor", LORA | {"--ckpt.load_enable": True}
    own = {"rank": 8, "alpha": 16, "targets": ["q_proj"], "base": fingerprint(command["--actor.model_name_or_path"])}
    resume |= {"--ckpt.path": folder.parent, "--ckpt.load_tag": "global_step1"}
    for step, base in enumerate((f"{RECIPE}another", "0123456789abcdef"), 1):  # the second of an older version
        temporary = begin(folder / f"global_step{step}", whole_folder=True)
        write_manifest(temporary, {"lora": own | {"base": base}}, {})
        publish(temporary, folder / f"global_step{step}")
    assert_names(refused(resume), "--ckpt.load_enable other weights of the base model")
    for backend in ("deepspeed", "megatron"):
        older = resume | {"--ckpt.load_tag": "global_step2", "--actor.backend": backend}
        args = run.parse(argv_of(command | older))
        capsys.readouterr()
        check_lora(args, Model(args.actor.model_name_or_path, "--actor.model_name_or_path"))
        assert "global_step2 has an older fingerprint of its base" in capsys.readouterr().err
