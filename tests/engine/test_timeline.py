"""What happened to a request can be told afterwards, in order; what preemption cost is counted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pagetier.engine.metrics import ServerMetrics
from pagetier.engine.timeline import MAX_ENDED
from tests.engine.server.double import DoubleCore
from tests.engine.test_preemption import Rig, config, prompts
from tests.engine.test_scheduler import request
from tests.engine.trace import VOCAB_SIZE


def events_of(rig: Rig, name: str) -> list[dict[str, Any]]:
    (timeline,) = rig.core.timelines(name)
    events: list[dict[str, Any]] = timeline["events"]
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def drain(rig: Rig) -> None:
    while rig.core.has_work():
        rig.step()


def test_a_swapped_request_tells_its_way() -> None:
    """Queued, computed in chunks, swapped out, loaded from its tier, ended."""
    rig = Rig(replace(config(23), max_num_batched_tokens=16), prompts(4, 37, 60))
    drain(rig)
    preempted = [f"r{i}" for i in range(4) if "preempted" in kinds(events_of(rig, f"r{i}"))]
    assert preempted
    events = events_of(rig, preempted[-1])
    told = kinds(events)
    assert told[:3] == ["queued", "running", "computed"] and told[-1] == "ended"
    assert events[2]["tokens"] == [0, 37] and events[2]["chunks"] >= 3
    assert events[-1]["reason"] == "length"
    out = told.index("preempted")
    assert events[out]["by"] == "swap" and events[out]["tokens"] >= 37
    loaded = [event["cached_tokens"] for event in events[out:] if event["event"] == "running"]
    assert any(tiers.get("nvme") for tiers in loaded)
    assert [event["at_s"] for event in events] == sorted(event["at_s"] for event in events)
    resumptions = rig.core.stats()["resumptions"]
    assert resumptions["recomputed_tokens"] < 8 * rig.num_preemptions, "but for the last, partial block"
    rig.core.close()


def test_recomputed_tokens_are_counted() -> None:
    """Where nothing below keeps the KV, what others took is computed again."""
    rig = Rig(config(23, mode="recompute"), prompts(4, 37, 60), capacity=1)
    drain(rig)
    assert rig.num_preemptions and rig.core.stats()["resumptions"]["recomputed_tokens"] > 0
    assert rig.core.stats()["preemptions"]["swap"] == 0
    rig.core.close()


def test_choices_are_told_together_and_old_ones_forgotten() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    choices = [replace(request(f"cmpl-x-{i}", prompt, 2), group="cmpl-x/0") for i in range(3)]
    rig = Rig(config(60), choices)
    assert all(told["state"] == "waiting" for told in rig.core.timelines("cmpl-x"))
    drain(rig)
    told = rig.core.timelines("cmpl-x")
    assert [each["request_id"] for each in told] == [f"cmpl-x-{i}" for i in range(3)]
    assert all(each["state"] == "finished" and each["output_tokens"] == 2 for each in told)
    assert kinds(told[1]["events"]) == ["queued", "forked", "running", "ended"]
    for i in range(MAX_ENDED):
        rig.core.add_request(request(f"late-{i}", prompt, 2))
    rig.core.abort([f"late-{i}" for i in range(MAX_ENDED)])
    assert rig.core.timelines("cmpl-x") == []
    rig.core.close()


def test_what_requests_wait_for_is_counted() -> None:
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(64)]
    requests = [request(f"r{i}", [*shared, i], 2) for i in range(3)]
    rig = Rig(replace(config(60), max_num_batched_tokens=48), requests)
    nobody = {"turn": 0, "leader": 0, "lookup": 0, "load": 0, "swapped": 0, "preempted": 0}
    rig.step()  # filled by the first one
    assert rig.core.stats()["waiting"] == nobody | {"turn": 2}
    rig.step()  # it computes the rest, which they are going to share
    assert rig.core.stats()["waiting"] == nobody | {"leader": 2}
    drain(rig)
    assert rig.core.stats()["waiting"] == nobody
    rig.core.close()


@pytest.mark.parametrize("value", [0, 7])
def test_the_metrics_have_them(value: int) -> None:
    stats = DoubleCore().stats()
    stats["waiting"]["swapped"] = value
    stats["resumptions"] = dict.fromkeys(stats["resumptions"], value)
    text = ServerMetrics("m").scrape(stats).decode()
    assert f'vllm:num_requests_swapped{{model_name="m"}} {value}.0' in text
    assert f'pagetier_requests_waiting{{reason="swapped"}} {value}.0' in text
    assert f'pagetier_recomputed_tokens_total{{model_name="m"}} {value}.0' in text
    assert f'pagetier_swapped_bytes_total{{direction="out"}} {value}.0' in text
    assert 'vllm:num_preemptions_total{model_name="m"} 0.0' in text
