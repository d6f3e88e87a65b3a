"""What can be seen, and done, in a model: one small batch, every module that attends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprobe.capture import NO_SOFTMAX, Capture, distinct
from headprobe.errors import HeadprobeError
from headprobe.profile import Layer, Profile, profile
from headprobe.profile.padding import (
    Padding,
    difference,
    difference_alone,
    first_tensor,
    output_tolerance,
)
from headprobe.profile.run import evaluating

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Examination:
    """What an examination found.

    Attributes:
        profile: what was measured on the batch, and what was left out.
        padding_difference: how far the output for a text moves when the text runs alone, without
            padding, relative to the output's largest entry; None without padding.
        gate_difference: how far the output moves when every head is multiplied by 1.
        problems: what is wrong, a sentence each; empty if nothing is.
    """

    profile: Profile
    padding_difference: float | None
    gate_difference: float | None
    problems: tuple[str, ...]

    @property
    def without_softmax(self) -> list[str]:
        """Modules that attend without a softmax: there are no weights, which is no problem."""
        return [site for site, why in self.profile.left_out.items() if why == NO_SOFTMAX]

    def table(self) -> pd.DataFrame:
        """A row per attention call: what it is, how it was seen, what can be done to its heads."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "site": layer.site,
                    "kind": layer.kind,
                    "stack": place.stack,
                    "layer": place.layer,
                    "heads": layer.heads,
                    "kv_heads": layer.kv_heads,
                    "query_dim": layer.dims[0],
                    "value_dim": layer.dims[1],
                    "captured_at": layer.seam,
                    "row_sum_low": layer.row_sums[0],
                    "row_sum_high": layer.row_sums[1],
                    "padding_mass": layer.padding_mass,
                    "reconstruction_error": layer.reconstruction_error,
                    "output_projection": layer.output_site,
                    "ablation": self.gate_difference is not None,
                    "pruning": _pruning(layer),
                }
                for layer, place in zip(self.profile.measured, self.profile.places(), strict=True)
            ]
        )


def examine(model: nn.Module, batch: Mapping[str, Any], *, batch_first: bool = True) -> Examination:
    """Run one small batch and check everything that an analysis relies on.

    Args:
        model: any module.
        batch: keywords of `model.forward`, as for `profile`; texts of several lengths, padded, say
            more than one text.
        batch_first: see `profile`.

    Raises:
        NoAttentionError: if no attention was seen.
        HeadprobeError: if the batch can't be measured at all: the model attends to padding, or
            padding moves its output for a text.
    """
    found = profile(model, [batch], batch_first=batch_first)
    with evaluating(model):
        inputs = distinct(Padding(model).inputs(batch))
        alone = difference_alone(model, inputs) if batch_first else None
        gated, gate_problem = _gate_difference(model, inputs, found)
    problems = [f"{site}: {why}" for site, why in found.left_out.items() if why != NO_SOFTMAX]
    tolerance = output_tolerance(model)
    if gated is not None and not gated <= tolerance:
        problems.append(f"heads multiplied by 1 change the output (by {gated:.2g})")
    return Examination(found, alone, gated, (*problems, *gate_problem))


def _gate_difference(
    model: nn.Module, inputs: Mapping[str, Any], found: Profile
) -> tuple[float | None, list[str]]:
    """How far the output moves with all gates at 1, or None and why no gates can be put there."""
    gates = {layer.site: torch.ones(layer.heads) for layer in found.measured}
    try:
        plain = first_tensor(model(**inputs))
        with Capture(model, gates=gates):
            gated = first_tensor(model(**inputs))
    except (HeadprobeError, ValueError) as error:
        return None, [f"heads can't be multiplied by gates: {error}"]
    return difference(gated, plain), []


def _pruning(layer: Layer) -> str:
    if layer.no_projection:
        return f"no: {layer.no_projection}"
    group = layer.heads // (layer.kv_heads or layer.heads)
    return "by head" if group == 1 else f"by group of {group} heads"
