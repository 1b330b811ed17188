"""Selection of a few cases that have all features of many."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np


def covering_subset(features: Sequence[Iterable[Hashable]], costs: Sequence[float]) -> list[int]:
    """Return the indices of cases that together have every feature. Each
    choice has the most new features for its cost."""
    case_features = [set(case) for case in features]
    numbers = {feature: number for number, feature in enumerate(sorted(set().union(*case_features), key=repr))}
    has_feature = np.zeros((len(case_features), len(numbers)), np.float32)
    for case, row in zip(case_features, has_feature, strict=True):
        row[[numbers[feature] for feature in case]] = 1
    is_open, chosen = np.ones(len(numbers), np.float32), []
    while is_open.any():
        chosen.append(int(np.argmax(has_feature @ is_open / np.asarray(costs))))
        is_open[has_feature[chosen[-1]] > 0] = 0
    return chosen
