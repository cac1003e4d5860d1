"""What this package's flags set: presets, what an estimator brings, contradictions, and the frozen list of flags."""

import argparse
import dataclasses
import os
import typing
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import mypy.api
import pytest
import torch

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES, GTPOConfig
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import PLATFORM_VARIABLE
from openrlhf_gtpo.training import arguments as arguments_module
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
from openrlhf_gtpo.training.credit.loss import CreditLoss, make_policy_loss
from openrlhf_gtpo.training.settings import flags, page, upstream_parser, values
from openrlhf_gtpo.training.settings.algorithms import AGGREGATION
from openrlhf_gtpo.training.settings.frozen import by_flag, changed, freeze
from openrlhf_gtpo.training.settings.presets import PRESETS
from tests.support import argument_types, command_lines
from tests.support.command_lines import BASE
from tests.support.rollouts import Rollout, arguments, in_sampling_order, make, maker

GROUP = [*BASE, "--rollout.n_samples_per_prompt", "8", "--rollout.max_new_tokens", "100"]


def parse(*argv: str) -> dict[str, Any]:
    return command_lines.flatten(upstream_parser.parse([*GROUP, *argv]))


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        entropy_credit(upstream_parser.parse([*GROUP, *argv]))
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?"))
    return message


# ── Presets ──


def test_presets_select_whole_algorithms() -> None:
    dapo = parse("--algo.preset", "dapo")
    assert dapo["algo.advantage.estimator"] == "group_norm"
    assert dapo["actor.eps_clip_low_high"] == [0.2, 0.28]
    assert dapo["actor.loss_agg_mode"] == "token-mean"
    assert dapo["algo.dynamic_filtering_enable"] is True
    assert dapo["algo.kl.init_coef"] == 0
    assert (dapo["reward.overlong_buffer_len"], dapo["reward.overlong_penalty_factor"]) == (20, 0.5)

    grpo = parse("--algo.preset", "grpo")
    assert grpo["algo.advantage.estimator"] == "group_norm"
    assert grpo["actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert (grpo["algo.kl.use_loss"], grpo["algo.kl.estimator"], grpo["algo.kl.init_coef"]) == (True, "k3", 0.04)
    assert grpo["actor.policy_loss_type"] == "ppo"

    gspo = parse("--algo.preset", "gspo")
    assert gspo["actor.policy_loss_type"] == "gspo"
    assert gspo["actor.eps_clip_low_high"] == [3e-4, 4e-4]
    assert gspo["algo.kl.init_coef"] == 0


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_sets_only_upstream_flags_and_leaves_the_rest_alone(preset: str) -> None:
    known = {action.dest for action in command_lines.value_flags(command_lines.parser(extended=False))}
    assert set(PRESETS[preset]) <= known
    plain, chosen = parse("--algo.advantage.estimator", "group_norm"), parse("--algo.preset", preset)
    changed = {name for name in plain if plain[name] != chosen[name]}
    implied = {"algo.preset", "reward.overlong_buffer_len", "logger.wandb.run_name"}  # which has the minute in it
    if PRESETS[preset].get("actor.policy_loss_type") in SURROGATES:
        implied |= {"actor.eps_clip_low_high", "actor.loss_agg_mode", "actor.entropy_coef"}
    if PRESETS[preset]["algo.advantage.estimator"] in ESTIMATORS:
        implied |= {"reward.clip_range"}
    assert changed <= set(PRESETS[preset]) | implied


def test_an_explicit_flag_wins_over_its_preset_also_with_upstreams_default_as_its_value() -> None:
    args = parse(
        *("--algo.preset", "dapo", "--actor.eps_clip_low_high", "0.1", "0.5", "--algo.kl.init_coef", "0.01"),
        *("--reward.overlong_buffer_len", "7", "--reward.overlong_penalty_factor", "1"),
    )
    assert args["actor.eps_clip_low_high"] == [0.1, 0.5]
    assert args["algo.kl.init_coef"] == 0.01
    assert (args["reward.overlong_buffer_len"], args["reward.overlong_penalty_factor"]) == (7, 1)
    assert args["algo.dynamic_filtering_enable"] is True


@pytest.mark.parametrize("preset", ["dapo", "gspo"])
def test_a_clip_range_for_both_sides_wins_over_its_preset_too(preset: str) -> None:
    chosen = ("--algo.preset", preset, "--actor.eps_clip", "0.1")
    assert parse(*chosen)["actor.eps_clip_low_high"] == (0.1, 0.1)
    assert parse(*chosen, "--actor.eps_clip_low_high", "0.2", "0.3")["actor.eps_clip_low_high"] == [0.2, 0.3]


def test_the_presets_penalty_is_dapos_under_rewards_of_0_and_1() -> None:
    """Normalized over a group, these rewards equal rewards of -1 and 1 with twice the penalty."""
    factor = parse("--algo.preset", "dapo")["reward.overlong_penalty_factor"]
    correct = torch.tensor([1.0, 0.0, 1.0, 0.0])
    penalty = torch.tensor([0.0, 0.0, 0.3, 1.0])  # at DAPO's own scale
    ours, papers = correct - factor * penalty, 2 * correct - 1 - penalty
    torch.testing.assert_close((ours - ours.mean()) / ours.std(), (papers - papers.mean()) / papers.std())


def test_rescaling_has_its_papers_factor_unless_given() -> None:
    chosen = ("--algo.advantage.estimator", "gtpo", "--reward.overlong_form", "group_rescaled")
    assert parse(*chosen)["reward.overlong_penalty_factor"] == 0.33
    assert parse(*chosen, "--reward.overlong_penalty_factor", "1")["reward.overlong_penalty_factor"] == 1


def test_dapos_penalty_needs_to_know_the_longest_response() -> None:
    without = [*BASE, "--rollout.n_samples_per_prompt", "8", "--algo.preset", "dapo"]
    with pytest.raises(UsageError, match=r"which is missing; give it, or --reward.overlong_buffer_len to count back"):
        upstream_parser.parse(without)
    with pytest.raises(UsageError, match=r"--rollout.max_new_tokens, which is missing; give it\.$"):
        upstream_parser.parse([*without[:-1], "forking_tokens"])  # an estimator of ours counts back from nothing else
    args = upstream_parser.parse([*without, "--reward.overlong_buffer_len", "7"])
    assert args.reward.overlong_buffer_len == 7


# ── What an estimator brings ──


@pytest.mark.parametrize(("estimator", "aggregation"), [("gtpo", "token-mean"), ("grpo_s", "seq-mean-token-mean")])
def test_an_estimator_brings_its_clip_range_and_loss_level(estimator: str, aggregation: str) -> None:
    chosen = ("--algo.advantage.estimator", estimator)
    assert parse(*chosen)["actor.eps_clip_low_high"] == [0.2, 0.28]
    assert parse(*chosen)["actor.loss_agg_mode"] == aggregation
    assert parse(*chosen, "--actor.loss_agg_mode", aggregation)["actor.loss_agg_mode"] == aggregation
    assert parse(*chosen, "--actor.eps_clip", "0.2")["actor.eps_clip_low_high"] == (0.2, 0.2)
    assert parse(*chosen, "--actor.eps_clip_low_high", "0.1", "0.3")["actor.eps_clip_low_high"] == [0.1, 0.3]
    assert parse(*chosen)["critic.model_name_or_path"] is None


# ── What a surrogate brings ──


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_brings_its_clip_range_and_mean(name: str) -> None:
    chosen = ("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0", "--actor.policy_loss_type", name)
    kind = SURROGATES[name]
    config = kind.config()
    args = parse(*chosen)
    assert args["actor.loss_agg_mode"] == AGGREGATION[kind.aggregation]
    assert args["actor.entropy_coef"] == (0.0 if kind.reads else None)
    expected = [config.clip_low, config.clip_high] if hasattr(config, "clip_low") else (0.2, 0.2)
    assert args["actor.eps_clip_low_high"] == expected
    assert parse(*chosen, "--actor.eps_clip_low_high", "0.1", "0.3")["actor.eps_clip_low_high"] == [0.1, 0.3]
    if kind.level == "token":
        assert parse(*chosen, "--actor.loss_agg_mode", "seq-mean-token-mean")["actor.loss_agg_mode"][:3] == "seq"
    preset = parse("--algo.preset", name)
    different = {key for key in args if preset[key] != args[key]} - {"logger.wandb.run_name"}  # contains the time
    assert different == {"algo.preset"}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("gtpo gmpo", "one advantage per response, but --algo.advantage.estimator gtpo gives every token its own"),
        ("forking_tokens gmpo", "but --algo.advantage.estimator forking_tokens gives every token its own"),
        ("gae gmpo", "but --algo.advantage.estimator gae gives every token its own"),
        ("reinforce gmpo --algo.advantage.gamma 0.9", "but --algo.advantage.estimator reinforce gives every token"),
        ("group_norm gmpo", "but the KL in the reward gives every token its own; give --algo.kl.use_loss"),
        (
            "grpo_s gmpo --actor.loss_agg_mode token-mean",
            "token-mean does not fit --actor.policy_loss_type gmpo, which has one loss term per response; leave it",
        ),
        (
            "gtpo gspo",
            "--actor.policy_loss_type gspo does not fit --algo.advantage.estimator gtpo; for GSPO's ratio give "
            "gspo_token.",
        ),
        ("grpo_s gspo", "for GSPO's ratio leave it out and give --algo.grpo_s.ratio_mean geometric."),
        ("gtpo cispo --actor.dual_clip 3", "--actor.dual_clip bounds PPO's clipped objective"),
        (
            "group_norm kl_cov --actor.dual_clip 3",
            "which --actor.policy_loss_type kl_cov does not have; leave it out.",
        ),
        ("gtpo cispa", "invalid choice: 'cispa'"),
    ],
)
def test_a_pair_that_the_mathematics_does_not_allow_is_refused(argv: str, reason: str) -> None:
    estimator, name, *more = argv.split()
    words = ["--algo.advantage.estimator", estimator, "--actor.policy_loss_type", name, *more]
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        "grpo_s gmpo",
        "group_norm gmpo --algo.kl.use_loss",
        "rloo gmpo --algo.kl.init_coef 0",
        "gtpo gspo_token --actor.dual_clip 3",
        "dr_grpo clip_cov --actor.dual_clip 3",
        "forking_tokens cispo",
        "entropy_bonus sapo",
    ],
)
def test_every_other_pair_is_one_command(argv: str) -> None:
    estimator, name, *more = argv.split()
    args = upstream_parser.parse(
        [*GROUP, "--algo.advantage.estimator", estimator, "--actor.policy_loss_type", name, *more]
    )
    loss = make_policy_loss(args)
    assert isinstance(loss, CreditLoss) and isinstance(loss.surrogate, partial)
    assert loss.surrogate.func is SURROGATES[name].loss


def test_a_surrogates_settings_are_held_to_their_rules() -> None:
    for argv, rule in (
        ("sapo --actor.sapo.tau_positive 0", "tau_positive=0.0 is out of range"),
        ("cispo --actor.eps_clip_low_high 2 4", "clip_low=2.0 is out of range"),
        ("clip_cov --actor.clip_cov.fraction 2", "fraction=2.0 is out of range"),
    ):
        with pytest.raises(UsageError, match=f"^--actor.policy_loss_type .*{rule}"):
            make_policy_loss(upstream_parser.parse([*GROUP, "--actor.policy_loss_type", *argv.split()]))


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s"])
def test_a_range_of_rewards_clips_shaped_advantages_only_where_it_is_given(estimator: str) -> None:
    chosen = ("--algo.advantage.estimator", estimator)
    assert parse(*chosen)["reward.clip_range"] is None
    assert parse(*chosen, "--reward.clip_range", "-10", "10")["reward.clip_range"] == [-10, 10]
    assert parse("--algo.advantage.estimator", "group_norm")["reward.clip_range"] == (-10, 10)


@pytest.mark.parametrize(("given", "largest"), [((), 14.31), (("--reward.clip_range", "-10", "10"), 10.0)])
def test_the_advantage_of_a_short_lone_success_arrives(
    given: tuple[str, ...], largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A success of 300 tokens among 15 failures of 4,096 gets sqrt(15 * 4096 / 300) if all entropies are equal."""
    lengths = torch.tensor([300] + [4096] * 15)
    mask = torch.arange(4096) < lengths.unsqueeze(-1)
    values = torch.ones(mask.shape)
    outcome = (lengths == 300).float()
    batch = Rollout(mask, outcome, torch.zeros(16).long(), values, -values, -values, values, lengths == 4096)
    args = arguments("--algo.advantage.estimator", "gtpo", *given, samples=16)
    made = make(maker(ExperienceMaker, args, batch, monkeypatch), batch)
    assert in_sampling_order(made, "advantages", 4096).max().item() == pytest.approx(largest, abs=0.01)


# ── Flags without effect ──


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (
            "--algo.advantage.estimator gtpo --algo.advantage.gamma 1 --algo.advantage.lambd 0.9",
            "here: --algo.advantage.gamma, --algo.advantage.lambd (not read by gtpo).",
        ),
        (
            "--algo.advantage.estimator grpo_s --algo.advantage.no_std_norm",
            "--algo.advantage.no_std_norm (not read by grpo_s)",
        ),
        ("--algo.advantage.estimator gtpo --algo.grpo_s.beta 1", "--algo.grpo_s.beta (the estimator is gtpo)"),
        (
            "--algo.preset gspo --no-algo.gtpo.shape_uniform_groups --reward.overlong_form as_printed",
            "--algo.gtpo.shape_uniform_groups (the estimator is group_norm); --reward.overlong_form (OpenRLHF's",
        ),
        (
            "--algo.advantage.estimator gtpo --reward.overlong_form as_printed",
            "--reward.overlong_form (needs --reward.overlong_buffer_len)",
        ),
        (
            "--algo.advantage.estimator grpo_s --reward.overlong_form group_relative --reward.overlong_buffer_len 3",
            "here: --reward.overlong_buffer_len (--reward.overlong_form group_relative has no buffer).",
        ),
        ("--eval.before_training", "--eval.before_training (needs --eval.dataset)"),
        ("--ckpt.load_tag global_step2", "--ckpt.load_tag (needs --ckpt.load_enable)"),
        (
            "--algo.advantage.estimator gtpo --algo.gtpo.alpha 0.3 --algo.gtpo.alpha1 1 --algo.gtpo.kappa 3",
            "here: --algo.gtpo.alpha (only variant v1 reads it); --algo.gtpo.kappa (only variants "
            "v1_clipped and v2 read it)",
        ),
        (
            "--algo.advantage.estimator grpo_s --algo.grpo_s.variant v1 --algo.grpo_s.beta2 1 --algo.grpo_s.beta 1",
            "here: --algo.grpo_s.beta2 (only variant v3 reads it).",
        ),
        (
            "--algo.preset sapo --actor.eps_clip 0.1 --actor.kl_cov.coef 1",
            "here: --actor.eps_clip (sapo has no clip range); --actor.kl_cov.coef (the loss is sapo).",
        ),
        (
            "--algo.advantage.estimator grpo_s --actor.policy_loss_type sapo --algo.grpo_s.ratio_mean geometric",
            "--algo.grpo_s.ratio_mean (the loss is sapo)",
        ),
        ("--vllm.sync_backend gloo", "--vllm.sync_backend (GPUs use NCCL"),
        ("--rollout.batch_size 8 --train.batch_size 999", "--train.batch_size (a rollout has fewer rows"),
        (
            "--rollout.batch_size 8 --rollout.vllm_generate_batch_size 4 --train.batch_size 64",
            "--train.batch_size (a rollout has fewer rows",
        ),
        ("--logger.dump_rows 8", "--logger.dump_rows (needs --logger.dump_rollouts"),
        ("--vllm.sync_with_ray --vllm.sync_bucket_mb 1", "--vllm.sync_bucket_mb (--vllm.sync_with_ray has no"),
        ("--rollout.entropy_audit_steps 5", "--rollout.entropy_audit_steps (entropies are the actor's)"),
        (
            "--rollout.entropy sampler --logger.entropy_enable --rollout.entropy_audit_gate 0.1",
            "--rollout.entropy_audit_gate (the estimator reads no entropies)",
        ),
        (
            "--algo.advantage.estimator gtpo --rollout.entropy sampler --rollout.entropy_audit_steps 0 "
            "--rollout.entropy_audit_gate 0.1",
            "--rollout.entropy_audit_gate (needs --rollout.entropy_audit_steps)",
        ),
        ("--algo.guide.ratio_cap 3", "--algo.guide.ratio_cap (needs --algo.guide.fraction or"),
        (
            "--algo.guide.model_name_or_path guide --algo.guide.fraction 0.25 --algo.guide.rescue_weight 2 "
            "--algo.guide.endpoint http://host:8000/v1 --algo.guide.num_engines 2",
            "here: --algo.guide.num_engines (--algo.guide.endpoint replaces the guide's engines); "
            "--algo.guide.rescue_weight (needs --algo.guide.rescue_batch).",
        ),
        (
            "--train.replay_rollouts dumps --eval.dataset e --eval.before_training --algo.guide.ratio_cap 3 "
            "--algo.guide.rescue_batch 2 --algo.guide.model_name_or_path g --vllm.sync_bucket_mb 1",
            "--algo.guide.model_name_or_path, --algo.guide.rescue_batch, --eval.before_training, --eval.dataset, "
            "--reward.remote_url, --vllm.num_engines, --vllm.sync_bucket_mb (a replay's rows come",
        ),
        (
            "--actor.backend megatron --megatron.fp8 emulated --algo.advantage.estimator group_norm "
            "--megatron.fp8_audit_steps 2",
            "--megatron.fp8_audit_steps (--algo.advantage.estimator group_norm gives no entropy credit to compare)",
        ),
        (  # two optimizer steps a rollout need the actor's forward, so that auto takes its entropies
            "--algo.advantage.estimator gtpo --rollout.entropy auto --train.batch_size 64 "
            "--rollout.entropy_audit_steps 5",
            "--rollout.entropy_audit_steps (entropies are the actor's)",
        ),
        (
            "--actor.backend megatron --megatron.fp8 emulated --algo.advantage.estimator gtpo "
            "--megatron.fp8_audit_gate 0.1",
            "--megatron.fp8_audit_gate (needs --megatron.fp8_audit_steps)",
        ),
    ],
)
def test_flags_that_nothing_reads_are_named_in_one_line(
    argv: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, "cuda")
    run.parse([*GROUP, *argv.split()])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("These flags were given but have no effect here: --") and named in warnings[0]


@pytest.mark.parametrize(
    "argv",
    [
        "--algo.advantage.estimator gtpo --algo.gtpo.alpha2 0.2 "
        "--reward.overlong_buffer_len 3 --reward.overlong_form continuous",
        "--algo.advantage.estimator gtpo --reward.overlong_form group_relative --reward.overlong_penalty_factor 2",
        "--algo.advantage.estimator grpo_s --algo.grpo_s.beta1 1 --logger.entropy_enable --vllm.sync_backend nccl",
        "--algo.advantage.estimator reinforce --algo.advantage.gamma 1 --algo.advantage.no_std_norm --ds.zero_stage 3",
        "--algo.preset dapo --algo.kl.init_coef 0.01 --ref.offload --ds.zero_stage 3 --train.micro_batch_size 2",
        "--algo.advantage.estimator gtpo --rollout.entropy sampler --rollout.entropy_audit_gate 0.1",
    ],
)
def test_flags_that_are_read_are_not_named(
    argv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, "cuda")
    run.parse([*GROUP, *argv.split()])
    assert "no effect" not in capsys.readouterr().err


# ── Settings of the algorithms ──


@pytest.mark.parametrize(("name", "config"), [(name, one.config) for name, one in ESTIMATORS.items()])
def test_flags_mirror_the_fields_of_the_configuration(name: str, config: type) -> None:
    actions = command_lines.parser(extended=True)._option_string_actions
    types = typing.get_type_hints(config)
    prefix = f"--algo.{name}."
    of_config = {flag.removeprefix(prefix) for flag in actions if flag.startswith(prefix)}
    assert of_config == {field.name for field in dataclasses.fields(config)}
    for field in dataclasses.fields(config):
        action = actions[prefix + field.name]
        assert action.default == field.default
        assert action.help, f"{prefix}{field.name} has no help; give its setting() one"
        assert action.help % {} == action.help.replace("%%", "%")
        if typing.get_origin(types[field.name]) is typing.Literal:
            assert tuple(action.choices or ()) == typing.get_args(types[field.name])
        elif types[field.name] is bool:
            assert isinstance(action, argparse.BooleanOptionalAction)
        else:
            assert action.type is types[field.name]


def test_the_help_of_a_setting_names_the_variants_that_read_it() -> None:
    actions = command_lines.parser(extended=True)._option_string_actions
    assert actions["--algo.gtpo.alpha"].help == "weight of the entropy share (read by v1)"
    assert actions["--algo.grpo_s.normalize_over"].help.endswith(" (read by v2, v3)")
    assert actions["--algo.gtpo.compare"].help.endswith("each within its own polarity")


def test_settings_reach_the_configuration() -> None:
    gtpo = entropy_credit(
        upstream_parser.parse(
            [*GROUP, "--algo.advantage.estimator", "gtpo", "--algo.gtpo.variant", "v2", "--algo.gtpo.alpha1", "0.75"]
            + ["--algo.gtpo.compare", "group", "--algo.gtpo.shape_uniform_groups"]
        )
    )
    assert gtpo is not None and gtpo.name == "gtpo"
    assert gtpo.config == GTPOConfig(variant="v2", alpha1=0.75, compare="group", shape_uniform_groups=True)
    chosen = ("--algo.advantage.estimator", "gtpo", "--algo.gtpo.shape_uniform_groups")
    assert parse(*chosen)["algo.gtpo.shape_uniform_groups"] is True
    assert parse(*chosen, "--no-algo.gtpo.shape_uniform_groups")["algo.gtpo.shape_uniform_groups"] is False


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "group_norm", "rloo"])
def test_without_our_estimators_there_is_no_credit(estimator: str) -> None:
    args = upstream_parser.parse([*GROUP, "--algo.advantage.estimator", estimator, "--algo.gtpo.kappa", "0.5"])
    assert entropy_credit(args) is None


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        ("gtpo variant v2 alpha1 0.5 kappa 4", "alpha1 + alpha1/kappa = 0.625 < 1"),
        ("gtpo variant v1_clipped alpha1 0.6 alpha2 0.6", "alpha1 + alpha2 = 1"),
        ("gtpo kappa 1", "kappa"),
        ("gtpo alpha -1", "alpha"),
        ("gtpo alpha2 nan", "alpha2"),
        ("gtpo success_threshold inf", "success_threshold"),
        ("gtpo entropy_eps 0", "entropy_eps"),
        ("grpo_s beta2 -0.5", "beta2"),
        ("grpo_s beta inf", "beta"),
    ],
)
def test_settings_that_the_paper_rules_out_are_one_sentence(argv: str, rule: str) -> None:
    estimator, *pairs = argv.split()
    words = ["--algo.advantage.estimator", estimator]
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        words += [f"--algo.{estimator}.{name}", value]
    message = refusal(*words)
    assert message.startswith(f"--algo.{estimator}.*: ") and rule in message


def test_every_range_and_every_pattern_is_a_flags() -> None:
    known = parse().keys()
    assert {name for _, names in values._RANGES for name in names} <= known
    patterns = {pattern for group in flags.setting_groups() for rule in group.ignored for pattern in rule.flags}
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)] == []


def listed() -> str:
    """Every flag that this package adds, with its default."""
    upstream = command_lines.parser(extended=False)._option_string_actions
    return "".join(
        f"{flag} {action.default!r}\n"
        for flag, action in sorted(command_lines.parser(extended=True)._option_string_actions.items())
        if flag not in upstream and not flag.startswith("--no-")
    )


def test_relative_paths_are_of_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written, and whatever is there to be read; names of the Hub and servers are left alone."""

    def settled(*argv: str) -> dict[str, Any]:
        args = freeze(upstream_parser.parse([*GROUP, *argv]))
        return by_flag(changed(args, values.absolute_paths(args)))

    for name in ("model", "rows.jsonl", "reward.py", "data"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    argv = ["--ckpt.output_dir", "out/model", "--logger.metrics_path", "m.jsonl", "--logger.tensorboard_dir", "/tb"]
    argv += [
        "--actor.model_name_or_path",
        "model",
        "--algo.guide.model_name_or_path",
        "model",
        "--eval.dataset",
        "x/y",
    ]
    argv += ["--data.prompt_dataset", "rows.jsonl,org/name,data@train", "--reward.remote_url", "reward.py"]
    argv += ["--algo.guide.fraction", "0.5"]
    found = settled(*argv)
    here = str(tmp_path)
    assert (found["ckpt.output_dir"], found["logger.metrics_path"]) == (f"{here}/out/model", f"{here}/m.jsonl")
    assert (found["ckpt.path"], found["logger.tensorboard_dir"]) == (f"{here}/ckpt/checkpoints_ppo_ray", "/tb")
    assert found["actor.model_name_or_path"] == found["algo.guide.model_name_or_path"] == f"{here}/model"
    assert [group.model_name_or_path for group in found["vllm.others"]] == [f"{here}/model"]
    assert found["data.prompt_dataset"] == f"{here}/rows.jsonl,org/name,{here}/data@train"
    assert (found["eval.dataset"], found["reward.remote_url"]) == ("x/y", (f"{here}/reward.py",))
    assert settled("--train.replay_rollouts", "dumps")["train.replay_rollouts"] == f"{here}/dumps"
    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with pytest.raises(UsageError, match="--ckpt.output_dir is in Ray's copy of the job's .*/model; "):
        settled("--ckpt.output_dir", "model")
    absolute = ["--ckpt.output_dir", "/a", "--ckpt.path", "/b"]
    assert settled(*absolute, "--actor.model_name_or_path", "org/x")["actor.model_name_or_path"] == "org/x"


def test_the_flags_are_those_that_people_have_in_their_scripts() -> None:
    """To change them, set WRITE_FLAGS=1 in the environment of this test, and read the difference; the types of a run's
    arguments are made of them, too."""
    parser = command_lines.parser(extended=True)
    own = {setting.flag: setting.default for setting in flags.all_settings()}
    types = argument_types.source(command_lines.value_flags(parser), own, flags.DERIVED)
    files = {Path(__file__).with_name("flags.txt"): listed(), Path(arguments_module.__file__): types}
    for file, text in files.items():
        if os.environ.get("WRITE_FLAGS"):
            file.write_text(text)
        assert text == file.read_text()


def test_a_misspelt_flag_is_an_error_of_types(tmp_path: Path) -> None:
    """So is an assignment; nothing that mypy has to follow is imported."""
    source = tmp_path / "source.py"
    source.write_text(
        f"from {arguments_module.__name__} import Arguments\n\n\ndef use(args: Arguments) -> float:\n"
        "    args.train.seed = 1\n    return args.rollout.temprature + args.rollout.temperature\n"
    )
    options = ["--follow-imports=skip", "--config-file=", f"--cache-dir={tmp_path}", "--no-error-summary"]
    printed, _, _ = mypy.api.run([*options, str(source), arguments_module.__file__])
    errors = [line.partition(" error: ")[2] for line in printed.splitlines() if ": error: " in line]
    assert len(errors) == 2 and errors[0].startswith('Property "seed" defined in "Train" is read-only')
    assert errors[1].startswith('"Rollout" has no attribute "temprature"; maybe "temperature"?')


def test_the_page_of_flags_is_made_of_their_declarations() -> None:
    assert [setting.flag for setting in flags.all_settings() if len(setting.help.split()) > 30] == []
    assert page.flags_page() == (Path(__file__).parents[3] / "docs" / "flags.md").read_text()
