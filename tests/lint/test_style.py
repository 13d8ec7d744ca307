"""What ruff and mypy do not check of the style: sizes, file names, reasons beside broad excepts, environment reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.lint.source_tree import ROOT, is_generated, product_files, relative, suite_files, tree_of

MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_FILE_LINES = 600
NO_NOUNS = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "misc.py"}
BROAD = {"Exception", "BaseException"}
# Where the environment may be read; `places.py` finds the cache folder, the command lines hand flags' defaults down.
ENVIRONMENT_READERS = {"config.py", "places.py", "cli.py"}


def checked_files() -> Iterator[Path]:
    yield from (path for path in (*product_files(), *suite_files()) if not is_generated(path))


def function_limit(path: Path) -> int:
    return MAX_KERNEL_LINES if path.is_relative_to(ROOT / "kernels") else MAX_FUNCTION_LINES


def has_reason(lines: list[str], line: int) -> bool:
    """Whether source line `line` (from 1), or the first below it, has a comment that is more than a lint mark."""
    comments = [source.partition("#")[2] for source in lines[line - 1 : line + 1]]
    return any(re.sub(r"noqa(: ?[A-Z0-9, ]+)?|type: ignore\S*|[#\s]", "", comment) for comment in comments)


def names_in(node: ast.expr | None) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} if node is not None else set(BROAD)


def test_functions_are_short() -> None:
    long = [
        f"{relative(path)}:{node.lineno} {node.name} has {length} lines, at most {function_limit(path)}"
        for path in checked_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > function_limit(path)
    ]
    assert not long, "\n".join(long)


def test_files_are_short() -> None:
    long = {
        relative(path): num for path in checked_files() if (num := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"more than {MAX_FILE_LINES} lines: {long}"


def test_a_file_is_a_noun() -> None:
    vague = [relative(path) for path in checked_files() if path.name in NO_NOUNS]
    assert not vague, f"name these for what they hold: {vague}"


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether it only cleans up: its last statement is a bare raise."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def logs_it(handler: ast.ExceptHandler) -> bool:
    """Whether its first statement logs the traceback, with a message that says what comes of it."""
    first = handler.body[0]
    call = first.value if isinstance(first, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "exception"


def test_broad_excepts_say_why() -> None:
    silent = []
    for path in checked_files():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler) or not names_in(node.type) & BROAD:
                continue
            explained = passes_on(node) or logs_it(node) or has_reason(lines, node.lineno)
            if node.type is None or not explained:
                silent.append(f"{relative(path)}:{node.lineno}")
    assert not silent, f"no reason given beside a broad except: {silent}"


def environment_reads(path: Path) -> Iterator[ast.Attribute]:
    """os.environ and os.getenv, save where a child is handed all of it: `{**os.environ, ...}` or `os.environ | ...`."""
    nodes = list(ast.walk(tree_of(path)))
    handed_on = {id(value) for node in nodes if isinstance(node, ast.Dict) for value in node.values}
    handed_on |= {id(node.left) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in handed_on:
            yield node


def test_the_environment_is_read_in_few_places() -> None:
    files = [path for path in product_files() if path.name not in ENVIRONMENT_READERS]
    readers = [f"{relative(path)}:{node.lineno}" for path in files for node in environment_reads(path)]
    assert not readers, f"read the environment in a folder's config.py, not in {readers}"


def test_a_reason_is_told_from_a_lint_mark() -> None:
    lines = ["except Exception:  # noqa: BLE001", "pass", "except Exception:  # a thread's edge", "except Exception:"]
    lines.append("return 0  # why")
    assert [has_reason(lines, line) for line in (1, 3, 4)] == [False, True, True]
