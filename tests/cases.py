"""What the tests of publicly reported cases share: a tiny model of any type, and all of its maps.

Each of these tests is named after what the reporter saw; the link is to the report.
"""

import torch

from scripts.sweep.compare import own_maps
from scripts.sweep.runs import Run, find_run, with_attention
from tests.test_capture import run, whole


def tiny(kind: str, attention: str = "sdpa") -> Run:
    """A tiny model of a transformers type with weights that make its heads differ, and inputs."""
    return with_attention(find_run(kind), attention)


def seen(model, inputs):
    """All attention calls of one pass."""
    return run(model, inputs)[1]


def read_out(call):
    """Weights times values, [batch, heads, queries, dim_v], by hand."""
    group = call.heads // call.value.shape[1]
    return whole(call) @ call.value.float().repeat_interleave(group, dim=1)


def assert_own_maps(case: Run, calls, count: int):
    """Each map that the eager model itself gives is one of those captured.

    Args:
        case: the model and its inputs.
        calls: what was captured.
        count: how many maps the model gives.
    """
    own = own_maps(case)
    assert len(own) == count
    maps = [whole(call) for call in calls]
    for expected in own:
        fitting = [found for found in maps if found.shape == expected.shape]
        rows = expected.isfinite().all(dim=-1)
        assert min(float((m - expected)[rows].abs().max()) for m in fitting) < 1e-5


def heads_of(profile, *columns):
    """Columns of the table of heads as a tensor, [heads, columns]."""
    return torch.tensor(profile.heads()[list(columns)].to_numpy(dtype="float64"))
