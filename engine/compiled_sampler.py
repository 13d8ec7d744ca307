"""The sampler of the compiled CPU core: `engine.sampler.sample` by the library. Knows rows, not requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pagetier.engine.batch import I64, SampleRow, TokenLogprobs
from pagetier.engine.sampler import adjust, is_adjusted
from pagetier.kernels.cpu.library import SAMPLE_ROW, Isa, Library, aligned_bytes


@dataclass(frozen=True, slots=True)
class SampleCall:
    """What the library is asked for `rows` of `logits`, whose values need not be there yet.

    asked: (num_rows,) SAMPLE_ROW. others: rows that ask for more than the best token. tops: by row of `others` that
    wants log-probabilities, where its best ids and their values will be.
    """

    logits: Tensor
    rows: Sequence[SampleRow]
    asked: np.ndarray
    others: list[int]
    tops: dict[int, tuple[np.ndarray, np.ndarray]]


class CompiledSampler:
    """Chooses as the reference does, to the token. What changes logits before temperature is done here, in torch; the
    rest is one call of the library, rows side by side on `threads`. Called from one thread, but for `describe`."""

    def __init__(self, library: Library, isa: Isa, threads: int, vocab_size: int) -> None:
        self._library = library
        self._isa = isa
        self._threads = threads
        self._vocab_size = vocab_size
        self._scratch = aligned_bytes(library.sample_scratch_bytes(vocab_size, threads))
        self._expected: SampleCall | None = None

    def describe(self, logits: Tensor, rows: Sequence[SampleRow], peaks: np.ndarray | None = None) -> SampleCall:
        """All that does not depend on what the logits are: to be done while they are computed, on any thread.

        logits: (num_samples, vocab_size) float32. peaks: (at least num_samples, blocks) where a step will write those
        of its logits; None: they are found here.
        """
        assert logits.shape == (len(rows), self._vocab_size) and logits.is_contiguous()
        asked, numbers = np.zeros(len(rows), SAMPLE_ROW), np.arange(len(rows), dtype=np.uintp)
        asked["top_p"] = 1.0
        asked["logits"] = logits.data_ptr() + numbers * np.uintp(4 * self._vocab_size)
        if peaks is not None:
            asked["peaks"] = peaks.ctypes.data + numbers * np.uintp(4 * peaks.shape[1])
        others = [index for index, row in enumerate(rows) if not row.is_plain]
        self._describe_draws(asked, rows, others)
        return SampleCall(logits, rows, asked, others, self._describe_logprobs(asked, rows, others, logits))

    def expect(self, call: SampleCall) -> None:
        """The logits that it describes are there now, with their peaks, and are next to be chosen from."""
        self._expected = call

    def __call__(
        self, logits: Tensor, rows: Sequence[SampleRow], previous: I64 | None
    ) -> tuple[I64, tuple[TokenLogprobs | None, ...]]:
        """`engine.sampler.sample`. logits: (num_samples, vocab_size) float32, unchanged."""
        call, self._expected = self._expected, None
        if call is None or call.logits is not logits or call.rows is not rows:
            call = self.describe(logits, rows)
        asked = call.asked
        adjusted = _point_to_adjusted(call, previous)
        self._library.sample(self._isa, asked, self._vocab_size, self._threads, self._scratch)
        del adjusted  # the library has read them
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for index, (ids, values) in call.tops.items():
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


def _point_to_adjusted(call: SampleCall, previous: I64 | None) -> list[Tensor]:
    """Rows with penalties and the like are chosen from logits of their own, returned to be kept as long as needed."""
    kept = []
    for index in call.others:
        row = call.rows[index]
        if is_adjusted(row):
            own = call.logits[index].clone()  # (vocab_size,)
            adjust(own, row, previous)
            call.asked["logits"][index], call.asked["peaks"][index] = own.data_ptr(), 0
            kept.append(own)
    return kept
