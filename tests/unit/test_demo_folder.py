"""The folder of a demo: an earlier demo's is replaced, and nothing else is touched."""

from pathlib import Path

import pytest

from lorica.demo.federation import LOCK, MARKER, Layout, prepared
from lorica_security.errors import ConfigurationError, Conflict, LoricaError


def test_an_earlier_demos_is_replaced(tmp_path: Path) -> None:
    place = Layout(tmp_path / "demo")
    with prepared(place):
        (place.out / "silos").mkdir()
        (place.out / "silos" / "train.jsonl").write_text("old")
        (place.out / "summary.json").write_text("old")
        (place.out / "link").symlink_to(tmp_path)
    (tmp_path / "mine").write_text("years of work")
    with prepared(place):
        assert {path.name for path in place.out.iterdir()} == {MARKER, LOCK, "logs", "agents"}
    assert (tmp_path / "mine").read_text() == "years of work"


def test_one_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    place = Layout(tmp_path / "demo")
    with prepared(place):
        (place.out / "summary.json").write_text("of this one")
        with pytest.raises(Conflict, match="another demo"), prepared(place):
            raise AssertionError
        assert (place.out / "summary.json").read_text() == "of this one"


@pytest.mark.parametrize("name", ["thesis", "file", "file/below", "loop"])
def test_what_is_no_demos_folder_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(LoricaError, match=name), prepared(Layout(tmp_path / name)):
        raise AssertionError
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "a file"


def test_a_folder_that_everybody_may_write_to_is_refused_and_so_is_an_earlier_demos(tmp_path: Path) -> None:
    place = Layout(tmp_path / "demo")
    for _ in ("an empty one", "a demo's"):
        place.out.mkdir(exist_ok=True)
        place.out.chmod(0o777)
        with pytest.raises(ConfigurationError, match=r"demo has mode 0777.*chmod o-w"), prepared(place):
            raise AssertionError
        place.out.chmod(0o755)
        with prepared(place):
            pass
