"""Flags of the Megatron actor reach it, agree with OpenRLHF's, and mean nothing to DeepSpeed."""

from fnmatch import fnmatchcase
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.parallel.layout import SIZES, Layout
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.settings import megatron_flags, upstream_parser
from openrlhf_gtpo.training.settings.megatron_flags import layout_of
from tests.support import command_lines
from tests.support.command_lines import BASE

GROUP = [*BASE, "--rollout.n_samples_per_prompt", "8", "--algo.advantage.estimator", "group_norm"]
MEGATRON = ("--actor.backend", "megatron")


def args_of(*argv: str) -> Any:
    return upstream_parser.parse([*GROUP, *argv])


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        args_of(*argv)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_defaults_change_nothing() -> None:
    args = args_of()
    assert args.actor.backend == "deepspeed"
    assert layout_of(args) == Layout() and args.ds.tensor_parallel_size == 1
    assert args.megatron.override == [] and args.megatron.recompute == "none"
    assert args.megatron.use_distributed_optimizer and args.megatron.async_save
    assert not args.megatron.offload and not args.ds.enable_sleep


def test_flags_reach_the_layout() -> None:
    argv = []
    for size, name in enumerate(SIZES, start=2):
        argv += [f"--megatron.{name}", str(size)]
    args = args_of(*MEGATRON, *argv, "--megatron.sequence_parallel")
    assert layout_of(args) == Layout(2, 3, 4, 5, sequence_parallel=True)


def test_upstream_counts_replicas_by_the_layout() -> None:
    """Upstream pairs batches with ranks, and counts micro-batches, by ``ds.tensor_parallel_size``."""
    two_by_two = ("--megatron.tensor_model_parallel_size", "2", "--megatron.pipeline_model_parallel_size", "2")
    args = args_of(*MEGATRON, *two_by_two)
    assert args.ds.tensor_parallel_size == 4 and args.ds.ring_attn_size == 1
    # One batch is enough for the one replica of four processes; upstream's check of the command line must agree.
    few = ("--rollout.batch_size", "1", "--rollout.micro_batch_size", "8", "--actor.num_gpus_per_node", "4")
    args_of(*MEGATRON, *two_by_two, *few)
    with pytest.raises(UsageError, match="effective number of actor processes"):
        args_of(*few)


def test_overrides_add_up_in_order_and_do_not_leak_into_the_next_command_line() -> None:
    args = args_of(*MEGATRON, "--megatron.override", "moe_router_dtype=fp32", "--megatron.override", "fp8_margin=1")
    assert args.megatron.override == ["moe_router_dtype=fp32", "fp8_margin=1"]
    assert args_of(*MEGATRON).megatron.override == []


def test_a_default_value_that_was_given_counts_as_given() -> None:
    assert "needs --actor.backend megatron" in refusal("--megatron.tensor_model_parallel_size", "1")
    assert "needs --actor.backend megatron" in refusal("--megatron.async_save")


def test_every_flag_of_deepspeeds_is_read_or_named() -> None:
    """The others are read by the layout and offloading, or refused in ``checks``."""
    read = {"ds.tensor_parallel_size", "ds.ring_attn_size", "ds.enable_sleep"}
    read |= {f"ds.lora.{name}" for name in ("rank", "alpha", "target_modules", "dropout")}
    refused = {"ds.adam_offload", "ds.param_dtype", "ds.load_in_4bit"}
    known = {action.dest for action in command_lines.value_flags(command_lines.parser(extended=False))}
    named = [pattern for rule in megatron_flags.MEGATRON.ignored for pattern in rule.flags]
    deepspeeds = {name for name in known if name.startswith("ds.")}
    assert {name for name in deepspeeds if not any(fnmatchcase(name, pattern) for pattern in named)} == read | refused


def test_flags_of_deepspeeds_are_named_where_nothing_runs_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    def named(*argv: str) -> str:
        run.parse(argv)
        lines = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
        return "".join(lines).removeprefix("These flags were given but have no effect here: ")

    argv = (*MEGATRON, "--ds.zero_stage", "3", "--ds.zpg", "2", "--train.micro_batch_size", "2")
    assert named(*GROUP, *argv, "--rollout.micro_batch_size", "2") == (
        "--ds.zero_stage, --ds.zpg (not read by the Megatron actor); "
        "--train.micro_batch_size (the Megatron actor's micro-batches have --train.max_tokens_per_gpu tokens)."
    )
    reward_model = ("--reward.model_name_or_path", "m")
    assert "--ds.zero_stage" in named(*GROUP, *argv, *reward_model)  # replaced by the reward function in GROUP
    without_function = ["--vllm.num_engines", "1", "--rollout.n_samples_per_prompt", "8", *reward_model]
    without_function += ["--algo.advantage.estimator", "group_norm", *argv]
    assert named(*without_function).startswith("--ds.zpg (not")
