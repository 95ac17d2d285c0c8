"""Incremental parsers: sampled text in any pieces, the same events and the same message out."""
