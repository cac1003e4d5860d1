"""Has vLLM's CPU kernels report the experts that they choose, as its GPU kernels do.

vLLM imports this by name in its engine's process, before it loads a model. It refuses to return experts of kernels
that choose them inside, and 0.29's for the CPU say of themselves that they do, though they choose in a function of
their own (vllm 0.29.0, model_executor/layers/fused_moe/experts/cpu_moe.py, CPUUnquantizedExperts). From 0.30 on a
router chooses, and reports; this file can go with 0.29.
"""

from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from openrlhf_gtpo.training.rollout.worker_extension import WorkerExtension


class CapturingExtension(WorkerExtension):
    """The extension of vLLM's workers in a run that replays routes."""


_select_experts: Any = getattr(CPUUnquantizedExperts, "_select_experts", None)  # 0.29's alone


def _select_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
    weights, experts = _select_experts(self, *args, **kwargs)
    if self.routing_replay_capture_fn is not None:
        self.routing_replay_capture_fn(experts)
    return weights, experts


if _select_experts is not None:
    CPUUnquantizedExperts._select_experts = _select_and_report
    CPUUnquantizedExperts.supports_routing_replay_capture = lambda self: True
