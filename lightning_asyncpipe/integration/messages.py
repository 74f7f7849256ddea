"""Values of the user's in types that travel between ranks, and back.

Tensors, arrays, numbers, strings, None, and lists, tuples and dicts of them travel as they are. Named tuples,
dataclasses and subclasses of dict are sent as the name of their class and their content; the receiver takes a class
only if it is of such a kind and its module has been imported there already. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype)
_TENSOR, _LIST, _TUPLE, _DICT, _NAMED, _DATACLASS, _MAPPING, _SAME = range(8)


def pack(value: Any, what: str) -> list[Any]:
    """`value` in types that the codec takes; :func:`unpack` is the inverse.

    Args:
        value: what is sent.
        what: what it is, for the error, such as "what `predict_step` returns".

    Raises:
        PipelineError: it holds something that cannot be sent; says what and where.
    """
    return _pack(value, "", what)


def _pack(value: Any, path: str, what: str) -> list[Any]:
    kind = type(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        return [_TENSOR, value.device.type != "cpu", value.detach().cpu().as_subclass(Tensor)]
    if isinstance(value, np.generic) or kind is np.ndarray or kind in _PLAIN:
        return [_SAME, value]
    if kind in (list, tuple):
        entries = [_pack(entry, f"{path}[{i}]", what) for i, entry in enumerate(value)]
        return [_LIST if kind is list else _TUPLE, entries]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        entries = [_pack(getattr(value, name), f"{path}.{name}", what) for name in value._fields]
        return [_NAMED, _name(kind), entries]
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        items = {key: _pack(entry, f"{path}[{key!r}]", what) for key, entry in value.items()}
        return [_DICT, items] if kind is dict else [_MAPPING, _name(kind), items]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _pack(getattr(value, f.name), f"{path}.{f.name}", what) for f in dataclasses.fields(value)}
        return [_DATACLASS, _name(kind), fields]
    raise PipelineError(
        f"{what} holds {f'at `{path}` ' if path else ''}an object of type {kind.__module__}.{kind.__qualname__}, which "
        "cannot be sent to the other ranks. Use tensors, arrays, numbers, strings, and lists, tuples, dicts and "
        "dataclasses of them."
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def unpack(packed: list[Any], device: torch.device) -> Any:
    """What :func:`pack` was given; tensors that were on an accelerator arrive on `device`.

    Raises:
        PipelineError: it names a class that this process does not know.
    """
    tag, *content = packed
    if tag == _TENSOR:
        return content[1].to(device) if content[0] else content[1]
    if tag == _SAME:
        return content[0]
    if tag == _LIST:
        return [unpack(entry, device) for entry in content[0]]
    if tag == _TUPLE:
        return tuple(unpack(entry, device) for entry in content[0])
    if tag == _DICT:
        return {key: unpack(entry, device) for key, entry in content[0].items()}
    kind = _class(content[0])
    if tag == _NAMED and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*(unpack(entry, device) for entry in content[1]))
    if tag == _MAPPING and issubclass(kind, dict):
        return _filled(kind, {key: unpack(entry, device) for key, entry in content[1].items()})
    if tag == _DATACLASS and dataclasses.is_dataclass(kind):
        made = kind.__new__(kind)
        for name, entry in content[1].items():
            object.__setattr__(made, name, unpack(entry, device))
        return made
    raise PipelineError(f"a message names the class {content[0]}, which is not of the kind that it says")


def _class(name: str) -> type:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise PipelineError(
            f"another rank sent an object of the class {qualname} of the module {module}, which this process cannot "
            "find: define it at the top level of a module that every rank imports."
        )
    return found


def _filled(kind: type, items: Mapping[Any, Any]) -> Any:
    made: Any = kind(**items) if dataclasses.is_dataclass(kind) else kind()
    if not dataclasses.is_dataclass(kind):
        for key, value in items.items():
            made[key] = value
    return made
