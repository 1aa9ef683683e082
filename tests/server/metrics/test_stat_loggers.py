"""The names under which an operator may ask for stat loggers."""

from importlib.metadata import EntryPoint

import pytest
from operator_plugins import TellingLogger

from server.metrics import stat_loggers
from server.metrics.stat_loggers import StatLoggerBase, find_makers


def test_installed_classes_have_names_and_others_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "facet.stat_loggers"
    installed = EntryPoint("ours", "server.metrics.stat_loggers:StatLoggerBase", group)
    monkeypatch.setattr(stat_loggers, "entry_points", lambda group: [installed] * (group == installed.group))
    assert find_makers(["ours", "operator_plugins:TellingLogger"]) == [StatLoggerBase, TellingLogger]
    with pytest.raises(ValueError, match="--stat-loggers theirs: write it as module:Name"):
        find_makers(["theirs"])
