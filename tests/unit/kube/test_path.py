"""Paths of the API are made of names that Kubernetes would take."""

from __future__ import annotations

import pytest

from slurmbridge.kube.session import resource_path
from slurmbridge.pool.errors import ParseError


def test_segments_are_joined_and_quoted() -> None:
    assert resource_path("api", "v1", "nodes", "gpu-1.example") == "/api/v1/nodes/gpu-1.example"
    assert resource_path("api", "a b?c#d&ü") == "/api/a%20b%3Fc%23d%26%C3%BC"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../secrets", "a%2fb"])
def test_a_name_never_leads_to_another_resource(name: str) -> None:
    with pytest.raises(ParseError):
        resource_path("api", "v1", "namespaces", name)
