"""What ``training_step`` keeps in attributes of its module.

Lists that grow, ``self.outs.append(x)``, grow on every rank by what the last stages appended. Other attributes that the
step sets are named in a warning: the step runs once for each micro-batch and stage, so they differ between ranks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.outputs import MicroBatchOutput, detached
from lightning_asyncpipe.runtime.step_state import SET_IN_STEPS, plain_entries

_SIZED = (dict, defaultdict, Counter, OrderedDict)  # attributes of these types change when what they hold does
_MISSING = object()
_EMPTY: tuple[int, int, dict[Any, Any]] = (0, 0, {})


class _Before(NamedTuple):
    """A list or deque before a micro-batch: enough to tell an append from any other change."""

    held: list[Any] | deque[Any]
    length: int
    first: Any
    last: Any
    content: list[Any] | None  # of a deque with a limit, from which an append removes


class GrowthWatch:
    """Takes back what a step appends to lists and deques, attributes of a module.

    Appends are seen on the list itself (``append``, ``extend``, ``+=``) and where the attribute is
    replaced by a longer list (``self.outs = self.outs + [x]``). An attribute that is replaced by
    something else is left alone, like every other attribute that ``training_step`` sets; a warning
    names each once.

    Args:
        module: the module.
        step: name of the step, for messages.
    """

    def __init__(self, module: LightningModule, step: str = "training_step") -> None:
        self._module = module
        self._step = step
        self._grown: dict[str, list[Any]] = {}
        self._named: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one micro-batch's forward; afterwards no list is longer than before.

        Raises:
            PipelineError: a list lost entries; names the attribute.

        """
        self._grown = {}
        others = vars(self._module).copy()
        before = {name: _before(value) for name, value in others.items() if isinstance(value, (list, deque))}
        sizes = {name: _size(value) for name, value in others.items() if type(value) in _SIZED}
        try:
            yield
        except Exception:
            raise  # the user's error: do not cover it with another
        except BaseException:  # a stage that is not the last leaves `training_step` this way
            self._restore(before)
            self._grown = {}  # it may hold a graph
            self._name_changes(others, sizes)
            raise
        self._restore(before)
        self._name_changes(others, sizes)

    def take(self) -> dict[str, list[Any]]:
        """What the micro-batch watched last appended, detached, by attribute.

        Call it for last stages only: what others appended is dropped with the next micro-batch.
        """
        grown, self._grown = self._grown, {}
        return {name: [detached(entry) for entry in tail] for name, tail in grown.items()}

    def commit(self, outputs: Iterable[MicroBatchOutput]) -> None:
        """Append what a batch's micro-batches appended, in the order given."""
        for output in outputs:
            self.append(output.grown)

    def append(self, grown: Mapping[str, list[Any]]) -> None:
        """Append to the module's lists, by attribute."""
        for name, tail in grown.items():
            vars(self._module).setdefault(name, []).extend(tail)

    def _name_changes(self, before: dict[str, Any], sizes: dict[str, tuple[int, int, dict[Any, Any]]]) -> None:
        """Warn of attributes that were set, and of dicts that changed, each once."""
        for name, value in vars(self._module).items():
            was = before.get(name, _MISSING)
            if value is was and type(value) not in _SIZED:
                continue
            if name in self._named or name in SET_IN_STEPS or isinstance(value, (list, deque)):
                continue
            if (sizes.get(name) == _size(value)) if type(value) in _SIZED else _same(was, value):
                continue
            self.name_change(name)

    def name_change(self, name: str) -> None:
        """Warn once that the step changes what is under this name."""
        if name in self._named:
            return
        self._named.add(name)
        rank_zero_warn(
            f"`{self._step}` changes `self.{name}`. It runs once for each stage and part of a batch, on each rank "
            "for its own ones, and early for some of the next batch, so the value is not that of the batch and "
            "differs between ranks. The rest of the same call may use it, a hook or a later call may not: return "
            f"what you need from `{self._step}`, append it to a list, or count in the hook that ends a batch."
        )

    def _restore(self, before: dict[str, _Before]) -> None:
        attributes = vars(self._module)
        for name, was in before.items():
            tail = _tail(attributes.get(name), was)
            if tail is None:
                raise PipelineError(
                    f"`{self._step}` removed entries from the list `self.{name}`. It runs for "
                    "each micro-batch and stage, so that lists may only be appended to in it. "
                    "Remove entries in the hook that ends a batch, such as `on_train_batch_end`."
                )
            if tail:
                attributes[name] = was.held
                self._grown[name] = tail


def _size(value: dict[Any, Any]) -> tuple[int, int, dict[Any, Any]]:
    """How much is in a dict, and in lists in it, and the numbers and strings in it."""
    if not value:  # as most that torch keeps in a module
        return _EMPTY
    lists = sum(len(entry) for entry in value.values() if isinstance(entry, (list, deque)))
    return len(value), lists, plain_entries(value)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, (int, float, str, tuple)) and one == other


def _before(held: list[Any] | deque[Any]) -> _Before:
    first, last = (held[0], held[-1]) if held else (None, None)
    limited = isinstance(held, deque) and held.maxlen is not None
    return _Before(held, len(held), first, last, list(held) if limited else None)


def _tail(now: Any, was: _Before) -> list[Any] | None:
    """What was appended, having removed it; None if entries were lost."""
    if now is not was.held:
        replaced = isinstance(now, (list, deque)) and len(now) > was.length
        return list(now)[was.length :] if replaced and _starts_alike(now, was) else []
    if was.content is not None:
        after = list(now)
        appended = next(
            n for n in range(was.length + 1) if all(a is b for a, b in zip(was.content[n:], after, strict=False))
        )
        now.clear()
        now.extend(was.content)
        return after[was.length - appended :]
    if len(now) >= was.length and _starts_alike(now, was):
        tail = [now.pop() for _ in range(len(now) - was.length)]
        return tail[::-1]
    return None


def _starts_alike(now: Any, was: _Before) -> bool:
    return was.length == 0 or (now[0] is was.first and now[was.length - 1] is was.last)
