"""What an engine returns becomes a row's routes, and what ranks have seen a step's metrics. For routers, see
``tests/megatron/test_routing_replay.py``."""

import math
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.credit.loss import LossInputs, StepTotals
from openrlhf_gtpo.training.features.routing_replay import RoutingReplay, check
from openrlhf_gtpo.training.features.routing_replay.controller import layers_of, summary
from openrlhf_gtpo.training.features.routing_replay.engine import Experts, routes_of_row
from openrlhf_gtpo.training.features.routing_replay.rank import Distance, RoutingReplayInRank, Seen
from openrlhf_gtpo.training.rollout.answers import columns, values_of
from openrlhf_gtpo.training.rollout.packed import pack, unpack
from openrlhf_gtpo.training.rows import Row
from openrlhf_gtpo.training.settings.frozen import changed
from tests.support.command_lines import argv_of
from tests.training.checks.conftest import command, model  # noqa: F401  # fixtures

LAYERS, K = 3, 2
LIVE = 255


def experts_of(tokens: list[int], seed: int, experts: int = 8) -> np.ndarray:
    """(n, LAYERS, K) of all tokens."""
    draw = np.random.default_rng(seed)
    return draw.random((len(tokens), LAYERS, experts)).argsort(axis=2)[..., :K]


def answer(prompt: list[int], sampled: list[int], routes: np.ndarray, held: bool = True, dtype: Any = np.uint8) -> Any:
    """As a held request's arrives, and as vLLM's own."""
    rows = np.empty(len(sampled), columns())
    rows["log_prob"] = range(len(sampled))
    routes = routes.astype(dtype)
    if held:
        width = routes[0].nbytes
        array = np.zeros((len(routes) + 1, width + rows.itemsize), np.uint8)
        array[:-1, :width] = np.frombuffer(routes.tobytes(), np.uint8).reshape(len(routes), width)
        array[len(prompt) :, width:] = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), -1)
    else:
        array = routes
    said = SimpleNamespace(token_ids=sampled, routed_experts=array, logprobs=None)
    return prompt, SimpleNamespace(outputs=[said])


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint8), (300, np.uint16)])
def test_every_token_but_the_last_has_its_experts(held: bool, experts: int, dtype: Any) -> None:
    prompt, sampled = [5, 6, 7], [1, 2, 1]
    said = experts_of([*prompt, *sampled][:-1], 0, experts)
    given = answer(prompt, sampled, said, held, dtype)
    routes = routes_of_row([*prompt, *sampled], [given], Experts(LAYERS, experts, K), "a row")
    assert routes.dtype == (np.uint8 if experts <= 255 else np.int16)
    assert (routes[:-1] == said).all() and (routes[-1] == np.iinfo(routes.dtype).max).all()
    if held:
        assert values_of(given[1].outputs[0])["log_prob"].tolist() == [0, 1, 2]


def test_the_first_answer_of_several_turns_stands() -> None:
    first, feedback = [5, 6, 1, 2], [9, 8]  # the last two are sampled
    second = [*first, *feedback, 3, 4]
    of_first, of_second = experts_of(first[:-1], 1), experts_of(second[:-1], 2)
    answers = [answer(first[:2], first[2:], of_first), answer(second[:6], second[6:], of_second)]
    routes = routes_of_row([*second, 7], answers, Experts(LAYERS, 8, K), "a row")  # 7 is the environment's last word
    assert (routes[:3] == of_first).all() and (routes[3:7] == of_second[3:]).all() and (routes[7:] == LIVE).all()


def test_edited_tokens_and_what_follows_are_routed_live() -> None:
    said = experts_of([5, 6, 1, 2, 3][:-1], 1)
    routes = routes_of_row([5, 6, 1, 9, 3], [answer([5, 6], [1, 2, 3], said)], Experts(LAYERS, 8, K), "a row")
    assert (routes[:3] == said[:3]).all() and (routes[3:] == LIVE).all()


@pytest.mark.parametrize("fault", ["repeated", "unknown", "short"])
def test_routes_that_no_router_gives_stop_the_run(fault: str) -> None:
    said = experts_of([5, 6, 1], 1)
    if fault == "repeated":
        said[1, 2, 1] = said[1, 2, 0]
    elif fault == "unknown":
        said[1, 2, 0] = 8
    else:
        said = said[1:]
    with pytest.raises(TrainingStopped, match="3 tokens in row 7, .* got .*routing_replay off"):
        routes_of_row([5, 6, 1, 2], [answer([5, 6], [1, 2], said, held=False)], Experts(LAYERS, 8, K), "row 7")


def test_rows_keep_their_routes_in_a_checkpoint_and_bring_them_to_the_ranks() -> None:
    rows = []
    for length in (4, 6):
        tokens: np.ndarray = np.arange(length)
        routes = experts_of(tokens.tolist(), length).astype(np.uint8)
        rows.append(Row("p", None, 0, tokens, tokens > 1, None, 1.0, None, routes=routes))
    for row, again in zip(rows, unpack(pack(rows)), strict=True):
        assert again.routes is not None and again.routes.dtype == np.uint8
        assert (again.routes == row.routes).all()
        [inputs] = row.experience(8).mm_train_inputs
        assert inputs["routes"].tolist() == row.routes.tolist()


def test_metrics_of_a_step() -> None:
    """Two stages with a layer each, the second on two ranks that saw other tokens; four experts on two ranks."""
    first = Seen({0: np.array([4, 4, 0, 0])}, {0: np.array([6, 3, 2])}, Distance())
    second = [
        Seen({1: np.array([3, 1, 0, 0])}, {1: np.array([2, 0, 0])}, Distance(2, 0.5, 0.1, 1, 0.4)),
        Seen({1: np.array([0, 0, 1, 3])}, {1: np.array([2, 1, 0])}, Distance(6, 0.3, 0.3, 0, 0.2)),
    ]
    by_layer = layers_of([first, *second], ranks=2)
    assert by_layer == {"expert_load": [2.0, 1.5], "rank_load": [2.0, 1.0], "flips": [0.5, 0.25]}
    found = summary([first, *second], by_layer)
    assert found == pytest.approx(
        {
            names.ROUTING_EXPERT_LOAD: 1.75,
            names.ROUTING_EXPERT_LOAD_WORST: 2.0,
            names.ROUTING_RANK_LOAD: 1.5,
            names.ROUTING_RANK_LOAD_WORST: 2.0,
            names.ROUTING_FLIPS: 0.375,
            names.ROUTING_LIVE: 2 / 12,
            names.ROUTING_LOG_PROB_DIFF: 0.1,
            names.ROUTING_LOG_PROB_DIFF_MAX: 0.4,
            names.ROUTING_K3: 0.05,
            names.ROUTING_FAR: 1 / 8,
        }
    )
    assert summary([Seen({}, {}, Distance())], layers_of([], 1)) == {}  # a step in which the actor waits


def test_the_distance_is_of_own_action_tokens() -> None:
    feature = RoutingReplayInRank()
    old, of_sampler = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -5.0, -7.0]]), torch.tensor(
        [[-1.5, -1.0, 0], [0, 0, 0]]
    )
    totals = StepTotals(torch.tensor(3.0), torch.tensor(2.0))
    mask = torch.tensor([[True, True, False], [True, True, False]])
    given: dict[str, Any] = {"advantages": old, "totals": totals, "rollout_log_probs": of_sampler}
    inputs = LossInputs(old, old, mask=mask, off_policy=torch.tensor([False, True]), **given)
    for _ in range(2):
        feature.loss_outputs(inputs, None)  # type: ignore[arg-type]
    k3 = math.exp(0.5) - 1 - 0.5 + math.exp(-1) - 1 + 1
    assert feature.take().distance == pytest.approx((4, 3.0, 2 * k3, 2, 1.0))
    assert feature.take().distance == Distance()


MEGATRON = {"--actor.backend": "megatron"}


@pytest.mark.parametrize("experts", [0, 4])
def test_mixtures_have_it_by_default(experts: int, command: dict[str, Any]) -> None:  # noqa: F811
    config = SimpleNamespace(num_experts=experts) if experts else SimpleNamespace()
    checkpoint = Model("model", "--actor.model_name_or_path")
    vars(checkpoint)["config"] = config
    args = run.parse(argv_of({**command, **MEGATRON}))
    args = changed(args, RoutingReplay(args).for_model(checkpoint))
    assert RoutingReplay(args).is_on() == bool(experts)
    # vLLM's plain ones are of temperature 1, and `routing/*` compares them with the trainer's, of the run's.
    assert RoutingReplay(args).engine_args()["logprobs_mode"] == "processed_logprobs"
    if not experts:
        with pytest.raises(UsageError, match="the model has no experts"):
            RoutingReplay(changed(args, {"rollout.routing_replay": "on"})).for_model(checkpoint)


@pytest.mark.parametrize(
    ("version", "host", "possible"),
    [("0.30.0", "cpu", True), ("0.31.0", "cpu", False), ("0.30.0", "cuda", True), ("0.31.0", "cuda", True)],
)
def test_a_vllm_that_returns_no_experts_here(
    version: str, host: str, possible: bool, command: dict[str, Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """From 0.31 on a CPU has none, and elsewhere prefixes must be cached."""
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if "vllm" in name else installed(name))
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, host)
    monkeypatch.setattr(check, "why_no_scheduler", lambda: None)
    args = run.parse(argv_of({**command, **MEGATRON}))
    assert RoutingReplay(args).is_on() == possible
    assert RoutingReplay(args).engine_args().get("enable_prefix_caching", False) == (version == "0.31.0")
    if not possible:
        message = f"on a CPU .* vLLM {version} is installed; install one of those, or leave"
        with pytest.raises(UsageError, match=message):
            run.parse(argv_of({**command, **MEGATRON, "--rollout.routing_replay": "on"}))


def test_a_dense_checkpoint_is_known_without_the_checks(
    command: dict[str, Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """A supervised run's process leaves these to its supervisor."""
    begun: list[Any] = []
    monkeypatch.setattr(run.stop, "prepare", lambda args: None)
    monkeypatch.setattr(run.host, "start_ray", lambda *given: None)
    monkeypatch.setattr(run.patch, "apply", lambda args, features: begun.extend(features))
    monkeypatch.setattr(run, "run", lambda args: begun.append(args))
    run.train(run.parse(argv_of({**command, **MEGATRON})))
    *features, args = begun
    assert RoutingReplay not in map(type, features) and not args.rollout.replays_routes
