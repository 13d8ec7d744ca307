"""Faults under a running engine on the real model: no request fails, tokens stay the same, and tiers come back.

Pools are small, so that a document that comes again was evicted from the device meanwhile and must come from below.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import redis

from pagetier.engine.build import Engine
from pagetier.engine.messages import EngineRequest
from pagetier.kvstore.block import BlockStatus, Part
from pagetier.kvstore.keys import chain_names
from pagetier.kvstore.nvme.fault_fs import BY_PATH, GROWING, FaultFS
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.redis.embedded import stop_embedded
from pagetier.kvstore.redis.rendezvous import Rendezvous
from pagetier.kvstore.tier import BlockRead
from tests.e2e.smollm2 import (  # noqa: F401
    KV_BYTES,
    Answer,
    Traced,
    assert_same,
    cold_answers,
    engine_of,
    request,
    run,
    smollm2,
    text_ids,
)
from tests.kvstore.valkey import own_valkey, short_dir

BLOCK_SIZE = 16
PART = Part(0, 0, 30, 0, 3)
NVME_SIZE = 1 << 30  # of the folders that a killed child writes; nothing is evicted
F32 = npt.NDArray[np.float32]
BACK_S = 60.0  # a breaker that opened twice is tried again well within


# ---- documents that come again and again


@pytest.fixture(scope="module")
def documents(text_ids: list[int]) -> list[EngineRequest]:  # noqa: F811
    """Four prompts of seven blocks and a bit, no two of which fit the pool of `small` together."""
    return [request(f"d{i}", text_ids[i * 300 : i * 300 + 117], 6) for i in range(4)]


@pytest.fixture(scope="module")
def cold(smollm2: Path, documents: list[EngineRequest]) -> dict[str, Answer]:  # noqa: F811
    return cold_answers(smollm2, documents)


def rounds_of(documents: Sequence[EngineRequest], num_rounds: int, gap_steps: int = 4) -> list[Traced]:
    """The documents in turn, again and again; names are d<document>-<round>."""
    return [
        Traced(replace(spec, request_id=f"{spec.request_id}-{i}"), arrives=(i * len(documents) + j) * gap_steps)
        for i in range(num_rounds)
        for j, spec in enumerate(documents)
    ]


def check(answers: dict[str, Answer], cold: dict[str, Answer]) -> None:
    assert_same(answers, {name: cold[name.split("-")[0]] for name in answers})


def comes_back(engine: Engine, tier: str, documents: Sequence[EngineRequest], cold: dict[str, Answer]) -> None:
    """Within BACK_S of ordinary traffic the tier serves hits again, and its breaker is closed."""
    give_up_s = time.monotonic() + BACK_S
    while True:
        answers = run(engine, rounds_of(documents, 1))
        check(answers, cold)
        state = engine.core.stats()["tiers"][tier]
        if any(answer.cached_tokens.get(tier) for answer in answers.values()) and state["breaker"] == "closed":
            return
        assert time.monotonic() < give_up_s, state


def at(when: int, strike: Callable[[], object]) -> Callable[[int], None]:
    """Strike once, before step `when`."""

    def before_step(step: int) -> None:
        if step == when:
            strike()

    return before_step


class Fault:
    """To be called before each step: strikes before step `at`, and ends once the engine noticed: the tier's breaker
    opened."""

    def __init__(self, engine: Engine, tier: str, at: int, strike: Callable[[], object], end: Callable[[], object]):
        self._engine, self._tier, self._at, self._strike, self._end = engine, tier, at, strike, end
        self._struck = False
        self.was_noticed = False

    def __call__(self, step: int) -> None:
        if step == self._at:
            self._struck = True
            self._strike()
        breaker = self._engine.core.stats()["tiers"][self._tier]["breaker"]
        if self._struck and not self.was_noticed and breaker == "open":
            self.was_noticed = True
            self._end()


# ---- Valkey


def test_valkey_stopped_and_continued(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
) -> None:
    """SIGSTOP is worse than death: it accepts connections and says nothing."""
    with own_valkey() as server, engine_of(smollm2, ("redis",), num_tokens=192, redis_url=server.url) as engine:
        fault = Fault(engine, "redis", 7, server.freeze, server.thaw)
        check(run(engine, rounds_of(documents, 3), fault), cold)
        assert fault.was_noticed
        comes_back(engine, "redis", documents, cold)


def test_valkey_stopped_behind_nvme(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
    tmp_path: Path,
) -> None:
    """One silent tier takes nothing from the other."""
    tiers, folder = ("nvme", "redis"), tmp_path / "nvme"
    with (
        own_valkey() as server,
        engine_of(smollm2, tiers, num_tokens=192, redis_url=server.url, nvme_path=folder) as engine,
    ):
        server.freeze()
        check(run(engine, rounds_of(documents, 1)), cold)
        give_up_s, served = time.monotonic() + BACK_S, [0]
        while set(served) != {112}:  # on a busy machine a save or a load may miss its budget: the next one need not
            assert time.monotonic() < give_up_s, served
            answers = run(engine, rounds_of(documents, 1))
            check(answers, cold)
            served = [answer.cached_tokens.get("nvme", 0) for answer in answers.values()]
        server.thaw()


def test_valkey_killed_and_started_again(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
) -> None:
    """It comes back empty: what was stored there is missing, not an error, and is stored anew."""
    with own_valkey() as server, engine_of(smollm2, ("redis",), num_tokens=192, redis_url=server.url) as engine:
        fault = Fault(engine, "redis", 19, server.kill, server.start)
        check(run(engine, rounds_of(documents, 3), fault), cold)
        assert fault.was_noticed
        comes_back(engine, "redis", documents, cold)


def test_valkey_full(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
) -> None:
    """Nothing new is stored and nothing is wrong: what is there is served, and the rest when there is room again."""
    with own_valkey(maxmemory_policy="noeviction") as server:
        client = server.client()
        client.config_set("maxmemory", 1 << 20)
        with engine_of(smollm2, ("redis",), num_tokens=192, redis_url=server.url) as engine:
            check(run(engine, rounds_of(documents, 2)), cold)
            assert client.info("errorstats")["errorstat_OOM"]["count"] > 0
            client.config_set("maxmemory", 0)
            comes_back(engine, "redis", documents, cold)


def test_valkeys_password_changed(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
) -> None:
    """Who is in is thrown out and comes in no more, until the password is the known one again."""
    with own_valkey(requirepass="first") as server:
        client = server.client(password="first")

        def change() -> None:
            client.config_set("requirepass", "second")
            client.client_kill_filter(_type="normal", skipme=True)

        url = f"unix://:first@{server.socket_path}"
        with engine_of(smollm2, ("redis",), num_tokens=192, redis_url=url) as engine:
            fault = Fault(engine, "redis", 7, change, lambda: client.config_set("requirepass", "first"))
            check(run(engine, rounds_of(documents, 3), fault), cold)
            assert fault.was_noticed
            comes_back(engine, "redis", documents, cold)


@pytest.fixture
def cache_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own. Afterwards its Valkey has ended and it is gone."""
    folder = short_dir()
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(folder))
    yield folder
    stop_embedded(folder / "redis")
    shutil.rmtree(folder)


def test_embedded_valkey_killed(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
    cache_dir: Path,
) -> None:
    """Its supervisor brings it back; the engine notices by itself."""

    def server_pid() -> int:
        client = redis.Redis(unix_socket_path=str(Rendezvous(cache_dir / "redis").socket_path))
        pid = int(client.info("server")["process_id"])
        client.close()
        return pid

    with engine_of(smollm2, ("redis",), num_tokens=192, redis_url="embedded", redis_linger_s=0.0) as engine:
        dead = server_pid()
        check(run(engine, rounds_of(documents, 2), at(19, lambda: os.kill(dead, signal.SIGKILL))), cold)
        comes_back(engine, "redis", documents, cold)
        assert server_pid() != dead


# ---- NVMe


def test_nvme_folder_removed(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "nvme"
    with engine_of(smollm2, ("nvme",), num_tokens=192, nvme_path=folder) as engine:
        check(run(engine, rounds_of(documents, 3), at(19, lambda: shutil.rmtree(folder, ignore_errors=True))), cold)
        comes_back(engine, "nvme", documents, cold)
    assert list(folder.glob("[0-9][0-9]/*")), "the tier writes where people can find it"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultFS:
    """What the NVMe tier of an engine built from now on does its work through."""
    files = FaultFS()
    monkeypatch.setattr("pagetier.kvstore.nvme.tier.NvmeTier", partial(NvmeTier, files=files))
    return files


DISK_FAULTS: dict[str, Callable[[FaultFS], None]] = {
    "full": lambda disk: disk.broken(*GROWING, code=errno.ENOSPC),
    "read-only": lambda disk: disk.broken(*GROWING, "unlink", "truncate", "chmod", "set_mtime", code=errno.EROFS),
    "permission lost": lambda disk: disk.broken(*BY_PATH, code=errno.EACCES),
    "unmounted": FaultFS.vanish,
    "broken": FaultFS.broken,
}


@pytest.mark.parametrize("when", [pytest.param(0, marks=pytest.mark.slow), 19])
@pytest.mark.parametrize(
    "fault",
    [
        "full",
        "permission lost",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("read-only", "unmounted", "broken")),
    ],
)
def test_a_disk_that_fails_and_is_well_again(
    smollm2: Path,  # noqa: F811
    documents: list[EngineRequest],
    cold: dict[str, Answer],
    tmp_path: Path,
    disk: FaultFS,
    fault: str,
    when: int,
) -> None:
    """Before anything is stored, and in the midst of it."""
    with engine_of(smollm2, ("nvme",), num_tokens=192, nvme_path=tmp_path / "nvme") as engine:
        check(run(engine, rounds_of(documents, 3), at(when, lambda: DISK_FAULTS[fault](disk))), cold)
        assert engine.core.stats()["tiers"]["nvme"]["errors"] > 0
        disk.well()
        comes_back(engine, "nvme", documents, cold)


def window(ids: Sequence[int], number: int) -> EngineRequest:
    """The child's requests: six full blocks of text and a bit, from a different place each."""
    start = (number * 61) % (len(ids) - 100)
    return request(f"w{number}", ids[start : start + 100], 1)


def write_until_killed(model: Path, folder: Path, first: int, ids: list[int]) -> None:
    """The child: fill the NVMe tier and say the number of each window that was computed."""
    with engine_of(model, ("nvme",), nvme_path=folder, nvme_size=NVME_SIZE, nvme_fsync="always") as engine:
        for number in range(first, first + 10_000):
            run(engine, [Traced(window(ids, number))])
            os.write(1, b"%d\n" % number)


def killed_child(model: Path, folder: Path, first: int, num_windows: int, rest_s: float) -> list[int]:
    """Let a child write `num_windows` windows and a little more, kill -9 it; the windows it said were computed."""
    command = [sys.executable, "-m", "tests.e2e.test_faults", str(model), str(folder), str(first)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = b"".join(child.stdout.readline() for _ in range(num_windows))
        time.sleep(rest_s)
        child.kill()
        said += child.stdout.read()
    assert child.returncode == -signal.SIGKILL, said
    return [int(line) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]


def blocks_in(folder: Path, engine: Engine, requests: Sequence[EngineRequest]) -> dict[bytes, F32]:
    """Key -> KV of the requests' blocks that are in the folder. Whatever is not there must be simply missing."""
    found = {}
    with NvmeTier(folder, NVME_SIZE, engine.domain, refresh_s=0) as tier:
        for spec in requests:
            names = chain_names(engine.root_of(""), np.asarray(spec.prompt_ids, np.uint32), BLOCK_SIZE)
            buffers = [np.empty(BLOCK_SIZE * KV_BYTES, np.uint8) for _ in names]
            reads = [BlockRead(name, PART, buffer.data) for name, buffer in zip(names, buffers, strict=True)]
            for read, buffer, status in zip(reads, buffers, tier.get(reads, time.monotonic() + 30.0), strict=True):
                assert status in (BlockStatus.OK, BlockStatus.MISS), status
                if status is BlockStatus.OK:
                    found[read.name.key] = buffer.view(np.float32)
        assert tier.counters().corrupt == 0 and tier.counters().errors == 0
    return found


def kill_and_recover(model: Path, ids: list[int], folder: Path, num_rounds: int) -> None:
    rng, sound = random.Random(num_rounds), folder / "sound"
    with engine_of(model, ("nvme",), nvme_path=sound, nvme_size=NVME_SIZE, pipeline_depth=1) as reference:
        for i in range(num_rounds):
            said = killed_child(model, folder / "killed", i * 100, rng.randrange(2, 5), rng.random() * 0.5)
            fresh = [window(ids, number) for number in (*said, said[-1] + 1)]
            wanted = run(reference, [Traced(spec) for spec in fresh])
            cached = [sum(answer.cached_tokens.values()) for answer in wanted.values()]
            assert max(cached) < BLOCK_SIZE, "the reference is cold, but for first tokens that windows share"
            reference.core.flush(30.0)
            right, found = blocks_in(sound, reference, fresh), blocks_in(folder / "killed", reference, fresh)
            assert len(right) == 6 * len(fresh) and found, (len(right), len(found))
            for key, kv in found.items():
                np.testing.assert_allclose(kv, right[key], rtol=1e-3, atol=1e-3)
            with engine_of(model, ("nvme",), nvme_path=folder / "killed", nvme_size=NVME_SIZE) as engine:
                answers = run(engine, [Traced(spec) for spec in fresh])
                assert {n: a.token_ids for n, a in answers.items()} == {n: a.token_ids for n, a in wanted.items()}
                hits = sum(answer.cached_tokens.get("nvme", 0) for answer in answers.values())
                assert hits == BLOCK_SIZE * len(found) > 0


def test_killed_while_it_writes(smollm2: Path, text_ids: list[int], tmp_path: Path) -> None:  # noqa: F811
    kill_and_recover(smollm2, text_ids, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again(smollm2: Path, text_ids: list[int], tmp_path: Path) -> None:  # noqa: F811
    kill_and_recover(smollm2, text_ids, tmp_path, 12)


if __name__ == "__main__":
    from pagetier.engine.tokenizer import load_tokenizer
    from tests.e2e.smollm2 import TEXT

    checkpoint = Path(sys.argv[1])
    text = load_tokenizer(checkpoint).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    write_until_killed(checkpoint, Path(sys.argv[2]), int(sys.argv[3]), text)
