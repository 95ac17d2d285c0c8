"""How weights travel to the engines. No torch here: drivers build these settings."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BroadcastSettings:
    """`mode` is what happens to requests in flight while weights change.

    "retract" puts them back into the queue and drops their keys and values, so that what they sample
    afterwards sees the new weights alone; "in_place" keeps the keys and values of the old weights;
    "abort" ends the requests with what they have.
    """

    mode: Literal["retract", "in_place", "abort"] = "retract"
    bucket_bytes: int = 512 * 2**20  # most bytes in one broadcast; a larger tensor travels alone
    timeout: float = 120.0  # seconds that any one step of an update may take
