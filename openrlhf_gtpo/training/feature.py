"""What a feature is: one folder with its settings, its check and the hooks that it needs, named once, in ``FEATURES``
of ``features/__init__.py``.

A run has the features that its arguments ask for. Each process makes those that have something to do in it: the
driver, the controller, an engine's actor, and a rank that trains.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from openrlhf_gtpo.training.arguments import Arguments

if TYPE_CHECKING:  # the driver refuses a command line before anything heavy is imported
    from openrlhf.trainer.ppo_utils.experience import Experience

    from openrlhf_gtpo.token_values import TokenValues
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.loss import LossFeature
    from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
    from openrlhf_gtpo.training.rollout.answers import Answer
    from openrlhf_gtpo.training.rows import Row
    from openrlhf_gtpo.training.settings.setting import After, Before, Group


class Feature:
    """What a run may do besides training: its address in the driver, from where its parts in the other processes come.

    Args:
        args: the run's arguments.

    Attributes:
        settings: its flags, which every command line has. Their module imports nothing heavy.
        before, after: its rules before OpenRLHF's block and after it (``settings/rules.py``), on or off.
    """

    settings: ClassVar["Group"]
    before: ClassVar[Sequence["Before"]] = ()
    after: ClassVar[Sequence["After"]] = ()

    def __init__(self, args: Arguments) -> None:
        self.args = args

    def is_on(self) -> bool:
        """Whether the run has this feature."""
        raise NotImplementedError

    def for_model(self, model: "Model") -> Mapping[str, Any]:
        """Other values for arguments, by flag, where they follow from the policy's checkpoint: asked of features that
        are on, before they are checked and before the run begins. Raises UsageError for a contradiction."""
        return {}

    def check(self, model: "Model") -> None:
        """Raise UsageError for what would train something else in silence, or fail after minutes.

        Args:
            model: the policy's checkpoint.
        """

    def controller(self) -> "ControllerFeature | None":
        """Its part in the controller's process."""

    def engine(self) -> "EngineFeature | None":
        """Its part in each engine's actor, which is sent there."""

    def engine_args(self) -> dict[str, Any]:
        """vLLM arguments that it needs of the policy's engines."""
        return {}

    def loss(self) -> "LossFeature | None":
        """Its part in each rank that trains, likewise."""


class ControllerFeature:
    """A feature's part in the controller.

    Args:
        args: the run's arguments.
    """

    def __init__(self, args: Arguments) -> None:
        self.args = args

    def sampler(self, run: Any) -> Any:
        """A ``Sampler`` for the run in place of the plain one; None for no other."""

    def begin(self, run: Any) -> None:
        """Models and engines are loaded, and the checkpoint's states restored."""

    def may_sample_ahead(self, steps: int = 1) -> bool:
        """Asked before a step's rollout has its values: whether what is trained on so many ``steps`` after it may be
        sampled now, with the weights that the engines have (``--train.async_enable``)."""
        return True

    def policy_values(
        self,
        batches: "Sequence[Experience]",
        rows: "Sequence[Row]",
        own: bool,
        split: "Callable[[Sequence[Row]], list[Experience]]",
        forward: "Callable[[Sequence[Experience]], list[TokenValues]]",
    ) -> "list[TokenValues]":
        """The old policy's values, (b, t) of each micro-batch.

        Args:
            batches, rows: micro-batches, and all their rows in sampling order.
            own: whether these are the step's own rows, and not others that join its training.
            split: makes micro-batches of rows.
            forward: asks the actors, or the feature before this one.
        """
        return forward(batches)

    def on_values(self, batch: "RolloutBatch") -> None:
        """The step's own rows have all their values, and no advantages yet."""

    def on_batch(self, batch: "RolloutBatch", experiences: "Sequence[Experience]") -> None:
        """The step's own rows have advantages."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """The step is trained, and its weights are sent; what is put into ``metrics`` is logged with it."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the run to go on as if it had not stopped."""
        return {}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Go on after ``step`` from the ``state`` of a checkpoint, which may be of a run without this feature."""

    def end(self) -> None:
        """No step follows, whatever the reason."""


class EngineFeature:
    """A feature's part in an engine's actor."""

    async def start(self, llm: Any) -> None:
        """vLLM has loaded its model."""

    def on_request(self, params: Any) -> None:
        """vLLM will be asked with ``params``, a copy for this call, on behalf of a response that is trained on."""

    def on_row(self, row: "Row", response: dict[str, Any], answers: "Sequence[Answer] | None") -> None:
        """The response is complete; ``answers`` are the engine's behind it, None if it is not trained on."""
