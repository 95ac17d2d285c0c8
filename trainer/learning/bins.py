"""How the mismatch between rollout and trainer is binned, and how figures of parts are weighed.

No torch here: drivers and pages read it too.
"""

from collections.abc import Mapping

# Upper edges of the bins of m; the last bin is open. Finest about 1, where a healthy run has its mass.
HISTOGRAM_EDGES = (0.0625, 0.25, 0.5, 0.8, 0.9, 0.98, 0.998, 1.002, 1.02, 1.1, 1.25, 2.0, 4.0, 16.0)
HISTOGRAM = "tis/histogram/"
HISTOGRAM_NAMES = tuple(f"{HISTOGRAM}{edge:g}" for edge in (*HISTOGRAM_EDGES, float("inf")))
# Versions behind, from and to, by which the mismatch is reported.
LAG_BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3", 3, 3), ("4_7", 4, 7), ("8_up", 8, 10**9))


def tokens_of(name: str, part: Mapping[str, float]) -> float:
    """The tokens that the mean `name` was taken over: those of its own group of names, or of the loss."""
    own = f"{name.rpartition('/')[0]}/tokens"
    return part.get(own, part.get("loss/tokens", 1.0))
