"""`lorica try` in an environment that has one side alone."""

import re
from importlib.metadata import requires

import pytest

from lorica.commands import demo_commands
from lorica.commands.demo_commands import require_both_sides
from lorica_security.errors import ConfigurationError


def test_with_both_sides_it_goes_on() -> None:
    assert [line for line in requires("lorica") or [] if "extra" in line]
    require_both_sides()


@pytest.mark.parametrize("missing", ["alembic", "jinja2", "safetensors", "sqlglot"])
def test_what_a_side_lacks_is_named_with_the_remedy(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = demo_commands.distributions
    monkeypatch.setattr(demo_commands, "distributions", lambda *, name: () if name == missing else found(name=name))
    with pytest.raises(ConfigurationError, match=re.escape(f"and {missing} of theirs is not installed")):
        require_both_sides()


def test_a_source_without_an_installation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise demo_commands.PackageNotFoundError(name)

    monkeypatch.setattr(demo_commands, "requires", none)
    require_both_sides()
