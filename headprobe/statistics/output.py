"""What a head adds to the residual stream."""

from __future__ import annotations

from typing import final

from torch import Tensor

from headprobe.statistics.base import Rows, Statistic


@final
class OutputNorm(Statistic):
    """Mean over rows of the norm of the head's output after W_O."""

    name = "output_norm"
    title = "Output norm"
    unit = "length in the residual stream"
    low, high = 0.0, None
    definition = (
        "Mean over query rows of |z_i^h W_O^h|: how much the head adds to the residual stream. "
        "Empty where W_O could not be found."
    )
    source = "Kobayashi et al. 2020 (norm of the head's output vector)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        if rows.z is None or rows.projection_gram is None:
            return None
        # |z W|^2 = z (W W^T) z^T: the d_model-wide vector is never made.
        squares = ((rows.z @ rows.projection_gram) * rows.z).sum(dim=-1)
        return squares.clamp_min(0.0).sqrt(), rows.valid
