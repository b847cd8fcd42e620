"""Statistics of paired differences: what runs of one method have over another's with equal seeds.

They need scipy and statsmodels: pip install -r results/requirements.txt
"""

import warnings
from typing import Any

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

warnings.filterwarnings("ignore", "Precision loss")  # where all differences are equal


def area(curves: Any, places: Any) -> np.ndarray:
    """Returns the mean height of curves [..., points] that were measured at some places [points].

    It is the area under them, over its width.
    """
    return np.trapezoid(curves, places) / (places[-1] - places[0])


def mean_interval(values: np.ndarray) -> tuple[Any, Any, Any]:
    """Returns the mean over seeds (the first axis) and the ends of its 95% t-interval."""
    interval = stats.ttest_1samp(values, 0).confidence_interval()
    return values.mean(0), interval.low, interval.high


def comparison(differences: np.ndarray) -> dict[str, Any]:
    """Returns number and mean of differences [S], its 95% t-interval, and p-values of two tests.

    `p` is a t-test's. `p_flips` is the share of all choices of S signs that take the mean as far
    from 0, or farther. Unlike a t-test, this assumes no normal distribution. It is at least
    2 / 2^S.
    """
    mean, low, high = mean_interval(differences)
    flips = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=2**16, rng=0
    )  # all choices of signs, up to sixteen seeds
    p = stats.ttest_1samp(differences, 0).pvalue
    return {
        "seeds": len(differences),
        "more": mean,
        "low": low,
        "high": high,
        "p": p,
        "p_flips": flips.pvalue,
    }


def smallest_difference(differences: Any) -> float:
    """Returns the true difference that seeds which spread like these would show in 4 cases of 5.

    Shown means that the 95% interval lies on its side of 0.
    """
    deviations = TTestPower().solve_power(nobs=len(differences), alpha=0.05, power=0.8)
    return deviations * np.std(differences, ddof=1)


def smallest_to_pass(half_interval: float, seeds: int, tests: int) -> float:
    """Returns the smallest mean that passes the first step of Holm's correction at 5%.

    The tests are so many, and `half_interval` is half of the mean's 95% t-interval.
    """
    limit, usual = stats.t.ppf([1 - 0.025 / tests, 0.975], seeds - 1)
    return half_interval * limit / usual


def holm(p_values: list[float]) -> list[float]:
    """Returns p-values corrected for all of them together (Holm, 1979)."""
    return multipletests(p_values, method="holm")[1].tolist()
