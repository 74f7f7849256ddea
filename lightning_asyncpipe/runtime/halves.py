"""A backward in two halves: the gradient of the input first (I), those of the weights any time later (W).

Both halves are ordinary runs of autograd on the graph that the forward left, told which gradients are wanted: formulas
compute only those. The first half also notes what flows into the *junctions*, the operations at which a way to the
input and a way to parameters part; the second half starts from there, and no way is walked twice. A parameter that
several junctions lead to (one used twice in the stage, a penalty on all weights) gets its gradient in the first half,
since a start at one of its junctions would walk on to the others.

What a junction's formula computes in common for input and weights is computed twice; for matrix products, convolutions,
normalisations and embeddings that is nothing. The idea to part a backward is that of zero-bubble schedules (Qi et al.
2024, arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Junction:
    """An operation whose inputs lead to the stage's input and to parameters, and what flowed into it."""

    node: Node
    parameters: list[Tensor]
    flowing: tuple[Tensor | None, ...] = ()

    def note(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Called by autograd before the operation's own backward."""
        self.flowing = gradients


@dataclass
class WeightGradients:
    """The second half of a backward, still to be done; it keeps the graph alive.

    Attributes:
        junctions: where to start from.
        whole: where there is no input whose gradient is wanted, the root and its gradient: all is still to be done.
    """

    junctions: list[_Junction] = field(default_factory=list)
    whole: tuple[Tensor, Tensor | None] | None = None

    @property
    def operations(self) -> list[str]:
        """The names of the operations that are run again."""
        return [junction.node.name() for junction in self.junctions]

    def run(self) -> None:
        """Add the gradients to the parameters' ``.grad``, and let go of the graph."""
        (junctions, self.junctions), (whole, self.whole) = (self.junctions, []), (self.whole, None)
        if whole is not None:
            torch.autograd.backward(*whole)
        for junction in junctions:
            starts = [
                (GradientEdge(junction.node, position), gradient)
                for position, gradient in enumerate(junction.flowing)
                if gradient is not None
            ]
            if starts:
                edges, gradients = zip(*starts, strict=True)
                # The parts of the graph that junctions share, such as a cast of several weights, are walked again.
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=junction.parameters)


def input_gradient(root: Tensor, gradient: Tensor | None, leaf: Tensor) -> WeightGradients:
    """Run the first half: the gradient of `leaf` comes to be ``leaf.grad``.

    Args:
        root: where the backward starts.
        gradient: of the root; None for a scalar.
        leaf: the input.

    Returns:
        The second half.
    """
    assert root.grad_fn is not None
    junctions, now = _junctions(root.grad_fn, get_gradient_edge(leaf).node)
    with _noting(junctions):
        torch.autograd.backward(root, gradient, retain_graph=bool(junctions), inputs=[leaf, *now])
    return WeightGradients(junctions)


@contextmanager
def _noting(junctions: Sequence[_Junction]) -> Iterator[None]:
    handles = [junction.node.register_prehook(junction.note) for junction in junctions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _junctions(root: Node, leaf: Node) -> tuple[list[_Junction], list[Tensor]]:
    """The junctions with the parameters that each alone leads to, and the parameters that no junction can have."""
    leads: dict[Node, bool] = {}  # whether a node leads to the leaf; effects before causes
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, left = stack.pop()
        if left:
            leads[node] = node is leaf or any(leads[child] for child, _ in node.next_functions if child is not None)
            order.append(node)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in leads]
    below: dict[Node, frozenset[Node]] = {}
    uses: dict[Node, int] = {}
    found: list[tuple[Node, frozenset[Node]]] = []
    for node in order:
        aside = [child for child, _ in node.next_functions if child is not None and not leads[child]]
        parameters = frozenset().union(*(below[child] for child in aside))
        if not leads[node]:
            below[node] = parameters | {node} if _accumulates(node) else parameters
        elif parameters:
            found.append((node, parameters))
            for parameter in parameters:
                uses[parameter] = uses.get(parameter, 0) + 1
    junctions = []
    for node, parameters in found:
        own = [parameter for parameter in parameters if uses[parameter] == 1]
        if own:
            junctions.append(_Junction(node, [_variable(parameter) for parameter in own]))
    shared = [_variable(parameter) for parameter, count in uses.items() if count > 1]
    if not leads[root]:
        shared += [_variable(parameter) for parameter in below[root]]
    return junctions, shared


def _accumulates(node: Node) -> bool:
    return hasattr(node, "variable")


def _variable(node: Any) -> Tensor:
    variable: Tensor = node.variable
    return variable
