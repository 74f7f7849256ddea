"""The errors this package raises on its own behalf.

Every message says what was wrong, with the value, and what to do. Configuration mistakes that Lightning's users know as
``MisconfigurationException`` are raised as that exception at the edge (``strategy`` and ``integration``); the classes
below are what the torch-only parts raise.
"""

from __future__ import annotations


class PipelineError(RuntimeError):
    """Base of every error of this package."""


class CutError(PipelineError):
    """The model cannot be cut where it was asked to be: the message names what crosses the cut."""


class UnrepeatableStepError(CutError):
    """The step computes something else when it runs again on the same micro-batch: the message says what to do."""


class ScheduleError(PipelineError):
    """A schedule breaks a dependency, a bound, or could deadlock: the message names the actions."""


class DataMismatchError(PipelineError):
    """Ranks of one replica were given different data: the message names the step and the ranks."""


class PeerFailure(PipelineError):
    """Another rank failed; the message carries that rank's own traceback."""


class CollectiveInStepError(PipelineError):
    """A collective was called inside a step, where ranks run different parts of it."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written or read: the message names the file, and says what was wrong with it."""
