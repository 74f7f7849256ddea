"""On the path of scripts that tests launch by the dozen: hides optional packages that torchmetrics would import.

A third of the time until such a script begins goes into packages that it does not use.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

_HIDDEN = ("transformers", "matplotlib", "tensorboard", "scipy", "pandas", "sklearn", "nltk", "torchvision")
_distribution, _find_spec = importlib.metadata.distribution, importlib.util.find_spec


def _without_hidden(name: str) -> importlib.metadata.Distribution:
    if name.lower() in _HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return _distribution(name)


def _specs_without_hidden(name: str, package: str | None = None) -> object:
    return None if name.partition(".")[0] in _HIDDEN else _find_spec(name, package)


importlib.metadata.distribution = _without_hidden
importlib.util.find_spec = _specs_without_hidden
