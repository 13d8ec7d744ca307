"""The amx level's products: the bits that Intel's manual promises, by emulated tiles and by the same machine code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.kernels.cpu import build
from pagetier.kernels.cpu.library import Isa, OpKind
from tests.kernels.cpu.op_calls import bits, packed, run_op, simple_case
from tests.kernels.cpu.tiny_models import HAS_COMPILER, emulated_library, levels, library

pytestmark = pytest.mark.skipif(
    Isa.AMX not in levels() or not HAS_COMPILER, reason="needs AVX512-BF16 and a C compiler"
)
SHAPES = [  # rows, columns, k: tails of each; rows that make one tile, two, a pair and one, reaching back
    *((rows, 33, 40) for rows in (1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 96, 97)),
    *((20, columns, 64) for columns in (1, 16, 31, 32, 64, 65)),
    *((20, 40, k) for k in (1, 2, 31, 32, 33, 62, 96, 100)),
]


def random_bf16(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def promised(a: Tensor, w: Tensor) -> np.ndarray:
    """a w^T as TDPBF16PS defines it, (rows, columns) float32: within a tile's 32 values of k the even and the odd ones
    are sums of their own; every sum is rounded. A product of two bf16 is exact in float32."""
    left, right = (np.pad(t.float().numpy(), ((0, 0), (0, -t.shape[1] % 32))) for t in (a, w))
    total = np.zeros((len(left), len(right)), np.float32)
    for tile in range(0, left.shape[1], 32):
        sums = np.zeros((2, *total.shape), np.float32)
        for k in range(tile, tile + 32):
            sums[k % 2] += np.outer(left[:, k], right[:, k])
        total += sums[0] + sums[1]
    return total


def emulated(a: Tensor, w: Tensor) -> Tensor:
    """a w^T by the level with emulated tiles, whatever the machine has."""
    rows, (columns, k) = len(a), w.shape
    case = simple_case(Isa.AMX, torch.bfloat16, rows, num_threads=1, core=emulated_library())
    return run_op(case, OpKind.GEMM, a, torch.full((rows, columns), torch.nan), k=k, weight=packed(case, w))


@pytest.mark.parametrize(("rows", "columns", "k"), SHAPES)
def test_products_are_rounded_as_the_manual_says(rows: int, columns: int, k: int) -> None:
    a, w = random_bf16(rows, rows, k + k % 2), random_bf16(columns, columns, k)
    assert np.array_equal(emulated(a, w).numpy(), promised(a[:, :k], w))


def test_what_lies_behind_a_row_does_not_matter() -> None:
    """k ends within a tile; the buffer's rows go on, over anything."""
    a, w = random_bf16(1, 21, 64), random_bf16(2, 40, 38)
    for behind in (0.0, torch.nan, torch.inf):
        a[:, 38:] = behind
        assert np.array_equal(emulated(a, w).numpy(), promised(a[:, :38], w))


def test_denormals_are_zero_in_products_and_nowhere_else() -> None:
    tiny, huge = torch.full((1, 2), 2.0**-130).bfloat16(), torch.full((1, 2), 2.0**100).bfloat16()
    assert tiny.float().max() > 0
    assert emulated(tiny, huge).item() == 0.0
    small = torch.full((1, 2), 2.0**-66).bfloat16()
    assert emulated(small, small).item() == 0.0  # the sum would be 2^-131
    assert np.float32(2.0**-140) * np.float32(0.5) > 0.0  # this thread computed the products


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trapped_tiles.c with the level as it is compiled for machines that have tiles."""
    if library().best_isa() == Isa.AMX:
        pytest.skip("this machine runs the instructions")
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
    made, sources = tmp_path_factory.mktemp("tiles") / "trapped_tiles", build.SOURCES
    names = [Path(__file__).with_name("trapped_tiles.c"), sources / "kernels_amx.c", sources / "kernels_avx512_bf16.c"]
    command = [compiler, *build.CFLAGS, f"-I{sources}", *map(str, names), "-o", str(made), *build.LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "amx" in done.stderr:
        pytest.skip("the compiler does not know the instructions")
    assert done.returncode == 0, done.stderr[:2000]
    return made


@pytest.mark.timeout(300)  # compiles
@pytest.mark.parametrize(("rows", "columns", "k"), SHAPES)
def test_the_instructions_do_what_the_emulation_does(trapped: Path, rows: int, columns: int, k: int) -> None:
    """Each one that is compiled in, with its registers, addresses and strides, though not its speed."""
    a, w = random_bf16(rows, rows, k + 3), random_bf16(columns, columns, k)
    a[:, k:] = torch.nan
    command = [str(trapped), *map(str, (rows, columns, k, k + 3))]
    done = subprocess.run(command, input=bits(a).tobytes() + bits(w).tobytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    out = np.frombuffer(done.stdout, np.float32).reshape(rows, columns)
    assert np.array_equal(out, promised(a[:, :k], w))
    assert int(done.stderr) > 10  # trapped: it was not the emulation that was compiled in
