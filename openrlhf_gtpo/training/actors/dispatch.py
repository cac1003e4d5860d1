"""Groups of Ray actors: where ranks run, how training rows are dealt to them, and how a batch runs whose entries are
not a multiple of the replicas."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.utils import get_bundle_indices
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import show_phase
from openrlhf_gtpo.training.actors.micro_batches import prompts_of
from openrlhf_gtpo.training.actors.optimizer_steps import deal_rows

# Methods that run a forward pass over micro-batches: of a model, and of the policy without its adapters.
FORWARDS = ("forward", "forward_reference")


class ActorGroup(RayActorGroup):
    """Upstream's group (openrlhf 0.11.2, trainer/ray/launcher.py), with four differences.

    - Upstream gives rank i bundle i. Ray packs equal bundles with std::sort, which leaves more than 16 in no order
      (https://github.com/ray-project/ray/issues/51117), so that tensor-parallel groups cross nodes. Here ranks fill
      one node after another, as the GPUs of upstream's engines do.
    - Upstream deals rows by count, this group by tokens (:func:`deal_rows`).
    - Upstream sends all ranks the same arguments; here one rank can get more.
    - Upstream ends the run if the end of the data leaves a replica without an entry ("Insufficient batch size").

    Each difference can go once upstream does the same.

    Args:
        tensor_parallel_size: number of consecutive ranks that share every matrix; other arguments are upstream's.

    Raises:
        UsageError: a tensor-parallel group would cross nodes.
    """

    def __init__(self, *args: Any, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        self._tensor_parallel_size = tensor_parallel_size
        self.placement_group: PlacementGroup | None = None  # the one passed in, which is shared
        super().__init__(*args, **kwargs)

    def _initiate_actors(self, pg: PlacementGroup | None, num_gpus_per_actor: float) -> None:
        world_size = self._num_nodes * self._num_gpus_per_node
        self.placement_group = pg
        if pg is None and world_size > 1:
            pg = placement_group([{"GPU": 1, "CPU": 1}] * world_size, strategy="PACK")
            ray.get(pg.ready())
        places: list[PlacementGroupSchedulingStrategy | None] = [None]
        if pg is not None:
            bundles = get_bundle_indices(pg, 0, world_size)
            check_on_one_node(pg, bundles, self._tensor_parallel_size, "the model")
            places = [PlacementGroupSchedulingStrategy(pg, bundle) for bundle in bundles]

        def start(rank: int, *meeting: Any) -> Any:
            options = {"num_cpus": num_gpus_per_actor, "num_gpus": num_gpus_per_actor}
            kind: Any = self.ray_actor_type
            return kind.options(**options, scheduling_strategy=places[rank]).remote(world_size, rank, *meeting)

        first = start(0, None, None)
        store = first.__ray_call__.remote(open_store)
        self._actor_handlers = [first]
        if world_size > 1:
            meeting = ray.get(store)
            self._actor_handlers += [start(rank, *meeting) for rank in range(1, world_size)]

    def async_init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Like upstream's, and note the phase for ``report watch``."""
        show_phase(strategy.arguments.logger.metrics_path, names.LOAD_MODELS)
        return super().async_init_model_from_pretrained(strategy, *args, **kwargs)

    def async_run_method(
        self, method_name: str, *args: Any, for_first: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Like upstream's, but only the first rank gets the arguments ``for_first``: 32 copies of a rollout take
        several GB."""
        first, *others = self._actor_handlers
        refs = [getattr(first, method_name).remote(*args, **kwargs, **(for_first or {}))]
        return refs + [getattr(rank, method_name).remote(*args, **kwargs) for rank in others]

    def ask_first(self, method_name: str) -> Any:
        """Call the method on the first rank alone; returns Ray's reference to the answer."""
        return getattr(self._actor_handlers[0], method_name).remote()

    def async_run_method_batch(self, method_name: str, **columns: Sequence[Any]) -> list[Any]:
        """Like upstream's, for any number of entries; the results cover these entries alone.

        A replica with fewer entries than another repeats a forward on the last entry and discards the results: under
        ZeRO-3 and expert parallelism the others cannot run theirs alone. A replica without an entry skips other
        methods. :func:`deal_rows` deals the rows to ``append``.
        """
        if method_name == "append":
            columns = {"experience": self._deal(columns["experience"])}
        entries = len(next(iter(columns.values())))
        ranks = self.duplicate_actors  # per replica, which all get its entries
        replicas = len(self._actor_handlers) // ranks
        if method_name in FORWARDS and entries % replicas:
            refs = []
            for replica, own in enumerate(np.array_split(np.arange(entries), replicas)):
                places = [*own, *[entries - 1] * (-(-entries // replicas) - len(own))]
                part = ray.put({name: [values[place] for place in places] for name, values in columns.items()})
                actors = self._actor_handlers[replica * ranks : (replica + 1) * ranks]
                arguments = (method_name, part, len(places), len(own))
                refs += [actor.__ray_call__.remote(_forward, *arguments) for actor in actors]
            return refs
        if not 0 < entries < replicas:
            return super().async_run_method_batch(method_name, **columns)
        return [
            actor.execute_batch.remote(method_name, columns, entry, entry + 1)
            for entry in range(entries)
            for actor in self._actor_handlers[entry * ranks : (entry + 1) * ranks]
        ]

    def _deal(self, experiences: Sequence[Experience]) -> Sequence[Experience]:
        """Regroup the rows into the same number of entries for each replica, replica after replica."""
        replicas = len(self._actor_handlers) // self.duplicate_actors
        order = ray.get(self._actor_handlers[0].__ray_call__.remote(lambda actor: actor.trainer.row_order()))
        if order is None or sum(len(experience.sequences) for experience in experiences) < replicas:
            return experiences
        rows = [row for experience in experiences for row in split_experience_batch(experience)]
        prompts = prompts_of(rows) if order.shares_prompts else None
        dealt = deal_rows([int(row.total_length) for row in rows], replicas, order, prompts)
        entries = min(-(-len(experiences) // replicas), len(dealt[-1]))
        parts = [part for replica_rows in dealt for part in np.array_split(replica_rows, entries)]
        return [make_experience_batch([rows[row] for row in part]) for part in parts]


class ReferenceOfActor:
    """The actor without its adapters, instead of a group with a reference model.

    Args:
        actor: its group.
    """

    _actor_handlers: Sequence[Any] = ()  # its ranks are the actor's

    def __init__(self, actor: ActorGroup) -> None:
        self._actor = actor

    def async_init_model_from_pretrained(self, *unused: Any) -> list[Any]:
        """Nothing to load."""
        return []

    def async_run_method(self, method_name: str, **given: Any) -> list[Any]:
        """Call the method on the actor."""
        return self._actor.async_run_method(method_name, **given)

    def async_run_method_batch(self, method_name: str, **columns: Sequence[Any]) -> list[Any]:
        """Run the actor's ``forward`` without adapters."""
        assert method_name == FORWARDS[0]
        return self._actor.async_run_method_batch(FORWARDS[1], **columns)


class Groups:
    """Makes a run's groups when upstream's ``train`` asks for them. The reference's group may be the actor's.

    Args:
        policy: actor type of the policy.
        reference: actor type for which the policy without adapters is used; None to use it for none.
        tensor_parallel_size: number of ranks that share every matrix, in every group.
    """

    def __init__(self, policy: Any, reference: Any, tensor_parallel_size: int) -> None:
        self._policy, self._reference = policy, reference
        self.tensor_parallel_size = tensor_parallel_size
        self._actor: Any = None

    def __call__(self, num_nodes: int, num_gpus_per_node: int, kind: Any, **options: Any) -> Any:
        if kind is self._reference:
            return ReferenceOfActor(self._actor)
        sizes = {"tensor_parallel_size": self.tensor_parallel_size}
        group = ActorGroup(num_nodes, num_gpus_per_node, kind, **options, **sizes)
        if kind is self._policy:
            self._actor = group
        return group


def _forward(actor: Any, method_name: str, columns: dict[str, list[Any]], entries: int, kept: int) -> list[Any]:
    """Run a forward on the entries in a rank's process; returns the first ``kept`` results."""
    return actor.execute_batch(method_name, columns, 0, entries)[:kept]


def engine_bundles(pg: PlacementGroup, index: int, length: int) -> list[int]:
    """Return upstream's choice of ``length`` GPUs for vLLM engine ``index``; UsageError if they cross nodes."""
    bundles = get_bundle_indices(pg, index, length)
    check_on_one_node(pg, bundles, length, f"vLLM engine {index} (counted from 0)")
    return bundles


def check_on_one_node(pg: PlacementGroup, bundles: list[int], size: int, whose: str) -> None:
    """Raise UsageError if a tensor-parallel group of ``whose``, ``size`` consecutive ``bundles``, crosses nodes."""
    if platform.chosen_platform() == "cpu":  # there, several nodes may be one host on purpose
        return
    node_of = ray.util.placement_group_table(pg)["bundles_to_node_id"]
    nodes = [node_of[bundle] for bundle in bundles]
    if any(len(set(nodes[rank : rank + size])) > 1 for rank in range(0, len(nodes), size)):
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        counts = ", ".join(f"{names[node]}: {count}" for node, count in Counter(nodes).items())
        raise UsageError(
            f"Expected a multiple of {size} GPUs on each node, so that no tensor-parallel group crosses nodes. "
            f"Ray placed the {len(nodes)} processes of {whose} as {counts}. Free the GPUs that other programs hold "
            "there, or give a smaller tensor-parallel size."
        )


def open_store(actor: Any) -> tuple[str, int]:
    """Open the store where the ranks meet, in rank 0's process; returns its address and port.

    Upstream picks a free port but binds it minutes later, while engines start and take ports. torch's rendezvous
    shares a store that its process already has open at the port (torch 2.13.0, distributed/rendezvous.py,
    ``_create_c10d_store``: ``multi_tenant``).
    """
    actor._store = TCPStore(actor._master_addr, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    os.environ["MASTER_PORT"] = str(actor._store.port)
    return actor._master_addr, actor._store.port
