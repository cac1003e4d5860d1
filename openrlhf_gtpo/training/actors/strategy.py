"""OpenRLHF's DeepSpeed strategy with three changes: trainers decide where an optimizer step ends, a CPU host compiles
nothing, and checkpoints are written whole or not at all, and verified when read."""

import copyreg
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import deepspeed
import psutil  # vLLM and DeepSpeed depend on it
import ray
import torch
from deepspeed import comm as deepspeed_comm
from deepspeed.comm import comm
from deepspeed.git_version_info import installed_ops
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import has_inf_or_nan
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address
from openrlhf.models import Actor
from openrlhf.trainer.ray import launcher, ppo_actor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from peft import PeftModel
from safetensors import SafetensorError
from torch.utils import cpp_extension
from torch.utils.serialization import config as serialization
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, _StatefulRandomSamplerIterator

from openrlhf_gtpo.checkpoints import folder as checkpoint_folder
from openrlhf_gtpo.checkpoints import hf_folder
from openrlhf_gtpo.checkpoints.files import CheckpointError, Entry, HashedFile
from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.checkpoints.together import agree, choose, publish, put_in_order
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import varlen_attention
from openrlhf_gtpo.platform.agreement import (
    all_gather_objects,
    failure_of,
    from_first_rank,
    message_of,
    raise_together,
)
from openrlhf_gtpo.platform.compile_lock import CompileLock
from openrlhf_gtpo.platform.random_state import apply_random_state, random_state
from openrlhf_gtpo.training.actors import adapters, shared_prompts
from openrlhf_gtpo.training.actors.policy_model import PolicyModel
from openrlhf_gtpo.training.checks.origin import ORIGIN
from openrlhf_gtpo.training.checks.prompts import Prompts, blending_datasets
from openrlhf_gtpo.training.checks.results import checkpoint_folders
from openrlhf_gtpo.training.settings.frozen import freeze
from openrlhf_gtpo.training.settings.prompts import keep_prompts

# In a checkpoint's client states: the caller's states, and all ranks' random states. DeepSpeed 0.19.6 returns entries
# of its own beside them. It refuses to save some of these, and others belong to one rank (runtime/engine.py,
# _load_checkpoint).
_GIVEN, _RANDOM = "given", "random"


class Strategy(DeepspeedStrategy):
    """Upstream's strategy, with gradient accumulation left to the trainers (see ``optimizer_steps``).

    Attributes:
        arguments: the run's arguments; ``args`` is upstream's own copy.
    """

    _lora: dict[str, Any] | None = None  # description, in checkpoints, of the adapters that this process trains

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arguments = freeze(self.args)
        # Tells DeepSpeed 1 micro-batch per step, so that it divides no loss; the trainers say which one is the last.
        self.use_dynamic_batch = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in an actor's process. In a controller's, upstream's included, let prompts and labels be read as
        they stand in their files."""
        self.__dict__.update(state)
        if controller := sys.modules.get("openrlhf.trainer.ppo_trainer"):
            vars(controller).update(blending_datasets=blending_datasets, PromptDataset=Prompts)

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
        """Like upstream's, but shuffle prompts by ``--train.seed``: upstream does not seed the process that draws
        them. Can go with a release that has https://github.com/OpenRLHF/OpenRLHF/pull/1355. A resumed pass over the
        data covers the rows that it began with, even if rows were appended."""
        if shuffle and sampler is None and not torch.distributed.is_initialized():
            sampler = Shuffled(dataset, generator=torch.Generator().manual_seed(self.seed))
        return super().setup_dataloader(dataset, batch_size, pin_memory, shuffle, *args, sampler=sampler, **kwargs)

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        cpp_extension.FileBaton = CompileLock  # DeepSpeed builds its CPU Adam on first use
        if self.arguments.ds.attn_implementation == varlen_attention.NAME:
            varlen_attention.register()
        if self._shares_prompts:
            shared_prompts.register()
            # Also for a reference, and without entropies: upstream's model computes logits for every row's prompt.
            ppo_actor.Actor = launcher.Actor = PolicyModel
        # Left alone, gloo listens on the address of the host's name, on many hosts a loopback (torch 2.13.0,
        # ProcessGroupGloo::createDefaultDevice), and Megatron has gloo groups over all nodes. NCCL skips loopbacks.
        address = ray.util.get_node_ip_address()
        for name, addresses in psutil.net_if_addrs().items():
            if address in [entry.address for entry in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        super().setup_distributed(timeout)
        self.accumulated_gradient = 1  # the moving average of the weights counts calls, one per step

    @torch.no_grad()
    def moving_average(self, model: Any, model_ema: Any, beta: float = 0.992, device: str = "cpu") -> None:
        """Like upstream's, with two differences. Under ZeRO 3 it averages this rank's parts: DeepSpeed drops what
        upstream writes to gathered weights (deepspeed 0.19.6, zero/partition_parameters.py, GatheredParameters without
        modifier_rank). And it is as exact as in float32: bfloat16 rounds away most of what a step adds."""
        for weight, average, rounded_off in zip(model.parameters(), *averages(model_ema), strict=True):
            if weight.requires_grad:
                exact = average.float() + rounded_off.float()
                exact.lerp_(getattr(weight, "ds_tensor", weight).data.to(exact), 1 - beta)
                average.copy_(exact)
                rounded_off.copy_(exact - average.float())

    @property
    def _shares_prompts(self) -> bool:
        """Whether the models on DeepSpeed share prompts."""
        return self.arguments.ds.attn_implementation == shared_prompts.NAME

    def prepare(self, *models: Any) -> Any:
        """Like upstream's, but each model that this process trains or runs computes shared prompts once."""
        for given in models if self._shares_prompts else ():
            model = given[0] if isinstance(given, tuple) else given
            if model is not None:
                # Upstream's reward model reads a row's last token, and is made in a function.
                model = self._unwrap_model(model)
                shared_prompts.share(model, last_tokens=type(model).__name__ == "RewardModel")
        return super().prepare(*models)

    def _ds_init_train_model(self, model: Any, cfg: dict) -> Any:
        """Like upstream's, but skip a step with a non-finite gradient, as ZeRO 2 does. In bf16 DeepSpeed does not
        check with ZeRO 3, nor with ZeRO 1 and ``--ds.grad_accum_dtype fp32``. Without ZeRO, and with FusedAdam, it
        checks but steps anyway (deepspeed 0.19.6, zero/stage3.py, bf16_optimizer.py, fp16/fused_optimizer.py). Can go
        once all of them heed ``check_grad_overflow`` (https://github.com/deepspeedai/DeepSpeed/pull/6976)."""
        # Adapters start before DeepSpeed takes the parameters.
        if isinstance(module := self._unwrap_model(model), PeftModel):
            adapters.start(module, self.arguments.ds.param_dtype, self.arguments.train.seed)
            actor = self.arguments.actor
            assert actor.lora is not None
            described = partial(adapters.described, module, actor.lora, actor.model_name_or_path)
            self._lora = from_first_rank(described, UsageError)
        model, optimizer, scheduler = super()._ds_init_train_model(model, cfg)
        # Each of DeepSpeed's optimizers skips such a step in a way of its own.
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            update = optimizer._overflow_check_and_loss_scale_update
            optimizer._overflow_check_and_loss_scale_update = lambda: optimizer.check_overflow() or update()
        elif isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            # They start with a step of zeros (0.19.6, initialize_optimizer_states). If Adam counted it, its first
            # steps would be a quarter too small.
            optimizer.optimizer.state.clear()
            for group in optimizer.optimizer.param_groups:
                group.pop("step", None)
        if isinstance(optimizer, FP16_Optimizer):
            optimizer.loss_scale_config.use_grad_scaling = True  # in bf16 the scale is 1
        elif isinstance(optimizer, BF16_Optimizer):
            # The LM head may be outside the engine's forward (policy_model.py). Its gradient then exists before
            # DeepSpeed's prologue, which would clear it with an earlier pass's gradients. Here the epilogue clears.
            optimizer.backward_prologue = lambda: None
            optimizer.backward_epilogue = partial(optimizer.backward_epilogue, clear_lp_grads=True)
            step, optimizer.overflow = optimizer.step, False

            def step_if_finite() -> None:
                gradients = optimizer.fp32_groups_gradients_flat
                checks = [(has_inf_or_nan(gradient), gradient.any()) for gradient in gradients]
                bad_and_some = torch.stack([torch.stack(flags).any() for flags in zip(*checks)]).float()
                torch.distributed.all_reduce(bad_and_some, op=torch.distributed.ReduceOp.MAX)
                bad, some = bad_and_some.tolist()
                optimizer.overflow = bool(bad)
                if bad or not some:  # DeepSpeed asserts that there is a gradient, but equal rewards give none
                    optimizer._global_grad_norm = 0.0
                    optimizer.clear_hp_grads()
                else:
                    step()

            optimizer.step = step_if_finite
        return model, optimizer, scheduler

    def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict:
        """Like upstream's, but with torch's fused AdamW if DeepSpeed's FusedAdam (the same formula) is not compiled,
        because nvcc would compile it at the first step. An optimizer on the host stays DeepSpeed's."""
        config = super().get_ds_train_config(*args, **kwargs)
        if "optimizer" in config and not installed_ops.get("fused_adam") and not self.adam_offload:
            config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}  # Muon's contains an Adam
        return config

    def get_ds_eval_config(self, *args: Any, **kwargs: Any) -> dict:
        """Like upstream's, without batch sizes: DeepSpeed would check them against each other (deepspeed 0.19.6,
        runtime/config.py, _batch_assertion) although nothing is trained. Can go once upstream leaves them out."""
        config = super().get_ds_eval_config(*args, **kwargs)
        del config["train_batch_size"]
        return config | {"train_micro_batch_size_per_gpu": 1}

    def save_ckpt(
        self,
        model: Any,
        save_dir: str,
        tag: str,
        max_num: int,
        max_mem: float,
        client_state: Any = None,
        **options: Any,
    ) -> None:
        """Like upstream's, but write like the Megatron actor's ``Checkpoints``: with checksums, and under a temporary
        name until the checkpoint is whole and on disk; only then are earlier ones removed. Also save every rank's
        random generators, which dropout draws from and DeepSpeed 0.19.6 does not save.

        Raises:
            CheckpointWriteError: on all ranks, if one could not write; earlier checkpoints stay as they were.
        """
        # Every rank writes its files under the temporary name. Failures are kept, as ranks wait for each other.
        states = {_GIVEN: client_state or {}, _RANDOM: all_gather_objects(random_state())}
        lora = self._lora
        target = Path(save_dir, tag)
        temporary = from_first_rank(partial(checkpoint_folder.begin, target, whole_folder=True), CheckpointWriteError)
        upstream_engine, copy_script = model.checkpoint_engine, model._copy_recovery_script
        model.checkpoint_engine = files = _CheckpointFiles(
            temporary, adapters.trained_names(model.module) if lora else None
        )
        model._copy_recovery_script = lambda path: files.attempt(partial(copy_script, path))
        try:
            model.save_checkpoint(
                save_dir,
                tag=temporary.name,
                client_state=states,
                save_latest=False,
                exclude_frozen_parameters=lora is not None,
            )
        finally:
            model.checkpoint_engine = upstream_engine
            del model._copy_recovery_script
        # If all ranks succeeded, the manifest follows, then the final name, and earlier checkpoints go.
        agree(temporary, target, files.failure)
        metric = {name: options.get(f"metric_{name}") for name in ("key", "value")}
        world_size = torch.distributed.get_world_size()
        contents = {"metric": metric, "world_size": world_size, ORIGIN: (client_state or {}).get(ORIGIN)}
        contents |= {} if lora is None else {"lora": lora}
        publish(temporary, target, contents, files.entries)
        put_in_order(target, self._saved_together(target.parent)[1:], max_num=max_num, max_mem_gb=max_mem)

    def load_ckpt(self, model: Any, load_dir: str, tag: str | None = None, **kwargs: Any) -> Any:
        """Like upstream's, but load the newest undamaged checkpoint, or ``--ckpt.load_tag``; actor and critic load the
        same one. The optimizer's settings come from the command line (upstream: from the checkpoint). Random
        generators continue where they were, unless the number of ranks has changed. DeepSpeed handles its universal
        checkpoints itself.

        Raises:
            CheckpointError: there are checkpoints, but none that can be used.
        """
        # Choose one, and make sure that its adapters are this run's.
        tag = tag or self.arguments.ckpt.load_tag
        if not self.use_ds_universal_ckpt:
            path = choose(self._saved_together(Path(load_dir)), tag)
            if path is None:
                return None, {}
            tag = path.name
            adapters.check_same(path, self._lora)
            if self._lora is not None:
                model.load_module_state_dict = partial(_load_adapters, model.module)
        # Keep the command line's settings, which loading overwrites.
        schedule = model.lr_scheduler
        peaks = list(schedule.base_lrs)
        group_settings = [
            {name: group[name] for name in ("betas", "eps", "momentum", "weight_decay") if name in group}
            for group in schedule.optimizer.param_groups
        ]
        try:
            loaded, states = super().load_ckpt(model, load_dir, tag, **kwargs)
        finally:
            vars(model).pop("load_module_state_dict", None)
        if isinstance(model.optimizer, DeepSpeedZeroOptimizer):
            # Muon's momentum has the gradients' dtype (deepspeed 0.19.6, zero/stage_1_and_2.py, get_flat_partition),
            # but torch loads it in the dtype of the float32 weights.
            for state in schedule.optimizer.state.values():
                if "momentum_buffer" in state:
                    state["momentum_buffer"] = state["momentum_buffer"].to(model.optimizer.gradient_accumulation_dtype)
        # Back to the command line's settings; a learning rate keeps its place in the schedule.
        groups = schedule.optimizer.param_groups
        for group, saved, peak, settings in zip(groups, schedule.base_lrs, peaks, group_settings, strict=True):
            group.update(settings)
            group["lr"] *= peak / saved if saved not in (0, peak) else 1
            group["initial_lr"] = peak
        schedule.base_lrs = peaks
        randoms = states.get(_RANDOM, ())
        if len(randoms) == torch.distributed.get_world_size():
            apply_random_state(randoms[torch.distributed.get_rank()])
        return loaded, states.get(_GIVEN, states)  # an earlier version's are among DeepSpeed's

    def _saved_together(self, folder: Path) -> list[Path]:
        """``folder`` and, in a run with a critic, the folder of the other role, with a checkpoint of each tag too."""
        return [folder, *(other for other in checkpoint_folders(self.arguments) if other.name != folder.name)]

    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Like upstream's, but write only the weights anew, into a folder that then becomes ``output_dir`` (see
        ``hf_folder``). If the first rank, which writes, fails, all ranks fail and none waits for it.

        Raises:
            CheckpointWriteError: the model could not be written.
        """
        args, module, directory = self.arguments, self._unwrap_model(model), Path(output_dir)
        source = module.config.name_or_path  # the folder or name that it was loaded from
        # OpenRLHF's value network is not a causal language model, whatever its source's configuration says.
        changed = {} if isinstance(model, Actor) else {"architectures": [type(module).__name__]}
        # The weights, by all ranks; then the first rank completes the folder and puts it in its place.
        temporary = from_first_rank(partial(hf_folder.begin, directory), CheckpointWriteError)
        try:
            failure = None
            if self._lora is None:
                super().save_model(model, tokenizer, str(temporary), **kwargs)
            else:
                gather = partial(gathered, args, module)
                assert args.actor.lora is not None
                adapters.save(module, gather, temporary, args.actor.lora, source, self.is_rank_0())
                torch_dist_barrier_and_cuda_sync()
        except (OSError, SafetensorError) as error:
            failure = message_of(error)
            torch_dist_barrier_and_cuda_sync()  # upstream's last line, which the other ranks have reached

        def finish() -> None:
            dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
            hf_folder.publish(temporary, directory, source, dtype=dtype, **changed)
            keep_prompts(directory, args)

        if self.is_rank_0():
            failure = failure or failure_of(finish)
            if failure is not None:
                shutil.rmtree(temporary, ignore_errors=True)
        raise_together(failure, CheckpointWriteError)


class Shuffled(RandomSampler):
    """torchdata's sampler, whose passes remember their number of rows."""

    def __iter__(self) -> Iterator[int]:
        return _Pass(self)


class _Pass(_StatefulRandomSamplerIterator):
    _ROWS = "rows"
    n: int

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {self._ROWS: self.n}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n = self.num_samples = state_dict.get(self._ROWS, self.n)  # an earlier version's state lacks it
        super().load_state_dict(state_dict)


class CpuStrategy(Strategy):
    """The strategy on a CPU host, with gloo's all-reduce: DeepSpeed would build a C++ extension for its own.

    The first run would wait a minute or more for g++, or fail without it. Can go once DeepSpeed's backend works
    without the extension (deepspeed 0.19.6, comm/torch.py, build_shm_op).
    """

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """Like upstream's, but over gloo alone."""
        # By full name: the attribute `deepspeed.comm.torch` is torch, which the package imports from its own module.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
        deepspeed_comm.all_gather_into_tensor = _gather_to_the_end
        super().setup_distributed(timeout)
        # In deterministic mode torch fills what it allocates, such as 1 GB for gradients per step, 0.4 s here.
        torch.utils.deterministic.fill_uninitialized_memory = False


def gathered(args: Any, module: Any, parameters: list[torch.nn.Parameter]) -> AbstractContextManager:
    """Return a context in which the parameters of ``module`` are whole, despite tensor parallelism or ZeRO-3.
    Collective."""
    if args.ds.tensor_parallel_size > 1:
        return deepspeed.module_inject.layers.GatherReplacedLayerParams(parameters, module)
    return deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id"))


def averages(model_ema: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's parts of the weights' moving average, and what their dtype has rounded off."""
    parts = [getattr(weight, "ds_tensor", weight).data for weight in model_ema.parameters()]
    if not hasattr(model_ema, "rounded_off"):
        model_ema.rounded_off = [torch.zeros_like(part) for part in parts]
    return parts, model_ema.rounded_off


def _gather_to_the_end(*args: Any, **kwargs: Any) -> Any:
    """Like DeepSpeed's, but wait until it is done. ZeRO 3 gathers several weights and waits for the last (deepspeed
    0.19.6, zero/partition_parameters.py, _allgather_params_coalesced). Over gloo another may end later, and would
    overwrite what was loaded in the meantime."""
    handle = comm.all_gather_into_tensor(*args, **kwargs)
    if handle is not None:
        handle.wait()
    return handle


def _load_adapters(module: Any, checkpoint: dict[str, Any], **unused: Any) -> None:
    """Load adapters. Replaces DeepSpeed's ``load_module_state_dict``, which also wants the base, which is not
    saved."""
    saved, own = checkpoint["module"], adapters.trained_names(module)
    if odd := sorted(own ^ set(saved)):
        raise CheckpointError(f"The checkpoint and the model do not have the same adapters, such as {odd[0]}.")
    module.load_state_dict(saved, strict=False)


def _load(self: TorchCheckpointEngine, path: str, map_location: Any = None) -> Any:
    """Like DeepSpeed's, but load only tensors, plain values and these classes: with weights_only=False (deepspeed
    0.19.6) it would run any code in a checkpoint's file."""
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


TorchCheckpointEngine.load = _load
# Pickled by value, as Python itself does since 3.11.4. Before that, as in Debian 12 (3.11.2, enum.py), it is pickled
# through `getattr`, which no safe load accepts: a checkpoint was written and could not be read.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))


class _CheckpointFiles(TorchCheckpointEngine):
    """A checkpoint engine that writes DeepSpeed's files with checksums. It keeps the first failure instead of raising
    it, because DeepSpeed's ranks wait for each other at the end of a save even if it failed."""

    def __init__(self, folder: Path, only: set[str] | None = None) -> None:
        super().__init__()
        self._folder, self._only = folder, only  # which of the module's keys; DeepSpeed would save a frozen, tied head
        self.entries: dict[str, Entry] = {}
        self.failure: str | None = None

    def attempt(self, write: Callable[[], None]) -> None:
        self.failure = self.failure or failure_of(write)

    def save(self, state_dict: Any, path: str) -> None:
        if self._only is not None and "module" in state_dict:
            kept = {name: tensor for name, tensor in state_dict["module"].items() if name in self._only}
            state_dict = state_dict | {"module": kept}

        def write() -> None:
            with HashedFile(path) as stream, serialization.patch("save.compute_crc32", False):  # the file is hashed
                torch.save(state_dict, stream)
            self.entries[str(Path(path).relative_to(self._folder))] = stream.entry

        self.attempt(write)
