"""From what the user asked for to the numbers of a plan: devices, pipelines, micro-batches, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_asyncpipe.plan.placement import Placement

Auto = Literal["auto"]


@dataclass(frozen=True)
class Geometry:
    """The resolved shape of a run.

    Attributes:
        num_stages: D, devices per replica.
        num_pipelines: N, pipelines over the same devices.
        num_microbatches: M, micro-batches per batch where the batch has as many samples.
        max_in_flight: w, micro-batches that a pipeline takes in before a backward returns.
        replicas: R, data-parallel replicas.
    """

    num_stages: int
    num_pipelines: int
    num_microbatches: int
    max_in_flight: int
    replicas: int = 1

    @property
    def placement(self) -> Placement:
        """Which device hosts what."""
        return Placement(self.num_stages, self.num_pipelines)


def positive(name: str, value: object, auto: bool = True) -> int:
    """The value, if it is an integer of at least 1.

    Args:
        name: of the argument, for messages.
        value: that was given.
        auto: whether the message offers "auto".

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        choice = "'auto' or an integer" if auto else "an integer"
        raise ValueError(f"{name} must be {choice} of at least 1, got {value!r}")
    return value


def resolve(
    world_size: int,
    num_stages: int | Auto = "auto",
    num_pipelines: int | Auto = "auto",
    num_microbatches: int | Auto = "auto",
    max_in_flight: int | Auto = "auto",
    data_parallel_size: int = 1,
    split_backward: bool = False,
) -> Geometry:
    """Fill in what was left at "auto" and check the rest.

    * ``num_stages``: the world size divided by ``data_parallel_size``.
    * ``num_pipelines``: 2 (one down, one up) from four devices on. That evens out the activations that one
      pipeline would pile up on its first device, at 2/D of the weights per device. With fewer devices each would hold
      most of the model, which is what a pipeline is there to avoid.
    * ``num_microbatches``: 4 D, with which the few micro-batches that meet two weight versions hardly matter.
    * ``max_in_flight``: enough that a micro-batch in every stage leaves nobody idle (N w >= D: each occupies its slot
      for D forwards and backwards), and two more where the backward is not split, since forwards and backwards then
      do not tile exactly and messages take time.

    Raises:
        ValueError: with the value and what would do instead.
    """
    replicas = positive("data_parallel_size", data_parallel_size, auto=False)
    if world_size % replicas:
        raise ValueError(
            f"{world_size} processes cannot be divided among data_parallel_size={replicas} replicas: "
            f"choose a data_parallel_size that divides {world_size}, or another number of devices"
        )
    available = world_size // replicas
    stages = available if num_stages == "auto" else positive("num_stages", num_stages)
    if stages != available:
        raise ValueError(
            f"num_stages={stages} and data_parallel_size={replicas} need {stages * replicas} processes, but the "
            f"Trainer has {world_size} (devices * num_nodes): use devices={stages * replicas}, or leave num_stages "
            "at 'auto'"
        )
    pipelines = (2 if stages >= 4 else 1) if num_pipelines == "auto" else positive("num_pipelines", num_pipelines)
    if pipelines > stages:
        raise ValueError(
            f"num_pipelines={pipelines} is more than the {stages} devices of a replica: every pipeline beyond that "
            f"would repeat one; choose 1 to {stages}"
        )
    microbatches = 4 * stages if num_microbatches == "auto" else positive("num_microbatches", num_microbatches)
    enough = max(2, -(-stages // pipelines))
    in_flight = (
        enough + (0 if split_backward or stages == 1 else 2)
        if max_in_flight == "auto"
        else positive("max_in_flight", max_in_flight)
    )
    return Geometry(stages, pipelines, microbatches, in_flight, replicas)
