"""Builds the documentation as a web site: ``python -m tools.docs_site``. A warning is an error."""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES, SITE = ROOT / "build" / "site-sources", ROOT / "build" / "site"

OUTSIDE = {
    "README.md": "quickstart.md",
    "docs/README.md": "contents.md",
    "docs/internals/README.md": "internals/contents.md",
    "deploy/README.md": "deployment_files.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Page of the repository to its place on the site. Other pages of docs/ keep theirs."""

NAVIGATION = {
    "Start": ["quickstart", "contents"],
    "Guides": [
        f"guides/{page}" for page in ("rag", "agents", "json", "images", "models", "adapters", "kept_kv", "tuning", "deploying", "receipts", "coming_from")
    ],
    "Use": ["command_line", "web_page", "api", "dialects", "server", "python", "embeddings", "structured_output", "tools", "lang", "cache_hints", "explanations", "sampling", "speculation", "quantization", "gguf", "hybrid_models", "gpu", "status"],
    "Operate": ["reliability", "security", "determinism", "caching", "pieces", "queue_order", "routing", "deploy"],
    "Reference": ["reference_llm", "reference_lang", "deployment_files", "contributing", "changelog"],
    "Internals": [
        "internals/contents",
        *sorted(
            f"internals/{page.stem}"
            for page in (ROOT / "docs" / "internals").glob("*.md")
            if page.stem != "README"
        ),
    ],
}  # fmt: skip
"""Heading of the side bar to its pages. Sphinx warns of a page that is in none."""

REFERENCE = {
    "reference_llm": ("LLM", "radixrt", ["LLM", "SamplingParams"]),
    "reference_lang": ("The language", "radixrt.lang", []),
}
"""Page to its title, module and names (none: all exports), whose docstrings are its content."""

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def write_sources() -> None:
    """Copy the pages, and write the generated ones; ends the program at a broken link."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCES)
    for page in SOURCES.rglob("*.md"):
        source = f"docs/{page.relative_to(SOURCES).as_posix()}"
        if source in OUTSIDE:
            page.unlink()
        else:
            page.write_text(_for_site(page.read_text(), source))
    for source, place in OUTSIDE.items():
        (SOURCES / place).write_text(_for_site((ROOT / source).read_text(), source))
    for page_name, (title, module, names) in REFERENCE.items():
        (SOURCES / f"{page_name}.rst").write_text(_reference(title, module, names))
    (SOURCES / "index.md").write_text(_index())


def build() -> int:
    """Build the site of the sources; returns the exit status."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-j", "auto"]  # fmt: skip
    folders = ["-c", str(Path(__file__).parent), str(SOURCES), str(SITE)]
    return subprocess.run([*command, *folders]).returncode


def _for_site(markdown: str, source: str) -> str:
    """Let links lead to pages of the site. A link to a file that it lacks becomes plain text."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            raise SystemExit(f"{source} links to {target}, which is not there.")
        if path not in OUTSIDE and not path.startswith("docs/"):
            return text
        place = OUTSIDE.get(path, path.removeprefix("docs/"))
        here = posixpath.dirname(OUTSIDE.get(source, source.removeprefix("docs/")))
        return f"[{text}]({posixpath.relpath(place, here or '.')}{anchor})"

    return _LINK.sub(replaced, markdown)


def _reference(title: str, module: str, names: list[str]) -> str:
    lines = [title, "=" * len(title), ""]
    if not names:
        lines += [f".. automodule:: {module}", "   :members:", "   :imported-members:", ""]
    for name in names:
        lines += [f".. autoclass:: {module}.{name}", "   :members:", ""]
    return "\n".join(lines)


def _index() -> str:
    parts = [
        "# radixrt",
        "An LLM serving engine: a radix tree holds the KV cache, a structured-output runtime holds every answer to its schema.",
    ]
    for heading, pages in NAVIGATION.items():
        entries = "\n".join(pages)
        parts.append(f"```{{toctree}}\n:caption: {heading}\n:maxdepth: 1\n\n{entries}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write_sources()
    sys.exit(build())
