"""What a run was asked to be, what it was planned to be, and what came of it: the strategy's numbers.

The arguments become a :class:`Geometry` once the number of processes is known, and a :class:`Partition` once the model
and a batch are; afterwards both can be read, and the plan can be saved.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpipe.integration import guards, partitioning, saved_plans
from lightning_asyncpipe.integration.connected import ConnectedStrategy
from lightning_asyncpipe.integration.partitioning import Partition
from lightning_asyncpipe.plan.geometry import Geometry, resolve
from lightning_asyncpipe.plan.saved import write_plan


class PlannedStrategy(ConnectedStrategy):
    """Keeps what is asked of a plan, and the plan.

    Args:
        numbers: ``num_stages``, ``num_pipelines``, ``num_microbatches``, ``max_in_flight`` and ``data_parallel_size``.
        max_staleness, weight_stash, staleness_correction, split_backward, cuts, partition, memory_limit, plan: as for
            :class:`AsyncMultiPipeStrategy`.
        kwargs: as for :class:`ConnectedStrategy`.

    Raises:
        MisconfigurationException: for values that have no meaning.
    """

    def __init__(
        self,
        numbers: Mapping[str, int | Literal["auto"]],
        max_staleness: Literal[0, 1],
        weight_stash: bool,
        staleness_correction: Literal["auto", "none", "extrapolate", "predict"],
        split_backward: bool | Literal["auto"],
        cuts: Literal["auto"] | Sequence[str],
        partition: Literal["auto", "profile", "operations"],
        memory_limit: int | None,
        plan: str | os.PathLike[str] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        guards.check_arguments(
            max_staleness, weight_stash, staleness_correction, split_backward, cuts, self._timeout, self._start_method
        )
        partitioning.check_arguments(partition, memory_limit, plan, cuts)
        self.max_staleness = max_staleness
        self.weight_stash = weight_stash
        self.staleness_correction = staleness_correction
        self.split_backward = split_backward
        self.cuts = cuts
        self.partition = partition
        self.memory_limit = memory_limit
        self.plan = plan
        self._asked = guards.checked_numbers(**numbers)
        self._partition: Partition | None = None
        self._statistics: dict[str, Any] = {}

    # Before a run

    @property
    def geometry(self) -> Geometry:
        """The resolved numbers of devices, pipelines and micro-batches; from ``setup`` on those of the plan.

        Raises:
            MisconfigurationException: if the arguments do not fit each other or the world size.
        """
        if self._partition is not None:
            return self._partition.geometry
        return self.resolved()

    def resolved(self, split_backward: bool = False) -> Geometry:
        """As :attr:`geometry`; with split backwards, fewer micro-batches need to be in flight."""
        try:
            return resolve(self._placed_processes, **self._asked, split_backward=split_backward)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from None

    def asked_numbers(self) -> dict[str, Any]:
        """D, N, M and w as the user gave them, "auto" included."""
        return {name: value for name, value in self._asked.items() if name != "data_parallel_size"}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a replica see the same samples."""
        geometry = self.geometry
        return {"num_replicas": geometry.replicas, "rank": self.global_rank // geometry.num_stages}

    def use_partition(self, partition: Partition) -> None:
        """From now on run this plan."""
        self._partition = partition

    # In a run, and after it

    def statistics(self) -> dict[str, Any]:
        """What was measured in the last ``fit``: utilisation, staleness counts, micro-batches, steps.

        The same on every rank, available once ``fit`` has ended.
        """
        return dict(self._statistics)

    def describe(self) -> dict[str, Any]:
        """The plan of the running or last ``fit`` as plain data: stages, devices, predicted times and memory.

        What was not measured is None. The same on every rank.
        """
        return copy.deepcopy(self._require_partition().description)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan of the running or last ``fit`` to a file, on rank 0, for ``plan=path`` in another run."""
        if self.is_global_zero:
            assert self.lightning_module is not None
            write_plan(path, saved_plans.saved_plan(self, self._require_partition(), self.lightning_module))

    def _plan_to_save(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        way = partitioning.way_of(self)
        return saved_plans.checkpoint_entry(self, self._require_partition(), self.lightning_module, way)

    def outcome(self) -> dict[str, Any]:
        """What :meth:`statistics`, :meth:`describe` and :meth:`save_plan` need in a main process that is no rank."""
        return {"statistics": self._statistics, "plan": self._require_partition().to_message()}

    def take_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Go on from the :meth:`outcome` of the rank that has run."""
        self._statistics, self._partition = outcome["statistics"], Partition.from_message(outcome["plan"])

    def _require_partition(self) -> Partition:
        if self._partition is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no plan yet: it is made at the start of `Trainer.fit`"
            )
        return self._partition
