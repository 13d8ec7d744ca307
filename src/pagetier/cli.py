"""The `pagetier` command: puts the folders' commands together, and turns every error into one line and an exit code.

Exit codes: 0 fine, 1 a finding or a fault, 2 wrong usage.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Annotated

import typer

from pagetier import __version__
from pagetier.benchmarks.cli import bench
from pagetier.engine.cli import add_commands as add_engine_commands
from pagetier.engine.cli import load_text_model
from pagetier.kvstore.cli import add_commands as add_store_commands
from pagetier.kvstore.errors import ConfigError, PagetierError
from pagetier.kvstore.service.cli import add_commands as add_service_commands

app = typer.Typer(
    name="pagetier",
    help="LLM serving whose KV cache is one content-addressed store over device, host, NVMe and Redis.\n\n"
    "Start here: pagetier serve --model smollm2 --kv-tier nvme,redis",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Typer's base of all usage errors; it has moved between modules, its name has not.
USAGE_ERROR = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagetier {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


add_engine_commands(app)
add_store_commands(app, load_text_model)
add_service_commands(app)
app.command("bench")(bench)
for _command in app.registered_commands:  # a docstring's lines are not those of the terminal
    _text = inspect.cleandoc((_command.callback and _command.callback.__doc__) or "")
    _command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _text.split("\n\n"))


def main() -> None:
    """Run the command line and exit."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines say what ours say
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has gone: `pagetier stats --watch | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except ConfigError as error:
        code = _fail(str(error), 2)
    except PagetierError as error:
        code = _fail(str(error), 1)
    except typer.Abort:
        code = 130
    except Exception as error:  # the process's boundary: a bug, told in one line unless asked for more
        if isinstance(error, USAGE_ERROR):
            code = _usage(error)
        elif os.environ.get("PAGETIER_DEBUG"):
            raise
        else:
            kind = type(error).__name__
            code = _fail(f"{kind}: {' '.join(str(error).split())} (PAGETIER_DEBUG=1 shows where; please report it)", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    typer.echo(f"pagetier: {message}", err=True)
    return code


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "pagetier"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = message or "no command was given"  # the help is on stdout already, and says nothing of why
    return _fail(f"{' '.join(message.split())} (see {path} --help)", 2)


if __name__ == "__main__":
    main()
