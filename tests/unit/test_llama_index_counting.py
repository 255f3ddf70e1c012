"""LlamaIndex packs prompts by its own count, and they fit the model all the same."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import TextNode
from llama_index.core.utils import get_tokenizer
from llama_index.llms.speccache import SpecCacheLLM
from llama_index.llms.speccache.counting import window_in_llama_index_tokens

from speccache_rag.prompt.templates import ChatTemplate
from speccache_rag.prompt.tokenizer import PromptTokenizer
from tests.tiny import tiny_tokenizer
from tests.unit.fake_engine import make_library
from tests.unit.fake_runtime import FakeRuntime

WINDOW = 2048
TEXTS = {
    "japanese": "灯台守は毎朝の天気を書き留めた。北の風、下がる気圧計、正午前の雨。",
    "polish": "Latarnik zapisywał każdego ranka pogodę: wiatr z północy, spadający barometr i deszcz przed południem.",
    "english": "The lighthouse keeper wrote down the weather every morning: wind from the north, and rain before noon.",
    "emoji": "🚀🌊🏠⚓🔥🗺️🐝🕰️🚢🌧️ 🚀🌊🏠⚓🔥🗺️🐝🕰️🚢🌧️",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def settings() -> Any:
    before = Settings._embed_model
    Settings.embed_model = MockEmbedding(8)
    yield
    Settings._embed_model = before


@pytest.mark.parametrize("language", TEXTS)
def test_prompts_of_known_nodes_fit_the_model(tokenizer: PromptTokenizer, settings: None, language: str) -> None:
    library = make_library(tokenizer, max_model_len=WINDOW)
    nodes = [TextNode(text=f"{n}. {TEXTS[language] * 4}") for n in range(12)]
    runtime = FakeRuntime(tokenizer=tokenizer.tokenizer, max_model_len=WINDOW)
    runtime.chunks = [library.chunk(node.text) for node in nodes]
    llm = SpecCacheLLM(runtime=runtime)
    index = VectorStoreIndex(nodes)
    index.as_query_engine(llm=llm, similarity_top_k=12).query("Who?")
    prompts = [tokenizer.encode(ChatTemplate(tokenizer.tokenizer).render(prompt)) for prompt, _ in runtime.calls]
    assert len(prompts) > 1  # more than one prompt takes
    assert max(map(len, prompts)) < WINDOW
    assert "Who?" in str(runtime.calls)


def test_the_window_is_the_models_where_the_counts_agree(tokenizer: PromptTokenizer) -> None:
    library = make_library(tokenizer)
    chunks = [library.chunk(text) for text in TEXTS.values()]
    assert window_in_llama_index_tokens(WINDOW, chunks, lambda text: tokenizer.encode(text)) == WINDOW
    assert window_in_llama_index_tokens(WINDOW, [], get_tokenizer()) == WINDOW
    assert window_in_llama_index_tokens(WINDOW, chunks, lambda text: [0] * 2 * len(tokenizer.encode(text))) == WINDOW
    assert window_in_llama_index_tokens(WINDOW, chunks, lambda text: [0] * (len(tokenizer.encode(text)) // 2)) <= 1024
