"""Prefill curve: the seconds that a replica needs for tokens at a depth.

Each token costs a constant, and attention costs more the more tokens stand before it. So the seconds from token `start` to
token `stop` are

    per_token × (stop − start)  +  per_depth × (stop² − start²) / 2

Example: with 1 ms a token and 0.1 µs for each token before it, a prompt of 20,000 tokens takes 20 + 20 seconds. Its second half
takes 10 + 15 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FORGET = 0.995
"""Weight of earlier measurements, for each new one."""
_DEPTH = 1e4
"""Scale of the depth in the fit, so that both unknowns have about one size."""
_RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class Curve:
    """A prefill curve. See the module.

    Attributes:
        per_token: seconds.
        per_depth: seconds for each token before a token.
    """

    per_token: float = 1e-3
    per_depth: float = 0.0

    def seconds(self, start: float, stop: float) -> float:
        return self.per_token * (stop - start) + self.per_depth * (stop * stop - start * start) / 2


class CurveFit:
    """Learns a curve from prefill calls, by least squares. Later calls count more."""

    def __init__(self, first: Curve | None = None) -> None:
        self._curve = first or Curve()
        self._moments = np.zeros((2, 2))
        self._products = np.zeros(2)

    @property
    def curve(self) -> Curve:
        return self._curve

    def measured(self, start: int, stop: int, seconds: float) -> None:
        """A call computed the tokens from `start` to `stop` in `seconds`.

        Raises:
            ValueError: it computed nothing, or took no time.
        """
        if stop <= start or seconds <= 0:
            raise ValueError(f"a call from {start} to {stop} in {seconds} s")
        features = np.array([stop - start, (stop * stop - start * start) / 2 / _DEPTH])
        weight = 1.0 / features[0]  # a long call is not more certain per token than many short ones
        self._moments = self._moments * _FORGET + weight * np.outer(features, features)
        self._products = self._products * _FORGET + weight * features * seconds
        self._curve = self._solve()

    def _solve(self) -> Curve:
        """The best curve without negative costs."""
        scale = _RIDGE * np.trace(self._moments) / 2
        flat, deep = np.linalg.solve(self._moments + scale * np.eye(2), self._products)
        if deep < 0:
            flat, deep = self._products[0] / self._moments[0, 0], 0.0
        elif flat < 0:
            flat, deep = 0.0, self._products[1] / self._moments[1, 1]
        return Curve(float(flat), float(deep / _DEPTH))
