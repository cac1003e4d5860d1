"""These tests catch adapters whose steps depend on how they are sharded, and a policy that is sent, exported or
resumed as another than the one that was trained."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf_gtpo.lora.folder import ADAPTER
from openrlhf_gtpo.lora.merge import merge
from openrlhf_gtpo.training.actors import adapters
from tests.support.actor_program import padded_batch
from tests.support.families import SHALLOW, exported_files, make_checkpoint, side_files
from tests.support.lora_program import run_steps, written
from tests.support.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = ["--ds.lora.rank", "4", "--ds.lora.alpha", "8", "--ds.lora.target_modules", "all-linear"]
COMMON = ["--algo.preset", "grpo", "--algo.kl.init_coef", "0", "--train.batch_size", "10", *LORA]
COMMON += ["--actor.adam.lr", "1e-3", "--actor.lr_warmup_ratio", "0", "--train.micro_batch_size", "2"]
COMMON += ["--actor.adam.weight_decay", "0"]
# No ratio is clipped: of one token it is 0.80 and so is the bound, and bfloat16 decides on which side.
COMMON += ["--actor.eps_clip_low_high", "0.999", "99"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ZeRO 0": (1, ["--ds.zero_stage", "0"]),
    "ZeRO 2": (1, ["--ds.zero_stage", "2"]),
    "ZeRO 2, two ranks": (2, ["--ds.zero_stage", "2"]),
    "ZeRO 3, two ranks": (2, ["--ds.zero_stage", "3"]),
    "ZeRO 3, recomputed": (1, ["--ds.zero_stage", "3", "--actor.gradient_checkpointing_enable"]),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def trained(actor_model: str, pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What three steps of a layout find, with a checkpoint and an export."""
    found: dict[str, tuple[Any, Path]] = {}

    def of(layout: str) -> tuple[Any, Path]:
        if layout not in found:
            folder = tmp_path_factory.mktemp("lora")
            size, argv = LAYOUTS[layout]
            arguments = (
                "deepspeed",
                actor_model,
                [*COMMON, *argv],
                3,
                str(folder / "checkpoints"),
                str(folder / "model"),
            )
            found[layout] = pools[size].run(run_steps, *arguments)[0], folder
        return found[layout]

    return of


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_steps_do_not_depend_on_how_they_are_sharded(layout: str, trained: Any) -> None:
    """A step has all rows, so that it does not matter which replica has which; values are bf16's."""
    expected, found = trained("ZeRO 0")[0], trained(layout)[0]
    for ours, theirs in zip(found["status"], expected["status"], strict=True):
        assert ours["actor_grad_norm"] == pytest.approx(theirs["actor_grad_norm"], rel=0.02)
    for ours, theirs in zip(found["trained"], expected["trained"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_base_bit_for_bit(layout: str, trained: Any) -> None:
    found = trained(layout)[0]
    assert all(log_probs == found["base"] for log_probs in found["reference"])
    assert found["trained"] != found["base"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_exports_and_the_adapter_folder_have_one_policy(layout: str, trained: Any, actor_model: str) -> None:
    from safetensors.torch import load_file

    found, folder = trained(layout)
    base = {name: tensor.bfloat16() for name, tensor in written(Path(actor_model)).items()}
    exported = written(folder / "model")
    saved = load_file(folder / "model" / ADAPTER / "adapter_model.safetensors")
    assert set(found["sent"]) == set(exported)
    adapted, product, squared = 0, 0.0, 0.0
    for name, tensor in found["sent"].items():
        assert torch.equal(tensor, exported[name])
        pair = [saved.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight") for letter in "AB"]
        expected = base[name] if pair[0] is None else merge(base[name], *pair, 2.0, name)
        assert torch.equal(tensor, expected), name
        if pair[0] is not None:
            adapted += 1
            delta = 2.0 * pair[1].double() @ pair[0].double()
            product += float(((tensor.double() - base[name].double()) * delta).sum())
            squared += float((delta * delta).sum())
    assert adapted == 7 * len({name.split(".")[2] for name in base if ".layers." in name})
    assert product / squared == pytest.approx(1, abs=0.02)


def test_peft_reads_the_adapter_folder(trained: Any, actor_model: str) -> None:
    """What PEFT merges in float32 is what was exported, up to bfloat16's grid."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = trained("ZeRO 2")[1] / "model"
    assert side_files(folder) == exported_files(Path(actor_model), "bfloat16")
    base = AutoModelForCausalLM.from_pretrained(actor_model, dtype=torch.bfloat16).float()
    untrained = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, str(folder / ADAPTER)).merge_and_unload().state_dict()
    for name, tensor in written(folder).items():
        assert ((tensor.float() - merged[name]).abs() <= 2**-7 * merged[name].abs()).all(), name
        assert "_proj" not in name or not torch.equal(merged[name], untrained[name])


@pytest.mark.parametrize("turns", [1, 2])
def test_gradients_are_those_of_the_whole_weight_times_the_other_factor(turns: int, actor_model: str) -> None:
    """dA = s Bᵀ dW and dB = s dW Aᵀ, with dW of the model into which the adapters are merged, in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from openrlhf_gtpo.training.actors.policy_model import PolicyModel

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(actor_model, dtype=torch.float32)

    def backward(policy: Any) -> None:
        rows = padded_batch([0, 2, 4])
        if turns == 2:
            rows.action_mask[:, 6:8] = 0  # what an environment says between them
        policy = PolicyModel(policy)
        policy.temperature, policy.packing_samples = 1.0, False
        policy(rows.sequences, rows.action_mask, rows.attention_mask).sum().backward()

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none", task_type="CAUSAL_LM")
    adapted, whole = get_peft_model(model(), config), model()
    parts = {part.name: part for part in adapters.parts(adapted)}
    weights = dict(whole.named_parameters())
    for name, part in parts.items():
        if part.adapter:
            torch.nn.init.normal_(part.adapter.b, std=0.1)
            weights[name].data.copy_(part.value())
    backward(adapted)
    backward(whole)
    for name, part in parts.items():
        if part.adapter is None:
            assert part.weight.grad is None
            continue
        a, b, scale = part.adapter
        gradient = weights[name].grad
        torch.testing.assert_close(a.grad, scale * b.T @ gradient, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.grad, scale * gradient @ a.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["ZeRO 0", "ZeRO 2, two ranks", "ZeRO 3, two ranks"])
def test_a_resumed_run_goes_on_bit_for_bit(
    layout: str, trained: Any, actor_model: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    size, argv = LAYOUTS[layout]
    argv = [*COMMON, *argv]
    whole = pools[size].run(run_steps, "deepspeed", actor_model, argv, 3)[0]
    pools[size].run(run_steps, "deepspeed", actor_model, argv, 2, str(tmp_path))
    written_bytes = sum(path.stat().st_size for path in (tmp_path / "_actor").rglob("*.pt"))
    model_bytes = sum(path.stat().st_size for path in Path(actor_model).glob("*.safetensors"))
    adapters = sum(tensor.numel() for tensor in _adapters(trained(layout)[1]))
    assert written_bytes < 16 * adapters + 400_000 and model_bytes > 0
    resumed = pools[size].run(run_steps, "deepspeed", actor_model, [*argv, "--ckpt.load_enable"], 1, str(tmp_path))[0]
    assert resumed["status"][0] == whole["status"][2]
    assert all(torch.equal(tensor, resumed["sent"][name]) for name, tensor in whole["sent"].items())


def _adapters(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model" / ADAPTER / "adapter_model.safetensors").values())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--ds.lora.rank", "2"], "it was written with --ds.lora.rank 4, and this run has 2"),
        (["--ds.lora.alpha", "9"], "it was written with --ds.lora.alpha 8, and this run has 9"),
        (["--ds.lora.target_modules", "q_proj"], "and this run has q_proj"),
        (["--ds.lora.rank", "0"], "it has only adapters"),
    ],
    ids=str,
)
def test_other_adapters_are_not_gone_on_from(
    changes: list[str], sentence: str, trained: Any, actor_model: str, pools: dict[int, RankPool]
) -> None:
    argv = [*COMMON, *LAYOUTS["ZeRO 2"][1], *changes, "--ckpt.load_enable"]
    folder = trained("ZeRO 2")[1] / "checkpoints"
    with pytest.raises(AssertionError, match="cannot be continued") as refused:
        pools[1].run(run_steps, "deepspeed", actor_model, argv, 1, str(folder))
    assert sentence in str(refused.value)


def test_a_base_with_other_weights_is_refused(
    trained: Any, actor_model: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(actor_model, tmp_path / "other")
    (path,) = other.glob("*.safetensors")
    tensors = load_file(path)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    argv = [*COMMON, *LAYOUTS["ZeRO 2"][1], "--ckpt.load_enable"]
    folder = trained("ZeRO 2")[1] / "checkpoints"
    with pytest.raises(AssertionError, match="adapters belong to other weights of the base model"):
        pools[1].run(run_steps, "deepspeed", str(other), argv, 1, str(folder))


def test_a_checkpoint_says_what_its_adapters_are(trained: Any) -> None:
    manifest = json.loads(next((trained("ZeRO 2")[1] / "checkpoints").rglob("checkpoint.json")).read_text())
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert {name: manifest["lora"][name] for name in ("rank", "alpha", "targets")} == {
        "rank": 4,
        "alpha": 8,
        "targets": names,
    }


@pytest.mark.parametrize("layout", ["ZeRO 2", "ZeRO 3, two ranks"])
def test_a_mixture_is_sent_exported_and_resumed_as_it_was_trained(
    layout: str, actor_model: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Its attention is adapted; experts and routers stay the base's, under their names."""
    from transformers import AutoModelForCausalLM

    model = make_checkpoint(tmp_path / "moe", "qwen3_moe", 64, num_experts=4, num_experts_per_tok=2, **SHALLOW)
    for file in Path(actor_model).glob("tokenizer*"):
        shutil.copy(file, model)
    size, argv = LAYOUTS[layout]
    argv, arguments = [*COMMON, *argv], (str(tmp_path / "checkpoints"), str(tmp_path / "exported"))
    found = pools[size].run(run_steps, "deepspeed", str(model), argv, 2, *arguments)[0]
    resumed = pools[size].run(run_steps, "deepspeed", str(model), [*argv, "--ckpt.load_enable"], 1, arguments[0])[0]
    whole = pools[size].run(run_steps, "deepspeed", str(model), argv, 3)[0]
    assert resumed["status"][0] == whole["status"][2] and found["trained"] != found["base"]
    assert all(torch.equal(tensor, resumed["sent"][name]) for name, tensor in whole["sent"].items())
    base, exported = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        for folder in (model, tmp_path / "exported")
    )
    assert base.keys() == exported.keys() == found["sent"].keys()
    moved = {name.split(".")[-2] for name in base if not torch.equal(base[name], exported[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(torch.equal(tensor, exported[name]) for name, tensor in found["sent"].items())
