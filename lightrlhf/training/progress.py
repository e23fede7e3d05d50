"""Progress of a run, shared by its parts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Finished steps of a run, and which one is the last."""

    step: int = 0  # finished ones
    num_steps: int = 0  # of the run
    is_dry: bool = False
    is_last: bool = False  # the current step, by patience, `on_step` or the end of a dry run
    seconds: dict[str, float] = field(default_factory=dict)  # spent in each phase of the current step

    def due(self, interval: int) -> bool:
        """Whether something with this interval is due after the current step; always after the last step.

        In a dry run, only after the last step.
        """
        if self.is_dry:
            return interval > 0 and self.is_last
        return interval > 0 and (self.step % interval == 0 or self.step == self.num_steps or self.is_last)
