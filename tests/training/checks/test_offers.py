"""Flags that a report advises are accepted by the run that they are advised to."""

import shlex
from typing import Any

import pytest

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.checks.offers import offers
from openrlhf_gtpo.training.run import check, parse
from tests.support.command_lines import argv_of

pytestmark = pytest.mark.usefixtures("no_engine")

ONE_STEP = {"--rollout.batch_size": 32, "--train.batch_size": 128, "--algo.kl.init_coef": 0}  # nothing needs the actor
ASYNC = {
    "--train.async_enable": True,
    "--rollout.entropy": "sampler",
    "--algo.advantage.is_correction_level": "token",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (ONE_STEP, {names.OFFER_ONE_STEP_OFF, names.OFFER_SAMPLER_ENTROPY}),
        ({}, {names.OFFER_ONE_STEP_OFF}),  # several need the actor's forward
        (
            {**ONE_STEP, "--algo.kl.init_coef": 0.1},
            {names.OFFER_ONE_STEP_OFF},
        ),  # as a reward, it needs the actor's forward
        ({"--rollout.top_p": 0.9, "--algo.advantage.estimator": "group_norm"}, {names.OFFER_ONE_STEP_OFF}),
        ({"--rollout.entropy": "sampler", "--ckpt.save_steps": 5}, {names.OFFER_ONE_STEP_OFF, names.OFFER_RARER}),
        ({"--train.shared_prompts": "off", **ASYNC}, {names.OFFER_IN_FLIGHT, names.OFFER_SHARED_PROMPTS}),
        (ASYNC | {"--vllm.sync_with_ray": True}, set()),
    ],
)
def test_what_is_offered_is_accepted(command: dict[str, Any], changes: dict[str, Any], expected: set[str]) -> None:
    words = argv_of(command | changes)
    found = offers(parse(words))
    assert found.keys() == expected
    for flags in found.values():
        check(parse([*words, *shlex.split(flags)]))
