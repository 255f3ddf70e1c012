"""Pages of a book, a retriever over them, and a model that names the first page it was given."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable

from langchain_speccache import ChatSpecCache
from tests.scripted import ScriptedRuntime

N_PAGES = 6
ONE, TWO = ("query 0",), ("query 0", "query 3")
"""Questions; each finds three pages, and no two share one."""

# Line breaks, quotes, braces, tabs, letters beyond ASCII, and space at both ends, which nobody promises to keep.
PAGES = tuple(
    f'  Page {n} of the log: a storm in the year {1880 + n}, {{"wind": "north"}}.\n'
    f"\tNine ships <passed> the cape & the keeper of light {n} wrote down their names: Zürich, 東京.\n"
    for n in range(N_PAGES)
)
LINES = tuple(
    f"Page {n} tells of the mill that {n + 2} masons from the north built in one summer." for n in range(N_PAGES)
)

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from this log:\n\n{context}"), ("human", "{input}")])


def pages_of(query: str) -> list[int]:
    """Numbers of the pages that the retriever finds."""
    first = int(query.removeprefix("query "))
    return [(first + i) % N_PAGES for i in range(3)]


def answer_to(query: str) -> str:
    """What the model says when it was given the pages for this query."""
    return f"From page {pages_of(query)[0]}."


def reply(prompt: str) -> str:
    """Name the first page in the prompt; without pages, repeat the query, as a query writer would."""
    if page := re.search(r"[Pp]age (\d)", prompt):
        return f"From page {page[1]}."
    return re.findall(r"query \d", prompt)[-1]


def call_or_reply(prompt: str) -> str:
    """What an agent's model says: it looks the user's query up, then names the first page that was found."""
    last_turn = prompt.split("<|im_start|>")[-2]
    if last_turn.startswith("tool\n"):
        return reply(last_turn)
    query = re.findall(r"query \d", last_turn)[0]
    return f'Let me see.\n<tool_call>\n{{"name": "log", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


class Shelf(BaseRetriever):
    """Finds the pages that `pages_of` names."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [self.documents[n] for n in pages_of(query)]


def join(documents: Iterable[Document]) -> str:
    """The `format_docs` of LangChain's documentation."""
    return "\n\n".join(document.page_content for document in documents)


@dataclass(frozen=True)
class Bench:
    """What a pipeline is built from."""

    runtime: ScriptedRuntime
    bare: ClassVar = Shelf(documents=[Document(page_content=text) for text in PAGES])
    described: ClassVar = Shelf(
        documents=[Document(page_content=text, metadata={"source": f"{n}.md"}) for n, text in enumerate(PAGES)]
    )
    lines: ClassVar = Shelf(documents=[Document(page_content=text) for text in LINES])

    @property
    def llm(self) -> ChatSpecCache:
        return ChatSpecCache(runtime=self.runtime)


Answers = list[str]
Run = Callable[[Bench], Answers | Awaitable[Answers]]


@dataclass(frozen=True)
class Shape:
    """One pipeline, called in one way."""

    pipeline: str
    call: str
    run: Run
    queries: Sequence[str] = ONE
    matches: bool = True
    """False where no chunk can be found in the prompt."""
    texts: Sequence[str] = PAGES
    reply: Callable[[str], str] = reply
    in_prompts: Sequence[str] | None = None
    """The queries whose pages stand in the prompts, where a history repeats them."""

    def __str__(self) -> str:
        return f"{self.pipeline}, {self.call}"

    @property
    def chunks(self) -> list[str]:
        """The chunks in the prompts of this run."""
        queries = self.queries if self.in_prompts is None else self.in_prompts
        return [self.texts[page] for query in queries for page in pages_of(query)]


# The six ways to call a runnable. Each takes a runnable from query to text.

Chain = Runnable[str, Any]


def invoke(chain: Chain, queries: Sequence[str]) -> Answers:
    return [chain.invoke(query) for query in queries]


async def ainvoke(chain: Chain, queries: Sequence[str]) -> Answers:
    return [await chain.ainvoke(query) for query in queries]


def stream(chain: Chain, queries: Sequence[str]) -> Answers:
    return ["".join(chain.stream(query)) for query in queries]


async def gathered(pieces: AsyncIterator[str]) -> str:
    """A streamed answer."""
    return "".join([piece async for piece in pieces])


async def astream(chain: Chain, queries: Sequence[str]) -> Answers:
    return [await gathered(chain.astream(query)) for query in queries]


def batch(chain: Chain, queries: Sequence[str]) -> Answers:
    return chain.batch(list(queries))


async def abatch(chain: Chain, queries: Sequence[str]) -> Answers:
    return await chain.abatch(list(queries))


FORMS = {"invoke": invoke, "ainvoke": ainvoke, "stream": stream, "astream": astream, "batch": batch, "abatch": abatch}


def in_all_forms(pipeline: str, make: Callable[[Bench], Chain], **facts: Any) -> list[Shape]:
    """A shape for each of the six forms; batches hold two queries."""

    def run(form: Callable[[Chain, Sequence[str]], Any], queries: Sequence[str]) -> Run:
        return lambda bench: form(make(bench), queries)

    forms = [(name, form, TWO if "batch" in name else ONE) for name, form in FORMS.items()]
    return [Shape(pipeline, name, run(form, queries), queries, **facts) for name, form, queries in forms]
