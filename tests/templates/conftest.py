from pathlib import Path

import pytest

from tests.templates import models, real_models
from titogym.templates.families import QUICKSTART, QWEN3, SMOLLM2
from titogym.templates.model import ModelAssets, load_model_assets


@pytest.fixture(scope="session", params=(QUICKSTART, QWEN3, SMOLLM2), ids=lambda family: family.name)
def small_assets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelAssets:
    """Three ChatML families on a tokenizer of our own; `test_families` is about all."""
    folder = tmp_path_factory.mktemp("models") / request.param.name
    return load_model_assets(models.write_model_dir(folder, request.param))


@pytest.fixture(scope="session")
def qwen3_dir() -> Path:
    return real_models.qwen3()


@pytest.fixture(scope="session")
def qwen3(qwen3_dir: Path) -> ModelAssets:
    return load_model_assets(qwen3_dir)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return real_models.smollm2()


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> ModelAssets:
    return load_model_assets(smollm2_dir)
