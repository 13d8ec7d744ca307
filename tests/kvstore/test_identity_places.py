"""Identities are read where they are kept, damaged ones are none, and passwords are not shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagetier.kvstore.errors import ConfigError
from pagetier.kvstore.identity import CacheIdentity
from pagetier.kvstore.identity_places import is_domain, read_identity
from pagetier.kvstore.nvme.tier import NvmeTier
from pagetier.kvstore.redis.tier import RedisTier
from pagetier.kvstore.tier import Tier
from tests.kvstore.service.service_rig import Client, service
from tests.kvstore.service.service_rig import identity as served_identity
from tests.kvstore.test_identity import IDENTITY
from tests.kvstore.valkey import Valkey, own_valkey, valkey, valkey_server  # noqa: F401

OTHER = replace(IDENTITY, weights_version="v2")


def keep(tier: Tier, *identities: CacheIdentity) -> None:
    for identity in identities:
        tier.put_identity(identity.domain(), identity.encode())
    tier.put_identity(b"x" * 32, b"damaged")
    tier.put_identity(b"y" * 32, IDENTITY.encode())  # sound, under another's name
    tier.close()


@pytest.fixture(params=["nvme", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, valkey: Valkey) -> Iterator[tuple[str, Tier]]:  # noqa: F811
    if request.param == "nvme":
        yield str(tmp_path), NvmeTier(tmp_path, 8 << 20, IDENTITY.domain(), refresh_s=0)
    else:
        yield valkey.url, RedisTier(valkey.url, IDENTITY.domain())


def test_the_only_sound_identity_is_found_without_a_name(place: tuple[str, Tier]) -> None:
    text, tier = place
    keep(tier, IDENTITY)
    found = read_identity(text)
    assert found is not None and found.identity == IDENTITY
    assert found.place.endswith(f"#{IDENTITY.domain().hex()[:12]}")


def test_of_several_one_is_named_by_its_beginning(place: tuple[str, Tier]) -> None:
    text, tier = place
    keep(tier, IDENTITY, OTHER)
    for identity in (IDENTITY, OTHER):
        for named in (identity.domain().hex(), identity.domain().hex()[:8].upper()):
            found = read_identity(f"{text}#{named}")
            assert found is not None and found.identity == identity
    with pytest.raises(ConfigError, match="holds 2 identities: .*version v2.*; name one, such as ") as several:
        read_identity(text)
    assert all(identity.domain().hex()[:12] in str(several.value) for identity in (IDENTITY, OTHER))
    with pytest.raises(ConfigError, match="no cache identity that begins with 0123"):
        read_identity(f"{text}#0123")


def test_places_without_an_identity_say_so(tmp_path: Path, valkey: Valkey) -> None:  # noqa: F811
    (tmp_path / "nvme" / "identities").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for text in (str(tmp_path / "nvme"), str(tmp_path / "empty"), valkey.url):
        with pytest.raises(ConfigError, match="holds no cache identity; give "):
            read_identity(text)


def test_what_may_be_a_model_is_none_of_these(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for text in ("smollm2", "org/name", str(tmp_path), str(tmp_path / "m.gguf")):
        assert read_identity(text) is None
        assert not is_domain(text)
    assert is_domain("ab12cd34") and is_domain("AB" * 32)
    assert not is_domain("ab12") and not is_domain("ab" * 33)


def test_who_does_not_answer_is_told_in_one_line_without_secrets() -> None:
    with own_valkey(requirepass="right") as server:
        path = server.url.removeprefix("unix://")
        for url in (f"unix://:wr0ng@{path}", "redis://user:wr0ng@127.0.0.1:1", "http://user:wr0ng@127.0.0.1:1"):
            with pytest.raises(ConfigError) as refused:
                read_identity(url)
            assert "wr0ng" not in str(refused.value) and "\n" not in str(refused.value)
        keep(RedisTier(f"unix://:right@{path}", IDENTITY.domain()), IDENTITY)
        found = read_identity(f"unix://:right@{path}")
        assert found is not None and found.identity == IDENTITY and "right" not in found.place


def test_a_store_service_is_asked_for_its_identities() -> None:
    with service() as running, Client(running.address):
        url = f"store:unix://{running.folder}/s"
        found = read_identity(url)
        assert found is not None and found.identity == served_identity()
        with Client(running.address, "gemma"), pytest.raises(ConfigError, match="holds 2 identities"):
            read_identity(url)
        other = read_identity(f"{url}#{served_identity('gemma').domain().hex()[:12]}")
        assert other is not None and other.identity == served_identity("gemma")
    with pytest.raises(ConfigError, match="store: got 'redis://x'; allowed: local, unix:///"):
        read_identity("store:redis://x")
