"""Groups of responses that engines were asked for, until their answers complete them."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import ray
from vllm import SamplingParams

from openrlhf_gtpo.training.rows import Dropped, Request, Row

if TYPE_CHECKING:
    from openrlhf_gtpo.training.rollout.sampler import Sampler

Parts = Mapping[int, list[Row] | Dropped]  # a group's parts, by the place of their first row


class Groups:
    """Groups that are not complete yet. If an engine dies, the others get its requests.

    Args:
        sampler: the sampler, with its engines.
        params: the requests' sampling parameters.
    """

    def __init__(self, sampler: "Sampler", params: SamplingParams) -> None:
        self._sampler, self._params = sampler, params
        self._under_way: dict[int, tuple[Request, int, dict[int, list[Row] | Dropped]]] = {}  # by number; parts wanted
        self._waiting: dict[ray.ObjectRef, Request] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def ask(self, request: Request) -> None:
        """Ask engines for all responses of a group."""
        asked = self._sampler.split(request) if request.is_trained else [request]
        self._under_way[request.number] = request, len(asked), {}
        self._waiting.update(self._sampler.ask(asked, self._params))

    def answered(self, seconds: float) -> list[ray.ObjectRef]:
        """Wait for an answer, at most so many ``seconds``; returns it for :meth:`complete`."""
        waiting = list(self._waiting)
        return ray.wait(waiting, num_returns=1, timeout=seconds)[0] if waiting else []

    def complete(self, answered: list[ray.ObjectRef]) -> Iterator[tuple[Request, Parts]]:
        """Yield the groups that these answers complete.

        Raises:
            Exception: from an engine's call, if no engine's death explains it.
        """
        for ref in answered:
            asked = self._waiting.pop(ref)
            self._sampler.note_answer(asked)
            try:
                answer = ray.get(ref)
            except ray.exceptions.RayError as error:
                again = self._sampler.in_place_of(asked, error)
                self._waiting.update(self._sampler.ask([again], self._params))
                continue
            request, wanted, parts = self._under_way[asked.number]
            parts[asked.first] = answer
            if len(parts) == wanted:
                del self._under_way[asked.number]
                yield request, parts
