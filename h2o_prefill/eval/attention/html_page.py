"""One HTML file that holds its pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from h2o_prefill.eval.atomic_write import replaced_file

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto;
  padding: 0 1rem; }
img { width: 100%; height: auto; }
figure { margin: 0 0 2.5rem; }
figcaption { color: #444; max-width: 46rem; }
table { border-collapse: collapse; margin-bottom: 2rem; }
th, td { text-align: left; padding: .15rem 1.5rem .15rem 0; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
"""


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes
    ----------
    path : Path
        A PNG file.
    heading : str
    caption : str
        What is seen.
    """

    path: Path
    heading: str
    caption: str


def write_page(
    path: Path, title: str, facts: Mapping[str, str], pictures: Iterable[Picture]
) -> Path:
    """Write a page that needs no other file.

    Parameters
    ----------
    path : Path
        The .html file.
    title : str
    facts : mapping of str to str
        A table above the pictures.
    pictures : iterable of Picture

    Returns
    -------
    Path
        `path`
    """
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    figures = "\n".join(_figure(picture) for picture in pictures)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<table>\n{rows}\n</table>\n{figures}\n</body>\n</html>\n"
    )
    with replaced_file(path) as scratch:
        scratch.write_text(page, encoding="utf-8")
    return path


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    heading = escape(picture.heading)
    return (
        f"<figure>\n<h2>{heading}</h2>\n"
        f'<img src="data:image/png;base64,{data}" alt="{heading}">\n'
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
    )
