"""Which layouts and precisions a model allows on a cluster. The rules are the actor's own (``megatron.layout`` and
``megatron.fp8_options``), and what OpenRLHF asks of batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import CAPABILITY, RECIPES, Fp8Options, check_fp8
from openrlhf_gtpo.megatron.parallel.layout import (
    Layout,
    LayoutError,
    check_layout,
    legal_pipeline_parallel_sizes,
    legal_tensor_parallel_sizes,
)
from openrlhf_gtpo.planner.cluster import Cluster
from openrlhf_gtpo.planner.workload import Workload

_MOST_CONTEXT, _MOST_EXPERT = 8, 64


@dataclass(frozen=True)
class Asked:
    """Sizes that the user has fixed; None leaves one open.

    Fields:
        fp8: None leaves it open, ``off`` is bfloat16, else a mode.
        fp8_param: FP8 primary weights, and so no bfloat16.
        recompute: None leaves it open.
    """

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp8_param: bool = False
    recompute: str | None = None
    vllm_tensor: int | None = None


def layouts(config: SimpleNamespace, cluster: Cluster, asked: Asked, workload: Workload) -> list[Layout]:
    """All that the model, the GPUs and the batch allow, sequence parallelism on wherever TP is above 1.

    TP stays within a node: its collectives run in every layer.

    Raises:
        UsageError: a size that was asked for is not legal, or none is; the message has the rule.
    """
    tensors = [asked.tensor] if asked.tensor else legal_tensor_parallel_sizes(config)
    pipelines = [asked.pipeline] if asked.pipeline else legal_pipeline_parallel_sizes(config)
    contexts = [asked.context] if asked.context else _powers_of_two(_MOST_CONTEXT)
    experts = [asked.expert] if asked.expert else _powers_of_two(_MOST_EXPERT if _moe(config) else 1)
    found, refusals = [], []
    for tensor in tensors:
        for pipeline in pipelines:
            for context in contexts:
                for expert in experts:
                    try:
                        found.append(_layout(config, cluster, workload, (tensor, pipeline, context, expert)))
                    except (LayoutError, UsageError) as error:
                        refusals.append(str(error))
    if not found:
        raise UsageError(_as_planner_flags(refusals[0]))
    return found


def _layout(config: SimpleNamespace, cluster: Cluster, workload: Workload, sizes: tuple[int, int, int, int]) -> Layout:
    layout = Layout(*sizes, sequence_parallel=sizes[0] > 1)
    check_layout(config, layout, cluster.gpus, cuda=True)
    if sizes[0] > cluster.gpus_per_node:
        raise UsageError(
            f"--tensor-parallel {sizes[0]} is more than the {cluster.gpus_per_node} GPUs of a node, and its collectives run "
            f"in every layer; give at most {cluster.gpus_per_node}."
        )
    replicas = layout.data_parallel_size(cluster.gpus)
    if workload.batch % replicas:
        raise UsageError(
            f"{replicas} replicas (TP {sizes[0]} × PP {sizes[1]} × CP {sizes[2]} on {cluster.gpus} GPUs) do not divide the "
            f"{workload.batch} responses of an optimizer step; give larger parallel sizes or another --train-batch."
        )
    return layout


def precisions(config: SimpleNamespace, cluster: Cluster, layout: Layout, asked: Asked) -> Iterator[Fp8Options | None]:
    """bfloat16 (None) and FP8 recipes that the GPU and the widths allow.

    Raises:
        UsageError: the precision that was asked for is not legal.
    """
    if asked.fp8 == "off" or (asked.fp8 is None and asked.fp8_recipe is None and not asked.fp8_param):
        yield None
        if asked.fp8 == "off":
            return
    recipes = [asked.fp8_recipe] if asked.fp8_recipe else list(RECIPES)
    refusal = None
    legal = False
    for recipe in recipes:
        mode = asked.fp8 or ("e4m3" if recipe == "blockwise" else "hybrid")
        options = Fp8Options(mode, recipe, primary_weights=asked.fp8_param)
        try:
            if cluster.gpu.fp8 is None or cluster.gpu.capability < CAPABILITY[recipe]:
                raise UsageError(f"--fp8 {mode} with the recipe {recipe} is not for {cluster.gpu.name}; leave it out.")
            check_fp8(options, config, layout, cuda=True)
        except (LayoutError, UsageError) as error:
            refusal = refusal or str(error)
            continue
        legal = True
        yield options
    if not legal and (asked.fp8 or asked.fp8_recipe or asked.fp8_param):
        raise UsageError(_as_planner_flags(str(refusal)))


def rollout_sizes(config: SimpleNamespace, cluster: Cluster, gpus: int, asked: Asked) -> list[int]:
    """Tensor-parallel sizes of vLLM's engines on ``gpus`` GPUs.

    Raises:
        UsageError: the size that was asked for does not divide the heads, the GPUs or a node.
    """
    heads = config.num_attention_heads
    most = cluster.gpus_per_node

    def fits(size: int) -> bool:
        return heads % size == 0 and gpus % size == 0 and most % size == 0

    legal = [size for size in range(1, most + 1) if fits(size)]
    if asked.vllm_tensor is None:
        return legal
    if asked.vllm_tensor not in legal:
        raise UsageError(
            f"--vllm-tensor-parallel {asked.vllm_tensor} must divide the {heads} attention heads, the {gpus} GPUs of the rollout "
            f"and the {most} of a node; it can be {', '.join(map(str, legal))}."
        )
    return [asked.vllm_tensor]


def _moe(config: SimpleNamespace) -> bool:
    return config.model_type == "qwen3_moe"


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def _as_planner_flags(sentence: str) -> str:
    """The actor's message with the planner's names of the flags."""
    for kind in ("tensor", "pipeline", "context", "expert"):
        sentence = sentence.replace(f"--megatron.{kind}_model_parallel_size", f"--{kind}-parallel")
    sentence = sentence.replace("--megatron.context_parallel_size", "--context-parallel")
    for name in ("fp8_recipe", "fp8_param", "fp8"):
        sentence = sentence.replace(f"--megatron.{name}", f"--{name.replace('_', '-')}")
    return sentence
