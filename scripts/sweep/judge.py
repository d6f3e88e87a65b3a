"""What headprobe makes of one model type, and whether it is true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields

import torch
from torch import Tensor

from headprobe import Capture, HeadprobeError, NoAttentionError, profile
from headprobe.capture import AttentionCall
from scripts.sweep.build import NotBuilt, model_types
from scripts.sweep.compare import SAME, Compared, Seen, compare, own_maps
from scripts.sweep.runs import (
    NotRun,
    Run,
    call,
    described,
    find_run,
    implementations,
    softmaxes,
    with_attention,
)

NO_SOFTMAX = "without a softmax"
"""What headprobe says of a module whose attention has no softmax."""


@dataclass
class Row:
    """A row of the table.

    Attributes:
        type: the model type.
        class_: the model's class.
        attention: `sdpa` or `eager`.
        parameters: how many the tiny model has.
        inputs: the kind of inputs that it ran on.
        calls: attention calls that Capture saw.
        maps_compared: maps that the eager model itself gives, where it does.
        max_difference: the largest of a captured map from the model's own.
        reconstruction_error: the largest of all calls.
        profile_layers: layers that `profile` measured.
        verdict: one of VERDICTS in __main__.py.
        reason: why.
    """

    type: str
    class_: str
    attention: str
    parameters: int | None = None
    inputs: str = ""
    calls: int | None = None
    maps_compared: int | None = None
    max_difference: float | None = None
    reconstruction_error: float | None = None
    profile_layers: int | None = None
    verdict: str = ""
    reason: str = ""

    def cells(self) -> dict[str, str]:
        """As strings, with the same digits on every run."""
        return {name.rstrip("_"): _cell(value) for name, value in asdict(self).items()}


COLUMNS = [entry.name.rstrip("_") for entry in fields(Row)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    # Below 1e-5 the digits are rounding, which is another on every processor.
    return f"{value:.0e}" if isinstance(value, float) else " ".join(str(value).split())


@dataclass
class Observed:
    """What Capture and profile saw."""

    seen: list[Seen] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    layers: int | None = None
    refusal: str = ""
    profile_error: str = ""


def judge(kind: str) -> Iterator[Row]:
    """The rows of a type, one per way to attend that it supports."""
    try:
        first = find_run(kind)
    except (NotBuilt, NotRun) as error:
        verdict = "not built" if isinstance(error, NotBuilt) else "not run"
        yield Row(kind, model_types()[kind][0], "", verdict=verdict, reason=str(error))
        return
    for attention in implementations(first.model):
        row = Row(kind, type(first.model).__name__, attention, inputs=first.inputs_kind)
        row.parameters = sum(parameter.numel() for parameter in first.model.parameters())
        try:
            run = with_attention(first, attention)
            own = own_maps(run)
        except Exception as error:
            row.verdict, row.reason = "not run", described(error)
            yield row
            continue
        try:
            _judge_run(row, run, own)
        except Exception as error:
            row.verdict, row.reason = "raised", described(error)
        yield row


def _judge_run(row: Row, run: Run, own: list[Tensor]) -> None:
    observed = _observe(run)
    compared = compare(observed.seen, own)
    row.calls, row.maps_compared = len(observed.seen), len(compared)
    row.profile_layers = observed.layers
    row.max_difference = max((pair.difference for pair in compared if pair.fits), default=None)
    errors = [call.error for call in observed.seen if call.error is not None]
    row.reconstruction_error = max(errors, default=None)
    row.verdict, row.reason = _verdict(run, observed, compared)


@torch.no_grad()
def _observe(run: Run) -> Observed:
    result = Observed()

    def observe(made: AttentionCall) -> None:
        block = made.at(torch.arange(made.queries).expand(made.batch, -1))
        result.seen.append(Seen(made.site, block.weights, made.reconstruction_error(block)))

    capture = Capture(run.model, observe)
    try:
        with capture:
            call(run.model, run.inputs)
    except NoAttentionError as error:
        result.refusal = str(error)
    result.unread = capture.unread
    try:
        torch.manual_seed(0)
        measured = profile(run.model, [run.inputs])
        result.left_out, result.layers = dict(measured.left_out), len(measured.measured)
    except HeadprobeError as error:
        result.profile_error = str(error)
    except (ValueError, TypeError) as error:
        result.profile_error = described(error)
    return result


def _verdict(run: Run, observed: Observed, compared: list[Compared]) -> tuple[str, str]:
    if observed.refusal:
        reasons = observed.unread.values()
        if reasons and all(NO_SOFTMAX in reason for reason in reasons):
            return "no attention", next(iter(reasons))
        if compared or reasons:
            return "refused", observed.refusal
        return "no attention", f"{softmaxes(run)} softmaxes ran, none over queries times keys"
    untrue = {call.site: call for call in observed.seen if not call.true}
    shown = [s for s in untrue if s not in observed.left_out and not observed.profile_error]
    if shown:
        error = untrue[shown[0]].error
        return "WRONG", f"{shown[0]}: reconstruction {error}, unlike the model's own"
    read = {call.site for call in observed.seen if call.true}
    unread = {site: why for site, why in observed.unread.items() if site not in read}
    unread |= {site: observed.left_out.get(site, observed.profile_error) for site in untrue}
    other = {site: why for site, why in unread.items() if NO_SOFTMAX in why}
    unread = {site: why for site, why in unread.items() if site not in other}
    if unread:
        return "left out partly" if read else "refused", _named("", unread)
    missing = [pair.shape for pair in compared if not pair.fits]
    if missing:
        why = next(iter(observed.unread.values()), "nothing is said of them")
        return "left out partly", f"no call for the model's own maps {missing[:3]}: {why}"
    differing = [pair.difference for pair in compared if pair.difference > SAME]
    if differing:
        return "WRONG", f"{len(differing)} own maps differ, up to {max(differing):.0e}"
    return "captured", "; ".join(_notes(observed, other))


def _notes(observed: Observed, other: dict[str, str]) -> Iterator[str]:
    """What else there is to say of a model whose maps are true."""
    left_out = {site: why for site, why in observed.left_out.items() if site not in other}
    if other:
        yield _named("besides, ", other)
    if left_out:
        yield _named("profile leaves out ", left_out)
    if observed.profile_error:
        yield f"profile: {observed.profile_error}"


def _named(what: str, sites: dict[str, str]) -> str:
    site, reason = next(iter(sites.items()))
    return f"{what}{len(sites)} modules, {site}: {reason}"
