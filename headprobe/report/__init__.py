"""Finished tables in, the files of a run out: the page, CSV tables and the summary.

This package sees tables only. It runs without torch, and without the model that was measured.
"""

from headprobe.report.files import write
from headprobe.report.folder import run_folder
from headprobe.report.tables import Tables

__all__ = ["Tables", "run_folder", "write"]
