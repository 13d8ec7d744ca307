"""`pagetier verify` reads everything, finds what is damaged, and changes nothing unless it is told to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetier.cli import main
from pagetier.kvstore.checked import Verdict
from pagetier.kvstore.mac import load_mac_key
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.nvme.verify import FolderAudit
from pagetier.kvstore.record import redis_name
from pagetier.kvstore.redis.tier import RedisTier
from tests.kvstore.test_nvme_scrub import damage, kept, opened
from tests.kvstore.tier_contract import DOMAIN, PAYLOAD_BYTES, addresses, chain, get, put
from tests.kvstore.valkey import Valkey, valkey, valkey_server  # noqa: F401

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagetier", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return (end.value.code, *capsys.readouterr())

    return call


def state_of(path: Path) -> dict[str, tuple[int, int, bytes]]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size, file.read_bytes()) for file in files}


def filled(path: Path, num_blocks: int = 40, **settings: Any) -> NvmeTier:
    tier = opened(path, **settings)
    put(tier, chain(num_blocks))
    tier.put_identity(DOMAIN, b"identity")
    return tier


def test_a_sound_folder_is_read_whole_and_not_changed(tmp_path: Path, run: Run) -> None:
    filled(tmp_path).close()
    before = state_of(tmp_path)
    code, out, err = run("verify", "--nvme", str(tmp_path), "--json")
    report = json.loads(out)
    assert (code, err, report["records"], report["ok"], report["damaged"]) == (0, "", 40, 40, 0)
    assert report["bytes"] >= 40 * PAYLOAD_BYTES and report["domains"] == {DOMAIN.hex(): 40}
    assert state_of(tmp_path) == before


def test_damage_is_found_beside_a_writer_that_goes_on(tmp_path: Path, run: Run) -> None:
    names = chain(40)
    with filled(tmp_path) as tier:
        for name, at in ((names[3], 4096 + 77), (names[20], 20)):  # a payload, a header
            damage(tier, name, at)
        before = state_of(tmp_path)
        code, out, _ = run("verify", "--nvme", str(tmp_path), "--json")
        assert state_of(tmp_path) == before
        report = json.loads(out)
        assert (code, report["damaged"], report["ok"]) == (1, 2, 19)
        found = {finding["key"]: finding["reason"] for finding in report["findings"]}
        hidden = {None: "a damaged header hides 20 records from whoever starts now"}
        assert found == {names[3].key.hex(): "the checksum is wrong"} | hidden
        assert put(tier, chain(2, seed=9)), "the writer still has its folder"
        code, out, _ = run("verify", "--nvme", str(tmp_path))
        assert code == 1 and "2 damaged" in out and "--repair takes it out of use" in out


def test_a_damaged_header_in_a_closed_segment_hides_nothing(tmp_path: Path, run: Run) -> None:
    names = chain(40)
    with filled(tmp_path) as tier:
        damage(tier, names[5], 20)
    code, out, _ = run("verify", "--nvme", str(tmp_path), "--json")
    report = json.loads(out)
    assert (code, report["damaged"], report["ok"]) == (1, 1, 39)
    assert [(found["key"], found["reason"]) for found in report["findings"]] == [(names[5].key.hex(), "is no record")]


def test_repair_takes_damage_out_of_use_for_good_and_keeps_copies(tmp_path: Path, run: Run) -> None:
    names = chain(40)
    with filled(tmp_path) as tier:
        damage(tier, names[39], 4096)
    code, out, _ = run("verify", "--nvme", str(tmp_path), "--repair")
    assert code == 1 and "1 were taken out of use" in out and len(kept(tmp_path)) == 1
    assert run("verify", "--nvme", str(tmp_path))[0] == 0
    with opened(tmp_path) as tier:
        statuses, _ = get(tier, names)
        assert [str(status) for status in statuses] == ["ok"] * 39 + ["miss"]


def test_records_of_another_key_are_no_damage(tmp_path: Path, run: Run) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of these replicas\n")
    secret.chmod(0o600)
    folder = tmp_path / "nvme"
    filled(folder, mac_key=load_mac_key(secret)).close()
    code, out, _ = run("verify", "--nvme", str(folder), "--repair", "--json")
    report = json.loads(out)
    assert (code, report["unchecked"], report["repaired"]) == (0, 40, 0)
    assert "give --kv-mac-key" in report["findings"][0]["reason"]
    code, out, _ = run("verify", "--nvme", str(folder), "--kv-mac-key", str(secret), "--json")
    assert (code, json.loads(out)["ok"]) == (0, 40)


def test_a_file_that_is_no_segment_is_a_finding(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "00" / f"{7:016x}.seg").write_bytes(b"something else" * 1000)
    audit = FolderAudit(tmp_path)
    found = [checked for checked in audit.check() if checked.verdict is Verdict.DAMAGED]
    audit.close()
    assert len(found) == 1 and "no segment of this version" in found[0].reason


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one of --nvme DIR and --redis URL"),
        (("--nvme", "{tmp}/none"), "is no folder of an NVMe tier"),
        (("--nvme", "{tmp}"), "is no folder of an NVMe tier; give what --kv-nvme-path was"),
        (("--redis", "localhost"), "--redis: got 'localhost'; allowed: redis://"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_line(tmp_path: Path, run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("verify", *(text.replace("{tmp}", str(tmp_path)) for text in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_a_redis_is_read_whole_and_repaired_by_removal(valkey: Valkey, run: Run) -> None:  # noqa: F811
    names = chain(30)
    client = valkey.client()
    tier = RedisTier(valkey.url, DOMAIN)
    put(tier, names)
    tier.close()
    wrong, other = (redis_name(DOMAIN, addresses([name])[0]) for name in names[7:9])
    stored = client.get(wrong)
    assert isinstance(stored, bytes)
    value = bytearray(stored)
    value[-1] ^= 1
    client.set(wrong, bytes(value))
    client.set(other, client.get(redis_name(DOMAIN, addresses([names[0]])[0])) or b"")
    client.set("session:1", b"somebody's")
    code, out, _ = run("verify", "--redis", valkey.url, "--json")
    report = json.loads(out)
    assert (code, report["records"], report["damaged"]) == (1, 30, 2)
    assert {finding["where"] for finding in report["findings"]} == {wrong, other}
    assert json.loads(run("verify", "--redis", valkey.url, "--repair", "--json")[1])["repaired"] == 2
    assert run("verify", "--redis", valkey.url)[0] == 0
    assert client.get("session:1") == b"somebody's" and client.exists(wrong, other) == 0


def test_a_silent_redis_is_one_line(run: Run) -> None:
    code, _, err = run("verify", "--redis", "redis://127.0.0.1:9")
    assert code == 1 and err.startswith("pagetier: redis verify") and err.count("\n") == 1
