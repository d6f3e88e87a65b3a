"""Finds a tiny model of a type that runs, and what it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from scripts.sweep.build import NotBuilt, build, model_types
from scripts.sweep.inputs import Inputs, candidates
from scripts.sweep.sizes import LADDER, Sizes
from scripts.sweep.text import with_placeholders

_ROOT = f"{Path(__file__).parents[2]}/"

CLASSES = 3
"""How many classes of a type are tried."""


class NotRun(Exception):
    """No inputs were found that the model runs on."""


@dataclass
class Run:
    """A tiny model that runs."""

    model: PreTrainedModel
    inputs: Inputs
    kind: str
    inputs_kind: str
    sizes: Sizes


def find_run(kind: str) -> Run:
    """The smallest model of a type that can be built and runs, and what it runs on.

    Of its classes the first that calls a softmax: a model without its head may have no attention.
    """
    failures: list[NotBuilt | NotRun] = []
    first: Run | None = None
    for name in model_types()[kind][:CLASSES]:
        try:
            run = _find_run_of_class(kind, name)
        except (NotBuilt, NotRun) as error:
            failures.append(error)
            continue
        if softmaxes(run):
            return run
        first = first or run
    if first is None:
        raise next((failure for failure in failures if isinstance(failure, NotRun)), failures[0])
    return first


def _find_run_of_class(kind: str, name: str) -> Run:
    not_built = not_run = ""
    for sizes in LADDER:
        try:
            model = _build_any(kind, name, sizes)
        except Exception as error:
            not_built = not_built or described(error)
            if isinstance(error, ImportError):
                break  # no size helps
            continue
        for inputs_kind, inputs in candidates(model):
            try:
                return Run(model, _run(model, inputs), kind, inputs_kind, sizes)
            except Exception as error:
                not_run = not_run or f"{inputs_kind}: {described(error)}"
    raise NotRun(not_run) if not_run else NotBuilt(not_built)


def _build_any(kind: str, name: str, sizes: Sizes) -> PreTrainedModel:
    """With sdpa where the class supports it."""
    try:
        return build(kind, name, "sdpa", sizes)
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        return build(kind, name, "eager", sizes)


def described(error: BaseException) -> str:
    if isinstance(error, NotBuilt | NotRun):
        return str(error)
    return f"{type(error).__name__}: {error} ({_where(error)})"


def implementations(model: PreTrainedModel) -> tuple[str, ...]:
    built_with = model.config._attn_implementation
    return ("sdpa", "eager") if model._supports_sdpa and built_with == "sdpa" else ("eager",)


@torch.no_grad()
def _run(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Run a model; the inputs, changed so that they fit where the model says how."""
    for _ in range(3):
        try:
            _check_finite(call(model, inputs))
            return inputs
        except Exception as error:
            changed = with_placeholders(model, inputs, str(error))
            if changed is None:
                raise
            inputs = changed
    raise NotRun("the number of image tokens never fits")


def _check_finite(output: Any) -> None:  # noqa: ANN401
    """Weights drawn by chance may be too much for a model; then there is nothing to compare."""
    for value in output.values() if isinstance(output, Mapping) else ():
        if isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            raise NotRun("the model's own output is not a number")


def call(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    return model(
        **{k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}, **options
    )


@torch.no_grad()
def with_attention(run: Run, attention: str) -> Run:
    """The same model with another implementation of the attention; it is seen to run."""
    twin = build(run.kind, type(run.model).__name__, attention, run.sizes)
    twin.load_state_dict(run.model.state_dict())
    _check_finite(call(twin, run.inputs))
    return replace(run, model=twin)


class _Softmaxes(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.count += func in (
            *(F.softmax, torch.softmax, Tensor.softmax, F.scaled_dot_product_attention),
            F.multi_head_attention_forward,
        )
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def softmaxes(run: Run) -> int:
    """How often the model calls a softmax or a kernel that has one."""
    with _Softmaxes() as mode:
        call(run.model, run.inputs)
    return mode.count


def _where(error: BaseException) -> str:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return ""
    path = last.tb_frame.f_code.co_filename.split("site-packages/")[-1].removeprefix(_ROOT)
    return f"{path}:{last.tb_lineno}"
