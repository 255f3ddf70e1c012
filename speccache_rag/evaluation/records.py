"""Records of an evaluation: one JSON line for each example and contestant, in a file that grows."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import numpy as np

from speccache_rag.errors import ConfigurationError

RUNS = "runs.jsonl"
"""The file of records in a results folder."""

FULL = "full_recompute"
"""The contestant that every other one is measured against; its record stands for all ratios."""


Key = tuple[str, str, str, str, float]
"""Data set, example, target, contestant and its ratio."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one contestant made of one example."""

    example: str
    dataset: str
    target: str
    """Name of the target model's folder."""
    contestant: str
    """Policy with options and scorer, without the ratio."""
    policy: str
    recompute_ratio: float
    effective_ratio: float
    kl: float
    """KL(full recompute || contestant) in nats, mean over the tokens of full recompute's answer."""
    agreement: float
    """Share of those tokens where both have the same top token."""
    prompt_tokens: int
    chunk_tokens: int
    selected_tokens: int
    """Chunk tokens recomputed."""
    fresh_tokens: int
    """Tokens of the reuse region that are in no chunk."""
    query_tokens: int
    """Tokens behind the reuse region."""
    runs: int
    """Stretches of consecutive computed positions in the reuse region: each costs an attention call a fixed price."""
    scoring_tokens: float = 0.0
    """Cost of scoring in this request, as tokens of the target that cost the same."""
    missed_tokens: int = 0
    chunks: int = 0
    exact_tokens: int = 0
    """Chunk tokens whose stored KV is exact where they stand; no policy may choose them."""
    scoring: str | None = None
    """How the policy got its scores, where it asked for any."""
    speculative_model: str | None = None
    dtype: str | None = None
    nll: float | None = None
    """Negative log likelihood of the first reference answer, mean over its tokens, in nats."""
    f1: float | None = None
    em: float | None = None
    rouge_l: float | None = None
    needle: float | None = None
    answer: str | None = None
    """The contestant's own greedy answer; None where texts are left out."""
    answer_sha256: str | None = None
    """First 16 hex digits: equal answers are told from different ones without their text."""
    selected: str | None = None
    """Which chunk tokens were recomputed: `pack` of a bool for each."""
    score_s: float = 0.0

    @property
    def computed_tokens(self) -> float:
        """All that is computed before the first new token, scoring included, in tokens of the target."""
        return self.selected_tokens + self.missed_tokens + self.fresh_tokens + self.query_tokens + self.scoring_tokens

    @property
    def label(self) -> str:
        """The contestant with its ratio."""
        whole = self.contestant in (FULL, "full_reuse")
        return self.contestant if whole else f"{self.contestant}@{self.recompute_ratio:g}"

    @property
    def key(self) -> Key:
        """What there is one record of."""
        return self.dataset, self.example, self.target, self.contestant, self.recompute_ratio


class RecordFile:
    """The records of a results folder. Each is appended when it is made, so an interrupted run loses none.

    Args:
        folder: made if it is not there.

    Raises:
        ConfigurationError: a line of the file is no record; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RUNS
        folder.mkdir(parents=True, exist_ok=True)
        self.records = list(read_records(self._path)) if self._path.exists() else []
        self._drop_interrupted_line()
        self.done = {record.key for record in self.records}

    def add(self, record: Record) -> None:
        """Append a record."""
        line = json.dumps({k: v for k, v in asdict(record).items() if v is not None}, ensure_ascii=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.records.append(record)
        self.done.add(record.key)

    def _drop_interrupted_line(self) -> None:
        if self._path.exists() and (content := self._path.read_bytes()) and not content.endswith(b"\n"):
            self._path.write_bytes(content[: content.rfind(b"\n") + 1])


def pack(marks: np.ndarray) -> str:
    """Bools as text: their bits, compressed, in base 64."""
    return base64.b64encode(zlib.compress(np.packbits(marks).tobytes(), 9)).decode()


def unpack(text: str, n: int) -> np.ndarray:
    """The `n` bools that `pack` was given."""
    return np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8), count=n).astype(bool)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file. Unknown fields are passed over; a last line without an end was interrupted, and is too.

    Raises:
        ConfigurationError: the file cannot be read, or another line is no record.
    """
    known = {f.name for f in fields(Record)}
    needed = {f.name for f in fields(Record) if f.default is MISSING and f.default_factory is MISSING}
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The records {str(path)!r} cannot be read: {error}.", hint="") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == len(lines) and not line.endswith("\n")):
            continue
        try:
            value = json.loads(line)
            missing = sorted(needed - set(value))
        except (ValueError, TypeError) as error:
            raise _no_record(path, number, "no JSON object") from error
        if missing:
            raise _no_record(path, number, f"without {', '.join(missing)}")
        yield Record(**{name: value[name] for name in value if name in known})


def _no_record(path: Path, number: int, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Line {number} of {str(path)!r} is no record: {why}.", hint="Name another folder, or remove this file."
    )
