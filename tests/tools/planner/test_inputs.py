"""Input that makes no sense is refused in one sentence that says what would work."""

import json
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.cli import plan
from openrlhf_gtpo.tools.planner.cluster import GIB, GPUS, parse_cluster
from openrlhf_gtpo.tools.planner.plan import planned_config
from openrlhf_gtpo.tools.planner.workload import Workload

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
}


def test_a_cluster_line() -> None:
    cluster = parse_cluster("H100-80G", 32, 4)
    assert (cluster.gpus, cluster.nodes, cluster.gpus_per_node) == (32, 4, 8)
    assert cluster.gpu.link == 450e9 and cluster.network == 50e9
    assert parse_cluster("h100-80g", 24).nodes == 3 and parse_cluster("h100-80g", 4).nodes == 1
    assert parse_cluster("h100-80g", 8, network_gbit=200).network == 25e9


def test_every_gpu_is_plausible() -> None:
    """Memory is a little less than the name says, because names count decimal gigabytes as the maker does."""
    for name, gpu in GPUS.items():
        billions = int(name.split("-")[-1][:-1])
        assert 0.9 * billions < gpu.memory / GIB < 1.01 * billions
        assert gpu.fp8 is None or gpu.fp8 > 1.9 * gpu.bf16
        assert gpu.link < gpu.memory_bandwidth < gpu.bf16


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--gpus 8 --gpu rtx3090", f"--gpu rtx3090 is not known; choose one of {', '.join(GPUS)}."),
        ("--gpus 0", "Expected --gpus >= 1, got 0."),
        ("--gpus 8 --nodes 0", "Expected --nodes >= 1, got 0."),
        (
            "--gpus 30 --nodes 4",
            "--gpus 30 is the number in all nodes together, and --nodes 4 does not divide it; give a multiple of 4.",
        ),
        ("--gpus 20", "--gpus 20 does not fill nodes of 8; give --nodes too, or a multiple of 8."),
        (
            "--gpus 64 --nodes 1",
            "--gpus 64 on --nodes 1 makes 64 in a node, and no node has more than 16; give at least --nodes 4.",
        ),
        ("--gpus 8 --network-gbit 0", "Expected --network-gbit > 0 (Gbit/s for each GPU, such as 400), got 0."),
        (
            "--gpus 8 --tensor-parallel 3",
            "--tensor-parallel 3 does not divide this model's 28 attention heads; it can be 1, 2 or 4.",
        ),
        (
            "--gpus 8 --pipeline-parallel 3",
            "--pipeline-parallel 3 does not divide this model's 28 layers; it can be 1, 2, 4, 7, 14 or 28.",
        ),
        ("--gpus 8 --tensor-parallel 0", "Expected --tensor-parallel >= 1, got 0."),
        (
            "--gpus 8 --expert-parallel 2",
            "--expert-parallel 2 needs experts, and this qwen2 model has none; leave it at 1.",
        ),
        (
            "--gpus 8 --nodes 4 --tensor-parallel 4",
            "--tensor-parallel 4 does not divide the 2 GPUs of a node, and its collectives run in every layer; "
            "give a divisor of 2.",
        ),
        (
            "--gpus 12 --nodes 2 --tensor-parallel 4",
            "--tensor-parallel 4 does not divide the 6 GPUs of a node, and its collectives run in every layer; "
            "give a divisor of 6.",
        ),
        (
            "--gpus 8 --tensor-parallel 1 --pipeline-parallel 1 --context-parallel 1 --train-batch 4",
            "8 replicas (TP 1 × PP 1 × CP 1 on 8 GPUs) do not divide the 4 responses of an optimizer step; "
            "give larger parallel sizes or another --train-batch.",
        ),
        (
            "--gpus 8 --gpu a100-80g --fp8 hybrid",
            "--fp8 hybrid with the recipe delayed does not run on a100-80g; leave it out.",
        ),
        (
            "--gpus 8 --fp8 off --fp8-param",
            "--fp8-param needs FP8, and --fp8 is off; leave one of them out.",
        ),
        (
            "--gpus 8 --fp8-param --fp8-recipe delayed",
            "--fp8-param does not work with --fp8-recipe delayed, "
            "whose scales know nothing of the weights when they are read; use tensorwise or blockwise.",
        ),
        (
            "--gpus 8 --fp8 off --fp8-recipe delayed",
            "--fp8-recipe delayed needs FP8, and --fp8 is off; leave one of them out.",
        ),
        ("--gpus 8 --rollout-gpus 2", "--rollout-gpus needs --placement split; colocated engines run on all GPUs."),
        (
            "--gpus 8 --placement split --rollout-gpus 8",
            "--rollout-gpus 8 leaves none of the 8 GPUs to train on, or none to roll out on; give 1 to 7.",
        ),
        (
            "--gpus 1 --placement split",
            "--placement split needs at least 2 GPUs, one to train and one to roll out on; use colocated.",
        ),
        (
            "--gpus 8 --vllm-tensor-parallel 8",
            "--vllm-tensor-parallel 8 must divide the 28 attention heads, the 18944 columns of the MLP and the 152064 "
            "of the vocabulary, the 8 GPUs of the rollout and the 8 of a node, and divide the 4 key-value heads or be "
            "a multiple of them; it can be 1, 2, 4.",
        ),
        ("--gpus 8 --vllm-gpu-memory 80", "Expected 0 < --vllm-gpu-memory < 1, a share of the memory, got 80."),
        (
            "--gpus 8 --assume speed=2",
            "--assume speed=2: expected NAME=NUMBER, as --assumptions lists them.",
        ),
        *(
            (f"--gpus 8 --assume {word}", f"--assume {word}: expected NAME=NUMBER, as --assumptions lists them.")
            for word in ("link", "link=0", "vllm_rows=0.5", "overlap=2")
        ),
        (
            "--gpus 16 --placement split --rollout-gpus 7",
            "--rollout-gpus 7 leaves 9 GPUs to train on, which is not a whole number of 8-GPU nodes; give another "
            "number.",
        ),
        (
            "--gpus 16 --placement split --rollout-gpus 4",  # two nodes of six would be slower than 8 and 4
            "--rollout-gpus 4 leaves 12 GPUs to train on, which is not a whole number of 8-GPU nodes; give another "
            "number.",
        ),
        ("--gpus 8 --response-length 0", "Expected --response-length >= 1, got 0."),
        ("--gpus 8 --max-tokens-per-gpu 0", "Expected --max-tokens-per-gpu >= 1, got 0."),
        ("--gpus 8 --mean-response 5000", "--mean-response 5000 must be between 1 and --response-length 4096."),
        (
            "--gpus 8 --prompts-per-step 8 --train-batch 48",
            "--train-batch 48 does not divide the 128 responses of a step "
            "(--prompts-per-step 8 × --samples-per-prompt 16).",
        ),
        (
            "--gpus 8 --response-length 40000",
            "--prompt-length 2048 and --response-length 40000 make rows of 42048 tokens, "
            "and this model has 32768 positions (max_position_embeddings); give shorter ones.",
        ),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "7b", *words.split()]) == 2
    assert capsys.readouterr().err == f"plan: {sentence}\n"


def test_a_script_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before anything is planned."""
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "plan.sh"
    for emit, problem in (
        (tmp_path, f"cannot be written, because of {tmp_path}; name another."),
        (inside, f"cannot be written, because of {tmp_path / 'file'}; name another."),
        (tmp_path / "file", "exists and is not a script that this command wrote; name another file."),
    ):
        assert plan.main(["--model", "7b", "--gpus", "8", "--emit", str(emit)]) == 2
        assert capsys.readouterr() == ("", f"plan: --emit {emit} {problem}\n")
    assert plan.main(["--model", "7b", "--gpus", "8", "--emit", str(tmp_path / "plan.sh"), "--no-offload"]) == 2
    assert "--emit writes a script that offloads" in capsys.readouterr().err
    assert not (tmp_path / "plan.sh").exists()


def write(folder: Path, fields: Any) -> Path:
    (folder / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return folder


def test_a_configuration_of_a_folder_or_a_file(tmp_path: Path) -> None:
    for source in (write(tmp_path, QWEN2), tmp_path / "config.json"):
        assert planned_config(str(source)).hidden_size == 3584


KINDS = "is neither tiny, 3b, 7b, 32b nor a Hugging Face config.json or a folder with one "


@pytest.mark.parametrize(
    "fields, part",
    [
        (None, f"{KINDS}(No such file or directory)."),
        ("{", f"{KINDS}(it is not JSON: "),
        ("[]", f"{KINDS}(it has no model_type)."),
        # a published GPT-2 has other names for its sizes; the message says that it is GPT-2
        (
            {"model_type": "gpt2", "n_embd": 768},
            "the Megatron actor does not support the architecture 'gpt2'; it supports llama, mistral, qwen2",
        ),
        (QWEN2 | {"hidden_size": None}, "Expected a whole number hidden_size >= 1 in its config.json, "),
        (
            QWEN2 | {"num_hidden_layers": 1.5},
            "number num_hidden_layers >= 1 in its config.json, got 1.5.",
        ),
        ({k: v for k, v in QWEN2.items() if k != "vocab_size"}, "number vocab_size >= 1 in its "),
        (QWEN2 | {"model_type": "qwen3_moe"}, "number moe_intermediate_size >= 1 in its config.json, "),
        (QWEN2 | {"quantization_config": {}}, "this checkpoint is quantized"),
        # transformers' default for a Mistral model that does not mention its window
        (
            QWEN2 | {"model_type": "mistral"},
            "has no sliding-window attention, which this mistral model uses over 4096",
        ),
    ],
)
def test_a_configuration_that_cannot_be_planned_for(
    tmp_path: Path, fields: Any, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message does not mention the trainer's flags, which the planner does not have."""
    if fields is not None:
        write(tmp_path, fields)
    assert plan.main(["--model", str(tmp_path), "--gpus", "8"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"plan: --model {tmp_path}: ") and part in message and message.count("\n") == 1
    assert "--actor" not in message and "--megatron" not in message


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    for mean in (20.0, 700.0, 3000.0, 4000.0):
        work = Workload(mean_response=mean)
        assert work.response == pytest.approx(mean, rel=1e-3)
        assert work.responses == tuple(sorted(work.responses)) and work.responses[-1] <= 4096
    assert Workload().responses[100] == pytest.approx(4096 / 6, rel=0.02)


def test_micro_batches_hold_every_row() -> None:
    """One holds eight rows of 1024 + about 978 tokens, 32 hold two whole rows each, and an overlong row is alone."""
    work = Workload(samples_per_prompt=1, prompts_per_step=8)
    count, tokens = work.micro_batches(replicas=1, context=1)
    assert count == 1 and tokens == pytest.approx(8 * work.prompt + 8 * work.response, rel=0.1)
    rows = {"prompt_length": 10, "response_length": 90, "prompts_per_step": 8}
    work = Workload(**rows, mean_prompt=10, mean_response=90, max_tokens_per_gpu=250)
    count, tokens = work.micro_batches(replicas=2, context=1)
    assert (count, tokens) == (32, 200)  # two whole rows in each
    assert work.micro_batches(replicas=2, context=2) == (13, pytest.approx(64 * 100 / 13))  # up to five
    assert Workload(**rows, max_tokens_per_gpu=30).micro_batch_tokens(context=2) == 100


def test_a_model_that_names_no_limit_of_positions_is_planned_for(tmp_path: Path) -> None:
    write(tmp_path, QWEN2 | {"max_position_embeddings": None})
    assert plan.main(["--model", str(tmp_path), "--gpus", "8", "--response-length", "100000"]) in (0, 1)
