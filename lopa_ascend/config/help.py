"""How commands lay out their --help."""

from __future__ import annotations

import argparse
import textwrap


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps descriptions as they are written, and breaks help texts between words only.

    argparse's own formatters also break at hyphens, which cuts names of flags in two.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
