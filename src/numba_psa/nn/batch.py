"""Many pictures: what each comes to, boxes or the reason why there are none."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numba_psa.errors import NumbaPSAError
from numba_psa.nn import picture
from numba_psa.nn.yolo_pictures import annotated, detect


@dataclass(frozen=True)
class Request:
    """What is wanted of every picture; `drawn` is the Pillow format of annotated ones, None for none."""

    imgsz: int
    conf: float
    drawn: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Of one picture: its size, boxes as `Boxes.as_json` and annotated file, or the error, which is one line."""

    image: str
    size: tuple[int, int] = (0, 0)
    boxes: Sequence[dict[str, Any]] = ()
    drawing: bytes | None = None
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        if self.error:
            return {"image": self.image, "error": self.error}
        return {"image": self.image, "width": self.size[0], "height": self.size[1], "boxes": list(self.boxes)}

    def __str__(self) -> str:
        count = Counter(box["name"] for box in self.boxes)
        found = ", ".join(f"{number} {name}" for name, number in count.most_common()) or "nothing"
        return printable(f"{self.image}: {self.size[0]}×{self.size[1]}, {found}")


def outcome(model: Any, image: str, request: Request) -> Outcome:
    """What becomes of one picture. Its faults do not raise: the others of a batch go on."""
    try:
        content = picture.read(image)
        boxes = detect(model, content, imgsz=request.imgsz, conf=request.conf)
        drawing = None
        if request.drawn:
            file = io.BytesIO()
            annotated(content, boxes).save(file, request.drawn)
            drawing = file.getvalue()
        return Outcome(image, boxes.size, boxes.as_json(), drawing)
    except (NumbaPSAError, OSError) as error:
        return Outcome(image, error=printable(str(error)))
    except MemoryError:
        return Outcome(image, error=printable(f"{image}: there is not enough memory for it"))


def outcomes(model: Any, images: Sequence[str], request: Request) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of every picture, one after the other."""
    for index, image in enumerate(images):
        yield index, outcome(model, image, request)


def printable(text: str) -> str:
    """`text` on one line, with escapes for what cannot be shown: a file may have any name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
