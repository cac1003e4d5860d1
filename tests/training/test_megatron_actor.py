"""These tests catch a Megatron actor whose losses, metrics, schedule or batches do not mean what OpenRLHF's do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.actors import megatron_actor
from openrlhf_gtpo.training.settings.prompts import kept_prompts
from tests.support.actor_program import run_actor, start_actor
from tests.support.families import exported_files, side_files
from tests.support.lora_program import run_steps, written
from tests.support.offload_program import run_policy, run_reference
from tests.support.rank_pool import RankPool
from tests.support.rollouts import arguments

CORRECTION = ["--algo.advantage.is_correction_level", "token"]
KL_LOSS = ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.1"]
NO_KL = ["--algo.kl.init_coef", "0"]
ALGORITHMS = {
    "gtpo": ["--algo.advantage.estimator", "gtpo", *NO_KL, "--actor.entropy_coef", "0.01"],
    "grpo_s": ["--algo.advantage.estimator", "grpo_s", *NO_KL, *CORRECTION],
    "grpo": ["--algo.preset", "grpo", *KL_LOSS],
    "dapo": ["--algo.preset", "dapo", "--rollout.max_new_tokens", "64", "--actor.dual_clip", "3"],
    "gspo": ["--algo.preset", "gspo", *CORRECTION],
}
TP, PP, CP = (f"--megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
LAYOUTS = {"grpo_s": (TP, CP), "dapo": (PP, CP)}  # of two algorithms; the others have TP2 × PP2
COMMON = ["--train.batch_size", "8", "--train.micro_batch_size", "8", "--actor.adam.lr", "1e-3"]
COMMON += ["--actor.lr_warmup_ratio", "0.1", "--rollout.temperature", "0.9", "--train.max_tokens_per_gpu", "30"]


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[RankPool, RankPool]]:
    """A process for upstream's actor, and four for Megatron's."""
    with RankPool(1) as upstream, RankPool(4) as megatron:
        yield upstream, megatron


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_is_that_of_upstreams_actor(
    name: str, actor_model: str, pools: tuple[RankPool, RankPool], tmp_path: Path
) -> None:
    """Two rounds on the same rollouts. Four ranks in bf16 against one DeepSpeed process in bf16.

    Both save what they trained, although the first attempt to write it fails: a folder stands in its place.
    """
    argv = [*COMMON, *ALGORITHMS[name]]
    layout = [word for size in LAYOUTS.get(name, (TP, PP)) for word in (size, "2")]
    outputs = [tmp_path / backend for backend in ("deepspeed", "megatron")]
    for output in outputs:
        (output / "model.safetensors").mkdir(parents=True)
    exact = pools[0].run(run_actor, "deepspeed", actor_model, argv, str(outputs[0]))[0]
    found = pools[1].run(run_actor, "megatron", actor_model, [*argv, *layout], str(outputs[1]))
    theirs_saved, ours_saved = (AutoModelForCausalLM.from_pretrained(output).state_dict() for output in outputs)
    assert theirs_saved.keys() == ours_saved.keys()
    for output in outputs:
        assert side_files(output) == exported_files(Path(actor_model), "bfloat16")
        # Whoever may read the configuration may read the weights.
        assert kept_prompts(output)["rollout.temperature"] == 0.9  # how the run made its prompts
        assert (output / "model.safetensors").stat().st_mode == (output / "config.json").stat().st_mode
    for rank in found:
        forward = rank["sizes"].index(0)
        for sizes in (rank["sizes"][:forward], rank["sizes"][forward + 1 :]):
            assert 30 < max(sizes) <= 60 if CP in layout else max(sizes) <= 30, "30 tokens a GPU"
        for theirs, ours in zip(exact["before"] + exact["after"], rank["before"] + rank["after"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=0.15)
        for phase in ("first", "second"):
            assert set(rank[phase]) == set(exact[phase])
            for metric in exact[phase].keys() - {names.TOKENS_COMPUTED}:  # here without padding
                assert rank[phase][metric] == pytest.approx(exact[phase][metric], rel=0.03, abs=0.01), (phase, metric)


def test_the_trainer_rests_while_engines_work(
    actor_model: str, tmp_path: Path, pools: tuple[RankPool, RankPool]
) -> None:
    """A start, then a resume: what the trainer reserves whenever upstream wakes an engine, sends, loads or saves."""
    argv = [*COMMON, "--algo.preset", "grpo", *NO_KL, "--ckpt.path", str(tmp_path), "--ckpt.save_steps", "1"]
    staying = pools[0].run(run_policy, actor_model, argv)[0]
    argv += ["--megatron.offload", "--vllm.enable_sleep"]
    started, log_probs = pools[0].run(run_policy, actor_model, argv)[0]
    assert log_probs == staying[1]
    resumed, again = pools[0].run(run_policy, actor_model, [*argv, "--ckpt.load_enable"])[0]
    assert again[0] == log_probs[1]
    parameters, states = {"parameters"}, {"parameters", "optimizer"}
    sync = [("wake weights", parameters), ("send", parameters)]
    step = [("wake", set()), ("sleep", set()), ("step", states | {"gradients"}), *sync, ("save", states)]
    evaluation = [("wake", set()), ("sleep", set())]
    assert started == [*evaluation, *step, *evaluation]
    sync = [("wake weights", set()), ("send", parameters)]  # straight from rest, this once
    assert resumed == [("load", states), *sync, *evaluation, *step, *evaluation]


def test_the_reference_rests_between_its_forwards(actor_model: str, pools: tuple[RankPool, RankPool]) -> None:
    argv = [*COMMON, *ALGORITHMS["grpo"]]
    staying, expected = pools[0].run(run_reference, actor_model, argv)[0]
    assert staying == [{"parameters"}] * 3
    for flag in ("--ref.offload", "--megatron.offload"):
        reserved, found = pools[0].run(run_reference, actor_model, [*argv, flag])[0]
        assert found == expected and found[0] == found[1]
        assert reserved == [set()] * 3


def test_the_reference_is_the_policy_without_its_adapters(
    actor_model: str, tmp_path: Path, pools: tuple[RankPool, RankPool]
) -> None:
    """Bit for bit, in each rollout; the engines, and whoever loads the trained model, get the policy with them."""
    argv = [*COMMON, *ALGORITHMS["gtpo"], TP, "2", "--megatron.sequence_parallel", "--megatron.offload"]
    argv += ["--ds.lora.rank", "4", "--ds.lora.alpha", "8", "--ds.lora.target_modules", "all-linear"]
    found = pools[1].run(run_steps, "megatron", actor_model, argv, 2, str(tmp_path / "saved"), str(tmp_path / "model"))
    exported = written(tmp_path / "model")
    assert side_files(tmp_path / "model") == exported_files(Path(actor_model), "bfloat16")
    for rank in found:
        assert all(log_probs == rank["base"] for log_probs in rank["reference"])
        assert rank["trained"] != rank["base"]
    assert set(found[0]["sent"]) == set(exported)
    assert all(torch.equal(tensor, exported[name]) for name, tensor in found[0]["sent"].items())


def test_the_lm_heads_memory_is_given_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):
        pass

    def load_model(source: str, options: ModelOptions, for_training: bool) -> None:
        raise Loaded(options.lm_head_bytes)

    monkeypatch.setattr(megatron_actor, "load_model", load_model)
    monkeypatch.setattr(groups, "initialize", lambda *args: None)
    for given, expected in (([], None), (["--megatron.lm_head_mb", "512"], 2**29)):
        args = arguments(*given, "--actor.backend", "megatron")
        strategy = SimpleNamespace(arguments=args, setup_distributed=lambda *args, **kwargs: None)
        with pytest.raises(Loaded) as loaded:
            start_actor(megatron_actor.MegatronReference, 1).init_model_from_pretrained(strategy, "model")
        assert loaded.value.args == (expected,)


# Stands for Transformer Engine: when first imported, it prints what it finds and who imports it, and ends the process.
FIRST_IMPORT = """
import os, traceback
print("first imported with", os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"), flush=True)
print(*(frame.filename for frame in traceback.extract_stack()), sep="\\n", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_transformer_engine_finds_its_variable_however_early_it_is_imported(tmp_path: Path) -> None:
    """In a worker, the actor's module imports OpenRLHF, then PEFT, which imports it long before Megatron does."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(FIRST_IMPORT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    environment |= {"OPENRLHF_GTPO_PLATFORM": "cpu", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = "from openrlhf_gtpo import platform; platform.activate(); "  # as Ray's hook does on such a host
    program += "import openrlhf_gtpo.training.actors.megatron_actor"
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "first imported with 1\n" in ended.stdout, ended.stdout + ended.stderr[-2000:]
    assert "/peft/" in ended.stdout and "/megatron/core/" not in ended.stdout
