"""The planner: from a placement and costs to the actions of any segment."""

from __future__ import annotations

from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.emission import emit
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.search import EFFORT, TOLERANCE, Choice, choose
from lightning_asyncpipe.plan.segment import SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.steady import run_segment
from lightning_asyncpipe.plan.tables import Tables

__all__ = ["Costs", "Planner", "SegmentPlan", "SegmentSpec"]


class Planner:
    """Plans segments, deterministically: the same arguments give the same actions on every rank.

    Args:
        placement: which device runs which stage.
        max_in_flight: micro-batches of one pipeline between their first stage's forward and its backward, at least 1.
        costs: what actions cost; unless given, all stages are alike, a backward takes as long as two forwards, and a
            message a tenth of one.
        split_backward: plan the input's and the weights' gradients as separate actions.
        effort: simulated operations to spend on the choice of a policy, per size of batch.
        tolerance: the share of a step's time that fewer early forwards may cost.
    """

    def __init__(
        self,
        placement: Placement,
        max_in_flight: int,
        costs: Costs | None = None,
        split_backward: bool = False,
        effort: int = EFFORT,
        tolerance: float = TOLERANCE,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}: at least one micro-batch must be let in")
        if costs is None:
            costs = Costs.uniform(placement.num_stages, message=0.1)
        elif costs.num_stages != placement.num_stages:
            raise ValueError(f"costs of {costs.num_stages} stages for {placement.num_stages} stages")
        self.placement = placement
        self.max_in_flight = max_in_flight
        self.costs = costs
        self.split_backward = split_backward
        self._tables = Tables(placement, max_in_flight, costs, split_backward)
        self.effort = effort
        self.tolerance = tolerance
        self._choices: dict[tuple[int, bool, bool], Choice] = {}
        self._plans: dict[SegmentSpec, SegmentPlan] = {}

    def segment(self, spec: SegmentSpec) -> SegmentPlan:
        """The plan of a segment; the same object when asked for again.

        Raises:
            ScheduleError: when ``spec.carried`` is not something that the bound on micro-batches in flight allows.
        """
        plan = self._plans.get(spec)
        if plan is None:
            plan = self._plans[spec] = self._plan(spec)
        return plan

    def _plan(self, spec: SegmentSpec) -> SegmentPlan:
        current, early = run_segment(
            self._tables,
            self.choice(spec).policy,
            spec.microbatches,
            spec.ahead,
            spec.carried,
            spec.steps,
        )
        return emit(self._tables, spec, current, early)

    def choice(self, spec: SegmentSpec) -> Choice:
        """The policy for segments of this size, chosen for a stream of equal ones."""
        streaming = spec.ahead > 0 or any(spec.carried)
        key = spec.microbatches, streaming, spec.steps
        choice = self._choices.get(key)
        if choice is None:
            choice = choose(self._tables, *key, self.effort, self.tolerance)
            self._choices[key] = choice
        return choice
