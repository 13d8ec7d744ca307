"""Two servers share prompts through one store service; what each says of it adds up."""

from __future__ import annotations

from tests.engine.server.cached_engine import FACTORY
from tests.engine.server.stack import running_stack
from tests.engine.server.test_cache_routes import A, complete
from tests.kvstore.service.service_rig import service, until


def test_the_second_servers_first_request_is_a_hit_of_the_stores_tier() -> None:
    with service() as running:
        url = f"unix://{running.folder}/s"
        with (
            running_stack(factory=FACTORY, store_url=url) as first,
            running_stack(factory=FACTORY, store_url=url) as second,
            running_stack(factory=FACTORY, store_url=url, weights_version="other") as other,
        ):
            assert complete(first, A) == {}
            until(lambda: second.post("/query", {"prompt": A})["hit_tokens_by_tier"] == {"host": 16})
            assert other.post("/query", {"prompt": A})["hit_tokens"] == 0, "another model's weights"
            assert complete(second, A) == {"host": 16}
            assert complete(other, A) == {}
            tiers = second.stats()["tiers"]
            assert (tiers["host"]["hit_tokens"], tiers["device"]["hit_tokens"]) == (16, 0)
            assert all(tier["hit_tokens"] == 0 for tier in other.stats()["tiers"].values())
            with running.client() as client:
                domains = client.stats()["domains"]
            assert sorted(domain["tiers"]["host"]["hit_tokens"] for domain in domains) == [0, 16]
        running.until_idle()
