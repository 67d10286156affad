"""`numba-psa detect`: what is written, where, and one clear line for each thing that cannot be done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from detectors import ColourDetector
from PIL import Image
from test_detect_pictures import BROKEN, scene
from typer.testing import CliRunner

from numba_psa.cli import app
from numba_psa.commands import detect as command
from numba_psa.nn import yolo

GOOD = {"c0": (10, 20, 60, 70), "c2": (100, 30, 180, 90)}


@pytest.fixture
def weights(monkeypatch, tmp_path):
    """A file, and in place of the network that it would hold one that finds colours."""
    (tmp_path / "best.onnx").write_bytes(b"x")
    monkeypatch.setattr(yolo, "load", lambda path: ColourDetector())
    monkeypatch.chdir(tmp_path)
    return "best.onnx"


def run(*arguments):
    result = CliRunner().invoke(app, ["detect", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def files(folder="."):
    return sorted(path.name for path in Path(folder).iterdir())


def picture(name, size=(640, 320), **boxes):
    scene(size, **(boxes or GOOD)).save(name)
    return name


def test_one_picture(weights):
    picture("street one.png")
    result = run("street one.png", "--weights", weights, "--out", "seen.jpg", "--json", "boxes.json")
    assert result.exit_code == 0, result.output
    assert result.stdout == "street one.png: 640×320, 1 red thing, 1 blue\n"
    assert result.stderr == ""
    assert json.loads(Path("boxes.json").read_text()) == {
        "weights": "best.onnx",
        "imgsz": 640,
        "conf": 0.25,
        "images": [
            {
                "image": "street one.png",
                "width": 640,
                "height": 320,
                "boxes": [
                    {"xyxy": [10.0, 20.0, 60.0, 70.0], "score": 0.9, "class": 0, "name": "red thing"},
                    {"xyxy": [100.0, 30.0, 180.0, 90.0], "score": 0.7, "class": 2, "name": "blue"},
                ],
            }
        ],
    }
    with Image.open("seen.jpg") as seen:
        assert (seen.format, seen.size) == ("JPEG", (640, 320))
    assert files() == ["best.onnx", "boxes.json", "seen.jpg", "street one.png"]


def test_nothing_found(weights):
    Image.new("RGB", (9, 9)).save("dark.png")
    result = run("dark.png", "--weights", weights, "--conf", "1")
    assert (result.exit_code, result.stdout) == (0, "dark.png: 9×9, nothing\n")


def test_many_pictures_go_on_past_broken_ones(weights):
    os.makedirs("a/b")
    names = [picture("a/street.png"), picture("a/b/street.png", c1=(0, 0, 320, 160)), picture("Straße [red] 街.png")]
    for kind, make in BROKEN.items():
        Path(f"{kind}.png").write_bytes(make())
    broken = [f"{kind}.png" for kind in BROKEN] + ["none.png", "a"]
    images = [names[0], *broken, *names[1:]]
    result = run(*images, "--weights", weights, "--out", "seen", "--json", "boxes.json")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == len(broken)
    for name, line in zip(broken, lines, strict=True):
        assert line.startswith("numba-psa detect: ")
        assert name in line
    assert result.stdout.splitlines() == [
        "a/street.png: 640×320, 1 red thing, 1 blue",
        "a/b/street.png: 640×320, 1 зелёная",
        "Straße [red] 街.png: 640×320, 1 red thing, 1 blue",
    ]
    assert files("seen") == ["Straße [red] 街.png", "street-2.png", "street.png"]
    found = json.loads(Path("boxes.json").read_text())["images"]
    assert [image["image"] for image in found] == images
    assert ["error" in image for image in found] == [image in broken for image in images]
    assert np.asarray(Image.open("seen/street-2.png"))[80, 160].tolist() == [0, 255, 0]


def test_names_that_are_no_text(weights):
    names = ["line\nbreak.png", os.fsdecode(b"caf\xe9.png"), "\x1b[31m.png"]
    for name in names:
        picture(name)
    result = run(*names, "broken\n\x1b[31m.png", "--weights", weights, "--out", "seen", "--json", "boxes.json")
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        "line\\nbreak.png",
        "caf\\udce9.png",
        "\\x1b[31m.png",
    ]
    assert len(result.stderr.splitlines()) == 1
    assert "\x1b" not in result.stderr
    assert [image["image"] for image in json.loads(Path("boxes.json").read_text())["images"]][:3] == names
    assert len(files("seen")) == 3


def test_a_folder_is_used_for_one_picture_too(weights):
    os.mkdir("seen")
    assert run(picture("a.png"), "--weights", weights, "--out", "seen").exit_code == 0
    assert files("seen") == ["a.png"]


def test_names_in_one_folder_differ():
    names = ["x/a.png", "a-2.jpg", "y/a.jpg", "z/A.gif", "a-2.png", "a"]
    found = [path.name for path in command._targets(names, Path("o"))]
    assert len({name.casefold() for name in found}) == len(names)
    assert found[:3] == ["a.png", "a-2.png", "a-3.png"]


def test_what_cannot_be_done_is_one_clear_line(weights):
    image = picture("a.png")
    os.mkdir("folder")
    before = Path("a.png").read_bytes()
    Path("old.json").write_text("old")
    good = (image, "--weights", weights)
    for arguments, message in (
        ((*good, "--imgsz", 0), "imgsz must be at least 32"),
        ((*good, "--imgsz", 33), "32 or 64 would do"),
        ((*good, "--imgsz", 100000), "8192 would do"),
        ((*good, "--conf", "nan"), "conf must be 0 to 1, got nan"),
        ((*good, "--conf", 2), "conf must be 0 to 1"),
        ((*good, "--out", "seen"), "--out seen: pictures are written as"),
        ((*good, "--out", "seen.what"), "not as '.what'"),
        ((*good, "--out", "a.png"), "would overwrite what it is made from"),
        ((*good, "--out", "best.onnx"), "would overwrite"),
        ((*good, "--json", "folder/../a.png"), "would overwrite"),
        ((*good, "--json", "folder"), "Is a directory"),
        ((*good, "--json", "none/boxes.json"), "/none/boxes.json'"),
        ((image, image, "--weights", weights, "--out", "."), "a.png would overwrite"),
        ((image, image, "--weights", weights, "--out", "a.png/b"), "Not a directory"),
        ((image, image, "--weights", weights, "--out", "old.json"), "File exists"),
        ((*good, "--profile", "--ray", "auto"), "give one of them"),
        ((*good, "--out", "b.png", "--json", "folder/../b.png"), "they need a file each"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr, (arguments, result.stderr)
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout == ""
    assert Path("a.png").read_bytes() == before
    assert Path("old.json").read_text() == "old"
    assert files() == ["a.png", "best.onnx", "folder", "old.json"]


@pytest.mark.parametrize("name", ["w.safetensors", "w.npz", "w.onnx", "w.pt", "w.txt", "none.onnx", "."])
def test_files_that_are_no_detector(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    picture("a.png")
    if name == "w.safetensors":
        safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, name)
    elif name == "w.npz":
        np.savez(name, x=np.zeros(3))
    elif name != "none.onnx" and name != ".":
        Path(name).write_bytes(b"rubbish")
    before = files()
    result = run("a.png", "--weights", name, "--json", "boxes.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("numba-psa detect: ")
    assert name in result.stderr
    assert files() == before


def test_a_picture_that_cannot_be_written_is_told(weights, monkeypatch):
    from numba_psa.nn import written

    def full(*_):
        raise OSError(28, "No space left on device")

    picture("a.png")
    monkeypatch.setattr(written.os, "replace", full)
    result = run("a.png", "--weights", weights, "--out", "seen.png")
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert result.stdout == ""
    assert files() == ["a.png", "best.onnx"]


def test_an_interrupted_run_leaves_nothing(weights, monkeypatch):
    def interrupted(*_):
        yield from ()
        raise KeyboardInterrupt

    from numba_psa.nn import batch

    picture("a.png")
    Path("boxes.json").write_text("old")
    monkeypatch.setattr(batch, "outcomes", interrupted)
    result = CliRunner().invoke(app, ["detect", "a.png", "--weights", weights, "--json", "boxes.json", "--out", "b.png"])
    assert result.exit_code not in (0, 1, 2)
    assert Path("boxes.json").read_text() == "old"
    assert files() == ["a.png", "best.onnx", "boxes.json"]


def test_pipes_and_links_are_written_through(weights):
    picture("a.png")
    Path("real.json").write_text("old")
    os.symlink("real.json", "link.json")
    assert run("a.png", "--weights", weights, "--json", "link.json").exit_code == 0
    assert os.path.islink("link.json")
    assert json.loads(Path("real.json").read_text())["images"][0]["width"] == 640
    assert run("a.png", "--weights", weights, "--json", os.devnull).exit_code == 0
    assert not os.path.isfile(os.devnull)


def test_a_terminal_sees_how_far_it_is(weights, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    names = [picture(f"{number}.png") for number in range(3)]
    result = run(*names, "none.png", "--weights", weights)
    assert "4/4" in result.stderr
    assert "No such file or directory: 'none.png'" in result.stderr
    assert "4/4" not in result.stdout
    assert "/" not in run(names[0], "--weights", weights).stderr


def test_profile_is_a_table(weights):
    Path("broken.png").write_bytes(b"")
    result = run("broken.png", picture("a.png"), "--weights", weights, "--profile", "--imgsz", 320)
    assert result.exit_code == 1
    assert "yolo26n on 320×160 pixels" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert rows == [
        ["0", "Conv", "16×80×160", "3.00", "75.0%", "0.500", "167"],
        ["decode", "Decode", "", "1.00", "25.0%", "0.000", ""],
        ["all", "", "", "4.00", "100.0%", "0.500", "125"],
    ]
    assert result.stdout.splitlines()[-1].startswith("onnxruntime: not compared, best.onnx is no .onnx file")


@pytest.mark.parametrize(
    ("arguments", "images", "address"),
    [
        (["a.png", "--ray"], ["a.png"], "auto"),
        (["--ray", "a.png", "b.png"], ["a.png", "b.png"], "auto"),
        (["--ray", "--imgsz", "64", "a.png"], ["a.png"], "auto"),
        (["--ray", "10.0.0.7:6379", "a.png"], ["a.png"], "10.0.0.7:6379"),
        (["a.png", "--ray", "ray://head:10001"], ["a.png"], "ray://head:10001"),
        (["a.png", "--ray=local"], ["a.png"], "local"),
        (["a.png"], ["a.png"], None),
    ],
)
def test_ray_may_stand_without_an_address(weights, monkeypatch, arguments, images, address):
    seen = []
    monkeypatch.setattr(command, "_detect", lambda images, *rest: seen.append((images, rest[-1])))
    assert run(*arguments, "--weights", weights).exit_code == 0
    assert seen == [(images, address)]


def test_nothing_of_ray_is_imported_without_the_flag(tmp_path):
    """A `ray` that cannot be imported stands first on the path."""
    (tmp_path / "ray.py").write_text("raise SystemExit('ray was imported')")
    code = "from numba_psa.cli import app; app(['detect', 'a.png', '--weights', 'none.onnx'])"
    for arguments, said in (("", "No such file"), (", '--ray'", "")):
        result = subprocess.run(
            [sys.executable, "-c", code.replace("'none.onnx'", "'none.onnx'" + arguments)],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2
        assert said in result.stderr
        assert "ray was imported" not in result.stderr
