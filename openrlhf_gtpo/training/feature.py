"""The interface of a feature: one folder with settings, check and hooks, named once, in ``FEATURES`` of
``features/__init__.py``.

A run has the features that its arguments ask for. A feature may have a part in each process: the driver, the
controller, an engine's actor, and a training rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from openrlhf_gtpo.training.arguments import Arguments

if TYPE_CHECKING:  # the driver checks a command line before it imports anything heavy
    from openrlhf.trainer.ppo_utils.experience import Experience

    from openrlhf_gtpo.token_values import TokenValues
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.loss import LossFeature
    from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
    from openrlhf_gtpo.training.rollout.answers import Answer
    from openrlhf_gtpo.training.rows import Row
    from openrlhf_gtpo.training.settings.setting import After, Before, Group


class Feature:
    """An optional feature of a run, in the driver, which makes its parts for the other processes.

    Args:
        args: the run's arguments.

    Attributes:
        settings: its flags, which every command line has. Their module imports nothing heavy.
        before, after: its rules before OpenRLHF's block and after it (``settings/rules.py``), applied in every run.
    """

    settings: ClassVar["Group"]
    before: ClassVar[Sequence["Before"]] = ()
    after: ClassVar[Sequence["After"]] = ()

    def __init__(self, args: Arguments) -> None:
        self.args = args

    def is_on(self) -> bool:
        """True if the run has this feature."""
        raise NotImplementedError

    def for_model(self, model: "Model") -> Mapping[str, Any]:
        """Return arguments, by flag, that follow from the policy's checkpoint. Called for features that are on, before
        their checks and before the run. Raises UsageError for a contradiction."""
        return {}

    def check(self, model: "Model") -> None:
        """Raise UsageError if the run would silently train something else, or fail after minutes.

        Args:
            model: the policy's checkpoint.
        """

    def controller(self) -> "ControllerFeature | None":
        """Make its part in the controller."""

    def engine(self) -> "EngineFeature | None":
        """Make its part in each engine's actor, which is sent there."""

    def engine_args(self) -> dict[str, Any]:
        """Return the vLLM arguments that it needs for the policy's engines."""
        return {}

    def loss(self) -> "LossFeature | None":
        """Make its part in each training rank, which is sent there."""


class ControllerFeature:
    """A feature's part in the controller.

    Args:
        args: the run's arguments.
    """

    def __init__(self, args: Arguments) -> None:
        self.args = args

    def sampler(self, run: Any) -> Any:
        """Make a ``Sampler`` that replaces the plain one; None to keep it."""

    def begin(self, run: Any) -> None:
        """Called once models and engines are loaded and the checkpoint is restored."""

    def may_sample_ahead(self, steps: int = 1) -> bool:
        """True if the rollout for so many ``steps`` later may be sampled with the engines' current weights
        (``--train.async_enable``). Called before a step's rollout has its values."""
        return True

    def policy_values(
        self,
        batches: "Sequence[Experience]",
        rows: "Sequence[Row]",
        own: bool,
        split: "Callable[[Sequence[Row]], list[Experience]]",
        forward: "Callable[[Sequence[Experience]], list[TokenValues]]",
    ) -> "list[TokenValues]":
        """Return the old policy's values, (b, t) for each micro-batch.

        Args:
            batches, rows: micro-batches, and all their rows in sampling order.
            own: True for the step's own rows, False for other rows that join its training.
            split: splits rows into micro-batches.
            forward: asks the actors, or the previous feature.
        """
        return forward(batches)

    def on_values(self, batch: "RolloutBatch") -> None:
        """Called once the step's own rows have all values, before their advantages."""

    def on_batch(self, batch: "RolloutBatch", experiences: "Sequence[Experience]") -> None:
        """Called once the step's own rows have advantages."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Called once the step is trained and its weights are sent. May add to the step's logged ``metrics``."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold so that a resumed run continues exactly."""
        return {}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after ``step`` from a checkpoint's ``state``, which may come from a run without this feature."""

    def end(self) -> None:
        """Called at the end, whatever the reason."""


class EngineFeature:
    """A feature's part in an engine's actor."""

    async def start(self, llm: Any) -> None:
        """Called once vLLM has loaded its model."""

    def on_request(self, params: Any) -> None:
        """Called before vLLM gets ``params``, a copy for this call, for a response that is trained on."""

    def on_row(self, row: "Row", response: dict[str, Any], answers: "Sequence[Answer] | None") -> None:
        """Called once a response is complete. ``answers`` are the engine's behind it; None if it is not trained on."""
