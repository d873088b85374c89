"""MkDocs hook: links from a page to other files of the repository also work on the site.

On GitHub a page in ``docs/`` links to ``../benchmarks/results/x.md``. MkDocs knows only the files in ``docs/``. This
hook adds every linked file to the site, below ``repository/``, and rewrites the links. MkDocs reports a link to a file
that does not exist.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_ADDED: Final = "repository/"
_SEARCHED: Final = {"repository/CONTRIBUTING.md": {"boost": 4}, "index.md": {"boost": 2}}
"""How the search treats a page. Other added pages, such as results of benchmarks, are not searched."""

_LINK: Final = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)")
"""The target of an inline Markdown link, without its anchor; no URL."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and the files that these link to."""
    root = Path(config.config_file_path).parent
    unread = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while unread:
        uri, text = unread.pop()
        for target in _targets(uri, text):
            added = _site_uri(target)
            if not added.startswith(_ADDED) or added in files.src_uris or not (root / target).is_file():
                continue
            file = File.generated(config, added, abs_src_path=str(root / target), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
            if added.endswith(".md"):
                unread.append((added, file.content_string))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of one page, and set how the search ranks it."""
    uri = page.file.src_uri
    searched = _SEARCHED.get(uri, {"exclude": uri.startswith(_ADDED)})
    page.meta.setdefault("search", searched)
    folder = posixpath.dirname(uri)

    def rewritten(match: re.Match[str]) -> str:
        target = _site_uri(_repository_path(uri, match[1]))
        return posixpath.relpath(target, folder or ".")

    return _LINK.sub(rewritten, markdown)


def _targets(uri: str, text: str) -> Iterator[str]:
    return (_repository_path(uri, match[1]) for match in _LINK.finditer(text))


def _repository_path(uri: str, link: str) -> str:
    """Where a link of a page points to, relative to the root of the repository."""
    own = uri.removeprefix(_ADDED) if uri.startswith(_ADDED) else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), link))


def _site_uri(path: str) -> str:
    """The place of a repository's file on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else _ADDED + path
