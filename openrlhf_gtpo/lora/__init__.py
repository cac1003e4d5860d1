"""Low-rank adapters, for both backends: their options, merging into weights, and PEFT's folder format. Needs only
torch."""

from dataclasses import dataclass

ALL_LINEAR = ("all-linear",)  # PEFT's name for all matrices but the LM head
_ROUTED = {"experts", "router", "gate"}  # in the names of a mixture's experts and routers


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of every matrix named in ``targets``: W becomes W + alpha / rank · B·A. A mixture's experts and routers
    get none.

    Fields:
        rank: r, the rows of A (r, in) and columns of B (out, r).
        alpha: the numerator of the scale.
        targets: the last parts of Hugging Face's module names, such as q_proj, or ``ALL_LINEAR``.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ALL_LINEAR

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / self.rank

    def adapts(self, module: str) -> bool:
        """Tell whether the linear module with this Hugging Face name gets an adapter. Callers leave out the head."""
        parts = module.split(".")
        return _ROUTED.isdisjoint(parts) and (self.targets == ALL_LINEAR or parts[-1] in self.targets)
