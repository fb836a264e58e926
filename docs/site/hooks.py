"""Hooks of MkDocs: pages from other folders of the repository, their links, diagrams, and roles in docstrings."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security-policy.md": "SECURITY.md",
    "protocol.md": "runtime/protocol/PROTOCOL.md",
    "doubles.md": "tests/doubles/README.md",
    **{f"examples/{path.parent.name}.md": f"examples/{path.parent.name}/README.md"
       for path in ROOT.glob("examples/*/README.md")},
}  # fmt: skip
"""Pages of the site whose file is not in ``docs``."""
PAGES = {source: page for page, source in SOURCES.items()}
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)(.*?)</code>")
THEMES = {"light": "neutral", "dark": "dark"}
SIZE = re.compile(r"max-width: ?([0-9.]+)px;")
SMALLEST = 0.62
"""Scale of a diagram in a narrow window, where it scrolls: texts of 14 pixels stay readable."""
SEQUENCE = {
    "wrap": True,
    "width": 165,
    "actorMargin": 5,
    "messageMargin": 30,
    "messageFontSize": 14,
    "actorFontSize": 14,
}
"""Settings of sequence diagrams, so that they fit the column of a page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are kept elsewhere."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of the repository to pages and files of the site, and draw the diagrams."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if not (ROOT / path).is_file():
            return found[1]  # the strict build complains
        there = PAGES.get(path) or path.removeprefix("docs/")
        if there not in files.src_uris:
            files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
        return posixpath.relpath(there, posixpath.dirname(here) or ".")

    return DIAGRAM.sub(lambda found: drawing(found[1]) or found[0], LINK.sub(target, markdown))


def drawing(source: str) -> str | None:
    """Return a diagram as SVG in light and dark, which needs no script; None where the renderer has no wheel."""
    try:
        import merman
    except ImportError:
        return None
    if source.startswith("sequenceDiagram"):
        # A line for each function: the renderer itself breaks long texts inside their words.
        source = source.replace(", ", ",<br/>").replace(" · ", "<br/>")
    svgs = []
    for scheme, theme in THEMES.items():
        settings = json.dumps({"theme": theme, "sequence": SEQUENCE})
        options = json.dumps({"svg": {"diagram_id": f"diagram-{scheme}"}})
        svg = merman.Merman().render_svg(f"%%{{init: {settings}}}%%\n{source}", options)
        svg = SIZE.sub(lambda found: f"{found[0]} min-width: {SMALLEST * float(found[1]):.0f}px;", svg, count=1)
        svgs.append(f'<div class="diagram {scheme}">{svg}</div>')
    return "\n".join(svgs)


def on_page_content(html: str, **_: object) -> str:
    """Show the roles of docstrings as code."""
    return ROLE.sub(lambda found: f"<code>{found[2].rpartition('.')[2] if found[1] else found[2]}</code>", html)
