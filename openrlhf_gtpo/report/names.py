"""The metric names that a run writes and a report reads: the only place that spells them.

The trainer writes them flat, one JSON object per step; see `metrics.py` for the file.
"""

KIND_TRAIN = "train"
KIND_EVAL = "eval"
KIND_RUN = "run"  # once per start: the settings that tell a reader what ran

REWARD_MEAN = "reward/mean"
REWARD_MEAN_AT_G = "reward/mean_at_g"
REWARD_BEST_AT_G = "reward/best_at_g"
ENTROPY_ALL = "entropy/all"  # nats, mean over action tokens
ENTROPY_POSITIVE = "entropy/positive"  # over rows that succeeded
ENTROPY_NEGATIVE = "entropy/negative"  # over rows that did not
SHARES_STD = "shares/std"
ADVANTAGE_MEAN = "advantage/mean"
ADVANTAGE_MAX = "advantage/max"
CLIP_FRACTION = "clip/fraction"
GROUPS_UNIFORM = "groups/uniform"  # groups whose rows all succeed or all fail
GROUPS_TOTAL = "groups/total"
GROUPS_CORRECT = "groups/correct"  # share of rows that succeed, for surrogates that read it
GROUPS_ACCURACY = "groups/accuracy"  # likewise, mean over the rows
RESPONSE_LENGTH_MEAN = "response_length/mean"  # tokens
RESPONSE_LENGTH_MAX = "response_length/max"
RESTARTS_ENGINES = "restarts/engines"  # since the start of the trainer
STALENESS_MEAN = "staleness/mean"  # steps between the policy that sampled a token and the one that trains on it
STALENESS_MAX = "staleness/max"
STALENESS_SPREAD = "staleness/spread"  # steps between the oldest and the newest token of a group, on average
IDLE_TRAINER = "idle/trainer"  # seconds of a step that the trainer waited for engines
IDLE_ENGINES = "idle/engines"  # seconds of a step that engines had nothing to sample
DROPPED_PROMPTS = "rollout/dropped_prompts"  # of the step
OFF_POLICY_ROWS = "rollout/off_policy_rows"  # share of the trained rows whose ratio is to another sampler's policy
GUIDE_ROWS = "guide/rows"  # share of the trained rows that the guide sampled
GUIDE_TRUNCATED = "guide/truncated"  # share of the step's action tokens whose ratio to the guide was truncated
GUIDE_REWARD = "guide/reward"  # mean over the guide's rows
GUIDE_POLICY_REWARD = "guide/policy_reward"  # mean over the others
RESCUE_ROWS = "rescue/rows"  # share of the trained rows that are in rescued groups
RESCUE_QUEUED = "rescue/queued"  # prompts that wait for the guide
RESCUE_RESCUED = "rescue/rescued"  # prompts that the guide has answered correctly, since the run began
RESCUE_GIVEN_UP = "rescue/given_up"  # likewise, prompts that neither could answer, or that a full queue dropped
SAMPLE = "sample"  # the last characters of a prompt and its response as one text; only in metrics.jsonl
SAMPLE_REWARD = "sample_reward"
OUTCOMES = "outcomes"  # about a run's first rollout, a sentence; only in metrics.jsonl
WARNING_PREFIX = "warning/"  # texts, at the steps that they apply to; only in metrics.jsonl
NOTHING_LEARNED = "warning/groups"  # of a step

FP8_PREFIX = "fp8/"  # an audit: the fields of algorithms.ErrorBudget
FP8_SIGN_FLIPS = "fp8/sign_flips"
FP8_ENTROPY_ERROR = "fp8/entropy_error_mean"  # nats
FP8_IN_USE = "fp8/old_policy_in_fp8"  # 1, or 0 after the audit's gate has switched the old policy's entropies to BF16

SAMPLER_AUDIT = {  # fields of algorithms.ErrorBudget, for vLLM's sampler against the actor's forward
    "entropy_error_mean": "rollout/entropy_diff_mean",  # nats
    "entropy_error_p99": "rollout/entropy_diff_p99",
    "log_prob_error_mean": "rollout/log_prob_diff_mean",
    "share_rank_correlation": "rollout/share_rank_correlation",
    "sign_flips": "rollout/advantage_sign_flips",
}
SAMPLER_IN_USE = "rollout/entropy_of_sampler"  # 1, or 0 after the audit's gate has switched to the actor's
SAMPLER_MISSING = "rollout/tokens_without_entropy"  # action tokens that got the actor's values instead

ROUTING_EXPERT_LOAD = "routing/expert_load"  # most tokens of an expert ÷ the mean, over layers
ROUTING_EXPERT_LOAD_WORST = "routing/expert_load_worst"  # maximum over layers
ROUTING_RANK_LOAD = "routing/rank_load"  # the same of ranks that share experts
ROUTING_RANK_LOAD_WORST = "routing/rank_load_worst"
ROUTING_FLIPS = "routing/flips"  # share of replayed tokens that the trainer's router would send elsewhere, over layers
ROUTING_LIVE = "routing/live"  # share of tokens that the trainer's router placed
ROUTING_LOG_PROB_DIFF = "routing/log_prob_diff"  # mean |log π of the old policy - log π of the sampler|
ROUTING_LOG_PROB_DIFF_MAX = "routing/log_prob_diff_max"
ROUTING_K3 = "routing/k3"  # an estimate of KL(sampler ‖ old policy)
ROUTING_FAR = "routing/log_prob_diff_far"  # share of tokens where they differ by more than ln 2

OPENRLHF = {  # OpenRLHF's names, in TensorBoard, of metrics that this package reports more exactly
    "reward": REWARD_MEAN,
    "response_length": RESPONSE_LENGTH_MEAN,
    "entropy_loss": ENTROPY_ALL,  # the trained policy's entropy, with --actor.entropy_coef
}

TIMING_PREFIX = "timing/"  # seconds
TIMING_ROLLOUT = "timing/rollout"  # engine seconds for the step's rollout, if it was sampled ahead
TIMING_START = "timing/start"  # after the checks, until the first rollout or evaluation; in the run's first line
TIMING_STEP_TOTAL = "timing/step_total"  # the sum of the phases
TIMING_STEP_WALL = "timing/step_wall"  # without evaluation and checkpoints
GENERATION, MAKE_EXPERIENCE, PPO_TRAIN, BROADCAST = "generation", "make_experience", "ppo_train", "broadcast"
PHASES = (GENERATION, MAKE_EXPERIENCE, PPO_TRAIN, BROADCAST)
# Within make_experience: the forward passes of all models, and shaping.
OLD_LOG_PROBS, ADVANTAGES = "old_log_probs", "advantages"
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"  # between steps
START_RAY, READ_PROMPTS, LOAD_MODELS = "start_ray", "read_prompts", "load_models"
STARTING = {
    START_RAY: "starting Ray",
    READ_PROMPTS: "starting vLLM, reading prompts",
    LOAD_MODELS: "loading the model",
}
DOING = {
    GENERATION: "sampling",
    MAKE_EXPERIENCE: "log-probs and advantages",
    PPO_TRAIN: "training",
    BROADCAST: "sending weights to the engines",
    EVALUATION: "evaluating",
    CHECKPOINT: "saving a checkpoint",
}
TOKENS_PER_SECOND_PREFIX = "tokens_per_second/"

TOKENS_PROMPT = "tokens/prompt"  # every response's prompt, and an environment's turns; no padding
TOKENS_RESPONSE = "tokens/response"  # sampled tokens, which are trained on
TOKENS_SAMPLED = "tokens/sampled"  # all responses, with the ones that dynamic sampling drops and a guide's rescues
TOKENS_COMPUTED = "tokens/computed"  # in the training phase: with padding, a shared prompt once per micro-batch
TOKENS_ROWS = "tokens/rows"  # in the training phase: its rows' prompts and responses
SAMPLES = "samples_per_prompt"  # in the run's first line, as are allowed flags that may speed it up:
OFFER_PREFIX = "offer/"
OFFER_ONE_STEP_OFF = "offer/one_step_off"
OFFER_IN_FLIGHT = "offer/in_flight"
OFFER_SAMPLER_ENTROPY = "offer/sampler_entropy"
OFFER_SHARED_PROMPTS = "offer/shared_prompts"
OFFER_RARER = "offer/rarer"  # evaluations and checkpoints
FLOPS_FORWARD = "flops/forward"  # matrix products of one forward pass of the policy over the step's tokens
PEAK_MEMORY_PREFIX = "peak_memory_gib/"

EVAL_PREFIX = "eval_"
EVAL_PASS1_SUFFIX = "_pass1"
EVAL_ERROR_SUFFIX = "_stderr"  # after a held-out reward's name: its standard error over the questions
BEST_OF = (32, 16)  # responses to a held-out question; the paper shows the mean best of them
EVAL_RESPONSE_LENGTH_MEAN = "eval_response_length_mean"

# Other names that OpenRLHF 0.11.2 and this package store next to a response's `extra_logs`.
_FURTHER = frozenset("""
    _num_action_tokens _num_samples _weights action_log_probs actor_bad_steps actor_grad_norm actor_lr advantages
    base_action_log_probs critic_bad_steps critic_grad_norm critic_loss critic_lr dynamic_filtering_pass_rate ended
    entropy_loss generated_samples global_step group_reward_std is_filter_ratio kind kl logprobs_diff policy_loss
    ppo_clip_ratio ppo_kl response_clip_ratio response_length return returns reward rollout/num_samples
    rollout/response_length_mean rollout/reward_mean rollout/reward_std rollout/truncated_rate rollout_log_probs run
    score step time total_length truncated values vllm_kl
    """.split())
_OURS = {
    value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str) and "/" in value
}
_OURS |= {SAMPLE, SAMPLE_REWARD, OUTCOMES, *SAMPLER_AUDIT.values()}
_PREFIXES = tuple(value for value in _OURS if value.endswith("/"))


def is_taken(name: str) -> bool:
    """True if a step already has a number of this name, so that a reward or an agent must not log under it."""
    return name in _FURTHER or name in _OURS or name.startswith(_PREFIXES)


def eval_best_of(source: str, k: int) -> str:
    """Name of the mean best reward of k held-out responses, as upstream: `eval_<source>_pass<k>`."""
    return f"{EVAL_PREFIX}{source}_pass{k}"


def timing(phase: str) -> str:
    """Name of the seconds that a phase took: `timing/<phase>`."""
    return TIMING_PREFIX + phase


def tokens_per_second(phase: str) -> str:
    """Name of a phase's tokens per second: `tokens_per_second/<phase>`."""
    return TOKENS_PER_SECOND_PREFIX + phase


def peak_memory(process: str, phase: str) -> str:
    """Name of a phase's peak GiB in the largest process of a kind ("actor", "engine")."""
    return f"{PEAK_MEMORY_PREFIX}{process}/{phase}"
