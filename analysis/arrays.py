"""Columns of numbers as a user gives them -> checked float arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnres.errors import DataError

Array = NDArray[np.float64]


def finite_positive(**columns: ArrayLike) -> tuple[Array, ...]:
    """The columns as equally long arrays; DataError names the first value that is not finite and positive."""
    arrays = {name: np.asarray(values, dtype=float).ravel() for name, values in columns.items()}
    if len({values.size for values in arrays.values()}) > 1:
        sizes = ", ".join(str(values.size) for values in arrays.values())
        raise DataError(f"{', '.join(arrays)}: {sizes} values; they must be equally many")
    for name, values in arrays.items():
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise DataError(f"{name}={values[bad[0]]:g}: row {bad[0] + 1} is not finite and positive")
    return tuple(arrays.values())
