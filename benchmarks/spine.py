"""Is the whole engine at least as fast as `transformers.generate` when 16 greedy requests arrive at once?

Both sides hold the same weights in the same dtype, use the same threads, get the same token ids at once and give the
same number of new tokens. What is unfair: transformers gets its batch ready-made and knows that nothing will join it;
we schedule, chunk, keep block tables and detokenise. With mixed lengths transformers computes its padding, too, which
is how it is used. Prefix caching is off here: no prompt repeats another.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from pagetier.benchmarks.pairing import Pairs, measure_pairs, percentile, wait_until_idle
from pagetier.benchmarks.report import Row
from pagetier.engine.llm import LLM
from pagetier.engine.pull import resolve_model
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.weights.export_hf import export_hf

MODEL = "smollm2"
NUM_REQUESTS = 16
FIRST_ORDINARY_ID = 100  # below lie special tokens
VOCAB_SIZE = 49_152


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompt_lengths` of the 16 requests and the new tokens that each gets."""

    name: str
    prompt_lengths: tuple[int, ...]
    num_new_tokens: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Token ids without structure or shared prefix; a new seed, new prompts."""
        generator = torch.Generator().manual_seed(seed)
        draw = [torch.randint(FIRST_ORDINARY_ID, VOCAB_SIZE, (n,), generator=generator) for n in self.prompt_lengths]
        return [ids.tolist() for ids in draw]

    @property
    def num_generated_tokens(self) -> int:
        return self.num_new_tokens * len(self.prompt_lengths)


EQUAL = Workload("equal_lengths", (128,) * NUM_REQUESTS, 64)
MIXED = Workload("mixed_lengths", tuple(16 + 16 * i for i in range(NUM_REQUESTS)), 64)
Outputs = list[list[int]]
Generate = Callable[[Workload, list[list[int]]], Outputs]


def run(full: bool, say: Callable[[str], None]) -> list[Row]:
    """Quick: two pairs in fp32. Full: five pairs, fp32 and bf16."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    note = wait_until_idle(300.0 if full else 0.0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pagetier-bench-") as folder:
        checkpoint = resolve_model(MODEL)
        say(f"writing {checkpoint.name} as a Hugging Face folder for transformers")
        export_hf(checkpoint, Path(folder), "float32")
        for dtype in ("float32", "bfloat16") if full else ("float32",):
            with both_sides(checkpoint, Path(folder), dtype) as (ours, theirs):
                for workload in (EQUAL, MIXED):
                    say(f"{dtype}, {workload.name}: {5 if full else 2} pairs")
                    rows += compare(workload, dtype, ours, theirs, 5 if full else 2, note)
    return rows


@contextlib.contextmanager
def both_sides(checkpoint: Path, folder: Path, dtype: str) -> Iterator[tuple[Generate, Generate]]:
    """Both engines, loaded and warmed up."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    reference.generation_config.eos_token_id = None  # run to max_new_tokens, as ignore_eos does
    llm = LLM(str(checkpoint), dtype=dtype, enable_prefix_caching=False, max_num_seqs=NUM_REQUESTS)

    def ours(workload: Workload, prompts: list[list[int]]) -> Outputs:
        params = SamplingParams(temperature=0.0, max_tokens=workload.num_new_tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    def theirs(workload: Workload, prompts: list[list[int]]) -> Outputs:
        return transformers_generate(reference, workload, prompts)

    try:
        warm = Workload("warm", (16,) * NUM_REQUESTS, 4)
        for generate in (ours, theirs):
            generate(warm, warm.prompts(seed=0))
        yield ours, theirs
    finally:
        llm.close()


@torch.inference_mode()
def transformers_generate(reference: torch.nn.Module, workload: Workload, prompts: list[list[int]]) -> Outputs:
    """Greedy, padded on the left to the longest prompt."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])  # (num_requests, longest)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    given: dict[str, object] = {"do_sample": False, "max_new_tokens": workload.num_new_tokens, "pad_token_id": 0}
    tokens = reference.generate(input_ids=ids, attention_mask=mask, **given)  # type: ignore[operator]
    return [row.tolist() for row in tokens[:, longest:]]


def compare(
    workload: Workload, dtype: str, ours: Generate, theirs: Generate, num_pairs: int, note: str
) -> Sequence[Row]:
    """Tokens per second of both on the same prompts, new ones for each pair, and how far their tokens agree."""
    agreement: list[float] = []
    latest: dict[str, Outputs] = {}
    pair = 0

    def measured(name: str, generate: Generate) -> float:
        start_s = time.perf_counter()
        latest[name] = generate(workload, workload.prompts(seed=1 + pair))
        elapsed_s = time.perf_counter() - start_s
        assert [len(ids) for ids in latest[name]] == [workload.num_new_tokens] * len(workload.prompt_lengths)
        return workload.num_generated_tokens / elapsed_s

    def second() -> float:
        nonlocal pair
        speed = measured("theirs", theirs)
        agreement.append(share_of_equal_tokens(latest["ours"], latest["theirs"]))
        pair += 1
        return speed

    pairs = measure_pairs(lambda: measured("ours", ours), second, num_pairs)
    return rows_of(f"{workload.name}_{dtype}", pairs, agreement, note)


def rows_of(name: str, pairs: Pairs, agreement: Sequence[float], busy: str) -> list[Row]:
    runs = len(pairs.ours)
    ratio = Row(f"{name}_vs_transformers", pairs.ratio, "ratio", ">= 1.00", *spread(pairs.ratios), runs, busy)
    sides = (("pagetier", pairs.ours), ("transformers", pairs.theirs))
    speeds = [
        Row(f"{name}_{side}", statistics.median(values), "tokens/s", None, *spread(values), runs)
        for side, values in sides
    ]
    note = "tokens before each answer's first difference, over all"
    return [ratio, *speeds, Row(f"{name}_same_tokens", statistics.mean(agreement), "share", runs=runs, note=note)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    return percentile(values, 0.5), percentile(values, 0.99)


def share_of_equal_tokens(ours: Outputs, theirs: Outputs) -> float:
    """Tokens before the first difference of each request, over all tokens."""
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        differs = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        equal += differs[0] if differs else len(a)
    return equal / sum(map(len, ours))
