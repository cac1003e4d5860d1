"""The arguments of a run: OpenRLHF's flags and this package's, each at its path, typed, frozen.

Made of the parser's declarations by ``tests/support/argument_types.py`` (WRITE_FLAGS=1, see CONTRIBUTING.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf_gtpo.lora import LoraOptions
    from openrlhf_gtpo.training.host import EngineGroup


@dataclass(frozen=True, kw_only=True)
class ActorAdam:
    betas: Sequence[float]
    eps: float
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class ActorClipCov:
    cov_high: float = 5.0
    cov_low: float = 1.0
    fraction: float = 0.0002


@dataclass(frozen=True, kw_only=True)
class ActorHapo:
    adaptation: float = 1.0
    pivot: float = 0.8
    redistribution: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ActorHtpo:
    difficulty_threshold: float = 0.6
    forking_fraction: float = 0.2
    highest_fraction: float = 0.02
    lowest_fraction: float = 0.006


@dataclass(frozen=True, kw_only=True)
class ActorKlCov:
    coef: float = 1.0
    fraction: float = 0.0002


@dataclass(frozen=True, kw_only=True)
class ActorMuon:
    lr: float
    momentum: float
    nesterov: bool
    ns_steps: int


@dataclass(frozen=True, kw_only=True)
class ActorSapo:
    tau_negative: float = 1.05
    tau_positive: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ActorStare:
    fraction: float = 0.1
    target_entropy: float = 0.3
    weight_negative: float = 1.0
    weight_positive: float = 1.1


@dataclass(frozen=True, kw_only=True)
class Actor:
    adam: ActorAdam
    aux_loss_coef: float
    backend: str = "deepspeed"
    clip_cov: ActorClipCov = ActorClipCov()
    dual_clip: float | None
    entropy_coef: float | None
    eps_clip: float
    eps_clip_low_high: Sequence[float]
    freeze_visual_encoder: bool
    gradient_checkpointing_enable: bool
    gradient_checkpointing_reentrant: bool
    hapo: ActorHapo = ActorHapo()
    htpo: ActorHtpo = ActorHtpo()
    kl_cov: ActorKlCov = ActorKlCov()
    lora: "LoraOptions | None" = None
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
    sapo: ActorSapo = ActorSapo()
    stare: ActorStare = ActorStare()
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class AlgoAdvantage:
    estimator: str
    gamma: float
    is_correction_gating: str
    is_correction_level: str
    is_correction_mode: str
    is_correction_threshold: Sequence[float]
    lambd: float
    no_std_norm: bool


@dataclass(frozen=True, kw_only=True)
class AlgoEntropyBonus:
    alpha: float = 0.4
    kappa: float = 2.0
    success_threshold: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AlgoForkingTokens:
    success_threshold: float = 1.0
    top_fraction: float = 0.2


@dataclass(frozen=True, kw_only=True)
class AlgoGrpoS:
    beta: float = 0.1
    beta1: float = 1.0
    beta2: float = 0.1
    entropy_eps: float = 1e-06
    entropy_mean: str = "arithmetic"
    normalize_over: str = "zero_filled"
    ratio_mean: str = "arithmetic"
    scope: str = "group"
    shape_uniform_groups: bool = False
    success_threshold: float = 1.0
    variant: str = "v3"


@dataclass(frozen=True, kw_only=True)
class AlgoGtpo:
    alpha: float = 0.1
    alpha1: float | None = None
    alpha2: float | None = None
    compare: str = "position"
    entropy_eps: float = 1e-06
    entropy_mean: str = "arithmetic"
    kappa: float = 2.0
    normalize_over: str = "zero_filled"
    scope: str = "group"
    shape_uniform_groups: bool = False
    success_threshold: float = 1.0
    variant: str = "v3"


@dataclass(frozen=True, kw_only=True)
class AlgoGuide:
    endpoint: str | None = None
    fraction: float = 0.0
    gpu_memory_utilization: float | None = None
    model_name_or_path: str | None = None
    num_engines: int = 1
    on_failure: str = "stop"
    ratio_cap: float = 2.0
    rescue_batch: int = 0
    rescue_weight: float = 1.0
    steps: int = 0
    tensor_parallel_size: int = 1


@dataclass(frozen=True, kw_only=True)
class AlgoKl:
    estimator: str
    horizon: int
    init_coef: float
    target: float | None
    unbiased_gradient: bool
    use_loss: bool


@dataclass(frozen=True, kw_only=True)
class Algo:
    advantage: AlgoAdvantage
    dynamic_filtering_enable: bool
    dynamic_filtering_range: Sequence[float]
    entropy_bonus: AlgoEntropyBonus = AlgoEntropyBonus()
    forking_tokens: AlgoForkingTokens = AlgoForkingTokens()
    grpo_s: AlgoGrpoS = AlgoGrpoS()
    gtpo: AlgoGtpo = AlgoGtpo()
    guide: AlgoGuide = AlgoGuide()
    kl: AlgoKl
    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ckpt:
    best_metric_key: str
    disable_ds: bool
    load_enable: bool
    load_tag: str | None = None
    max_mem: float
    max_num: int
    output_dir: str
    path: str
    save_hf: bool
    save_steps: float
    stop_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class CriticAdam:
    betas: Sequence[float]
    eps: float
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class CriticMuon:
    lr: float
    momentum: float
    nesterov: bool
    ns_steps: int


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Data:
    apply_chat_template: bool
    chat_template_kwargs: str | None = None
    chat_template_kwargs_key: str | None = None
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
    system_prompt: str | None = None
    tools_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class DsLora:
    alpha: int
    dropout: float
    rank: int
    target_modules: Sequence[str] | str


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Eval:
    before_training: bool = False
    dataset: str | None
    n_samples_per_prompt: int
    split: str
    steps: float
    temperature: float


@dataclass(frozen=True, kw_only=True)
class LoggerWandb:
    group: str | None
    key: str | None
    org: str | None
    project: str
    run_name: str


@dataclass(frozen=True, kw_only=True)
class Logger:
    dump_rollouts: int = 0
    dump_rows: int = 64
    entropy_enable: bool = False
    logging_steps: int
    metrics_path: str | None = None
    started: float = 0.0
    tensorboard_dir: str | None
    wandb: LoggerWandb


@dataclass(frozen=True, kw_only=True)
class Megatron:
    async_save: bool = True
    context_parallel_size: int = 1
    ddp: Sequence[str] = ()
    expert_model_parallel_size: int = 1
    fp8: str | None = None
    fp8_audit_gate: float | None = None
    fp8_audit_steps: int = 0
    fp8_param: bool = False
    fp8_recipe: str = "blockwise"
    lm_head_mb: int | None = None
    num_layers_at_end_in_bf16: int = 0
    num_layers_at_start_in_bf16: int = 0
    offload: bool = False
    override: Sequence[str] = ()
    pipeline_model_parallel_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    tensor_model_parallel_size: int = 1
    use_distributed_optimizer: bool = True


@dataclass(frozen=True, kw_only=True)
class Ref:
    is_actor: bool = False
    num_gpus_per_node: int
    num_nodes: int
    offload: bool


@dataclass(frozen=True, kw_only=True)
class Reward:
    clip_range: Sequence[float]
    model_name_or_path: str | None
    normalize_enable: bool
    num_gpus_per_node: int
    num_nodes: int
    offload: bool
    overlong_buffer_len: float | None
    overlong_form: str = "continuous"
    overlong_penalty_factor: float
    remote_url: Sequence[str] | None
    stop_properly_penalty_coef: float | None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    batch_size: int
    entropy: str = "actor"
    entropy_audit_gate: float = 0.1
    entropy_audit_steps: int = 20
    forward_for: str | None = None
    is_sampled: bool = True
    joined_by: str | None = None
    log_probs: str = "actor"
    max_new_tokens: int | None
    max_tokens_per_gpu: int | None
    micro_batch_size: int
    n_samples_per_prompt: int
    replays_routes: bool = False
    routing_replay: str = "auto"
    temperature: float
    top_p: float
    vllm_generate_batch_size: int


@dataclass(frozen=True, kw_only=True)
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
    max_bad_steps: int = 3
    max_epochs: int
    max_restarts: int = 0
    max_staleness: int = 2
    max_tokens_per_gpu: int
    micro_batch_size: int
    num_episodes: int
    partial_rollout_enable: bool
    replay_rollouts: str | None = None
    seed: int
    shared_prompts: str = "on"
    shares_prompts: bool = False
    spike_zscore: float = 0.0
    stall_timeout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Vllm:
    enable_prefix_caching: bool
    enable_sleep: bool
    enforce_eager: bool
    gpu_memory_utilization: float
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_engines: int
    others: "Sequence[EngineGroup]" = ()
    sync_backend: str
    sync_bucket_mb: int = 256
    sync_checksum: bool = False
    sync_with_ray: bool
    tensor_parallel_size: int


@dataclass(frozen=True, kw_only=True)
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
    megatron: Megatron = Megatron()
    ref: Ref
    reward: Reward
    rollout: Rollout
    train: Train
    use_ms: bool
    vllm: Vllm
