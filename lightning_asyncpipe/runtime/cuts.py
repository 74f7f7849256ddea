"""Choosing cuts: balanced ones, or those that the user names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise

from lightning_asyncpipe.errors import CutError
from lightning_asyncpipe.plan.balance import split
from lightning_asyncpipe.runtime.candidates import PREFERENCE, Cut
from lightning_asyncpipe.runtime.candidates import Candidates as Candidates
from lightning_asyncpipe.runtime.candidates import find_cuts as find_cuts


def choose_cuts(candidates: Candidates, num_stages: int, names: Sequence[str] | None = None) -> tuple[Cut, ...]:
    """The `num_stages` - 1 cuts to use, in order.

    Args:
        candidates: from :func:`find_cuts`.
        num_stages: number of stages.
        names: names of the modules that begin the second stage, the third one and so on; None: balance the costs of the
            traced operations.

    Raises:
        CutError: there are too few valid cuts, or a named one is not valid; the message says what crosses.
    """
    if names is not None:
        return _named(candidates, num_stages, names)
    if len(candidates.cuts) < num_stages - 1:
        raise CutError(_too_few(candidates, num_stages))
    return tuple(candidates.cuts[i] for i in split(candidates.costs(), num_stages, candidates.messages()))


def _named(candidates: Candidates, num_stages: int, names: Sequence[str]) -> tuple[Cut, ...]:
    if len(names) != num_stages - 1:
        raise CutError(
            f"{num_stages} stages need {num_stages - 1} cuts, but cuts={list(names)} names {len(names)}. Name the "
            "module that begins each stage but the first."
        )
    chosen = [_cut_before(candidates, name) for name in names]
    for i, (earlier, later) in enumerate(pairwise(chosen)):
        if earlier.time >= later.time:
            raise CutError(
                f"cuts={list(names)}: '{names[i + 1]}' does not begin after '{names[i]}' does, so nothing would lie "
                "between them. Name the modules in the order in which the step calls them, each once."
            )
    return tuple(chosen)


def _cut_before(candidates: Candidates, name: str) -> Cut:
    trace = candidates.trace
    calls = [call for call in trace.calls if call.key.name == name]
    if not calls:
        known = sorted({call.key.name for call in trace.calls if call.key.name})
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known[:3]
        raise CutError(
            f"cuts: the step calls no module '{name}'. Near names: {', '.join(near) or 'none'}. A module that is in "
            "several places is known by the first one."
        )
    call = calls[0]
    units, local = candidates.liveness.unit, candidates.liveness.local
    computed = [other for i, other in enumerate(trace.calls) if units[i] not in local]
    since = max((other.end for other in computed if other.end < call.begin), default=0)
    fitting = [cut for cut in candidates.cuts if since <= cut.time <= call.begin]
    if fitting:
        return min(fitting, key=lambda cut: (PREFERENCE[cut.way], -cut.time))
    raise CutError(f"cuts: no stage can begin at '{name}': " + _reason(candidates, call.begin))


def _reason(candidates: Candidates, time: int) -> str:
    crossing = candidates.crossing(time)
    if not crossing:
        return "nothing that depends on the model is made before it, so the stage before it would be empty"
    if len(crossing) > 1:
        listed = "; ".join(candidates.describe(value) for value in crossing[:4])
        more = f"; and {len(crossing) - 4} more" if len(crossing) > 4 else ""
        return f"one tensor may cross, but {len(crossing)} do: {listed}{more}"
    described = candidates.describe(crossing[0])
    for _, value, reason in candidates.refused:
        if value == crossing[0]:
            return f"{described}; but {reason}"
    return f"{described}; but it is neither a result nor an argument of a call of a module there"


def why_no_cut(candidates: Candidates, use: int) -> str:
    """Why the step cannot be cut before an operation, in words.

    Args:
        candidates: all valid cuts.
        use: time of the operation.
    """
    calls = [call for call in candidates.trace.calls if call.begin < use < call.end]
    units = candidates.liveness.unit
    outermost = [call for i, call in enumerate(candidates.trace.calls) if units[i] == i and call in calls]
    return _reason(candidates, outermost[0].begin if outermost else use)


def _too_few(candidates: Candidates, num_stages: int) -> str:
    text = f"{num_stages} stages were asked for, but the step "
    text += f"can be cut into {len(candidates.cuts) + 1} at most" if candidates.cuts else "cannot be cut at all"
    narrow = _narrowest(candidates)
    if narrow is not None:
        call = candidates.trace.calls[narrow]
        text += f". Before '{call.key.name}', for example: {_reason(candidates, call.begin)}"
    if candidates.trace.compiled:
        text += f". '{candidates.trace.compiled[0]}' is compiled, and so one part; compile its submodules instead"
    return text + ". Use fewer stages, or change the model so that one tensor passes from part to part."


def _narrowest(candidates: Candidates) -> int | None:
    """The call, off the valid cuts, at whose begin the fewest values cross; of several the middle one."""
    taken = candidates.count_crossing({cut.value for cut in candidates.cuts})
    every = candidates.count_crossing()
    calls = [
        (every[call.begin], index)
        for index, call in enumerate(candidates.trace.calls)
        if every[call.begin] > 0 and (every[call.begin], taken[call.begin]) != (1, 1)
    ]
    fewest = min(calls, default=(0, 0))[0]
    best = [index for count, index in calls if count == fewest]
    return best[len(best) // 2] if best else None
