"""What `coordinator check` and `silo-agent check` show: a table for people, JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from lorica_security.console.preflight import Check
from lorica_security.console.terminal import Page


def check_page(checks: Sequence[Check], title: str) -> Page:
    rows = [
        (
            item.name,
            item.outcome.value,
            f"{item.misconfiguration}: {item.detail}" if item.misconfiguration else item.detail,
        )
        for item in checks
    ]
    return Page(columns=("check", "outcome", "what was found, and the remedy"), rows=rows, title=title, remarks=True)


def check_json(checks: Sequence[Check]) -> str:
    return json.dumps([{**asdict(item), "outcome": item.outcome.value} for item in checks], indent=1)
