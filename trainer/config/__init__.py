"""Configuration of a run: its sections, what cannot be, the file, the reference page."""
