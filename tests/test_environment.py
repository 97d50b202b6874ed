"""What is set for a moment is as it was afterwards, whatever happened meanwhile."""

from __future__ import annotations

import os

import pytest

from omniflow.environment import environment


def test_values_are_there_meanwhile_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW_TEST_A", "before")
    monkeypatch.delenv("OMNIFLOW_TEST_B", raising=False)
    with pytest.raises(KeyError), environment({"OMNIFLOW_TEST_A": "1", "OMNIFLOW_TEST_B": "2"}):
        assert (os.environ["OMNIFLOW_TEST_A"], os.environ["OMNIFLOW_TEST_B"]) == ("1", "2")
        raise KeyError
    assert os.environ["OMNIFLOW_TEST_A"] == "before"
    assert "OMNIFLOW_TEST_B" not in os.environ
    with environment({"OMNIFLOW_TEST_B": "again"}):
        assert os.environ["OMNIFLOW_TEST_B"] == "again"
