"""The sampler of the compiled CPU core: `engine.sampler.sample` by the library. Knows rows, not requests."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pagetier.engine.batch import I64, SampleRow, TokenLogprobs
from pagetier.engine.sampler import adjust, is_adjusted
from pagetier.kernels.cpu.library import SAMPLE_BLOCK, SAMPLE_ROW, Isa, Library, aligned_bytes


class LogitPeaks:
    """The greatest of each SAMPLE_BLOCK logits of a row, which a step finds as it computes them, and of which tensor
    they are: a choice then need not read all logits again."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._row_nbytes = 4 * -(-vocab_size // SAMPLE_BLOCK)
        self._values = aligned_bytes(max_rows * self._row_nbytes)
        self._logits: weakref.ref[Tensor] | None = None

    @property
    def address(self) -> int:
        """Where they are written."""
        return self._values.ctypes.data

    def are_of(self, logits: Tensor) -> None:
        """They are now those of this tensor, which nobody changes from here on."""
        self._logits = weakref.ref(logits)

    def rows_of(self, logits: Tensor) -> np.ndarray | None:
        """(num_rows,) where each row of `logits` has its own; None when they are another tensor's."""
        if self._logits is None or self._logits() is not logits:
            return None
        return np.uintp(self.address) + np.arange(len(logits), dtype=np.uintp) * np.uintp(self._row_nbytes)


class CompiledSampler:
    """Chooses as the reference does, to the token. What changes logits before temperature is done here, in torch; the
    rest is one call of the library, rows side by side on `threads`. Called from one thread.

    peaks: of the logits that the same library computes.
    """

    def __init__(
        self, library: Library, isa: Isa, threads: int, vocab_size: int, peaks: LogitPeaks | None = None
    ) -> None:
        self._library = library
        self._isa = isa
        self._threads = threads
        self._vocab_size = vocab_size
        self._peaks = peaks
        self._scratch = aligned_bytes(library.sample_scratch_bytes(vocab_size, threads))

    def __call__(
        self, logits: Tensor, rows: Sequence[SampleRow], previous: I64 | None
    ) -> tuple[I64, tuple[TokenLogprobs | None, ...]]:
        """`engine.sampler.sample`. logits: (num_samples, vocab_size) float32, unchanged."""
        assert logits.shape == (len(rows), self._vocab_size) and logits.is_contiguous()
        asked = np.zeros(len(rows), SAMPLE_ROW)
        asked["top_p"] = 1.0
        asked["logits"] = logits.data_ptr() + np.arange(len(rows), dtype=np.uintp) * np.uintp(4 * self._vocab_size)
        peaks = None if self._peaks is None else self._peaks.rows_of(logits)
        if peaks is not None:
            asked["peaks"] = peaks
        others = [index for index, row in enumerate(rows) if not row.is_plain]
        adjusted = _point_to_adjusted(asked, logits, rows, others, previous)
        self._describe_draws(asked, rows, others)
        tops = self._describe_logprobs(asked, rows, others, logits)
        self._library.sample(self._isa, asked, self._vocab_size, self._threads, self._scratch)
        del adjusted  # the library has read them
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for index, (ids, values) in tops.items():
            best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            logprobs[index] = TokenLogprobs(float(asked["logprob"][index]), int(asked["rank"][index]), best)
        return asked["token"].astype(np.int64), tuple(logprobs)

    def _describe_draws(self, asked: np.ndarray, rows: Sequence[SampleRow], others: list[int]) -> None:
        """Fills in those of `others` that are not greedy."""
        drawn = [index for index in others if not rows[index].params.greedy]
        if not drawn:
            return
        asked["number"][drawn] = self._library.uniforms(
            [(rows[index].seed, rows[index].choice, rows[index].position) for index in drawn]
        )
        for name in ("temperature", "min_p", "top_p", "top_k"):
            asked[name][drawn] = [getattr(rows[index].params, name) for index in drawn]

    def _describe_logprobs(
        self, asked: np.ndarray, rows: Sequence[SampleRow], others: list[int], logits: Tensor
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """By row of `others` that wants log-probabilities: where its best ids and their values will be."""
        tops = {}
        for index in others:
            row = rows[index]
            if row.params.logprobs is None:
                continue
            num_top = min(row.params.logprobs, self._vocab_size)
            tops[index] = ids, values = np.zeros(num_top, np.int32), np.zeros(num_top, np.float32)
            asked["raw"][index], asked["num_top"][index] = logits[index].data_ptr(), num_top
            asked["top_ids"][index], asked["top_logprobs"][index] = ids.ctypes.data, values.ctypes.data
        return tops


def _point_to_adjusted(
    asked: np.ndarray, logits: Tensor, rows: Sequence[SampleRow], others: list[int], previous: I64 | None
) -> list[Tensor]:
    """Rows of `others` with penalties and the like are chosen from logits of their own, returned to be kept as long as
    needed."""
    kept = []
    for index in others:
        row = rows[index]
        if is_adjusted(row):
            own = logits[index].clone()  # (vocab_size,)
            adjust(own, row, previous)
            asked["logits"][index], asked["peaks"][index] = own.data_ptr(), 0
            kept.append(own)
    return kept
