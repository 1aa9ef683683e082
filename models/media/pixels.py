"""The means and deviations by which families normalise pixels where their settings do not tell."""

from __future__ import annotations

from collections.abc import Mapping

CLIP_PIXELS: Mapping[str, object] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
HALF_PIXELS: Mapping[str, object] = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
"""How CLIP's kind normalises pixels, and how others bring them to numbers from -1 to 1."""
