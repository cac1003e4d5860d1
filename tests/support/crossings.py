"""Where features cross: the tests in which several of them meet, the pairs that a command line is refused for, and the
pairs that nothing tries.

``python3 -m tests.support.crossings`` prints the table in docs/refusals.md that is made of it, and
``tests/training/test_crossings.py`` holds it to the tests and the refusals that there are. A new test in which
features meet gets a line in ``MEETINGS``; a pair that it is the first to try leaves ``UNTRIED``.
"""

import textwrap
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

BACKENDS = ("deepspeed", "megatron")
FEATURES = {
    "asynchronous": "`--train.async_enable`, one step off",
    "in flight": "`--train.partial_rollout_enable` too",
    "adapters": "`--ds.lora.rank`",
    "mixture": "of experts; with routing replay on Megatron",
    "turns": "an agent of several turns, `--train.agent_func_path`",
    "filter": "`--algo.dynamic_filtering_enable`",
    "guide": "`--algo.guide.*`",
    "replay": "of dumps, `--train.replay_rollouts`",
    "resume": "`--ckpt.load_enable`",
    "export": "the model that is written at the end",
    "kill": "a process of the run dies",
}


class Meeting(NamedTuple):
    """Features that meet in a test, in runs of these backends. One without Ray and ranks knows none, and counts for
    both: what it tries is the controller's."""

    test: str
    features: frozenset[str]
    backends: tuple[str, ...] = BACKENDS


class Refusal(NamedTuple):
    """A pair that is refused, with ``sentence`` in the message, if ``flags`` are given beside ``FLAGS`` of both."""

    pair: frozenset[str]
    sentence: str
    backends: tuple[str, ...] = BACKENDS
    flags: dict[str, Any] = {}


def _meeting(test: str, features: str, *backends: str) -> Meeting:
    return Meeting(test, frozenset(features.split(", ")), backends or BACKENDS)


def _runs(name: str, replayed: bool = False) -> Iterator[Meeting]:
    """A run of tests/e2e/test_crossings.py, whose name says its backend and what it has besides; and its replay."""
    backend, *features = name.split(", ")
    test = f"tests/e2e/test_crossings.py::test_a_run_with_many_features_keeps_to_each[{name}]"
    always = {"turns", "filter", "resume", "export", "kill"}
    yield Meeting(test, frozenset({*features, *always}), (backend,))
    if replayed:
        yield Meeting(test, frozenset({*features, *always, "replay"} - {"asynchronous", "in flight"}), (backend,))


_CONTROLLER, _TRAINING = "tests/training/controller", "tests/training"
MEETINGS = (
    *_runs("deepspeed, asynchronous, adapters, mixture, guide"),
    *_runs("deepspeed, in flight, adapters, mixture", replayed=True),
    *_runs("megatron, asynchronous, mixture, guide"),
    *_runs("megatron, in flight, mixture"),
    *_runs("megatron, in flight, adapters", replayed=True),
    # Without Ray: the controller's, the sampler's and the rows'.
    _meeting(
        f"{_CONTROLLER}/test_rollouts.py::test_a_run_goes_on_from_any_checkpoint",
        "asynchronous, filter, guide, resume",
    ),
    _meeting(
        f"{_CONTROLLER}/test_rollouts.py::test_with_no_engine_left_what_was_asked_waits_for_weights",
        "asynchronous, kill",
    ),
    _meeting(f"{_CONTROLLER}/test_stream.py::test_a_run_goes_on_from_any_checkpoint", "in flight, filter, resume"),
    _meeting(f"{_CONTROLLER}/test_stream.py::test_with_no_engine_left_prompts_wait_for_weights", "in flight, kill"),
    _meeting(
        f"{_CONTROLLER}/test_stream.py::test_only_a_run_of_its_kind_goes_on_with_prompts_in_flight",
        "asynchronous, in flight, resume",
    ),
    _meeting(f"{_TRAINING}/test_resume.py::test_the_controller_goes_on_from_any_checkpoint", "filter, resume"),
    _meeting(
        f"{_TRAINING}/test_resume.py::test_prompts_that_wait_for_the_guide_are_in_the_checkpoint",
        "filter, guide, resume",
    ),
    _meeting(
        f"{_TRAINING}/test_sampler.py::test_an_engine_that_dies_in_a_rollout_moves_nothing", "filter, turns, kill"
    ),
    _meeting(
        f"{_TRAINING}/features/test_lora_run.py::test_each_row_has_its_own_reference[one step off]",
        "asynchronous, adapters, resume",
    ),
    _meeting(f"{_TRAINING}/test_guide.py::test_a_filter_sees_all_rows_of_a_group", "filter, guide"),
    _meeting(
        f"{_TRAINING}/test_guide.py::test_a_guide_that_dies_is_replaced_by_the_policy_or_stops_the_run", "guide, kill"
    ),
    _meeting(f"{_TRAINING}/test_endpoint.py::test_an_agent_may_ask_a_server", "guide, turns"),
    _meeting(f"{_TRAINING}/features/test_dumps.py::test_a_replay_gets_what_was_sampled", "replay, guide, turns"),
    _meeting(
        f"{_TRAINING}/features/test_dumps.py::test_a_replay_goes_on_from_a_checkpoint_of_the_sampled_runs_last_episode",
        "replay, resume",
    ),
    # On ranks of one backend.
    _meeting(f"{_TRAINING}/test_lora.py::test_a_resumed_run_goes_on_bit_for_bit", "adapters, resume", "deepspeed"),
    _meeting(
        f"{_TRAINING}/test_lora.py::test_engines_exports_and_the_adapter_folder_have_one_policy",
        "adapters, export",
        "deepspeed",
    ),
    _meeting(
        "tests/megatron/test_megatron_lora.py::test_a_resumed_run_trains_on_bit_for_bit",
        "adapters, resume",
        "megatron",
    ),
    _meeting(
        "tests/megatron/test_megatron_lora.py::test_what_is_sent_is_what_is_exported_and_what_the_adapters_give",
        "adapters, export",
        "megatron",
    ),
    _meeting(
        "tests/megatron/test_megatron_moe.py::test_training_goes_on_at_another_layout", "mixture, resume", "megatron"
    ),
    _meeting("tests/megatron/test_megatron_moe.py::test_there_and_back_is_bitwise", "mixture, export", "megatron"),
    _meeting(
        f"{_TRAINING}/features/test_routing_replay.py::test_rows_keep_their_routes_in_a_checkpoint_and_bring_them_to_the_ranks",
        "mixture, asynchronous, resume",
        "megatron",
    ),
    _meeting(
        f"{_TRAINING}/features/test_routing_replay.py::test_the_first_answer_of_several_turns_stands",
        "mixture, turns",
        "megatron",
    ),
    # Whole runs, through Ray and vLLM.
    _meeting(
        "tests/e2e/test_stop.py::test_a_run_that_is_killed_stopped_and_resumed_makes_the_steps_of_one_that_is_not",
        "turns, filter, resume, export, kill",
        "deepspeed",
    ),
    _meeting(
        "tests/e2e/test_stop.py::test_a_run_that_is_killed_stopped_and_resumed_makes_the_steps_of_one_that_is_not",
        "turns, filter, replay, export",
        "deepspeed",
    ),
)

# With which a feature is asked for; the test fills in MODEL, MIXTURE and DIR.
FLAGS: dict[str, dict[str, Any]] = {
    "asynchronous": {"--train.async_enable": True, "--algo.advantage.is_correction_level": "token"}
    | {"--rollout.entropy": "sampler"},
    "adapters": {"--ds.lora.rank": 4, "--actor.adam.lr": 1e-4},
    "guide": {"--algo.guide.model_name_or_path": "MODEL", "--algo.guide.fraction": 0.25},
    "mixture": {"--actor.model_name_or_path": "MIXTURE"},
    "replay": {"--train.replay_rollouts": "DIR"},
}
FLAGS["in flight"] = FLAGS["asynchronous"] | {"--train.partial_rollout_enable": True}

_WITHOUT_SAMPLING = (
    "--train.replay_rollouts cannot be combined with --train.async_enable, as there is nothing to sample"
)
REFUSALS = (
    Refusal(frozenset({"asynchronous", "replay"}), _WITHOUT_SAMPLING),
    Refusal(frozenset({"in flight", "replay"}), _WITHOUT_SAMPLING),
    Refusal(
        frozenset({"in flight", "guide"}),
        "--algo.guide.model_name_or_path cannot be combined with --train.partial_rollout_enable, as its rows are of "
        "no version of the policy",
    ),
    Refusal(
        frozenset({"adapters", "mixture"}),
        "is not offered for mixtures of experts with --actor.backend megatron",
        ("megatron",),
    ),
    Refusal(
        frozenset({"mixture", "replay"}),
        "--rollout.routing_replay on cannot work here: rows that the run has not sampled itself have no routes",
        ("megatron",),
        {"--rollout.routing_replay": "on"},
    ),
)

UNTRIED = {"deepspeed": frozenset[frozenset[str]](), "megatron": frozenset({frozenset({"adapters", "guide"})})}

# Three or more between which a fault lay, or may lie: tried together on each backend that does not refuse two of them.
TOGETHER = tuple(
    frozenset(names.split(", "))
    for names in (
        "adapters, mixture, export",
        "asynchronous, filter, resume",
        "in flight, filter, resume",
        "in flight, mixture, turns, kill, resume",
        "in flight, adapters, turns, kill, resume",
        "adapters, turns, filter, replay, export",
    )
)

PAIRS: tuple[frozenset[str], ...] = tuple(map(frozenset, combinations(FEATURES, 2)))


def tried(features: frozenset[str], backend: str) -> list[str]:
    """The tests in which all of the features meet on a backend."""
    return [each.test for each in MEETINGS if features <= each.features and backend in each.backends]


def refusal(features: frozenset[str], backend: str) -> Refusal | None:
    """Why two of the features are refused together on a backend."""
    return next((each for each in REFUSALS if each.pair <= features and backend in each.backends), None)


def table() -> Iterator[str]:
    """The lines of the table, and below it what is refused and what is untried."""
    names = list(FEATURES)
    yield "| | " + " | ".join(str(number) for number in range(2, len(names) + 1)) + " |"
    yield "|---|" + ":---:|" * (len(names) - 1)
    for number, one in enumerate(names, start=1):
        cells = [_cell(frozenset({one, other})) if names.index(other) >= number else "" for other in names[1:]]
        yield f"| {number} **{one}**: {FEATURES[one]} | " + " | ".join(cells) + " |"
    yield ""
    for each in REFUSALS:
        where = "" if each.backends == BACKENDS else f" on {_called(each.backends[0])}"
        yield from _point(f"Refused{where}, {_said(each.pair)}: “… {each.sentence}”")
    for backend in BACKENDS:
        if UNTRIED[backend]:
            pairs = sorted(map(_said, UNTRIED[backend]))
            yield from _point(f"Untried on {_called(backend)}: {', '.join(pairs)}.")


def _point(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", 119, subsequent_indent="  ", break_on_hyphens=False)


def _said(pair: frozenset[str]) -> str:
    return " with ".join(name for name in FEATURES if name in pair)


def _called(backend: str) -> str:
    return {"deepspeed": "DeepSpeed", "megatron": "Megatron"}[backend]


def _cell(pair: frozenset[str]) -> str:
    signs = ["−" if refusal(pair, backend) else "+" if tried(pair, backend) else "?" for backend in BACKENDS]
    return signs[0] if signs[0] == signs[1] else "".join(signs)


if __name__ == "__main__":
    print("\n".join(table()))
