"""Ranks all candidates for a model, a cluster and a workload; if none fits, finds the smallest cluster that fits one.
The actor's rules (``megatron.parallel.layout``, ``megatron.fp8.options``) and OpenRLHF's requirements on batches
decide which layouts and precisions are legal."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from types import SimpleNamespace

from openrlhf_gtpo.errors import SettingError
from openrlhf_gtpo.megatron.fp8.options import CAPABILITY, RECIPES, Fp8Options, check_fp8
from openrlhf_gtpo.megatron.parallel.layout import (
    RECOMPUTE,
    Layout,
    check_architecture,
    check_layout,
    legal_pipeline_parallel_sizes,
    legal_tensor_parallel_sizes,
)
from openrlhf_gtpo.model_shape import ModelShape, read_config
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.candidate import Candidate
from openrlhf_gtpo.tools.planner.cluster import Cluster
from openrlhf_gtpo.tools.planner.rollout import Engines
from openrlhf_gtpo.tools.planner.training_memory import Training
from openrlhf_gtpo.tools.planner.workload import Workload

_CONTEXT = (1, 2, 4, 8)
_EXPERT = (1, 2, 4, 8, 16, 32, 64)
_NODES = (*range(1, 17), 20, 24, 28, 32, 48, 64, 96, 128, 256, 512)  # numbers of nodes to try for a larger cluster


@dataclass(frozen=True)
class Request:
    """A request for a plan. None leaves a choice open.

    Fields:
        config: fields of the model's ``config.json``, from :func:`planned_config`.
        tensor, pipeline, context, expert, vllm_tensor: parallel sizes of the actor, and of an engine.
        fp8: ``off`` is bfloat16, else a mode.
        fp8_param: FP8 primary weights, which rule out bfloat16.
        colocated: engines and training share all GPUs; otherwise each has its own.
        rollout_gpus: GPUs of the engines when they have their own.
        offload, async_enable: see :class:`Candidate`.
        vllm_memory: ``gpu_memory_utilization``; None for the assumed one.
        lora_rank: rank of LoRA adapters, trained in bfloat16 instead of the weights; 0 for none.
    """

    config: SimpleNamespace
    cluster: Cluster
    workload: Workload
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    vllm_tensor: int | None = None
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp8_param: bool = False
    recompute: str | None = None
    colocated: bool = True
    rollout_gpus: int | None = None
    offload: bool = True
    async_enable: bool = False
    distributed_optimizer: bool = True
    vllm_memory: float | None = None
    lora_rank: int = 0
    assumptions: Assumptions = Assumptions()

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.config)


def planned_config(model: str) -> SimpleNamespace:
    """Read the configuration of a model that the Megatron actor can train; ``model`` is as for :func:`read_config`.

    Raises:
        ValueError: the configuration or a size is missing, or the actor cannot train the model.
    """
    # Needed to check the sliding window and the length of rows.
    config = SimpleNamespace(**{"max_position_embeddings": math.inf} | read_config(model))
    check_architecture(config)
    ModelShape.of(config)
    return config


def candidates(request: Request) -> list[Candidate]:
    """List every legal candidate: the fitting ones, fastest first, then the others, least oversized first.

    Each has the fastest engines that fit, or the largest if none does.

    Raises:
        SettingError: no candidate is legal. The message names the broken rule.
    """
    work, most = request.workload, request.config.max_position_embeddings
    if most is not None and work.row_length > most:
        raise SettingError(
            f"$prompt_length {work.prompt_length} and $response_length {work.response_length} make rows of "
            f"{work.row_length} tokens, but this model has {most} positions (max_position_embeddings); lower them."
        )
    # Divide the GPUs, then vary layout, precision and recompute. If nothing is legal, raise the first error.
    legal: list[Candidate] = []
    refusals: list[SettingError] = []
    for training_gpus, rollout_gpus in _divisions(request):
        cluster = request.cluster.of(training_gpus)
        try:
            engines = _engines(request, rollout_gpus)
            layouts = _layouts(request, cluster)
        except SettingError as error:
            refusals.append(error)
            continue
        for layout in layouts:
            try:
                precisions = _precisions(request, cluster, layout)
            except SettingError as error:
                refusals.append(error)
                continue
            for fp8, recompute in product(precisions, [request.recompute] if request.recompute else RECOMPUTE):
                replicas, context = layout.data_parallel_size(training_gpus), layout.context_parallel_size
                # A short rollout makes one optimizer step of up to two batches minus one row (old_policy.count_steps).
                rows = -(-min(work.rows, 2 * work.batch - 1) // replicas)
                tokens = min(work.micro_batch_tokens(context), rows * work.row_length)
                training = Training(
                    shape=request.shape,
                    layout=layout,
                    data_parallel=replicas,
                    tokens=tokens,
                    response_tokens=int(tokens * (work.response_length / work.row_length)),
                    micro_batches=work.micro_batches(replicas, context)[0],
                    recompute=recompute,
                    distributed_optimizer=request.distributed_optimizer,
                    fp8=fp8,
                    lm_head_bytes=request.assumptions.lm_head_mb * 2**20,
                    lora_rank=request.lora_rank,
                )
                where = request.colocated, request.offload, request.async_enable
                legal.append(Candidate(training, cluster, engines, *where))
    if not legal:
        raise refusals[0]
    return sorted(legal, key=lambda plan: (not plan.fits, *(plan.preference if plan.fits else (plan.breaks[1],))))


def _divisions(request: Request) -> list[tuple[int, int]]:
    """Yield the ways to divide the GPUs: how many train, and how many roll out."""
    total, cluster = request.cluster.gpus, request.cluster
    if request.colocated:
        return [(total, total)]
    if request.rollout_gpus is not None:
        if not 1 <= request.rollout_gpus < total:
            raise SettingError(
                f"$rollout_gpus {request.rollout_gpus} leaves none of the {total} GPUs for training or none for the "
                f"rollout; give 1 to {total - 1}."
            )
        training, node = total - request.rollout_gpus, cluster.gpus_per_node
        if training > node and training % node:
            raise SettingError(
                f"$rollout_gpus {request.rollout_gpus} leaves {training} GPUs for training, which do not fill nodes "
                f"of {node} GPUs; give another number."
            )
        return [(training, request.rollout_gpus)]
    if total < 2:
        raise SettingError(
            "$placement split needs at least 2 GPUs, one for training and one for the rollout; use colocated."
        )
    step = cluster.gpus_per_node if cluster.nodes > 1 else 1
    return [(total - rollout, rollout) for rollout in range(step, total, step)]


def _engines(request: Request, gpus: int) -> Engines:
    """Find the fastest engines that fit on ``gpus`` GPUs.

    Raises:
        SettingError: vLLM, the GPUs or a node do not allow the requested tensor-parallel size.
    """
    assumed, shape, requested = request.assumptions, request.shape, request.vllm_tensor
    most, share = request.cluster.gpus_per_node, request.vllm_memory
    if share is None:
        share = assumed.vllm_memory_shared if request.colocated else assumed.vllm_memory
    # What vLLM 0.29.0 splits evenly (model_executor/models/qwen2.py, layers/vocab_parallel_embedding.py).
    heads, groups, columns = shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size
    vocabulary = -(-shape.vocab_size // 64) * 64
    largest = math.gcd(heads, columns, vocabulary, gpus, most)
    shared = [size for size in range(1, largest + 1) if largest % size == 0]
    legal = [size for size in shared if groups % size == 0 or size % groups == 0]
    if requested is not None and requested not in legal:
        raise SettingError(
            f"$vllm_tensor_parallel {requested} must divide {heads} attention heads, {columns} columns of the MLP, "
            f"{vocabulary} of the vocabulary, {gpus} GPUs of the rollout and {most} of a node, and divide {groups} "
            f"key-value heads or be a multiple of them; give one of {', '.join(map(str, legal))}."
        )
    cluster, sizes = request.cluster.of(gpus), legal if requested is None else [requested]
    choices = [Engines(shape, cluster, gpus, size, share, request.workload, assumed) for size in sizes]
    fitting = [engines for engines in choices if engines.fits]
    return min(fitting, key=lambda engines: engines.seconds) if fitting else choices[-1]


def _layouts(request: Request, cluster: Cluster) -> list[Layout]:
    """List all layouts that the model, the GPUs and the batch allow, with sequence parallelism wherever TP is above 1.

    TP stays within a node, because its collectives run in every layer.

    Raises:
        SettingError: none is legal. The message says why the first is not.
    """
    if request.lora_rank and request.shape.num_experts:
        raise SettingError("$lora_rank: the Megatron actor has no adapters for mixtures of experts; leave it out.")
    config, batch, node = request.config, request.workload.batch, request.cluster.gpus_per_node
    layouts, refusals = [], []
    # Try every combination of parallel sizes, and keep the reasons against the illegal ones.
    for tensor, pipeline, context, expert in product(
        [request.tensor] if request.tensor else legal_tensor_parallel_sizes(config),
        [request.pipeline] if request.pipeline else legal_pipeline_parallel_sizes(config),
        [request.context] if request.context else _CONTEXT,
        [request.expert] if request.expert else _EXPERT if request.shape.num_experts else [1],
    ):
        layout = Layout(tensor, pipeline, context, expert, sequence_parallel=tensor > 1)
        try:
            check_layout(config, layout, cluster.gpus)
            if cluster.nodes > 1 and node % tensor:
                raise SettingError(
                    f"$tensor_model_parallel_size {tensor} does not divide the {node} GPUs of a node, within which "
                    f"it must stay; give a divisor of {node}."
                )
            replicas = layout.data_parallel_size(cluster.gpus)
            if batch % replicas:
                raise SettingError(
                    f"{replicas} replicas (TP {tensor} × PP {pipeline} × CP {context} on {cluster.gpus} GPUs) "
                    f"do not divide the {batch} responses of an optimizer step; "
                    "give larger parallel sizes or another $train_batch."
                )
            layouts.append(layout)
        except SettingError as error:
            refusals.append(error)
    if not layouts:
        raise refusals[0]
    return layouts


def _precisions(request: Request, cluster: Cluster, layout: Layout) -> list[Fp8Options | None]:
    """List the precisions that the request, the GPU and the matrix widths allow: bfloat16 (None) and FP8 recipes.

    Raises:
        SettingError: the request is for FP8, but no recipe is legal.
    """
    only_fp8 = request.fp8 or request.fp8_recipe or request.fp8_param
    if request.lora_rank and only_fp8 and request.fp8 != "off":
        raise SettingError("$lora_rank trains adapters in bfloat16; leave out the FP8 settings.")
    if request.fp8 == "off" or request.lora_rank:
        return [None]
    precisions: list[Fp8Options | None] = [] if only_fp8 else [None]
    refusals = []
    for recipe in [request.fp8_recipe] if request.fp8_recipe else RECIPES:
        mode = request.fp8 or ("e4m3" if recipe == "blockwise" else "hybrid")
        options = Fp8Options(mode, recipe, primary_weights=request.fp8_param)
        try:
            if cluster.gpu.fp8 is None or cluster.gpu.capability < CAPABILITY[recipe]:
                raise SettingError(
                    f"$fp8 {mode} with the recipe {recipe} does not run on {cluster.gpu.name}; leave it out."
                )
            check_fp8(options, request.config, layout, cuda=True)
            precisions.append(options)
        except SettingError as error:
            refusals.append(error)
    if not precisions:
        raise refusals[0]
    return precisions


def smallest_cluster(request: Request) -> Candidate | None:
    """Find the best candidate on the smallest larger cluster of the same GPUs that fits one; None if there is none."""
    cluster = request.cluster
    node = cluster.gpus_per_node if cluster.nodes > 1 else 8
    parts = (1, 2, 4) if cluster.nodes == 1 else ()
    for size in (*parts, *(nodes * node for nodes in _NODES)):
        if size <= cluster.gpus:
            continue
        larger = replace(cluster, gpus=size, nodes=max(1, size // node))
        try:
            best = candidates(replace(request, cluster=larger, rollout_gpus=None))[0]
        except SettingError:
            continue
        if best.fits:
            return best
    return None
