"""Commands that need the engine: serve, generate, pull, demo; diff-identity does for a model.

Import-light: torch and the server load when one runs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pagetier import __version__
from pagetier.engine.config import CPU_KERNELS, DTYPES, MAX_THREADS
from pagetier.engine.diff_identity import diff_identity
from pagetier.engine.requirements import require_engine
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.serve_flags import CPU_KERNELS_HELP, THREADS_HELP, ServeFlags, engine_fields
from pagetier.kvstore.cli.asked import TextModel
from pagetier.kvstore.config import StoreConfig, default_redis_url, parse_tiers
from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.flags import command
from pagetier.kvstore.tier_flags import TierFlags

if TYPE_CHECKING:
    from pagetier.engine.server.wire import Ready

SAMPLING = "Sampling"


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("serve")(command(serve, ServeFlags, TierFlags))
    app.command("generate")(command(generate, GenerateFlags))
    app.command("demo")(demo)
    app.command("pull")(pull)
    app.command("diff-identity")(diff_identity)


def load_text_model(name: str) -> TextModel:
    """A model's tokenizer, for commands that read text without a server. Raises ConfigError."""
    require_engine("--model")
    from pagetier.engine.pull import resolve_model
    from pagetier.engine.tokenizer import load_tokenizer

    return load_tokenizer(resolve_model(name, progress=True))


def serve(flags: ServeFlags, tiers: TierFlags) -> None:
    """Serve a model with OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions, /health, /stats, /metrics.

    SIGTERM lets running requests finish and writes queued blocks, within --shutdown-timeout.

    Example: pagetier serve --model smollm2 --kv-tier nvme,redis
    """
    require_engine("serve")
    fields = engine_fields(flags, tiers)
    from pagetier.engine.pull import resolve_model
    from pagetier.engine.server.engine_host import EngineOrder
    from pagetier.engine.server.event_publisher import parse_events_config
    from pagetier.engine.server.serve import ServeOptions, bind
    from pagetier.engine.server.serve import serve as run
    from pagetier.engine.tokenizer import load_tokenizer

    events = parse_events_config(flags.kv_events_config)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    names = tuple(flags.served_model_name or (flags.model,))
    listener = bind(flags.host, flags.port)  # a port in use is told before a model is loaded
    with listener:
        path = resolve_model(flags.model, progress=True)
        order = EngineOrder(fields | {"model": str(path)}, shutdown_timeout_s=flags.shutdown_timeout)
        options = ServeOptions(
            order=order,
            model_names=names,
            api_key=flags.api_key,
            admin_token=flags.admin_token,
            engine_process=flags.engine_process,
            shutdown_timeout_s=flags.shutdown_timeout,
            seed=flags.seed,
            kv_events=events,
        )
        start_s = time.monotonic()
        with Console(stderr=True).status(f"loading {flags.model}") as status:

            def started(url: str, ready: Ready) -> None:
                status.stop()
                tiers, seconds = tiers_shown(ready), time.monotonic() - start_s
                typer.echo(
                    f"Pagetier {__version__} serves {names[0]} at {url} (KV tiers {tiers}; up in {seconds:.1f} s)"
                )
                typer.echo(f"Hit rates: pagetier stats --url {url} --watch")
                sys.stdout.flush()

            _run_async(run(options, lambda: load_tokenizer(path), listener, started))


def tiers_shown(ready: Ready) -> str:
    """The tiers in their order, and which of them the engine started without: `device > nvme (down) > redis`."""
    return " > ".join(f"{name} (down)" if name in ready.tiers_down else name for name in ready.tiers)


def _run_async(work: Any) -> None:
    """On uvloop where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        asyncio.run(work)
        return
    import uvloop

    uvloop.run(work)


def _sampling(name: str, text: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel=SAMPLING, help=text, **more)


@dataclass(frozen=True, slots=True)
class GenerateFlags:
    """One field per flag of `pagetier generate`."""

    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue; - reads it from stdin.")]
    model: Annotated[str, typer.Option("--model", help="smollm2, a folder or .gguf file, or org/name.")] = "smollm2"
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt to the model as a user's message.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")] = False
    dtype: Annotated[str, typer.Option("--dtype", help=f"{', '.join(DTYPES)}.")] = "auto"
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto"
    threads: Annotated[int, typer.Option("--threads", help=THREADS_HELP, min=0, max=MAX_THREADS)] = 0
    cpu_kernels: Annotated[str, typer.Option("--cpu-kernels", help=CPU_KERNELS_HELP)] = "auto"
    kv_tier: Annotated[str, typer.Option("--kv-tier", help="KV tiers below the device, e.g. nvme,redis.")] = ""
    max_tokens: Annotated[int, _sampling("--max-tokens", "Longest output.", min=1)] = 128
    temperature: Annotated[float, _sampling("--temperature", "0 is greedy.")] = 0.0
    top_p: Annotated[float, _sampling("--top-p", "Smallest set of tokens with this probability.")] = 1.0
    top_k: Annotated[int, _sampling("--top-k", "0: all.")] = 0
    min_p: Annotated[float, _sampling("--min-p", "Least probability, relative to the likeliest.")] = 0.0
    repetition_penalty: Annotated[float, _sampling("--repetition-penalty", "1: none.")] = 1.0
    presence_penalty: Annotated[float, _sampling("--presence-penalty", "0: none.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("--frequency-penalty", "0: none.")] = 0.0
    seed: Annotated[int | None, _sampling("--seed", "Of the random numbers.")] = None
    n: Annotated[int, _sampling("--n", "Choices.", min=1)] = 1
    best_of: Annotated[int | None, _sampling("--best-of", "Sequences, of which the --n likeliest are choices.")] = None
    stop: Annotated[list[str] | None, _sampling("--stop", "String that ends the text; may be repeated.")] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", "Go on past the end of text.")] = False

    def params(self) -> SamplingParams:
        """Raises ConfigError."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            n=self.n,
            best_of=self.best_of,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
        )


def generate(flags: GenerateFlags) -> None:
    """Generate text offline, on an engine in this process, to stdout.

    Example: pagetier generate --chat --prompt "Name three colours." --max-tokens 32
    """
    require_engine("generate")
    params = flags.params()
    tiers = parse_tiers(flags.kv_tier)
    redis_url = default_redis_url()
    StoreConfig(tiers=tiers, redis_url=redis_url)  # refuses an unknown tier before the model is loaded
    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    if not prompt:
        raise ConfigError.bad_value("--prompt", prompt, "at least one character")
    if flags.cpu_kernels not in CPU_KERNELS:
        raise ConfigError.bad_value("--cpu-kernels", flags.cpu_kernels, ", ".join(CPU_KERNELS))
    from pagetier.engine.llm import LLM

    options: dict[str, Any] = {"dtype": flags.dtype, "device": flags.device, "redis_url": redis_url}
    options |= {"threads": flags.threads, "cpu_kernels": flags.cpu_kernels}
    with LLM(flags.model, kv_tier=tiers, **options) as llm:
        start_s = time.monotonic()
        answer = (
            llm.chat([{"role": "user", "content": prompt}], params) if flags.chat else llm.generate(prompt, params)[0]
        )
        elapsed_s = time.monotonic() - start_s
    if flags.as_json:
        choices = [
            {"index": c.index, "text": c.text, "finish_reason": c.finish_reason, "token_ids": c.token_ids}
            for c in answer.outputs
        ]
        fields = {
            "model": flags.model,
            "prompt_tokens": len(answer.prompt_token_ids),
            "completion_tokens": sum(len(c.token_ids) for c in answer.outputs),
            "cached_tokens": sum(answer.cached_tokens.values()),
            "cached_tokens_by_tier": answer.cached_tokens,
            "elapsed_s": round(elapsed_s, 4),
            "choices": choices,
        }
        typer.echo(json.dumps(fields, ensure_ascii=False, indent=2))
        return
    for choice in answer.outputs:
        if len(answer.outputs) > 1:
            typer.echo(f"--- choice {choice.index}")
        typer.echo(choice.text)


def pull(
    name: Annotated[str, typer.Argument(help="smollm2, or org/name on the Hugging Face hub.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")] = False,
) -> None:
    """Fetch a model into the cache folder, with progress and checksum; prints where it lies.

    Example: pagetier pull smollm2
    """
    require_engine("pull")
    from pagetier.engine.pull import pull as fetch

    path = fetch(name)
    typer.echo(json.dumps({"model": name, "path": str(path)}) if as_json else str(path))


def demo(
    model: Annotated[str, typer.Option("--model", help="smollm2, a folder or .gguf file, or org/name.")] = "smollm2",
    dtype: Annotated[str, typer.Option("--dtype", help=f"{', '.join(DTYPES)}.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")] = False,
) -> None:
    """Show what the tiers do for time to first token: one 2,000-token system prompt, four times.

    Computed on replica 1 (cold), again from its device pool (device), after its restart from NVMe (nvme), and on
    replica 2, whose own NVMe folder is empty, from the Redis that both share (redis). Exit code 1 when a tier did not
    serve its step or the outputs differ.

    Example: pagetier demo --dtype float32
    """
    require_engine("demo")
    if dtype not in DTYPES:
        raise ConfigError.bad_value("--dtype", dtype, ", ".join(DTYPES))
    from pagetier.engine.demo import DemoOptions, run_demo
    from pagetier.engine.pull import resolve_model

    path: Path = resolve_model(model, progress=True)
    report = run_demo(DemoOptions(model, path, dtype), Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(report.as_dict(), ensure_ascii=False, indent=2))
    else:
        report.print_to(Console())
    findings = report.findings()
    for finding in findings:
        typer.echo(f"pagetier demo: {finding}", err=True)
    if findings:
        raise typer.Exit(1)
