"""Handles and results of the store's asynchronous verbs. Immutable; they may cross threads."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagetier.kvstore.block import BlockStatus


@dataclass(frozen=True, slots=True)
class LookupDone:
    """A lookup's answer. `tiers[i]` is the tier to load block i from; its length is the usable prefix in blocks."""

    ticket: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load's answer, a status and serving tier (None unless OK) per block.

    `quiesced` is False when the deadline passed while bytes were still on their way: those destinations may yet be
    written to, and must not be reused before the `LoadQuiesced` of this job. ended_s: when that was, by the store's
    clock, however much later somebody asks; None where only who polls knows.
    """

    job: int
    statuses: tuple[BlockStatus, ...]
    tiers: tuple[str | None, ...]
    quiesced: bool
    ended_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LoadQuiesced:
    """No destination of this job will be written to any more."""

    job: int


@dataclass(frozen=True, slots=True)
class PutDone:
    """A put's answer. The sources are no longer read. ended_s: as a load's."""

    job: int
    statuses: tuple[BlockStatus, ...]
    ended_s: float | None = field(default=None, compare=False)


Completion = LookupDone | LoadDone | LoadQuiesced | PutDone
