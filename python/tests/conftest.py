"""Shared inputs of the tests. Tests that need PyTorch are skipped without it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if "torch" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


def pytest_configure(config):
    config.addinivalue_line("markers", "torch: needs PyTorch")


@pytest.fixture
def rng():
    return np.random.default_rng(7)
