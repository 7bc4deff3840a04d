"""Memory of a GPU, asked for before it is taken: others may be at work there."""

import gc

import pytest
import torch


def skip_without(num_bytes: float) -> None:
    """And a fifth of it."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 1.2 * num_bytes:
        pytest.skip(f"needs {1.2 * num_bytes / 2**30:.0f} GiB")
