"""The silo's own entropy of training: drawn once, kept, private."""

from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError
from silo_agent.edges.keys.own_entropy import own_entropy


def test_it_is_drawn_once_and_kept_and_others_cannot_read_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert len(own_entropy(one)) == 32
    assert own_entropy(one) == own_entropy(one)
    assert own_entropy(one) != own_entropy(other)
    assert len({own_entropy(one)[at : at + 4] for at in range(0, 32, 4)}) > 4, "each byte of it is drawn"
    assert one.stat().st_mode & 0o077 == 0
    one.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        own_entropy(one)


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_a_damaged_one_is_refused_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "training.entropy"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="remove it"):
        own_entropy(path)
