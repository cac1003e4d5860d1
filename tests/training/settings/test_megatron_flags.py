"""Flags of the Megatron actor reach it; what else follows from them is in ``command_lines.jsonl``."""

from fnmatch import fnmatchcase

from openrlhf_gtpo.megatron.parallel.layout import SIZES, Layout
from openrlhf_gtpo.training.settings import megatron_flags, upstream_parser
from openrlhf_gtpo.training.settings.megatron_flags import layout_of
from tests.support import command_lines


def test_flags_reach_the_layout() -> None:
    argv = [*command_lines.BASE, "--rollout.n_samples_per_prompt", "8", "--algo.advantage.estimator", "group_norm"]
    for size, name in enumerate(SIZES, start=2):
        argv += [f"--megatron.{name}", str(size)]
    args = upstream_parser.parse([*argv, "--actor.backend", "megatron", "--megatron.sequence_parallel"])
    assert layout_of(args) == Layout(2, 3, 4, 5, sequence_parallel=True)


def test_every_flag_of_deepspeeds_is_read_or_named() -> None:
    """The others are read by the layout and offloading, or refused in ``checks``."""
    read = {"ds.tensor_parallel_size", "ds.ring_attn_size", "ds.enable_sleep"}
    read |= {f"ds.lora.{name}" for name in ("rank", "alpha", "target_modules", "dropout")}
    refused = {"ds.adam_offload", "ds.param_dtype", "ds.load_in_4bit"}
    known = {action.dest for action in command_lines.value_flags(command_lines.parser(extended=False))}
    named = [pattern for rule in megatron_flags.MEGATRON.ignored for pattern in rule.flags]
    deepspeeds = {name for name in known if name.startswith("ds.")}
    assert {name for name in deepspeeds if not any(fnmatchcase(name, pattern) for pattern in named)} == read | refused
