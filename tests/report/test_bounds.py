"""What would have shortened a run: bounds by hand, for a run of two steps of 10 s."""

from typing import Any

import pytest

from openrlhf_gtpo.report import bounds, names

STEP = {
    names.timing(names.GENERATION): 6.0,
    names.timing(names.MAKE_EXPERIENCE): 1.0,
    names.timing(names.OLD_LOG_PROBS): 1.0,
    names.timing(names.PPO_TRAIN): 2.5,
    names.timing(names.BROADCAST): 0.5,
    names.TIMING_STEP_WALL: 10.0,
    names.TOKENS_PROMPT: 800.0,  # 8 responses to a prompt
    names.TOKENS_RESPONSE: 100.0,
    names.TOKENS_COMPUTED: 1000.0,
    names.TOKENS_ROWS: 900.0,
    names.RESPONSE_LENGTH_MEAN: 10.0,
    names.RESPONSE_LENGTH_MAX: 40.0,
}
AHEAD = {names.IDLE_TRAINER: 6.0, names.TIMING_ROLLOUT: 10.0}


def run_of(offer: str, flags: str = "--flag", **more: float) -> list[dict[str, Any]]:
    """Two steps, 5 s apart, and 5 s behind the last; before it went on from step 1 it was gone for a long time."""
    begin = {"kind": names.KIND_RUN, names.SAMPLES: 8, offer: flags}
    return [
        begin | {"step": 0, "time": 0.0},
        {"kind": names.KIND_TRAIN, "step": 1, "time": 30.0, **STEP, **more},
        {"kind": names.KIND_EVAL, "step": 1, "time": 35.0},
        begin | {"step": 1, "time": 900.0},
        {"kind": names.KIND_TRAIN, "step": 2, "time": 930.0, **STEP, **more},
        begin | {"step": 2, "time": 935.0, "ended": True},
    ]


@pytest.mark.parametrize(
    ("offer", "more", "seconds", "left"),
    [
        (names.OFFER_ONE_STEP_OFF, {}, 10, 6),  # sampling is the longer half
        (names.OFFER_SAMPLER_ENTROPY, {}, 10, 9),
        # Of 900 tokens, computed as 1,000 with padding, 200 differ: 0.2 of 3.5 s are left.
        (names.OFFER_SHARED_PROMPTS, {}, 10, 10 - 3.5 * 0.8),
        (names.OFFER_IN_FLIGHT, AHEAD, 10, 4),  # what is not waited for, since engines are busy for 10 × 10 / 40 s
        (names.OFFER_IN_FLIGHT, AHEAD | {names.RESPONSE_LENGTH_MEAN: 30.0}, 10, 7.5),
        (names.OFFER_RARER, {}, 30, 25),  # 20 s of steps, and 10 s between them
    ],
)
def test_a_bound_takes_away_what_the_flag_can(offer: str, more: dict[str, float], seconds: float, left: float) -> None:
    [gain] = bounds.gains(run_of(offer, **more))
    assert gain.factor == pytest.approx(seconds / left)
    assert gain.flags == "--flag"


def test_one_step_off_without_the_forward_pass_saves_both() -> None:
    seconds = {names.timing(names.GENERATION): 4.0}
    [gain] = bounds.gains(run_of(names.OFFER_ONE_STEP_OFF, "--rollout.entropy sampler", **seconds))
    assert gain.factor == pytest.approx(10 / (10 - 4 - 1))


@pytest.mark.parametrize(("flags", "found"), [("--eval.steps 2 --ckpt.save_steps 2", 1), ("--eval.steps 4", 0)])
def test_evaluations_are_not_put_behind_the_end(flags: str, found: int) -> None:
    assert len(bounds.gains(run_of(names.OFFER_RARER, flags))) == found


def test_what_gains_nothing_is_not_named() -> None:
    assert bounds.gains(run_of(names.OFFER_SAMPLER_ENTROPY, **{names.timing(names.OLD_LOG_PROBS): 0.1})) == []
    assert bounds.gains(run_of("offer/unknown")) == []
