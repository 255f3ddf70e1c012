"""A store tortured by many processes: writers that are killed, readers, evictors, flipped bits and a full disk.

    python -m tests.stress FOLDER [--kills 100] [--seconds 60]

Prints what happened and ends with status 1 if anything was read wrong, the budget was exceeded, or the store did not
check clean afterwards.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from speccache_rag.errors import StoreUnavailable
from speccache_rag.store.codec import encode
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore
from tests.contract.store_contract import assert_same, key_of, make_kv

N_CHUNKS = 400
TOKENS = 300
SIZE = len(encode(key_of(make_kv(TOKENS)), make_kv(TOKENS)))
BUDGET = N_CHUNKS * SIZE // 10
"""A tenth of the data."""


def opened(folder: str) -> TieredStore:
    return TieredStore(DiskStore(folder, BUDGET), MemoryStore(4 * SIZE))


def work(folder: str, seed: int) -> None:
    """Write and read chunks at random, and now and then delete, check or damage one; until killed."""
    chance, store = random.Random(seed), opened(folder)
    if seed % 4 == 0:  # one writer in four meets a full disk: no file of its own may grow beyond this
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, resource.RLIM_INFINITY))
    while True:
        kv = make_kv(TOKENS, seed=chance.randrange(N_CHUNKS))
        key, action = key_of(kv), chance.random()
        try:
            if action < 0.45:
                store.put_soon(key, kv, lambda result: None)
            elif action < 0.9:
                found = store.get(key)
                if found is not None:
                    assert_same(found, make_kv(TOKENS, seed=found.token_ids[0]))
            elif action < 0.95:
                store.delete(key)
            else:
                flip(store._disk._file(key), chance)  # type: ignore[attr-defined]
        except StoreUnavailable as error:
            if "File too large" not in str(error) and "disk I/O" not in str(error) and "full" not in str(error):
                raise


def flip(path: Path, chance: random.Random) -> None:
    """Change a bit of a file in place, as a failing disk would."""
    try:
        with open(path, "r+b") as file:
            file.seek(chance.randrange(SIZE - 64))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
    except (OSError, IndexError):  # gone, or beyond what this worker may write
        pass


def stored_bytes(folder: str) -> int:
    total = 0
    for path in Path(folder, "kv").rglob("*.safetensors"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def torture(folder: str, kills: int, seconds: float, workers: int = 4) -> list[str]:
    """Run it; what was found wrong."""
    opened(folder).close()
    faults: list[str] = []
    started, seed, most, killed = time.monotonic(), 0, 0, 0
    running: dict[int, int] = {}
    while killed < kills or time.monotonic() - started < seconds:
        while len(running) < workers:
            child = os.fork()
            if not child:
                try:
                    work(folder, seed)
                except BaseException as error:
                    print(f"worker {seed}: {error!r}", file=sys.stderr)
                os._exit(1)
            running[child], seed = seed, seed + 1
        time.sleep(0.05 + random.random() * 0.2)
        most = max(most, stored_bytes(folder))
        victim = random.choice(list(running))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        if not os.WIFSIGNALED(status):
            faults.append(f"worker {running[victim]} ended by itself")
        del running[victim]
        killed += 1
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if most > BUDGET:
        faults.append(f"{most} bytes were stored, the budget is {BUDGET}")
    with DiskStore(folder, BUDGET) as store:
        wrong = [
            key
            for key in list(store.keys())
            if (kv := store.get(key)) and kv.keys.ne(make_kv(TOKENS, seed=kv.token_ids[0]).keys).any()
        ]
        faults += [f"{key} was read wrong" for key in wrong]
        store.check(fix=True)
        faults += store.check()
        stats = store.stats()
    print(
        f"{killed} kills, at most {most / BUDGET:.3f} of the budget, {stats.chunks} chunks left, {len(faults)} faults"
    )
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    faults = torture(options.folder, options.kills, options.seconds)
    print("\n".join(faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
