"""Optimizers over what a rank owns, under the full order of what the user configured.

``configure_optimizers`` sees every parameter under its name. Afterwards each parameter group is pruned to what this
rank owns; the full order is kept, since a checkpoint numbers parameters by it, as a one-device checkpoint does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_asyncpipe.errors import CheckpointError


class OwnedOptimizer:
    """One optimizer, pruned to the parameters that this rank owns.

    Args:
        optimizer: as the user configured it; pruned in place.
        names: every parameter's name, by identity.
        owned: names of the parameters that this rank owns.

    Raises:
        MisconfigurationException: if the optimizer holds a tensor that is no parameter of the module.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], owned: frozenset[str]) -> None:
        self.optimizer = optimizer
        self.owned = owned
        self.order: list[list[str]] = []
        for group in optimizer.param_groups:
            order = []
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise MisconfigurationException(
                        f"`configure_optimizers` gave {type(optimizer).__name__} a tensor of shape "
                        f"{tuple(parameter.shape)} that is no parameter of the LightningModule: register it as an "
                        "`nn.Parameter` of the module, so that it can be placed on a stage."
                    )
                order.append(name)
            self.order.append(order)
            group["params"] = [
                parameter for parameter, name in zip(group["params"], order, strict=True) if name in owned
            ]
        kept = {id(parameter) for parameter in self.parameters()}
        for parameter in [p for p in optimizer.state if id(p) not in kept]:
            del optimizer.state[parameter]

    def parameters(self) -> list[Parameter]:
        """The parameters that this rank steps."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _full_index(self) -> list[int]:
        """The number in the full order of each parameter of the pruned one."""
        every = (name for order in self.order for name in order)
        return [number for number, name in enumerate(every) if name in self.owned]

    def local_state(self) -> dict[str, Any]:
        """This rank's part of :meth:`full_state`, parameters numbered in the full order."""
        state = self.optimizer.state_dict()
        numbers = self._full_index()
        return {
            "state": {numbers[i]: value for i, value in state["state"].items()},
            "param_groups": state["param_groups"],
        }

    def load_full_state(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what one device's ``optimizer.state_dict()`` holds.

        Raises:
            CheckpointError: the state is that of another optimizer.
        """
        saved = state["param_groups"]
        kind = type(self.optimizer).__name__
        sizes, expected = [len(group["params"]) for group in saved], [len(order) for order in self.order]
        if sizes != expected:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: its parameter groups have {sizes} parameters, those of "
                f"{kind} have {expected}. Resume with the `configure_optimizers` that it was saved with, or load the "
                "weights alone (`load_from_checkpoint`) and start the optimizer anew."
            )
        for number, (theirs, ours) in enumerate(zip(saved, self.optimizer.param_groups, strict=True)):
            # Versions of torch add options, so only what differs both ways is another optimizer.
            missing, unknown = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
            if missing and unknown:
                raise CheckpointError(
                    f"the checkpoint is of another optimizer than {kind}: parameter group {number} has the options "
                    f"{', '.join(unknown)} there, and lacks {', '.join(missing)}. Resume with the optimizer that it "
                    "was saved with, or load the weights alone (`load_from_checkpoint`) and start the optimizer anew."
                )
        order = [number for group in saved for number in group["params"]]
        numbers = [order[i] for i in self._full_index()]
        groups, start = [], 0
        for theirs, ours in zip(saved, self.optimizer.param_groups, strict=True):
            stop = start + len(ours["params"])
            groups.append({**theirs, "params": list(range(start, stop))})
            start = stop
        # Copied, since what is loaded may lie in a file that is mapped into memory.
        mine = {i: _copied(state["state"][n]) for i, n in enumerate(numbers) if n in state["state"]}
        self._compare_shapes(mine)
        self.optimizer.load_state_dict({"state": mine, "param_groups": groups})

    def _compare_shapes(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise if states are in the order of another model: those shaped like parameters then do not fit them all."""
        parameters = self.parameters()
        names = [name for order in self.order for name in order if name in self.owned]
        tensors = [
            (key, number, value)
            for number, state in states.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        alike = {key for key, number, value in tensors if value.shape == parameters[number].shape}
        for key, number, value in tensors:
            if key in alike and value.shape != parameters[number].shape:
                raise CheckpointError(
                    f"the checkpoint is of another model, or its parameters were given to the optimizer in another "
                    f"order: the state {key!r} of {names[number]} has the shape {list(value.shape)} there, the "
                    f"parameter {list(parameters[number].shape)}. Load the weights alone (`load_from_checkpoint`) and "
                    "start the optimizer anew."
                )

    def full_state(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """What one device's ``optimizer.state_dict()`` would hold, from the parts of all ranks."""
        state: dict[int, Any] = {}
        for part in parts:
            state.update(part["state"])
        groups = []
        start = 0
        for group, order in zip(parts[0]["param_groups"], self.order, strict=True):
            groups.append({**group, "params": list(range(start, start + len(order)))})
            start += len(order)
        return {"state": dict(sorted(state.items())), "param_groups": groups}


class LearningRates:
    """The learning rate of each parameter's next update, on every rank, whoever steps the parameter.

    Args:
        optimizers: as the user configured them, before they are pruned to what a rank owns.
        parameters: the parameters to tell of, by name.

    Attributes:
        places: for each parameter that an optimizer has, that optimizer and the number of the group.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter]) -> None:
        places = {
            id(parameter): (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self.places = {name: places[id(parameter)] for name, parameter in parameters.items() if id(parameter) in places}

    def of(self, name: str) -> float:
        """The learning rate as it is set now; 0 for a parameter that no optimizer has."""
        place = self.places.get(name)
        if place is None:
            return 0.0
        optimizer, number = place
        return float(optimizer.param_groups[number].get("lr", 1.0))


def _copied(state: Any) -> Any:
    return apply_to_collection(state, Tensor, Tensor.clone)
