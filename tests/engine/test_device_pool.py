from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetier.engine.device_pool import DevicePool, PoolShape, kv_group, torch_dtype
from pagetier.engine.models.config import ModelConfig, RopeConfig
from pagetier.kvstore.errors import CapacityError, ClosedError, ConfigError

SHAPE = PoolShape(num_blocks=5, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_view_is_the_block(dtype: torch.dtype) -> None:
    pool = DevicePool(SHAPE, dtype)
    assert pool.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert pool.tensor.is_contiguous()
    assert pool.block_nbytes == 3 * 2 * 2 * 4 * 8 * dtype.itemsize
    assert not pool.tensor.any()
    pool.tensor[3] = torch.randn(3, 2, 2, 4, 8).to(dtype)
    view = pool.view(3)
    assert view.nbytes == pool.block_nbytes
    assert bytes(view) == pool.tensor[3].view(torch.uint8).numpy().tobytes()
    pool.view(1)[:] = view
    assert torch.equal(pool.tensor[1], pool.tensor[3])
    assert not pool.tensor[[0, 2, 4]].any()
    del view
    pool.close()


def test_copy_takes_the_first_slots_of_every_layer_and_plane_in_order() -> None:
    pool = DevicePool(SHAPE, torch.float32)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.clone()
    pool.copy_slots(np.array([[0, 1, 3], [1, 2, 4], [4, 4, 0]], np.int32))
    assert torch.equal(pool.tensor[1, :, :, :, :3], before[0, :, :, :, :3])
    assert torch.equal(pool.tensor[1, :, :, :, 3:], before[1, :, :, :, 3:])
    assert torch.equal(pool.tensor[2], pool.tensor[1])
    assert torch.equal(pool.tensor[[0, 3, 4]], before[[0, 3, 4]])


def test_poison_fills_its_blocks_alone() -> None:
    pool = DevicePool(SHAPE, torch.bfloat16)
    pool.poison([1, 4])
    assert pool.tensor[[1, 4]].isnan().all()
    assert not pool.tensor[[0, 2, 3]].any()


def test_bounds_and_close() -> None:
    pool = DevicePool(SHAPE, torch.float32)
    with pytest.raises(IndexError, match="5 of 5"):
        pool.view(5)
    kept = pool.view(0)
    pool.close()
    pool.close()
    assert kept[0] == 0  # a view outlives the pool's own hold
    with pytest.raises(ClosedError):
        pool.view(0)
    with pytest.raises(ClosedError):
        pool.copy_slots(np.array([[0, 1, 1]], np.int32))


def test_a_pool_that_cannot_be_mapped_says_its_size() -> None:
    with pytest.raises(CapacityError, match="KV blocks"):
        DevicePool(PoolShape(1 << 40, 32, 8, 16, 128), torch.float32)


def test_the_group_counts_every_layer_and_plane() -> None:
    config = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, RopeConfig(1e5), 8192, True)
    group = kv_group(config, "bfloat16")
    assert group.nbytes_per_token == 23_040
    assert group.layers == tuple(range(30))
    assert [plane.name for plane in group.planes] == ["k", "v"]
    shape = PoolShape.of(config, 1, 16)
    assert shape.block_numel * 2 == group.nbytes_per_token * 16
    with pytest.raises(ConfigError, match="auto"):
        torch_dtype("auto")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_pool_is_zero_and_has_no_views() -> None:
    pool = DevicePool(SHAPE, torch.bfloat16, "cuda")
    assert not pool.tensor.any()
    with pytest.raises(ClosedError):
        pool.view(0)
