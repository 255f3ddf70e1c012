"""What a GPU has to show before anything is claimed of it, in one run of about ten minutes; JSON on standard output.

    .venv/bin/python scripts/gpu_check.py MODEL [--backends FLASH_ATTN FLASHINFER TRITON_ATTN] [--json FILE]
    .venv/bin/python scripts/gpu_check.py .models/SmolLM2-135M-Instruct --chunk-tokens 40     # on CPU: a dry run

For each attention backend, in a process of its own: the engine starts (its self-check compares reuse with prefill),
chunks are warmed, a long decode runs alone, and again beside requests that reuse the chunks. The two decodes must give
the same tokens. Then the time to first token with reuse and with full recompute, cold, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

N_CHUNKS = 10
DECODE_TOKENS = 200
REPEATS = 3
RATIO = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backends", nargs="*", help="vLLM's names; by default all that fit the device")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation")
    parser.add_argument("--limit-s", type=float, default=180.0, help="for one backend")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = [_in_process(asked, backend) for backend in asked.backends or _backends()]
    text = json.dumps({"vllm": _vllm(), "device": _device(), "model": asked.model, "backends": found}, indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text)
    sys.exit(0 if all(row.get("decode_equals_alone") for row in found) else 1)


def _in_process(asked: argparse.Namespace, backend: str) -> dict[str, Any]:
    """One backend, in a process that ends with its engine, whatever happens in it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(sender, vars(asked), backend))
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv() if receiver.poll(asked.limit_s) else {"error": "over its time"}
    except EOFError:
        row = {"error": "the process died; its log is above"}
    process.join(30)
    process.kill()
    return {"backend": backend, **row}


def _examine(sender: Any, asked: dict[str, Any], backend: str) -> None:
    try:
        sender.send(_examined(asked, backend))
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {error}"})


def _examined(asked: dict[str, Any], backend: str) -> dict[str, Any]:
    from speccache_rag import SpecCache

    options = {"enforce_eager": asked["eager"] or backend == "CPU_ATTN", "max_num_seqs": 16}
    if backend != "CPU_ATTN":
        options["attention_backend"] = backend
    started = time.perf_counter()
    with SpecCache(model=asked["model"], policy="epic", recompute_ratio=RATIO, engine_options=options) as sc:
        sc.start()
        start_s = time.perf_counter() - started
        chunks = _chunks(sc.tokenizer, asked["chunk_tokens"])
        warmed = sc.warm(chunks, show_progress=False)
        decode = _decode(sc)
        beside = _beside(sc, chunks)
        full, reused = _ttft(sc, chunks, "full_recompute"), _ttft(sc, chunks, "epic")
        return {
            "start_s": round(start_s, 2),
            "warm_s": round(warmed.seconds, 2),
            "decode_equals_alone": beside["text"] == decode,
            "reuse_requests_beside_it": beside["answered"],
            "chunks_reused": beside["chunks_reused"],
            "ttft_full_s": full,
            "ttft_reuse_s": reused,
            "ttft_ratio": round(statistics.median(full) / statistics.median(reused), 2),
        }


def _chunks(tokenizer: Any, n_tokens: int) -> list[str]:
    """Texts of about that many tokens, no two alike."""
    texts = []
    for number in range(N_CHUNKS):
        text = f"Log book {number}."
        day = 0
        while len(tokenizer.encode(text)) < n_tokens:
            day += 1
            text += (
                f" On day {day} of voyage {number} the wind turned {day * 7 % 360} degrees and {day} sails were set."
            )
        texts.append(text)
    return texts


def _question(chunks: list[str], number: int) -> list[dict[str, str]]:
    order = chunks[number % N_CHUNKS :] + chunks[: number % N_CHUNKS]
    return [{"role": "user", "content": "\n\n".join(order) + f"\n\nHow many sails were set? ({number})"}]


def _decode(sc: Any) -> str:
    asked = [{"role": "user", "content": "Write a long story about a lighthouse keeper."}]
    return str(sc.generate(asked, max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True).text)


def _beside(sc: Any, chunks: list[str]) -> dict[str, Any]:
    """The same decode while requests that reuse chunks come and go."""
    sc.reset_prefix_cache()
    ended = threading.Event()
    reports = []

    def ask() -> None:
        number = 0
        while not ended.is_set():
            reports.append(sc.generate(_question(chunks, number), max_tokens=2, temperature=0.0).report)
            number += 1

    asking = threading.Thread(target=ask)
    asking.start()
    text = _decode(sc)
    ended.set()
    asking.join()
    return {"text": text, "answered": len(reports), "chunks_reused": [report.chunks_reused for report in reports]}


def _ttft(sc: Any, chunks: list[str], policy: str) -> list[float]:
    times = []
    for number in range(REPEATS):
        sc.reset_prefix_cache()
        answer = sc.generate(_question(chunks, number), policy=policy, max_tokens=1)
        times.append(round(answer.report.ttft_s, 4))
    return times


def _backends() -> list[str]:
    import torch

    return ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"] if torch.cuda.is_available() else ["CPU_ATTN"]


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _vllm() -> str:
    from speccache_rag.engines.vllm.frontend.versions import installed_version

    return f"{installed_version()}, torch {version('torch')}"


if __name__ == "__main__":
    main()
