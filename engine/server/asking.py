"""A question to the engine that gets no answer, or a refusal, ends as an HTTP error, for every route alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pagetier.engine.server.engine_client import EngineDeadError
from pagetier.engine.server.errors import ApiError, engine_dead, engine_silent
from pagetier.kvstore.errors import ConfigError, PagetierError


@contextlib.contextmanager
def asking(timeout_s: float, consequence: str = "try again") -> Iterator[None]:
    """Raises ApiError: 503 for an engine that is dead or silent for `timeout_s`, 400 for a wrong question, else 500."""
    try:
        yield
    except EngineDeadError as error:
        raise engine_dead(str(error)) from None
    except TimeoutError:
        raise engine_silent(timeout_s, consequence) from None
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    except PagetierError as error:
        raise ApiError(500, str(error)) from None
