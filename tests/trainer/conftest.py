"""Fixtures of whole runs."""

from tests.trainer.whole_run import directory, engine, model_dir

__all__ = ["directory", "engine", "model_dir"]
