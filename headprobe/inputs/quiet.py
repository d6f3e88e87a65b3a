"""Loading without the chatter of the libraries that load."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr


@contextmanager
def quiet() -> Iterator[None]:
    """Silence loading; all settings are as before afterwards.

    On a terminal, bars of downloads stay; in a file, one of them would be drawn nonetheless.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging as messages

    variable = "DISABLE_SAFETENSORS_CONVERSION"  # a background request to the hub, unasked
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars, downloads = messages.is_progress_bar_enabled(), not are_progress_bars_disabled()
    before = os.environ.get(variable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[variable] = before or "1"
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        _show_bars(loading=False, downloads=downloads and sys.stderr.isatty())
        try:
            yield
        finally:
            _show_bars(loading=bars, downloads=downloads)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


@contextmanager
def silent(wanted: bool) -> Iterator[None]:
    """Nothing on standard error, if wanted: for a bar that can't be switched off."""
    with redirect_stderr(io.StringIO()) if wanted else nullcontext():
        yield


def _show_bars(*, loading: bool, downloads: bool) -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as messages

    # transformers' switch turns the hub's too, so the hub's comes second.
    (messages.enable_progress_bar if loading else messages.disable_progress_bar)()
    (enable_progress_bars if downloads else disable_progress_bars)()
