"""Figures are hostile bytes in a directory that may be the code's own workspace."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.cli.save_files import Figures
from sbx.errors import BadRequest
from sbx.protocol.runs import MimeBundle, Run, Status


def shown(*bundles: MimeBundle) -> Run:
    return Run("r", Status.OK, outputs=bundles)


PNG = shown({"image/png": base64.b64encode(b"png").decode()})


@pytest.fixture
def figures(tmp_path: Path) -> Iterator[Figures]:
    figures = Figures(tmp_path / "figures")
    yield figures
    figures.close()


def test_a_planted_link_is_never_written_through(figures: Figures, tmp_path: Path) -> None:
    (tmp_path / "figures/figure-1.png").symlink_to(tmp_path / "victim")
    (tmp_path / "figures/figure-2.png").symlink_to("/dev/null")
    assert figures.save(PNG) == [tmp_path / "figures/figure-3.png"]
    assert not (tmp_path / "victim").exists()


def test_a_directory_that_was_replaced_gets_nothing(figures: Figures, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "figures").rename(tmp_path / "away")
    (tmp_path / "figures").symlink_to(tmp_path / "victim")
    figures.save(PNG)
    assert os.listdir(tmp_path / "victim") == []
    assert os.listdir(tmp_path / "away") == ["figure-1.png"]


def test_one_file_for_each_thing_shown_and_none_for_what_is_no_image(
    figures: Figures, tmp_path: Path
) -> None:
    image = base64.b64encode(b"x").decode()
    both = {"image/svg+xml": "<svg/>", "image/png": image}
    odd: list[MimeBundle] = [{"image/png": 7}, {"image/png": "a"}, {"text/plain": "x"}]
    figures.save(shown(both, {"image/svg+xml": "<svg/>"}, *odd))
    assert sorted(os.listdir(tmp_path / "figures")) == ["figure-1.png", "figure-1.svg"]


def test_a_place_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="figures cannot be written to"):
        Figures(tmp_path / "file")
