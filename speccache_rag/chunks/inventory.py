"""The inventory of one store folder: what is known, what is stored, and how either is given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speccache_rag.chunks.catalogue import Catalogue, Known
from speccache_rag.errors import ConfigurationError
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.ledger import StoredFile
from speccache_rag.types import ChunkKey

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Holding:
    """One chunk: known by its text, stored as KV, or both."""

    key: ChunkKey
    known: Known | None
    """None where KV is stored of which no text is known."""
    file: StoredFile | None
    """None where the text is known and no KV is stored: evicted, or not captured yet."""

    @property
    def bytes(self) -> int:
        return self.file.bytes if self.file else 0

    @property
    def pinned(self) -> bool:
        return self.file is not None and self.file.pinned

    def about(self, fact: str) -> str:
        """A fact of its namespace: "model", "tenant" or "dtype"; "" where there is none."""
        return self.known.about.get(fact, "") if self.known else ""

    def idle_s(self, now: float) -> float:
        """Seconds since its KV was stored or last used; 0 where there is none."""
        return max(0.0, now - self.file.used_at) if self.file else 0.0


class Inventory:
    """What is in a store folder. Needs no model and no engine; other processes may use the folder meanwhile.

    Every method raises StoreUnavailable where the folder cannot be read or written.

    Args:
        catalogue: of texts.
        disk: of KV; None where it is kept in an engine's RAM alone.
    """

    def __init__(self, catalogue: Catalogue, disk: DiskStore | None) -> None:
        self._catalogue = catalogue
        self._disk = disk

    def holdings(self) -> Iterator[Holding]:
        """Every chunk, those whose text is known first."""
        files = {file.key: file for file in self._disk.files()} if self._disk is not None else {}
        for known in self._catalogue.known():
            yield Holding(known.key, known, files.pop(known.key, None))
        for key, file in files.items():
            yield Holding(key, None, file)

    def keys_of(self, texts_or_keys: Iterable[str], tenant: str | None = None) -> list[ChunkKey]:
        """The keys of known chunks named by text or by key.

        Args:
            texts_or_keys: what is neither is passed over.
            tenant: whose chunks; "" is nobody's, None everybody's.
        """
        return self._catalogue.keys_of(texts_or_keys, tenant)

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Never evict the KV of these chunks from disk, stored already or later; `forget` undoes it.

        Raises:
            ConfigurationError: there is no disk.
        """
        if self._disk is None:
            raise ConfigurationError("Chunks in RAM cannot be pinned.", hint="Pass store=, a folder.")
        self._disk.pin(keys)

    def forget(self, keys: Iterable[ChunkKey]) -> int:
        """Leave neither text nor scores nor KV of these chunks in the folder; how many there were."""
        gone = list(dict.fromkeys(keys))
        # The text first: without it no request asks for the KV again.
        known = self._catalogue.forget(gone)
        stored = self._disk.delete_many(gone) if self._disk is not None else 0
        return max(known, stored)

    def close(self) -> None:
        """Close catalogue and disk. Idempotent."""
        self._catalogue.close()
        if self._disk is not None:
            self._disk.close()


def open_inventory(folder: str) -> Inventory:
    """The inventory of a store folder.

    Raises:
        StoreUnavailable: it cannot be opened.
    """
    path = Path(folder).expanduser()
    return Inventory(Catalogue(str(path / "catalogue.sqlite")), DiskStore(path))


Rule = Callable[[Holding], bool]
"""Whether a chunk is to be given up."""


def not_among(texts: Iterable[str]) -> Rule:
    """Chunks whose text is not one of these; of what has no known text nothing can be said, so it goes too."""
    wanted = {text.strip() for text in texts}
    return lambda holding: holding.known is None or holding.known.text not in wanted


def of_other_models(model: str) -> Rule:
    """Chunks of every model but this one."""
    return lambda holding: holding.about("model") != model


def idle_for(days: float) -> Rule:
    """Chunks whose stored KV was not used for so many days."""
    now = time.time()
    return lambda holding: holding.idle_s(now) > days * DAY_S


def to_give_up(holdings: Iterable[Holding], rules: Iterable[Rule], *, pinned: bool = False) -> list[Holding]:
    """The chunks that any of the rules gives up; pinned ones only where `pinned` says so."""
    rules = list(rules)
    return [h for h in holdings if (pinned or not h.pinned) and any(rule(h) for rule in rules)]
