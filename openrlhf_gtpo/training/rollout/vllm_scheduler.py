"""A scheduler for vLLM that holds what a request samples until the request ends.

A step's log-probs reach vLLM's scheduler as three arrays. From there on vLLM makes objects of each token: a slice, an
``EngineCoreOutput``, a part of a message, and more in the client. Nobody reads them before a training request's end,
so the request is held here: its values are appended to its own bytes, and it leaves as one message.

Which requests are held, and what the array means: ``answers.py``. vLLM imports this file in its engine's process, by
the name that ``scheduler_cls`` gives. Another vLLM may lack what is overridden here (``settings/guard.py``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from openrlhf_gtpo.training.rollout.answers import columns, is_held


class _Held:
    """A request, and the bytes of its array: the values of what it has sampled, the experts of what was computed."""

    def __init__(self, request: Request) -> None:
        self.request, self.values, self.routes = request, bytearray(), bytearray()
        self.route_bytes = 0  # of a token
        assert request.sampling_params is not None
        self.top = request.sampling_params.logprobs or 0
        self.prefill_stats: Any = None  # which vLLM sends with the first token

    def take(self, output: EngineCoreOutput) -> None:
        """Keep what an output says besides values: the routes of the prompt, and later of the token before."""
        self.prefill_stats = self.prefill_stats or output.prefill_stats
        if output.routed_experts is not None:  # often a part of a whole step's array
            self.routes += output.routed_experts.tobytes()
            self.route_bytes = output.routed_experts[0].nbytes

    def fill(self, output: EngineCoreOutput) -> None:
        """Have the last output of the request, and only one that leaves, say what all of them would have said."""
        output.new_token_ids = self.request.output_token_ids.copy()
        output.prefill_stats, output.routed_experts = self.prefill_stats, None
        count, width = len(output.new_token_ids), self.route_bytes
        routes = np.frombuffer(self.routes, np.uint8).reshape(-1, width or 1)
        values = np.frombuffer(self.values, np.uint8).reshape(count, len(self.values) // max(count, 1))
        if width:
            rows = np.zeros((len(routes) + 1, width + values.shape[1]), np.uint8)  # the last token has no route
            rows[:-1, :width], rows[len(rows) - count :, width:] = routes, values
            output.routed_experts = rows
        elif self.values:
            output.routed_experts = values


class _StepValues:
    """A step's values in place of ``LogprobsLists``: what vLLM slices for a held request is put aside."""

    def __init__(self, lists: LogprobsLists, names: Sequence[str], held: Mapping[str, _Held]) -> None:
        self._lists, self._names, self._held = lists, names, held
        self._packed: dict[int, bytes] = {}  # all rows of the step, with so many likely tokens

    def slice_request(self, index: int, count: int) -> LogprobsLists | None:
        """The values of the ``count`` tokens that request ``index`` of the step got; None if it is held."""
        held = self._held.get(self._names[index])
        if held is None:
            return self._lists.slice_request(index, count)
        if held.top not in self._packed:
            self._packed[held.top] = self._pack(held.top)
        rows, starts = self._packed[held.top], self._lists.cu_num_generated_tokens
        size = len(rows) // len(self._lists.sampled_token_ranks)
        first = index if starts is None else starts[index]
        held.values += rows[first * size : (first + count) * size]
        return None

    def _pack(self, top: int) -> bytes:
        tokens, log_probs, ranks, _ = self._lists
        rows = np.empty(len(ranks), columns(top))
        rows["rank"], rows["log_prob"] = ranks, log_probs[:, 0]
        if top:
            rows["top_log_probs"], rows["top_tokens"] = log_probs[:, 1 : top + 1], tokens[:, 1 : top + 1]
        return rows.tobytes()


class HoldingScheduler(Scheduler):
    """vLLM's scheduler; ``held`` has requests under way, whose tokens have not left, by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, _Held] = {}

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if is_held(request.sampling_params):
            self.held[request.request_id] = _Held(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:  # aborted, or in error
            self.held.pop(request.request_id, None)
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        if not self.held:
            return super().update_from_output(scheduler_output, model_runner_output)
        lists = model_runner_output.logprobs
        if lists is not None:
            model_runner_output.logprobs = _StepValues(lists, model_runner_output.req_ids, self.held)
        of_clients = super().update_from_output(scheduler_output, model_runner_output)
        for client in of_clients.values():
            client.outputs = [output for output in client.outputs if self._leaves(output)]
        return {
            number: client
            for number, client in of_clients.items()
            if client.outputs or client.finished_requests or client.scheduler_stats
        }

    def _leaves(self, output: EngineCoreOutput) -> bool:
        held = self.held.get(output.request_id)
        if held is None:
            return True
        held.take(output)
        if output.finish_reason is None:
            return False
        del self.held[output.request_id]
        held.fill(output)
        return True


class HoldingAsyncScheduler(HoldingScheduler, AsyncScheduler):
    """The same of vLLM's asynchronous scheduler."""


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """What ``scheduler_cls`` names; that vLLM schedules asynchronously is known only in the engine's process."""
    kind = HoldingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else HoldingScheduler
    return kind(vllm_config=vllm_config, **parts)
