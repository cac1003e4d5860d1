"""OpenRLHF's DeepSpeed strategy: a backward pass tells if it ends an optimizer step; a CPU host compiles nothing."""

import os
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil  # vLLM and DeepSpeed depend on it
import ray
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from openrlhf.utils.deepspeed import DeepspeedStrategy
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler


class Strategy(DeepspeedStrategy):
    """Upstream's, with gradient accumulation in the hands of the trainers (see ``optimizer_steps``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed is told 1 micro-batch a step, so that it divides no loss; the trainers say which one is the last.
        self.use_dynamic_batch = True

    def setup_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        *args: Any,
        sampler: Any = None,
        **kwargs: Any,
    ) -> StatefulDataLoader:
        """As upstream's; the process that draws the prompts, which nobody seeds, shuffles them by ``--train.seed``.
        Can go with a release that has https://github.com/OpenRLHF/OpenRLHF/pull/1355."""
        if shuffle and sampler is None and not torch.distributed.is_initialized():
            sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(self.seed))
        return super().setup_dataloader(dataset, batch_size, pin_memory, shuffle, *args, sampler=sampler, **kwargs)

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        # Left alone, gloo listens where the host's name resolves to, on many hosts a loopback (torch 2.13.0,
        # ProcessGroupGloo::createDefaultDevice), and Megatron has gloo groups over all nodes. NCCL skips loopbacks.
        address = ray.util.get_node_ip_address()
        for name, addresses in psutil.net_if_addrs().items():
            if address in [known.address for known in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        super().setup_distributed(timeout)
        self.accumulated_gradient = 1  # a moving average of the weights counts calls, and is called once a step

    def get_ds_eval_config(self, *args: Any, **kwargs: Any) -> dict:
        """As upstream's, without batch sizes, which DeepSpeed would hold against each other (deepspeed 0.19.6,
        runtime/config.py, _batch_assertion); nothing is trained. Can go once upstream leaves them out."""
        config = super().get_ds_eval_config(*args, **kwargs)
        del config["train_batch_size"]
        return config | {"train_micro_batch_size_per_gpu": 1}


class CpuStrategy(Strategy):
    """Adam is torch's, all-reduce is gloo's: DeepSpeed would build C++ extensions for both on first use.

    The first run would wait a minute or more for g++, and fail without it. Can go once DeepSpeed's backend can be had
    without the extension (deepspeed 0.19.6, comm/torch.py, build_shm_op).
    """

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """As upstream's, over gloo alone."""
        # By full name: the attribute `deepspeed.comm.torch` is torch, which that package imports from its own module.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
        super().setup_distributed(timeout)

    def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict:
        """As upstream's, with ``torch_adam`` on."""
        config = super().get_ds_train_config(*args, **kwargs)
        if config.get("optimizer", {}).get("type") == "AdamW":
            config["optimizer"]["params"]["torch_adam"] = True
        return config


def _load(self: TorchCheckpointEngine, path: str, map_location: Any = None) -> Any:
    """As DeepSpeed's, of tensors, plain values and these classes alone: with weights_only=False (deepspeed 0.19.6) it
    would run whatever a checkpoint's file says."""
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


TorchCheckpointEngine.load = _load
