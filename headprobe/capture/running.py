"""Which module is running: the name of an attention call."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class RunningModules:
    """A stack of the model's modules that are running, kept by two global hooks.

    Global hooks, since they leave every module's own hooks alone. Other models and other threads
    are not looked at.

    Args:
        model: the model whose modules count.
        on_finish: called when the outermost running module has ended: with True if it returned,
            with False if it raised.
    """

    def __init__(self, model: nn.Module, on_finish: Callable[[bool], None]) -> None:
        self._names: dict[nn.Module, str] = {m: name for name, m in model.named_modules()}
        self._on_finish = on_finish
        self._stack: list[nn.Module] = []
        self._calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._handled: BaseException | None = None
        self.ran = False

    def install(self, stack: ExitStack) -> None:
        """Put the hooks in place until `stack` closes."""
        stack.callback(self._stack.clear)
        stack.callback(register_module_forward_pre_hook(self._enter).remove)
        stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def __bool__(self) -> bool:
        return bool(self._stack) and threading.get_ident() == self._thread

    @property
    def site(self) -> str:
        """Name of the innermost running module."""
        return self._names[self._stack[-1]]

    def count_call(self, site: str) -> int:
        """How many attention calls `site` made before in this forward pass."""
        self._calls[site] += 1
        return self._calls[site] - 1

    def _ours(self, module: nn.Module) -> bool:
        return module in self._names and threading.get_ident() == self._thread

    def _enter(self, module: nn.Module, args: Any) -> None:  # noqa: ANN401
        if not self._ours(module):
            return
        if self._stack and module is self._stack[0]:  # torch runs no hooks after Ctrl-C
            self._stack.clear()
            self._on_finish(False)
        if not self._stack:
            self._calls.clear()
            self._handled = sys.exc_info()[1]  # the caller may be in an `except` block
            self.ran = True
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        if not self._stack or not self._ours(module) or self._stack[-1] is not module:
            return
        self._stack.pop()
        if not self._stack:
            self._on_finish(sys.exc_info()[1] is self._handled)
