"""The environment of scripts that tests launch by the dozen."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

PYTHON_PATH = os.pathsep.join((str(Path(__file__).with_name("lean")), str(_ROOT)))
"""This repository, and what hides optional packages that scripts do not use: a third of the time until they begin."""
