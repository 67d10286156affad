"""`numba-psa detect --ray` on a Ray cluster of this machine: the boxes of one process, whoever dies in the middle."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_detect_pictures import BROKEN, scene

YOLO11N = Path(__file__).parents[2] / ".models" / "yolo11n.safetensors"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: pip install 'numba-psa[cluster]'"),
    pytest.mark.skipif(not YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh"),
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="who reads a pipe is seen in /proc"),
]
PIPE = "05.png"
"""A picture that comes through a pipe: whoever reads it waits until the test has sent it."""


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    # The head runs no work; each worker machine has one core.
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 150_000_000})
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=150_000_000)
    yield made
    made.shutdown()


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Twelve pictures, one of which is broken, and one a pipe."""
    monkeypatch.chdir(tmp_path)
    names = [f"{number:02}.png" for number in range(12)]
    for number, name in enumerate(names):
        scene((320, 200), c0=(10 * number, 20, 10 * number + 60, 70), c2=(100, 90, 180, 190)).save(name)
    Path(names[3]).write_bytes(BROKEN["cut"]())
    return names


def command(names, *options):
    code = "from numba_psa.cli import app; app()"
    return [sys.executable, "-c", code, "detect", *names, "--weights", str(YOLO11N), "--conf", "0.01", *options]


def start(names, *options):
    return subprocess.Popen(command(names, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def one_process(names):
    result = subprocess.run(command(names, "--json", "one.json", "--out", "one"), capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    return result


def assert_same(process, expected):
    """The same lines, boxes and annotated pictures as one process gave."""
    out, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    assert out == expected.stdout
    assert [line for line in error.splitlines() if line.startswith("numba-psa")] == expected.stderr.splitlines()
    assert json.loads(Path("many.json").read_text()) == json.loads(Path("one.json").read_text())
    assert sum(len(image.get("boxes", ())) for image in json.loads(Path("one.json").read_text())["images"]) > 10
    assert sorted(os.listdir("many")) == sorted(os.listdir("one"))
    for name in os.listdir("one"):
        assert (Path("many") / name).read_bytes() == (Path("one") / name).read_bytes()


def test_a_cluster_gives_the_boxes_of_one_process(cluster, pictures):
    expected = one_process(pictures)
    assert_same(start(pictures, "--json", "many.json", "--out", "many", "--ray", cluster.address), expected)


def reader(besides=()):
    """The process that has the pipe open, once there is one, and the end of the pipe that it waits at."""
    deadline, pipe = time.monotonic() + 60, Path(PIPE).resolve()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # ENXIO: nobody reads it
            end = os.open(PIPE, os.O_WRONLY | os.O_NONBLOCK)
            for _ in range(100):
                for link in Path("/proc").glob("[0-9]*/fd/*"):
                    process = int(link.parts[2])
                    with contextlib.suppress(OSError):
                        if process not in {os.getpid(), *besides} and Path(os.readlink(link)) == pipe:
                            return process, end
                time.sleep(0.05)
            os.close(end)
        time.sleep(0.05)
    raise AssertionError("nobody reads the picture")


def as_pipe(name):
    """The bytes of a picture, in whose place a pipe now is."""
    content = Path(name).read_bytes()
    os.unlink(name)
    os.mkfifo(name)
    return content


def raylet_of(process):
    parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    assert "raylet" in Path(f"/proc/{parent}/comm").read_text()
    return parent


@pytest.mark.parametrize("dies", ["worker", "machine"])
def test_what_dies_in_the_middle_loses_no_picture(cluster, pictures, dies):
    expected = one_process(pictures)
    content = as_pipe(PIPE)
    process = start(pictures, "--json", "many.json", "--out", "many", "--ray", cluster.address)
    try:
        first, end = reader()
        time.sleep(2)  # others are done, or under way
        victims = [first] if dies == "worker" else [raylet_of(first), first]
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        second, other_end = reader(besides=[first])
        os.close(end)
        os.set_blocking(other_end, True)
        os.write(other_end, content)
        os.close(other_end)
        assert second != first
        assert_same(process, expected)
    finally:
        process.kill()


def test_a_picture_that_kills_every_worker_is_an_error(cluster, pictures):
    as_pipe(PIPE)
    process = start(pictures, "--json", "many.json", "--ray", cluster.address)
    try:
        killed, ends = [], []
        while process.poll() is None:
            with contextlib.suppress(AssertionError):
                victim, end = reader(besides=killed)
                ends.append(end)
                killed.append(victim)
                os.kill(victim, signal.SIGKILL)
            if len(killed) > 4:
                break
        for end in ends:
            os.close(end)
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert f"numba-psa detect: {PIPE}: no worker of the cluster came to an end with it" in error.splitlines()
        images = json.loads(Path("many.json").read_text())["images"]
        assert [image["image"] for image in images if "error" in image] == ["03.png", PIPE]
        assert len(killed) == 5
    finally:
        process.kill()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no-such-host:6379"])
def test_no_cluster_is_one_clear_line(pictures, address):
    process = start(pictures, "--ray", address)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert error.startswith(f"numba-psa detect: no Ray cluster can be reached at {address}: ")
    assert len(error.splitlines()) == 1
