"""What a hook is told that looks for weights where they are not."""

from __future__ import annotations

from torch import nn

from lightning_asyncpipe.runtime.hollow import is_hollow

_WRITTEN = "more than one element of the written-to tensor refers to a single memory location"


def explain(error: BaseException, module: nn.Module | None) -> None:
    """Add to torch's error about a write to a parameter that this rank does not hold what is behind it."""
    if not isinstance(error, RuntimeError) or _WRITTEN not in str(error) or module is None:
        return
    elsewhere = [name for name, parameter in module.named_parameters() if is_hollow(parameter)]
    if elsewhere:
        error.args = (
            f"{str(error).rstrip()}\nThe tensor may be a parameter that this rank does not hold: each rank has a part "
            f"of the model, and NaN without memory in the place of {', '.join(f'`{name}`' for name in elsewhere[:3])} "
            f"({len(elsewhere)} in all). Code that changes weights outside the optimizer's step (a teacher that "
            "follows them, a constraint) is not supported: for an average of the weights use the callback "
            "`EMAWeightAveraging`; constrain weights in a hook of the optimizer (`register_step_post_hook`), on the "
            "optimizer's own parameters.",
        )
