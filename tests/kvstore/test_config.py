"""Sizes as people write them, and a store configuration that says what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetier.kvstore.config import (
    GIB,
    KIB,
    MIB,
    StoreConfig,
    default_redis_url,
    format_size,
    parse_size,
    parse_tiers,
    without_login,
)
from pagetier.kvstore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * GIB),
        ("512 MiB", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 360KiB ", 360 * KIB),
        ("4096", 4096),
        ("12B", 12),
        ("2gib", 2 * GIB),
        (77, 77),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["4GB", "lots", "", "-1GiB", "1e9", "4 Gi B", "GiB"])
def test_a_bad_size_names_flag_value_and_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "--kv-host-size")
    assert "--kv-host-size" in str(caught.value)
    assert repr(text) in str(caught.value) and "GiB" in str(caught.value)


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_read_back_within_half_a_percent(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.005)


def test_exact_sizes_are_formatted_exactly() -> None:
    assert [format_size(n) for n in (0, 12, 360 * KIB, 3 * GIB // 2)] == ["0B", "12B", "360KiB", "1.50GiB"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tiers": ("nvme", "reddis")}, "did you mean 'redis'"),
        ({"tiers": ("nvme", "nvme")}, "--kv-tier"),
        ({"tiers": ("host",)}, "--kv-host-size"),
        ({"host_size": -1}, "--kv-host-size"),
        ({"nvme_size": 0}, "--kv-nvme-size"),
        ({"nvme_io": "mmap"}, "--kv-nvme-io"),
        ({"nvme_scrub": -1}, "--kv-nvme-scrub"),
        ({"codec": "redis=planes-zst", "tiers": ("redis",)}, "did you mean 'planes-zstd'"),
        ({"codec": "host=planes-zstd", "host_size": 1}, "TIER=CODEC of nvme, redis"),
        ({"codec": "redis=planes-zstd", "tiers": ("nvme",)}, "--kv-codec"),
        ({"warmup": -1}, "--kv-warmup"),
        ({"warmup": 1, "tiers": ("nvme",)}, "--kv-host-size"),
        ({"nvme_fsync": "yes"}, "--kv-nvme-fsync"),
        ({"redis_url": "localhost:6379"}, "--kv-redis-url"),
        ({"redis_url": "redis+fleet://me:secret@host"}, "//…@host"),
        ({"redis_size": 0}, "--kv-redis-size"),
        ({"redis_ttl_s": 0}, "--kv-redis-ttl"),
        ({"redis_linger_s": -1.0}, "--kv-redis-linger"),
        ({"load_budget_s": 0.0}, "--kv-load-budget-ms"),
    ],
)
def test_a_bad_field_is_named_by_its_flag(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        StoreConfig(**fields)


def test_a_host_size_adds_the_host_tier_in_front() -> None:
    assert StoreConfig(tiers=("nvme", "redis")).tier_names == ("nvme", "redis")
    assert StoreConfig(tiers=("nvme",), host_size=GIB).tier_names == ("host", "nvme")
    assert StoreConfig(tiers=("nvme", "host"), host_size=GIB).tier_names == ("nvme", "host")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@h:1/0", "redis://…@h:1/0"),
        ("redis://:se/cret@h", "redis://…@h"),
        ("redis://h/0?password=secret&protocol=3", "redis://h/0?password=…&protocol=3"),
        ("redis+sentinel://h/s?sentinel_password=secret&sentinel_username=me", "…&sentinel_username=…"),
        ("unix:///run/a@b.sock?db=1&PASSWORD=secret", "unix:///run/a@b.sock?db=1&PASSWORD=…"),
        ("redis://h:1", "redis://h:1"),
    ],
)
def test_no_login_is_shown(url: str, shown: str) -> None:
    assert without_login(url).endswith(shown) and "secret" not in without_login(url)


def test_tiers_are_names_between_commas() -> None:
    assert parse_tiers("") == parse_tiers("  ") == ()
    assert parse_tiers("nvme, redis") == ("nvme", "redis")
    for text in (",", "nvme,", ",redis", "nvme,,redis"):
        with pytest.raises(ConfigError, match=f"--kv-tier: got {text!r}; allowed: names separated by commas"):
            parse_tiers(text)


def test_the_redis_url_comes_from_the_environment_or_is_embedded() -> None:
    assert default_redis_url({}) == default_redis_url({"REDIS_URL": ""}) == "embedded"
    assert default_redis_url({"REDIS_URL": "redis://h:1"}) == "redis://h:1"
