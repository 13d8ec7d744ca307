"""CUDA staging: bytes survive the way out and in."""

from __future__ import annotations

import pytest

from pagetier.connectors.cuda_blocks import CudaStaging
from pagetier.kvstore.errors import CapacityError


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.mark.gpu
def test_blocks_survive_the_way_out_and_in() -> None:
    import torch

    pool = torch.randint(0, 256, (8, 4096), dtype=torch.uint8, device="cuda")
    before = pool.cpu()
    staging = CudaStaging(pool, window_bytes=4 * 4096)
    assert staging.num_slots == 4
    token = staging.start_copy_out([3, 6], [1, 0])
    while not staging.is_done(token):
        pass
    assert bytes(staging.view(1)) == before[3].numpy().tobytes()
    assert bytes(staging.view(0)) == before[6].numpy().tobytes()
    staging.view(2)[:] = bytes(range(256)) * 16
    token = staging.start_copy_in([2, 1], [7, 0])
    while not staging.is_done(token):
        pass
    assert pool[7].cpu().numpy().tobytes() == bytes(range(256)) * 16
    assert torch.equal(pool[0].cpu(), before[3])
    staging.close()
    staging.close()


@pytest.mark.gpu
def test_a_window_too_small_for_a_block_is_refused() -> None:
    import torch

    with pytest.raises(CapacityError, match="holds no block"):
        CudaStaging(torch.zeros((2, 4096), dtype=torch.uint8, device="cuda"), window_bytes=100)
