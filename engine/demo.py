"""`pagetier demo`: what each tier does for time to first token, measured over HTTP on two replica processes.

Owns the replicas, their cache folder (a fresh one, removed at the end) and the measurement. Knows servers only as
commands and URLs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagetier.engine.tokenizer import Tokenizer, load_tokenizer
from pagetier.kvstore.errors import PagetierError, TierUnavailable
from pagetier.kvstore.redis.embedded import stop_embedded

SYSTEM_TOKENS = 2000
OUTPUT_TOKENS = 32
QUESTION = "Which part of the handbook answers most questions of a new colleague? Answer in one sentence."
REQUEST_S = 300.0
STOP_S = 30.0
NUM_STAGES = 7
MIN_SHARE = 0.95  # of the prompt that must come from a step's tier: all full blocks are 0.98 or more
CACHE = "cache"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """model: what the user called it. path: where it lies."""

    model: str
    path: Path
    dtype: str


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One request. ttft_s: from sending it to its first text, over HTTP."""

    name: str
    replica: int
    prompt_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    ttft_s: float
    output: str


@dataclass(slots=True)
class DemoReport:
    """The steps in order, and the last GET /stats of each replica."""

    model: str
    steps: list[DemoStep] = field(default_factory=list)
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The shape of `pagetier demo --json`."""
        return {"model": self.model, "steps": [asdict(step) for step in self.steps]}

    def findings(self) -> list[str]:
        """What did not go as it should: a step that another tier served, an output that differs."""
        found = []
        for step in self.steps[1:]:
            served = step.cached_tokens_by_tier.get(step.name, 0)
            if served < MIN_SHARE * step.prompt_tokens:
                found.append(f"step {step.name}: only {served:,} of {step.prompt_tokens:,} prompt tokens came from it")
        if len({step.output for step in self.steps}) > 1:
            found.append("the outputs differ")
        return found

    def print_to(self, console: Console) -> None:
        """The steps and the hit table, for people."""
        cold_s = self.steps[0].ttft_s
        table = Table(title=f"One system prompt of {SYSTEM_TOKENS:,} tokens, four times ({self.model})")
        table.add_column("step")
        table.add_column("replica", justify="right")
        for name in ("prompt", "cached", "TTFT", "speed-up"):
            table.add_column(name, justify="right")
        table.add_column("served from")
        for step in self.steps:
            served = ", ".join(f"{tier} {count:,}" for tier, count in step.cached_tokens_by_tier.items() if count)
            table.add_row(
                step.name,
                str(step.replica),
                f"{step.prompt_tokens:,}",
                f"{step.cached_tokens:,}",
                f"{step.ttft_s * 1e3:,.0f} ms",
                f"{cold_s / step.ttft_s:.1f}x",
                served or "computed",
            )
        console.print(table)
        console.print(self._hit_table())
        for step in self.steps:
            console.print(f"{step.name:>6}: {step.output!r}", highlight=False)

    def _hit_table(self) -> Table:
        tiers = list(dict.fromkeys(tier for stats in self.stats.values() for tier in stats["tiers"]))
        table = Table(title="Hit rates: hit tokens over looked-up prompt tokens, since each process started")
        table.add_column("process")
        for name in ("lookup tokens", *tiers, "all"):
            table.add_column(name, justify="right")
        for name, stats in self.stats.items():
            rates = [f"{stats['tiers'].get(tier, {}).get('hit_rate', 0.0):.1%}" for tier in tiers]
            table.add_row(name, f"{stats['lookup']['lookup_tokens']:,}", *rates, f"{stats['lookup']['hit_rate']:.1%}")
        return table


def run_demo(options: DemoOptions, console: Console) -> DemoReport:
    """Run all four steps; progress on `console`. Takes about a minute on two cores. Raises PagetierError."""
    tokenizer = load_tokenizer(options.path)
    system = system_prompt(tokenizer, SYSTEM_TOKENS)
    report = DemoReport(options.model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _scratch_folder() as scratch, Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=NUM_STAGES)

        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            bar.update(task, description=name)
            yield
            bar.advance(task)

        def measure(name: str, replica: Replica) -> None:
            with stage(f"{name}: replica {replica.number} answers"):
                report.steps.append(_measure(name, replica, options.model, system))

        with Replica(1, options, scratch) as first, Replica(2, options, scratch) as second:
            with stage("replica 1 starts"):
                first.start()
            measure("cold", first)
            measure("device", first)
            report.stats["replica 1"] = first.stats()
            with stage("replica 1 restarts"):
                first.stop()
                first.start()
            measure("nvme", first)
            report.stats["replica 1, restarted"] = first.stats()
            with stage("replica 2 starts"):
                second.start()
            measure("redis", second)
            report.stats["replica 2"] = second.stats()
    return report


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A short path: Unix sockets below it must stay within 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="pagetier-demo-"))
    try:
        yield folder
    finally:
        with contextlib.suppress(TierUnavailable):  # it ends by itself once its folder is gone and nobody uses it
            stop_embedded(folder / CACHE / "redis")
        shutil.rmtree(folder, ignore_errors=True)


class Replica:
    """A `pagetier serve` process. Both replicas share the cache folder, so one embedded Valkey; each has its own NVMe
    folder. May be started again after `stop`.
    """

    def __init__(self, number: int, options: DemoOptions, scratch: Path) -> None:
        self.number = number
        self._command = [
            *(sys.executable, "-m", "pagetier.cli", "serve", "--model", str(options.path)),
            *("--served-model-name", options.model, "--dtype", options.dtype, "--port", "0"),
            *("--kv-tier", "nvme,redis", "--kv-nvme-path", str(scratch / f"nvme-{number}")),
            *("--kv-nvme-allow-unsafe", "--kv-nvme-size", "2GiB", "--kv-redis-url", "embedded"),
            *("--kv-redis-size", "1GiB", "--kv-redis-linger", "600", "--kv-cache-memory", "1GiB"),
        ]
        self._environment = os.environ | {"PAGETIER_CACHE_DIR": str(scratch / CACHE)}
        self._log = scratch / f"replica-{number}.log"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it and wait until it answers. Raises PagetierError with its own words."""
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None, "started with a pipe"
        banner = self._process.stdout.readline()
        url = next((word for word in banner.split() if word.startswith("http://")), None)
        if url is None:
            self._process.wait(STOP_S)
            lines = [line for line in self._log.read_text().splitlines() if line.strip()]
            raise PagetierError(f"replica {self.number} did not start: {lines[-1] if lines else 'it said nothing'}")
        self.url = url
        self._warm_up()

    def stop(self) -> None:
        """End it in order: queued blocks are written first. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def stats(self) -> dict[str, Any]:
        fields: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=REQUEST_S).json()
        return fields

    def _warm_up(self) -> None:
        """One short request that shares no block with the others: first-use costs belong to no step."""
        body = {"prompt": "Warm up.", "max_tokens": 4, "temperature": 0}
        httpx.post(f"{self.url}/v1/completions", json=body, timeout=REQUEST_S).raise_for_status()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _measure(name: str, replica: Replica, model: str, system: str) -> DemoStep:
    body = {
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, ttft_s = "", None, None
    with httpx.Client(base_url=replica.url, timeout=REQUEST_S) as http:
        http.get("/health").raise_for_status()  # the connection is open before the clock runs
        start_s = time.perf_counter()
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise PagetierError(f"step {name}: replica {replica.number} answered: {event['error']['message']}")
                for choice in event["choices"]:
                    if ttft_s is None and choice["delta"].get("content"):
                        ttft_s = time.perf_counter() - start_s
                    text += choice["delta"].get("content", "")
                usage = event.get("usage") or usage
    if usage is None or ttft_s is None:
        raise PagetierError(f"step {name}: replica {replica.number} answered without text; see `pagetier serve`")
    details = usage["prompt_tokens_details"]
    return DemoStep(
        name,
        replica.number,
        usage["prompt_tokens"],
        details["cached_tokens"],
        details["cached_tokens_by_tier"],
        round(ttft_s, 4),
        text,
    )


TOPICS = ("leave", "travel", "code review", "on-call duty", "hiring", "security", "releases", "incidents", "budgets")
RULES = (
    "Ask early when {topic} is unclear; the person who wrote the rule is named below it.",
    "Write down what was decided about {topic}, with the date and the reason.",
    "Two people agree before anything about {topic} changes.",
    "What we learn about {topic} goes into this handbook within a week.",
)


def system_prompt(tokenizer: Tokenizer, num_tokens: int) -> str:
    """A made-up handbook of exactly `num_tokens` tokens, or the next length that survives decoding."""
    paragraphs: list[str] = ["You answer questions about this handbook."]
    while len(tokenizer.encode("\n".join(paragraphs), add_special_tokens=False)) < num_tokens:
        section = len(paragraphs)
        topic, rule = TOPICS[section % len(TOPICS)], RULES[section % len(RULES)]
        paragraphs.append(f"Section {section}, about {topic}. {rule.format(topic=topic)}")
    ids = tokenizer.encode("\n".join(paragraphs), add_special_tokens=False)
    return tokenizer.decode(ids[:num_tokens])
