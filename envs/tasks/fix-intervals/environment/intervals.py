"""Intervals [start, end] of whole minutes with start < end; the end itself is not part of the interval."""


def merge(intervals):
    """The same minutes in as few intervals as possible, in ascending order. The input is left as it is.

    Intervals that touch ([1, 2] and [2, 3]) become one.
    """
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged


def total(intervals):
    """How many minutes lie in at least one of the intervals."""
    return sum(end - start for start, end in intervals)


def gaps(intervals, start, end):
    """The parts of [start, end] that no interval covers, in ascending order."""
    free = []
    for busy_start, busy_end in merge(intervals):
        if busy_start > start:
            free.append([start, busy_start])
        start = max(start, busy_end)
    if start < end:
        free.append([start, end])
    return free
