"""Lightning's advice to pass ``sync_dist=True``, where all ranks log the same anyway."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning


class UnneededAdvice:
    """Keeps the advice away during a run of one replica, whose ranks log the same in steps and in hooks.

    Args:
        replicas: that there are. With several, hooks log values of a replica, and the advice is right.
    """

    def __init__(self, replicas: int) -> None:
        self._filter: Any = None
        if replicas == 1:
            message = r"It is recommended to use `self\.log\(.*, sync_dist=True\)`"
            warnings.filterwarnings("ignore", message, PossibleUserWarning)
            self._filter = warnings.filters[0]

    def close(self) -> None:
        """The run has ended: Lightning may give the advice again."""
        with suppress(ValueError):  # other filters may have been set meanwhile
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
