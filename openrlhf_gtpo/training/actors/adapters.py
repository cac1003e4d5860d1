"""Low-rank adapters in a policy on DeepSpeed: a PEFT model inside the trainer, Hugging Face's names outside.

OpenRLHF 0.11.2 sends PEFT's names to vLLM, which knows none of them
(https://github.com/OpenRLHF/OpenRLHF/issues/1349). Here a tensor that leaves the trainer is the base with its adapter
merged into it; the base itself never changes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from openrlhf.utils.utils import convert_to_torch_dtype
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import transformers_weight_conversion
from torch import Tensor
from torch.nn import Module, Parameter

from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import MANIFEST, read_manifest
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.lora import ALL_LINEAR, LoraOptions
from openrlhf_gtpo.lora.folder import ADAPTER, description, refusal, write_adapter
from openrlhf_gtpo.lora.init import initial_a
from openrlhf_gtpo.lora.merge import merge
from openrlhf_gtpo.platform.files import model_folder

_ADAPTER = "default"  # PEFT's name of the one that it is given
_PEFT, _BASE = "base_model.model.", ".base_layer."  # what PEFT adds to names

# Makes sharded parameters whole while the context lasts.
Gather = Callable[[list[Parameter]], AbstractContextManager]


class Adapter(NamedTuple):
    """The trained factors of one matrix: A (r, in) and B (out, r)."""

    a: Parameter
    b: Parameter
    scale: float


class Part(NamedTuple):
    """A tensor of the policy as engines and exports know it.

    Fields:
        name: Hugging Face's name.
        weight: the base's weight.
        adapter: the adapter on top of it, if any.
    """

    name: str
    weight: Parameter
    adapter: Adapter | None

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters to gather before :meth:`value`."""
        return [self.weight, *self.adapter[:2]] if self.adapter else [self.weight]

    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor; with an adapter, merged and in ``dtype`` if given. Its parameters must be gathered."""
        if self.adapter is None:
            return self.weight.data
        a, b, scale = self.adapter
        return merge(self.weight.data, a.data, b.data, scale, self.name, dtype=dtype)


def parts(model: Module) -> list[Part]:
    """List all tensors of a policy, with or without adapters, in the model's order; a tied head appears once."""
    if not isinstance(model, PeftModel):
        return [Part(name, parameter, None) for name, parameter in model.named_parameters()]
    adapted = {f"{_hf_name(name)}.weight": layer for name, layer in _layers(model)}
    found = []
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            continue
        layer = adapted.get(hf_name := _hf_name(name))
        found.append(Part(hf_name, parameter, _adapter(layer) if layer else None))
    return found


def _layers(model: Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _adapter(layer: Any) -> Adapter:
    pair = (layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight)
    return Adapter(*pair, layer.scaling[_ADAPTER])


def _hf_name(name: str) -> str:
    return name.removeprefix(_PEFT).replace(_BASE, ".")


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def adapt(model: Any, config: LoraConfig) -> PeftModel:
    """Like PEFT's ``get_peft_model``, but adapt only linear layers that are not frozen.

    PEFT 0.21.2 also adapts a mixture's fused experts, which have no ``.weight`` to merge into, and Conv1D, whose
    weight is transposed. It also takes gate_proj, up_proj and down_proj of a mixture for its experts
    (``convert_peft_…``), even in the full names of other layers. So its conversion is switched off here.

    Raises:
        UsageError: a target names no such layer, or the model has none.
    """
    targets = {config.target_modules} if isinstance(config.target_modules, str) else {*config.target_modules}
    options, every = (LoraOptions(config.r, config.lora_alpha, names) for names in (tuple(targets), ALL_LINEAR))
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and module.weight.requires_grad
        and module is not head
        and every.adapts(name)
    ]
    config.target_modules = [name for name in linear if options.adapts(name)]
    missing = targets - {*ALL_LINEAR} - {name.rsplit(".", 1)[-1] for name in config.target_modules}
    if missing or not config.target_modules:
        raise UsageError(
            f"--ds.lora.target_modules {' '.join(sorted(missing or targets))}: no such linear layer can be adapted; "
            f"{', '.join(sorted({name.rsplit('.', 1)[-1] for name in linear})) or 'none of this model'} can."
        )
    convert = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        return get_peft_model(model, config)
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = convert


def start(model: Module, param_dtype: str, seed: int) -> None:
    """Give new adapters the model's dtype (PEFT's depends on the ZeRO stage) and the initial A of both backends. Call
    it before DeepSpeed takes the model. :func:`parts` must be able to merge every tensor that is trained."""
    merged = {id(parameter) for part in parts(model) if part.adapter for parameter in part.adapter[:2]}
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or id(parameter) in merged, f"{name} would be trained but never merged"
    for name, layer in _layers(model):
        for parameter in _adapter(layer)[:2]:
            parameter.data = parameter.data.to(convert_to_torch_dtype(param_dtype))
        a, weight = layer.lora_A[_ADAPTER].weight, f"{_hf_name(name)}.weight"
        a.data.copy_(initial_a(a.shape[0], a.shape[1], weight, seed))


def trained_names(model: Module) -> set[str]:
    """Keys of the trained parameters in a state dict."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def described(model: Module, options: LoraOptions, source: str) -> dict[str, Any]:
    """See :func:`description`; ``source`` is the base's folder or its name on the Hub."""
    return description(options, [_hf_name(name) for name, _ in _layers(model)], model_folder(source, weights=True))


def check_same(path: Path, own: dict[str, Any] | None) -> None:
    """Raise if the adapters of the checkpoint ``path`` do not match the run's.

    Raises:
        CheckpointError: they do not, or it cannot be read.
    """
    saved = read_manifest(path).get("lora") if (path / MANIFEST).is_file() else None
    if found := refusal(saved, own):
        raise CheckpointError(f"{path} {found}")


def save(model: Any, gather: Gather, folder: Path, options: LoraOptions, source: str, is_first: bool) -> None:
    """Write the policy with merged adapters to ``folder``, and the adapters alone to its ``adapter/``. Collective; the
    rank that ``is_first`` writes.

    Raises:
        OSError: it cannot be written.
    """
    whole: dict[str, Tensor] = {}
    adapters: dict[str, tuple[Tensor, Tensor]] = {}
    for part in parts(model):
        with gather(part.parameters):
            if is_first:
                whole[part.name] = part.value().to("cpu", copy=True)
            if is_first and part.adapter:
                a, b = (parameter.data.to("cpu", copy=True) for parameter in part.adapter[:2])
                adapters[part.name.removesuffix(".weight")] = a, b
    if is_first:
        model.get_base_model().save_pretrained(folder, state_dict=whole)
        is_mixture = any("experts" in name.split(".") for name in whole)
        write_adapter(folder / ADAPTER, adapters, options, source, is_mixture)
