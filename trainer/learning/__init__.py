"""From groups to a loss: advantages, corrections, divergences."""
