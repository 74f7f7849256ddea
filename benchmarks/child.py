"""A part of a benchmark in processes of its own, so that none inherits what another has left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def command(script: str, options: dict[str, Any]) -> list[str]:
    """The command line that runs a script: None and False leave an option out, True is a flag, a list many values."""
    line = [sys.executable, os.fspath(Path(script).resolve())]
    for name, value in options.items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            line += map(str, values)
    return line


def measured(script: str, *, quiet: bool = False, **options: Any) -> Any:
    """What a script writes, as JSON, to the file that it is given as ``--result``.

    Args:
        script: its path, ``__file__`` of the caller.
        quiet: drop what it prints.
        options: see :func:`command`.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        output = subprocess.DEVNULL if quiet else None
        subprocess.run(command(script, {**options, "result": result}), check=True, stdout=output)
        return json.loads(result.read_text())
