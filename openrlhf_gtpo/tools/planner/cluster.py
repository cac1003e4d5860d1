"""The GPUs of a plan: how many, of which kind, in how many nodes.

Numbers are from NVIDIA's data sheets (without sparsity) for H100 SXM and NVL, H200, A100 and L40S, and from vendors'
listings for H20. Memory is what the driver reports.
"""

from dataclasses import dataclass, replace

from openrlhf_gtpo.errors import SettingError

GIB = 2**30
_MOST_PER_NODE = 16
_NODE = 8  # GPUs per node unless given


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Fields:
        memory: bytes, as the driver reports them.
        bf16, fp8: FLOP/s of dense products; fp8 is None for a GPU without FP8.
        memory_bandwidth, link: bytes/s of its memory, and to other GPUs of its node in one direction.
        capability: CUDA compute capability, on which FP8 recipes depend.
    """

    name: str
    memory: float
    bf16: float
    fp8: float | None
    memory_bandwidth: float
    link: float
    capability: tuple[int, int]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80g", 79.6 * GIB, 989e12, 1979e12, 3350e9, 450e9, (9, 0)),
        Gpu("h100-pcie-80g", 79.6 * GIB, 756e12, 1513e12, 2000e9, 64e9, (9, 0)),
        Gpu("h100-nvl-94g", 93.6 * GIB, 835e12, 1671e12, 3900e9, 300e9, (9, 0)),
        Gpu("h200-141g", 139.8 * GIB, 989e12, 1979e12, 4800e9, 450e9, (9, 0)),
        Gpu("h20-96g", 95.1 * GIB, 148e12, 296e12, 4000e9, 450e9, (9, 0)),
        Gpu("h800-80g", 79.6 * GIB, 989e12, 1979e12, 3350e9, 200e9, (9, 0)),
        Gpu("a100-80g", 79.3 * GIB, 312e12, None, 2039e9, 300e9, (8, 0)),
        Gpu("a100-40g", 39.5 * GIB, 312e12, None, 1555e9, 300e9, (8, 0)),
        Gpu("l40s-48g", 44.9 * GIB, 362e12, 733e12, 864e9, 32e9, (8, 9)),
    )
}


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes.

    Fields:
        network: bytes/s from each GPU to other nodes, in one direction.
    """

    gpu: Gpu
    gpus: int
    nodes: int
    network: float = 50e9

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    def of(self, gpus: int) -> "Cluster":
        """Make a cluster of the same nodes with ``gpus`` GPUs in total: part of one node, or whole nodes."""
        return replace(self, gpus=gpus, nodes=-(-gpus // self.gpus_per_node))


def parse_cluster(gpu: str, gpus: int, nodes: int | None = None, network_gbit: float = 400.0) -> Cluster:
    """Make the cluster of ``gpus`` GPUs of the kind ``gpu`` in :data:`GPUS`.

    Args:
        nodes: None for nodes of 8 GPUs, or one node if there are fewer.
        network_gbit: Gbit/s from each GPU to other nodes.

    Raises:
        SettingError: the GPU is not in the table, or the numbers do not make a cluster.
    """
    kind = GPUS.get(gpu.lower())
    if kind is None:
        raise SettingError(f"$gpu {gpu} is not known; choose one of {', '.join(GPUS)}.")
    if nodes is None:
        if gpus > _NODE and gpus % _NODE:
            raise SettingError(
                f"$gpus {gpus} does not fill nodes of {_NODE}; give $nodes too, or a multiple of {_NODE}."
            )
        nodes = -(-gpus // _NODE)
    if gpus % nodes:
        raise SettingError(
            f"$gpus {gpus} is the number in all nodes together, and $nodes {nodes} does not divide it; "
            f"give a multiple of {nodes}."
        )
    if gpus // nodes > _MOST_PER_NODE:
        raise SettingError(
            f"$gpus {gpus} on $nodes {nodes} makes {gpus // nodes} per node, but a node has at most "
            f"{_MOST_PER_NODE}; give at least $nodes {-(-gpus // _MOST_PER_NODE)}."
        )
    if not network_gbit > 0:
        raise SettingError(f"Expected $network_gbit > 0 (Gbit/s for each GPU, such as 400), got {network_gbit:g}.")
    return Cluster(kind, gpus, nodes, network_gbit * 1e9 / 8)
