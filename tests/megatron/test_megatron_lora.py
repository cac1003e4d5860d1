"""Adapters on Megatron's ranks train as PEFT's do with torch's AdamW, and who reads the policy finds them merged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from openrlhf_gtpo import platform
from openrlhf_gtpo.cli.convert import main, megatron_to_hf
from openrlhf_gtpo.lora import ALL_LINEAR, LoraOptions
from openrlhf_gtpo.lora.folder import ADAPTER
from openrlhf_gtpo.lora.init import initial_a
from openrlhf_gtpo.lora.merge import merge
from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.megatron.test_megatron_training import Reference
from tests.support import megatron_lora_program as program
from tests.support.export_program import alone
from tests.support.families import SHALLOW, make_checkpoint, ragged_rows
from tests.support.logits_program import several
from tests.support.rank_pool import RankPool

SHAPES = [([9, 4, 7], [3, 2, 1]), ([12], [5]), ([6, 6], [2, 4]), ([3, 10], [1, 6])]  # lengths of rows, of prompts
STEPS = [
    [(ragged_rows(151, lengths, seed=10 * step + i), prompts) for i, (lengths, prompts) in enumerate(SHAPES)]
    for step in range(3)
]
# eps exceeds the rounding of the smallest gradients, whose sign would otherwise decide a whole step.
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1, "max_norm": 0.3}
ALL = LoraOptions(6, 12.0)
FEW = LoraOptions(3, 4.5, ("q_proj", "v_proj", "o_proj", "up_proj"))
MODELS = {"llama": ("llama", {}, FEW), "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, ALL)}
TP2, SP2 = Layout(tensor_model_parallel_size=2), Layout(tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = Layout(pipeline_model_parallel_size=2)
TP2_PP2_SP = Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(make_checkpoint(tmp_path_factory.mktemp(name), family, **(SHALLOW | fields)))
        for name, (family, fields, _) in MODELS.items()
    }


def weights_with_adapters(model: torch.nn.Module, options: LoraOptions) -> list[str]:
    layers = (name for name, _ in model.named_parameters() if name.endswith("_proj.weight"))
    return [name for name in layers if options.targets == ALL_LINEAR or name.split(".")[-2] in options.targets]


@pytest.fixture(scope="module")
def exact_gradients(sources: dict[str, str]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Gradients of A and B, s·Bᵀ·dW and s·dW·Aᵀ, from the gradient of the merged weights in Transformers."""
    found: dict[str, dict] = {}
    for model, (_, _, options) in MODELS.items():
        reference = Reference(Path(sources[model]))
        parameters = dict(reference.model.named_parameters())
        pairs = {}
        for name in weights_with_adapters(reference.model, options):
            weight = parameters[name]
            a = initial_a(options.rank, weight.shape[1], name, program.SEED)
            pairs[name] = a, program.b_of(name, weight.shape[0], options.rank)
            weight.data += options.scale * pairs[name][1] @ a
        reference.backward(STEPS[0], False)
        found[model] = {}
        for name, (a, b) in pairs.items():
            whole = options.scale * parameters[name].grad
            found[model][name.removesuffix(".weight")] = (b.T @ whole).numpy(), (whole @ a.T).numpy()
    return found


def assert_close(found: dict, exact: dict, bound: float) -> None:
    """Bounds the largest difference in each factor, relative to its largest value."""
    assert set(found) == set(exact)
    for name, pair in exact.items():
        for letter, value, other in zip("AB", pair, found[name], strict=True):
            assert np.abs(other - value).max() <= bound * np.abs(value).max(), (name, letter)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (TP2, "selective"),
        (TP2_PP2_SP, "full"),
        (Layout(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2), "none"),
        (Layout(tensor_model_parallel_size=4), "full"),
    ],
    ids=["TP2-DP2", "TP2xPP2-SP", "CP2xTP2-SP", "TP4"],
)
def test_gradients_are_the_projected_gradients_of_the_weights(
    layout: Layout, recompute: str, sources: dict, exact_gradients: dict, ranks: RankPool
) -> None:
    calls = [
        (program.adapter_gradients, (sources[model], layout, options, STEPS[0], recompute))
        for model, (_, _, options) in MODELS.items()
    ]
    for answers in ranks.run(several, layout, calls):
        for model, found in zip(MODELS, answers, strict=True):
            assert_close(found, exact_gradients[model], 1e-5)


@pytest.fixture(scope="module")
def peft_training(sources: dict[str, str]) -> dict[str, tuple]:
    """Each model's (A and B, losses, norms) of three steps of AdamW on PEFT's model."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for model, (_, _, options) in MODELS.items():
        reference = Reference(Path(sources[model]))
        targets = "all-linear" if options.targets == ALL_LINEAR else list(options.targets)
        config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=targets)
        reference.model = get_peft_model(reference.model, config)
        named = {name: p for name, p in reference.model.named_parameters() if p.requires_grad}
        prefix, (a_end, b_end) = "base_model.model.", (f".lora_{letter}.default.weight" for letter in "AB")
        modules = [name.removeprefix(prefix).removesuffix(a_end) for name in named if name.endswith(a_end)]
        for name in modules:
            a = named[f"{prefix}{name}{a_end}"]
            a.data.copy_(initial_a(*a.shape, f"{name}.weight", program.SEED))
        optimizer = torch.optim.AdamW(
            list(named.values()),
            lr=ADAM["lr"],
            betas=ADAM["betas"],
            eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
        )
        losses, norms = [], []
        for step in STEPS:
            optimizer.zero_grad()
            losses.append(reference.backward(step, False))
            norms.append(float(torch.nn.utils.clip_grad_norm_(list(named.values()), ADAM["max_norm"])))
            optimizer.step()
        pairs = {
            name: tuple(named[f"{prefix}{name}{end}"].detach().numpy() for end in (a_end, b_end)) for name in modules
        }
        found[model] = pairs, losses, norms
    return found


@pytest.mark.parametrize(
    ("layout", "distributed", "ddp"),
    [
        (TP2, True, {}),
        (SP2, False, {}),
        (PP2, True, {}),
        (Layout(), True, program.OVERLAP),
        (TP2_PP2_SP, False, {}),
        (Layout(context_parallel_size=2), True, {}),
    ],
    ids=["TP2-DP2", "TP2-SP-DP2-replicated", "PP2-DP2", "DP4-overlap", "TP2xPP2-SP", "CP2-DP2"],
)
def test_three_steps_are_pefts(
    layout: Layout, distributed: bool, ddp: dict, sources: dict, peft_training: dict, ranks: RankPool
) -> None:
    optimizer = ADAM | {"ddp": ddp}
    calls = [
        (program.train, (sources[model], layout, options, distributed, STEPS, optimizer, {}))
        for model, (_, _, options) in MODELS.items()
    ]
    for answers in ranks.run(several, layout, calls):
        for model, answer in zip(MODELS, answers, strict=True):
            assert_same_training(answer, peft_training[model])


def test_three_steps_on_one_rank_are_pefts(sources: dict, peft_training: dict, one_rank: RankPool) -> None:
    for model, (_, _, options) in MODELS.items():
        [answer] = one_rank.run(program.train, sources[model], Layout(), options, True, STEPS, ADAM, {})
        assert_same_training(answer, peft_training[model])


def assert_same_training(found: tuple, exact: tuple) -> None:
    pairs, losses, norms = found
    np.testing.assert_allclose(losses, exact[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norms, exact[2], rtol=1e-5)
    assert_close(pairs, exact[0], 1e-4)


@pytest.fixture(scope="module")
def outputs(sources: dict, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> tuple[Path, list[dict]]:
    """A folder with an export of trained adapters on all matrices, and each rank's answer."""
    folder = tmp_path_factory.mktemp("outputs")
    return folder, ranks.run(program.outputs, sources["qwen2-tied"], TP2_PP2_SP, ALL, str(folder), 3e-4)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()
    }


def adapter_pairs(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the names of the weights."""
    state = load_file(folder / ADAPTER / "adapter_model.safetensors")
    keys = [key for key in state if "lora_A" in key]
    return {
        key.removeprefix("base_model.model.").replace(".lora_A", ""): (state[key], state[key.replace("_A", "_B")])
        for key in keys
    }


def test_what_is_sent_is_what_is_exported_and_what_the_adapters_give(outputs: tuple, sources: dict) -> None:
    folder, answers = outputs
    whole, pairs, base = exported(folder), adapter_pairs(folder), exported(Path(sources["qwen2-tied"]))
    assert all(pair[0].dtype == torch.bfloat16 for pair in pairs.values()) and len(pairs) == 2 * 7
    expected = {name: tensor.bfloat16() for name, tensor in base.items()}
    delta, kept = [], []
    for name, (a, b) in pairs.items():
        merged = merge(expected[name], a, b, ALL.scale, name)
        delta.append((ALL.scale * b.double() @ a.double()).flatten())
        kept.append((merged.double() - expected[name].double()).flatten())
        expected[name] = merged
    for tensors in (whole, *(answer["sent"] for answer in answers)):
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    d, k = torch.cat(delta), torch.cat(kept)
    assert float(d @ k / (d @ d)) == pytest.approx(1, abs=0.02)


def test_peft_loads_the_exported_adapters(outputs: tuple, sources: dict) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _ = outputs
    base = AutoModelForCausalLM.from_pretrained(sources["qwen2-tied"], dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, folder / ADAPTER, autocast_adapter_dtype=False)
    assert json.loads((folder / ADAPTER / "adapter_config.json").read_text())["lora_alpha"] == ALL.alpha
    state = model.state_dict()
    for name, pair in adapter_pairs(folder).items():
        for letter, tensor in zip("AB", pair, strict=True):
            key = name.replace(".weight", f".lora_{letter}.default.weight")
            assert torch.equal(state[f"base_model.model.{key}"], tensor)


def test_without_adapters_the_policy_is_its_base(outputs: tuple) -> None:
    for answer in outputs[1]:
        assert torch.equal(answer["without"], answer["base"])
        assert not torch.equal(answer["adapted"], answer["base"])


@pytest.fixture(scope="module", params=[True, False], ids=["distributed", "replicated"])
def saved(
    request: pytest.FixtureRequest, sources: dict, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool
) -> tuple[str, bool, list]:
    folder = str(tmp_path_factory.mktemp("saved"))
    reports = ranks.run(program.save_and_go_on, sources["qwen2-tied"], SP2, ALL, folder, request.param)
    return folder, request.param, reports


def test_a_resumed_run_trains_on_bit_for_bit(saved: tuple, sources: dict, ranks: RankPool) -> None:
    folder, distributed, reports = saved
    assert ranks.run(program.resume, sources["qwen2-tied"], SP2, ALL, folder, distributed) == reports


@pytest.mark.parametrize(
    "layout", [Layout(), TP2_PP2_SP, Layout(tensor_model_parallel_size=4)], ids=["DP4", "TP2xPP2-SP", "TP4"]
)
def test_a_run_goes_on_at_another_layout(layout: Layout, saved: tuple, sources: dict, ranks: RankPool) -> None:
    folder, distributed, (expected, *_) = saved
    found = ranks.run(program.resume, sources["qwen2-tied"], layout, ALL, folder, distributed)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_checkpoint_is_converted_with_its_base(
    saved: tuple,
    sources: dict,
    tmp_path: Path,
    one_rank: RankPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, checkpoint = sources["qwen2-tied"], str(Path(saved[0], "step3"))
    one_rank.run(alone, megatron_to_hf, checkpoint, str(tmp_path / "model"), "float32", source)
    whole, base = exported(tmp_path / "model"), exported(Path(source))
    pairs = adapter_pairs(tmp_path / "model")
    assert set(whole) == set(base) and len(pairs) == 2 * 7
    for name, tensor in base.items():
        expected = merge(tensor, *pairs[name], ALL.scale, name) if name in pairs else tensor
        assert torch.equal(whole[name], expected) and torch.equal(tensor, expected) != (name in pairs)
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cpu")  # which the command sets
    assert main(["megatron-to-hf", checkpoint, str(tmp_path / "other")]) == 2
    assert "has only adapters; name the model that they were trained on with --base." in capsys.readouterr().err


def test_checkpoints_hold_adapters_alone(saved: tuple) -> None:
    entries = FileSystemReader(Path(saved[0], "step3")).read_metadata().state_dict_metadata
    tensors = [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]
    assert tensors and all("_adapters." in name for name in tensors)


def test_adapters_of_another_kind_or_base_are_refused(
    sources: dict, saved: tuple, tmp_path: Path, ranks: RankPool
) -> None:
    source = sources["qwen2-tied"]
    other = str(make_checkpoint(tmp_path, "qwen2", seed=1, tie_word_embeddings=True, **SHALLOW))
    folder, distributed, _ = saved
    cases = [
        (source, LoraOptions(8, 16.0), "rank"),
        (source, LoraOptions(6, 6.0), "alpha"),
        (source, LoraOptions(6, 12.0, ("q_proj",)), "q_proj"),
        (source, None, "only adapters"),
        (other, ALL, "other weights of the base model"),
    ]
    calls = [(program.resume, (model, SP2, options, folder, distributed)) for model, options, _ in cases]
    for answers in ranks.run(several, SP2, calls):
        for message, (_, _, sentence) in zip(answers, cases, strict=True):
            assert message.startswith("CheckpointError: ") and sentence in message and "\n" not in message


def test_nothing_is_trained_for_nobody(sources: dict, one_rank: RankPool) -> None:
    (said,) = one_rank.run(program.load_beside_nothing, sources["llama"], FEW)
    assert said == "decoder.layers.0.self_attention.linear_proj_adapters.o_proj_A would be trained for nobody"
