"""Stands in for an installed SGLang: `python -m sglang.launch_server` starts the scripted engine."""
