"""The GPUs that a plan is for: how many, of which kind, in how many nodes.

Numbers are NVIDIA's data sheets' (dense, without sparsity): H100 SXM and NVL, H200, H20 by vendors' listings, A100, L40S.
Memory is what the driver reports of it.
"""

from dataclasses import dataclass, replace

from openrlhf_gtpo.errors import UsageError

_TERA, _GIGA, GIB = 1e12, 1e9, 2**30
MOST_PER_NODE = 16
_NODE = 8  # GPUs of a node where nothing else is said


@dataclass(frozen=True)
class Gpu:
    """One kind.

    Fields:
        memory: bytes that the driver reports.
        bf16, fp8: FLOP/s of dense products; fp8 is None where there is none.
        memory_bandwidth, link: bytes/s of its memory, and to other GPUs of its node in one direction.
        capability: CUDA's, of which FP8 recipes ask.
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
        Gpu("h100-80g", 79.6 * GIB, 989 * _TERA, 1979 * _TERA, 3350 * _GIGA, 450 * _GIGA, (9, 0)),
        Gpu("h100-pcie-80g", 79.6 * GIB, 756 * _TERA, 1513 * _TERA, 2000 * _GIGA, 64 * _GIGA, (9, 0)),
        Gpu("h100-nvl-94g", 93.6 * GIB, 835 * _TERA, 1671 * _TERA, 3900 * _GIGA, 300 * _GIGA, (9, 0)),
        Gpu("h200-141g", 139.8 * GIB, 989 * _TERA, 1979 * _TERA, 4800 * _GIGA, 450 * _GIGA, (9, 0)),
        Gpu("h20-96g", 95.1 * GIB, 148 * _TERA, 296 * _TERA, 4000 * _GIGA, 450 * _GIGA, (9, 0)),
        Gpu("h800-80g", 79.6 * GIB, 989 * _TERA, 1979 * _TERA, 3350 * _GIGA, 200 * _GIGA, (9, 0)),
        Gpu("a100-80g", 79.3 * GIB, 312 * _TERA, None, 2039 * _GIGA, 300 * _GIGA, (8, 0)),
        Gpu("a100-40g", 39.5 * GIB, 312 * _TERA, None, 1555 * _GIGA, 300 * _GIGA, (8, 0)),
        Gpu("l40s-48g", 44.9 * GIB, 362 * _TERA, 733 * _TERA, 864 * _GIGA, 32 * _GIGA, (8, 9)),
    )
}


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes.

    Fields:
        network: bytes/s that each GPU has to other nodes, in one direction.
    """

    gpu: Gpu
    gpus: int
    nodes: int
    network: float = 50e9

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    def link(self, consecutive: int) -> float:
        """bytes/s between the ranks of a group that spans ``consecutive`` GPUs in order."""
        return self.gpu.link if consecutive <= self.gpus_per_node else self.network

    def of(self, gpus: int) -> "Cluster":
        """The same kind of nodes, with ``gpus`` GPUs in all: parts of one node, or whole ones."""
        return replace(self, gpus=gpus, nodes=max(1, -(-gpus // self.gpus_per_node)))


def parse_cluster(gpu: str, gpus: int, nodes: int | None = None, network_gbit: float = 400.0) -> Cluster:
    """The cluster of ``--gpu``, ``--gpus``, ``--nodes`` and ``--network-gbit``.

    Args:
        nodes: None for as many as nodes of 8 give, or one for fewer GPUs.
        network_gbit: Gbit/s of each GPU to other nodes.

    Raises:
        UsageError: a GPU that is not in the table, or numbers that make no cluster.
    """
    kind = GPUS.get(gpu.lower())
    if kind is None:
        raise UsageError(f"--gpu {gpu} is not known; the kinds are {', '.join(GPUS)}.")
    if gpus < 1:
        raise UsageError(f"Expected --gpus >= 1, got {gpus}.")
    if nodes is None:
        if gpus > _NODE and gpus % _NODE:
            raise UsageError(
                f"--gpus {gpus} makes no whole nodes of {_NODE}; give --nodes too, or a multiple of {_NODE}."
            )
        nodes = -(-gpus // _NODE)
    if nodes < 1:
        raise UsageError(f"Expected --nodes >= 1, got {nodes}.")
    if gpus % nodes:
        raise UsageError(
            f"--gpus {gpus} is the number in all nodes together, and --nodes {nodes} does not divide it; "
            f"give a multiple of {nodes}."
        )
    if gpus // nodes > MOST_PER_NODE:
        raise UsageError(
            f"--gpus {gpus} on --nodes {nodes} makes {gpus // nodes} in a node, and no node has more than {MOST_PER_NODE}; "
            f"give at least --nodes {-(-gpus // MOST_PER_NODE)}."
        )
    if not network_gbit > 0:
        raise UsageError(f"--network-gbit {network_gbit:g} is no bandwidth; give Gbit/s for each GPU, such as 400.")
    return Cluster(kind, gpus, nodes, network_gbit * 1e9 / 8)
