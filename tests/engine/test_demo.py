"""`pagetier demo`: the whole thing once, and its report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.console import Console

from pagetier.engine.demo import DemoReport, DemoStep, system_prompt
from tests.engine.server.double import build_tokenizer
from tests.engine.server.real_server import model_path


@pytest.mark.timeout(400)
def test_every_tier_serves_its_step_and_beats_computing() -> None:
    path = str(model_path())
    command = [sys.executable, "-m", "pagetier.cli", "demo", "--json", "--dtype", "float32", "--model", path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert set(report) == {"model", "steps"}
    steps = report["steps"]
    assert [(step["name"], step["replica"]) for step in steps] == [
        ("cold", 1),
        ("device", 1),
        ("nvme", 1),
        ("redis", 2),
    ]
    assert all(list(step) == list(DemoStep.__dataclass_fields__) for step in steps)
    assert steps[0]["cached_tokens"] == 0 and steps[0]["prompt_tokens"] >= 2000
    for step in steps[1:]:
        by_tier = dict(step["cached_tokens_by_tier"])
        assert by_tier.pop(step["name"]) == step["cached_tokens"] >= 1984
        assert not any(by_tier.values())
        assert step["output"] == steps[0]["output"]
        assert step["ttft_s"] * 5 <= steps[0]["ttft_s"], f"{step['name']} at least five times faster than cold"


def step(name: str, served: dict[str, int], output: str = "same") -> DemoStep:
    return DemoStep(name, 1, 100, sum(served.values()), served, 0.5, output)


def test_findings_name_the_step_that_was_not_served_and_outputs_that_differ() -> None:
    good = DemoReport("m", [step("cold", {}), step("device", {"device": 99}), step("nvme", {"nvme": 96})])
    assert good.findings() == []
    bad = DemoReport("m", [step("cold", {}), step("device", {"device": 99}), step("redis", {"nvme": 96}, "other")])
    assert bad.findings() == [
        "step redis: only 0 of 100 prompt tokens came from it",
        "the outputs differ",
    ]


def test_the_tables_show_every_step_and_process() -> None:
    tiers = {"device": {"hit_rate": 0.5}, "nvme": {"hit_rate": 0.25}}
    stats = {"lookup": {"lookup_tokens": 200, "hit_tokens": 150, "hit_rate": 0.75}, "tiers": tiers}
    report = DemoReport("m", [step("cold", {}), step("device", {"device": 99})], {"replica 1": stats})
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        report.print_to(console)
    text = console.export_text()
    assert "device 99" in text and "500 ms" in text and "1.0x" in text
    assert "75.0%" in text and "25.0%" in text


@pytest.mark.parametrize("num_tokens", [50, 2000])
def test_the_system_prompt_has_the_tokens_it_claims(num_tokens: int) -> None:
    tokenizer = build_tokenizer()
    text = system_prompt(tokenizer, num_tokens)
    assert len(tokenizer.encode(text, add_special_tokens=False)) == num_tokens
    assert text == system_prompt(tokenizer, num_tokens)
