from tests.engines.fixtures import sglang_server, tiny_model

__all__ = ["sglang_server", "tiny_model"]
