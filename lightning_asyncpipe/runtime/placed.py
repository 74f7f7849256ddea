"""A program for a step whose weights are placed already.

Which device holds which weights is decided by the step that is trained. Validation runs the same model, but perhaps
other parts of it, or in another way. Between the places where that step could be cut lie segments; each segment goes
to a stage of the training step that has all the weights which the segment uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from lightning_asyncpipe.errors import CutError
from lightning_asyncpipe.runtime.candidates import Candidates
from lightning_asyncpipe.runtime.cuts import why_no_cut
from lightning_asyncpipe.runtime.program import StageProgram, build_program


def placed_program(candidates: Candidates, held: Sequence[Collection[str]]) -> tuple[StageProgram, tuple[int, ...]]:
    """Cut a step so that each part finds its weights where they are, with as few messages as possible.

    Args:
        candidates: all valid cuts of the step.
        held: for each stage of the step that is trained, the names of the parameters that its devices hold.

    Returns:
        The program, and for each of its stages the stage of the trained step on whose device it runs. One may be left
        out, where the step does without its weights, or come twice.

    Raises:
        CutError: a part that cannot be cut uses weights of several stages; the message says what crosses there.
    """
    times = [cut.time for cut in candidates.cuts]
    used: list[set[str]] = [set(candidates.liveness.everywhere) for _ in range(len(times) + 1)]
    for name, uses in candidates.liveness.uses.items():
        for time in uses:
            used[bisect_right(times, time)].add(name)
    allowed = [[stage for stage, names in enumerate(held) if segment.issubset(names)] for segment in used]
    for segment, stages in enumerate(allowed):
        if not stages:
            raise CutError(_spread(candidates, segment, held))
    route = _fewest_changes(allowed)
    changes = [i for i in range(1, len(route)) if route[i] != route[i - 1]]
    program = build_program(candidates, [candidates.cuts[i - 1] for i in changes])
    return program, (route[0], *(route[i] for i in changes))


def _fewest_changes(allowed: Sequence[Sequence[int]]) -> list[int]:
    """For each segment one of its stages, so that neighbours differ as seldom as possible; earlier stages first."""
    changes: list[dict[int, int]] = [dict.fromkeys(allowed[-1], 0)]
    for stages in reversed(allowed[:-1]):
        following = changes[-1]
        fewest = min(following.values()) + 1
        changes.append({stage: min(following.get(stage, fewest), fewest) for stage in stages})
    changes.reverse()
    route = [min(changes[0], key=lambda stage: (changes[0][stage], stage))]
    for cost in changes[1:]:
        stay = cost.get(route[-1])
        best = min(cost, key=lambda stage: (cost[stage], stage))
        route.append(route[-1] if stay is not None and stay <= cost[best] + 1 else best)
    return route


def _spread(candidates: Candidates, segment: int, held: Sequence[Collection[str]]) -> str:
    """Why a segment fits no stage: the first weights in it that lie on another stage than those before."""
    times = [cut.time for cut in candidates.cuts]
    uses = sorted(
        (time, name)
        for name, found in candidates.liveness.uses.items()
        for time in found
        if bisect_right(times, time) == segment
    )
    possible = set(range(len(held)))
    before = ""
    for time, name in uses:
        holders = {stage for stage, names in enumerate(held) if name in names}
        if not possible & holders:
            return (
                f"it uses '{before}', which is on stage {min(possible)} of what is trained, and '{name}', which is on "
                f"stage {min(holders, default=-1)}, and cannot be cut between: {why_no_cut(candidates, time)}"
            )
        possible &= holders
        before = name
    everywhere = ", ".join(sorted(candidates.liveness.everywhere)[:3])
    return f"its control flow depends on weights ({everywhere}), which would have to be on every stage"
