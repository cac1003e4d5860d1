"""The program that a process runs to see who has device memory when: an actor on Megatron, called by upstream's own
methods, and an engine that only records when it is woken. torch's CUDA allocator is simulated: what was there at the
last ``empty_cache`` stays reserved until the next."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.utils import get_strategy

from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.training.actors.megatron_actor import MegatronPolicy, MegatronReference
from tests.support.actor_program import BATCHES, log_probs_of, make_experience, padded_batch, start_actor
from tests.support.rollouts import adapted, arguments

# Each moment, and the parts for which the actor reserves memory then.
Moments = list[tuple[str, set[str]]]


class _Reserved:
    """The parts of an actor whose memory its process has not given back entirely."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._kept: set[str] = set()

    def empty_cache(self) -> None:
        self._kept = self._live()

    def __call__(self) -> set[str]:
        return self._kept | self._live()

    def _live(self) -> set[str]:
        found = set()
        if hasattr(self._actor, "model"):
            found |= {"parameters" for p in self._actor.model.stage.parameters() if p.untyped_storage().nbytes()}
        if hasattr(self._actor, "megatron"):
            offload = self._actor.offload
            buffers = self._actor.megatron.ddp.buffers
            found |= {"gradients" for buffer in buffers if buffer.grad_data.untyped_storage().nbytes()}
            parameters = {p.untyped_storage().data_ptr() for p in offload._parameters()}
            states = (tensor.untyped_storage() for tensor in offload._optimizer_tensors())
            found |= {"optimizer" for s in states if s.nbytes() and s.data_ptr() not in parameters}
        return found


class _Group:
    """Stands for upstream's group of one actor, and for its engine."""

    def __init__(self, actor: Any) -> None:
        self._actor, self.reserved = actor, _Reserved(actor)
        self.moments: Moments = []
        self.engines = [SimpleNamespace(wake_up=self._remote("wake"), sleep=self._remote("sleep"))]

    def note(self, moment: str) -> None:
        self.moments.append((moment, self.reserved()))

    def _remote(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda tags=(): self.note(" ".join([name, *tags])))

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Any]:
        return [getattr(self._actor, method_name)(**kwargs)]

    def async_run_method_batch(self, method_name: str, **columns: Any) -> list[Any]:
        return [self._actor.execute_batch(method_name, columns, 0, len(next(iter(columns.values()))))]


def run_policy(model: str, argv: list[str]) -> tuple[Moments, list[list[list[float]]]]:
    """Go through a start or resume, an evaluation before training, and a step with its checkpoint; return the moments,
    and the log-probs before and after the step."""
    args, strategy = _arguments(model, argv)
    policy = start_actor(MegatronPolicy, 1)
    group = _Group(policy)
    with _played(group):
        policy.init_model_from_pretrained(strategy, model, max_steps=10)
        policy.trainer._send = lambda version: group.note("send")
        generator = SimpleNamespace(args=args, vllm_engines=group.engines, eval_dataloader=[], prompts_dataloader=[])
        generator._generate_vllm = lambda **unused: ([], 0, True)
        trainer: Any = SimpleNamespace(args=args, actor_model_group=group, vllm_engines=group.engines)
        trainer.critic_model_group, trainer.kl_ctl = None, SimpleNamespace(value=0.1)
        trainer.best_eval_metric_key, trainer.best_eval_metric_value = "", 0.0
        trainer._latest_eval_metric_value = None
        # In the order of upstream's fit and train_step, with the evaluation that ours makes before training.
        if args.ckpt.load_enable:
            BasePPOTrainer.broadcast_to_vllm(trainer)
        SamplesGenerator.generate_eval_samples(generator)
        SamplesGenerator.generate_samples(generator)
        before = _forward(group)
        for batch, old in zip(map(padded_batch, BATCHES), before, strict=True):
            policy.append(make_experience(batch, old, args))
        BasePPOTrainer.ppo_train(trainer, 0)
        BasePPOTrainer.broadcast_to_vllm(trainer)
        args.logger.logging_steps = 2  # no tracker here
        BasePPOTrainer.save_logs_and_checkpoints(trainer, 1)
        SamplesGenerator.generate_samples(generator)
        policy.finish_checkpoint()
        after = _forward(group)
    return group.moments, [[value.tolist() for value in found] for found in (before, after)]


def run_reference(model: str, argv: list[str]) -> tuple[list[set[str]], list[list[list[float]]]]:
    """The parts that a reference reserves after its start and after each of two forward passes, and the log-probs."""
    args, strategy = _arguments(model, argv)
    reference = start_actor(MegatronReference, 1)
    group = _Group(reference)
    with _played(group):
        reference.init_model_from_pretrained(strategy, model)
        reserved, found = [group.reserved()], []
        for _ in range(2):
            found.append([value.tolist() for value in _forward(group)])
            reserved.append(group.reserved())
    return reserved, found


def _arguments(model: str, argv: list[str]) -> tuple[SimpleNamespace, Any]:
    args = arguments(*argv, "--actor.model_name_or_path", model, "--actor.backend", "megatron", "--train.colocate_all")
    args = adapted(args)
    args.vllm.enable_sleep = True  # which vLLM has on CUDA only
    return args, get_strategy(args)


@contextmanager
def _played(group: _Group) -> Iterator[None]:
    """Simulate torch's allocator and Ray's answers, and have ``group`` note when its actor loads, saves or trains."""

    def noting(method: Any, *args: Any, **kwargs: Any) -> Any:
        group.note(method.__name__)
        return method(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "empty_cache", group.reserved.empty_cache))
        stack.enter_context(mock.patch.object(ray, "get", lambda answers: answers))
        for kind, name in ((Checkpoints, "load"), (Checkpoints, "save"), (Trainer, "step")):
            method = partialmethod(partial(noting, getattr(kind, name)))
            stack.enter_context(mock.patch.object(kind, name, method))
        yield
        groups.destroy()


def _forward(group: _Group) -> list[torch.Tensor]:
    batches = [padded_batch(members) for members in BATCHES]
    columns = {name: [getattr(batch, name) for batch in batches] for name in vars(batches[0])}
    (results,) = RemoteExperienceMaker._dispatch_forward(None, group, True, **columns)
    return [log_probs_of(result) for result in results]
