"""What one device does: the vocabulary of a schedule, and its text form.

The letters F, B, I and W are those of ``torch.distributed.pipelining``: forward, backward, and the backward's two
halves, the gradient of the input (on the critical path) and of the weights (any time after).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from lightning_asyncpipe.errors import ScheduleError


class Kind(enum.Enum):
    """The kind of an action; the value is its mark in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    REDUCE = "R"
    UPDATE = "U"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT})
MESSAGES = SENDS | RECEIVES


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a device.

    Attributes:
        kind: what is done.
        stage: for ``SEND_ACTIVATION`` the stage whose output is sent; for ``RECV_ACTIVATION`` the stage whose input
            arrives; for ``SEND_GRADIENT`` the stage whose input's gradient is sent; for ``RECV_GRADIENT`` the stage
            whose output's gradient arrives; otherwise the stage that is worked on.
        microbatch: index within its batch; -1 for ``REDUCE`` and ``UPDATE``.
        pipeline: the micro-batch's pipeline; -1 for ``REDUCE`` and ``UPDATE``.
        ahead: whether the micro-batch is one of the next batch.
        peer: the device at the other end of a message, -1 for everything else.

    The text form is ``F2:5@1`` (stage 2, micro-batch 5, pipeline 1), with ``+`` where ahead and ``>3`` or ``<3`` for a
    message to or from device 3: ``SA2:5@1+>3``. ``R2`` and ``U2`` reduce and update stage 2.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    pipeline: int = -1
    ahead: bool = False
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.stage}"
        if self.kind in (Kind.REDUCE, Kind.UPDATE):
            return text
        text += f":{self.microbatch}@{self.pipeline}" + ("+" if self.ahead else "")
        if self.kind in SENDS:
            return f"{text}>{self.peer}"
        return f"{text}<{self.peer}" if self.kind in RECEIVES else text

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text form.

        Raises:
            ScheduleError: when the text is not one that ``str`` of an action gives.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: expected a form like F2:5@1, SA2:5@1+>3, R2")
        if match["whole"]:
            return cls(Kind(match["whole"]), int(match["whole_stage"]))
        kind = Kind(match["compute"] or match["send"] or match["receive"])
        return cls(
            kind,
            int(match["stage"]),
            int(match["microbatch"]),
            int(match["pipeline"]),
            match["ahead"] == "+",
            int(match["to"] or match["source"] or -1),
        )


_NUMBER = r"(?:0|[1-9]\d*)"
_FORM = re.compile(
    rf"(?P<whole>[RU])(?P<whole_stage>{_NUMBER})"
    rf"|(?:(?P<compute>[FBIW])|(?P<send>S[AG])|(?P<receive>R[AG]))(?P<stage>{_NUMBER})"
    rf":(?P<microbatch>{_NUMBER})@(?P<pipeline>{_NUMBER})(?P<ahead>\+?)"
    rf"(?(send)>(?P<to>{_NUMBER}))(?(receive)<(?P<source>{_NUMBER}))",
    re.ASCII,
)
