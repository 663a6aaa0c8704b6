"""The tiny models of families whose code is their authors' alone, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from tests.vl.published.model import PublishedModel
from tests.vl.published.phi3_v import Phi3V

__all__ = ["PUBLISHED"]

PUBLISHED: Mapping[str, type[PublishedModel]] = {
    "phi3_v": Phi3V,
}
