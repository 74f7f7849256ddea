"""Which device runs which stage of which pipeline.

Each pipeline is a rotation of the device order, run down (stage ``s`` after stage ``s - 1`` on the next higher device)
or up (on the next lower one), so that it visits every device exactly once and every device hosts one stage of every
pipeline. Half of the pipelines run in each direction, from evenly spread starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Placement:
    """The placement of ``num_pipelines`` pipelines of ``num_stages`` stages on ``num_stages`` devices.

    With ``n`` pipelines in a direction, number ``i`` of them starts at ``i * D // n``: down, stage ``s`` is on device
    ``(i * D // n + s) % D``; up, on ``(i * D // n + D - 1 - s) % D``. Pipelines alternate between the directions, so
    that a batch of fewer micro-batches than pipelines still uses both. An odd ``N`` has one more that runs up, so that
    there is always an up pipeline number 0, which ends on device 0: rank 0 hosts a last stage.

    Raises:
        ValueError: unless ``1 <= num_pipelines <= num_stages``.
    """

    num_stages: int
    num_pipelines: int
    _devices: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _slots: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages, pipelines = self.num_stages, self.num_pipelines
        if stages < 1:
            raise ValueError(f"num_stages is {stages}: a pipeline needs at least one stage")
        if not 1 <= pipelines <= stages:
            raise ValueError(
                f"num_pipelines is {pipelines} with num_stages={stages}: choose from 1 to {stages}"
                " (more pipelines than devices would host a stage twice on every device)"
            )
        rows = tuple(self._row(pipeline) for pipeline in range(pipelines))
        slots = tuple(
            tuple((pipeline, row.index(device)) for pipeline, row in enumerate(rows)) for device in range(stages)
        )
        object.__setattr__(self, "_devices", rows)
        object.__setattr__(self, "_slots", slots)

    def runs_up(self, pipeline: int) -> bool:
        """Whether the pipeline's stages go towards lower devices; with an odd ``N`` the even pipelines do."""
        return (pipeline + self.num_pipelines) % 2 == 1

    def _row(self, pipeline: int) -> tuple[int, ...]:
        stages = self.num_stages
        up = self.runs_up(pipeline)
        in_direction = (self.num_pipelines + 1) // 2 if up else self.num_pipelines // 2
        start = (pipeline // 2) * stages // in_direction
        if up:
            return tuple((start + stages - 1 - stage) % stages for stage in range(stages))
        return tuple((start + stage) % stages for stage in range(stages))

    def device(self, pipeline: int, stage: int) -> int:
        """The device of a stage of a pipeline."""
        return self._devices[pipeline][stage]

    def stage(self, pipeline: int, device: int) -> int:
        """The stage of a pipeline that a device runs."""
        return self._slots[device][pipeline][1]

    def slots(self, device: int) -> tuple[tuple[int, int], ...]:
        """The ``(pipeline, stage)`` pairs of a device, one per pipeline, in the pipelines' order."""
        return self._slots[device]

    def hosted(self, device: int) -> tuple[int, ...]:
        """The distinct stages of a device, ascending: two pipelines at the same stage share one copy."""
        return tuple(sorted({stage for _, stage in self._slots[device]}))

    def hosts(self, stage: int) -> tuple[int, ...]:
        """The distinct devices of a stage, ascending."""
        return tuple(sorted({row[stage] for row in self._devices}))

    def pipeline_of(self, microbatch: int) -> int:
        """The pipeline of a micro-batch: they are dealt out in turn."""
        return microbatch % self.num_pipelines
