"""Pictures drawn by arithmetic alone, so that they are the same with every version of every library."""

import numpy as np


def balls(height: int, width: int) -> np.ndarray:
    """`[1, 3, H, W]` float32 in 0…1: bright discs and a dark bar before a slanted, slightly coloured background."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([60 + 40 * x // width, 70 + 50 * y // height, 90 - 20 * x // width])
    image[:, (y > height // 2) & (y < height // 2 + 12)] = 20
    for i in range(6):
        centre_y, centre_x = height * (3 + 5 * (i % 3)) // 17, width * (2 + 3 * i) // 20
        distance = (y - centre_y) ** 2 + (x - centre_x) ** 2
        image[:, distance < (6 + 3 * i) ** 2] = 255 - 10 * i
        image[:, distance < (3 + i) ** 2] = 255
    return (image[None] / 255).astype(np.float32)
