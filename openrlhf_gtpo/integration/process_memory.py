"""What actors and vLLM's workers are extended with, so that a run's controller can ask them for their peak memory."""

from functools import cached_property

from openrlhf_gtpo.platform.memory import PeakByPhase


class ReportsPeakMemory:
    """Mixed into a class of which a process has one object."""

    @cached_property
    def peaks(self) -> PeakByPhase:
        """Of this process."""
        return PeakByPhase()

    def take_peak_memory(self, until_now: str | None = None) -> dict[str, int]:
        """Phase to bytes, since this was last called.

        Args:
            until_now: the phase that this process has been in since then, where it cannot know that itself.
        """
        if until_now is not None:
            self.peaks.until_now(until_now)
        return self.peaks.take()
