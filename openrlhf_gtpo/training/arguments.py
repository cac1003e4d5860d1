"""The arguments of a run: OpenRLHF's flags and this package's, each at its path, typed, frozen.

Made of the parser's declarations by ``tests/support/argument_types.py`` (WRITE_FLAGS=1, see CONTRIBUTING.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf_gtpo.lora import LoraOptions
    from openrlhf_gtpo.training.host import EngineGroup


@dataclass(frozen=True)
class ActorAdam:
    betas: Sequence[float]
    eps: float
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class ActorClipCov:
    cov_high: float
    cov_low: float
    fraction: float


@dataclass(frozen=True)
class ActorHapo:
    adaptation: float
    pivot: float
    redistribution: float


@dataclass(frozen=True)
class ActorHtpo:
    difficulty_threshold: float
    forking_fraction: float
    highest_fraction: float
    lowest_fraction: float


@dataclass(frozen=True)
class ActorKlCov:
    coef: float
    fraction: float


@dataclass(frozen=True)
class ActorMuon:
    lr: float
    momentum: float
    nesterov: bool
    ns_steps: int


@dataclass(frozen=True)
class ActorSapo:
    tau_negative: float
    tau_positive: float


@dataclass(frozen=True)
class ActorStare:
    fraction: float
    target_entropy: float
    weight_negative: float
    weight_positive: float


@dataclass(frozen=True)
class Actor:
    adam: ActorAdam
    aux_loss_coef: float
    backend: str
    clip_cov: ActorClipCov
    dual_clip: float | None
    entropy_coef: float | None
    eps_clip: float
    eps_clip_low_high: Sequence[float]
    freeze_visual_encoder: bool
    gradient_checkpointing_enable: bool
    gradient_checkpointing_reentrant: bool
    hapo: ActorHapo
    htpo: ActorHtpo
    kl_cov: ActorKlCov
    lora: "LoraOptions | None"
    loss_agg_mode: str
    lr_scheduler: str
    lr_warmup_ratio: float
    max_norm: float
    min_lr_ratio: float
    model_name_or_path: str
    muon: ActorMuon
    num_gpus_per_node: int
    num_nodes: int
    optim: str
    policy_loss_type: str
    sapo: ActorSapo
    stare: ActorStare
    trust_remote_code: bool


@dataclass(frozen=True)
class AlgoAdvantage:
    estimator: str
    gamma: float
    is_correction_gating: str
    is_correction_level: str
    is_correction_mode: str
    is_correction_threshold: Sequence[float]
    lambd: float
    no_std_norm: bool


@dataclass(frozen=True)
class AlgoEntropyBonus:
    alpha: float
    kappa: float
    success_threshold: float


@dataclass(frozen=True)
class AlgoForkingTokens:
    success_threshold: float
    top_fraction: float


@dataclass(frozen=True)
class AlgoGrpoS:
    beta: float
    beta1: float
    beta2: float
    entropy_eps: float
    entropy_mean: str
    normalise_over: str
    ratio_mean: str
    scope: str
    shape_uniform_groups: bool
    success_threshold: float
    variant: str


@dataclass(frozen=True)
class AlgoGtpo:
    alpha: float
    alpha1: float | None
    alpha2: float | None
    compare: str
    entropy_eps: float
    entropy_mean: str
    kappa: float
    normalise_over: str
    scope: str
    shape_uniform_groups: bool
    success_threshold: float
    variant: str


@dataclass(frozen=True)
class AlgoGuide:
    endpoint: str | None
    fraction: float
    gpu_memory_utilization: float
    model_name_or_path: str | None
    num_engines: int
    on_failure: str
    ratio_cap: float
    rescue_batch: int
    rescue_weight: float
    steps: int
    tensor_parallel_size: int


@dataclass(frozen=True)
class AlgoKl:
    estimator: str
    horizon: int
    init_coef: float
    target: float | None
    unbiased_gradient: bool
    use_loss: bool


@dataclass(frozen=True)
class Algo:
    advantage: AlgoAdvantage
    dynamic_filtering_enable: bool
    dynamic_filtering_range: Sequence[float]
    entropy_bonus: AlgoEntropyBonus
    forking_tokens: AlgoForkingTokens
    grpo_s: AlgoGrpoS
    gtpo: AlgoGtpo
    guide: AlgoGuide
    kl: AlgoKl
    preset: str | None


@dataclass(frozen=True)
class Ckpt:
    best_metric_key: str
    disable_ds: bool
    load_enable: bool
    load_tag: str | None
    max_mem: float
    max_num: int
    output_dir: str
    path: str
    save_hf: bool
    save_steps: float
    stop_file: str | None


@dataclass(frozen=True)
class CriticAdam:
    betas: Sequence[float]
    eps: float
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class CriticMuon:
    lr: float
    momentum: float
    nesterov: bool
    ns_steps: int


@dataclass(frozen=True)
class Critic:
    adam: CriticAdam
    freezing_steps: int
    lr_scheduler: str
    lr_warmup_ratio: float
    max_norm: float
    min_lr_ratio: float
    model_name_or_path: str | None
    muon: CriticMuon
    num_gpus_per_node: int
    num_nodes: int
    optim: str
    save_value_network: bool
    value_clip: float


@dataclass(frozen=True)
class Data:
    apply_chat_template: bool
    chat_template_kwargs: str | None
    chat_template_kwargs_key: str | None
    dataloader_num_workers: int
    disable_fast_tokenizer: bool
    image_key: str
    input_key: str
    input_template: str | None
    label_key: str | None
    max_images_per_prompt: int
    max_len: int
    max_samples: int
    prompt_dataset: str | None
    prompt_probs: str | None
    prompt_split: str
    system_prompt: str | None
    tools_key: str | None


@dataclass(frozen=True)
class DsLora:
    alpha: int
    dropout: float
    rank: int
    target_modules: Sequence[str] | str


@dataclass(frozen=True)
class Ds:
    adam_offload: bool
    attn_implementation: str
    deepcompile: bool
    enable_sleep: bool
    experts_implementation: str | None
    grad_accum_dtype: str | None
    load_in_4bit: bool
    lora: DsLora
    overlap_comm: bool
    packing_samples: bool
    param_dtype: str
    ring_attn_head_stride: int
    ring_attn_size: int
    tensor_parallel_size: int
    use_liger_kernel: bool
    use_universal_ckpt: bool
    value_head_prefix: str
    zero_stage: int
    zpg: int


@dataclass(frozen=True)
class Eval:
    before_training: bool
    dataset: str | None
    n_samples_per_prompt: int
    split: str
    steps: float
    temperature: float


@dataclass(frozen=True)
class LoggerWandb:
    group: str | None
    key: str | None
    org: str | None
    project: str
    run_name: str


@dataclass(frozen=True)
class Logger:
    dump_rollouts: int
    dump_rows: int
    entropy_enable: bool
    logging_steps: int
    metrics_path: str | None
    tensorboard_dir: str | None
    wandb: LoggerWandb


@dataclass(frozen=True)
class Megatron:
    async_save: bool
    context_parallel_size: int
    ddp: Sequence[str]
    expert_model_parallel_size: int
    fp8: str | None
    fp8_audit_gate: float | None
    fp8_audit_steps: int
    fp8_param: bool
    fp8_recipe: str
    lm_head_mb: int | None
    num_layers_at_end_in_bf16: int
    num_layers_at_start_in_bf16: int
    offload: bool
    override: Sequence[str]
    pipeline_model_parallel_size: int
    recompute: str
    sequence_parallel: bool
    tensor_model_parallel_size: int
    use_distributed_optimizer: bool


@dataclass(frozen=True)
class Ref:
    is_actor: bool
    num_gpus_per_node: int
    num_nodes: int
    offload: bool


@dataclass(frozen=True)
class Reward:
    clip_range: Sequence[float]
    model_name_or_path: str | None
    normalize_enable: bool
    num_gpus_per_node: int
    num_nodes: int
    offload: bool
    overlong_buffer_len: float | None
    overlong_form: str
    overlong_penalty_factor: float
    remote_url: Sequence[str] | None
    stop_properly_penalty_coef: float | None


@dataclass(frozen=True)
class Rollout:
    batch_size: int
    entropy: str
    entropy_audit_gate: float
    entropy_audit_steps: int
    forward_for: str | None
    is_sampled: bool
    joined_by: str | None
    log_probs: str
    max_new_tokens: int | None
    max_tokens_per_gpu: int | None
    micro_batch_size: int
    n_samples_per_prompt: int
    replays_routes: bool
    routing_replay: str
    temperature: float
    top_p: float
    vllm_generate_batch_size: int


@dataclass(frozen=True)
class Train:
    agent_func_path: str | None
    async_enable: bool
    async_queue_size: int
    batch_size: int
    colocate_actor_ref: bool
    colocate_all: bool
    colocate_critic_reward: bool
    dynamic_batch_enable: bool
    ema_beta: float
    enable_ema: bool
    full_determinism_enable: bool
    max_bad_steps: int
    max_epochs: int
    max_restarts: int
    max_staleness: int
    max_tokens_per_gpu: int
    micro_batch_size: int
    num_episodes: int
    partial_rollout_enable: bool
    replay_rollouts: str | None
    seed: int
    shared_prompts: str
    shares_prompts: bool
    spike_zscore: float
    stall_timeout: float


@dataclass(frozen=True)
class Vllm:
    enable_prefix_caching: bool
    enable_sleep: bool
    enforce_eager: bool
    gpu_memory_utilization: float
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    num_engines: int
    others: "Sequence[EngineGroup]"
    sync_backend: str
    sync_bucket_mb: int
    sync_checksum: bool
    sync_with_ray: bool
    tensor_parallel_size: int


@dataclass(frozen=True)
class Arguments:
    actor: Actor
    algo: Algo
    ckpt: Ckpt
    critic: Critic
    data: Data
    ds: Ds
    eval: Eval
    local_rank: int
    logger: Logger
    megatron: Megatron
    ref: Ref
    reward: Reward
    rollout: Rollout
    train: Train
    use_ms: bool
    vllm: Vllm
