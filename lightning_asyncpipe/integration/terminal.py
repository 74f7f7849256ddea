"""Lines that others print once for each rank, and that the user can do nothing about."""

from __future__ import annotations

import logging
import warnings

from lightning.fabric.utilities.rank_zero import rank_zero_only

_DEPRECATED = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
_DEFAULTED = "`weights_only` was not set"


def quieten() -> None:
    """Leave out two lines of Lightning 2.6.6.

    * torch's warning about how ``lightning.pytorch.utilities._pytree`` asks for leaves;
    * on ranks other than 0, what ``Trainer.save_checkpoint`` notes about its default.
    """
    warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning, r"lightning\.pytorch\.utilities\._pytree")
    saving = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    saving.addFilter(_first_rank_alone)  # once, however often it is called


def _first_rank_alone(record: logging.LogRecord) -> bool:
    return not (getattr(rank_zero_only, "rank", 0) and record.getMessage().startswith(_DEFAULTED))
