"""OpenRLHF's DeepSpeed strategy without DeepSpeed's compiled CPU kernels, so that a CPU host needs no compiler.

DeepSpeed builds two C++ extensions on first use there: a fused Adam, and an all-reduce through shared memory. The first
run would wait a minute or more for g++, and fail without it.
"""

from datetime import timedelta
from typing import Any

from openrlhf.utils.deepspeed import DeepspeedStrategy


class CpuDeepspeedStrategy(DeepspeedStrategy):
    """Adam is torch's, all-reduce is gloo's."""

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """As upstream's, over gloo alone."""
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None
        super().setup_distributed(timeout)

    def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict:
        """As upstream's, with ``torch_adam`` on."""
        config = super().get_ds_train_config(*args, **kwargs)
        if config.get("optimizer", {}).get("type") == "AdamW":
            config["optimizer"]["params"]["torch_adam"] = True
        return config
