# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from types import SimpleNamespace

import pytest
import ray

from marin_rl.distributed import coordinator_client
from tests.distributed.fake_ray import Cluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster(None)
    context = SimpleNamespace(get_node_id=lambda: "here" * 8)
    monkeypatch.setattr(ray, "get", fake.get)
    monkeypatch.setattr(ray, "nodes", lambda: fake.nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(coordinator_client, "RETRY_SECONDS", 0.0)
    return fake
