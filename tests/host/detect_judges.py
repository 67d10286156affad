"""What the tests of detection share: non-maximum suppression by its definition."""


def overlap(a, b):
    """IoU, from its definition."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / union if union else 0.0


def brute_force(xyxy, scores, classes, iou, most):
    """Indices of boxes, the surest first, that no surer one kept of the same class overlaps by more than iou."""
    kept = []
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if all(classes[j] != classes[i] or overlap(xyxy[i], xyxy[j]) <= iou for j in kept):
            kept.append(i)
    return kept[:most]
