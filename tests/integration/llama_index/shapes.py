"""What a pipeline shape is, and the chunks that all of them retrieve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.speccache import SpecCacheLLM

CHUNKS = {
    "A": "The mill of Arden was built in 1892.\n\n\tIt ground rye for forty years, and it burned down twice; each\n"
    "time the village rebuilt it with the stones of the old wall.",
    "B": 'A bridge in Boro carries "the road" over the river {see map} & the meadow.\n'
    "Its third arch is younger than the others, because a flood took it in 1911.",
    "C": "Cale keeps the oldest clock in the valley; it has one hand only. Visitors set their watches by it.",
    "D": "Dorn has three wells.\nThe first is deep, the second is dry, and the third belongs to a family that moved "
    "away long ago;\nits cover is locked, and nobody in Dorn remembers who keeps the key to it now.",
    "S": "The tower of Elm has a door on the north side.  Its stairs turn to the left, which is rare here.  "
    "A bell hangs under the roof of the tower and rings at noon.",
}
"""S is a window as SentenceWindowNodeParser writes it, with two spaces between sentences."""
CHUNKS["AB"] = f"{CHUNKS['A']}\n\n{CHUNKS['B']}"
QUESTION = "Which of them burned down twice?"


def node(name: str, **options: Any) -> TextNode:
    """A node as splitters leave them: white space around the text; metadata, some of it kept from the model."""
    metadata = {} if name == "C" else {"file": f"{name}.md", "score": 1}
    return TextNode(
        id_=name, text=f"  {CHUNKS[name]}\n", metadata=metadata, excluded_llm_metadata_keys=["score"], **options
    )


class Found(BaseRetriever):
    """Finds the named chunks, whatever the question; or those that its last word names."""

    def __init__(self, names: str = "") -> None:
        self._names = names
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        names = self._names or query_bundle.query_str.split()[-1]
        return [NodeWithScore(node=node(name), score=1.0) for name in names]


@dataclass(frozen=True)
class Shape:
    """One row of the table: a pipeline as its users write it, and what it must put into prompts."""

    pipeline: str
    call: str
    run: Callable[[SpecCacheLLM], Any]
    """Builds the pipeline around an LLM and uses it; a coroutine is run in an event loop of its own."""
    chunks: tuple[str, ...]
    """For each prompt the names of its chunks, separated by spaces. "D|" is D cut short, "!D" a Python string of D."""
    replies: Iterable[str] | Callable[[str], str] = ()
    """What the model answers, prompt by prompt; "OK" where nothing is said."""
    answer: str | None = "OK"
    """What the pipeline returns at the end; None where nothing is worth comparing."""
    context: int | None = None
    """A smaller context window than the engine's, in LlamaIndex's tokens, to see chunks cut."""

    @property
    def name(self) -> str:
        return f"{self.pipeline}, {self.call}"


def engine(llm: SpecCacheLLM, names: str = "ABC", **options: Any) -> RetrieverQueryEngine:
    """A query engine over the named chunks."""
    retriever = options.pop("retriever", None) or Found(names)
    return RetrieverQueryEngine.from_args(retriever, llm=llm, **options)


async def drained(stream: Any) -> str:
    """All text of an asynchronous stream."""
    return "".join([piece async for piece in stream])
