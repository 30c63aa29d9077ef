"""What `coordinator check` and `silo-agent check` show: a table for people, JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from security.preflight import Check


def check_table(checks: Sequence[Check], title: str) -> Table:
    table = Table("check", "outcome", title=title)
    table.add_column("what was found, and the remedy", overflow="fold")
    for item in checks:
        found = f"{item.misconfiguration}: {item.detail}" if item.misconfiguration else item.detail
        # It may quote a file or a peer: no control character reaches the terminal.
        shown = "".join(character if character.isprintable() else " " for character in found)
        table.add_row(item.name, item.outcome.value, escape(shown))
    return table


def check_json(checks: Sequence[Check]) -> str:
    return json.dumps([{**asdict(item), "outcome": item.outcome.value} for item in checks], indent=1)
