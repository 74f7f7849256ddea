"""Parts of a checkpoint in the format of ``torch.distributed.checkpoint``, without its collectives and its trust.

``torch.distributed.checkpoint.save`` lets ranks send each other pickled plans, and its reader unpickles the index of a
folder, whoever wrote it. Here every rank writes its tensors alone and tells about them in plain values, one rank puts
the index together, and a reader builds nothing from it but what an index is made of.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from lightning_asyncpipe._private import MemoryFormat, StorageInfo

INDEX = ".metadata"
Part = list[list[Any]]
"""What a rank has written: for each tensor its name, shape, data type, file, offset and length in that file."""

_INDEX_TYPES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageInfo,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        torch.Size,
        MemoryFormat,
    )
}


class _PartWriter(FileSystemWriter):
    """Writes the file of one rank, and no index."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        self._part = rank
        self.results: list[WriteResult] = []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Plans are numbered, and files are called after the number.
        return super().prepare_global_plan(plans * (self._part + 1))[-1:]

    def storage_meta(self) -> StorageMeta | None:
        return None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.results = [result for written in results for result in written]


def write_part(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> Part:
    """Write the tensors of one rank, each on its own; ``write_index`` of all parts makes them a checkpoint.

    Raises:
        OSError: they cannot be written.
    """
    writer = _PartWriter(folder, rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process writes alone is what we want
            save(dict(tensors), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise _first(error) from None
    return [
        [result.index.fqn, list(tensor.shape), tensor.dtype, info.relative_path, info.offset, info.length]
        for result in writer.results
        for tensor, info in [(tensors[result.index.fqn], result.storage_data)]
    ]


def write_index(parts: list[Part], folder: Path) -> None:
    """Write what the folder holds; once that is there, it is a checkpoint."""
    tensors: dict[str, Any] = {}
    results = []
    for name, shape, dtype, file, offset, length in (entry for part in parts for entry in part):
        start, size = torch.Size([0] * len(shape)), torch.Size(shape)
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(offsets=start, sizes=size)]
        )
        results.append(WriteResult(MetadataIndex(name, start), length, StorageInfo(file, offset, length)))
    writer = _IndexWriter(folder)
    writer.finish(Metadata(tensors, planner_data={name: (name,) for name in tensors}), [results])


class _IndexWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        return None


class PartReader(FileSystemReader):
    """Reads tensors from a folder.

    Args:
        folder: of the checkpoint.

    Raises:
        OSError: there is no index.
        ValueError: the index holds something else than tensors in files of the folder.
        pickle.UnpicklingError: the index is damaged, or it would build what is no part of an index.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise ValueError("its index is none")
        for info in index.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"its index points to {info.relative_path}, which is not in the folder")
        index.storage_meta = StorageMeta()
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def files(self) -> dict[str, str]:
        """The file in which each tensor is."""
        return {place.fqn: info.relative_path for place, info in self.index.storage_data.items()}

    def empty(self, name: str, device: str = "cpu") -> Tensor:
        """A tensor like the one that is saved under a name.

        Raises:
            KeyError: none is.
        """
        saved = self.index.state_dict_metadata[name]
        if not isinstance(saved, TensorStorageMetadata):
            raise KeyError(name)
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite each tensor with the one that is saved under its name; all names must be there.

        Raises:
            Exception: whatever a damaged file leads to.
        """
        if not tensors:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(tensors, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            raise _first(error) from None


class _IndexUnpickler(pickle.Unpickler):
    """Builds what an index is made of, and nothing else."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_TYPES:
            return _INDEX_TYPES[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an index")


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it asks for the layout {name}")
    return torch.strided


def _first(error: CheckpointException) -> BaseException:
    """What went wrong, out of an exception that is none of Python's usual ones."""
    return next((failure for failure, _ in error.failures.values()), RuntimeError(str(error)))
