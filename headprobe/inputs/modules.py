"""Any module: a Python file whose function makes the model and its batches."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.batches import TextBatches
from headprobe.inputs.models import Source

if TYPE_CHECKING:
    from torch import nn

_RETURNS = "(model, batches) or (model, batches, {'batch_first': False, ...})"
_OPTIONS = ("batch_first", "token_classes")


def build_module(spec: str) -> tuple[Source, TextBatches]:
    """Run a person's own function that makes a model and batches.

    Args:
        spec: "path/to/file.py:function". The file may import what lies beside it. The function
            takes nothing and returns (model, batches), or (model, batches, options). Batches are
            mappings, the keywords of the model's forward; options are `batch_first` and
            `token_classes`, as for `headprobe.profile`.

    Returns:
        The model, without a tokenizer, named after the file; and its batches.

    Raises:
        HeadprobeError: if there is no such file or function, it raises, or returns something else.
    """
    path, name = _parse(spec)
    function = getattr(_imported(path), name, None)
    if not callable(function):
        raise HeadprobeError(f"{str(path)!r} has no function {name!r}: expected `def {name}():`")
    try:
        returned = function()
    except Exception as error:
        raise HeadprobeError(
            f"{name}() in {str(path)!r} raised {type(error).__name__}: {error}"
        ) from error
    model, batches, options = _checked(returned, name)
    source = Source(
        model=model,
        tokenizer=None,
        name=path.stem,
        class_name=type(model).__name__,
        revision=None,
        weights_sha256=None,
        dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), None),
        max_positions=None,
    )
    return source, TextBatches(
        batches=batches,
        texts=_sequences(batches, axis=0 if options.get("batch_first", True) else 1),
        tokens=0,
        cut=0,
        skipped=0,
        max_tokens=None,
        texts_hash=None,
        **{"token_classes": {}, **options},
    )


def _sequences(batches: list[dict[str, Any]], axis: int) -> int:
    """How many sequences the batches hold, going by their first tensors."""
    from torch import Tensor

    first = [next((v for v in b.values() if isinstance(v, Tensor)), None) for b in batches]
    return sum(t.shape[axis] for t in first if t is not None and t.dim() > axis)


def _parse(spec: str) -> tuple[Path, str]:
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise HeadprobeError(
            f"module {spec!r}: expected a file and a function, such as path/to/file.py:build"
        )
    path = Path(file).expanduser()
    if not path.is_file():
        raise HeadprobeError(f"module file {file!r} does not exist: check the path")
    return path, name


def _imported(path: Path) -> Any:  # noqa: ANN401
    """The file as a module; it may import its neighbours, as a script may."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise HeadprobeError(f"{str(path)!r} is no Python file: expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise HeadprobeError(
            f"{str(path)!r} can't be run: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    return module


def _checked(returned: object, name: str) -> tuple[nn.Module, list[dict[str, Any]], dict[str, Any]]:
    from torch import nn

    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise HeadprobeError(f"{name}() returned a {type(returned).__name__}: expected {_RETURNS}")
    model, batches = returned[:2]
    options: object = returned[2] if len(returned) == 3 else {}
    if not isinstance(model, nn.Module):
        raise HeadprobeError(
            f"{name}() returned a {type(model).__name__} as the model: expected a torch nn.Module"
        )
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise HeadprobeError(
            f"{name}() returned a {type(batches).__name__} as the batches: expected a list of "
            "mappings, the keywords of the model's forward"
        )
    listed = list(batches)
    if not listed or not all(isinstance(batch, Mapping) for batch in listed):
        raise HeadprobeError(
            f"{name}() returned {'other things' if listed else 'nothing'} as batches: expected "
            "mappings, the keywords of the model's forward"
        )
    if not isinstance(options, Mapping) or set(options) - set(_OPTIONS):
        raise HeadprobeError(
            f"{name}() returned options {options!r}: expected a mapping of {' and '.join(_OPTIONS)}"
        )
    return model, [dict(batch) for batch in listed], dict(options)
