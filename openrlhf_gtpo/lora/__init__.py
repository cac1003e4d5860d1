"""Low-rank adapters, for both backends: how they are merged into weights, and what they are called in a folder of
PEFT's. Needs torch alone."""

from dataclasses import dataclass

ALL_LINEAR = ("all-linear",)  # PEFT's word for all matrices but the LM head
_ROUTED = {"experts", "router", "gate"}  # in the names of a mixture's experts and routers


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of every matrix that ``targets`` names: W becomes W + alpha / rank · B·A. The experts and routers of a
    mixture have none.

    Fields:
        rank: r, the rows of A (r, in) and columns of B (out, r).
        alpha: the numerator of the scale.
        targets: the last parts of Hugging Face's names of the modules, such as q_proj, or ``ALL_LINEAR``.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ALL_LINEAR

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, module: str) -> bool:
        """Whether the linear module of that name, Hugging Face's, gets an adapter; the head is not asked about."""
        parts = module.split(".")
        return _ROUTED.isdisjoint(parts) and (self.targets == ALL_LINEAR or parts[-1] in self.targets)
