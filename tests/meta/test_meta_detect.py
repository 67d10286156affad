"""Planted bugs in the way from pictures to boxes and from checkpoints to weights, each of which a test must catch."""

from pathlib import Path

import pytest
import test_detect_checkpoint as checkpoint_tests
import test_detect_cli as cli_tests
import test_detect_pictures as picture_tests
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mutation import mutant

from numba_psa.nn import checkpoint, picture, written, yolo_pictures

SEARCH = settings(max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
CAUGHT = (AssertionError, ExceptionGroup)
"""What a property test raises; a group where it found several faults."""


# ---- letterbox ---------------------------------------------------------------------------------------------------------
LETTERBOX_BUGS = {
    "the shorter side is fitted": ("longest / max(size)", "longest / min(size)"),
    "the picture stands at the lower edge": ("(whole - side) // 2 for", "(whole - side) for"),
    "what is odd comes before": ("(whole - side) // 2 for", "(whole - side + 1) // 2 for"),
    "a thin picture vanishes": ("inner = tuple(max(round(side * ratio), 1)", "inner = tuple(max(round(side * ratio), 0)"),
    "sides are cut off": (
        "inner = tuple(max(round(side * ratio), 1)",
        "inner = tuple(max(int(side * ratio) - 1, 1)",
    ),
    "a frame of 16ths": ("max(round(side * ratio), 1) // STRIDE) * STRIDE", "max(round(side * ratio), 1) // 16) * 16"),
    "the frame is black": ("GREY = 114", "GREY = 0"),
    "boxes keep the offset": ("(xyxy - offset) * (size / inner)", "xyxy * (size / inner)"),
    "the offset is scaled twice": ("(xyxy - offset) * (size / inner)", "xyxy * (size / inner) - offset"),
    "one ratio for both axes": ("* (size / inner)", "* (size / inner).min()"),
    "the ratio upside down": ("* (size / inner)", "* (inner / size)"),
    "rows and columns exchanged": ("(self.size, self.inner, self.offset)", "(self.size[::-1], self.inner, self.offset)"),
    "boxes are not clipped": (
        "return np.clip((xyxy - offset) * (size / inner), 0, size)",
        "return (xyxy - offset) * (size / inner)",
    ),
    "boxes are clipped at the frame": ("(size / inner), 0, size)", "(size / inner), 0, np.tile(self.frame, 2))"),
}


def judge_letterbox(letterbox):
    @SEARCH
    @given(picture_tests.SIZES, picture_tests.IMGSZ, picture_tests.POINTS)
    def search(size, imgsz, boxes):
        picture_tests.judge_fit(size, imgsz, letterbox.fit(size, imgsz))
        picture_tests.judge_there_and_back(size, letterbox.fit(size, imgsz), boxes)

    for size, imgsz in picture_tests.extremes:
        picture_tests.judge_fit(size, imgsz, letterbox.fit(size, imgsz))
    picture_tests.judge_apply(letterbox.fit)
    search()


@pytest.mark.parametrize("bug", LETTERBOX_BUGS)
def test_a_wrong_letterbox_is_caught(bug):
    with pytest.raises(CAUGHT):
        judge_letterbox(mutant(picture, *LETTERBOX_BUGS[bug])["Letterbox"])


def test_the_letterbox_itself_passes():
    judge_letterbox(picture.Letterbox)


READING_BUGS = {
    "EXIF is ignored": ("pil.ImageOps.exif_transpose(image)", "image"),
    "16 bits are cut off at 255": ("values // 257", "np.minimum(values, 255)"),
    "the lower 8 of 16 bits": ("values // 257", "values % 256"),
}


def judge_reading(folder):
    picture_tests.test_pictures_are_turned_as_exif_says(folder, 6, "PNG")
    picture_tests.test_all_kinds_of_pixels(folder, "16 bits")


@pytest.mark.parametrize("bug", READING_BUGS)
def test_wrong_reading_is_caught(bug, monkeypatch, tmp_path):
    monkeypatch.setattr(picture, "rgb", mutant(picture, *READING_BUGS[bug])["rgb"])
    with pytest.raises(AssertionError):
        judge_reading(tmp_path)


@pytest.mark.parametrize("bug", [("2, 0, 1)[None] / 255", "2, 0, 1)[::-1][None] / 255"), ("[None] / 255", "[None] / 256")])
def test_a_wrong_input_is_caught(bug, monkeypatch):
    monkeypatch.setattr(picture, "network_input", mutant(picture, *bug)["network_input"])
    with pytest.raises(AssertionError):
        picture_tests.test_the_network_sees_rgb_from_0_to_1()


# ---- NMS and boxes -----------------------------------------------------------------------------------------------------
NMS_BUGS = {
    "classes suppress each other": (" | (kind[waiting] != kind[i])", ""),
    "only other classes do": ("kind[waiting] != kind[i]", "kind[waiting] == kind[i]"),
    "at the threshold too": ("(both <= iou *", "(both < iou *"),
    "the union counts both twice": ("area[waiting] - both)", "area[waiting])"),
    "over the smaller area": ("(area[i] + area[waiting] - both)", "np.minimum(area[i], area[waiting])"),
    "boxes apart overlap": ("np.maximum(width, 0) * np.maximum(height, 0)", "width * height"),
    "sides of whole pixels": ("(right - left) * (bottom - top)", "(right - left + 1) * (bottom - top + 1)"),
    "no order": ("order = surest(scores, len(scores))", "order = np.arange(len(scores))"),
    "of equal scores the last comes first": (
        'np.argsort(-scores, kind="stable")',
        'np.argsort(scores, kind="stable")[::-1]',
    ),
    "the least sure first": ("np.argsort(-scores", "np.argsort(scores"),
    "places in the order, not indices": ("return order[kept]", "return np.array(kept, int)"),
    "cut before": ("order = surest(scores, len(scores))", "order = surest(scores, most)"),
    "one too many": ("len(kept) < most", "len(kept) <= most"),
}


def judge_nms(suppress):
    @SEARCH
    @given(picture_tests.candidates(), picture_tests.THRESHOLDS, st.sampled_from([0, 1, 3, 300]))
    def search(found, iou, most):
        picture_tests.judge_nms(suppress, found, iou, most)

    search()


@pytest.mark.parametrize("bug", NMS_BUGS)
def test_wrong_nms_is_caught(bug):
    with pytest.raises(CAUGHT):
        judge_nms(mutant(yolo_pictures, *NMS_BUGS[bug])["nms"])


def test_nms_itself_passes():
    judge_nms(yolo_pictures.nms)


DETECT_BUGS = {
    "boxes stay in the frame": ("letterbox.to_picture(xyxy[kept])", "xyxy[kept]"),
    "another size is mapped back": (
        "boxes = letterbox.to_picture(",
        "boxes = picture.Letterbox.fit(image.size, IMGSZ).to_picture(",
    ),
    "heads are mistaken": ("final(output, conf) if model.end2end", "final(output, conf) if not model.end2end"),
    "centres are taken for corners": ("(centre - half, centre + half)", "(centre, centre + 2 * half)"),
    "half the size": ("output[2:4, sure].T / 2", "output[2:4, sure].T / 4"),
    "boxes of others": ("scores[kept].astype", "scores[kept][::-1].astype"),
}


def judge_detection(detect, folder):
    for end2end in (True, False):
        for size, imgsz in picture_tests.FOUND:
            picture_tests.judge_detect(detect, size, imgsz, end2end)
    picture_tests.test_files_and_lists(folder)


@pytest.mark.parametrize("bug", DETECT_BUGS)
def test_wrong_detection_is_caught(bug, monkeypatch, tmp_path):
    wrong = mutant(yolo_pictures, *DETECT_BUGS[bug])["detect"]
    monkeypatch.setattr(picture_tests, "detect", wrong)
    with pytest.raises((AssertionError, IndexError)):
        judge_detection(wrong, tmp_path)


def test_detection_itself_passes(tmp_path):
    judge_detection(yolo_pictures.detect, tmp_path)


@pytest.mark.parametrize("name", ["decoded", "final"])
@pytest.mark.parametrize(
    "bug", [("sure = scores > conf", "sure = scores >= conf"), ("output[:, 4] > conf", "output[:, 4] >= conf")]
)
def test_a_score_at_the_threshold_is_caught(name, bug, monkeypatch):
    wrong = mutant(yolo_pictures, *bug)
    for each in ("decoded", "final"):
        monkeypatch.setattr(picture_tests, each, wrong[each])
    with pytest.raises(AssertionError):
        picture_tests.test_heads_are_cut_at_the_score()


def test_nan_that_passes_as_a_threshold_is_caught(monkeypatch):
    wrong = mutant(yolo_pictures, "not 0 <= value <= 1", "value < 0 or value > 1")["detect"]
    monkeypatch.setattr(picture_tests, "detect", wrong)
    with pytest.raises(pytest.fail.Exception):
        picture_tests.test_options_that_make_no_sense({"conf": float("nan")}, picture_tests.ParameterError, "nan")


# ---- checkpoints -------------------------------------------------------------------------------------------------------
def plant(monkeypatch, old, new):
    wrong = mutant(checkpoint, old, new)
    for name in ("read_checkpoint", "convert"):
        monkeypatch.setattr(checkpoint_tests, name, wrong[name])


UNPICKLER_BUGS = {
    "names are imported": ("        full = f", "        return super().find_class(module, name)\n        full = f"),
    "calls are inert": (
        '        raise WeightsError(f"it calls',
        '        return cls.__new__(cls)\n        raise WeightsError(f"it calls',
    ),
}


@pytest.mark.parametrize("bug", UNPICKLER_BUGS)
def test_an_unpickler_that_runs_things_is_caught(bug, monkeypatch, tmp_path):
    plant(monkeypatch, *UNPICKLER_BUGS[bug])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        checkpoint_tests.test_nothing_in_a_pickle_is_run(tmp_path, "reduce")


VIEW_BUGS = {
    "the offset is ignored": ("as_strided(storage[first:]", "as_strided(storage"),
    "strides are ignored": ("for stride in strides]\n    return", "for stride in sorted(strides)[::-1]]\n    return"),
}


@pytest.mark.parametrize("bug", VIEW_BUGS)
def test_wrong_views_are_caught(bug, monkeypatch):
    plant(monkeypatch, *VIEW_BUGS[bug])
    with pytest.raises(CAUGHT):
        checkpoint_tests.test_views_of_a_storage_are_what_strides_say()


CHECK_BUGS = {
    "beyond the end": ("last >= storage.size + (size == 0)", "False"),
    "negative": ("n >= 0 for n in counts", "True for n in counts"),
}


@pytest.mark.parametrize("kind", CHECK_BUGS)
def test_views_that_are_not_checked_are_caught(kind, monkeypatch, tmp_path):
    plant(monkeypatch, *CHECK_BUGS[kind])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        checkpoint_tests.test_views_outside_a_storage_are_refused(tmp_path, kind)


STATE_BUGS = {
    "the model, not its average": ('("ema", "model", "state_dict")', '("model", "ema", "state_dict")'),
    "the least stride": ("int(stride.max())", "int(stride.min())"),
    "SiLU is not seen": ('.name.endswith(".SiLU")', '.name.endswith(".silu")'),
    "buffers are left out": ('("_parameters", "_buffers")', '("_parameters",)'),
}


@pytest.mark.parametrize("bug", STATE_BUGS)
def test_a_wrong_state_is_caught(bug, monkeypatch, tmp_path):
    plant(monkeypatch, *STATE_BUGS[bug])
    with pytest.raises(AssertionError):
        checkpoint_tests.test_a_model_gives_its_state_dict(tmp_path, "ema", "float32")


@pytest.mark.parametrize("bug", [("eps != BATCH_NORM_EPS", "False"), ('not in ("SiLU", "Identity")', "in ()")])
def test_what_a_state_dict_does_not_show_is_caught(bug, monkeypatch, tmp_path):
    plant(monkeypatch, *bug)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        checkpoint_tests.test_other_activations_and_eps_are_refused_by_name(tmp_path)


def test_half_written_files_are_caught(monkeypatch, tmp_path):
    from numba_psa.nn import yolo

    monkeypatch.setattr(written, "written", lambda path: Path(path).open("wb"))  # noqa: SIM115
    monkeypatch.setattr(yolo, "load", lambda path: cli_tests.ColourDetector())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best.onnx").write_bytes(b"x")
    with pytest.raises(AssertionError):
        cli_tests.test_an_interrupted_run_leaves_nothing("best.onnx", monkeypatch)
