"""Upstream's group of Ray actors, for batches that have fewer entries than there are replicas."""

from collections.abc import Sequence
from typing import Any

from openrlhf.trainer.ray.launcher import RayActorGroup


class ActorGroup(RayActorGroup):
    """Upstream's, which ends the run where the end of the data leaves a replica without an entry ("Insufficient batch
    size", openrlhf 0.11.2, trainer/ray/launcher.py). Can go once it deals out fewer entries."""

    def async_run_method_batch(self, method_name: str, **columns: Sequence[Any]) -> list[Any]:
        """As upstream's; the results are those of the entries.

        A replica without one computes a forward of the last entry, whose result nobody sees: under ZeRO-3 and expert
        parallelism the others cannot compute theirs alone. Any other method is not called on it.
        """
        entries = len(next(iter(columns.values())))
        ranks = self.duplicate_actors  # of a replica, which all get its entries
        replicas = len(self._actor_handlers) // ranks
        if not 0 < entries < replicas:
            return super().async_run_method_batch(method_name, **columns)
        if method_name == "forward":
            whole = {name: [*values, *[values[-1]] * (replicas - entries)] for name, values in columns.items()}
            return super().async_run_method_batch(method_name, **whole)[: entries * ranks]
        return [
            actor.execute_batch.remote(method_name, columns, entry, entry + 1)
            for entry in range(entries)
            for actor in self._actor_handlers[entry * ranks : (entry + 1) * ranks]
        ]
