"""Inference engines behind one protocol (base.py); each is imported only when its name is used."""

from __future__ import annotations

from speccache_rag.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "vllm": "speccache_rag.engines.vllm:vllm_engine",
        "transformers": "speccache_rag.engines.transformers.engine:TransformersEngine",
    },
)
