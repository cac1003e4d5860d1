"""All candidates of a model, a cluster and a workload, ranked; the best, and where nothing fits the smallest cluster on
which something would."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.model_shape import ModelShape
from openrlhf_gtpo.planner.activations import RECOMPUTE
from openrlhf_gtpo.planner.assumptions import Assumptions
from openrlhf_gtpo.planner.candidate import Candidate
from openrlhf_gtpo.planner.cluster import Cluster
from openrlhf_gtpo.planner.layouts import Asked, layouts, precisions, rollout_sizes
from openrlhf_gtpo.planner.rollout import Engines
from openrlhf_gtpo.planner.training_memory import Training
from openrlhf_gtpo.planner.workload import Workload

_NODES = (*range(1, 17), 20, 24, 28, 32, 48, 64, 96, 128, 256, 512)  # that a larger cluster may have


@dataclass(frozen=True)
class Request:
    """What a plan is asked for.

    Fields:
        config: fields of the model's ``config.json``, checked.
        colocated: engines and training share all GPUs; otherwise each has its own.
        rollout_gpus: of the engines when they have their own; None leaves it open.
        offload: see :class:`Candidate`.
        vllm_memory: ``--vllm.gpu_memory_utilization``; None for the assumed one.
    """

    config: SimpleNamespace
    cluster: Cluster
    workload: Workload
    asked: Asked = Asked()
    colocated: bool = True
    rollout_gpus: int | None = None
    offload: bool = True
    distributed_optimizer: bool = True
    vllm_memory: float | None = None
    assumptions: Assumptions = Assumptions()


def candidates(request: Request) -> list[Candidate]:
    """Every legal one, the fastest of those that fit first, then those that do not, the least too large first.

    Of the engines' sizes the fastest that fits is taken for each.

    Raises:
        UsageError: nothing is legal; the message has the rule that is broken.
    """
    _check_lengths(request)
    found: list[Candidate] = []
    refusal: UsageError | None = None
    for training_gpus, rollout_gpus in _divisions(request):
        cluster = request.cluster.of(training_gpus)
        try:
            engines = _engines(request, rollout_gpus)
            for layout in layouts(request.config, cluster, request.asked, request.workload):
                try:
                    options = list(precisions(request.config, cluster, layout, request.asked))
                except UsageError as error:
                    refusal = refusal or error
                    continue
                for fp8 in options:
                    for recompute in (request.asked.recompute,) if request.asked.recompute else RECOMPUTE:
                        found.append(_candidate(request, cluster, engines, layout, fp8, recompute))
        except UsageError as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None
        raise refusal
    return sorted(found, key=lambda one: (not one.fits, *(one.preference if one.fits else (one.breaks[1],))))


def _check_lengths(request: Request) -> None:
    most, work = getattr(request.config, "max_position_embeddings", None), request.workload
    if most is not None and work.row_length > most:
        raise UsageError(
            f"--prompt-length {work.prompt_length} and --response-length {work.response_length} make rows of {work.row_length} "
            f"tokens, and this model has {most} positions (max_position_embeddings); give shorter ones."
        )


def _candidate(
    request: Request, cluster: Cluster, engines: Engines, layout: Layout, fp8: Fp8Options | None, recompute: str
) -> Candidate:
    work = request.workload
    share = work.response_length / work.row_length
    replicas = layout.data_parallel_size(cluster.gpus)
    training = Training(
        shape=ModelShape.of(request.config),
        layout=layout,
        data_parallel=replicas,
        tokens=work.micro_batch_tokens,
        response_tokens=int(work.micro_batch_tokens * share),
        recompute=recompute,
        distributed_optimizer=request.distributed_optimizer,
        fp8=fp8,
    )
    one = Candidate(training, cluster, engines, work, request.assumptions, request.colocated, request.offload)
    return replace(one, training=replace(training, micro_batches=one.speed.micro_batches))


def _divisions(request: Request) -> list[tuple[int, int]]:
    """GPUs that train and GPUs that roll out."""
    total = request.cluster.gpus
    if request.colocated:
        return [(total, total)]
    if request.rollout_gpus is not None:
        if not 1 <= request.rollout_gpus < total:
            raise UsageError(
                f"--rollout-gpus {request.rollout_gpus} leaves none of the {total} GPUs to train on, or none to roll out on; "
                f"give 1 to {total - 1}."
            )
        return [(total - request.rollout_gpus, request.rollout_gpus)]
    if total < 2:
        raise UsageError(
            "--placement split needs at least 2 GPUs, one to train and one to roll out on; take colocated."
        )
    node = request.cluster.gpus_per_node
    step = node if request.cluster.nodes > 1 else 1
    return [(total - rollout, rollout) for rollout in range(step, total, step)]


def _engines(request: Request, gpus: int) -> Engines:
    share = request.vllm_memory
    if share is None:
        assumed = request.assumptions
        share = assumed.vllm_memory_shared if request.colocated else assumed.vllm_memory
    shape, cluster = ModelShape.of(request.config), request.cluster
    sizes = rollout_sizes(request.config, cluster, gpus, request.asked)
    made = [
        Engines(shape, cluster.of(gpus), gpus, size, share, request.workload, request.assumptions) for size in sizes
    ]
    fitting = [engines for engines in made if engines.fits]
    return min(fitting, key=lambda engines: engines.seconds) if fitting else made[-1]


def smallest_cluster(request: Request) -> tuple[Cluster, Candidate] | None:
    """The fewest GPUs of the same kind on which something fits, and its best candidate; None where none does."""
    cluster = request.cluster
    node = cluster.gpus_per_node if cluster.nodes > 1 else 8
    parts = [size for size in (1, 2, 4) if cluster.nodes == 1]
    for size in [*parts, *(nodes * node for nodes in _NODES)]:
        if size <= cluster.gpus:
            continue
        larger = replace(cluster, gpus=size, nodes=max(1, size // node))
        try:
            best = candidates(replace(request, cluster=larger, rollout_gpus=None))[0]
        except UsageError:
            continue
        if best.fits:
            return larger, best
    return None
