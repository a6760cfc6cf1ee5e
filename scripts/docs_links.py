"""Makes the links of the documents work in the site as they do in the repository. A hook of mkdocs.

A page of docs/ is at the root of the site. The nav may also name Markdown files elsewhere in the repository, which are
pages at the same place in the site. A link to a file that is no page, such as a program, is shown without its link:
the site has no address for it.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_DOCS = "docs/"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^ *```")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    root = _root(config)
    for place in _places(config.nav):
        if files.get_file_from_path(place) is None and (root / place).is_file():
            files.append(File.generated(config, place, abs_src_path=str(root / place)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    here = _DOCS + source if (Path(config.docs_dir) / source).is_file() else source  # in the repository
    lines = markdown.split("\n")
    fenced = False
    for number, line in enumerate(lines):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            lines[number] = _LINK.sub(lambda link: _in_site(link, here, source, _root(config), files), line)
    return "\n".join(lines)


def _in_site(link: re.Match[str], here: str, source: str, root: Path, files: Files) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["path"]))
    if "://" in link["path"] or link["path"].startswith(("/", "mailto:")) or not (root / path).exists():
        return link[0]  # nothing of ours, or nothing at all, which mkdocs says
    target = path.removeprefix(_DOCS)
    if files.get_file_from_path(target) is None:
        return link["text"]
    relative = posixpath.relpath(target, posixpath.dirname(source) or ".")
    return f"{link['image']}[{link['text']}]({relative}{link['anchor'] or ''})"


def _places(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav or ():
            yield from _places(part)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent
