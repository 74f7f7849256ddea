"""Runs a script, or a module, of a project that does not import this package, and so does not know the strategy's name.

The popen launcher starts the other ranks with the command line of the first one. That would be the script's alone, and
they would not know the name either: they are started in the way in which this process was.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from lightning_asyncpipe.integration.popen_launcher import PopenLauncher


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python path *arguments``, with the strategy registered."""
    path = os.path.abspath(path)
    PopenLauncher.command_prefix = (sys.executable, "-m", "lightning_asyncpipe", "run", path)
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str]) -> None:
    """As ``python -m name *arguments``, with the strategy registered."""
    PopenLauncher.command_prefix = (sys.executable, "-m", "lightning_asyncpipe", "run", "-m", name)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
