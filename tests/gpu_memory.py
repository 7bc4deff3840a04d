"""Skip tests that need more GPU memory than is free. The GPU may be shared."""

import gc

import pytest
import torch


def skip_without(num_bytes: float) -> None:
    """Skip the test unless at least 1.2 times ``num_bytes`` of GPU memory are free."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 1.2 * num_bytes:
        pytest.skip(f"needs {1.2 * num_bytes / 2**30:.0f} GiB")
