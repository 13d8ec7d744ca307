"""`pagetier stats` against a small HTTP server that answers what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console

from pagetier.kvstore.cli.live import LiveServer
from pagetier.kvstore.cli.stats import Look, render, watch_lines
from pagetier.kvstore.errors import PagetierError

TIER = {
    "hit_blocks": 10,
    "hit_tokens": 160,
    "hit_rate": 0.16,
    "blocks": 12,
    "bytes": 3 << 20,
    "capacity_bytes": 1 << 30,
    "evictions": 0,
    "errors": 0,
    "corrupt": 0,
    "breaker": None,
}
STATS: dict[str, Any] = {
    "model": "smollm2",
    "domain": "ab" * 32,
    "uptime_s": 3723.4,
    "lookup": {"lookup_tokens": 1000, "hit_tokens": 400, "hit_rate": 0.4},
    "tiers": {
        "device": TIER,
        "nvme": TIER | {"hit_rate": 0.24, "hit_tokens": 240, "breaker": "closed"},
        "redis": TIER | {"hit_rate": 0.0, "hit_tokens": 0, "breaker": "half-open", "errors": 3, "corrupt": 1},
    },
    "preemptions": {"recompute": 2, "swap": 1},
    "harmful_hits": 0,
}


class _Answers(BaseHTTPRequestHandler):
    status, body = 200, b""
    asked: ClassVar[list[tuple[str, str | None]]] = []  # path and authorization

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Answers]]]:
    class Answers(_Answers):
        body = json.dumps(STATS).encode()
        asked: ClassVar[list[tuple[str, str | None]]] = []

    with HTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", Answers
        http.shutdown()
        thread.join()


def shown(answer: dict[str, Any]) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(render(answer))
    return capture.get()


def fetch_stats(url: str) -> dict[str, Any]:
    return LiveServer(url).get("/stats")


def pagetier(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagetier.cli", "stats", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environ)


def test_json_is_the_servers_answer(server: tuple[str, Any]) -> None:
    ran = pagetier("--json", PAGETIER_URL=server[0])
    assert ran.returncode == 0 and json.loads(ran.stdout) == STATS


def test_the_table_has_a_line_per_tier_and_the_total(server: tuple[str, Any]) -> None:
    ran = pagetier("--url", server[0], COLUMNS="80")
    assert ran.returncode == 0
    lines = {line.split()[1]: line for line in ran.stdout.splitlines() if line.startswith(("│", "|"))}
    assert "16.0%" in lines["device"] and "ok" in lines["device"]
    assert "24.0%" in lines["nvme"]
    assert "40.0%" in lines["all"] and "400" in lines["all"]
    assert "…" not in lines["device"], "fits 80 columns"


def test_what_is_wrong_with_a_tier_is_said_in_words() -> None:
    text = shown(STATS)
    assert "breaker half-open, 3 errors, 1 corrupt" in text
    assert "shadow" not in text and "given up" not in text
    assert "loads given up 3" in " ".join(shown(STATS | {"given_up_loads": 3}).split())
    verify = {"shadow_one_in": 1000, "checked": 2000, "differing": 1, "skipped": 0}
    assert "shadow check: 1 of 2,000 checked blocks were wrong" in " ".join(shown(STATS | {"verify": verify}).split())
    assert "up 1:02:03" in text and "400 of 1,000 lookup tokens" in text and "preemptions 3" in text


def test_a_store_of_several_domains_shows_each() -> None:
    text = shown({"domains": [STATS, STATS | {"domain": "cd" * 32}]})
    assert "abababababab" in text and "cdcdcdcdcdcd" in text


def test_errors_say_what_to_do(server: tuple[str, Any]) -> None:
    url, answers = server
    answers.status, answers.body = 503, b'{"error": {"message": "the engine died: x"}}'
    with pytest.raises(PagetierError, match="answered 503 to /stats: the engine died: x"):
        fetch_stats(url)
    answers.body = b"<html>"
    with pytest.raises(PagetierError, match="answered 503 to /stats: Service Unavailable"):
        fetch_stats(url)
    answers.status = 200
    for body in (b"<html>", b"[]"):
        answers.body = body
        with pytest.raises(PagetierError, match="give its address with --url"):
            fetch_stats(url)
    with pytest.raises(PagetierError, match="start one with 'pagetier serve'"):
        fetch_stats("http://127.0.0.1:9")
    with pytest.raises(PagetierError, match="no Pagetier server answers at nonsense"):
        fetch_stats("nonsense")


def test_watch_in_json_is_one_object_a_line(server: tuple[str, Any]) -> None:
    command = [
        sys.executable,
        "-m",
        "pagetier.cli",
        "stats",
        "--json",
        "--watch",
        "--interval",
        "0.1",
        "--url",
        server[0],
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert [json.loads(process.stdout.readline()) for _ in range(2)] == [STATS, STATS]
        process.stdout.close()
        process.wait(10)
        assert process.stderr.read() == "", "a reader that leaves is no reason to complain"


def test_an_openai_base_url_is_understood_and_the_key_is_sent(server: tuple[str, Any]) -> None:
    url, answers = server
    assert LiveServer(f"{url}/v1/", "secret").get("/stats") == STATS
    assert answers.asked == [("/stats", "Bearer secret")]


def test_no_secret_of_an_address_is_shown() -> None:
    with pytest.raises(PagetierError) as told:
        LiveServer("http://me:secret@127.0.0.1:9").get("/stats")
    assert "secret" not in str(told.value) and "//…@127.0.0.1:9" in str(told.value)


LATER: dict[str, Any] = STATS | {
    "uptime_s": 3725.4,
    "lookup": {"lookup_tokens": 1200, "hit_tokens": 550, "hit_rate": 550 / 1200},
    "tiers": STATS["tiers"] | {"nvme": STATS["tiers"]["nvme"] | {"hit_tokens": 290}},
}


def look(answer: dict[str, Any] | None, before: dict[str, Any] | None, error: PagetierError | None = None) -> Look:
    return Look(answer, error, before, time_s=0.0, passed_s=2.0)


def test_watch_tells_what_happened_since_the_last_look() -> None:
    (line,) = watch_lines(look(LATER, STATS))
    assert line.split("  ")[1:-1] == [
        "abababababab",
        "lookup 100 tok/s",
        "hit 75.0%",
        "device 0.0%",
        "nvme 25.0%",
        "redis 0.0%",
    ]
    assert line.endswith("redis breaker half-open, 3 errors, 1 corrupt")
    (idle,) = watch_lines(look(STATS, STATS))
    assert "lookup 0 tok/s  hit -  device -" in idle


def test_watch_begins_anew_with_a_server_that_did() -> None:
    restarted = LATER | {"uptime_s": 12.0}
    (line,) = watch_lines(look(restarted, STATS))
    assert "lookup 100 tok/s  hit 45.8%" in line, "1,200 tokens in 12 s"
    (line,) = watch_lines(look(None, STATS, PagetierError("no Pagetier server answers")))
    assert line.endswith("no Pagetier server answers")


def test_watch_into_a_pipe_is_lines(server: tuple[str, Any]) -> None:
    command = [sys.executable, "-m", "pagetier.cli", "stats", "--watch", "--interval", "0.1", "--url", server[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.stdout.close()
        process.wait(10)
        assert process.stderr.read() == ""
    assert all("lookup " in line and "\x1b" not in line for line in lines)


def test_shells_complete_commands_and_flags() -> None:
    asked = {"_PAGETIER_COMPLETE": "complete_bash", "COMP_WORDS": "pagetier st", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['pagetier']; from pagetier.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | asked)
    assert "stats" in ran.stdout.split(), ran.stderr
