"""Checkpoint files that are whole at every moment, and that are not trusted when they are read.

Lightning writes a local checkpoint to the system's temporary folder and moves it, which copies it where that is another
file system: a crash meanwhile leaves half a checkpoint. Here it is written beside the place where it will be, and takes
that place in one step once it is on the disk. Tensors go to the file one by one, and are mapped from it when it is
read, so that neither takes the memory of a second model, and the processes of one machine share what they read.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_asyncpipe.errors import CheckpointError

_LARGE = ("state_dict", "optimizer_states")  # what whoever reads it copies
_PICKLE = b"\x80"
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch's format before archives begin
_TORCHS_ADVICE = "Weights only load failed"  # paragraphs, to file an issue among others
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but that a local file is whole or not there, and that an error says which file it is about."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: it cannot be written; what was at `path` before is still there.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(local) as unfinished, unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: it is damaged, or holds more than tensors and plain values and `weights_only` is not False.
        """
        local = local_path(path)
        mapped = local if local is not None and local.is_file() and zipfile.is_zipfile(local) else None
        if local is not None and mapped is None:
            _check_kind(local)
        try:
            if mapped is None:
                return super().load_checkpoint(path, map_location, weights_only)
            loaded = torch.load(mapped, map_location, weights_only=weights_only, mmap=True)
        except (FileNotFoundError, PermissionError):
            raise
        except pickle.UnpicklingError as error:
            if mapped is not None or "GLOBAL" in str(error):
                raise _refused(path, error, weights_only) from None
            raise unreadable(path, error) from None
        except (EOFError, RuntimeError, OSError, ValueError, KeyError) as error:
            raise unreadable(path, error) from error
        return {
            key: value if key in _LARGE else apply_to_collection(value, Tensor, Tensor.clone)
            for key, value in loaded.items()
        }


def _check_kind(path: Path) -> None:
    """Whether what is no archive may be a checkpoint all the same.

    Raises:
        CheckpointError: a folder, or a pickle that torch did not write: it would run it, and find no tensors.
    """
    if path.is_dir():
        raise CheckpointError(
            f"the checkpoint {path} is a folder: `lightning_asyncpipe.consolidate({str(path)!r}, file)` makes one file "
            "of one that was saved with `save_distributed_checkpoint=True`"
        )
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(len(_OLD_FORMAT))
    if begin[:1] == _PICKLE and len(begin) == len(_OLD_FORMAT) and begin != _OLD_FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} was refused: it is a pickle of Python, not a checkpoint, and reading one can run "
            "any code. Nothing of it was run."
        )


def _refused(path: Any, error: Exception, weights_only: bool | None) -> CheckpointError:
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f" ({found[1]})" if found else ""
    trust = "If you trust the file, pass `weights_only=False`, as in `trainer.fit(..., weights_only=False)`."
    return CheckpointError(
        f"the checkpoint {path} was refused: it holds more than tensors and plain values{what}, and reading that can "
        f"run any code. Nothing of it was run.{'' if weights_only else f' {trust}'}"
    )


def unreadable(path: Any, error: BaseException) -> CheckpointError:
    """The error for a file that cannot be read."""
    what = str(error).strip().partition("\n")[0]
    reason = "" if what.startswith(_TORCHS_ADVICE) else f" ({type(error).__name__}: {what})"
    return CheckpointError(
        f"the checkpoint {path} cannot be read: it is truncated, damaged or no checkpoint. Go on from an earlier one."
        f"{reason}"
    )


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error for a checkpoint that the system could not write."""
    before = "What was saved there before is untouched." if path.exists() else "No earlier one was there."
    return CheckpointError(
        f"the checkpoint {path} cannot be written: {error.strerror or error}. {before} Choose another folder "
        "(`ModelCheckpoint(dirpath=...)`, `default_root_dir`) or make room."
    )


def local_path(path: Any) -> Path | None:
    """Where a checkpoint lies on this machine; None if it lies elsewhere."""
    file_system, name = url_to_fs(str(path))
    return Path(name) if isinstance(file_system, LocalFileSystem) else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; when that is done without an error, it takes the place of `path` in one step.

    Raises:
        CheckpointError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)  # of a process that was killed
        yield unfinished
        _put(unfinished, path)
    except BaseException as error:
        with suppress(OSError):  # for the same reason
            _remove(unfinished)
        cause = _cause(error) if isinstance(error, (OSError, RuntimeError)) else None
        if cause is None:
            raise
        raise unwritable(path, cause) from error


def _put(unfinished: Path, path: Path) -> None:
    if path.is_dir() or (unfinished.is_dir() and path.exists()):
        if _exchange(unfinished, path):
            _remove(unfinished)
            return
        _remove(path)  # where the system cannot exchange names, there is a moment without either
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, on Linux."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _cause(error: BaseException | None) -> OSError | None:
    """What the system said: torch raises an error of its own after a write that failed."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
