"""The cost of prompt tokens and of generated tokens, separated by regression."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.charge import Amounts
from podgpu.past.bills.token_fit import NoFit, TokenFit, fit_tokens

PROMPT, GENERATED = 2e-5, 4e-4  # GPU seconds of a token


def used(busy: float, prompt: float, generated: float) -> Amounts:
    return Amounts(busy_seconds=busy, prompt_tokens=prompt, generated_tokens=generated)


def steps_of(number: int, noise: float = 0.0, seed: int = 1) -> list[Amounts]:
    random = Random(seed)
    steps = []
    for _ in range(number):
        prompt = random.uniform(1e5, 2e6)
        generated = random.uniform(1e4, 2e5)
        busy = PROMPT * prompt + GENERATED * generated
        steps.append(used(busy * random.gauss(1.0, noise), prompt, generated))
    return steps


def test_both_costs_are_found() -> None:
    fit = fit_tokens(steps_of(12))
    assert isinstance(fit, TokenFit)
    assert (fit.prompt, fit.generated) == pytest.approx((PROMPT, GENERATED))
    assert fit.residual_ratio == pytest.approx(0.0, abs=1e-6)
    assert fit.steps == 12


def test_noise_is_the_residual() -> None:
    fit = fit_tokens(steps_of(200, noise=0.05))
    assert isinstance(fit, TokenFit)
    assert (fit.prompt, fit.generated) == pytest.approx((PROMPT, GENERATED), rel=0.05)
    assert fit.residual_ratio == pytest.approx(0.055, abs=0.02)


def test_few_steps_do_not_make_the_noise_look_smaller() -> None:
    """Two of the twelve degrees of freedom are used by the two estimates."""
    residuals = []
    for seed in range(200):
        fit = fit_tokens(steps_of(12, noise=0.05, seed=seed))
        if isinstance(fit, TokenFit):
            residuals.append(fit.residual_ratio)
    assert len(residuals) > 150
    assert sum(residuals) / len(residuals) == pytest.approx(0.055, abs=0.004)


def why_not(steps: list[Amounts]) -> str:
    fit = fit_tokens(steps)
    assert isinstance(fit, NoFit)
    return fit.reason


def test_too_few_steps_or_too_much_noise_say_nothing() -> None:
    assert "and 0 are recorded" in why_not([])
    assert "needs 12 periods of 5 minutes with work, and 11 are" in why_not(steps_of(11))
    idle = [used(0.0, 0.0, 0.0)] * 20
    assert "and 11 are" in why_not(steps_of(11) + idle), "idle steps say nothing"
    assert "the tokens do not explain the GPU time" in why_not(steps_of(30, noise=1.0))


def test_prompts_and_answers_of_the_same_ratio_cannot_be_told_apart() -> None:
    steps = []
    for step in steps_of(100, noise=0.02):
        steps.append(step._replace(generated_tokens=step.prompt_tokens / 10))
    assert why_not(steps) == "prompt and generated tokens always had the same ratio"


def test_a_pod_that_only_reads_prompts_has_one_kind() -> None:
    only_prompts = [step._replace(generated_tokens=0.0) for step in steps_of(50)]
    assert why_not(only_prompts) == "there were no generated tokens"
    only_answers = [step._replace(prompt_tokens=0.0) for step in steps_of(50)]
    assert why_not(only_answers) == "there were no prompt tokens"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("free", ["prompt", "generated"])
def test_a_kind_that_costs_nothing_is_not_shown(free: str, seed: int) -> None:
    """By chance, half of the estimates of its cost are above 0."""
    random = Random(seed)
    steps = []
    for step in steps_of(100, seed=seed):
        busy = (
            GENERATED * step.generated_tokens if free == "prompt" else PROMPT * step.prompt_tokens
        )
        steps.append(step._replace(busy_seconds=busy * random.gauss(1.0, 0.05)))
    assert "is not significant" in why_not(steps)


@given(st.integers(0, 10_000))
def test_random_work_is_never_explained_by_tokens(seed: int) -> None:
    """Both estimates would have to be four standard errors from 0, with a small residual."""
    random = Random(seed)
    steps = [
        used(random.expovariate(1.0), random.expovariate(1e-5), random.expovariate(1e-5))
        for _ in range(40)
    ]
    assert isinstance(fit_tokens(steps), NoFit)
