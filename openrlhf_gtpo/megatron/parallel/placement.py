"""Which part of the work is this rank's, by Megatron's groups."""

from megatron.core import parallel_state


def is_first_replica() -> bool:
    """True on the ranks that together hold the first copy of the model, which with experts shared among replicas are
    those of several."""
    return bool(parallel_state.get_expert_data_parallel_rank() == 0)


def is_reporter() -> bool:
    """True on one rank of each replica: a last stage, which has the losses."""
    return bool(
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
