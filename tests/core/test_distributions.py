"""Quantiles, compared with values of scipy 1.17.1."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.distributions import (
    beta_quantile,
    chi_square_quantile,
    normal_quantile,
    student_t_quantile,
)

PROBABILITIES = st.floats(1e-4, 1 - 1e-4)


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),
    [
        (0.05, 0.4, 4.0784262202257053e-07),
        (0.05, 2, 0.10258658877510106),
        (0.05, 2.5, 0.21075811235783617),
        (0.95, 1.7, 5.396047733322794),
        (0.95, 2, 5.991464547107979),
        (0.95, 3.43, 8.547895916506041),
        (0.983, 7.25, 17.456595357858713),
        (0.05, 12.3, 5.4243284063518304),
        (0.95, 58.6, 77.46959341665546),
        (0.5, 100.0, 99.33412923598846),
        (0.95, 1234.5, 1317.3523217782185),
        (0.99, 3999.0, 4209.985407388893),
        (0.01, 4001.0, 3795.8448276245886),
        (0.95, 25000.0, 25368.93396635394),
        (0.05, 2e8, 199967104.06452918),
        (0.9999, 1e6, 1005268.0396009346),
    ],
)
def test_chi_square_quantiles_equal_scipys(p: float, degrees: float, expected: float) -> None:
    assert chi_square_quantile(p, degrees) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),
    [
        (0.95, 59, 1.6710930321038946),
        (0.95, 29, 1.6991270265334972),
        (0.95, 14, 1.761310135774891),
        (0.95, 7, 1.8945786050900062),
        (0.95, 1, 6.313751514675037),
        (0.75, 7, 0.7111417780817866),
        (0.99, 29, 2.4620213601504126),
        (0.9833333, 59, 2.179049771589103),
        (0.3, 14, -0.5365521798074557),
        (0.999, 19, 3.5794001489547154),
    ],
)
def test_student_t_quantiles_equal_scipys(p: float, degrees: float, expected: float) -> None:
    assert student_t_quantile(p, degrees) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "a", "b", "expected"),
    [
        (0.95, 1, 10, 0.2588655508930522),
        (0.05, 30, 1, 0.9049661471446958),
        (0.95, 991, 10, 0.9945648598552932),
        (0.05, 10, 991, 0.005435140144706774),
        (0.95, 3, 1e5, 6.29553248813905e-05),
        (0.5, 501, 500, 0.5004998333000619),
        (0.95, 5e7, 5e7, 0.500082242680997),
        (0.1, 29.5, 0.5, 0.9548076291545035),
        (0.95, 99_999_990, 11, 0.999999938309926),
    ],
)
def test_beta_quantiles_equal_scipys(p: float, a: float, b: float, expected: float) -> None:
    assert beta_quantile(p, a, b) == pytest.approx(expected, rel=1e-9)


def test_the_median_of_a_symmetric_distribution_is_its_centre() -> None:
    assert student_t_quantile(0.5, 7) == 0.0
    assert beta_quantile(0.5, 40, 40) == pytest.approx(0.5)
    assert normal_quantile(0.5) == 0.0


@given(p=PROBABILITIES)
def test_two_degrees_of_freedom_are_an_exponential_distribution(p: float) -> None:
    assert chi_square_quantile(p, 2) == pytest.approx(-2 * math.log1p(-p), rel=1e-9)


@given(p=PROBABILITIES, degrees=st.floats(3_000, 6_000))
def test_the_expansion_for_many_degrees_continues_the_exact_quantile(
    p: float, degrees: float
) -> None:
    step = chi_square_quantile(p, degrees + 1) - chi_square_quantile(p, degrees)
    z = normal_quantile(p)
    assert step == pytest.approx(1 + z / math.sqrt(2 * degrees), abs=1e-3)


@given(ps=st.tuples(PROBABILITIES, PROBABILITIES), degrees=st.floats(0.05, 1e9))
def test_chi_square_quantiles_grow_with_their_probability(
    ps: tuple[float, float], degrees: float
) -> None:
    low, high = (chi_square_quantile(p, degrees) for p in sorted(ps))
    assert 0 <= low <= high


@given(p=PROBABILITIES, a=st.floats(0.5, 1e8), b=st.floats(0.5, 1e8))
def test_beta_quantiles_lie_between_zero_and_one(p: float, a: float, b: float) -> None:
    assert 0 <= beta_quantile(p, a, b) <= 1


def test_a_beta_quantile_near_zero_is_accurate_whatever_the_larger_parameter() -> None:
    # For small x, I_x(a, b) = x^a / (a B(a, b)) · (1 + O(x)).
    a, b, p = 0.53125, 0.5, 1e-4
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    expected = math.exp((math.log(p * a) + log_beta) / a)
    assert beta_quantile(p, a, b) == pytest.approx(expected, rel=1e-6)
    assert beta_quantile(1 - p, b, a) == pytest.approx(1 - expected, abs=1e-12)
