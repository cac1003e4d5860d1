"""Adapters on disk: a folder in PEFT's format, and the base model that they belong to."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from openrlhf_gtpo.lora import LoraOptions

ADAPTER = "adapter"  # the folder beside an exported model
RECIPE = "tensors:"  # prefix of a fingerprint: how it was made
_SAMPLE = 2**20  # bytes
_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # the names of experts' matrices


def description(options: LoraOptions, modules: list[str], base: Path) -> dict[str, Any]:
    """Describe a run's adapters for its checkpoints: another rank, scale, target or base would train something else.

    Args:
        modules: the names of the modules that have adapters.
        base: the folder of the model that they adapt.
    """
    targets = sorted({name.rsplit(".", 1)[-1] for name in modules})
    return {"rank": options.rank, "alpha": options.alpha, "targets": targets, "base": fingerprint(base)}


def refusal(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> str | None:
    """Say why a run with the :func:`description` ``own``, perhaps still incomplete, cannot resume from a checkpoint
    with ``saved``. The result continues a sentence that begins with the checkpoint; None if it can."""
    found = _difference(saved, own)
    return found and f"cannot be continued: {found}; give the same flags and model, or start a new run."


def without_comparison(saved: Mapping[str, Any]) -> str | None:
    """Say that :func:`refusal` cannot compare a checkpoint's base, because its fingerprint is older than RECIPE. The
    result continues a sentence that begins with the checkpoint; None if it can."""
    if saved["base"].startswith(RECIPE):
        return None
    return "has an older fingerprint of its base, which cannot be compared; make sure that the model is the same."


def _difference(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> str | None:
    if saved is None or own is None:
        return None if saved == own else f"it has {'all weights' if saved is None else 'only adapters'}"
    for name, flag in (("rank", "rank"), ("alpha", "alpha"), ("targets", "target_modules")):
        if name in own and saved[name] != own[name]:
            have, want = (" ".join(value) if name == "targets" else f"{value:g}" for value in (saved[name], own[name]))
            return f"it was written with --ds.lora.{flag} {have}, and this run has {want}"
    if "base" in own and own["base"] != saved["base"] and not without_comparison(saved):
        return "its adapters belong to other weights of the base model"
    return None


def fingerprint(folder: Path) -> str:
    """Hash the weights in a model's ``folder``: the tensors' names, types and shapes, and a page of every 4 MiB of
    their values, independent of the split into files. Of other files than safetensors, hash sizes, beginnings and
    ends. The result begins with RECIPE.

    Raises:
        OSError, ValueError: a weight file cannot be read.
    """
    digest, tensors = hashlib.sha256(), []
    for path in _weight_files(folder):
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                tensors += [(name, path, 8 + length, entry) for name, entry in header.items()]
            else:
                size = path.stat().st_size
                digest.update(b"%d " % size + file.read(_SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                digest.update(file.read(_SAMPLE))
    for name, path, start, entry in sorted(tensors, key=lambda tensor: tensor[0]):
        begin, end = entry["data_offsets"]
        digest.update(f"{name} {entry['dtype']} {entry['shape']} ".encode())
        with path.open("rb", buffering=0) as file:
            for place in range(begin, end, 4 * _SAMPLE):
                file.seek(start + place)
                digest.update(file.read(min(4096, end - place)))
    return RECIPE + digest.hexdigest()[:16]


def _weight_files(folder: Path) -> list[Path]:
    """The files that Transformers reads from a model's folder, which may also hold other tensors."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / shard for shard in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    return sorted(folder.glob("*.safetensors"))


def write_adapter(
    folder: Path,
    tensors: Mapping[str, tuple[Tensor, Tensor]],
    options: LoraOptions,
    base_name: str,
    is_mixture: bool = False,
) -> None:
    """Write adapters in PEFT's format, for ``PeftModel.from_pretrained``. The configuration has only the oldest
    fields, because PEFT before 0.15 rejects unknown ones.

    Args:
        folder: a new or existing folder.
        tensors: A (r, in) and B (out, r) by Hugging Face's module names, such as model.layers.0.mlp.up_proj.
        base_name: the model that they were trained on. A folder's path becomes absolute.
        is_mixture: the model has experts. PEFT (0.21.2) would take an up_proj outside of them for an expert's, so
            those are named as parameters, which PEFT reads from 0.17 on.

    Raises:
        OSError: the adapters cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    state, targets, parameters = {}, set(), []
    for name, pair in tensors.items():
        for letter, tensor in zip("AB", pair, strict=True):
            state[f"base_model.model.{name}.lora_{letter}.weight"] = tensor.cpu().contiguous()
        target = name.rsplit(".", 1)[-1]
        if is_mixture and target in _EXPERTS:
            parameters.append(f"{name}.weight")
        else:
            targets.add(target)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base_name) if os.path.isdir(base_name) else base_name,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
    }
    config |= {"target_parameters": parameters} if parameters else {}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
