"""The JSON lines between the benchmarks and a peer's process, with a peer that has no model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagetier.benchmarks.peer import SCRIPTS, Peer, PeerError, Settings, find_environment
from pagetier.benchmarks.workload import Request

FAKE = Path(__file__).parent / "fake_peer.py"
REQUESTS = [Request([5, 6], 3), Request([40], 1)]

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="an installed wheel has no peers")


@contextmanager
def fake(model: str) -> Iterator[Peer]:
    with Peer(Path(sys.executable), FAKE, Settings(model, "bfloat16", threads=1)) as peer:
        yield peer


def test_requests_are_answered_in_order_whatever_the_peer_prints() -> None:
    with fake("fine") as peer:
        assert 0.0 <= peer.wait_ready() < 60.0
        assert peer.version == "fake 1.0"
        for _ in range(2):
            outputs, elapsed_s = peer.generate(REQUESTS)
            assert outputs == [[7, 8, 9], [41]]
            assert 0.0 <= elapsed_s < 10.0
        assert peer.started_s < time.perf_counter()


def state_of(peer: Peer) -> str:
    stat = Path(f"/proc/{peer.pid}/stat").read_text()
    return stat[stat.rindex(")") + 2]


def test_a_paused_peer_stands_still_until_it_is_asked() -> None:
    with fake("fine") as peer:
        peer.wait_ready()
        peer.pause()
        until = time.monotonic() + 10.0
        while state_of(peer) != "T" and time.monotonic() < until:
            time.sleep(0.01)
        assert state_of(peer) == "T"
        peer.pause()
        assert peer.generate(REQUESTS)[0] == [[7, 8, 9], [41]]
        assert state_of(peer) != "T"
        peer.pause()  # and is ended all the same


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("absent", "FileNotFoundError: no such model"),
        ("fails", "ValueError: this prompt is not for me"),
        ("short", r"\[2, 0\] new tokens, not \[3, 1\]"),
        ("dies", "the peer has ended: out of luck"),
    ],
)
def test_a_peer_that_fails_says_why(model: str, reason: str) -> None:
    with fake(model) as peer, pytest.raises(PeerError, match=reason):
        peer.wait_ready()
        peer.generate(REQUESTS)


def test_a_peer_that_has_ended_is_not_asked_again() -> None:
    with fake("dies") as peer:
        peer.wait_ready()
        for _ in range(2):
            with pytest.raises(PeerError, match="has ended"):
                peer.generate(REQUESTS)


def test_a_missing_environment_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path))
    with pytest.raises(PeerError, match=r"benchmarks/peers/setup\.sh vllm"):
        find_environment("vllm")
    (tmp_path / "peers" / "vllm").mkdir(parents=True)
    (tmp_path / "peers" / "vllm" / "ready-1").touch()
    assert find_environment("vllm") == tmp_path / "peers" / "vllm" / "bin" / "python"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*_peer.py")), ids=lambda path: path.stem)
def test_peers_import_nothing_of_this_project(path: Path) -> None:
    """Their environments have none of it; their engines load when they are opened."""
    text = path.read_text(encoding="utf-8")
    assert "pagetier" not in text
    assert "def open_engine(settings: dict[str, Any]) -> Engine:" in text
