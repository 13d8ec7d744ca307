"""Single ops of the compiled core against kernels/reference.py, over weird shapes, at every level and dtype.

Tolerances: float32 ops differ by the order of sums and by exp's 2e-7; a bf16 output by its rounding, 2^-8 of its value.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetier.kernels import reference
from pagetier.kernels.cpu.library import SAMPLE_BLOCK, Isa, OpKind
from pagetier.kernels.reference import PagedRows, RopeScaling
from tests.kernels.cpu.op_calls import Case, bits, packed, packed_gated, run_op, simple_case
from tests.kernels.cpu.sample_calls import peaks_of
from tests.kernels.cpu.tiny_models import every_dtype, every_level

WIDTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100, 576, 1000)
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}  # relative; float32 with room for a sum in another order


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype, atol: float = 1e-6) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=ULP[dtype], atol=atol)


@every_level
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width: int, dtype: torch.dtype, isa: Isa) -> None:
    x, weight = random(5, width, scale=3.0), random(width, seed=1)
    case = simple_case(isa, dtype, 5, num_threads=2)
    ours = run_op(case, OpKind.NORM, x, torch.full((5, width), torch.nan, dtype=dtype), weight=bits(weight))
    assert_close(ours, reference.rms_norm(x, weight, 1e-5), dtype)


@every_level
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(width: int, dtype: torch.dtype, isa: Isa) -> None:
    gate_up = random(6, 2 * width, scale=4.0)
    gate_up[0, :width], gate_up[1, :width] = -1e4, 1e4  # where e^x leaves float32
    ours = run_op(
        simple_case(isa, dtype, 6), OpKind.SILU_MUL, gate_up, torch.full((6, width), torch.nan, dtype=dtype), n=width
    )
    assert_close(ours, reference.silu_mul(gate_up), dtype)


@every_level
@every_dtype
def test_embed_and_gather_copy(dtype: torch.dtype, isa: Isa) -> None:
    table = random(100, 37).to(dtype)
    ids, samples = [99, 0, 5, 5, 62], [4, 0, 0, 2, 4, 1]
    case = simple_case(isa, dtype, 5, token_ids=ids)
    ours = run_op(case, OpKind.EMBED, None, torch.full((5, 37), torch.nan), weight=bits(table))
    assert torch.equal(ours, table[ids].float())
    case.samples = samples
    ours = run_op(case, OpKind.GATHER, table[:5], torch.full((6, 37), torch.nan, dtype=dtype), per_sample=1)
    assert torch.equal(ours, table[:5][samples])


@every_level
@every_dtype
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 100])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 16), (33, 7), (64, 64), (129, 50), (257, 576), (31, 1537), (3, 6001)])
def test_gemm(n: int, k: int, rows: int, dtype: torch.dtype, isa: Isa) -> None:
    """With bias, accumulated, and out in bf16. Each of k sums rounds by 2^-24 of a partial sum of some sqrt(k), at
    random: 2^-24 * k, and four of that for the largest of thousands. Products of bf16 are exact. Rows of 6,001 are more
    than a level widens at once."""
    a, w, bias, old = (
        random(rows, k).to(dtype),
        random(n, k, seed=1).to(dtype),
        random(n, seed=2),
        random(rows, n, seed=3),
    )
    exact = a.double() @ w.double().T  # (rows, n)
    case = simple_case(isa, dtype, rows, num_threads=2)
    weight = packed(case, w)
    padded = torch.zeros(rows, k + k % 2, dtype=dtype)  # a row of odd width has room for a whole pair
    padded[:, :k] = a
    fresh = torch.full((rows, n), torch.nan)
    atol = 2.0**-22 * k
    ours = run_op(case, OpKind.GEMM, padded, fresh, k=k, weight=weight)
    assert_close(ours, exact, torch.float32, atol)
    ours = run_op(case, OpKind.GEMM, padded, old, k=k, weight=weight, bias=bits(bias), accumulate=1)
    assert_close(ours, exact + bias + old, torch.float32, atol)
    ours = run_op(case, OpKind.GEMM, padded, fresh.to(torch.bfloat16), k=k, weight=weight, bias=bits(bias))
    assert_close(ours, exact + bias, torch.bfloat16, atol)


@every_level
@every_dtype
@pytest.mark.parametrize("rows", [1, 3, 8, 97, 200])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 257, 5000])
def test_a_gemm_tells_the_peaks_of_what_it_writes(n: int, rows: int, dtype: torch.dtype, isa: Isa) -> None:
    """And of nothing else; a row whose values are NaN has NaN peaks."""
    case, k = simple_case(isa, dtype, rows, num_threads=2), 8
    a = random(rows, k).to(dtype)
    a[rows // 2] = torch.nan
    weight, fresh = packed(case, random(n, k, seed=1).to(dtype)), torch.full((rows, n + 3), torch.inf)
    plain = run_op(case, OpKind.GEMM, a, fresh, n=n, k=k, weight=weight)
    peaks = np.full((rows + 1, -(-n // SAMPLE_BLOCK)), 7.5, np.float32)
    ours = run_op(case, OpKind.GEMM, a, fresh, n=n, k=k, weight=weight, peaks=peaks.ctypes.data)
    assert torch.equal(ours.nan_to_num(), plain.nan_to_num())
    np.testing.assert_array_equal(peaks[:rows], peaks_of(ours[:, :n].numpy()))
    assert (peaks[rows] == 7.5).all()


@every_level
@every_dtype
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 29, 40, 97])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (33, 7), (64, 64), (129, 50), (257, 576), (31, 1537)])
def test_a_gated_gemm_is_both_products_and_their_gate_to_the_bit(
    n: int, k: int, rows: int, dtype: torch.dtype, isa: Isa
) -> None:
    case = simple_case(isa, dtype, rows, num_threads=2)
    gate, up, bias = random(n, k, seed=1).to(dtype), random(n, k, seed=2).to(dtype), random(2 * n, seed=3)
    weight = packed_gated(case, gate, up)
    if weight is None:
        assert isa == Isa.AVX2
        return
    a = torch.zeros(rows, k + k % 2, dtype=dtype)
    a[:, :k] = random(rows, k).to(dtype)
    both = packed(case, torch.cat([gate, up]))
    for biased in ({}, {"bias": bits(bias)}):
        products = run_op(case, OpKind.GEMM, a, torch.full((rows, 2 * n), torch.nan), k=k, weight=both, **biased)
        for out_dtype in (torch.float32, torch.bfloat16):
            fresh = torch.full((rows, n + 3), torch.nan, dtype=out_dtype)
            apart = run_op(case, OpKind.SILU_MUL, products, fresh, n=n)
            at_once = run_op(case, OpKind.GEMM, a, fresh, n=n, k=k, weight=weight, gated=1, **biased)
            assert torch.equal(at_once[:, :n], apart[:, :n])
            assert at_once[:, n:].isnan().all()


@every_level
@every_dtype
@pytest.mark.parametrize("head_dim", [2, 12, 32, 50, 64, 80, 96, 128, 256])
def test_rope_and_head_norm_and_kv_write(head_dim: int, dtype: torch.dtype, isa: Isa) -> None:
    heads, kv_heads, block_size = 3, 1, 8
    pool = torch.full((6, 2, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    case = Case(isa, dtype, pool, [[4, 1, 0], [3]], [(5, 13), (2, 1)], num_heads=heads, num_threads=2)
    case.frequencies = reference.rope_frequencies(head_dim, 10_000.0, RopeScaling())
    qkv = random(14, (heads + 2 * kv_heads) * head_dim)
    norms = random(head_dim, seed=1), random(head_dim, seed=2)
    named = {"weight": bits(norms[0]), "bias": bits(norms[1])}
    split = qkv.view(14, -1, head_dim)  # (num_tokens, heads, head_dim)

    normed = run_op(case, OpKind.HEAD_NORM, qkv[:0], qkv, n=heads * head_dim, **named).view(14, -1, head_dim)
    assert_close(normed[:, :heads], reference.rms_norm(split[:, :heads], norms[0], 1e-5), torch.float32)
    assert_close(
        normed[:, heads : heads + 1], reference.rms_norm(split[:, heads : heads + 1], norms[1], 1e-5), torch.float32
    )
    assert torch.equal(normed[:, heads + 1 :], split[:, heads + 1 :])

    rotated = run_op(case, OpKind.ROPE_KV, qkv[:0], qkv, n=heads * head_dim, layer=1).view(14, -1, head_dim)
    positions = torch.tensor([*range(5, 18), 2])
    theirs = reference.rope(split[:, : heads + 1], positions, case.frequencies)  # (num_tokens, q and k heads, head_dim)
    assert_close(rotated[:, : heads + 1], theirs, torch.float32, 3e-6)
    assert torch.equal(rotated[:, heads + 1 :], split[:, heads + 1 :])

    written = torch.full_like(pool, torch.nan)
    for token, (table, position) in enumerate([*(([4, 1, 0], p) for p in range(5, 18)), ([3], 2)]):
        block, offset = table[position // block_size], position % block_size
        written[block, 1, :, 0, offset] = rotated[token, heads:].to(dtype)  # (2, head_dim)
    torch.testing.assert_close(pool, written, rtol=0, atol=0, equal_nan=True)


SHAPES = {  # heads, kv heads, head_dim, block_size
    "smollm2": (9, 3, 64, 16),
    "mqa_256_block_64": (4, 1, 256, 64),
    "mha_80_block_8": (2, 2, 80, 8),
    "group_7_dim_96_block_32": (7, 1, 96, 32),
    "group_50_dim_12": (50, 1, 12, 16),
    "dim_2": (2, 1, 2, 16),
}


ROWS = [(1500, 1), (0, 1), (510, 3), (0, 67), (2047, 1), (1023, 2), (511, 1), (512, 1)]


@functools.cache
def long_contexts(shape: str, dtype: torch.dtype) -> tuple[Tensor, list[list[int]]]:
    """A pool where layer 1 holds values in the slots of ROWS and NaN in all others, and the rows' blocks in it."""
    _, kv_heads, dim, block_size = SHAPES[shape]
    counts = [-(-(first + n) // block_size) for first, n in ROWS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(9)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    pool = random(sum(counts) + 1, 2, 2, kv_heads, block_size, dim, scale=2.0).to(dtype)
    pool[:, 0] = pool[-1] = torch.nan
    for (first, n), table in zip(ROWS, tables, strict=True):
        pool[table[-1], 1, :, :, (first + n - 1) % block_size + 1 :] = torch.nan
    return pool, tables


@functools.cache
def long_attention(shape: str, window: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random qkv rows of the compute dtype's values, and the reference's answer."""
    heads, kv_heads, dim, _ = SHAPES[shape]
    pool, tables = long_contexts(shape, dtype)
    num_tokens = sum(n for _, n in ROWS)
    qkv = random(num_tokens, (heads + 2 * kv_heads) * dim, seed=4, scale=2.0).to(dtype).float()
    longest = max(map(len, tables))
    rows = PagedRows(
        torch.tensor([0, *(n for _, n in ROWS)]).cumsum(0),
        torch.tensor([first + n for first, n in ROWS]),
        torch.tensor([table + [len(pool) - 1] * (longest - len(table)) for table in tables]),
        window or None,
    )
    query = qkv[:, : heads * dim].view(-1, heads, dim)  # (num_tokens, heads, head_dim)
    return qkv, reference.paged_attention(query, pool, 1, rows, dim**-0.5).flatten(1)


@every_level
@every_dtype
@pytest.mark.parametrize("window", [0, 1, 700])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_long_contexts(shape: str, window: int, dtype: torch.dtype, isa: Isa) -> None:
    """Several splits and tiles, decode rows (cut into splits) and chunks (not), unused slots NaN. float32: scores reach
    20, so that 1e-6 of one is 2e-5 of its weight. bf16: the core rounds queries, as is done here, and at its bf16 level
    probabilities, each by 2^-9; the result by 2^-9 of up to 8."""
    heads, _, dim, _ = SHAPES[shape]
    pool, tables = long_contexts(shape, dtype)
    qkv, theirs = long_attention(shape, window, dtype)
    case = Case(isa, dtype, pool, tables, ROWS, num_heads=heads, window=window, softmax_scale=dim**-0.5, num_threads=2)
    out = torch.full((case.num_tokens, heads * dim), torch.nan, dtype=dtype)
    ours = run_op(case, OpKind.ATTENTION, qkv, out, layer=1)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)
    else:
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=2**-7)


@every_level
@every_dtype
def test_softcap(dtype: torch.dtype, isa: Isa) -> None:
    """cap * tanh(score / cap), scores up to hundreds."""
    pool = random(8, 1, 2, 1, 16, 32, scale=4.0).to(dtype)
    query = random(1, 3 * 32, seed=1, scale=4.0).to(dtype)
    case = Case(isa, dtype, pool, [list(range(8))], [(120, 1)], softmax_scale=1.0, softcap=5.0)
    ours = run_op(case, OpKind.ATTENTION, query.float(), torch.zeros(1, 32, dtype=dtype))
    keys, values = pool[:, 0, :, 0].float().transpose(0, 1).flatten(1, 2)[:, :121]  # (num_keys, head_dim) each
    weights = torch.softmax(5.0 * torch.tanh(keys @ query[0, :32].float() / 5.0), 0)
    torch.testing.assert_close(
        ours[0].float(), weights @ values, rtol=0, atol=1e-5 if dtype == torch.float32 else 2**-6
    )
