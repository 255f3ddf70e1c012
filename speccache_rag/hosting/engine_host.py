"""One engine per process and configuration, shared by every `SpecCache` that asks for the same one."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.inventory import Inventory
from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines import ENGINES
from speccache_rag.engines.base import Engine
from speccache_rag.errors import EngineClosed, EngineForked
from speccache_rag.fingerprint import resolve_model
from speccache_rag.hosting.loop_thread import LoopThread
from speccache_rag.prompt.loading import load_tokenizer
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.scoring.layers import LayerRange
from speccache_rag.store.base import Namespace
from speccache_rag.store.factory import OPTIONS, build_disk, store_options

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENGINE_OPTIONS = ("engine", "model", "engine_options", *OPTIONS.values())
"""The options that make two configurations need two engines."""


class EngineHost:
    """A target model's tokenizer, engine, event loop, catalogue, and the libraries and scorers that go with them.

    Everything is made when first asked for. `acquire` and `release` count users; the last one stops the engine.
    """

    def __init__(self, config: SpecCacheConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._users = 0
        self._model: Path | None = None
        self._tokenizer: PromptTokenizer | None = None
        self._engine: Engine | None = None
        self._loop: LoopThread | None = None
        self._catalogue: Catalogue | None = None
        self._inventory: Inventory | None = None
        self._libraries: dict[tuple[str | None, str | None, str], ChunkLibrary] = {}
        self._scorers: dict[tuple[str, LayerRange, str], SpeculativeScorer] = {}
        self._shared: dict[str, Any] = {}
        self._shared_lock = threading.Lock()

    @property
    def model(self) -> Path:
        """The target model's folder."""
        with self._lock:
            if self._model is None:
                revision = self._config.engine_options.get("revision")
                self._model = resolve_model(self._config.model, revision=revision)
            return self._model

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The target model's tokenizer."""
        if (found := self._tokenizer) is not None:
            return found  # not behind the lock, which a starting engine holds for long
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = PromptTokenizer(load_tokenizer(self.model, self._config.engine_options))
            return self._tokenizer

    @property
    def engine(self) -> Engine:
        """The running engine; starts it."""
        if (found := self._engine) is not None:
            return found  # not behind the lock, which is held while a scorer loads
        self._start()
        assert self._engine is not None
        return self._engine

    @property
    def loop(self) -> LoopThread:
        """The event loop the engine runs on; starts both."""
        if (found := self._loop) is not None:
            return found
        self._start()
        assert self._loop is not None
        return self._loop

    @property
    def running(self) -> bool:
        """Whether the engine was started."""
        return self._engine is not None

    def library(self, config: SpecCacheConfig) -> ChunkLibrary:
        """The known chunks under a configuration's tenant and anchor."""
        facts = self.engine.facts
        with self._lock:
            key = (config.tenant, config.anchor, json.dumps(config.chat_template_kwargs, sort_keys=True, default=str))
            library = self._libraries.get(key)
            if library is None:
                given = config.anchor
                anchor = given if given is not None else self.tokenizer.header(config.chat_template_kwargs)
                anchor_ids = self.tokenizer.assemble(anchor, [], add_bos=not self.tokenizer.has_chat_template).token_ids
                namespace = Namespace(
                    facts.fingerprint, facts.dtype, facts.rope, anchor_ids, config.tenant, config.kv_dtype
                )
                library = ChunkLibrary(
                    self.tokenizer,
                    namespace,
                    self._open_catalogue(),
                    anchor,
                    facts.max_model_len,
                    self._config.model,
                )
                self._libraries[key] = library
            return library

    @property
    def inventory(self) -> Inventory:
        """What is known and stored on disk; starts no engine."""
        with self._lock:
            if self._inventory is None:
                options = {name: value for name, value in store_options(self._config).items() if name != "ram_bytes"}
                self._inventory = Inventory(self._open_catalogue(), build_disk(**options))
            return self._inventory

    def _open_catalogue(self) -> Catalogue:
        if self._catalogue is None:
            folder = self._config.store
            self._catalogue = Catalogue(str(Path(folder).expanduser() / "catalogue.sqlite") if folder else None)
        return self._catalogue

    def scorer(self, config: SpecCacheConfig, layers: LayerRange = "last_third") -> SpeculativeScorer | None:
        """The scorer over a configuration's speculative model and these of its layers, loaded once per process."""
        name = config.speculative_model
        if name is None:
            return None
        with self._lock:
            key = name, layers, config.speculative_device
            if key not in self._scorers:
                trusted = bool(config.engine_options.get("trust_remote_code"))
                self._scorers[key] = SpeculativeScorer(
                    resolve_model(name), layers=layers, device=config.speculative_device, trust_remote_code=trusted
                )
            return self._scorers[key]

    def _start(self) -> None:
        self._check_process()
        with self._lock:
            if self._engine is not None:
                return
            if self._users == 0:
                raise EngineClosed("The engine was closed.")
            EngineHost._engines_process = os.getpid()
            store = store_options(self._config)
            engine = ENGINES.load(self._config.engine)(self.model, dict(self._config.engine_options), store)
            loop = LoopThread("speccache-engine")
            try:
                loop.run(engine.start())
            except BaseException:
                # The constructor may have opened something already.
                loop.run(_close(engine))
                loop.stop()
                raise
            self._engine, self._loop = engine, loop

    def _stop(self) -> None:
        with self._lock:
            engine, loop, catalogue = self._engine, self._loop, self._catalogue
            inventory = self._inventory
            self._engine = self._loop = self._catalogue = self._inventory = None
            self._libraries.clear()
        # Outside the lock: work that is being cancelled may be waiting for it.
        if engine is not None and loop is not None:
            loop.run(_close(engine))
            loop.stop()
        if inventory is not None:
            inventory.close()
        if catalogue is not None:
            catalogue.close()

    def shared(self, key: str, make: Callable[[], T], usable: Callable[[T], bool]) -> T:
        """The object kept here under a key; made anew where there is none, or none that is usable."""
        with self._shared_lock:
            found: T | None = self._shared.get(key)
            if found is None or not usable(found):
                found = self._shared[key] = make()
            return found

    # The registry: the one table of this process that the core keeps. Frameworks copy, pickle and re-create LLM objects
    # freely, and each copy must find the same engine.

    _hosts: dict[str, EngineHost] = {}
    _hosts_lock = threading.Lock()
    _engines_process: int | None = None
    """The process in which engines were started; None where none was, here and above."""
    _left_behind: list[object] = []
    """What a forked process inherits of engines and may not even destroy."""
    _watching = False
    """Whether the ends and forks of this process are heard of."""

    @classmethod
    def acquire(cls, config: SpecCacheConfig) -> EngineHost:
        """The host of a configuration, with one more user."""
        key = json.dumps({name: getattr(config, name) for name in ENGINE_OPTIONS}, sort_keys=True, default=str)
        with cls._hosts_lock:
            if not cls._watching:
                atexit.register(cls._stop_all)
                if hasattr(os, "register_at_fork"):  # where there is fork
                    os.register_at_fork(after_in_child=cls._forget)
                cls._watching = True
            host = cls._hosts.get(key)
            if host is None:
                host = cls._hosts[key] = cls(config)
            host._users += 1
            return host

    def release(self) -> None:
        """One user less; the last one stops the engine."""
        with self._hosts_lock:
            self._users -= 1
            if self._users > 0:
                return
            for key in [key for key, host in self._hosts.items() if host is self]:
                del self._hosts[key]
        self._stop()

    @classmethod
    def _check_process(cls) -> None:
        """Refuse engines in the fork of a process that had some: what computes there has lost its threads too.

        Raises:
            EngineForked: this is one.
        """
        if cls._engines_process not in (None, os.getpid()):
            raise EngineForked(
                f"Engines were started in process {cls._engines_process}; this is process {os.getpid()}, its fork."
            )

    @classmethod
    def _forget(cls) -> None:
        """In a forked process: let go of the parent's engines, and of locks that its threads may hold for ever."""
        cls._hosts_lock = threading.Lock()
        for host in cls._hosts.values():
            host._lock, host._shared_lock = threading.RLock(), threading.Lock()
            if host._engine is not None:
                cls._left_behind.append((host._engine, host._loop, host._catalogue, dict(host._libraries)))
                host._engine = host._loop = host._catalogue = None
                host._libraries.clear()
        if cls._engines_process is not None:
            cls._hosts.clear()

    @classmethod
    def _stop_all(cls) -> None:
        with cls._hosts_lock:
            hosts = list(cls._hosts.values())
            cls._hosts.clear()
        for host in hosts:
            try:
                host._stop()
            except Exception:  # at the end of the process: the others must still be stopped
                logger.exception("the engine of %s did not stop", host._config.model)


async def _close(engine: Engine) -> None:
    engine.close()
