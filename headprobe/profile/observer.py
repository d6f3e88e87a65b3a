"""Measures the attention calls of one forward pass, and compares the layers at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headprobe.capture import AttentionCall
from headprobe.errors import HeadprobeError
from headprobe.profile.audit import NOT_FINITE, PADDING_MASS, Audit, audit
from headprobe.profile.comparison import ROWS_AT_ONCE, Compared, compare
from headprobe.profile.located import Located, locate
from headprobe.profile.sums import Layer, Profile
from headprobe.profile.texts import Texts
from headprobe.statistics import LAYER_STATISTICS, STATISTICS, OutputNorm, Rows, Statistic

if TYPE_CHECKING:
    from headprobe.profile.run import Sampling

_BLOCK_ENTRIES = 2**20
"""Entries of a block of weights: small enough for the cache, large enough to be worth a call."""


class Observer:
    """Called with each attention call of a forward pass.

    Args:
        texts: the batch that the model runs on.
        sampling: on which rows heads are compared.
    """

    def __init__(self, texts: Texts, sampling: Sampling) -> None:
        self._texts = texts
        self._sampling = sampling
        self._layers: list[Layer] = []
        self._compared: list[Compared] = []
        self._left_out: dict[str, str] = {}

    def __call__(self, call: AttentionCall) -> None:
        """Measure the call, or note why it is left out."""
        if call.repeats is not None:  # one map that mixes two lots of values is one
            return
        located = locate(call, self._texts)
        found = audit(call, located.texts, self._sampling.rows, ROWS_AT_ONCE)
        reason = found if isinstance(found, str) else found.reason
        if isinstance(found, str) or reason:
            self._left_out.setdefault(call.site, reason)
            return
        if found.padding_mass > PADDING_MASS:
            raise HeadprobeError(
                f"{call.site!r} attends to padding (weight {found.padding_mass:.2g}): the model "
                "doesn't use the mask; give it texts of one length, or one text at a time"
            )
        layer = self._measured(call, found, located)
        if layer is None:  # rows that are not among the sampled ones
            self._left_out.setdefault(call.site, NOT_FINITE)
            return
        self._layers.append(layer)
        self._compared.append(_to_compare(call, found, located, self._sampling))

    def finish(self, unread: Mapping[str, str], settings: Mapping[str, Any]) -> Profile:
        """Compare the layers and give everything that was measured.

        Args:
            unread: modules that attended and could not be read, and why.
            settings: what the measurement depends on.
        """
        measured = tuple(layer for layer in self._layers if layer.site not in self._left_out)
        compared = [c for c in self._compared if c.address[0] not in self._left_out]
        # A second softmax in a module doesn't spoil the attention that was read there.
        sites = {layer.site for layer in measured}
        unread = {
            f"{site} (a second softmax)" if site in sites else site: why
            for site, why in unread.items()
        }
        return Profile(
            measured=measured,
            pair_sums=compare(compared, self._sampling),
            left_out=unread | self._left_out,
            texts=len(self._texts),
            tokens=self._texts.tokens,
            class_tokens=self._texts.class_tokens,
            settings=dict(settings),
        )

    def _measured(self, call: AttentionCall, found: Audit, located: Located) -> Layer | None:
        """What there is to say of a call; None if its weights are not finite."""
        # Keys of another number are another sequence, if only a pooled one: key i isn't query i.
        is_cross = call.streams[0] != call.streams[1] or call.queries != call.keys
        statistics, later = self._statistics(call.contiguous(), found, located, is_cross)
        broken = {name for name, sums in statistics.items() if not sums.total.isfinite().all()}
        if broken - {OutputNorm.name}:
            return None
        no_projection = call.no_projection
        if broken:
            del statistics[OutputNorm.name]
            no_projection = "W_O has entries that are not finite: broken parameters"
        return Layer(
            site=call.site,
            call=call.call,
            seam=call.seam,
            streams=call.streams,
            heads=call.heads,
            kv_heads=call.kv_heads,
            dims=_dims(call),
            output_site=call.output_projection.site if call.output_projection else "",
            no_projection=no_projection,
            is_cross=is_cross,
            distance_unit=located.unit,
            no_distance=located.reason,
            later_keys=later,
            reconstruction_error=found.reconstruction_error,
            row_sums=found.row_sums,
            padding_mass=None if bool(found.key_valid.all()) else found.padding_mass,
            statistics=statistics,
        )

    def _statistics(
        self, call: AttentionCall, found: Audit, located: Located, is_cross: bool
    ) -> tuple[dict[str, Statistic], int]:
        """Every statistic of a call, and how many later keys its valid rows may see."""
        query_valid, key_valid = found.query_valid, found.key_valid
        gram = None
        if call.output_projection is not None:
            per_head = call.output_projection.per_head(call.heads)
            if per_head.dtype != torch.float64:
                per_head = per_head.float()
            gram = (per_head @ per_head.transpose(1, 2)).to(call.device)
        classes = located.classes(call)
        parts: dict[type[Statistic], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        later = 0
        size = max(1, _BLOCK_ENTRIES // (call.batch * call.heads * call.keys))
        for block in call.blocks(size):
            start = int(block.positions[0])
            rows = Rows(
                weights=block.weights,
                positions=block.positions,
                query_valid=query_valid[:, start : start + len(block.positions)],
                key_valid=key_valid,
                visible=block.visible,
                self_attention=not is_cross,
                has_distance=bool(located.unit),
                coordinates=located.coordinates,
                classes=classes,
                sink=call.sink,
                z=None if gram is None else call.own_outputs(block),
                projection_gram=gram,
                scores=block.scores,
            )
            later += _later_keys(rows)
            for statistic in (*STATISTICS, *LAYER_STATISTICS):
                measured = statistic.rows(rows)
                if measured is not None:
                    parts[statistic].append(measured)
        tokens = key_valid.sum(dim=1).cpu()
        blocks = located.texts.blocks
        return {
            statistic.name: statistic.summed(measured).in_blocks(blocks, tokens)
            for statistic, measured in parts.items()
            if statistic.name not in located.left_out
        }, later


def _dims(call: AttentionCall) -> tuple[int | None, int | None]:
    sides = (call.query, call.value)
    query, value = (None if side is None else side.shape[-1] for side in sides)
    return query, value


def _to_compare(
    call: AttentionCall, found: Audit, located: Located, sampling: Sampling
) -> Compared:
    """The rows that are compared: those of the sample, or the call to make all rows from."""
    return Compared(
        address=(call.site, call.call),
        heads=call.heads,
        axes=(*call.streams, call.queries, call.keys, located.layout),
        blocks=located.texts.blocks.tolist(),
        sink=call.sink,
        source=found.sample if sampling.rows is not None else replace(call, output=None),
        index=found.index,
        real=found.real,
        key_valid=found.key_valid,
    )


def _later_keys(rows: Rows) -> int:
    if not rows.self_attention:
        return 0
    keys = torch.arange(rows.weights.shape[-1], device=rows.weights.device)
    later = keys > rows.positions[:, None]
    return int((rows.seen & later & rows.valid[..., None]).any(dim=1).sum())
