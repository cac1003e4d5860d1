"""What the actor trainers on DeepSpeed and on Megatron share: the loss, sending weights to the engines, and writing
results, with retries while the disk is full."""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import ray
import ray.util.state
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from ray.exceptions import ActorUnavailableError
from torch import Tensor

from openrlhf_gtpo.errors import Restartable, TrainingStopped, last_error
from openrlhf_gtpo.platform.agreement import all_gather_objects
from openrlhf_gtpo.platform.files import is_full
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.info import info_rows, off_policy_rows
from openrlhf_gtpo.training.credit.loss import (
    LossFeature,
    LossInputs,
    LossOutputs,
    StepTotals,
    make_policy_loss,
    micro_batch_loss,
)
from openrlhf_gtpo.weight_sync.buckets import Weights
from openrlhf_gtpo.weight_sync.receipts import WeightSyncError
from openrlhf_gtpo.weight_sync.sender import ColocatedSender, Engine, WeightSender, gather, ray_engine

# Seconds that engines may take to start: the trainer's other ranks wait an hour for the first (`setup_distributed`).
_START_LIMIT = 45 * 60.0
_AGAIN = 1.0
_LOG_LINES = 5
_TRIES, _WAIT = 60, 30  # the wait in seconds
_READ_INFO = (names.GROUPS_CORRECT, names.GROUPS_ACCURACY)


def wait_for_engines(
    engines: Sequence[Any],
    kind: str = "vLLM engine",
    limit: float = _START_LIMIT,
    report_every: float = 60.0,
) -> None:
    """Wait until every engine has loaded and compiled its model, and print from time to time which ones have not.

    The weight-transfer group that they join next gives up after 300 s (vllm 0.29.0, distributed/utils.py,
    ``StatelessProcessGroup.create``), and a first download or compilation may take longer.

    Args:
        engines: handles of Ray actors.
        kind: what messages call one of them.

    Raises:
        Restartable: an engine died, or some are not ready after ``limit`` seconds.
    """
    began = time.monotonic()
    starting = {engine.__ray_ready__.remote().future(): number for number, engine in enumerate(engines)}
    while starting:
        # Take out the engines that are ready, ask restarted ones again, and stop at the first that died.
        ready, _ = wait(starting, timeout=report_every, return_when=FIRST_COMPLETED)
        waited = time.monotonic() - began
        for future in ready:
            number = starting.pop(future)
            failure = future.exception()
            if isinstance(failure, ActorUnavailableError):  # Ray is restarting it
                time.sleep(_AGAIN)
                starting[engines[number].__ray_ready__.remote().future()] = number
            elif failure is not None:
                raise Restartable(
                    f"{kind} {number} of {len(engines)} (counted from 0) died after the trainer had waited "
                    f"{waited:.0f} s for it: {last_error(failure, 400)}{_last_words(engines[number])}"
                )
        # Name the others, and stop if they are too late.
        absent = ", ".join(map(str, sorted(starting.values())))
        if starting and waited >= limit:
            raise Restartable(
                f"{kind}s {absent} of {len(engines)} (counted from 0) did not start within {waited:.0f} s"
                f"{_last_words(engines[min(starting.values())])}"
            )
        if starting and not ready:
            print(f"The trainer is waiting for {kind}s {absent} of {len(engines)}: {waited:.0f} s", flush=True)


def _last_words(engine: Any) -> str:
    """The end of a sentence with the engine's last lines; if Ray's dashboard has none, it says where to look."""
    try:
        text = "".join(ray.util.state.get_log(actor_id=engine._actor_id.hex(), tail=_LOG_LINES, timeout=30))
    except Exception:  # no dashboard, or one that wants a token, or its agent died with the node
        return "; its node's Ray logs say why."
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return f"; its log ends: {' | '.join(lines)}"


class ActorTrainer(ActorPPOTrainer):
    """Upstream's actor trainer, with one loss for both backends and a weight transfer in buckets."""

    loss_features: Sequence[LossFeature] = ()  # what features do at the loss of a micro-batch, in their order

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.args: Arguments = strategy.arguments  # upstream's own may be written to
        self.policy_loss = make_policy_loss(self.args)

    def loss(
        self,
        batch: Experience,
        log_probs: Tensor,
        entropy: Tensor | None,
        totals: StepTotals,
        kl_coef: float,
        router_loss: Tensor | None = None,
    ) -> LossOutputs:
        """Compute the loss of a micro-batch from the (B, T) values of a forward pass. Copies what it reads of
        ``batch`` to their device. Arguments: see ``LossInputs``."""

        def on_device(values: Tensor | None) -> Any:
            return None if values is None else values.to(log_probs.device, non_blocking=True)

        info = {name: on_device(info_rows(batch, name)) for name in _READ_INFO if name in batch.info}

        inputs = LossInputs(
            log_probs=log_probs,
            old_log_probs=on_device(batch.action_log_probs),
            advantages=on_device(batch.advantages),
            mask=on_device(batch.action_mask.bool()),
            totals=totals,
            rollout_log_probs=on_device(batch.rollout_log_probs),
            base_log_probs=on_device(batch.base_action_log_probs),
            entropy=entropy,
            router_loss=router_loss,
            off_policy=on_device(off_policy_rows(batch)),
            correct=info.get(names.GROUPS_CORRECT),
            accuracy=info.get(names.GROUPS_ACCURACY),
            labels=batch.labels,
        )
        return micro_batch_loss(inputs, self.policy_loss, self.loss_features, self.args, kl_coef)

    @property
    def _colocated(self) -> bool:
        """True if the engines share this trainer's GPUs: upstream's condition for CUDA IPC, but for any backend."""
        return self.args.train.colocate_all and not self.args.train.async_enable

    def _engines(self) -> list[Engine]:
        return [ray_engine(engine) for engine in self.vllm_engines]

    def _init_vllm_sync_group(self, backend: str) -> None:
        if self.args.vllm.sync_with_ray:
            super()._init_vllm_sync_group(backend)
        elif not self._colocated:
            wait_for_engines(self.vllm_engines)
            try:
                self._broadcaster = WeightSender(
                    self._engines(),
                    self.args.vllm.tensor_parallel_size,
                    ray.util.get_node_ip_address(),
                    torch.device(torch.cuda.current_device()),
                )
            except ray.exceptions.RayError:
                wait_for_engines(self.vllm_engines)  # which names the one that died
                raise

    _rejoined = False  # whether engines were rejoined since the last transfer

    def rejoin_engines(self) -> None:
        """Join the engines again after some were restarted. Checksums verify the next transfer.

        Raises:
            Restartable: one of them died in the meantime.
        """
        self._rejoined = True
        if torch.distributed.get_rank() == 0:
            wait_for_engines(self.vllm_engines)
            self._init_vllm_sync_group("")  # Ray's transfer reads the backend, and no engine restarts with it

    def broadcast_to_vllm(self, version: int = 0) -> None:
        """Send the parameters that upstream would send, in buckets, or with upstream's own transfer through Ray.

        Args:
            version: number of these weights, which tokens with the sampler's values carry; Ray's transfer drops it.

        Raises:
            Restartable: an engine did not get what was sent.
        """
        if self.args.vllm.sync_with_ray:
            super().broadcast_to_vllm()
            return
        torch.cuda.empty_cache()
        try:
            self._send(version)
        except WeightSyncError as error:
            raise Restartable(str(error)) from error
        torch.cuda.empty_cache()
        torch_dist_barrier_and_cuda_sync()

    def _send(self, version: int) -> None:
        weights = self._weights_to_send()
        device = torch.device(torch.cuda.current_device())
        first = torch.distributed.get_rank() == 0
        # Checksums would take a transfer of only a part of the model for an incomplete one.
        sync_checksum = self.args.vllm.sync_checksum or (self._rejoined and not self.args.actor.freeze_visual_encoder)
        self._rejoined = False
        if self._colocated:
            engines = self._engines() if first else []
            ColocatedSender(engines, all_gather_objects, device).send(weights, sync_checksum, version)
        elif first:
            self._broadcaster.send(weights, sync_checksum, version)
        else:
            gather(weights, device)

    @abstractmethod
    def _weights_to_send(self) -> Weights:
        """The model's full tensors, which all ranks have to gather together."""


def keep_trying(write: Callable[[str], Any], directory: str) -> None:
    """Call ``write(directory)`` until it succeeds, so that a full disk or an unreachable file server does not lose
    the trained model.

    Ranks that write together fail together and retry the same number of times.

    Raises:
        TrainingStopped: it still fails after half an hour.
    """
    for left in range(_TRIES - 1, -1, -1):
        try:
            write(directory)
            return
        except OSError as error:
            room = " Make room for it." if is_full(error) else ""
            failure = f"{directory} could not be written: {str(error).rstrip('.')}.{room}"
        if left:
            print(f"Warning: {failure} Retrying every {_WAIT} s, {left} more times.", flush=True)
            time.sleep(_WAIT)
    raise TrainingStopped(
        f"{failure} Rerun with --ckpt.load_enable to resume from the last checkpoint in --ckpt.path."
    )
