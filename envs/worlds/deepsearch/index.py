"""A search index over pages: tantivy's BM25, with titles weighted three times as much as texts. Deterministic."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import tantivy

MAX_QUERY_CHARS = 300
_NO_WORD = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    text: str
    alias: str = ""
    """Another title under which the page is found."""


class Index:
    """Built once, in memory. A search takes microseconds and may run in any thread."""

    def __init__(self, pages: Sequence[Page]) -> None:
        schema = tantivy.SchemaBuilder()
        for name in ("title", "text"):
            schema.add_text_field(name, tokenizer_name="en_stem")
        schema.add_integer_field("number", stored=True)
        self._pages = pages
        self._titled = {
            _plain(title): number
            for number, page in enumerate(pages)
            for title in (page.title, page.alias)
            if title
        }
        self._index = tantivy.Index(schema.build())
        # 15 MB is the least that tantivy takes for a thread.
        # With one thread the segments are always the same.
        writer = self._index.writer(15_000_000, num_threads=1)
        for number, page in enumerate(pages):
            title = f"{page.title} {page.alias}"
            writer.add_document(tantivy.Document(title=title, text=page.text, number=number))
        writer.commit()
        # Merges go on in the background; the searcher must see the segments that stay.
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()

    def search(self, query: str, results: int) -> list[Page]:
        """Return the best pages, best first; ties go to the earlier page. Query operators have no effect.

        A page whose title equals the query comes before all others.
        """
        # Letters and digits only: quotes and brackets of a model are no operators.
        words = _plain(query[:MAX_QUERY_CHARS])
        parsed, _ = self._index.parse_query_lenient(
            words, ["title", "text"], field_boosts={"title": 3.0}
        )
        hits = self._searcher.search(parsed, results).hits
        # Ties go to the earlier page, wherever tantivy's segments hold it.
        ranked = sorted(
            (-score, self._searcher.doc(address)["number"][0]) for score, address in hits
        )
        titled = [self._titled[words]] if words in self._titled else []
        numbers = dict.fromkeys([*titled, *(number for _, number in ranked)])
        return [self._pages[number] for number in numbers][:results]


def _plain(text: str) -> str:
    return _NO_WORD.sub(" ", text.lower()).strip()
