"""Start, death and orderly end of the two processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from pagetier.engine.messages import EngineRequest
from pagetier.engine.sampling_params import SamplingParams
from pagetier.engine.server import wire
from pagetier.engine.server.engine_client import EngineClient, EngineDeadError
from pagetier.engine.server.engine_host import EngineOrder, ProcessHost
from pagetier.engine.server.engine_process import outputs_endpoint, requests_endpoint
from pagetier.kvstore.errors import ConfigError
from tests.engine.server.stack import FACTORY, ROOT, Stack, importable, running_stack
from tests.engine.server.test_app import PATIENCE_S, wait_until

ENDLESS = {"prompt": "abc", "ignore_eos": True, "max_tokens": 1 << 19}
STREAM = ENDLESS | {"stream": True}
LIMITS = {"max_len_tokens": 1 << 20}


def engine_pid(stack: Stack) -> int:
    assert isinstance(stack.host, ProcessHost) and stack.host.pid is not None
    return stack.host.pid


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_killed_engine_ends_requests_and_fails_health(streamed: bool) -> None:
    with running_stack(process=True, step_s=0.05, limits=LIMITS) as stack:
        answers: list[httpx.Response] = []
        body = ENDLESS | {"stream": streamed}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{stack.url}/v1/completions", json=body, timeout=3 * PATIENCE_S))
        )
        client.start()
        wait_until(lambda: stack.service.client.num_open == 1)
        os.kill(engine_pid(stack), signal.SIGKILL)
        wait_until(lambda: stack.http.get("/health").status_code == 503)
        client.join(PATIENCE_S)
        assert "killed by signal 9" in answers[0].text
        if streamed:
            assert answers[0].text.endswith("data: [DONE]\n\n")
        else:
            assert answers[0].status_code == 503
        after = stack.http.post("/v1/completions", json={"prompt": "a"})
        assert (after.status_code, after.json()["error"]["code"]) == (503, "engine_dead")
        assert stack.http.get("/stats").status_code == stack.http.get("/ready").status_code == 503
        assert stack.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("process", [False, True])
def test_an_engine_that_raises_says_why(process: bool) -> None:
    with running_stack(process=process) as stack:
        answer = stack.http.post("/v1/completions", json={"prompt": "CRASH"})
        assert answer.status_code == 503
        assert "RuntimeError: the double was told to crash" in answer.json()["error"]["message"]
        wait_until(lambda: stack.http.get("/health").status_code == 503)


def test_a_hung_engine_is_busy_first_and_unhealthy_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetier.engine.server.app.HEALTH_TIMEOUT_S", 0.05)
    with running_stack(process=True) as stack:
        os.kill(engine_pid(stack), signal.SIGSTOP)
        try:
            assert stack.http.get("/health").json() == {"status": "ok", "engine": "busy"}
            monkeypatch.setattr("pagetier.engine.server.engine_client.HUNG_S", 0.1)
            wait_until(lambda: stack.http.get("/health").status_code == 503)
        finally:
            os.kill(engine_pid(stack), signal.SIGCONT)
        wait_until(lambda: stack.http.get("/health").json()["status"] == "ok")


def test_malformed_messages_are_dropped_on_both_ends() -> None:
    with running_stack(process=True) as stack:
        directory = stack.service.client.directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        foreign = msgpack.packb([wire.VERSION + 1, "Abort", [["x"]]])
        context = zmq.Context()
        for endpoint in (requests_endpoint(directory), outputs_endpoint(directory)):
            with context.socket(zmq.PUSH) as socket:
                socket.setsockopt(zmq.LINGER, 1000)
                socket.connect(endpoint)
                for data in (b"", b"\xc1", b"nonsense" * 100, foreign, wire.encode(wire.Failed("x", True))[:-1]):
                    socket.send(data)
                socket.send_multipart([b"two", b"frames"])
                socket.send(wire.encode(wire.StatsQuery(1) if "outputs" in endpoint else wire.StatsAnswer(1, {})))
        context.term()
        wait_until(lambda: stack.service.client.num_dropped == 7)
        assert stack.post("/v1/completions", {"prompt": "still"})["choices"][0]["text"] == "still"


def test_ids_in_use_and_unknown_ids_harm_nobody() -> None:
    with running_stack(process=True, step_s=0.02, limits=LIMITS) as stack:
        context = zmq.Context()
        with (
            context.socket(zmq.PUSH) as socket,
            stack.http.stream("POST", "/v1/completions", json=STREAM | {"max_tokens": 100}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            (request_id,) = list(stack.service.client._streams)
            request = EngineRequest(request_id, (1,), SamplingParams(), seed=0)
            socket.connect(requests_endpoint(stack.service.client.directory))
            socket.setsockopt(zmq.LINGER, 1000)
            socket.send(wire.encode(wire.Submit(request)))
            socket.send(wire.encode(wire.Abort(("unknown",))))
            rest = "".join(lines)
        context.term()
        assert '"finish_reason":"length"' in rest


def test_nothing_is_left_behind() -> None:
    with running_stack(process=True) as stack:
        pid, directory = engine_pid(stack), stack.service.client.directory
        assert sorted(path.name for path in directory.iterdir()) == ["outputs.sock", "requests.sock"]
    assert gone(pid)
    assert not directory.exists()


def test_an_idle_engine_sleeps() -> None:
    with running_stack(process=True) as stack:
        pid = engine_pid(stack)

        def cpu_ticks() -> int:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        stack.stats()
        before = cpu_ticks()
        time.sleep(0.5)
        assert cpu_ticks() - before <= 5, "50 ms of CPU in half a second would be a busy loop"


@pytest.mark.parametrize(
    ("fail", "kind", "words"),
    [
        ("usage", ConfigError, "--kv-tier: got 'x'; allowed: nvme, redis"),
        ("bug", EngineDeadError, "RuntimeError: unexpected"),
        ("death", EngineDeadError, "engine process ended with status 7"),
    ],
)
def test_a_failed_start_is_told_in_the_engines_words(fail: str, kind: type[Exception], words: str) -> None:
    async def start() -> None:
        with importable():
            async with EngineClient(ProcessHost(EngineOrder({"fail": fail}, FACTORY))):
                pass

    with pytest.raises(kind, match=re.escape(words)):
        asyncio.run(start())


@dataclass
class Program:
    """folder: where the server makes the sockets' folder."""

    process: subprocess.Popen[str]
    url: str
    folder: Path

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])


@contextlib.contextmanager
def program(**options: Any) -> Iterator[Program]:
    command = [sys.executable, "-m", "tests.engine.server.double_server", json.dumps(options)]
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "TMPDIR": folder}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with process:
            try:
                assert process.stdout is not None
                yield Program(process, process.stdout.readline().strip(), Path(folder))
            finally:
                process.kill()


def test_sigterm_lets_running_requests_finish_and_writes_puts(tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    with program(step_s=0.02, close_mark=str(mark), close_s=0.2, limits=LIMITS, shutdown_timeout_s=10.0) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM | {"max_tokens": 50}) as one:
            lines = one.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(server))
            rest = list(lines)
        assert '"finish_reason":"length"' in "".join(rest) and rest[-2] == "data: [DONE]"
        assert server.process.wait(PATIENCE_S) == 0
    assert float(mark.read_text()) > 4.0, "the store had most of the time-out left to write in"


def refuses(server: Program) -> bool:
    try:
        return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 503
    except httpx.ConnectError:
        return True


def test_sigterm_ends_long_requests_with_an_error_in_time(tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    with program(step_s=0.2, close_mark=str(mark), shutdown_timeout_s=4.0, limits=LIMITS) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = "".join(lines)  # hours, had it been left to end by itself
        assert "the server is shutting down" in rest and rest.endswith("data: [DONE]")
        assert server.process.wait(PATIENCE_S) == 0
    assert float(mark.read_text()) > 0.1, "part of the time-out was kept for the store"


def test_sigterm_to_the_engine_alone_finishes_what_runs() -> None:
    with program(step_s=0.02, limits=LIMITS) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM | {"max_tokens": 50}) as one:
            lines = one.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGTERM)
            assert '"finish_reason":"length"' in "".join(lines)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)


def test_a_killed_server_takes_its_engine_along() -> None:
    with program() as server:
        pid = server.engine_pid()
        assert len(list(server.folder.iterdir())) == 1
        server.process.kill()
        wait_until(lambda: gone(pid))
        assert not list(server.folder.iterdir()), "the engine removes the sockets' folder: nobody else can"


def test_an_idle_server_ends_at_once() -> None:
    with program(shutdown_timeout_s=10 * PATIENCE_S) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert server.process.stderr is not None and server.process.stderr.read() == ""


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/stats", "/v1/requests/x", "/query?prompt=a", "/top", "/pins", "/doctor")),
        *(("POST", path) for path in ("/query", "/pin", "/unpin", "/purge", "/admin/weights_version")),
    ],
)
def test_an_engine_that_does_not_answer_is_503_and_says_so(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route that asks it."""

    async def silence(*_args: Any) -> None:
        raise TimeoutError

    with running_stack() as stack:
        monkeypatch.setattr(EngineClient, "_ask", silence)
        bodies = {path: {"prompt": "a"} for path in ("/query", "/pin", "/unpin", "/purge")}
        answer = stack.http.request(method, path, json=bodies.get(path))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_silent"), answer.text
        assert stack.http.get("/metrics").status_code == 200
