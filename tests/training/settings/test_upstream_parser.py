"""Every upstream flag means here what it means in OpenRLHF: value, default and refusal."""

import argparse
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.training.settings import flags, upstream_parser
from tests.support import command_lines
from tests.support.command_lines import BASE, ours, outcome, upstream, words

UPSTREAM = command_lines.parser(extended=False)
OURS = {action.dest for action in command_lines.value_flags(command_lines.parser(extended=True))}
UPSTREAM_DESTINATIONS = {action.dest for action in command_lines.value_flags(UPSTREAM)}
CASES = [(flag, action) for action in command_lines.value_flags(UPSTREAM) for flag in action.option_strings]

# The flags that upstream requires alongside a flag.
COMPANIONS = {
    "--train.partial_rollout_enable": ["--train.async_enable"],
    "--algo.dynamic_filtering_enable": ["--rollout.n_samples_per_prompt", "2"],
    "--rollout.vllm_generate_batch_size": ["--train.async_enable"],
    "--rollout.batch_size": ["--actor.num_gpus_per_node", "1"],
}


def assert_same(argv: list[str]) -> None:
    expected, found = outcome(upstream, argv), outcome(ours, argv)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, f"upstream: {expected}, here: {found}"
        return
    assert {name: found.get(name, "missing") for name in expected} == expected
    assert set(found) - set(expected) == OURS - UPSTREAM_DESTINATIONS | flags.DERIVED.keys()


def test_the_whole_command_line_is_covered() -> None:
    assert len(CASES) > 150


@pytest.mark.parametrize(("flag", "action"), CASES, ids=[flag for flag, _ in CASES])
def test_a_flag_alone_parses_as_upstream(flag: str, action: argparse.Action) -> None:
    argv = [*BASE, *COMPANIONS.get(flag, []), *words(action, flag)]
    if flag != "--algo.advantage.estimator":
        assert (
            outcome(upstream, argv) != "refused"
        ), "the generated value is not valid upstream: the test shows nothing"
    assert_same(argv)


@pytest.mark.parametrize("estimator", UPSTREAM._option_string_actions["--algo.advantage.estimator"].choices)
def test_every_upstream_estimator_parses_as_upstream(estimator: str) -> None:
    chosen = [*BASE, "--algo.advantage.estimator", estimator]
    assert_same(chosen)
    assert_same([*chosen, "--rollout.n_samples_per_prompt", "4"])


def test_defaults_are_upstreams() -> None:
    assert isinstance(upstream(BASE), dict)
    assert_same(list(BASE))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--reward.remote_url", "r.py", "--ds.packing_samples"],
        [*BASE, "--rollout.micro_batch_size", "0"],
        [*BASE, "--actor.optim", "sgd"],
        [*BASE, "--actor.num_nodes", "two"],
        [*BASE, "--actor.eps_clip_low_high", "0.2"],
        [*BASE, "--algo.advantage.is_correction_threshold", "1", "2", "3"],
        [*BASE, "--algo.advantage.is_correction_threshold"],
        [*BASE, "--train.partial_rollout_enable"],
        [*BASE, "--algo.dynamic_filtering_enable"],
        [*BASE, "--algo.advantage.estimator", "rloo"],
        [*BASE, "--train.async_enable", "--vllm.enable_sleep", "--train.colocate_all"],
        [*BASE, "--data.max_images_per_prompt", "1"],
        [*BASE, "--rollout.batch_size", "4"],
        ["--reward.model_name_or_path", "m", "--eval.dataset", "d"],
        [*BASE, "--vllm.num_engines"],
        [*BASE, "--actor.e", "1"],
        [*BASE, "--reward.clip_range", "-1", "1e400"],
    ],
    ids=" ".join,
)
def test_what_upstream_refuses_is_refused(argv: list[str]) -> None:
    assert_same(argv)


def test_a_refusal_of_upstream_is_one_sentence() -> None:
    with pytest.raises(command_lines.Refused, match=r"^rloo requires n_samples_per_prompt > 1$"):
        ours([*BASE, "--algo.advantage.estimator", "rloo"])
    with pytest.raises(ModuleNotFoundError, match="modelscope"):
        upstream_parser.parse([*BASE, "--use_ms"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--actor.adam.lrr", "--actor.adam.lr"),
        ("--algo.gtpo.sucess_threshold=1", "--algo.gtpo.success_threshold"),
        ("--no.flag", None),
    ],
)
def test_an_unknown_flag_is_named_with_the_one_that_is_meant(word: str, meant: str | None) -> None:
    ending = f"; did you mean {meant}?" if meant else ""
    with pytest.raises(command_lines.Refused) as refused:
        ours([*BASE, word])
    assert str(refused.value) == f"unrecognized arguments: {word}{ending}"


def test_help_begins_with_the_flags_of_this_package_and_their_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # one line per flag
    with pytest.raises(SystemExit):
        upstream_parser.parse(["--help"])
    ours, _, theirs = capsys.readouterr().out.partition("\nOpenRLHF's own:\n")
    assert ours.startswith("usage: python3 -m openrlhf_gtpo.cli.train_ppo_ray --flag VALUE ...\n")
    ours = ours.replace("\n                        ", " ")
    lines = [line for line in ours.splitlines() if line.startswith("  --")]
    assert {line.split()[0].rstrip(",").removeprefix("--") for line in lines} == OURS - UPSTREAM_DESTINATIONS
    assert [line for line in lines if line.count("(default: ") != 1 or "None" in line] == []
    assert "  --algo.gtpo.kappa KAPPA" in ours and "--actor.adam.betas BETAS BETAS" in theirs


def _prefixes() -> list[tuple[str, str]]:
    """Each flag's shortest abbreviation that argparse can resolve upstream, as pairs (abbreviation, flag)."""
    known = [flag for flag, _ in CASES]
    found = []
    for flag in known:
        for end in range(3, len(flag)):
            if [other for other in known if other.startswith(flag[:end])] == [flag]:
                found.append((flag[:end], flag))
                break
    return found


def test_an_abbreviation_that_is_clear_upstream_is_clear_here() -> None:
    extended = upstream_like_parser()
    assert len(_prefixes()) > 100
    wrong = {
        short: matches
        for short, flag in _prefixes()
        if (matches := [match[1] for match in extended._get_option_tuples(short)]) != [flag]
    }
    assert wrong == {}


def upstream_like_parser() -> argparse.ArgumentParser:
    """This package's parser, as it is while a command line is parsed."""
    kept: list[argparse.ArgumentParser] = []
    add_flags = flags.add_flags
    with mock.patch.object(flags, "add_flags", lambda parser: (kept.append(parser), add_flags(parser))):
        upstream_parser.parse(BASE)
    return kept[0]


@st.composite
def command_line(draw: st.DrawFn) -> list[str]:
    argv = list(BASE)
    for flag, action in draw(st.lists(st.sampled_from(CASES), min_size=2, max_size=10)):
        argv += words(action, flag)
    return argv


@settings(max_examples=60, deadline=None, derandomize=True)
@given(command_line())
def test_flags_together_parse_as_upstream(argv: list[str]) -> None:
    assert_same(argv)
