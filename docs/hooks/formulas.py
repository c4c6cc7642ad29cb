"""A hook of mkdocs: formulas become MathML, which browsers show without a script.

A page writes a formula as GitHub reads it: `$...$` within a line, `$$...$$` as a paragraph. The extension
`pymdownx.arithmatex` finds the formulas, and this hook converts them. A formula that it cannot convert ends the build.
"""

import re
from html import unescape

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
COMMAND = re.compile(r"\\[A-Za-z]+")
"""In MathML: a command that the converter does not know and leaves as it was written."""
FUNCTION = re.compile(r"<m([io])>(log|min)</m\1>")
"""The converter sets one without space around it, the other with too much."""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the formulas of a page with MathML. Raises PluginError for a command that the converter does not know."""

    def convert_one(formula: re.Match[str]) -> str:
        latex, display = unescape(formula[2]).strip(), "block" if formula[1] == "div" else "inline"
        mathml = FUNCTION.sub(
            r'<mo lspace="0.17em" rspace="0.17em">\2</mo>', convert(latex, display=display)
        )
        if unknown := COMMAND.search(mathml):
            raise PluginError(
                f"{page.file.src_uri}: latex2mathml does not know {unknown[0]} in {latex!r}"
            )
        return mathml

    return FORMULA.sub(convert_one, html)
